"""Benchmarks of a cluster, of its parts, and of peers: `waltz-core bench WORKLOAD`.

`command.py` has the table of workloads; docs/performance.md describes what each one measures.
`measuring.py` has their input, result and report.

    single_appends, batch_appends   appends, single or in batches, and the feed
    flood, hot_lock, producers      writers that compete for a server, a lock, a pool of locks
    rejections, failover            moves of partitions: false rejections, gaps in answers
    checkpoint, many_partitions     new sessions under load; clusters with many partitions
    storage_bench                   the storage engine alone
    spark_workloads, sql_view       readers and writers of applications
    nats_peer                       NATS JetStream, for comparison
"""
