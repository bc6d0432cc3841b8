"""A server: owns partitions, orders appends, validates locks, feeds clients, answers reads.

A server keeps nothing on disk: all durable state is in the storages and in ZooKeeper. Another
server can take over a partition at any moment; `waltz_core.replication` makes this safe.

    process           the process: settings, registration, links to clients and storages, shutdown
    partition         the machine of a partition: routes events between the parts below and the
                      store sessions; reports a high-water mark only after a quorum has confirmed
                      that no later session exists
    append            the append pipeline: mounts, lanes, throttle, outcomes
    locking           the lock table, the validation of rows, contending writers
    read              feeds and ranges, from memory or from a storage
    partition_events  the events and effects of a partition, and its limits

The adapter for 0.13 clients is `waltz_core.legacy.legacy_client`.

All packages except `process` are pure state machines, without clocks, sockets or tasks.

Life of an append
    1. A request arrives. `clients` accepts it if its connection is within its limits; otherwise the
       server stops reading the connection (`flow_control`). The request waits in the lane of its
       connection (`lanes`).
    2. When a store session is settled and the limit of appends in flight permits it, the pipeline
       takes a slice of requests (`pipeline.process_slice`). The lane that was served least is
       next. The pipeline takes small requests together, and a large request alone.
    3. `admission` checks the mount, the generation and the checksums. It rejects rows that fail
       these checks, each with a reason.
    4. The lock table validates the rows in order (`validation`). Accepted rows get IDs, which are
       entered into the table at once. A row that conflicts with a transaction in flight waits until
       this transaction is final.
    5. The accepted rows become records, with the same bytes as on disk (`batches`,
       `single_records`), and go to the store as one batch.
    6. `TransactionsCommitted` reports that a quorum has the batch on disk. The server caches the
       batch (`cache`) and answers its requests. It also answers the rejections, flushes and mounts
       that waited for the batch.
    7. If the session ends before the commit, the server waits until the next session reports
       `SessionSettled`. Then everything up to the settled mark is committed, and all other rows are
       LOST. A lost row is never validated again. A lost row also ends the mount of its client. So
       no later append of the client gets into the log before the client has sent the row again.

Life of a mount
    1. A mount is accepted only if its connection sequence is the highest of this client in this
       generation. From then on, appends of the client's older connections are rejected.
    2. The mount waits until all appends in flight are final. A mount with a feed then waits until
       the feed has reached the high-water mark of that moment.
    3. `Mounted`: all older appends of this client are final, and its new appends are accepted.

Life of a feed
    1. A mount with a feed *grants* a range of the log: it permits the server to send this range.
       Later feed requests grant further ranges. Each turn sends one frame to every client that has
       a grant and is not congested (`ClientFeeds.deliver`).
    2. The headers come from the feed cache. The server fetches older headers from a replica, once
       for all clients at the same position.
    3. If a client does not read, its connection becomes congested. The server buffers at most one
       megabyte for this connection, and sends and reads nothing on it until the buffer has drained.
"""
