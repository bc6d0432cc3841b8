"""`waltz-core backup | restore`: save a consistent state of a cluster; create a cluster from it.

`backup_command.py` takes a backup, and `restore_command.py` restores it. `backup_files.py` accesses
the file of the backup in a directory or an object store.

`cluster/change/backup.py` defines the content of this file and its rules,
`cluster/change/restoring.py` the znodes of a restored cluster, and `archive/restored_manifest.py`
its manifests.
"""
