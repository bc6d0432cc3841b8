"""What commands print: aligned tables for people, JSON for programs.

Rules:
    1. Results go to standard output, everything else to standard error.
    2. `--json` prints one JSON value and nothing else on standard output.
"""

import json
import sys
from collections.abc import Sequence


def say(text: str) -> None:
    """Print a line for people on standard error, at once."""
    print(text, file=sys.stderr, flush=True)


def show(text: str) -> None:
    """Print a result line on standard output, at once."""
    print(text, flush=True)


def show_json(value: object) -> None:
    """Print one JSON value on one line."""
    show(json.dumps(value, sort_keys=False, default=str))


def show_table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows under titles; numbers to the right, text to the left."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [
        max([len(title), *(len(row[index]) for row in texts)]) for index, title in enumerate(titles)
    ]
    right = [
        bool(rows) and all(isinstance(row[index], int | float) for row in rows)
        for index in range(len(titles))
    ]
    for cells in [list(titles), *texts]:
        padded = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(cells, widths, right, strict=True)
        ]
        show("  ".join(padded).rstrip())


def ranges_of(numbers: list[int]) -> str:
    """Return rising numbers as commands take them, "0-6,9"; "-" for none."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][-1] + 1 == number:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts) or "-"
