"""The options of `format("waltz")`, from `waltz_spark/option_table.py`."""

from scripts.reference.markdown import cell, code, table
from waltz_spark.option_table import OPTIONS, Purpose

# The kinds of reads that an option is for, as columns.
READS = {
    Purpose.READ: ("yes", "yes"),
    Purpose.BATCH: ("yes", "no"),
    Purpose.STREAM: ("no", "yes"),
}


def tables() -> dict[str, str]:
    """Return the tables by use: options of reads and writes, of reads, and of writes."""
    read_rows = [
        (code(each.name), *READS[each.purpose], each.default, cell(each.description))
        for each in OPTIONS
        if each.purpose in READS
    ]
    return {
        "both": _table(Purpose.BOTH),
        "reading": table(("option", "batch", "stream", "default", "meaning"), read_rows),
        "writing": _table(Purpose.WRITE),
    }


def _table(use: Purpose) -> str:
    rows = [
        (code(each.name), each.default, cell(each.description))
        for each in OPTIONS
        if each.purpose is use
    ]
    return table(("option", "default", "meaning"), rows)
