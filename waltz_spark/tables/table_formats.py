"""The formats of tables, and the choice of the format for a table."""

from typing import Literal, TypeAlias, get_args

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from waltz_core.errors import BadConfig
from waltz_core.tables.row_changes import ChangeRules
from waltz_spark.tables.iceberg_table import MergedIcebergTable
from waltz_spark.tables.merged_table import MergedDeltaTable
from waltz_spark.tables.parquet_files import SparkParquetTable

TableFormat: TypeAlias = Literal["delta", "iceberg", "parquet"]
# The formats of tables that have a row for each key.
MergedTable: TypeAlias = MergedDeltaTable | MergedIcebergTable


def open_table(
    session: SparkSession,
    name: str,
    given: TableFormat | None,
    schema: StructType | None,
    rules: ChangeRules,
) -> MergedTable | SparkParquetTable:
    """Open a table of a follower.

    Args:
        session: a session for this table only.
        name: the name of the table, or its path or URL, which contains a slash.
        given: the format of a new table; None: Delta. For an existing table with a name, its own
            format counts.
        schema: the declared columns; None: columns are found in the payloads (Delta only).
        rules: how transactions become changes.

    Raises:
        BadConfig: the format is unknown or not the format of the table, or an argument does not fit
            the format.
    """
    if given not in (None, *get_args(TableFormat)):
        raise BadConfig(
            f"format: expected one of {', '.join(get_args(TableFormat))}, found {given!r}"
        )
    is_path = "/" in name
    if is_path != (given == "parquet") and given in ("iceberg", "parquet"):
        expected = "a path or a URL" if given == "parquet" else "a name"
        raise BadConfig(f"expected {expected} of a table with format {given}, found {name!r}")
    found = None if is_path else _stored_format(session, name)
    if None not in (found, given) and found != given:
        raise BadConfig(f"table {name}: expected format {given}, found {found}")
    chosen = found or given or "delta"
    if chosen != "parquet" and not rules.key:
        raise BadConfig(f"key: expected one or more columns for format {chosen}, found none")
    if chosen == "delta":
        return MergedDeltaTable(session, name, schema, rules.key)
    if schema is None:
        raise BadConfig(
            f"expected a schema for a table with format {chosen}, found none. Hint: declare the "
            "columns; they are found for Delta tables only."
        )
    if chosen == "parquet":
        return SparkParquetTable(name, schema, rules)
    return MergedIcebergTable(session, name, schema, rules.key)


def open_merged_table(
    session: SparkSession,
    name: str,
    given: TableFormat | None,
    schema: StructType,
    rules: ChangeRules,
) -> MergedTable:
    """Open a table that has a row for each key; errors as for `open_table`."""
    found = open_table(session, name, given, schema, rules)
    if isinstance(found, SparkParquetTable):
        raise BadConfig("upsert: expected a table with format delta or iceberg, found parquet")
    return found


def _stored_format(session: SparkSession, name: str) -> str | None:
    """Return the format of a table; None if the table does not exist, or its catalog fails."""
    try:
        rows = session.sql(f"DESCRIBE TABLE EXTENDED {name}").collect()
    except PySparkException:
        return None  # opening the table reports the error
    found = [row["data_type"] for row in rows if row["col_name"] == "Provider"]
    return found[0].lower() if found else None
