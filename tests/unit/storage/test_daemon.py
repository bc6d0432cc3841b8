"""Early connections before a storage has its partitions, and shutdown with a hanging disk."""

import asyncio
import itertools
import subprocess
import sys

import pytest

from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.storage.process.storage_daemon import StorageDaemon


class Link:
    """A connection that records its admission."""

    def __init__(self, name, admitted, *, is_closed=False):
        self.name = name
        self.is_closed = is_closed
        self._admitted = admitted

    def start(self, *_):
        self._admitted.append(self.name)


def test_open_connections_are_admitted_in_order_after_the_assignment_check():
    """A later connection of a server gets a higher number and supersedes the earlier one."""
    admitted = []
    daemon = StorageDaemon.__new__(StorageDaemon)
    daemon._is_assigned = asyncio.Event()
    daemon._waiting_links, daemon._links, daemon._numbers = [], {}, itertools.count(1)
    first, closed, second = (
        Link("first", admitted),
        Link("dead", admitted, is_closed=True),
        Link("second", admitted),
    )
    for link in (first, closed, second):
        daemon._accept(link)
    assert admitted == []
    daemon._on_assignment_checked()
    assert admitted == ["first", "second"]
    assert list(daemon._links.values()) == [first, second]


HANGING_PROGRAM = """
import asyncio, sys, threading
from uuid import UUID
from waltz_core.config.declarations import StorageConfig
from waltz_core.storage.files.disk_space import DiskSpace
from waltz_core.storage.process import storage_daemon, storage_health
from waltz_core.storage.process.storage_daemon import StaticCluster, StorageDaemon
from waltz_core.storage.service.storage_engine import StorageEngine

directory, what = sys.argv[1:]
hangs = lambda *_: threading.Event().wait()
storage_daemon.CLOSE_S_MAX = storage_health.DISK_STATUS_S_MAX = 0.2
storage_daemon.CLOSE_LOGS_S_MAX = 2 if what == "room" else 0.2

async def main():
    config = StorageConfig(directory=directory, listen_host="127.0.0.1", port=0, admin_port=0)
    daemon, stop = StorageDaemon(config, StaticCluster(UUID(int=1), 1, (0,)), None), asyncio.Event()

    async def use():
        if what == "room":
            DiskSpace.free_bytes = hangs
            health = await daemon.health()
            print(health.details["disk_error"])
        else:
            StorageEngine.close = storage_daemon.write_scrub_positions = hangs
        stop.set()

    tasks = []
    await daemon.serve(stop, lambda _: tasks.append(asyncio.create_task(use())))

asyncio.run(main())
"""


@pytest.mark.parametrize("hanging_call", ["room", "close"])
def test_a_hanging_disk_does_not_block_the_shutdown(tmp_path, hanging_call):
    """The next process needs the file locks; a thread that hangs on a disk may never return."""
    command = [sys.executable, "-c", HANGING_PROGRAM, str(tmp_path / "directory"), hanging_call]
    ended = subprocess.run(
        command, timeout=TEST_TIMEOUT_S, check=False, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
