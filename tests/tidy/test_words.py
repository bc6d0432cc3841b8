"""Words that the project does not use, and their replacements.

The test searches all texts for users and maintainers: documentation, samples, notebooks, and the
strings, comments and names in packages and tests. STYLE.md describes how the project writes.
"""

import re
from functools import cache
from pathlib import PurePath

from tests.tidy.sources import fail_if_any, read_text, tracked_files

# words -> their replacement
WORDS = {
    "told|tells": "reports, returns, notifies, answers",
    "whoever|whomever": "the client, the owner, the caller",
    "nobody|somebody": "no client, another server",
    "he|his|him|himself": "it, its",
    "heard|unheard": "received, answered",
    "anew": "again; rebuilt, recreated",
    "beside": "next to, in addition to, compared with",
    "mend|mends|mended|mending": "repair",
    "vouch|vouches|vouched": "trusted, confirmed",
    "believe|believes|believed": "trust, assume",
    "goes on|gone on": "continues",
    "lay down|laid down|lays down": "paused",
    "gives up|give up|gave up|given up": "abandons, times out, releases",
    "look away|looks away": "resets",
    "for want of": "because there is no",
    "in vain": "without a result",
    "for ever": "permanently",
    "contender|contenders": "contending writer",
    "younger than": "taken after, later than",
}
# file -> word -> why it stays
EXCEPTIONS = {"tests/postgres.py": {"nobody|somebody": "a user of Unix systems"}}
THE_LIST = "tests/tidy/test_words.py"
READ = (".md", ".py", ".txt", ".toml", ".ipynb", ".properties", ".yml")
_PICTURE = re.compile(r'(?m)^ *"image/png": .*$')
_WORD = re.compile("[a-z]+")


@cache
def _texts() -> dict[str, str]:
    """Return the texts to check, by file, without pictures in notebooks."""
    names = (
        tracked_file
        for tracked_file in tracked_files()
        if PurePath(tracked_file).suffix in READ or tracked_file == "Makefile"
    )
    return {name: _PICTURE.sub("", read_text(name)) for name in names if name != THE_LIST}


def _found(name: str, words: str) -> list[str]:
    # Words within names are found, too, as in `is_told`.
    pattern = re.compile(rf"(?<![a-zA-Z])({words})(?![a-zA-Z])", re.IGNORECASE)
    return [
        f"{name}:{number}: {line.strip():.100}"
        for number, line in enumerate(_texts()[name].splitlines(), 1)
        if pattern.search(line)
    ]


def test_texts_use_the_terms_of_the_field() -> None:
    """The test collects the words of a file first: a search for each pattern takes longer."""
    for name, text in _texts().items():
        lower = text.lower()
        words_of_text = set(_WORD.findall(lower))
        for words, better in WORDS.items():
            if words not in EXCEPTIONS.get(name, {}) and any(
                each.split()[0] in words_of_text and each in lower for each in words.split("|")
            ):
                fail_if_any(_found(name, words), f"write instead of {words!r}: {better}")


def test_every_listed_exception_still_occurs() -> None:
    assert not [
        (name, words)
        for name, exceptions in EXCEPTIONS.items()
        for words in exceptions
        if not _found(name, words)
    ]
