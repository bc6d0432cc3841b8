"""Delta tables that follow the log, with Spark: `follow`, and `upsert` for a `foreachBatch`.

`following.py` has both functions. `log_changes.py` reads and reduces transactions in tasks;
`found_changes.py` does so for tables that do not declare their columns, and `shared_read.py` once
for several tables. `merged_table.py` commits changes with their marks by `MERGE`, and
`table_session.py` opens a session for it. `spark_errors.py` recognizes errors of Spark and Delta.
The loop is that of the core (`waltz_core/tables/follower.py`), so either follower continues a table
of the other one. docs/decisions/049-tables-that-follow-the-log.md has the design.
"""
