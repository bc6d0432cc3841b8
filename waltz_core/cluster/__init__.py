"""What ZooKeeper knows of a cluster, and how every process of it agrees there.

ZooKeeper holds little and decides much: who the servers are, which of them owns a partition, which
storages hold its replicas, and, for each partition, which store session is the newest and who took
part in it. Records never pass through it.

The nodes, below the cluster's root R:

    R                                 name and number of partitions; written last by `cluster
                                      create`, so a root without data is not a cluster
    R/ids/client, R/ids/server        the last id given out; taken by compare-and-set, one for each
                                      client and each server process, never given twice
    R/serverDescriptors               which server owns which partition, in which generation
    R/serverDescriptors/s_N           one live server: id, host, port, preferred partitions; gone
                                      with its session (ephemeral)
    R/store                           the cluster key that every storage directory must carry
    R/store/assignment                which storages hold which partitions
    R/store/group, R/store/connection the storages' groups and admin ports
    R/store/partition/P               generation, store session and replica states of partition P
    R/store/adminLock                 a mutex of the original's commands (ephemeral)
    R/x/partition/P                   ours: whether P may be without history, and the nonce of its
                                      session; changes in one write with R/store/partition/P
    R/x/storage/HOST:PORT             ours: the id of the storage that belongs at this address
    R/x/writes/W, R/x/writes/W/T      ours: a write that must enter the log once, and its tasks
    R/x/reach/ID                      ours: which servers server ID can and cannot connect to
    R/x/audit/e_N                     ours: changes of the cluster by commands: user, outcome

Everything but R/x is the original's, byte for byte, so that an original server or client can work
on the same root; what is below R/x it neither reads nor minds.

Who owns a partition. Each server makes itself an `s_N`. Whenever the set of servers changes, the
child version of R/serverDescriptors changes with it, and the lead server (the one with the smallest
id) writes an assignment that carries this version. Everybody else waits until both versions are
equal: only then does the assignment speak of exactly the servers that live. A partition that moves
gets the next generation. Two servers may believe for a moment that they own the same partition;
that is settled at R/store/partition/P, where each session begins with a compare-and-set.

The files, each using only those above it:

    paths.py           the table above as code
    model.py           the values and their bytes
    znodes.py          the door: nodes, versions, atomic writes, watches, a session
    connect_string.py  "host:port,host:port/root", and what is wrong with it
    credentials.py     who we are to ZooKeeper, and who may touch what we make
    contact.py         since when ZooKeeper is away, or back
    assignment.py      servers x partitions, storages x partitions
    creation.py        the writes that make a cluster
    node_access.py           reading and following nodes below a root
    reachability.py    which servers others can connect to, and may own partitions
    registration.py      the live servers, and the lead server's duty
    writes.py          writes that must enter the log once, and which attempt of a task is the last
    audit.py           who has changed what by command
    changes.py         how replicas get to where they should be, one safe step at a time
    storages.py        which storages there are; carrying such steps out
    rebuilding.py      the nodes of a cluster whose ZooKeeper has lost them
    tree.py            which clusters there are below a path, and the end of one
    coordinator.py     what servers, storages, clients and commands do here: start reading there
    zookeeper_in_memory.py          a ZooKeeper in memory, with faults on request
    watchdog.py        a hanging event loop keeps no session
    kazoo_connection.py  what runs on kazoo's thread
    zookeeper_session.py       a real one, through kazoo; `connect` is where a process begins
    starting.py        a daemon's start while ZooKeeper is slow
"""
