"""The coordinator over a real ZooKeeper: the scenarios of the contract, and lost connections."""

import asyncio
import contextlib
import logging
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from random import Random

import pytest
from kazoo.client import KazooClient

from tests import write_registry_contract
from tests.cluster_contract import (
    SCENARIOS,
    CallbackRecorder,
    create_cluster,
    owners_and_generations,
    run_meanwhile,
    server_descriptor,
)
from tests.integration.conftest import ZooKeeperProcess
from tests.loops import poll_until
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core import errors
from waltz_core.cluster.coordinator import Coordinator
from waltz_core.cluster.znodes.interface import (
    CheckVersion,
    CreateNode,
    DeleteNode,
    Operation,
    SessionState,
    SetNode,
    Znodes,
)
from waltz_core.cluster.zookeeper import zookeeper_session
from waltz_core.cluster.zookeeper.zookeeper_in_memory import MemoryZooKeeper

pytestmark = pytest.mark.zookeeper


class RealWorld:
    def __init__(self, host: str) -> None:
        self.host = host
        self.sessions: list[zookeeper_session.ZooKeeperSession] = []

    async def znodes(self) -> Znodes:
        session = zookeeper_session.ZooKeeperSession(
            [self.host],
            connect_timeout_ms=10_000,
            # The longest session timeout, so that the session survives a slow restart of ZooKeeper.
            session_timeout_ms=10_000,
            request_timeout_ms=5_000,
        )
        await session.open()
        self.sessions.append(session)
        return session

    async def expire(self, znodes: zookeeper_session.ZooKeeperSession) -> None:
        # A second client takes over the session and closes it: ZooKeeper then ends the session.
        # The first client may take the session back before. Then the second client tries again,
        # until ZooKeeper gives it a new session.
        identity = znodes._client.client_id
        has_expired = False
        while not has_expired:
            second_client = KazooClient(self.host, client_id=identity)
            await asyncio.to_thread(second_client.start)
            has_expired = second_client.client_id != identity
            await asyncio.to_thread(second_client.stop)
            await asyncio.to_thread(second_client.close)


@contextlib.asynccontextmanager
async def world_at(host: str) -> AsyncIterator[RealWorld]:
    world = RealWorld(host)
    try:
        yield world
    finally:
        for session in world.sessions:
            await session.close()


@pytest.mark.parametrize(
    "scenario",
    SCENARIOS + write_registry_contract.SCENARIOS,
    ids=lambda scenario: scenario.__name__,
)
def test_coordinators_fulfill_their_contract_with_a_real_zookeeper(scenario, zookeeper):
    async def run():
        async with world_at(zookeeper) as world:
            await scenario(world, f"/scenarios/{scenario.__name__}")

    asyncio.run(run())


def test_a_connect_string_is_sufficient_for_a_connection(zookeeper):
    async def run():
        async with zookeeper_session.open_session(f"{zookeeper}/deep/down/cluster") as coordinator:
            assert coordinator.connect_string == f"{zookeeper}/deep/down/cluster"
            assert coordinator.session_state is SessionState.CONNECTED
            with pytest.raises(errors.BadConfig, match="is no cluster at /deep/down/cluster"):
                await coordinator.read_cluster()
        with pytest.raises(errors.CoordinatorUnavailable, match="closed"):
            await coordinator.read_cluster()

    asyncio.run(run())


def test_the_session_timeout_is_the_negotiated_value(zookeeper):
    async def run():
        # The session timeout is limited to the maximum in `zookeeper_config`.
        async with zookeeper_session.open_session(
            f"{zookeeper}/a", session_timeout_ms=60_000
        ) as coordinator:
            assert coordinator.session_timeout_ms == 40_000

    asyncio.run(run())


def test_a_hanging_event_loop_loses_its_zookeeper_session_and_is_notified(zookeeper):
    async def run():
        other = KazooClient(zookeeper)
        other.start()
        async with world_at(zookeeper) as world:
            session = zookeeper_session.ZooKeeperSession(
                [zookeeper],
                connect_timeout_ms=10_000,
                session_timeout_ms=1_000,
                request_timeout_ms=5_000,
            )
            await session.open()
            world.sessions.append(session)
            await session.write([CreateNode("/hangs", is_ephemeral=True)])
            number, states, is_back = session.session_number, [], asyncio.Event()
            session.on_state(states.append)
            session.on_state(lambda state: state is SessionState.CONNECTED and is_back.set())
            deadline = time.monotonic() + TEST_TIMEOUT_S
            # This thread blocks between its checks, and the threads of kazoo run meanwhile.
            while other.exists("/hangs") is not None:
                assert time.monotonic() < deadline
                time.sleep(0.05)  # noqa: ASYNC251
            async with asyncio.timeout(TEST_TIMEOUT_S):
                await is_back.wait()
            assert SessionState.LOST in states
            assert session.session_number != number
            await session.write([CreateNode("/hangs", is_ephemeral=True)])
        other.stop()
        other.close()

    asyncio.run(run())


