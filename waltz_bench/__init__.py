"""Benchmarks of a cluster, its parts and other systems: `waltz-core bench WORKLOAD`.

`command.py` has the table of workloads; docs/performance.md describes what each workload measures.
`measuring.py` has the parameters of a workload, its result, and the report.

    single_appends, batch_appends   appends: single, in batches, with a pool of locks; the feed
    gateway_appends                 appends over HTTP, compared with the Python client
    flood, hot_lock                 clients that compete for a server or for a lock
    rejections, failover            moves of partitions: false rejections, gaps between answers
    checkpoint, many_partitions     new sessions under load; clusters with many partitions
    storage_bench                   the storage engine alone
    archive_workload                a log that is larger than the disks of its storages
    spark_workloads, sql_view       readers and writers of applications
    compared                        the baselines and systems that workloads are compared with
"""
