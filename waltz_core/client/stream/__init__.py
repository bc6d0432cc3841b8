"""One partition of a client: its mount, its appends, its feed.

`partition_stream.py` is the state machine, with the events of `stream_events.py`, and
`client_partition.py` runs it. `appends.py` gathers appends into batches, and `outbox.py` queues the
batches. `outcome_tracker.py` records the outcomes of appends, with `readback.py` and
`append_errors.py`; `append_counts.py` counts them. `cursor.py` is the position of the feed,
`write_claim.py` the task of an exactly-once write, and `backoff.py` the delay before a retry.
"""
