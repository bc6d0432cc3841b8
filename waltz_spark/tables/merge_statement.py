"""The `MERGE` of changes into a table, in the SQL that Delta and Iceberg have in common.

Rules:
    1. A table has the declared columns, and two columns for the position of the last change of the
       row: `_partition` and `_transaction_id`. Iceberg reserves the first name, so Iceberg tables
       use another name.
    2. If a key has changes in two partitions, the statement fails. The message begins with
       `TWO_PARTITIONS_PREFIX`.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from pyspark.sql.types import IntegerType, LongType, StructField, StructType

from waltz_core.errors import BadConfig
from waltz_core.tables.inferred_columns import LOG_COLUMNS
from waltz_core.tables.row_changes import DELETED_COLUMN
from waltz_spark.tables.spark_errors import TWO_PARTITIONS_PREFIX


class PositionColumns(NamedTuple):
    """The names of a table's columns for the position of the last change (rule 1)."""

    partition: str = "_partition"
    transaction_id: str = "_transaction_id"

    def fields(self) -> list[StructField]:
        """Return the two columns with their types."""
        types = (IntegerType(), LongType())
        return [StructField(name, kind) for name, kind in zip(self, types, strict=True)]


POSITION_COLUMNS = PositionColumns()
# A name in backticks may contain any character.
_NAME_PART = re.compile(r"`(?:[^`]|``)+`|\w+")
_TABLE_NAME = re.compile(rf"(?:{_NAME_PART.pattern})(?:\.(?:{_NAME_PART.pattern}))*")


def merge_actions(
    columns: Sequence[str], key: Sequence[str], position: PositionColumns = POSITION_COLUMNS
) -> str:
    """Return the text after `MERGE INTO ... AS target USING ... AS source ON`.

    Args:
        columns: the columns of the changes, without the position columns and `_deleted`.
        key: the key columns.
        position: the names of the position columns in the table.
    """
    names = {quote_identifier(name): f"source.{quote_identifier(name)}" for name in columns}
    names |= {
        quote_identifier(name): f"source.{column}" for column, name in position._asdict().items()
    }
    is_key = (f"target.{each} = source.{each}" for each in map(quote_identifier, key))
    return (  # names are quoted
        f"{' AND '.join(is_key)} "  # noqa: S608
        f"WHEN MATCHED AND {_delete_condition(f'source.{DELETED_COLUMN}', key, position)} "
        "THEN DELETE "
        f"WHEN MATCHED THEN UPDATE SET {', '.join(f'{a} = {b}' for a, b in names.items())} "
        f"WHEN NOT MATCHED AND NOT source.{DELETED_COLUMN} THEN "
        f"INSERT ({', '.join(names)}) VALUES ({', '.join(names.values())})"
    )


def _delete_condition(is_deleted: str, key: Sequence[str], position: PositionColumns) -> str:
    """Return condition `is_deleted`, which fails for a row of another partition (rule 2)."""
    key_texts = ", ', ', ".join(f"CAST(source.{quote_identifier(name)} AS STRING)" for name in key)
    positions = ", ' and ', ".join(
        f"'partition ', {partition}, ', transaction ', {transaction}"
        for partition, transaction in (
            (f"target.{position.partition}", f"target.{position.transaction_id}"),
            ("source.partition", "source.transaction_id"),
        )
    )
    return (
        f"CASE WHEN target.{position.partition} <> source.partition THEN CAST(raise_error(concat("
        f"'{TWO_PARTITIONS_PREFIX}(', {key_texts}, ') has changes in two partitions, ', "
        f"{positions}, "
        f"'.')) AS BOOLEAN) ELSE {is_deleted} END"
    )


def check_column_names(
    schema: StructType, key: Sequence[str], reserved: Collection[str] = POSITION_COLUMNS
) -> None:
    """Reject a schema that lacks a key column or has a reserved name, ignoring case.

    Key columns with a collation are rejected, too: a task compares texts by their bytes, but Spark
    would not.

    Args:
        schema: the declared columns.
        key: the key columns.
        reserved: names that the table uses, or that its format reserves.

    Raises:
        BadConfig: the error names the column.
    """
    if missing := [name for name in key if name not in schema.names]:
        raise BadConfig(
            f"key: expected columns of the table, found {missing[0]!r}. Hint: declare this column, "
            "or correct the key."
        )
    for name in key:
        kind = schema[name].dataType.simpleString()
        if kind.startswith("string collate"):
            raise BadConfig(
                f"key column {name!r}: expected text without a collation, found {kind}. Hint: "
                "declare it as string."
            )
    # A column of the log may be declared. The `MERGE` distinguishes it from the position columns.
    log = [name for name in LOG_COLUMNS if name not in schema.names]
    reserved_names = {*reserved, *log, DELETED_COLUMN}
    names_by_lower = {name: name for name in reserved_names}
    for name in schema.names:
        if name.lower() in names_by_lower:
            raise BadConfig(
                f"column {name!r}: the name {names_by_lower[name.lower()]!r} is already used, and "
                "the table does not distinguish upper and lower case. Reserved names are "
                f"{', '.join(sorted(reserved_names))}. Hint: rename the column in the declared "
                "schema."
            )
        names_by_lower[name.lower()] = name


def check_table_columns(
    table: str, table_schema: StructType, declared_columns: Iterable[StructField]
) -> None:
    """Check that all columns of a table are declared with their types.

    Raises:
        BadConfig: the error names the table and the column.
    """
    types = {part.name: part.dataType.simpleString() for part in declared_columns}
    for part in table_schema:
        if part.name not in types:
            raise BadConfig(
                f"table {table}: column {part.name!r} of the table is not declared. Hint: declare "
                "all columns of the table."
            )
        kind = part.dataType.simpleString()
        if kind != types[part.name]:
            raise BadConfig(
                f"table {table}: column {part.name!r} has type {kind} in the table, but is "
                f"declared as {types[part.name]}. Hint: declare it as {kind}. Before you "
                "declare new fields of a struct, add them to the table: ALTER TABLE ... ADD COLUMN."
            )


def split_table_name(text: str) -> list[str]:
    """Split the name of a table in SQL, without quotes; return no parts if it is not a name."""
    if _TABLE_NAME.fullmatch(text) is None:
        return []
    parts = _NAME_PART.findall(text)
    return [part[1:-1].replace("``", "`") if part.startswith("`") else part for part in parts]


def quote_identifier(name: str) -> str:
    """Return a name as a quoted SQL identifier."""
    escaped = name.replace("`", "``")
    return f"`{escaped}`"
