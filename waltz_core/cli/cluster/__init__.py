"""`waltz-core cluster`: create, show and change a cluster.

`cluster_command.py` creates, shows and protects one; `cluster_list.py` lists and deletes clusters.
`cluster_changes.py` changes storages and replicas, `cluster_preferences.py` the servers of
partitions. `cluster_verify.py` and `cluster_connectivity.py` check a cluster, and
`cluster_disaster_recovery.py` recovers one from its storages, with what `archive_recovery.py` finds
in the archive.
"""
