"""`waltz-core backup | restore`: one consistent point of a cluster, and a cluster from it.

`backup_command.py` takes a backup and `restore_command.py` restores it; `backup_files.py` finds its
file in a directory or an object store.

`cluster/change/backup.py` has the file and its rules, `cluster/change/restoring.py` the nodes of a
restored cluster, `archive/restored_manifest.py` its manifests.
"""
