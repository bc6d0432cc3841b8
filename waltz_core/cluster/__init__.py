"""The metadata of a cluster in ZooKeeper, and the protocols over it.

ZooKeeper stores the live servers. For each partition, ZooKeeper stores the owner, the replicas, and
the newest store session with its members. Records never pass through ZooKeeper.

The nodes, below the cluster's root R:

    R                                 name and number of partitions; written last by `cluster
                                      create`, so a root without data is not a cluster
    R/ids/client, R/ids/server        the last allocated ID, raised by compare-and-set. Each server
                                      process, and each client whose ID no server issues,
                                      allocates an ID that was never allocated before
    R/serverDescriptors               which server owns which partition, in which generation
    R/serverDescriptors/s_N           one live server: ID, host, port, preferred partitions;
                                      ephemeral
    R/store                           the cluster key that every storage directory must carry
    R/store/assignment                which storages hold which partitions
    R/store/group, R/store/connection the storages' groups and admin ports
    R/store/partition/P               generation, store session and replica states of partition P
    R/store/adminLock                 a mutex of the 0.13 commands (ephemeral)
    R/x/partition/P                   extension: whether P may still be new, without any records,
                                      and the nonce of its store session; written together with
                                      R/store/partition/P, in one atomic write
    R/x/storage/HOST:PORT             extension: the ID of the storage that belongs at this address
    R/x/client                        extension: the last client ID that servers have issued
    R/x/writes/W, R/x/writes/W/T      extension: an exactly-once write, and its tasks
    R/x/reach/ID                      extension: the servers to which server ID can and cannot
                                      connect
    R/x/load/ID                       extension: the loads of the partitions of server ID
    R/x/audit/e_N                     extension: changes of the cluster by commands: user, outcome

All nodes except R/x have the format of Waltz 0.13. Therefore 0.13 clients and tools can use the
same root. They ignore the nodes below R/x.

Partitions get their owners as follows:
    1. Each server creates its node `s_N`. Whenever such a node is created or deleted, ZooKeeper
       increases the child version of R/serverDescriptors.
    2. The leader, which is the live server with the smallest ID, then writes a new assignment. The
       assignment contains the child version for which the leader has computed it. A partition that
       moves to another server gets the next generation.
    3. All processes ignore an assignment until its child version is equal to the current one. Only
       then does the assignment name exactly the live servers.
    4. For a moment, two servers may assume that they own the same partition. Each store session
       begins with a compare-and-set on R/store/partition/P, and only one of the two servers
       succeeds.

Start reading with `coordinator.py`: it contains all operations of servers, storages, clients and
commands. `znodes/` contains the paths and values of the nodes, and the interface to ZooKeeper.
`membership/` contains the live servers and the assignment, `change/` the changes by commands, and
`zookeeper/` the sessions. `write_registry.py` records exactly-once writes.
"""
