"""A thousand hostile connections to each port of real daemons, while a client works."""

import asyncio
import contextlib
import dataclasses
import resource
import ssl
import struct
import threading
from collections.abc import Iterator

import psutil
import pytest

from tests.certificates import Certificates
from tests.integration.permitted_cluster import (
    DAEMONS,
    PERMISSIONS,
    PERMITTED_PARTITION,
    ClusterAccess,
    permitted_cluster,
)
from tests.sample_messages import sample_message
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.access.permissions import StoredToken
from waltz_core.access.tokens import hash_of
from waltz_core.client import WaltzClient
from waltz_core.config import ClientConfig
from waltz_core.errors import Unreachable
from waltz_core.transport import net, tls
from waltz_core.wire import codec
from waltz_core.wire.admin_messages import StorageRequest
from waltz_core.wire.messages import Hello, Message, RangeRaw, ReplicasRequest, WireProtocol

COUNT = 1_000
TENANTS_COUNT = 40
# The memory limit for a thousand handshakes and buffers. The frames that peers announce have more
# than 2 GiB.
GROWTH_BYTES_MAX = 160 * 1024 * 1024
STATED_BYTES = 16 * 1024 * 1024 - 7
# port -> daemon, a request that is answered, and the principal that may send it.
PORTS: dict[WireProtocol, tuple[str, type[Message], str]] = {
    WireProtocol.CLIENT: ("server-1", ReplicasRequest, "read"),
    WireProtocol.STORAGE: ("storage-1", RangeRaw, "read"),
    WireProtocol.ADMIN: ("storage-1", StorageRequest, "administer"),
}


@pytest.fixture(scope="module")
def access(
    tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> Iterator[ClusterAccess]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 16_384), hard))
    with permitted_cluster(tmp_path_factory, certificates) as cluster:
        yield cluster
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Writer(threading.Thread):
    """Appends one transaction after the other; all must succeed."""

    def __init__(self, connect: str) -> None:
        super().__init__()
        self._connect, self._must_end = connect, threading.Event()
        self.done_count = 0
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            with WaltzClient(self._connect) as client:
                while not self._must_end.wait(0.02):
                    client.append(b"calm", partition=PERMITTED_PARTITION).result()
                    self.done_count += 1
        except Exception as error:  # noqa: BLE001 - the test shows it
            self.error = error

    def end(self) -> None:
        self._must_end.set()
        self.join(TEST_TIMEOUT_S)


