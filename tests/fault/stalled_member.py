"""A member that stalls repeatedly, like a member with a slow disk."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from waltz_core.local import LocalCluster

# A storage is slow only in comparison with its peers, which are also slow on a busy machine.
STALL_S_MIN, STALL_S_MAX, BETWEEN_STALLS_S = 0.45, 3.0, 0.1


@contextmanager
def stall_repeatedly(cluster: LocalCluster, name: str) -> Iterator[None]:
    """Stop a member again and again, each time for a little longer."""
    is_over = threading.Event()

    def stall() -> None:
        stalled_s = STALL_S_MIN
        while not is_over.is_set():
            cluster.kill(name, signal.SIGSTOP)
            is_over.wait(stalled_s)
            cluster.kill(name, signal.SIGCONT)
            is_over.wait(BETWEEN_STALLS_S)
            stalled_s = min(1.02 * stalled_s, STALL_S_MAX)

    thread = threading.Thread(target=stall, name="stall")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
