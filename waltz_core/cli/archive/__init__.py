"""`waltz-core archive`: administration of the archive.

`archive_status.py` shows what is archived, `archive_verify.py` verifies every file, and
`archive_expire.py` lets the log begin later. `archive_unpin.py` ends a pin of a restored cluster,
and `store_calls.py` reports calls of a store that hang.
"""
