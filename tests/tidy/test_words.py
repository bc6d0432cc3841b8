"""Words that readers have to translate into the terms of the field, and what to write instead.

They are looked for in everything a user or maintainer reads: documentation, samples, notebooks, and
the text of packages and tests with its strings, comments and names. STYLE.md describes how the
project writes.
"""

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

# In one worker, as they share what they have read.
pytestmark = pytest.mark.xdist_group("tidy")

ROOT = Path(__file__).resolve().parents[2]
# word, as a regular expression -> what to write instead
WORDS = {
    r"told|tells": "reports, returns, notifies, answers",
    r"whoever|whomever": "the client, the owner, the caller",
    r"nobody|somebody": "no client, another server",
    r"he|his|him|himself": "it, its",
    r"heard|unheard": "received, answered",
    r"anew": "again; rebuilt, recreated",
    r"beside": "next to, in addition to, compared with",
    r"mend|mends|mended|mending": "repair",
    r"vouch|vouches|vouched": "trusted, confirmed",
    r"believe|believes|believed": "trust, assume",
    r"goes on|gone on": "continues",
    r"lay down|laid down|lays down": "paused",
    r"gives up|give up|gave up|given up": "abandons, times out, releases",
    r"looks? away": "resets",
    r"for want of": "because there is no",
    r"in vain": "without a result",
    r"for ever": "permanently",
    r"contenders?": "contending writer",
}
# file -> word -> why it stays
KEPT = {"tests/postgres.py": {r"nobody|somebody": "a user of Unix systems"}}
THE_LIST = "tests/tidy/test_words.py"
READ = ("*.md", "*.py", "*.txt", "*.toml", "*.ipynb", "*.properties", "*.yml", "Makefile")
_PICTURE = re.compile(r'(?m)^ *"image/png": .*$')


@cache
def _texts() -> dict[str, str]:
    """Return what is read, by file; pictures in notebooks are left out."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *READ],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    names = [name for name in listed.stdout.decode().split("\0") if name]
    return {
        name: _PICTURE.sub("", (ROOT / name).read_text(encoding="utf-8"))
        for name in names
        if name != THE_LIST and (ROOT / name).exists()
    }


def _found(name: str, word: str) -> list[str]:
    # Words within names count, too: `is_told` has one.
    pattern = re.compile(rf"(?<![a-zA-Z])({word})(?![a-zA-Z])", re.IGNORECASE)
    text = _texts()[name]
    if not pattern.search(text):
        return []
    return [
        f"{name}:{number}: {line.strip():.100}"
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


@pytest.mark.parametrize("word", WORDS)
def test_texts_use_the_terms_of_the_field(word: str) -> None:
    found = [
        place for name in _texts() if word not in KEPT.get(name, {}) for place in _found(name, word)
    ]
    if found:
        lines = [f"write instead of {word!r}: {WORDS[word]}", *found]
        pytest.fail("\n".join(lines), pytrace=False)


def test_exceptions_are_needed() -> None:
    assert not [
        (name, word) for name, words in KEPT.items() for word in words if not _found(name, word)
    ]