# A session timeout, and a much shorter limit: a test that waited for the timeout would fail.
LONG_MS, SOONER_S = 60_000, 30


def test_a_session_is_closed_although_no_thread_can_be_started(zookeeper, monkeypatch):
    """While Python 3.12 exits, no thread can be started; open clients are closed at this time."""

    def refuse(_thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    async def run():
        session = zookeeper_session.ZooKeeperSession(
            [zookeeper],
            connect_timeout_ms=10_000,
            session_timeout_ms=LONG_MS,
            request_timeout_ms=5_000,
        )
        await session.open()
        await session.write([CreateNode("/exits", is_ephemeral=True)])
        monkeypatch.setattr(threading.Thread, "start", refuse)
        await session.close()
        monkeypatch.undo()

    asyncio.run(run())
    other = KazooClient(zookeeper)
    other.start()
    assert other.exists("/exits") is None
    other.stop()
    other.close()


def test_a_host_name_lookup_that_fails_once_does_not_end_the_session(zookeeper, monkeypatch):
    async def body():
        async with world_at(zookeeper.replace("127.0.0.1", "localhost")) as world:
            session = await world.znodes()
            lookup, errors_left = socket.getaddrinfo, [OSError(24, "Too many open files")]

            def failing(*words, **named):
                if errors_left:
                    raise errors_left.pop()
                return lookup(*words, **named)

            monkeypatch.setattr(socket, "getaddrinfo", failing)
            lost = asyncio.Event()
            session.on_state(lambda state: state is SessionState.SUSPENDED and lost.set())
            connection = session._client._connection
            connection._socket.shutdown(socket.SHUT_RDWR)
            async with asyncio.timeout(TEST_TIMEOUT_S):
                await lost.wait()
            await poll_until(lambda: session.state is SessionState.CONNECTED)
            assert not errors_left
            assert not connection.connection_stopped.is_set()

    asyncio.run(body())


def test_a_host_whose_lookup_is_slow_does_not_delay_the_others(zookeeper, monkeypatch):
    lookup, may_end = socket.getaddrinfo, threading.Event()

    def slow(host, *words, **named):
        if host == "zk-2.example.com":
            may_end.wait()
            raise socket.gaierror(-3, "Temporary failure in name resolution")
        return lookup(host, *words, **named)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    hosts = f"zk-2.example.com:2181,{zookeeper.replace('127.0.0.1', 'localhost')}"

    async def run():
        async with zookeeper_session.open_session(
            f"{hosts}/a", session_timeout_ms=LONG_MS
        ) as coordinator:
            assert coordinator.session_state is SessionState.CONNECTED
            assert not may_end.is_set()

    try:
        asyncio.run(run())
    finally:
        may_end.set()


def test_an_address_where_nothing_listens_is_reported_in_time():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # no process listens on it
        host = f"127.0.0.1:{probe.getsockname()[1]}"
        started_s = time.monotonic()

        async def run():
            with pytest.raises(
                errors.CoordinatorUnavailable, match=f"answered at {host} within 700 ms"
            ):
                await zookeeper_session.connect(
                    f"{host}/a", connect_timeout_ms=700, session_timeout_ms=LONG_MS
                )

        asyncio.run(run())
    assert 0.6 < time.monotonic() - started_s < SOONER_S


def test_a_process_that_never_answers_is_reported_in_time():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        host = f"127.0.0.1:{silent.getsockname()[1]}"

        async def run():
            started_s = time.monotonic()
            with pytest.raises(errors.CoordinatorUnavailable, match=host):
                await zookeeper_session.connect(
                    f"{host}/a", connect_timeout_ms=700, session_timeout_ms=LONG_MS
                )
            return time.monotonic() - started_s

        assert asyncio.run(run()) < SOONER_S


@contextlib.asynccontextmanager
async def proxy(
    zookeeper: str, action_of: Callable[[int, bytes], str]
) -> AsyncIterator[tuple[str, list[int]]]:
    """Listen before a ZooKeeper; yield the host, and the numbers of the connections, from 0.

    `action_of` gets a connection's number, and the bytes that the client sends. Depending on the
    result, the proxy forwards the bytes ("pass"), never answers ("keep"), or closes the connection
    ("close").
    """
    arrived: list[int] = []

    async def accept(reader, writer):
        number = len(arrived)
        arrived.append(number)
        both_ways = [writer]
        try:
            host, port = zookeeper.split(":")
            back_reader, back_writer = await asyncio.open_connection(host, int(port))
            both_ways.append(back_writer)
            async with asyncio.TaskGroup() as both:
                both.create_task(forward(reader, back_writer, lambda data: action_of(number, data)))
                both.create_task(forward(back_reader, writer, lambda _data: "pass"))
        finally:
            # Close also the connections that are cancelled with the loop: an open connection would
            # fail another test.
            for end in both_ways:
                end.transport.abort()

    async def forward(reader, writer, choose):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65_536):
                chosen = choose(data)
                if chosen == "close":
                    break
                if chosen == "pass":
                    writer.write(data)
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", arrived
    finally:
        server.close()


