"""Sphinx extension: the project's docstrings as reStructuredText.

Docstrings are written as plain text: an example is an indented block, and numbered rules are an
indented list after `Rules:`. reStructuredText would show both as quotations. Text in backticks may
be a name. If the name has a description, the text links to the description.
"""

import textwrap
from collections.abc import Iterator

from docutils.nodes import Element
from sphinx.application import Sphinx
from sphinx.domains.python import PyXRefRole
from sphinx.environment import BuildEnvironment

# The sections that `sphinx.ext.napoleon` converts.
SECTIONS = ("Args:", "Attributes:", "Raises:", "Returns:", "Yields:")
INDENT = "    "


def convert_lines(lines: list[str]) -> list[str]:
    """Return the lines of a docstring with examples as code and rules as a list."""
    result: list[str] = []
    for head, block in _blocks(lines):
        if not block or head in SECTIONS:
            result += [head, *block] if head is not None else block
        elif head is not None and head.startswith("Rules") and head.endswith(":"):
            result += [f"**{head.removesuffix(':')}**", "", *_dedented(block)]
        elif head == "" or head is None:
            text = _dedented(block)
            language = "python" if _is_python("\n".join(text)) else "text"
            result += ["", f".. code-block:: {language}", "", *(INDENT + line for line in text), ""]
        else:
            result += [head, *block]
    return result


def _blocks(lines: list[str]) -> Iterator[tuple[str | None, list[str]]]:
    """Yield each line without indentation, and the indented block that follows it."""
    head: str | None = None
    block: list[str] = []
    for line in lines:
        if line.startswith(" ") or (block and not line):
            block.append(line)
            continue
        if head is not None or block:
            yield head, block
        head, block = line, []
    if head is not None or block:
        yield head, block


def _dedented(block: list[str]) -> list[str]:
    return textwrap.dedent("\n".join(block)).splitlines()


def _is_python(text: str) -> bool:
    try:
        compile(text, "example", "exec")
    except SyntaxError:
        return False
    return True


class NameRole(PyXRefRole):
    """Sphinx's role for names, which shows leading dots, too: `.` would become nothing."""

    def process_link(
        self,
        env: BuildEnvironment,
        refnode: Element,
        has_explicit_title: bool,  # noqa: FBT001
        title: str,
        target: str,
    ) -> tuple[str, str]:
        """Return the text to show and the name to look for."""
        return title, super().process_link(env, refnode, has_explicit_title, title, target)[1]


def convert(
    _app: Sphinx, _kind: str, _name: str, _value: object, _options: object, lines: list[str]
) -> None:
    """Convert a docstring in place."""
    lines[:] = convert_lines(lines)


def setup(app: Sphinx) -> dict[str, bool]:
    """Convert each docstring before `sphinx.ext.napoleon` does."""
    app.add_role_to_domain("py", "obj", NameRole(), override=True)
    app.connect("autodoc-process-docstring", convert, priority=400)
    return {"parallel_read_safe": True}
