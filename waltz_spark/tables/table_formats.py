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
    given_format: TableFormat | None,
    schema: StructType | None,
    rules: ChangeRules,
) -> MergedTable | SparkParquetTable:
    """Open a table of a follower.

    Args:
        session: a session for this table only.
        name: the name of the table, or its path or URL, which contains a slash.
        given_format: the format of a new table; None: Delta. For an existing table with a name,
            its own format counts.
        schema: the declared columns; None: columns are inferred from the payloads (Delta only).
        rules: how transactions become changes.

    Raises:
        BadConfig: the format is unknown or not the format of the table, or an argument does not fit
            the format.
    """
    if given_format not in (None, *get_args(TableFormat)):
        raise BadConfig(
            f"format: expected one of {', '.join(get_args(TableFormat))}, found {given_format!r}"
        )
    is_path = "/" in name
    if is_path != (given_format == "parquet") and given_format in ("iceberg", "parquet"):
        expected = "a path or a URL" if given_format == "parquet" else "a name"
        raise BadConfig(
            f"expected {expected} of a table with format {given_format}, found {name!r}"
        )
    stored_format = None if is_path else _stored_format(session, name)
    if None not in (stored_format, given_format) and stored_format != given_format:
        raise BadConfig(f"table {name}: expected format {given_format}, found {stored_format}")
    table_format = stored_format or given_format or "delta"
    if table_format != "parquet" and not rules.key:
        raise BadConfig(f"key: expected one or more columns for format {table_format}, found none")
    if table_format == "delta":
        return MergedDeltaTable(session, name, schema, rules.key)
    if schema is None:
        raise BadConfig(
            f"expected a schema for a table with format {table_format}, found none. Hint: declare "
            "the "
            "columns; they are inferred for Delta tables only."
        )
    if table_format == "parquet":
        return SparkParquetTable(name, schema, rules)
    return MergedIcebergTable(session, name, schema, rules.key)


def open_merged_table(
    session: SparkSession,
    name: str,
    given_format: TableFormat | None,
    schema: StructType,
    rules: ChangeRules,
) -> MergedTable:
    """Open a table that has a row for each key; errors as for `open_table`."""
    table = open_table(session, name, given_format, schema, rules)
    if isinstance(table, SparkParquetTable):
        raise BadConfig("upsert: expected a table with format delta or iceberg, found parquet")
    return table


def _stored_format(session: SparkSession, name: str) -> str | None:
    """Return the format of a table; None if the table does not exist, or its catalog fails."""
    try:
        rows = session.sql(f"DESCRIBE TABLE EXTENDED {name}").collect()
    except PySparkException:
        return None  # opening the table reports the error
    providers = [row["data_type"] for row in rows if row["col_name"] == "Provider"]
    return providers[0].lower() if providers else None
