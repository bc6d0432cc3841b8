"""The options of `format("waltz")`, from `waltz_spark/option_table.py`."""

from scripts.reference.markdown import cell, code, table
from waltz_spark.option_table import OPTIONS, OptionUse

# The kinds of reads that an option is for, as columns.
READS = {
    OptionUse.READ: ("yes", "yes"),
    OptionUse.BATCH: ("yes", "no"),
    OptionUse.STREAM: ("no", "yes"),
}


def tables() -> dict[str, str]:
    """Return the tables by use: options of reads and writes, of reads, and of writes."""
    reading = [
        (code(each.name), *READS[each.use], each.default, cell(each.text))
        for each in OPTIONS
        if each.use in READS
    ]
    return {
        "both": _table(OptionUse.BOTH),
        "reading": table(("option", "batch", "stream", "default", "meaning"), reading),
        "writing": _table(OptionUse.WRITE),
    }


def _table(use: OptionUse) -> str:
    rows = [(code(each.name), each.default, cell(each.text)) for each in OPTIONS if each.use is use]
    return table(("option", "default", "meaning"), rows)