def test_the_coordinator_reconnects_if_a_session_request_is_never_answered(zookeeper):
    """A ZooKeeper server that is just starting does this.

    The client must not wait for the session timeout.
    """

    def action_of(number: int, _data: bytes) -> str:
        return "pass" if number else "keep"

    async def run():
        async with proxy(zookeeper, action_of) as (host, arrived):
            async with zookeeper_session.open_session(
                f"{host}/a", session_timeout_ms=LONG_MS
            ) as coordinator:
                assert coordinator.session_state is SessionState.CONNECTED
            return arrived

    # The second answer has a limit of a second, so a busy ZooKeeper may get a third request.
    assert len(asyncio.run(run())) >= 2


def test_a_read_is_repeated_if_its_connection_is_lost(zookeeper):
    lost = []

    def action_of(number: int, data: bytes) -> str:
        if b"/lost/ids/client" not in data or lost:
            return "pass"
        lost.append(number)
        return "close"

    async def run():
        async with world_at(zookeeper) as world:
            await create_cluster(world, "/lost")
        async with (
            proxy(zookeeper, action_of) as (host, arrived),
            zookeeper_session.open_session(
                f"{host}/lost", session_timeout_ms=LONG_MS
            ) as coordinator,
        ):
            assert await coordinator.next_client_id() == 1
            return arrived

    assert len(asyncio.run(run())) >= 2
    assert lost == [0]


def test_a_value_over_the_servers_limit_is_not_reported_as_written(zookeeper):
    async def run():
        async with world_at(zookeeper) as world:
            znodes = await world.znodes()
            await znodes.write([CreateNode("/big")])
            with pytest.raises(errors.Unavailable):
                await znodes.write([SetNode("/big", bytes(2_000_000), 0)])
            assert (await znodes.get("/big")).data == b""

    asyncio.run(run())


def test_coordinators_watch_znodes_again_after_zookeeper_was_killed_and_restarted(
    own_zookeeper: ZooKeeperProcess, caplog: pytest.LogCaptureFixture
):
    async def run():
        async with world_at(own_zookeeper.host) as world:
            server = await create_cluster(world, "/restarts")
            znodes = await world.znodes()
            other = Coordinator(znodes, "/restarts")
            views, states, replicas = CallbackRecorder(), CallbackRecorder(), CallbackRecorder()
            server.on_session_state(states)
            following = (
                server.follow_servers(views),
                other.follow_servers(CallbackRecorder()),
                other.follow_replica_assignment(replicas),
            )
            async with run_meanwhile(*following):
                await server.register_server(server_descriptor(1))
                await views.wait_for(lambda view: list(view.servers) == [1])
                before = await server.read_partition(0)
                await asyncio.to_thread(own_zookeeper.kill)
                await states.wait_for(lambda state: state is SessionState.SUSPENDED)
                # While ZooKeeper is unavailable, a caller without a timeout waits until it is
                # available again.
                async with asyncio.timeout(SOONER_S):
                    with pytest.raises(errors.CoordinatorUnavailable, match=own_zookeeper.host):
                        await server.next_client_id()
                # Meanwhile kazoo tries to connect, again and again.
                attempts = count_attempts(znodes)
                await poll_until(lambda: attempts() >= 5)
                await asyncio.to_thread(own_zookeeper.start)
                await states.wait_for(lambda state: state is SessionState.CONNECTED)
                assert await server.next_client_id() == 1
                assert await server.read_partition(0) == before
                await other.register_server(server_descriptor(2))
                view = await views.wait_for(lambda view: len(view.servers) == 2)
                assert owners_and_generations(view) == {0: (1, 1), 1: (1, 1), 2: (2, 2), 3: (2, 2)}
                await other.update_replica_assignment(lambda old: type(old)())
                await replicas.wait_for(lambda found: not found.partitions)

    with caplog.at_level(logging.INFO):
        asyncio.run(run())
    check_log_has_one_line_of_each_loss_and_return(caplog.messages, own_zookeeper.host)


