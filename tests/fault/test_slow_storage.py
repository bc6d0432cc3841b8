"""A storage that stalls again and again: appends continue, and doctor and log name it."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.fault.changing import address
from tests.fault.doctor import doctor, from_elsewhere
from tests.fault.load import Story, wait_until
from waltz_core.local import LocalCluster

pytestmark = pytest.mark.fault
STALLED_S, RUNNING_S = 0.45, 0.1


@contextmanager
def stalling(cluster: LocalCluster, name: str) -> Iterator[None]:
    """Stop a member for most of each half second."""
    is_over = threading.Event()

    def stall() -> None:
        while not is_over.is_set():
            cluster.kill(name, signal.SIGSTOP)
            is_over.wait(STALLED_S)
            cluster.kill(name, signal.SIGCONT)
            is_over.wait(RUNNING_S)

    thread = threading.Thread(target=stall, name="stall")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def slow_lines(cluster: LocalCluster, storage: str) -> list[str]:
    """Return the servers' log lines about slow appends at a storage."""
    logs = [cluster.log_path(each.name) for each in cluster.members if each.kind == "server"]
    lines = [line for log in logs for line in log.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if "append.slow" in line and f"replica={storage} " in line]


def test_the_doctor_and_the_log_name_a_storage_that_stalls(story: Story):
    cluster, storage = story.cluster, address(story.cluster, "storage-2")
    with story.load() as load, stalling(cluster, "storage-2"):
        load.await_commits()
        wait_until("the log names it", lambda: slow_lines(cluster, storage))

        def is_found() -> bool:
            found = doctor(*from_elsewhere(cluster.connect))
            return ("storage-slow", storage) in {(each["name"], each["about"]) for each in found}

        wait_until("the doctor names it", is_found)
        load.await_commits()
    others = [address(cluster, each) for each in ("storage-1", "storage-3")]
    found = doctor(*from_elsewhere(cluster.connect))
    assert not any(each["about"] in others for each in found)
    story.check_whole()
    story.check_agrees()
