"""The storage daemon: its ports, its registration in ZooKeeper, its metrics and its shutdown.

`storage_daemon.py` is the process. `served_replicas.py` decides which partitions the process
serves, `admin_port.py` executes administration requests, and `segment_sharing.py` passes open files
to readers on this machine. `archive_rechecks.py` repeats reads of the archive that have failed.
`storage_health.py` determines the health of the storage, and `storage_metrics.py` has the metrics.
`append_lines.py` logs each synced append at level DEBUG.
"""
