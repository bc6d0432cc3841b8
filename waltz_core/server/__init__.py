"""A server: owns partitions, orders appends, validates locks, feeds clients, answers reads.

It keeps nothing on disk. Its state is in the storages and in ZooKeeper, and another server can take
a partition over at any moment; `waltz_core.replication` keeps that safe.

    process           the process: settings, registration, links to clients and storages, shutdown
    partition         the machine of a partition: routes between the parts below and the store's
                      sessions, and reports marks only with a proof that no later session exists
    append            the append pipeline: mounts, lanes, pace, outcomes
    locking           the lock table, the validation of rows, contending writers
    read              feeds and ranges, from memory or from a storage
    partition_events  the events and effects of a partition, and its limits

The adapter for 0.13 clients is `waltz_core.legacy.legacy_client`.

Everything from `partition` down is pure: no clock, no sockets, no tasks.

Life of an append
    1. A frame arrives. `clients` accepts it if its connection has room, otherwise the connection is
       not read (`flow`). The request waits in its connection's lane (`lanes`).
    2. When there is a settled store session and room in flight, a turn begins (`pipeline.turn`).
       The lane that was served least goes first; small requests are taken together, a large one
       alone.
    3. `admission` checks the mount, the generation and the checksums. Rows that fail are rejected,
       each with a reason.
    4. The lock table validates the rows in order (`validation`). Accepted rows get IDs, which are
       entered into the table at once. Rejected ones may have to wait until the ID that they
       conflict with is final.
    5. The accepted rows become records, with the same bytes as on disk (`batches`,
       `single_records`), and go to the store as one batch.
    6. `Committed`: a quorum has the batch on disk. It is cached (`cache`), its requests are
       answered, and so are the rejections, flushes and mounts that waited for it.
    7. If the session breaks first, nothing is answered until the next one is `SessionSettled`.
       Everything up to the settled mark is committed. Everything else is LOST, is never validated
       again, and ends the mount of its client, so that no later append of the client can overtake
       it.

Life of a mount
    1. Its connection sequence is the highest of this client in this generation, otherwise it is
       rejected. From now on older connections append nothing.
    2. Appends in flight become final. With a feed, the feed reaches the mark of that moment.
    3. `Mounted`: everything older of this client is final, and its appends are accepted.

Life of a feed
    1. A mount with a feed, then feed requests, grant ranges of the log. Each turn sends one
       frame to every client that has a grant and is not congested (`Feed.turn`).
    2. The headers come from the feed cache. Older ones are fetched from a replica, once for all
       clients at the same position.
    3. A client that does not read becomes congested: its connection buffers one megabyte at most,
       and the server sends it nothing and reads nothing from it until the buffer has drained.
"""
