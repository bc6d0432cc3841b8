"""Stored rules of another follower of an Iceberg table; parsing of names and errors."""

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import Row
from pyspark.sql.types import LongType, StructField, StructType

from waltz_core.errors import BadConfig, BadRequest, Superseded, Unavailable
from waltz_core.tables.table_marks import StoredRules, TableMarks, encode_marks
from waltz_spark.tables import iceberg_table, merged_table
from waltz_spark.tables.merge_statement import split_table_name
from waltz_spark.tables.spark_errors import DELTA, TWO_PARTITIONS_PREFIX, translate_errors

NAME = TableMarks("follow", "0" * 32, {0: 5}, StoredRules(key=("id",)))
OTHER = NAME._replace(follower="other", rules=StoredRules(key=("id",), headers=(3,)))
ID = StructType([StructField("id", LongType())])


def snapshot(number: int, marks: TableMarks | None) -> Row:
    metadata = None if marks is None else encode_marks(marks)
    return Row(
        snapshot_id=number, parent_id=number - 1, operation="append", marks=metadata, rows="1"
    )


def test_a_new_follower_of_an_iceberg_table_gets_the_rules_of_the_newest_follower():
    older = OTHER._replace(follower="older", rules=StoredRules(key=("other",)))
    snapshots = [snapshot(3, None), snapshot(2, OTHER), snapshot(1, older)]
    state = iceberg_table._state_of(snapshots, 3, NAME)
    assert (state.metadata, state.has_rows, state.rules) == (None, True, OTHER.rules)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("accounts", ["accounts"]),
        ("lake.shop.accounts_2", ["lake", "shop", "accounts_2"]),
        ("lake.`a b`.`c.``d```", ["lake", "a b", "c.`d`"]),
        ("a b", []),
        ("shop.a-b", []),
        ("shop.", []),
        ("", []),
    ],
)
def test_a_table_name_is_split_into_its_parts(text: str, parts: list[str]):
    assert split_table_name(text) == parts


def test_the_error_names_a_table_name_that_sql_does_not_accept():
    """Spark without Delta also rejects the statement, with another error."""
    with pytest.raises(BadConfig, match=r"or the name of a table, found 'a b'. Hint: .* backticks"):
        merged_table.MergedDeltaTable(None, "a b", ID, ["id"])


VIOLATED = (
    "[DELTA_VIOLATE_CONSTRAINT_WITH_VALUES] CHECK constraint short (length(text) < 9) violated by "
    "row with values:\n - text : "
)


@pytest.mark.parametrize(
    "value",
    [
        "SlowDown",
        "[DELTA_CONCURRENT_APPEND]",
        "NoSuchMethodError",
        f"{TWO_PARTITIONS_PREFIX}(1) has changes .",
    ],
)
def test_text_in_a_row_is_not_taken_for_an_error_class(value: str):
    with pytest.raises(PySparkException, match="DELTA_VIOLATE"), translate_errors("table t", None):
        raise PySparkException(VIOLATED + value)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Ref does not exist: waltz_0", Superseded),
        ("Found conflicting files that can contain records matching true: [a]", Superseded),
        ("Cannot fast-forward: main is not an ancestor of waltz_0", Superseded),
        ("ExecutorLostFailure (executor 1 exited caused by one of the running tasks)", Unavailable),
        ("Caused by: java.net.ConnectException: Connection refused", Unavailable),
        (f"{TWO_PARTITIONS_PREFIX}(7) has changes in two partitions, 0 and 1.", BadRequest),
    ],
)
def test_errors_of_spark_and_table_formats_are_classified(text: str, kind: type[Exception]):
    with pytest.raises(kind, match=r"^table t: "), translate_errors("table t", None):
        raise PySparkException(text)


def test_the_hint_names_the_page_with_the_settings():
    assert "docs/spark-tables.md has the settings" in DELTA.hint
