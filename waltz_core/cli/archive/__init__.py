"""`waltz-core archive`: administration of the archive.

`archive_status.py` shows what is archived, and `archive_verify.py` verifies every file.
"""
