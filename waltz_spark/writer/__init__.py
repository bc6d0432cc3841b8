"""Writing: one row is one transaction, refused or committed, and every outcome is told.

A task sends its rows in append batches over one client, several in flight. The log answers each
row: committed with its ID, refused by a lock with the conflicting ID, or not taken (the session
broke, a server moved): the last are sent again, in order, because they are known not to be in
the log. An attempt of a task that is not the first looks into the log for what the earlier ones
have brought in (`once.py`), and sends the rest; `batch_write.py` and `stream_write.py` begin and
end a write.
"""
