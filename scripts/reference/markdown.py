"""Tables and other parts of Markdown pages."""

import re
from collections.abc import Iterable, Sequence

PAGE = re.compile(r"docs/([\w-]+\.md)")


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; the cells are Markdown."""
    head, *body = ["| " + " | ".join(map(str, line)) + " |" for line in (columns, *rows)]
    return "\n".join([head, "|" + "---|" * len(columns), *body])


def code(text: object) -> str:
    """Return a text as a code span of a cell."""
    return f"`{text}`".replace("|", r"\|")


def cell(text: str) -> str:
    """Return a text of the code as a cell; pages that it names become links."""
    return PAGE.sub(r"[\1](../\1)", text.replace("|", r"\|"))
