"""A server whose event loop hangs, while its threads would keep its ZooKeeper session."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.changing import address
from tests.fault.child import Child
from tests.fault.load import ROOT, Story, shown, wait_until


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
