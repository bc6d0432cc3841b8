"""Every fenced block of a page is checked, by the language that it names.

Other tests run some blocks:

    docs/client.md, Python           tests/integration/test_client_docs.py
    docs/client.md, SQL              tests/fault/test_sql_instances.py
    docs/security.md, commands       tests/fault/test_security_page.py
    README.md, docs/spark.md, Python tests/spark/test_spark_docs.py
    docs/spark.md, SQL               tests/spark/test_sql.py
    docs/payload-schemas.md, Python  tests/spark/test_payload_schemas.py

`test_commands_page.py` checks the commands `waltz-core` in all blocks.
"""

import ast
import importlib
import importlib.util
import re
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from waltz_core.cli.client.followed_tables import TableOptions
from waltz_core.config import CONFIG_TYPES_BY_KIND
from waltz_core.errors import BadConfig
from waltz_spark.option_table import OPTIONS

ROOT = Path(__file__).resolve().parents[2]
# docs/site/ contains pages of the documentation site only; tests/site/ builds them.
PAGES = sorted(
    page
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
    if "docs/site" not in page.as_posix()
)
FENCE = re.compile(r"^(?P<indent> *)(?P<marks>```+|~~~+)(?P<language>[^\n`]*)\n", re.MULTILINE)
SQL_THAT_RUNS = ("docs/spark.md", "docs/client.md")
INSTRUCTIONS = frozenset({"FROM", "USER", "RUN", "ENV", "COPY", "WORKDIR", "ENTRYPOINT", "CMD"})
MAKE = re.compile(r"(?:`|^|(?<=\$ ))make ([a-z][a-z-]*)((?: [A-Z]+=[^\s`]*)*)", re.MULTILINE)
MODULE = re.compile(r"python -m (\w+(?:\.\w+)*)")
SCRIPT = re.compile(r"(?<![\w/.])(scripts/\w+)")
EXTRAS = re.compile(r"waltz-spark\[([\w,]+)\]")


class Block(NamedTuple):
    """A fenced block: its page, its first line there, its language and its text."""

    page: str
    line: int
    language: str
    text: str

    @property
    def location(self) -> str:
        """Where it is."""
        return f"{self.page}:{self.line}"


