"""Tables that follow the log: from transactions to changes of rows, and the marks of a table.

`row_changes.py` computes the changes in decoded transactions, and the last change of each key.
`table_marks.py` has the marks that a table stores with its rows, and the rule for the next batch.
Both do no I/O. `follower.py` is the loop; it depends neither on Arrow nor on a table format.
`followed_log.py` reads the log for the loop, and `inferred_columns.py` infers the columns of tables
that do not declare them. `delta_table.py` writes a Delta table with deltalake. Three other files
for Delta are used with and without Spark, or decide about errors: `delta_columns.py` has the
permitted columns, `delta_commits.py` finds the commits of a follower in the history, and
`delta_errors.py` decides which errors of deltalake are temporary. `parquet_table.py` writes a table
of Parquet files, which only gains rows. docs/decisions/049-tables-that-follow-the-log.md has the
design.
"""
