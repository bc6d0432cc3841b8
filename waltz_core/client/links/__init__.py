"""Connections to servers and storages, and the directory of partitions.

`directory.py` finds the server that owns a partition. `connections.py` manages the connections to
servers. Each connection carries streams and requests (`pending_requests.py`). Each connection has a
watch that detects a server that does not answer (`silent_servers.py`). A connection to a 0.13
server has an adapter (`legacy_server.py`).

`outage_log.py` logs outages of a feed, `write_requests.py` uses the registry of exactly-once
writes, and `identities.py` requests the client ID. `storage_admin.py` is a connection to the
administration port of a storage.
"""
