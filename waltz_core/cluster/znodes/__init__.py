"""The data of one cluster in ZooKeeper: the tree of nodes, their values and their bytes.

`interface.py` is the interface to ZooKeeper that all other code uses. `paths.py` has the path of
each node and `model.py` its value. `node_access.py` reads, writes and watches the nodes of one
cluster, and `tree.py` lists or deletes whole clusters. `restore_sources.py` has the node of a
cluster that was restored from a backup, and `access_node.py` the node with the permissions.
`connection_history.py` records since when ZooKeeper has been unavailable; `shared_request.py`
merges identical requests.
"""
