"""Writing: each row is one transaction, committed or rejected, and every outcome is reported.

A task sends its rows in append batches with one client, several in flight. The log answers each
row: committed with its ID, rejected by a lock with the conflicting ID, or lost (the session broke,
a partition moved). Lost rows are sent again, in order, because they are known not to be in the log.
A later attempt of a task finds the rows of earlier ones in the log, and sends the rest.

`batch_write.py` and `stream_write.py` begin and end a write on the driver. `task.py` is one task:
`columns.py` makes payload, locks, partition and mark of each row, `appender.py` sends the rows,
`earlier_rows.py` finds those of earlier attempts by their `row_keys.py`, `recompute.py` recomputes
rejected ones, and `results.py` keeps the outcomes. `rows_hash.py` recognizes the rows of a finished
write, and `write_counts.py` counts the rows of a stream.
"""
