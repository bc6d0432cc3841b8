"""Servers monitor each other, with real sockets."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from tests.loops import poll_until, run_on_loop
from tests.ports import free_port
from waltz_core.cluster.membership import reachability
from waltz_core.cluster.membership.reachability import ReachReport
from waltz_core.cluster.membership.registration import ServersView
from waltz_core.cluster.znodes.model import ServerDescriptor
from waltz_core.errors import CoordinatorUnavailable
from waltz_core.records.record import PartitionId, ServerId
from waltz_core.server.process import failure_detector
from waltz_core.server.process.failure_detector import FailureDetector
from waltz_core.transport import net
from waltz_core.transport.listening import Listener, listen
from waltz_core.wire.messages import WireProtocol

HOST = "127.0.0.1"
ME, OTHER = ServerId(1), ServerId(2)


# The number of dials since the start of the test. An unwanted event would occur within a few dials.
DIALS = [0]
SOME_DIALS = 8


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten all pauses, and count the dials; changes of a test are undone afterwards."""
    monkeypatch.setattr(failure_detector, "RETRY_PAUSE_S", 0.02)
    monkeypatch.setattr(failure_detector, "REFUSED_PAUSE_S", 0.001)
    # A cancelled dial may have reached the listener, but does not count as a connection.
    monkeypatch.setattr(failure_detector, "DIAL_TIMEOUT_S", 15.0)
    dial = net.dial

    async def counting_dial(*args, **options):
        DIALS[0] += 1
        return await dial(*args, **options)

    monkeypatch.setattr(net, "dial", counting_dial)
    DIALS[0] = 0


def view_of(*servers: ServerDescriptor) -> ServersView:
    me = ServerDescriptor(ME, HOST, 1)
    return ServersView({each.server_id: each for each in (me, *servers)}, {}, is_settled=True)


async def wait_for_dials() -> None:
    wanted = DIALS[0] + SOME_DIALS
    await poll_until(lambda: DIALS[0] >= wanted)


