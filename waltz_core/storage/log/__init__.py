"""The log of one partition on one replica: append, read, recover, truncate, repair, scrub.

`partition_log.py` is the log; `log_files.py` writes its files. `covered_records.py` keeps records
of Waltz 0.13 until an owner has compared them. `log_recovery.py` opens a log after a crash,
`reading.py` reads it and skips damage, and `truncation.py` truncates its end. `damage.py` replaces
damaged records, and `rebatching.py` replaces batches. `removal.py` deletes a log. `scrub.py`
schedules reads that look for damage. `archive_pieces.py` reads ranges for the archive, and removes
segments that the archive contains.
"""