class Attack:
    """Hostile connections to a port; each stays until the daemon closes it."""

    def __init__(self, protocol: WireProtocol, port: int, authorities: str) -> None:
        self._port = port
        self._context = ssl.create_default_context(cafile=authorities)
        self._client_hello = client_hello(self._context)
        self._at_once = asyncio.Semaphore(50)
        self.received = set[bytes]()
        self.opened_count = self.closed_count = 0
        self._hello = codec.encode_hello(Hello(protocol.versions_offered, "x"))
        version = protocol.versions[-1]
        stated, small = (
            codec.FRAME_HEADER.pack(protocol.magic, version, size) for size in (STATED_BYTES, 40)
        )
        self._messages = [
            stated + bytes(1_000),
            codec.FRAME_HEADER.pack(protocol.magic, version, -1),
            # counts that are negative, too large, or more than the rest of the frame
            *(
                small + bytes([code]) + struct.pack(">i", count) * 9 + bytes(3)
                for code in (15, 65, 70, 72, 91)
                for count in (-1, 1 << 30, 8)
            ),
        ]

    async def connection(self, number: int) -> None:
        kind = number % 7
        is_tls = kind > 3
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            async with self._at_once:
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1",
                    self._port,
                    ssl=self._context if is_tls else None,
                    ssl_handshake_timeout=TEST_TIMEOUT_S if is_tls else None,
                )
                self.opened_count += 1
            try:
                if kind == 1:  # half of a handshake, or no TLS at all
                    writer.write(b"GET / HTTP/1.1\r\n\r\n" if number % 2 else b"\x16\3\1\2\0\1\0")
                elif kind == 2:  # a part of a ClientHello
                    writer.write(self._client_hello[: number % len(self._client_hello)])
                elif kind == 3:  # a whole request that costs the peer nothing
                    writer.write(self._client_hello)
                elif kind == 5:
                    writer.write(bytes(range(256)))
                elif kind == 6:
                    writer.write(self._hello + self._messages[number // 7 % len(self._messages)])
                while data := await reader.read(65_536):
                    self.received.add(data[:20_000])
            finally:
                writer.transport.abort()
        self.closed_count += 1


def client_hello(context: ssl.SSLContext) -> bytes:
    """Return the first bytes of a client with TLS."""
    outgoing = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


async def check_answers(access: ClusterAccess, protocol: WireProtocol) -> None:
    """Connect with a token, and send a request that is answered.

    Until its token is accepted, the peer counts towards the limit of unauthorized peers of its
    host. The attack exceeds this limit. So the peer may have to connect again, as clients do.
    """
    name, request, principal = PORTS[protocol]
    member = access.cluster.member(name)
    port = member.admin_port if protocol is WireProtocol.ADMIN else member.port
    context = tls.dial_context(ClientConfig(), access.connect(principal))
    link = None
    while link is None:
        with contextlib.suppress(Unreachable):
            link = await net.dial(
                protocol, f"127.0.0.1:{port}", ssl=context, timeout_s=TEST_TIMEOUT_S
            )
        await asyncio.sleep(0.1)
    link.send(sample_message(request, PERMITTED_PARTITION))
    assert await link.receive()
    link.abort("done")


async def attacked(access: ClusterAccess, protocol: WireProtocol, authorities: str) -> Attack:
    """Open all connections, and run the block meanwhile; return when the daemon has closed them."""
    member = access.cluster.member(PORTS[protocol][0])
    port = member.admin_port if protocol is WireProtocol.ADMIN else member.port
    assert port is not None
    attack = Attack(protocol, port, authorities)
    async with asyncio.timeout(TEST_TIMEOUT_S), asyncio.TaskGroup() as tasks:
        for number in range(COUNT):
            tasks.create_task(attack.connection(number))
        while attack.closed_count < COUNT:
            await check_answers(access, protocol)
    return attack


async def pages_attacked(port: int) -> None:
    """Send nothing, a part of a request, a request, or garbage to the port with the pages."""
    at_once = asyncio.Semaphore(50)

    async def connection(number: int) -> None:
        with contextlib.suppress(OSError):
            async with at_once:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            request = b"GET /metrics HTTP/1.1\r\n\r\n"
            writer.write((b"", request[:-1], request, bytes(range(256)) * 64)[number % 4])
            try:
                while await reader.read(65_536):
                    pass
            finally:
                writer.transport.abort()

    async with asyncio.timeout(TEST_TIMEOUT_S), asyncio.TaskGroup() as tasks:
        for number in range(COUNT):
            tasks.create_task(connection(number))


@contextlib.contextmanager
def calm_client(access: ClusterAccess, name: str) -> Iterator[None]:
    """Append during an attack on a daemon. The daemon may neither fail nor use too much memory."""
    process = psutil.Process(access.cluster.member(name).pid)
    log = access.cluster.log_path(name)
    before_bytes, logged_before = process.memory_info().rss, len(log.read_text())
    writer = Writer(access.connect("writer"))
    writer.start()
    try:
        yield
    finally:
        writer.end()
    assert writer.error is None
    assert writer.done_count > 10
    assert process.memory_info().rss - before_bytes < GROWTH_BYTES_MAX
    assert process.is_running()
    logged = log.read_text()[logged_before:]
    assert "Traceback" not in logged
    assert logged.count("\n") < 100


@pytest.mark.parametrize("protocol", PORTS)
def test_a_thousand_unauthorized_peers_neither_stop_a_client_nor_fill_the_memory(
    access: ClusterAccess, certificates: Certificates, protocol: WireProtocol
):
    asyncio.run(check_answers(access, protocol))
    with calm_client(access, PORTS[protocol][0]):
        attack = asyncio.run(attacked(access, protocol, certificates.authorities))
    assert attack.opened_count > COUNT // 2
    assert attack.received
    for message in attack.received:
        assert b"Traceback" not in message
        # long enough not to occur by chance in the encrypted bytes of a TLS handshake
        assert b"waltz_core/" not in message


@pytest.mark.parametrize("name", DAEMONS)
def test_a_thousand_connections_to_the_pages_of_a_daemon_do_not_stop_a_client(
    access: ClusterAccess, name: str
):
    with calm_client(access, name):
        asyncio.run(pages_attacked(access.cluster.member(name).http_port))


@pytest.mark.parametrize("protocol", [WireProtocol.CLIENT, WireProtocol.STORAGE])
def test_the_announced_length_of_a_frame_allocates_no_memory_before_its_bytes_arrive(
    access: ClusterAccess, protocol: WireProtocol
):
    """A principal with `append` or `replicate` may send large frames."""
    secret = bytes(range(100, 132))
    tenant = "append" if protocol is WireProtocol.CLIENT else "replicate"
    access.write(
        dataclasses.replace(
            PERMISSIONS,
            tokens={**PERMISSIONS.tokens, hash_of(secret): StoredToken("tenant", tenant, 1 << 50)},
        )
    )
    member = access.cluster.member(PORTS[protocol][0])
    process = psutil.Process(member.pid)
    before_bytes = process.memory_info().rss
    header = codec.FRAME_HEADER.pack(protocol.magic, protocol.versions[-1], STATED_BYTES)

    async def hold() -> None:
        context = tls.dial_context(ClientConfig(), access.connect(tenant))
        links = [
            await net.dial(
                protocol, f"127.0.0.1:{member.port}", ssl=context, timeout_s=TEST_TIMEOUT_S
            )
            for _ in range(TENANTS_COUNT)
        ]
        for link in links:
            link.send_frames(header + bytes(100_000))
        await check_answers(access, protocol)
        assert not any(link.is_closed for link in links)
        assert process.memory_info().rss - before_bytes < GROWTH_BYTES_MAX
        for link in links:
            link.abort("done")

    asyncio.run(hold())
