"""Connections to servers and storages, and the directory of partitions.

`directory.py` knows which server owns a partition, and `connections.py` has the connections to
servers. `silence.py` and `outage.py` log when a server does not answer. `storage_admin.py` is a
connection to the administration port of a storage.
"""
