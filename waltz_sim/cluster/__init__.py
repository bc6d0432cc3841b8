"""The parts of a simulated cluster: clients, servers, storages, ZooKeeper, operators.

`simulated_cluster.py` combines these parts, which run the production machines:
`simulated_clients.py` with the applications of `workload.py`, `simulated_contexts.py` and
`retried_task.py` (Spark tasks), `simulated_servers.py`, `simulated_storages.py`,
`simulated_coordinator.py` (ZooKeeper), and `simulated_archive.py` (the object store).
The archive may have the log of a lost cluster (`restored_log.py`). `administration.py` and
`disaster_recovery.py` are operators, and `peer.py` is a foreign program. `checkers.py` calls the
checkers of the guarantees at each event.
"""
