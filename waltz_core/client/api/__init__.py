"""The clients that applications use: for asyncio, for threads, and for SQL databases.

`async_client.py` is the client; `sync_client.py` wraps it for threads and `sql.py` applies the log
to a database. `contexts.py` runs transaction contexts, `subscriptions.py` starts and stops the
feeds of partitions, `scanning.py` makes an Arrow stream of ranges, `opening.py` opens a client, and
`exactly_once.py` begins and ends exactly-once writes. `thread_outcome.py` is the future of an
append for threads, and `client_metrics.py` exports metrics.
"""
