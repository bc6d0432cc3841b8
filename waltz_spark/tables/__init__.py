"""Tables that follow the log, with Spark: `follow`, and `upsert` for a `foreachBatch`.

`following.py` has both functions, and `table_formats.py` selects the format. `log_changes.py` reads
and reduces transactions in tasks; `found_changes.py` does so for tables that do not declare their
columns, and `shared_read.py` once for several tables. `merged_table.py` commits changes to a Delta
table and `iceberg_table.py` to an Iceberg table, both by the `MERGE` of `merge_statement.py`, and
`table_session.py` opens a session for it. `parquet_files.py` adds rows to Parquet files.
`spark_errors.py` recognizes errors of Spark, Delta and Iceberg. The loop is that of the core
(`waltz_core/tables/follower.py`), so either follower continues a Delta table or Parquet files of
the other one.
docs/decisions/049-tables-that-follow-the-log.md has the design.
"""
