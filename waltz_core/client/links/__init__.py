"""Connections to servers and storages, and the directory of partitions.

`directory.py` knows which server owns a partition. `connections.py` has the connections to servers:
each consists of streams, of requests (`pending_requests.py`), of a watch for silence (`silence.py`)
and, at a 0.13 server, of a translation (`old_server.py`). `outage.py` logs when nothing is reached.
`storage_admin.py` is a connection to the administration port of a storage.
"""
