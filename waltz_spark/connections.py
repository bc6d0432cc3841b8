"""One client for each cluster and Python process, kept between tasks.

Why it stands alone: Spark reuses its Python workers, and a connection costs more than a small task.
A worker is forked before it imports this module, and a process that inherits a client by another
fork opens one of its own. An idle client is closed when its process ends.
"""

import atexit
import os
import threading

from waltz_core.client import WaltzClient

_lock = threading.Lock()
_clients: dict[tuple[int, str], WaltzClient] = {}


def client_of(connect: str) -> WaltzClient:
    """Return this process's client of a cluster, connecting it the first time.

    Raises:
        BadConfig: the connect string is wrong, or there is no cluster at its root.
        CoordinatorUnavailable: ZooKeeper does not answer.
    """
    key = (os.getpid(), connect)
    with _lock:
        client = _clients.get(key)
        if client is None:
            client = WaltzClient(connect)
            _clients[key] = client
        return client


@atexit.register
def _close_all() -> None:
    for (pid, _), client in list(_clients.items()):
        if pid == os.getpid():
            client.close()
    _clients.clear()
