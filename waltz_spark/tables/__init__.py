"""Tables that follow the log, with Spark: `follow`, and `upsert` for a `foreachBatch`.

`following.py` contains both functions, and `table_formats.py` selects the format. `log_changes.py`
reads and reduces transactions in tasks. `column_inference.py` does this for tables that do not
declare their columns, and `shared_read.py` does it once for several tables. `merged_table.py`
commits changes to a Delta table, and `iceberg_table.py` to an Iceberg table. Both modules use the
`MERGE` of `merge_statement.py`, in a session from `table_session.py`. `parquet_files.py` adds rows
to Parquet files. `spark_errors.py` recognizes errors of Spark, Delta and Iceberg.

The loop is the same as in the core (`waltz_core/tables/follower.py`). So a follower with Spark
continues a Delta table or Parquet files of a follower without Spark, and vice versa.
docs/decisions/049-tables-that-follow-the-log.md has the design.
"""
