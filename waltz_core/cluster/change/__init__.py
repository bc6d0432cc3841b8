"""Changes of a cluster: creates it, changes its storages and replicas, rebuilds its metadata.

`creation.py` creates the nodes of a cluster. `storage_changes.py` registers storages and executes
changes of replicas; `replica_steps.py` plans these changes in safe steps. If ZooKeeper has lost its
data, `rebuilding.py` recreates the metadata from the logs of the storages. `backup.py` encodes a
backup file, and `restoring.py` creates the nodes of a cluster from it. `stored_permissions.py`
changes the permissions, and `audit.py` records all changes.
"""
