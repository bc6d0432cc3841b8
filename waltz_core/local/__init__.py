"""A whole cluster on this machine: ZooKeeper, storages and servers as real processes.

`local_cluster.py` starts and stops the processes, `zookeeper_process.py` runs the ZooKeeper from
PySpark's jars, and `ports.py` finds free ports.
"""

from waltz_core.local.local_cluster import LocalCluster, Member, cluster, running_cluster

__all__ = ["LocalCluster", "Member", "cluster", "running_cluster"]
