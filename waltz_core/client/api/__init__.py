"""The clients that applications use: for asyncio, for threads, and for SQL databases.

`async_client.py` is the client for asyncio. `sync_client.py` wraps this client for threads, and
`sql.py` applies the log to a database. `contexts.py` runs transaction contexts, `subscriptions.py`
starts and stops the feeds of partitions, and `scanning.py` reads ranges as one Arrow stream.
`opening.py` opens a client, and `exactly_once.py` begins and ends exactly-once writes.
`thread_outcome.py` is the future that an append returns to threads. `client_metrics.py` exports the
metrics of clients.
"""
