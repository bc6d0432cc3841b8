"""One client for each cluster and Python process, kept between tasks.

Spark reuses its Python workers, and a new connection costs more than a small task. Spark's workers
import this module after their fork, so they inherit no client. If a process inherits a client
through another fork, it opens its own client. An idle client is closed when its process exits.

Rules:
    1. While one caller connects to a cluster, only callers for the same cluster wait. So if a
       ZooKeeper does not answer, connections to other clusters are not blocked.
    2. A Spark session may outlive a cluster. If another cluster replaces it at the same connect
       string, the client of the first cluster is closed. The next use connects to the new cluster.
"""

import atexit
import functools
import gc
import os
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from waltz_core.client import ClusterLayout, ReplicaSet, WaltzClient
from waltz_core.errors import ClusterKeyMismatch

ResultT = TypeVar("ResultT")

# The keys are process and cluster, so a forked process finds no inherited client. Each access is
# one dictionary operation, which needs no lock.
_clients: dict[tuple[int, str], WaltzClient] = {}
_connect_locks: dict[tuple[int, str], threading.Lock] = {}


def client_of(connect: str) -> WaltzClient:
    """Return this process's client for a cluster; the first call reads ZooKeeper.

    Raises:
        BadConfig: the connect string is not valid, or its root has no cluster.
        CoordinatorUnavailable: ZooKeeper does not answer.
    """
    return _get_or_create(connect, lambda: WaltzClient(connect))


def client_at(layout: ClusterLayout) -> WaltzClient:
    """Return this process's client for a cluster whose layout the driver has read.

    A task reads ZooKeeper only if a partition has moved since then.
    """
    client = _get_or_create(layout.connect, lambda: _create_first_client(layout))
    if client.cluster().key != layout.cluster.key:  # a worker may outlive a cluster
        close_client(layout.connect)
        client = _get_or_create(layout.connect, lambda: WaltzClient.at(layout))
    client.add_owners(layout)
    return client


def _create_first_client(layout: ClusterLayout) -> WaltzClient:
    client = WaltzClient.at(layout)
    freeze_existing_objects("connect")
    return client


@functools.cache
def freeze_existing_objects(_work_kind: str) -> None:
    """Exclude existing objects from later garbage collections; `_work_kind` names a kind of work.

    Spark collects garbage after every task, and imported objects would add 40 ms to each
    collection. Call the function after the first work of each kind, when its temporary objects are
    released. Later calls for the same kind do nothing.
    """
    gc.collect()
    gc.freeze()


def with_client(connect: str, use: Callable[[WaltzClient], ResultT]) -> ResultT:
    """Call `use` with this process's client; if the cluster was replaced, repeat it (rule 2).

    Raises:
        BadConfig, CoordinatorUnavailable: as for `client_of`.
        The errors of `use`.
    """
    try:
        return use(client_of(connect))
    except ClusterKeyMismatch:
        close_client(connect)
        return use(client_of(connect))


def query_replica_sets(
    connect: str,
    choose: Callable[[int], Sequence[int]],
    *,
    linearizable: bool,
    group: int | None = None,
) -> tuple[WaltzClient, dict[int, ReplicaSet]]:
    """Return the client, and the high-water mark and replicas of each chosen partition.

    The partitions are queried concurrently. Reads prefer replicas in `group`.

    Args:
        connect: the connect string of the cluster.
        choose: returns the partitions to query; its argument is the partition count of the log.
        linearizable: a quorum of replicas confirms each high-water mark.
        group: the group of storages near the caller.

    Raises:
        BadConfig, CoordinatorUnavailable: as for `client_of`.
        Unavailable: a partition does not answer.
    """

    def check(client: WaltzClient) -> tuple[WaltzClient, dict[int, ReplicaSet]]:
        sources = client.replica_sets(
            choose(client.partition_count), linearizable=linearizable, group=group
        )
        if any(source.cluster_key != client.cluster().key for source in sources.values()):
            raise ClusterKeyMismatch(
                f"the servers of {connect} belong to another cluster than before"
            )
        return client, sources

    return with_client(connect, check)


def close_client(connect: str) -> None:
    """Close this process's client for a cluster; the next use connects again."""
    client = _clients.pop((os.getpid(), connect), None)
    if client is not None:
        client.close()


def _get_or_create(connect: str, make: Callable[[], WaltzClient]) -> WaltzClient:
    key = (os.getpid(), connect)
    with _connect_locks.setdefault(key, threading.Lock()):  # rule 1
        client = _clients.get(key)
        if client is None:
            client = _clients[key] = make()
        return client


@atexit.register
def close_clients() -> None:
    """Close all clients of this process; the next use connects again."""
    for (pid, _), client in list(_clients.items()):
        if pid == os.getpid():
            client.close()
    _clients.clear()
