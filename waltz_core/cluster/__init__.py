"""The metadata of a cluster in ZooKeeper, and the protocols over it.

ZooKeeper stores the live servers, the owner and the replicas of each partition, and, for each
partition, the newest store session with its members. Records never pass through ZooKeeper.

The nodes, below the cluster's root R:

    R                                 name and number of partitions; written last by `cluster
                                      create`, so a root without data is not a cluster
    R/ids/client, R/ids/server        the last allocated ID; allocated by compare-and-set, one for
                                      each older client and each server process, never twice
    R/serverDescriptors               which server owns which partition, in which generation
    R/serverDescriptors/s_N           one live server: ID, host, port, preferred partitions;
                                      ephemeral
    R/store                           the cluster key that every storage directory must carry
    R/store/assignment                which storages hold which partitions
    R/store/group, R/store/connection the storages' groups and admin ports
    R/store/partition/P               generation, store session and replica states of partition P
    R/store/adminLock                 a mutex of the 0.13 commands (ephemeral)
    R/x/partition/P                   extension: whether P may still be new, without any records,
                                      and the nonce of its session; changes in one write with
                                      R/store/partition/P
    R/x/storage/HOST:PORT             extension: the ID of the storage that belongs at this address
    R/x/client                        extension: the last client ID that a server has issued
    R/x/writes/W, R/x/writes/W/T      extension: an exactly-once write, and its tasks
    R/x/reach/ID                      extension: which servers server ID can and cannot connect to
    R/x/load/ID                       extension: the loads of the partitions of server ID
    R/x/audit/e_N                     extension: changes of the cluster by commands: user, outcome

All nodes except R/x have the format of Waltz 0.13, so that 0.13 clients and tools can use the same
root; they ignore the nodes below R/x.

Ownership of a partition. Each server creates its node `s_N`. When the set of servers changes, the
child version of R/serverDescriptors changes with it, and the leader (the one with the smallest
ID) writes an assignment that carries this version. All other processes wait until both versions are
equal: only then does the assignment name exactly the live servers. A partition that moves gets the
next generation. Two servers may assume for a moment that they own the same partition; the
compare-and-set on R/store/partition/P, with which each session begins, decides.

Start reading with `coordinator.py`: it has all operations of servers, storages, clients and
commands. `znodes/` has paths, values and the interface to ZooKeeper, `membership/` the live servers
and the assignment, `change/` the changes by commands, `zookeeper/` the sessions.
`write_registry.py` has exactly-once writes.
"""
