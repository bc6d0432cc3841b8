"""Prints the results of commands, as tables for people or as JSON for programs.

Rules:
    1. Results go to standard output, everything else to standard error.
    2. `--json` prints one JSON value and nothing else on standard output.
    3. On a terminal, rich draws tables, with states in color unless $NO_COLOR is set. Other outputs
       get the same rows as aligned text, and rich is not imported.
"""

import datetime
import json
import sys
from collections.abc import Sequence

# The text of a cell, and its style on a terminal.
_CELL_STYLES = {
    **dict.fromkeys(("ok", "up", "online", "reached", "done", "valid", "yes"), "green"),
    **dict.fromkeys(("FAILED", "NOT REACHED", "down", "no", "NO", "no answer", "damaged"), "red"),
    **dict.fromkeys(("offline", "suspect", "not served", "not held"), "yellow"),
}


def print_error(text: str) -> None:
    """Print a message for people on standard error, without buffering."""
    print(text, file=sys.stderr, flush=True)


def print_result(text: str) -> None:
    """Print a line of the result on standard output, without buffering."""
    print(text, flush=True)


def print_json(value: object) -> None:
    """Print one JSON value on one line."""
    print_result(json.dumps(value, sort_keys=False, default=str))


def to_one_line(data: bytes) -> str:
    """Decode UTF-8 as one line; escape invalid bytes and unprintable characters.

    Therefore data from a log can neither send control sequences to the terminal, nor look like
    another row.
    """
    text = data.decode("utf-8", "backslashreplace")
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


def time_text(at_ms: int) -> str:
    """Return a time, given in milliseconds since 1970 (UTC), as ISO 8601 text."""
    try:
        time = datetime.datetime.fromtimestamp(at_ms / 1000, datetime.UTC)
    except (OverflowError, ValueError):  # after the year 9999: a damaged znode
        return f"{at_ms} ms"
    return time.isoformat(timespec="seconds").replace("+00:00", "Z")


def print_table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows under titles; numbers are aligned to the right, text to the left (rule 3)."""
    texts = [[str(cell) for cell in row] for row in rows]
    is_number_column = [
        bool(rows) and all(isinstance(row[index], int | float) for row in rows)
        for index in range(len(titles))
    ]
    if sys.stdout.isatty():
        _draw_table(titles, texts, is_number_column)
        return
    widths = [
        max([len(title), *(len(row[index]) for row in texts)]) for index, title in enumerate(titles)
    ]
    for cells in [list(titles), *texts]:
        padded_cells = [
            cell.rjust(width) if is_number else cell.ljust(width)
            for cell, width, is_number in zip(cells, widths, is_number_column, strict=True)
        ]
        print_result("  ".join(padded_cells).rstrip())


def _draw_table(
    titles: Sequence[str], texts: Sequence[Sequence[str]], is_number_column: Sequence[bool]
) -> None:
    from rich.console import Console  # noqa: PLC0415 - for terminals only
    from rich.table import Table  # noqa: PLC0415 - as above
    from rich.text import Text  # noqa: PLC0415 - as above

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title, is_number in zip(titles, is_number_column, strict=True):
        table.add_column(Text(title), justify="right" if is_number else "left", overflow="fold")
    for row in texts:
        table.add_row(*(Text(cell, style=_CELL_STYLES.get(cell, "")) for cell in row))
    Console().print(table)
