"""A server: it owns partitions, orders their appends, judges locks, feeds clients, answers reads.

It keeps nothing on disk. What it knows is in the storages and in ZooKeeper, and another server can
take a partition over at any moment; what must never go wrong then is in `waltz_core.replication`.

    daemon      the process: settings, registration, the assignment, health, an orderly end
    clients     links to clients: what may be read (`flow`), where a request goes, what comes back
    originals   what comes back to clients of the original, which know no outcomes and no errors
    host        one partition with its driver, its links to storages (`replicas`), its metrics
    partition   the machine: routes between the parts below and the store's sessions
    append      the pipeline (`lanes`, `tickets`, `singles`), over `locks` and `mounts`
    feed        what each client has been fed and may be fed
    reads       ranges and data, from `cache` or from a storage
    proofs      marks that are told only while nobody newer owns the log
    events      the words they speak, and the limits they keep

Everything from `partition` down is pure: no clock, no sockets, no tasks.

Life of an append
    1. A frame comes in. `clients` takes it in if its connection has room, else the connection is
       not read (`flow`). The request waits in its connection's lane (`lanes`).
    2. There is a settled store session and room in flight: a turn begins (`append.turn`). The lane
       that was served least goes first; small requests are taken together, a large one alone.
    3. Is this connection the one that its client has mounted with, is the generation right, do the
       checksums fit? Rows that fail are refused, each with a reason.
    4. The lock table judges the rows in order (`locks`): accepted rows get ids, which are entered
       into the table at once; refused ones may have to wait until the id that they conflict with
       is final.
    5. The accepted rows become records, byte for byte as they will lie on disk (`batches`,
       `singles`), and go to the store as one batch.
    6. A quorum has it on disk: `Committed`. The batch is remembered (`cache`), its requests are
       answered, and so are refusals that waited for it, flushes and mounts.
    7. Or the session breaks first: nothing is told until the next one is `Settled`. What lies at or
       below the settled mark is committed; all else is LOST, is never judged again, and ends the
       mount of its client, so that nothing sent behind it can overtake it.

Life of a mount
    1. Its connection sequence is the highest of this client in this generation, or it is refused;
       from now on older connections append nothing.
    2. What is in flight becomes final. With a feed, the feed reaches the mark of that moment.
    3. `Mounted`: everything older of this client is final, and its appends are taken.

Life of a feed
    1. A mount with a feed, then feed requests, grant stretches of the log. Each turn sends every
       client that has a grant, and is not congested, one frame (`feed.turn`).
    2. The headers come out of the feed cache; what it has forgotten is fetched from a replica, once
       for all clients that stand at the same place.
    3. A client that does not read becomes congested: its connection holds one megabyte at most, it
       gets nothing more, and nothing more of it is read, until it has drained.
"""
