"""Tables and other parts of Markdown pages."""

import re
from collections.abc import Iterable, Sequence

PAGE = re.compile(r"docs/(reference/)?(([\w-]+\.md)(?:#[\w-]+)?)")


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; the cells are Markdown."""
    head, *body = ["| " + " | ".join(map(str, line)) + " |" for line in (columns, *rows)]
    return "\n".join([head, "|" + "---|" * len(columns), *body])


def code(text: object) -> str:
    """Return a text as a code span of a cell."""
    return f"`{text}`".replace("|", r"\|")


def cell(text: str) -> str:
    """Return a text from the code as a table cell; the names of pages become links."""
    return PAGE.sub(_link, text.replace("|", r"\|"))


def _link(page: re.Match[str]) -> str:
    """Return a link from a page in docs/reference/."""
    is_same_folder, target, name = page.groups()
    return f"[{name}]({target if is_same_folder else f'../{target}'})"
