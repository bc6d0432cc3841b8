"""`waltz-core archive`: administer the archive.

`archive_status.py` shows the archived ranges, `archive_verify.py` verifies every file, and
`archive_expire.py` moves the beginning of the log to a later ID. A *pin* prevents the deletion of
objects that a restored cluster uses; `archive_unpin.py` removes a pin. `store_calls.py` reports
calls of the object store that hang.
"""
