"""Reads and feeds of a partition: `reads.py` and `feeds.py`, from the memory of `cache.py` or a storage.

`read_ahead.py` fetches records that a client will probably request next.
"""
