"""Links over real sockets: hello, order, backpressure, close."""

import asyncio
import contextlib
import errno
import socket

import pytest

from tests.loops import poll_until, run_on_loop
from tests.time_limits import TEST_TIMEOUT_S
from tests.unit.transport.peer import ANY, Peer, raw
from waltz_core.config import StorageConfig
from waltz_core.errors import BadConfig, LocalProtocolError, RemoteProtocolError, Unreachable
from waltz_core.transport import net, tls
from waltz_core.transport.admission.port_limits import LinkLimits
from waltz_core.transport.listening import listen
from waltz_core.wire import codec
from waltz_core.wire.connection import Connection
from waltz_core.wire.messages import Appended, FlushRequest, Hello, WireProtocol


@pytest.fixture(params=["plain", "tls"])
def contexts(request, files):
    """The contexts of a listener and of a dialler."""
    if request.param == "plain":
        return None, None
    settings = StorageConfig(connect="zk:1/w", directory="d", **files.settings)
    return tls.listen_context(settings), tls.dial_context(settings, "")


@pytest.fixture
def pair(contexts):
    """Yields a dialler's link, a listener's peer, and the listener."""

    @contextlib.asynccontextmanager
    async def opened(**dial_options):
        peer = Peer()
        listener = await listen(WireProtocol.STORAGE, ANY, 0, peer.connected, ssl=contexts[0])
        address = f"{ANY}:{listener.port}"
        link = await net.dial(WireProtocol.STORAGE, address, ssl=contexts[1], **dial_options)
        await poll_until(lambda: peer.links)
        try:
            yield link, peer, listener
        finally:
            link.abort("test is over")
            await listener.close()

    return opened


async def wait_for_nothing():
    """Wait so long that an unwanted event would occur."""
    await asyncio.sleep(0.05)


@run_on_loop
async def test_messages_arrive_in_order_whatever_their_size(pair):
    async with pair() as (link, peer, _):
        sent = [raw(size, n) for n, size in enumerate((0, 300_000, 10, 1_000_000, 70_000, 3))]
        for message in sent:
            link.send(message)
        await poll_until(lambda: len(peer.messages) == len(sent))
        assert peer.messages == sent
        assert link.version == 4
        assert link.peer.text == "Waltz Storage Server"
        assert peer.links[0].peer.text == "Waltz Storage Client"
        assert link.bytes_sent > 1_370_000
        link.close("done")
        await poll_until(lambda: peer.closed)
        assert peer.closed == ["closed by the peer"]


@run_on_loop
async def test_prebuilt_frames_keep_their_order_among_messages(pair):
    async with pair() as (link, peer, _):
        joined = b"".join(
            bytes(each) for n in (1, 2) for each in codec.encode(raw(10, n), link.version)
        )
        before = link.bytes_sent
        link.send(raw(300_000, 0))
        link.send_frames(joined)
        assert link.bytes_sent > before + 300_000 + len(joined)
        link.send(raw(5, 3))
        await poll_until(lambda: len(peer.messages) == 4)
        assert [message.sequence for message in peer.messages] == [0, 1, 2, 3]
        link.close("enough")
        link.send_frames(joined)
    assert len(peer.messages) == 4


@run_on_loop
async def test_receive_returns_all_available_messages(pair):
    async with pair() as (link, peer, _):
        for n in range(3):
            peer.links[0].send(Appended(1, n, 3, n))
        found = []
        while len(found) < 3:
            found += await link.receive()
        assert [message.sequence for message in found] == [0, 1, 2]
        peer.links[0].close("enough")
        with pytest.raises(Unreachable, match="closed by the peer"):
            await link.receive()


@run_on_loop
async def test_a_late_start_of_a_link_delivers_the_messages_that_arrived_before_it(pair):
    async with pair() as (link, peer, _):
        peer.links[0].send(Appended(1, 7, 3, 9))
        peer.links[0].close("enough")
        await link.wait_closed()
        late = Peer()
        late.connected(link)
        assert late.messages == [Appended(1, 7, 3, 9)]
        assert late.closed == ["closed by the peer"]
        assert link.is_closed
        link.send(Appended(1, 7, 3, 9))  # no effect without a peer
        assert link.write_backlog_bytes == 0


