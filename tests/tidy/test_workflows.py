"""The files in `.github` can be parsed, and everything that they name exists."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted((GITHUB / "ISSUE_TEMPLATE").glob("*_*.yml"))
TARGETS = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8")))
MAKE = re.compile(r"\bmake ([a-z-]+)")
# A path as a command or a sentence names it.
PATH = re.compile(r"(?<![\w./-])((?:scripts|tests|docs|conf|examples)/[\w./-]*\w|[A-Z]+\.md)")
# A major version; `release/v1` is the version of an action without version tags.
PINNED = re.compile(r"[\w-]+/[\w-]+@(release/)?v\d+")


def steps(workflow: Path) -> Iterator[dict[str, object]]:
    for job in yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"].values():
        yield from job["steps"]


@pytest.mark.parametrize("file", sorted(GITHUB.rglob("*.*")), ids=lambda path: path.name)
def test_files_name_existing_targets_and_paths(file):
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".yml":
        assert isinstance(yaml.safe_load(text), dict)
    assert set(MAKE.findall(text)) <= TARGETS
    missing = [path for path in PATH.findall(text) if not (ROOT / path).exists()]
    assert missing == []


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_are_pinned_and_have_few_permissions(workflow):
    content = yaml.safe_load(workflow.read_text(encoding="utf-8"))
    assert content["permissions"] in ({}, {"contents": "read"})
    assert all("timeout-minutes" in job for job in content["jobs"].values())
    actions = [str(step["uses"]) for step in steps(workflow) if "uses" in step]
    assert actions
    assert [action for action in actions if not PINNED.fullmatch(action)] == []


def test_every_supported_python_is_checked():
    matrix = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text())["jobs"]["check"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    supported = re.findall(r":: (3\.\d+)", " ".join(project["classifiers"]))
    assert matrix["strategy"]["matrix"]["python"] == supported
    assert project["requires-python"] == f">={supported[0]}"


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_fields_of_an_issue_form_have_unique_labels_and_names(form):
    content = yaml.safe_load(form.read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= set(content)
    fields = [each for each in content["body"] if each["type"] != "markdown"]
    names = [field["id"] for field in fields]
    assert names
    assert len(set(names)) == len(names)
    assert all(field["attributes"]["label"] for field in fields)