def check_log_has_one_line_of_each_loss_and_return(lines: list[str], host: str) -> None:
    """Check the log after two sessions were lost and replaced."""
    lost = [line for line in lines if line.startswith("zookeeper.disconnected")]
    found = [line for line in lines if line.startswith("zookeeper.connected")]
    assert (len(lost), len(found)) == (2, 2)
    assert sum(line.startswith("zookeeper.") for line in lines) == 4, (
        "the log must have no lines of connection attempts"
    )
    hosts, at = re.escape(host), r"at=20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ"
    for each in lost:
        assert re.fullmatch(f"zookeeper.disconnected hosts={hosts} {at}", each)
    pattern = f"zookeeper.connected hosts={hosts} disconnected_ms=\\d+ session=(same|new) {at}"
    for each in found:
        assert re.fullmatch(pattern, each)


def count_attempts(znodes: zookeeper_session.ZooKeeperSession):
    """Return a counter of the connections that kazoo tries to open from now on."""
    handler, attempts = znodes._client.handler, []
    connect = handler.create_connection

    def counted(*args, **kwargs):
        attempts.append(args)
        return connect(*args, **kwargs)

    handler.create_connection = counted
    return lambda: len(attempts)


def any_operation(random: Random, root: str) -> Operation:
    path = root + "".join(random.choices(["/a", "/b"], k=random.randrange(1, 3)))
    match random.randrange(6):
        case 0 | 1:
            return CreateNode(
                path, random.choice([None, b"", b"x"]), is_ephemeral=random.random() < 0.2
            )
        case 2:
            return CreateNode(f"{path}_", is_sequential=True)
        case 3:
            return SetNode(path, random.randbytes(2), random.randrange(3))
        case 4:
            return CheckVersion(random.choice([root, path]), random.randrange(2))
    return DeleteNode(path, random.randrange(2))


async def result_of(znodes: Znodes, operations: list[Operation]) -> object:
    try:
        return await znodes.write(operations)
    except errors.CoordinatorConflict:
        return "conflict"


async def tree(znodes: Znodes, path: str) -> dict[str, object]:
    node, children = await znodes.get(path), await znodes.children(path)
    assert children.stat == node.stat
    found = {path: (node.data, node.stat[:2], bool(node.stat.owner), children.names)}
    for name in children.names:
        found |= await tree(znodes, f"{path}/{name}")
    return found


@pytest.mark.parametrize("seed", range(2))
def test_the_zookeeper_in_memory_behaves_like_zookeeper(zookeeper, seed):
    """Any operations have the same results, errors, stats, data and names in both."""
    random = Random(seed)
    root = f"/random{seed}"

    async def run():
        memory = MemoryZooKeeper(asyncio.Event)
        async with world_at(zookeeper) as world:
            real, fake = await world.znodes(), memory.session()
            outcomes = []
            for znodes in (real, fake):
                await znodes.write([CreateNode(root)])
            for _ in range(40):
                operations = [any_operation(random, root) for _ in range(random.randrange(1, 4))]
                outcome = await result_of(real, operations)
                assert await result_of(fake, operations) == outcome, operations
                outcomes.append(outcome)
                assert await tree(real, root) == await tree(fake, root), operations
            await real.close()
            await fake.close()
            assert await tree(await world.znodes(), root) == await tree(memory.session(), root)
        assert 5 < outcomes.count("conflict") < 37

    asyncio.run(run())


def test_a_closed_session_leaves_no_thread(zookeeper):
    before = set(threading.enumerate())

    async def run():
        async with zookeeper_session.open_session(f"{zookeeper}/a"):
            # Only new threads are checked: a thread of an earlier test may end meanwhile.
            assert set(threading.enumerate()) - before

    asyncio.run(run())
    # The thread that has stopped kazoo reports this just before it ends.
    for each in set(threading.enumerate()) - before:
        each.join(TEST_TIMEOUT_S)
    assert set(threading.enumerate()) <= before
