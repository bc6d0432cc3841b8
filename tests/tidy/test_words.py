"""Words that the project does not use, and their replacements.

They are looked for in everything a user or maintainer reads: documentation, samples, notebooks, and
the text of packages and tests with its strings, comments and names. STYLE.md describes how the
project writes.
"""

import re
from functools import cache
from pathlib import PurePath

from tests.tidy.sources import fail_if_any, read_text, tracked_files

# words -> what to write instead
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
KEPT = {"tests/postgres.py": {"nobody|somebody": "a user of Unix systems"}}
THE_LIST = "tests/tidy/test_words.py"
READ = (".md", ".py", ".txt", ".toml", ".ipynb", ".properties", ".yml")
_PICTURE = re.compile(r'(?m)^ *"image/png": .*$')
_WORD = re.compile("[a-z]+")


@cache
def _texts() -> dict[str, str]:
    """Return what is read, by file; pictures in notebooks are left out."""
    names = (
        each for each in tracked_files() if PurePath(each).suffix in READ or each == "Makefile"
    )
    return {name: _PICTURE.sub("", read_text(name)) for name in names if name != THE_LIST}


def _found(name: str, words: str) -> list[str]:
    # Words within names count, too: `is_told` has one.
    pattern = re.compile(rf"(?<![a-zA-Z])({words})(?![a-zA-Z])", re.IGNORECASE)
    return [
        f"{name}:{number}: {line.strip():.100}"
        for number, line in enumerate(_texts()[name].splitlines(), 1)
        if pattern.search(line)
    ]


def test_texts_use_the_terms_of_the_field() -> None:
    """A search for each pattern takes far longer than a look at the words that a file has."""
    for name, text in _texts().items():
        lower = text.lower()
        there = set(_WORD.findall(lower))
        for words, better in WORDS.items():
            if words not in KEPT.get(name, {}) and any(
                each.split()[0] in there and each in lower for each in words.split("|")
            ):
                fail_if_any(_found(name, words), f"write instead of {words!r}: {better}")


def test_exceptions_are_needed() -> None:
    assert not [
        (name, words) for name, kept in KEPT.items() for words in kept if not _found(name, words)
    ]
