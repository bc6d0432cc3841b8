"""`waltz-core archive`: administer the archive.

`archive_status.py` shows what is archived, `archive_verify.py` verifies every file, and
`archive_expire.py` moves the beginning of the log to a later ID. `archive_unpin.py` removes the pin
of a restored cluster. `store_calls.py` reports calls of an object store that hang.
"""
