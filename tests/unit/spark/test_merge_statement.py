"""The names of columns in a table that Spark merges changes into."""

import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from waltz_core.errors import BadConfig
from waltz_spark.tables.merge_statement import check_column_names


@pytest.mark.parametrize("name", ["_Partition", "Partition", "TRANSACTION_ID", "Header", "ID"])
def test_a_column_name_is_rejected_if_only_its_case_differs_from_a_reserved_name(name: str):
    schema = StructType([StructField(each, LongType()) for each in ("id", name)])
    with pytest.raises(BadConfig, match=f"column '{name}': the name '.*' is already used"):
        check_column_names(schema, ["id"])


def test_the_schema_may_declare_a_log_column():
    check_column_names(StructType([StructField("header", LongType())]), ["header"])


def test_a_key_with_a_collation_is_rejected():
    kinds = {"id": StringType(), "name": StringType("UTF8_LCASE")}
    schema = StructType([StructField(name, kind) for name, kind in kinds.items()])
    check_column_names(schema, ["id"])
    with pytest.raises(BadConfig, match="'name': expected text without a collation, found string "):
        check_column_names(schema, ["id", "name"])
