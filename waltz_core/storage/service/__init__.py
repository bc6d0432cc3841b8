"""The storage as a machine: requests in, answers out, and the threads that work on the disk.

`service.py` answers requests with the effects of `service_effects.py`; `lane.py` orders the work of
one partition, `queue_limits.py` bounds what waits, `work.py` is one piece of work, and `writers.py`
are the threads that do it.
`engine.py` is the directory with all its partitions. `admin.py` answers administration, whose
longer tasks are `admin_tasks.py`, carried out by `upkeep.py`. `archive_jobs.py` archives ranges for
owners, `retention.py` limits the local logs to what is configured, and `archive_reads.py` answers
from the archive what they do not have any more.
"""
