"""The options of `format("waltz")`, from `waltz_spark/option_table.py`."""

from scripts.reference.markdown import cell, code, table
from waltz_spark.option_table import OPTIONS, Purpose

# The kinds of reads that an option is for, as columns.
READ_CELLS = {
    Purpose.READ: ("yes", "yes"),
    Purpose.BATCH: ("yes", "no"),
    Purpose.STREAM: ("no", "yes"),
}


def tables() -> dict[str, str]:
    """Return three tables of options: for reads and writes, only for reads, only for writes."""
    read_rows = [
        (code(option.name), *READ_CELLS[option.purpose], option.default, cell(option.description))
        for option in OPTIONS
        if option.purpose in READ_CELLS
    ]
    return {
        "both": _table(Purpose.BOTH),
        "reading": table(("option", "batch", "stream", "default", "meaning"), read_rows),
        "writing": _table(Purpose.WRITE),
    }


def _table(use: Purpose) -> str:
    rows = [
        (code(option.name), option.default, cell(option.description))
        for option in OPTIONS
        if option.purpose is use
    ]
    return table(("option", "default", "meaning"), rows)
