"""`waltz-core backup | restore`: one consistent point of a cluster, and a cluster from it.

`cluster/change/backup.py` has the file and its rules, `cluster/change/restoring.py` the nodes of a
restored cluster, `archive/restored_manifest.py` its manifests.
"""
