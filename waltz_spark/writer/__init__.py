"""Writing: each row is one transaction, committed or rejected, and every outcome is reported.

A task uses one client, and sends its rows in append batches, several of them in flight. The server
answers each row: committed (with its ID), rejected by a lock (with the conflicting ID), or lost
(the session broke, or a partition moved). Lost rows are known not to be in the log, so the task
sends them again, in order. A later attempt of a task finds the rows of earlier attempts in the log,
and sends the rest.

`batch_write.py` and `stream_write.py` begin and end a write on the driver. `task.py` is one task:
`columns.py` derives payload, locks, partition and mark of each row. `appender.py` sends the rows.
`earlier_rows.py` finds the rows of earlier attempts by their keys (`row_keys.py`). `recompute.py`
recomputes rejected rows, and `results.py` stores the outcomes. `rows_hash.py` recognizes the rows
of a finished write. `write_counts.py` counts the rows of a stream.
"""
