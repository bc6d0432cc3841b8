"""Tables that follow the log: from transactions to changes of rows, and the marks of a table.

`row_changes.py` finds the changes in decoded transactions, and the last change of each key.
`table_marks.py` has the marks that a table stores with its rows, and the rule for the next batch.
Both are pure. `follower.py` is the loop; it knows neither Arrow nor a table format.
`followed_log.py` reads the log for it; `found_columns.py` finds the columns of tables that do not
declare them. `delta_table.py` writes a Delta table with deltalake; `delta_columns.py` has the
columns that it may have, with or without Spark; `delta_commits.py` finds the commits of a
follower in its history, again for both; `delta_errors.py` decides which errors of deltalake are
temporary. `parquet_table.py` writes a table of Parquet files, which only gains rows.
docs/decisions/049-tables-that-follow-the-log.md has the design.
"""