def blocks_of(page: str, text: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    start = 0
    while opening := FENCE.search(text, start):
        indent, marks = opening["indent"], opening["marks"]
        closing = re.compile(rf"^{indent}{marks}[`~]* *$", re.MULTILINE).search(text, opening.end())
        assert closing, f"{page}: a block has no end: {opening.group().strip()}"
        body = text[opening.end() : closing.start()]
        line = text.count("\n", 0, opening.end()) + 1
        yield Block(page, line, opening["language"].strip(), body)
        start = closing.end()


@cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


BLOCKS = [
    block for page in PAGES for block in blocks_of(page.relative_to(ROOT).as_posix(), text_of(page))
]


def faults_of_python(block: Block) -> Iterator[str]:
    """Yield syntax errors, and names that do not exist in the packages of this project."""
    try:
        tree = ast.parse(block.text)
    except SyntaxError as error:
        yield f"line {error.lineno}: {error.msg}"
        return
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (f"no module {each.name}" for each in names if not found(each.name))
            case ast.ImportFrom(module=str(module), names=names):
                yield from (
                    f"no {module}.{each.name}" for each in names if not found(module, each.name)
                )
            case ast.Attribute(value=ast.Name(id="waltz_spark"), attr=name):
                if not found("waltz_spark", name):
                    yield f"no waltz_spark.{name}"


def found(module: str, name: str | None = None) -> bool:
    """Return whether a module exists, or a name in it."""
    try:
        imported = importlib.import_module(module)
    except ImportError:
        return False
    return name is None or hasattr(imported, name) or found(f"{module}.{name}")


def faults_of_shell(block: Block) -> Iterator[str]:
    """Yield the syntax errors of a script."""
    run = subprocess.run(
        ["bash", "-n"], input=block.text, check=False, capture_output=True, text=True
    )
    yield from run.stderr.splitlines()


def faults_of_toml(block: Block) -> Iterator[str]:
    """Yield the syntax error, or each name that is not a setting of its table."""
    try:
        values = tomllib.loads(block.text)
    except tomllib.TOMLDecodeError as error:
        yield str(error)
        return
    if values and all(isinstance(value, dict) for value in values.values()):  # tables of `follow`
        names = {name for section in values.values() for name in section}
        yield from sorted(names - set(TableOptions._fields[1:]))
        return
    for kind in CONFIG_TYPES_BY_KIND.values():
        if values.keys() <= {field.name for field in fields(kind)}:
            try:
                kind(**values)
            except BadConfig as error:
                yield str(error)
            return
    yield f"no kind of process has all of these settings: {', '.join(values)}"


def faults_of_dockerfile(block: Block) -> Iterator[str]:
    """Yield each line that begins with no instruction."""
    lines = re.sub(r"\\\n", "", block.text).splitlines()
    yield from (line for line in lines if line.split(" ")[0] not in INSTRUCTIONS)


def faults_of_sql(block: Block) -> Iterator[str]:
    """Yield a block on a page whose statements no test executes."""
    if block.page not in SQL_THAT_RUNS:
        yield "no test executes it"


def no_faults(_block: Block) -> Iterator[str]:
    """Accept output and diagrams; the tests below check the commands in them."""
    yield from ()


CHECKS = {
    "": no_faults,
    "bash": faults_of_shell,
    "dockerfile": faults_of_dockerfile,
    "python": faults_of_python,
    "sql": faults_of_sql,
    "toml": faults_of_toml,
}


def faults(block: Block) -> list[str]:
    """Return the errors of a block, with its location."""
    check = CHECKS.get(block.language)
    if check is None:
        return [f"{block.location}: no test checks blocks of {block.language!r}"]
    return [f"{block.location}: {each}" for each in check(block)]


def test_every_fenced_block_is_valid():
    assert [fault for block in BLOCKS for fault in faults(block)] == []


def test_blocks_of_each_language_are_found():
    assert {block.language for block in BLOCKS} == set(CHECKS)
    assert len(BLOCKS) > 60


@pytest.mark.parametrize(
    ("language", "text", "fault"),
    [
        ("haskell", "main = pure ()", "no test checks blocks of 'haskell'"),
        ("python", "a = = 1", "line 1: invalid syntax"),
        ("python", "from waltz_core.client import Lock", "no waltz_core.client.Lock"),
        ("python", "import waltz_spark\nwaltz_spark.sesion('x')", "no waltz_spark.sesion"),
        ("python", "import waltz_score", "no module waltz_score"),
        ("toml", "port = ", "Invalid value (at line 1, column 8)"),
        ("toml", "port = 65536", "port: expected"),
        ("toml", "prot = 1", "no kind of process has all of these settings: prot"),
        ("dockerfile", "FORM x", "FORM x"),
        ("sql", "SELECT 1", "no test executes it"),
    ],
)
def test_faults_in_blocks_are_found(language: str, text: str, fault: str):
    (block,) = blocks_of("page", f"Text.\n\n```{language}\n{text}\n```\n")
    (message,) = faults(block)
    assert message.startswith(f"page:4: {fault}")


def test_a_syntax_error_of_a_script_is_found():
    (block,) = blocks_of("page", "```bash\nfor x in; do\n```\n")
    assert "syntax error" in faults(block)[0]


def test_a_block_inside_a_list_and_a_block_with_fences_are_found():
    text = "- a\n  ```toml\n  a = 1\n  ```\n\n````\n```python\n1 +\n```\n````\n"
    assert [block.language for block in blocks_of("page", text)] == ["toml", ""]


def test_pages_refer_only_to_existing_targets_modules_scripts_and_extras():
    missing = {page.name: missing_in(text_of(page)) for page in PAGES}
    assert {name: names for name, names in missing.items() if names} == {}


def missing_in(text: str) -> set[str]:
    """Return the names in a text that do not exist in the project."""
    makefile = text_of(ROOT / "Makefile")
    missing = set()
    for target, variables in MAKE.findall(text):
        names = re.findall(r"[A-Z]+(?==)", variables)
        if not re.search(rf"^{target}:", makefile, re.MULTILINE):
            missing.add(f"make {target}")
        missing.update(
            f"{name}=" for name in names if not re.search(rf"^{name} \?=", makefile, re.MULTILINE)
        )
    missing.update(name for name in MODULE.findall(text) if not is_module(name))
    missing.update(name for name in SCRIPT.findall(text) if not list(ROOT.glob(f"{name}*")))
    extras = {name for found in EXTRAS.findall(text) for name in found.split(",")}
    return missing | (extras - optional_dependencies())


@cache
def optional_dependencies() -> frozenset[str]:
    """Return the names of the project's extras."""
    project = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]
    return frozenset(project["optional-dependencies"])


@cache
def is_module(name: str) -> bool:
    """Return whether `python -m` finds a module."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("run `make tset`", {"make tset"}),
        ("make chaos SEAD=17", {"SEAD="}),
        ("python -m waltz_simm --seed 1", {"waltz_simm"}),
        ("`scripts/ruin x`", {"scripts/ruin"}),
        ("pip install 'waltz-spark[sparc,sql]'", {"sparc"}),
        ("they make sure; `make chaos SEED=17 ROUNDS=1`, python -m waltz_sim", set()),
    ],
)
def test_names_that_do_not_exist_are_found(text: str, missing: set[str]):
    assert missing_in(text) == missing


def test_options_of_spark_in_python_blocks_exist():
    known = {option.name for option in OPTIONS} | {"checkpointLocation"}
    named = {
        (block.location, name)
        for block in BLOCKS
        if block.language == "python"
        for name in re.findall(r"\.option\(\"(\w+)\"", block.text)
    }
    assert len(named) >= 4
    assert {each for each in named if each[1] not in known} == set()
