"""The data of one cluster in ZooKeeper: the tree of nodes, their values and their bytes.

`interface.py` is the interface to ZooKeeper that all other code uses. `paths.py` contains the path
of each node, and `model.py` the format of its value. `node_access.py` reads, writes and watches the
nodes of one cluster, and `tree.py` lists or deletes whole clusters. `restore_sources.py` describes
from which backups a cluster was restored, and `access_node.py` encodes the permissions.
`connection_history.py` records outages of ZooKeeper, and `shared_request.py` merges identical
requests.
"""
