"""`waltz-core cluster`: create, show and change a cluster.

`cluster_command.py` creates, shows and protects a cluster. `cluster_list.py` lists and deletes
clusters. `cluster_changes.py` changes storages and replicas, and `cluster_preferences.py` the
preferred servers of partitions. `cluster_verify.py` and `cluster_connectivity.py` check a cluster.
`cluster_disaster_recovery.py` recovers a cluster from its storages, and `archive_recovery.py` finds
the archived part of the logs.
"""
