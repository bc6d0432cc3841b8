"""The names of columns in a table that Spark merges changes into."""

import pytest
from pyspark.sql.types import LongType, StructField, StructType

from waltz_core.errors import BadConfig
from waltz_spark.tables.merge_statement import check_names


@pytest.mark.parametrize("name", ["_Partition", "Partition", "TRANSACTION_ID", "Header", "ID"])
def test_a_name_that_differs_from_a_reserved_one_in_its_case_is_rejected(name: str):
    schema = StructType([StructField(each, LongType()) for each in ("id", name)])
    with pytest.raises(BadConfig, match=f"column '{name}': expected names that differ"):
        check_names(schema, ["id"])


def test_a_column_of_the_log_may_be_declared():
    check_names(StructType([StructField("header", LongType())]), ["header"])
