"""The table of scenarios has every row in order, and names tests that exist."""

import ast
import re
from functools import cache

from tests.tidy.sources import PROJECT_ROOT, fail_if_any, parse_source, sources_under
from waltz_sim.scenario import parse_scenarios

TABLE = PROJECT_ROOT / "docs" / "scenarios.md"
SCENARIOS = PROJECT_ROOT / "tests" / "sim" / "scenarios"
ROW_COUNT = 40
ROW = re.compile(r"^### (\d+)\. (.+)$", re.MULTILINE)
TEST = re.compile(r"^- `(tests/\S+\.py)::(test_\w+)`$")
SCENARIO = re.compile(r"^- (\w+): (.+)$")


def rows() -> dict[int, str]:
    """Return the text of each row of the table."""
    text = TABLE.read_text(encoding="utf-8")
    _, *parts = re.split(r"^### ", text, flags=re.MULTILINE)
    return {
        int(part.split(".", 1)[0]): re.split(r"^## ", part, flags=re.MULTILINE)[0] for part in parts
    }


@cache
def functions_of(path: str) -> frozenset[str]:
    """Return the names of the tests in a file; empty if the file does not exist."""
    if not (PROJECT_ROOT / path).is_file():
        return frozenset()
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in parse_source(path).nodes if isinstance(node, functions))


@cache
def titles_of(subject: str) -> frozenset[str]:
    """Return the titles of a file's scenarios."""
    path = SCENARIOS / f"{subject}.txt"
    if not path.is_file():
        return frozenset()
    return frozenset(
        scenario.title for scenario in parse_scenarios(path.read_text(encoding="utf-8"))[1]
    )


def test_every_row_is_listed_once_and_in_order():
    text = TABLE.read_text(encoding="utf-8")
    assert [int(number) for number, _ in ROW.findall(text)] == list(range(1, ROW_COUNT + 1))


def target_exists(line: str) -> bool:
    """Return whether a line of the table names a test or a scenario that exists."""
    test, scenario = TEST.match(line), SCENARIO.match(line)
    if test is not None:
        return test[2] in functions_of(test[1])
    return scenario is not None and scenario[2] in titles_of(scenario[1])


def test_each_row_refers_to_existing_tests():
    named = {
        number: [line for line in text.splitlines() if line.startswith("- ")]
        for number, text in rows().items()
    }
    fail_if_any(
        [f"row {each}" for each, lines in named.items() if not lines], "a row without a test"
    )
    missing = [line for lines in named.values() for line in lines if not target_exists(line)]
    fail_if_any(missing, "no test or scenario has this name")


def test_no_file_is_mapped_into_memory():
    mapping = [
        each.path
        for each in sources_under("waltz_core")
        if "mmap" in each.text or "memmap" in each.text or "memory_map" in each.text
        for node in each.nodes
        if (isinstance(node, ast.Import) and any(alias.name == "mmap" for alias in node.names))
        or (isinstance(node, ast.ImportFrom) and node.module == "mmap")
        or (isinstance(node, ast.Attribute) and node.attr in {"memmap", "memory_map"})
    ]
    assert not mapping
