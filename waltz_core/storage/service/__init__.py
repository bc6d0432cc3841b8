"""The storage as a state machine: requests in, answers out, and the threads that use the disk.

`service.py` answers requests with the effects of `service_effects.py`. `lane.py` orders the work of
one partition, `queue_limits.py` limits the memory of waiting requests, `work.py` is one piece of
work, and the threads of `writer_threads.py` run it. `storage_engine.py` is the directory with all
its partitions. `admin.py` answers requests of administration; `admin_tasks.py` declares the
tasks that these requests need, and `admin_execution.py` executes them. `archive_jobs.py` archives
ranges for owners, `retention.py` removes old segments when local logs exceed their limits, and
`archive_reads.py` answers requests for records that only the archive has.
"""
