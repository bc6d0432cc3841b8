"""The ZooKeeper in memory: order of watches, sessions and faults."""

import asyncio

import pytest

from waltz_core import errors
from waltz_core.cluster.znodes.interface import (
    NO_NODE,
    CreateNode,
    DeleteNode,
    SessionState,
    SetNode,
)
from waltz_core.cluster.zookeeper.zookeeper_in_memory import MemoryZooKeeper, WriteFault


class ActionSignal:
    """A signal that logs its name and may call a function when it is set."""

    def __init__(self, log, name, action=None):
        self.log, self.name, self.action = log, name, action

    def set(self):
        self.log.append(self.name)
        if self.action:
            self.action()

    def clear(self):
        pass

    async def wait(self):
        raise AssertionError("nothing here waits")


def run_now(coroutine):
    """Run a coroutine that must not wait (rule 1)."""
    with pytest.raises(StopIteration) as done:
        coroutine.send(None)
    return done.value.value


def test_operations_of_the_memory_zookeeper_never_wait():
    zookeeper = MemoryZooKeeper(asyncio.Event)
    coordinator = zookeeper.coordinator("/w")
    run_now(zookeeper.session().write([CreateNode("/a", b"1")]))
    with pytest.raises(errors.BadConfig):
        coordinator.read_cluster().send(None)
    assert zookeeper.dump() == {"/": b"", "/a": b"1"}


def test_watches_fire_once_in_order_and_after_the_write():
    zookeeper = MemoryZooKeeper(asyncio.Event)
    reader, writer = zookeeper.session(), zookeeper.session()
    run_now(writer.write([CreateNode("/a")]))
    log = []
    seen = []

    def write_more():
        seen.append(zookeeper.dump()["/a"])
        run_now(writer.write([SetNode("/b", b"", 0)]))

    first, second = ActionSignal(log, "first", write_more), ActionSignal(log, "second")
    third = ActionSignal(log, "third")
    run_now(writer.write([CreateNode("/b")]))
    run_now(reader.get("/a", first))
    run_now(reader.get("/a", second))
    run_now(reader.get("/b", third))
    run_now(writer.write([SetNode("/a", b"x", 0)]))
    assert log == ["first", "second", "third"]
    assert seen == [b"x"]
    run_now(writer.write([SetNode("/a", b"y", 1)]))
    assert log == ["first", "second", "third"]


def test_a_rejected_write_fires_no_watch_and_changes_no_node():
    zookeeper = MemoryZooKeeper(asyncio.Event)
    session = zookeeper.session()
    run_now(session.write([CreateNode("/a"), CreateNode("/a/b")]))
    log = []
    run_now(session.get("/a", ActionSignal(log, "a")))
    before = zookeeper.dump()
    for operations in (
        [SetNode("/a", b"x", 0), SetNode("/a", b"y", 0)],
        [SetNode("/a", b"x", 0), DeleteNode("/a", 1)],
        [SetNode("/a", b"x", 0), CreateNode("/none/c")],
        [SetNode("/a", b"x", 0), CreateNode("/a/b")],
        [SetNode("/a", b"x", 0), DeleteNode("/none", 0)],
    ):
        with pytest.raises(errors.CoordinatorConflict):
            session.write(operations).send(None)
    assert zookeeper.dump() == before
    assert log == []


def test_a_suspended_session_rejects_requests_and_reports_its_states():
    zookeeper = MemoryZooKeeper(asyncio.Event)
    session = zookeeper.session()
    states = []
    session.on_state(states.append)
    signal = session.new_signal()
    run_now(session.write([CreateNode("/e", is_ephemeral=True), CreateNode("/p")]))
    session.suspend()
    assert signal.is_set()
    for request in (session.get("/e"), session.children("/"), session.write([]), session.sync()):
        with pytest.raises(errors.CoordinatorUnavailable):
            request.send(None)
    session.resume()
    number = session.session_number
    assert run_now(session.get("/e")).stat.owner == number
    session.expire()
    session.resume()
    assert session.session_number != number
    assert sorted(zookeeper.dump()) == ["/", "/p"]
    session.faults += [WriteFault.REQUEST_LOST, WriteFault.REPLY_LOST]
    for expected in (b"", b"1"):
        with pytest.raises(errors.CoordinatorOutcomeUnknown):
            session.write([SetNode("/p", b"1", 0)]).send(None)
        assert run_now(session.get("/p")).data == expected
    assert run_now(session.write([DeleteNode("/p", 1)])) == [NO_NODE]
    session.drop_signal(signal)
    signal.clear()
    run_now(session.close())
    assert not signal.is_set()
    assert states == [
        SessionState.SUSPENDED,
        SessionState.CONNECTED,
        SessionState.LOST,
        SessionState.CONNECTED,
    ]
