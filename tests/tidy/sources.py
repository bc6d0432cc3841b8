"""The files of the project, each read and parsed once for all tests of this folder."""

import ast
import gc
import subprocess
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

PROJECT_ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("waltz_core", "waltz_spark", "waltz_sim", "waltz_bench")


class SourceFile(NamedTuple):
    """One file of Python, with all nodes of its tree, outer ones first."""

    path: str
    text: str
    tree: ast.Module
    nodes: tuple[ast.AST, ...]


@cache
def parse_source(path: str) -> SourceFile:
    """Return a file of Python."""
    text = read_text(path)
    gc.disable()  # otherwise the collector examines a million nodes again and again
    tree = ast.parse(text)
    found = SourceFile(path, text, tree, tuple(ast.walk(tree)))
    gc.freeze()
    gc.enable()
    return found


@cache
def sources_under(*folders: str) -> tuple[SourceFile, ...]:
    """Return every Python file under some folders, in order."""
    paths = sorted(path for folder in folders for path in (PROJECT_ROOT / folder).rglob("*.py"))
    return tuple(parse_source(path.relative_to(PROJECT_ROOT).as_posix()) for path in paths)


def product_sources() -> tuple[SourceFile, ...]:
    """Return the files that are installed."""
    return sources_under(*PACKAGES)


def sources_of_tests() -> tuple[SourceFile, ...]:
    """Return the files of the tests."""
    return sources_under("tests")


@cache
def tracked_files() -> tuple[str, ...]:
    """Return every file that belongs to the project."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=PROJECT_ROOT,
        capture_output=True,
        check=True,
    )
    names = listed.stdout.decode().split("\0")
    return tuple(sorted(name for name in names if name and (PROJECT_ROOT / name).is_file()))


def hand_written_files() -> list[str]:
    """Return the files that people write: code, pages, settings, scripts."""
    return [
        name
        for name in tracked_files()
        if name.endswith((".py", ".md", ".toml", "Makefile")) or name.startswith("scripts/")
    ]


@cache
def read_text(name: str) -> str:
    """Return the text of a file, without bytes that are not text, such as pictures."""
    return (PROJECT_ROOT / name).read_bytes().decode("utf-8", errors="ignore")


def fail_if_any(found: Collection[str], rule: str) -> None:
    """Fail with the rule, and with the locations that break it."""
    if found:
        pytest.fail("\n".join([f"{rule}:", *sorted(found)]), pytrace=False)
