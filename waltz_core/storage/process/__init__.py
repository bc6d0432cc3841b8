"""The storage daemon: its ports, its registration in ZooKeeper, its metrics and its shutdown.

`storage_daemon.py` is the process. `served_replicas.py` decides which partitions it serves,
`admin_port.py` carries out administration, `segment_sharing.py` passes open files to readers on
this machine, and `archive_rechecks.py` repeats reads of the archive that have failed.
`storage_health.py` finds out the health of the storage, and `storage_metrics.py` has the metrics.
"""
