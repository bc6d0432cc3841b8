"""One storage node: the replicas that it holds, their files, and the requests that it answers.

    <directory>/waltz-storage.ctl     control file of Waltz 0.13: cluster, marks of all partitions
    <directory>/waltz-x.id            the storage ID; the running process holds a BSD lock on it
    <directory>/waltz-x.reserve       space that is kept free for repairs on a full disk
    <directory>/waltz-x.scrub         progress of the scrub; losing it costs only time
    <directory>/<p>/waltz-x.ctl       two slots: promise, marks, acked marker, damage, intent
    <directory>/<p>/waltz-x.wipe      exists while the files of a partition are being deleted
    <directory>/<p>/waltz-x.lck       locks of the newest batches, never synced (and `.old`)
    <directory>/<p>/<first>.seg       records back to back, up to about a gigabyte
    <directory>/<p>/<first>.idx       the offset of each record; a cache
    <directory>/<p>/<first>.chn       one entry for each batch that ends in the segment

The packages, from the top: `process` is the daemon, which decides which partitions it serves and
opens the administration port. `service` is the state machine that answers servers and
administration, the threads that do the blocking work, and the engine that holds a directory.
`log` is the log of one partition, `files` reads and writes each kind of file, and `disk` is the
interface to the file system.

Durability (what each call makes durable before it returns):
    - `prepare`: the promise, and everything that was appended earlier.
    - `append`: nothing. `sync`: records and batches, but not the index.
    - The index is synced when the acked marker moves, a segment is full, a low-water mark is set,
      or the log closes. The acked marker moves at most once a second.
    - `set_low_water_mark`, `engage`, `truncate`, `repair`: their changes, on return.

After a crash, the storage trusts all bytes that are known to have been synced:
    - the bytes up to the acked marker
    - the bytes up to the *synced ID* in the entry of a later batch: the last ID that was durable
      when the entry was written
    - the batches in all segments except the last one

If such bytes are unreadable, they are damage. If they are missing, the replica is suspect. After
these bytes, a batch is trusted if it is complete, has its entry and matches the hash chain. All
other bytes are a torn tail: the crash may have left any of their sectors on the disk, and they
were never acknowledged.

Known limit: the last group of appends that was synced before a crash may be after all these bytes.
If the group is corrupted on the disk before the next start, it looks like a torn tail. The storage
truncates it, and the replica is not suspect. This loses no acknowledged transaction if a quorum of
*other* replicas has the group. But this replica may have belonged to the quorum that acknowledged
the group. Then fewer other replicas may have the group, and the next recovery may decide on a log
without the group. For example, only A and B of three replicas have ID 7, and A truncates it. If all
three replicas answer, the recovery decides that the log ends at ID 6 (docs/guarantees.md 1).
"""
