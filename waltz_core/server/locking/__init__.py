"""Optimistic locking: which transaction is rejected, and why.

`tickets.py` are the append requests. `validation.py` validates their rows against `lock_table.py`,
and `refill.py` fills that table for a new owner. `lock_queues.py` staggers the retries of writers
that a lock rejected, `dependent_appends.py` has writers that build on transactions in flight, and
`single_records.py` makes batches of single appends.
"""
