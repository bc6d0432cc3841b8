"""A release has a version, a section in the changelog, and documented public modules."""

import ast
import json
import re
import runpy
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from waltz_core import __version__

ROOT = Path(__file__).resolve().parents[2]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
RELEASE_NOTES = runpy.run_path(str(ROOT / "scripts" / "release_notes.py"))
AUDIENCES = {"Safety", "Client", "Spark", "Operators", "Compatibility", "Performance"}
KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed"]


def entries() -> list[str]:
    return re.findall(r"(?ms)^- \*\*.*?(?=^- |^#|^$|\Z)", CHANGELOG)


def test_the_newest_section_of_the_changelog_has_the_current_version():
    title = re.search(r"(?m)^## (.*)", CHANGELOG)
    assert title is not None
    release, is_development = re.subn(r"\.dev\d+$", "", __version__)
    date = "unreleased" if is_development else r"\d{4}-\d\d-\d\d"
    assert re.fullmatch(rf"{re.escape(release)} \({date}\)", title[1])


def test_the_notes_of_a_release_are_its_section_with_joined_lines():
    text = "# C\n\n## 2.1 (2030-01-02)\n\nNew:\n\n- a\n  b\n- c\n\n### Fixed\n\n- d\n\n## 2.0 (x)\n"
    notes = RELEASE_NOTES["notes"]
    assert notes(text, "2.1") == "New:\n\n- a b\n- c\n\n### Fixed\n\n- d"
    with pytest.raises(ValueError, match=r"expected a section '## 2\.0 "):
        notes(text, "2.0")


def test_a_tag_of_another_version_is_rejected(capsys):
    assert RELEASE_NOTES["main"](["v0.0.1"]) == 1
    assert capsys.readouterr().err == f"expected the tag v{__version__}, found v0.0.1\n"


def test_changes_have_a_known_kind_and_audience_and_are_listed_once():
    assert set(re.findall(r"(?m)^### (.*)", CHANGELOG)) <= set(KINDS)
    # Changes that only contributors notice are in the log of commits.
    assert [entry for entry in entries() if entry.split("**")[1].rstrip(":") not in AUDIENCES] == []
    assert [entry for entry, count in Counter(entries()).items() if count > 1] == []


def imported_modules() -> Iterator[tuple[str, str]]:
    """Yield the modules of the product that documentation, examples and notebooks import."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    for page in pages:
        for snippet in re.findall(r"(?ms)^```python\n(.*?)^```", page.read_text(encoding="utf-8")):
            for module in re.findall(r"(?m)^\s*(?:from|import) (waltz_[\w.]+)", snippet):
                yield page.name, module
    for notebook in (ROOT / "examples").rglob("*.ipynb"):
        for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
            for module in re.findall(
                r"(?m)^\s*(?:from|import) (waltz_[\w.]+)", "".join(cell["source"])
            ):
                yield notebook.name, module
    for example in (ROOT / "examples").rglob("*.py"):
        for node in ast.walk(ast.parse(example.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("waltz_"):
                yield example.name, str(node.module)


def test_documentation_and_examples_import_public_modules_only():
    page = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    public = set(re.findall(r"(?m)^\| `(waltz_[\w.]+)` \|", page))
    assert all(find_spec(module) for module in public)
    assert len(public) > 5
    found = set(imported_modules())
    assert [each for each in found if each[1] not in {*public, "waltz_core"}] == []
    assert public <= {module for _, module in found}
