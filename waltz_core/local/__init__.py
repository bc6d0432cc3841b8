"""A whole cluster on this machine: a real ZooKeeper, storages and servers, each its own process.

`local_cluster.py` starts and stops the processes, `zookeeper_process.py` runs the ZooKeeper from
PySpark's jars, and `ports.py` finds free ports.
"""

from waltz_core.local.local_cluster import LocalCluster, Member, cluster, running

__all__ = ["LocalCluster", "Member", "cluster", "running"]
