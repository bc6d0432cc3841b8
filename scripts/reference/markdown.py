"""Tables and other parts of Markdown pages."""

from collections.abc import Iterable, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; the cells are Markdown."""
    head, *body = ["| " + " | ".join(map(str, line)) + " |" for line in (columns, *rows)]
    return "\n".join([head, "|" + "---|" * len(columns), *body])


def code(text: object) -> str:
    """Return a text as a code span of a cell."""
    return f"`{text}`".replace("|", r"\|")


def cell(text: str) -> str:
    """Return plain text as a cell."""
    return text.replace("|", r"\|").replace("<", "&lt;")
