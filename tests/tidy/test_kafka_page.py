"""The page for Kafka users lists every Spark option of Waltz, and no other option."""

import re
from pathlib import Path

from waltz_spark.option_table import OPTIONS
from waltz_spark.options import CHANGE_COLUMN, ERROR_COLUMN, LOG_COLUMNS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "kafka.md"
CELL = re.compile(r"(?<!\\)\|")
NAME = re.compile(r"`([A-Za-z_]+)`")
# Columns of a write, and other names in the table's column for Waltz that are not options.
NOT_OPTIONS = {
    *LOG_COLUMNS,
    ERROR_COLUMN,
    CHANGE_COLUMN,
    *("write_locks", "read_locks", "append_locks", "client_high_water_mark"),
    *("LagListener", "endOffset"),
}


def our_names() -> set[str]:
    """Return the names in backticks in the second column of each table of options."""
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    cells = [CELL.split(row)[2] for row in rows if CELL.split(row)[1].strip()]
    return {name for cell in cells for name in NAME.findall(cell)}


def test_the_kafka_page_names_every_spark_option_and_no_unknown_option():
    options = {option.name for option in OPTIONS}
    assert options <= our_names() <= options | NOT_OPTIONS
