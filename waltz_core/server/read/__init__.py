"""Reads (`reads.py`) and feeds (`feeds.py`) of a partition, from memory (`cache.py`) or a storage.

`read_ahead.py` fetches records that a client will probably request next.
"""
