"""Optimistic locking: which transaction is rejected, and why.

`pending_appends.py` defines the append requests. `validation.py` validates their rows with
`lock_table.py`, and `lock_table_loader.py` fills this table for a new owner. `lock_queues.py`
delays the notifications of writers that a lock has rejected. `dependent_appends.py` handles appends
that depend on transactions in flight. `single_records.py` makes batches of single appends.
"""
