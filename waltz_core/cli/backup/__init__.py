"""`waltz-core backup | restore`: back up a cluster, and create a cluster from a backup.

`backup_command.py` takes a backup, and `restore_command.py` restores it. `backup_files.py` accesses
the file of the backup in a directory or an object store.

`cluster/change/backup.py` defines the content of this file. `cluster/change/restoring.py` computes
the znodes of a restored cluster, and `archive/restored_manifest.py` its manifests.
"""
