"""A server hangs, while its threads would keep its ZooKeeper session; another one is frozen."""

import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fault.changing import address
from tests.fault.child import Child
from tests.fault.load import ROOT, Story, shown, wait_until
from tests.patience import HANG_S
from waltz_core.client import WaltzClient
from waltz_core.config import ClientConfig

STORAGE_COUNT = 1
# Nothing in this file may take so long.
REQUEST_MS = 600_000


def owners(story: Story) -> set[object]:
    """Return the addresses that own partitions."""
    partitions = shown(story.cluster)["partitions"]
    assert isinstance(partitions, dict)
    return {each["server"] for each in partitions.values()}


class Hanging(Child):
    """server-1, as a process that can hang."""

    def __init__(self, story: Story, folder: Path) -> None:
        config = story.cluster.directory / "conf" / "server-1.toml"
        self._log = folder / "log"
        self._while = folder / "while"
        words = [str(self._while), str(config)]
        with self._log.open("w") as log:
            self.run([sys.executable, "-m", "tests.fault.hanging_server", *words], log, ROOT)

    def hang(self) -> None:
        """Hang until `go_on`."""
        self._while.touch()
        self.process.send_signal(signal.SIGUSR1)

    def go_on(self) -> None:
        """Have the loop run again."""
        self._while.unlink()

    def said(self) -> str:
        """Return its log."""
        return self._log.read_text(encoding="utf-8")


@pytest.fixture
def hanging(story: Story, tmp_path: Path) -> Iterator[Hanging]:
    """Run server-1 in a process that can hang."""
    story.cluster.kill("server-1", signal.SIGTERM)
    server = Hanging(story, tmp_path)
    try:
        wait_until("both own some", lambda: len(owners(story)) == 2)
        yield server
    finally:
        server.kill()


def test_its_partitions_move_and_it_returns_as_after_any_expiry(story: Story, hanging: Hanging):
    with story.load() as load:
        load.await_commits()
        hanging.hang()
        other = {address(story.cluster, "server-2")}
        wait_until("the other one owns all", lambda: owners(story) == other)
        load.await_commits()
        assert "zookeeper.loop_unresponsive" in hanging.said()
        hanging.go_on()
        wait_until("both own some again", lambda: len(owners(story)) == 2)
        load.await_commits()
    assert "zookeeper.loop_responsive" in hanging.said()
    assert hanging.process.poll() is None
    story.check_agrees()


def owned_by(story: Story, name: str) -> list[int]:
    """Return the partitions that a server owns."""
    partitions = shown(story.cluster)["partitions"]
    assert isinstance(partitions, dict)
    where = address(story.cluster, name)
    return [int(number) for number, each in partitions.items() if each["server"] == where]


def test_a_client_that_watches_nothing_notices_that_its_server_is_frozen(story: Story):
    """Like a Spark task: it knows where everything is, and has no session with ZooKeeper."""
    wait_until("it owns some", lambda: owned_by(story, "server-1"))
    with WaltzClient(story.cluster.connect) as watching:
        layout = watching.layout()
    (number, *_) = owned_by(story, "server-1")
    with (
        WaltzClient.at(layout, ClientConfig(request_timeout_ms=REQUEST_MS)) as client,
        ThreadPoolExecutor(2) as threads,
    ):
        first = client.append(story.row(number), partition=number).result(HANG_S)
        story.cluster.kill("server-1", signal.SIGSTOP)
        try:
            appended = client.append(story.row(number), partition=number)
            asked = threads.submit(client.high_water_mark, number)
            read = threads.submit(lambda: list(client.read_range(number, first, first)))
            assert appended.result(HANG_S) == first + 1
            assert asked.result(HANG_S) >= first
            assert [len(chunk.lengths) for chunk in read.result(HANG_S)] == [1]
        finally:
            story.cluster.kill("server-1", signal.SIGCONT)
    story.check_whole()