@run_on_loop
async def test_a_full_inbox_stops_the_peer(pair):
    async with pair() as (link, peer, _):
        peer_link, count = peer.links[0], 0
        while not (peer_link.is_congested and link._inbox_bytes > 1024 * 1024):
            if not peer_link.is_congested:
                peer_link.send(raw(500_000, count))
                count += 1
            await asyncio.sleep(0)
        before = link.bytes_received
        await wait_for_nothing()
        assert link.bytes_received == before
        found = []
        while len(found) < count:
            found += await link.receive()
        assert [message.sequence for message in found] == list(range(count))
        await peer_link.wait_drained()


@run_on_loop
async def test_a_peer_that_does_not_read_is_paused(pair):
    async with pair() as (link, peer, _):
        peer_link = peer.links[0]
        drained = []
        link.pause_reading()
        # Much more than the congestion limit: on a busy machine the kernel accepts data later.
        while peer_link.write_backlog_bytes < 16 * 1024 * 1024:
            peer_link.send(raw(500_000))
            await asyncio.sleep(0)
        peer_link._on_drained = lambda: drained.append(True)
        link.send(Appended(1, 7, 3, 9))
        await wait_for_nothing()
        assert peer_link.is_congested
        assert peer.messages == []
        link.start(lambda messages: None, lambda reason: None)
        link.resume_reading()
        await poll_until(lambda: peer.messages)
        assert drained == [True]
        assert not peer_link.is_congested


@run_on_loop
async def test_a_dialing_side_continues_to_read_while_it_is_congested(pair):
    async with pair() as (link, peer, _):
        peer_link = peer.links[0]
        peer_link.pause_reading()
        while not link.is_congested:
            link.send(raw(500_000))
            await asyncio.sleep(0)
        peer_link.send(Appended(1, 7, 3, 9))
        assert await link.receive() == [Appended(1, 7, 3, 9)]


@pytest.mark.parametrize("is_made_elsewhere", [False, True])
@run_on_loop
async def test_a_peer_that_never_reads_is_disconnected_at_the_hard_limit(pair, is_made_elsewhere):
    async with pair(write_backlog_bytes_max=4 * 1024 * 1024) as (link, peer, _):
        peer.links[0].pause_reading()
        joined = b"".join(bytes(each) for each in codec.encode(raw(500_000), link.version))
        while not link.is_closed:
            link.send_frames(joined) if is_made_elsewhere else link.send(raw(500_000))
            await asyncio.sleep(0)
        assert "the peer does not read" in link.closed_reason
        await link.wait_closed()
        peer.links[0].resume_reading()
        await poll_until(lambda: peer.closed)


@run_on_loop
async def test_a_listener_may_lower_the_hard_limit_of_a_link(pair):
    async with pair() as (link, peer, _):
        (peer_link,) = peer.links
        peer_link.write_backlog_bytes_max = 2 * 1024 * 1024
        link.pause_reading()
        while not peer_link.is_closed:
            peer_link.send(raw(500_000))
            await asyncio.sleep(0)
        assert "the peer does not read" in peer_link.closed_reason


@run_on_loop
async def test_a_dial_without_a_listener_raises_unreachable():
    with socket.socket() as taken:
        taken.bind((ANY, 0))
        address = f"{ANY}:{taken.getsockname()[1]}"
        with pytest.raises(Unreachable, match=address):
            await net.dial(WireProtocol.STORAGE, address)
    with pytest.raises(Unreachable, match="is not a valid host name"):
        await net.dial(WireProtocol.STORAGE, "waltz..example.com:5280")


@run_on_loop
async def test_a_dial_to_a_silent_peer_raises_unreachable():
    with socket.create_server((ANY, 0)) as silent:
        address = f"{ANY}:{silent.getsockname()[1]}"
        with pytest.raises(Unreachable, match="or did not send its hello message, within"):
            await net.dial(WireProtocol.STORAGE, address, timeout_s=0.1)


def test_a_dial_cancelled_during_the_hello_closes_its_connection(monkeypatch):
    """The link is closed when the peer's hello arrives, before the dialing side is notified."""
    hello_received = net.Link._on_hello_received
    dials, links = [], []

    def receive_hello_and_close(link):
        hello_received(link)
        links.append(link)
        dials[0].cancel()

    async def dial_and_close():
        has_ended = asyncio.Event()

        async def say_hello_late(reader, writer):
            await wait_for_nothing()  # so that the dial only waits for the hello
            writer.write(Connection(WireProtocol.STORAGE, is_listener=True).first_bytes())
            while await reader.read(1024):
                pass
            has_ended.set()
            writer.close()

        async with (
            asyncio.timeout(TEST_TIMEOUT_S),
            await asyncio.start_server(say_hello_late, ANY, 0) as peer,
        ):
            address = f"{ANY}:{peer.sockets[0].getsockname()[1]}"
            async with asyncio.TaskGroup() as group:
                dials.append(group.create_task(net.dial(WireProtocol.STORAGE, address)))
            assert dials[0].cancelled()
            try:
                await has_ended.wait()
            finally:
                links[0].abort("test is over")

    monkeypatch.setattr(net.Link, "_on_hello_received", receive_hello_and_close)
    net.run(dial_and_close())


