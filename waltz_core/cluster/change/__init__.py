"""Changes of a cluster: creating it, its storages and replicas, and rebuilding its metadata.

`creation.py` creates the nodes of a cluster. `storage_changes.py` registers storages and applies
changes of replicas; `replica_steps.py` plans these changes in safe steps. `rebuilding.py` writes
metadata again from the logs of storages, after ZooKeeper has lost it. `backup.py` has the file of a
backup, and `restoring.py` creates the nodes of a cluster from it. `stored_permissions.py` changes
the permissions, and `audit.py` records all changes.
"""
