"""Tables that follow the log: changes of rows, computed from transactions, and table marks.

`follower.py` is the loop of a follower, and depends neither on Arrow nor on a table format.
`followed_log.py` reads the log for the loop. `row_changes.py` computes the changes in decoded
transactions, and the last change of each key. `table_marks.py` encodes the marks that a table
stores with its rows, and limits the next batch. `inferred_columns.py` infers the columns of tables
that do not declare them.

`delta_table.py` writes a Delta table with deltalake, and `delta_errors.py` decides which errors of
deltalake are temporary. `delta_columns.py` checks the columns of a Delta table, and
`delta_commits.py` finds the commits of a follower in its history; Spark also uses these two files.
`parquet_table.py` writes an append-only table of Parquet files.

docs/decisions/049-tables-that-follow-the-log.md describes the design.
"""
