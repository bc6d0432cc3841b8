"""The page of known defects of 0.13 is complete, and names tests that exist."""

import re

from tests.tidy.sources import fail_if_any, read_text
from tests.tidy.test_scenario_table import TEST, functions_of

PAGE = "docs/original-faults.md"
LETTERS = "ABCDEFGHIJKLMNOPQRST"


def faults() -> dict[str, str]:
    """Return the text of each fault by its letter."""
    _, *parts = re.split(r"^## ", read_text(PAGE), flags=re.MULTILINE)
    return {part.split(".", 1)[0]: part for part in parts}


def test_every_fault_is_listed_once_and_in_order():
    titles = re.findall(r"^## (.)\. ", read_text(PAGE), flags=re.MULTILINE)
    assert titles == list(LETTERS)


def test_each_fault_refers_to_existing_tests():
    named = {
        letter: [line for line in text.splitlines() if line.startswith("- ")]
        for letter, text in faults().items()
    }
    fail_if_any([each for each, lines in named.items() if not lines], "a fault without a test")
    missing = [
        line
        for lines in named.values()
        for line in lines
        if not (test := TEST.match(line)) or test[2] not in functions_of(test[1])
    ]
    fail_if_any(missing, "no test has this name")