class World:
    """The failure detector of one server, and the servers that it has removed."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.removed: list[ServerDescriptor] = []
        self.failures = 0
        self.links: list[net.Link] = []
        self.detector = FailureDetector(ME, tasks, self.remove_dead)

    async def remove_dead(self, dead: ServerDescriptor) -> None:
        if self.failures:
            self.failures -= 1
            raise CoordinatorUnavailable("not now")
        self.removed.append(dead)

    async def listen(self, port: int | None = None) -> Listener:
        """Listen at a port, or again at the port of an earlier listener."""
        return await listen(WireProtocol.CLIENT, HOST, port or free_port(), self.links.append)

    async def reached(self) -> tuple[Listener, ServerDescriptor]:
        """Let another server listen, and wait until it is reached."""
        listener = await self.listen()
        other = ServerDescriptor(OTHER, HOST, listener.port)
        self.detector.watch_servers(view_of(other))
        await poll_until(lambda: self.links)
        return listener, other


@contextlib.asynccontextmanager
async def world() -> AsyncIterator[World]:
    async with asyncio.TaskGroup() as tasks:
        world = World(tasks)
        yield world
        world.detector.stop()


@run_on_loop
async def test_a_server_that_no_longer_listens_is_removed_once():
    async with world() as servers:
        listener, other = await servers.reached()
        dials = DIALS[0]
        await listener.close()
        await poll_until(lambda: servers.removed)
        assert DIALS[0] - dials >= 3, "a single refused connection may be a restart"
        # The server may be alive: it must be reached before it can be declared dead again.
        await wait_for_dials()
        assert servers.removed == [other]
        listener = await servers.listen(listener.port)
        await poll_until(lambda: len(servers.links) == 2)
        await listener.close()
        await poll_until(lambda: len(servers.removed) == 2)


@run_on_loop
async def test_a_dead_server_is_removed_with_its_newest_descriptor():
    async with world() as servers:
        listener, _ = await servers.reached()
        now = ServerDescriptor(OTHER, HOST, listener.port, (PartitionId(3),))
        servers.detector.watch_servers(view_of(now))
        await listener.close()
        await poll_until(lambda: servers.removed)
        assert servers.removed == [now]
        assert len(servers.links) == 1


@run_on_loop
async def test_a_removal_that_did_not_reach_zookeeper_is_retried():
    async with world() as servers:
        servers.failures = 2
        listener, _ = await servers.reached()
        await listener.close()
        await poll_until(lambda: servers.removed)
        assert servers.failures == 0


@run_on_loop
async def test_a_lost_connection_alone_is_not_logged():
    async with world() as servers:
        listener = await servers.listen()
        servers.detector.watch_servers(view_of(ServerDescriptor(OTHER, HOST, listener.port)))
        for count in range(1, 4):
            await poll_until(lambda count=count: len(servers.links) == count)
            servers.links[-1].abort("for the test")
        await poll_until(lambda: len(servers.links) == 4)
        assert servers.removed == []
        await listener.close()


@run_on_loop
async def test_a_server_that_was_never_reached_is_not_declared_dead():
    async with world() as servers:
        servers.detector.watch_servers(view_of(ServerDescriptor(OTHER, HOST, free_port())))
        await wait_for_dials()
        assert servers.removed == []


@run_on_loop
@pytest.mark.parametrize("host", ["", "waltz..example", "a\ud800"])
async def test_a_server_with_an_invalid_host_name_is_published_as_unreachable(host: str):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reachability, "FAILING_MS", 0)
        async with world() as servers:
            servers.detector.watch_servers(view_of(ServerDescriptor(OTHER, host, 1)))
            await wait_for_dials()
            report = servers.detector._results.reachability.report(0)
    assert report.unreachable.keys() == {OTHER}
    assert ReachReport.from_bytes(report.to_bytes()) == report


@run_on_loop
async def test_a_hanging_server_that_accepts_connections_is_not_removed():
    failure_detector.REFUSED_PAUSE_S = 0.1  # type: ignore[misc] - until the silent one listens
    async with world() as servers:
        listener, _ = await servers.reached()
        await listener.close()
        failure_detector.DIAL_TIMEOUT_S = 0.05  # type: ignore[misc]
        with socket.socket() as silent:  # accepts connections, and sends nothing
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            silent.bind((HOST, listener.port))
            silent.listen()
            await wait_for_dials()
            assert servers.removed == []
            servers.detector.stop()


@run_on_loop
async def test_a_dying_server_that_accepts_one_more_connection_is_removed():
    failure_detector.RETRY_PAUSE_S = 3600.0  # type: ignore[misc]
    failure_detector.REFUSED_PAUSE_S = 0.1  # type: ignore[misc] - until the dying one listens
    async with world() as servers:
        listener, _ = await servers.reached()
        await listener.close()
        with socket.socket() as closing_socket:
            closing_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            closing_socket.bind((HOST, listener.port))
            closing_socket.listen()
            closing_socket.setblocking(False)
            taken, _ = await asyncio.get_running_loop().sock_accept(closing_socket)
        taken.close()
        await poll_until(lambda: servers.removed)
        assert [each.server_id for each in servers.removed] == [OTHER]


@run_on_loop
async def test_the_detector_backs_off_if_a_server_closes_each_connection():
    pauses: list[float] = []

    async def record_pause(_watch, seconds: float) -> None:
        pauses.append(seconds)
        await asyncio.sleep(0)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(failure_detector._ServerWatch, "_pause", record_pause)
        patched.setattr(failure_detector, "RETRY_PAUSE_S", 60.0)  # longer than the test
        async with world() as servers:

            def close(link: net.Link) -> None:
                servers.links.append(link)
                link.close("no")

            listener = await listen(WireProtocol.CLIENT, HOST, free_port(), close)
            servers.detector.watch_servers(view_of(ServerDescriptor(OTHER, HOST, listener.port)))
            await poll_until(lambda: len(servers.links) >= 19)
            servers.detector.stop()
            await listener.close()
    assert pauses[:18] == [*(0.001 * 2**count for count in range(16)), 60.0, 60.0]


@run_on_loop
async def test_a_server_that_has_left_is_not_monitored():
    async with world() as servers:
        listener, _ = await servers.reached()
        servers.detector.watch_servers(view_of())
        await poll_until(lambda: servers.links[0].is_closed)
        await listener.close()
    # All watches have ended; otherwise the block would not end.
    assert servers.removed == []
    assert DIALS[0] == 1
