"""The parts of a simulated cluster: clients, servers, storages, ZooKeeper, operators.

`simulated_cluster.py` combines them: `simulated_clients.py` with the applications of `workload.py`,
`simulated_contexts.py` and `tasks.py` (Spark tasks), `servers.py`, `simulated_storages.py`,
`simulated_coordinator.py` (ZooKeeper), and `simulated_archive.py` (the object store), which may
have the log of a lost cluster (`restored_log.py`). They run the production machines. Operators are
`administration.py` and `disaster_recovery.py`, and `peer.py` is a foreign program. `checkers.py`
calls the guarantees on each event.
"""
