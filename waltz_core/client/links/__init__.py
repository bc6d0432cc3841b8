"""Connections to servers and storages, and the directory of partitions.

`directory.py` finds the server that owns a partition. `connections.py` has the connections to
servers. Each connection has streams, requests (`pending_requests.py`), a watch for servers that do
not answer (`silent_servers.py`) and, for a 0.13 server, an adapter (`legacy_server.py`).
`outage_log.py` logs outages of a feed, `write_requests.py` uses the registry of exactly-once
writes, `identities.py` has the client ID, and `storage_admin.py` is a connection to the
administration port of a storage.
"""