async def answer_with(data):
    async def serve(_reader, writer):
        writer.write(data)
        await writer.drain()
        writer.close()

    return await asyncio.start_server(serve, ANY, 0)


async def dial_peer_that_sends(data):
    server = await answer_with(data)
    try:
        await net.dial(WireProtocol.STORAGE, f"{ANY}:{server.sockets[0].getsockname()[1]}")
    finally:
        server.close()


@run_on_loop
async def test_a_dial_to_a_process_of_another_protocol_raises_a_protocol_error():
    with pytest.raises(RemoteProtocolError, match="expected a frame of protocol 'H'"):
        await dial_peer_that_sends(b"SSH-2.0-OpenSSH_9.2\r\n")
    with pytest.raises(RemoteProtocolError, match="no common version"):
        await dial_peer_that_sends(codec.encode_hello(Hello((9,), "Waltz Storage Server")))


@run_on_loop
async def test_a_dial_that_is_closed_before_the_hello_raises_unreachable():
    with pytest.raises(Unreachable, match="before it sent its hello"):
        await dial_peer_that_sends(b"")


@run_on_loop
async def test_a_listener_closes_foreign_connections_and_serves_the_others(pair, contexts):
    async with pair() as (link, peer, listener):
        reader, writer = await asyncio.open_connection(ANY, listener.port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        received = await reader.read()
        if contexts[0] is None:
            assert codec.decode_hello(received[7:]).text == "Waltz Storage Server"
        else:
            assert received == tls.UNEXPECTED_MESSAGE_ALERT
        writer.close()
        link.send(Appended(1, 7, 3, 9))
        await poll_until(lambda: peer.messages)
        assert len(peer.links) == 1


@run_on_loop
async def test_a_peer_silent_during_its_hello_is_disconnected():
    peer = Peer()
    listener = await listen(WireProtocol.STORAGE, ANY, 0, peer.connected)
    reader, writer = await asyncio.open_connection(ANY, listener.port)
    await poll_until(lambda: listener.links)
    (link,) = listener.links
    link._on_hello_timeout()
    await reader.read()
    await link.wait_closed()
    assert "expected the hello message of the peer within" in link.closed_reason
    assert peer.links == []
    assert listener.links == ()
    writer.close()
    await listener.close()


@run_on_loop
async def test_a_peer_that_trickles_a_frame_is_disconnected():
    peer = Peer()
    listener = await listen(WireProtocol.STORAGE, ANY, 0, peer.connected)
    _, writer = await asyncio.open_connection(ANY, listener.port)
    writer.write(codec.encode_hello(Hello((1,), "slow")) + codec.FRAME_HEADER.pack(83, 1, 999))
    await poll_until(lambda: peer.links and peer.links[0]._connection.is_inside_frame)
    (link,) = peer.links
    link.pause_reading()
    link._on_tick()
    link.resume_reading()
    link._on_tick()  # at once: data in the kernel was not read yet
    assert not link.is_closed
    before = link.bytes_received
    writer.write(b"x")
    await poll_until(lambda: link.bytes_received == before + 1)
    link._on_tick()
    assert "a message arrived too slowly:" in link.closed_reason
    writer.close()
    await listener.close()


@run_on_loop
async def test_an_idle_dialler_sends_empty_frames(pair):
    async with pair() as (link, peer, _):
        peer_link = peer.links[0]
        link.send(Appended(1, 7, 3, 9))
        await poll_until(lambda: peer.messages)
        before = peer_link.bytes_received
        link._on_tick()  # data was sent since the last tick
        link._on_tick()
        await poll_until(lambda: peer_link.bytes_received == before + 7)
        assert peer_link.closed_reason is None
        peer_link._on_tick()
        assert peer_link.bytes_sent == 0


@run_on_loop
async def test_a_peer_silent_for_very_long_is_disconnected(pair):
    async with pair() as (_link, peer, _):
        peer_link = peer.links[0]
        peer_link._idle_ticks = net._IDLE_TICKS_MAX
        peer_link._tick_received = peer_link.bytes_received
        peer_link._on_tick()
        assert "nothing was received for" in peer_link.closed_reason


@run_on_loop
async def test_more_links_than_allowed_are_rejected():
    peer = Peer()
    listener = await listen(WireProtocol.STORAGE, ANY, 0, peer.connected, limits=LinkLimits(1))
    link = await net.dial(WireProtocol.STORAGE, f"{ANY}:{listener.port}")
    with pytest.raises(Unreachable):
        await net.dial(WireProtocol.STORAGE, f"{ANY}:{listener.port}")
    link.close("done")
    await poll_until(lambda: not listener.links)
    (await net.dial(WireProtocol.STORAGE, f"{ANY}:{listener.port}")).close("done")
    await listener.close()


@run_on_loop
async def test_a_closing_listener_sends_pending_messages_and_closes_its_links(pair):
    async with pair() as (link, peer, listener):
        for n in range(5):
            peer.links[0].send(raw(400_000, n))
        async with asyncio.TaskGroup() as group:
            group.create_task(listener.close("going home"))
            found = []
            while len(found) < 5:
                found += await link.receive()
        assert peer.closed == ["going home"]
        with pytest.raises(Unreachable):
            await net.dial(WireProtocol.STORAGE, f"{ANY}:{listener.port}")


@run_on_loop
async def test_a_connection_accepted_during_the_close_is_closed_too(monkeypatch):
    monkeypatch.setattr(net, "HELLO_S_MAX", 2 * TEST_TIMEOUT_S)
    for turns in range(8):  # turns of the loop between the connection and the listener's close
        listener = await listen(WireProtocol.STORAGE, ANY, 0, Peer().connected)
        with socket.create_connection((ANY, listener.port)) as dialler:
            dialler.setblocking(False)
            for _ in range(turns):
                await asyncio.sleep(0)
            await listener.close()
            # Earlier than the timeout for a missing hello.
            with contextlib.suppress(ConnectionResetError):
                while await asyncio.get_running_loop().sock_recv(dialler, 1024):
                    pass
        assert listener.links == ()


@run_on_loop
async def test_listening_at_a_port_in_use_raises_bad_config(contexts):
    with socket.create_server((ANY, 0)) as taken, pytest.raises(BadConfig, match="cannot listen"):
        await listen(WireProtocol.STORAGE, ANY, taken.getsockname()[1], print, ssl=contexts[0])


@run_on_loop
async def test_an_unencodable_message_raises_in_the_caller(pair):
    async with pair() as (link, _, _):
        with pytest.raises(AssertionError):
            link.send(FlushRequest((1, 2, 3, 4)))
        with pytest.raises(LocalProtocolError):
            link.send(raw(16 * 1024 * 1024))
        assert not link.is_closed


@pytest.mark.parametrize(
    ("text", "expected"),
    [("localhost:80", ("localhost", 80)), ("[::1]:0", ("::1", 0)), ("a.b:65535", ("a.b", 65535))],
)
def test_an_address_is_split_into_host_and_port(text, expected):
    assert net.split_address(text) == expected


@pytest.mark.parametrize(
    "text", ["", "host", ":80", "host:", "host:-1", "host:65536", "h:x", "h:" + "9" * 5_000]
)
def test_invalid_addresses_are_rejected(text):
    with pytest.raises(BadConfig, match="expected an address"):
        net.split_address(text)


@run_on_loop
async def test_the_write_buffer_limit_determines_when_a_link_is_congested(pair):
    async with pair() as (link, peer, _):
        (peer_link,) = peer.links
        link.pause_reading()
        peer_link.limit_write_buffer(8 * 1024 * 1024)
        while peer_link.write_backlog_bytes < 2 * 1024 * 1024:
            peer_link.send(raw(500_000))
            await asyncio.sleep(0)
        assert not peer_link.is_congested
        peer_link.limit_write_buffer(64 * 1024)
        peer_link.send(raw(500_000))
        await poll_until(lambda: peer_link.is_congested)


@run_on_loop
async def test_an_idle_connection_to_a_dead_host_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    owner = net.LinkOwner(on_ready=lambda _link: None, on_lost=lambda _link: None)
    link = net.Link(
        WireProtocol.CLIENT, is_listener=True, write_backlog_bytes_max=1 << 30, owner=owner
    )
    link.address = "10.1.2.3:4"
    link.as_protocol().connection_lost(TimeoutError(errno.ETIMEDOUT, "Connection timed out"))
    assert link.closed_reason == "connection lost: Connection timed out"
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "net.peer_silent peer=10.1.2.3:4 error=Connection timed out"
    )
