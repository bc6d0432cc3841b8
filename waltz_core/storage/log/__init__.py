"""The log of one partition on one replica: append, read, recover, truncate, repair, scrub.

`partition_log.py` is the log, `replica_log.py` the log of a replica, with records of Waltz 0.13 in
it. `log_recovery.py` opens it after a crash, `reading.py` reads around damage, `truncation.py`
cuts its end, `damage.py` and `rebatching.py` repair it, `removal.py` deletes it, and `scrub.py`
reads it again to find rot.
"""
