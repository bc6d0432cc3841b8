"""The page of the original's faults has all of them, each with tests that exist."""

import re
from pathlib import Path

import pytest

from tests.tidy.test_scenario_table import TEST, functions_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "original-faults.md"
LETTERS = "ABCDEFGHIJKLMNOPQRST"


def faults() -> dict[str, str]:
    """Return the text of each fault by its letter."""
    _, *parts = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {part.split(".", 1)[0]: part for part in parts}


def test_every_fault_is_there_once_and_in_order():
    titles = re.findall(r"^## (.)\. ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert titles == list(LETTERS)


@pytest.mark.parametrize("letter", LETTERS)
def test_a_fault_names_tests_that_exist(letter: str):
    named = [line for line in faults()[letter].splitlines() if line.startswith("- ")]
    assert named, "a fault without a test"
    for line in named:
        test = TEST.match(line)
        assert test is not None, line
        assert test[2] in functions_of(test[1]), line
