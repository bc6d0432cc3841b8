"""The table of scenarios names tests that exist, for every row; and what it says of files holds."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from waltz_sim.scenario import stories_in

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "scenarios.md"
STORIES = ROOT / "tests" / "sim" / "scenarios"
ROW_COUNT = 40
ROW = re.compile(r"^### (\d+)\. (.+)$", re.MULTILINE)
TEST = re.compile(r"^- `(tests/\S+\.py)::(test_\w+)`$")
STORY = re.compile(r"^- (\w+): (.+)$")


def rows() -> dict[int, str]:
    """Return the text of each row of the table."""
    text = TABLE.read_text(encoding="utf-8")
    _, *parts = re.split(r"^### ", text, flags=re.MULTILINE)
    return {
        int(part.split(".", 1)[0]): re.split(r"^## ", part, flags=re.MULTILINE)[0] for part in parts
    }


@cache
def functions_of(path: str) -> frozenset[str]:
    """Return the names of a file's tests; none where there is no such file."""
    if not (ROOT / path).is_file():
        return frozenset()
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, functions))


@cache
def titles_of(subject: str) -> frozenset[str]:
    """Return the titles of a file's stories."""
    path = STORIES / f"{subject}.txt"
    if not path.is_file():
        return frozenset()
    return frozenset(story.title for story in stories_in(path.read_text(encoding="utf-8"))[1])


def test_every_row_is_there_once_and_in_order():
    text = TABLE.read_text(encoding="utf-8")
    assert [int(number) for number, _ in ROW.findall(text)] == list(range(1, ROW_COUNT + 1))


@pytest.mark.parametrize("number", range(1, ROW_COUNT + 1))
def test_a_row_names_tests_that_exist(number: int):
    named = [line for line in rows()[number].splitlines() if line.startswith("- ")]
    missing = []
    for line in named:
        test, story = TEST.match(line), STORY.match(line)
        is_there = (test is not None and test[2] in functions_of(test[1])) or (
            story is not None and story[2] in titles_of(story[1])
        )
        if not is_there:
            missing.append(line)
    assert named, "a row without a test"
    assert not missing


def test_no_file_is_mapped_into_memory():
    texts = {path: path.read_text("utf-8") for path in sorted((ROOT / "waltz_core").rglob("*.py"))}
    mapping = [
        path.relative_to(ROOT).as_posix()
        for path, text in texts.items()
        if "mmap" in text or "memmap" in text or "memory_map" in text
        for node in ast.walk(ast.parse(text))
        if (isinstance(node, ast.Import) and any(each.name == "mmap" for each in node.names))
        or (isinstance(node, ast.ImportFrom) and node.module == "mmap")
        or (isinstance(node, ast.Attribute) and node.attr in {"memmap", "memory_map"})
    ]
    assert not mapping
