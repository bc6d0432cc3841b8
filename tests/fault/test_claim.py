"""An attempt at a task's rows that is over stays over when servers forget their mounts."""

import asyncio
import signal

import pytest

from tests.fault.load import Story
from tests.patience import HANG_S
from waltz_core.client import ClusterLayout, TaskClaim, WaltzClient, begin_write, end_write
from waltz_core.errors import ConnectionSuperseded

pytestmark = pytest.mark.fault
FOR_LONG = 1 << 50
STORAGE_COUNT = 1
SERVERS = ("server-1", "server-2")


def layout_of(connect: str) -> ClusterLayout:
    with WaltzClient(connect) as client:
        return client.layout()


def attempt(story: Story, write: str, run: str) -> WaltzClient:
    """Begin an attempt at task 0 of a write."""
    connect = story.cluster.connect
    return WaltzClient.at(layout_of(connect), claim=TaskClaim(connect, write, 0, run=run))


def servers_forget(story: Story) -> None:
    for name in SERVERS:
        story.cluster.kill(name, signal.SIGKILL)
    for name in SERVERS:
        story.cluster.start(name)


def begin(story: Story, write: str) -> None:
    asyncio.run(begin_write(story.cluster.connect, write, {}, keep_ms=FOR_LONG))


def records_with(story: Story, data: bytes) -> int:
    found = 0
    with WaltzClient(story.cluster.connect) as client:
        for partition, last in client.high_water_marks(linearizable=True).items():
            for chunk in client.read_range(partition, 0, last) if last >= 0 else ():
                found += bytes(chunk.records).count(data)
    return found


def test_a_newer_attempt_ends_an_older_one_over_a_fail_over(story: Story) -> None:
    begin(story, "claim-1")
    with attempt(story, "claim-1", "a") as old:
        old.append(b"first of the old", partition=0).result(HANG_S)
        with attempt(story, "claim-1", "a") as new:
            new.mount([0])
            servers_forget(story)
            with pytest.raises(ConnectionSuperseded):
                old.append(b"late of the old", partition=0).result(HANG_S)
            new.append(b"first of the new", partition=0).result(HANG_S)
    assert records_with(story, b"first of the old") == 1
    assert records_with(story, b"first of the new") == 1
    assert records_with(story, b"late of the old") == 0


def test_a_write_that_is_done_ends_its_attempts_over_a_fail_over(story: Story) -> None:
    begin(story, "claim-2")
    connect = story.cluster.connect
    with attempt(story, "claim-2", "a") as straggler:
        straggler.append(b"in time", partition=1).result(HANG_S)
        asyncio.run(end_write(connect, "claim-2", {}, keep_ms=FOR_LONG))
        servers_forget(story)
        with pytest.raises(ConnectionSuperseded):
            straggler.append(b"too late", partition=1).result(HANG_S)
    assert records_with(story, b"in time") == 1
    assert records_with(story, b"too late") == 0
