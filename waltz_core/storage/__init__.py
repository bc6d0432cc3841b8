"""One storage node: where the transactions of a replica lie on disk, and what it vouches for.

    <directory>/waltz-storage.ctl     the original's control file: cluster, marks of all partitions
    <directory>/waltz-x.id            which storage this is; a BSD lock on it while it runs
    <directory>/waltz-x.reserve       room kept back for a full disk
    <directory>/waltz-x.scrub         where the scrub is; worth nothing but time
    <directory>/<p>/waltz-x.ctl       two slots: promise, marks, acked marker, damage, intent
    <directory>/<p>/waltz-x.wipe      while the files of a partition are being deleted
    <directory>/<p>/waltz-x.lck       locks of the newest batches, never synced (and `.old`)
    <directory>/<p>/<first>.seg       records back to back, up to about a gigabyte
    <directory>/<p>/<first>.idx       where each record starts; a cache
    <directory>/<p>/<first>.chn       one entry for each batch that ends in the segment

From the top: `daemon` is the process, `serving` says which partitions it serves, `service` answers
servers, with a `lane` for each partition and the `scrub`'s timetable, and `effects` what all of
that wants done; `work` is what is done on threads, `figures` what is shown of it. `admin_port` and
`admin` answer whoever administers, with `errands` that `upkeep` carries out. `engine` holds a
directory, `room` what is kept back of its disk, `partition_log` a partition's log, `covering`
the same with records that Waltz 0.13 may have written, `removal` deletes one, `recovery` opens one,
`reading` reads it, `damage` mends it, `truncation` cuts it, `rebatching` gives records other
batches, `segments` makes many files look like one, `segment` is one of them, `index` its two
lookups, `control_file` what lies beside the log, `format` every byte, `disk` the door to the file
system.

What is durable when:
    - `prepare`: the promise, then everything that was appended before.
    - `append`: nothing yet. `sync`: records and batches, not the index.
    - the index: with the acked marker, at a roll, at most every second, at a mark, at close.
    - `set_low_water_mark`, `engage`, `truncate`, `repair`: on return.

What is believed after a crash: all that is known to have been synced (up to the acked marker, and
up to what a batch entry says was durable before it), or it is damage, or the replica is suspect.
Above that, batches that are whole, have their entry and hold the chain; the rest was never
acknowledged, and a crash may leave any sectors of it.

What cannot be told: rot in the last group that was synced before an unclean stop looks like a torn
tail, and is cut. A quorum of other replicas has what was acknowledged of it.
"""
