"""The limits of a port against hostile peers."""

import asyncio
import dataclasses
import functools
from typing import TYPE_CHECKING

import pytest

from tests.loops import poll_until, run_on_loop
from tests.time_limits import TEST_TIMEOUT_S
from tests.unit.transport.peer import ANY, Peer, raw
from tests.unit.transport.test_port_access import (
    EXPIRED,
    GRANTED,
    SECRET,
    open_port,
    trusting_connect_string,
)
from waltz_core.access.permissions import Grant, PrincipalLimits
from waltz_core.access.requirements import READ
from waltz_core.config import ClientConfig
from waltz_core.errors import PermissionDenied, Unreachable
from waltz_core.transport import net, tls, tls_port
from waltz_core.transport.admission import port_limits
from waltz_core.transport.admission.port_limits import HandshakeLimits, HandshakeQueue, LinkLimits
from waltz_core.transport.listening import listen
from waltz_core.wire import authentication, codec
from waltz_core.wire.messages import Heartbeat, Hello, WireProtocol

if TYPE_CHECKING:
    from collections.abc import Callable

HELLO = codec.encode_hello(Hello(WireProtocol.STORAGE.versions_offered, "x"))
STATED_16_MIB = codec.FRAME_HEADER.pack(ord("S"), 4, 16 * 1024 * 1024 - 7)


# ---------------------------------------------------------------------------------------------
# handshakes


def test_one_host_may_have_at_most_half_of_the_handshakes_in_progress():
    limits = HandshakeLimits(count_max=10, burst=100, per_s=1, clock_s=lambda: 0.0)
    assert [limits.begin_handshake("10.0.0.1") for _ in range(5)] == [""] * 5
    assert (
        limits.begin_handshake("10.0.0.1")
        == "5 handshakes of this host are in progress; the limit is 5"
    )
    assert [limits.begin_handshake(f"2001:db8::{n:x}") for n in range(5)] == [""] * 5
    assert (
        limits.begin_handshake("10.0.0.2")
        == "0 handshakes of this host are in progress; the limit is 10"
    )
    limits.end_handshake("2001:db8::ffff")  # the same network
    assert limits.begin_handshake("10.0.0.2") == ""
    for _ in range(5):
        limits.end_handshake("10.0.0.1")
    limits.end_handshake("10.0.0.2")
    for _ in range(4):
        limits.end_handshake("2001:db8::1")
    assert limits._in_progress == {}


def test_after_a_burst_the_handshakes_of_a_host_are_rate_limited():
    now_s = 0.0
    limits = HandshakeLimits(count_max=1_000, burst=20, per_s=2, clock_s=lambda: now_s)

    def accepted_handshakes(address, count):
        outcomes = [limits.begin_handshake(address) for _ in range(count)]
        for outcome in outcomes:
            if not outcome:
                limits.end_handshake(address)
        return outcomes.count("")

    assert accepted_handshakes("a", 50) == 20
    assert limits.begin_handshake("a") == "this host begins more than 2 handshakes per second"
    assert accepted_handshakes("b", 50) == 20
    now_s += 3.0
    assert accepted_handshakes("a", 50) == 6
    now_s += 1_000.0
    assert accepted_handshakes("a", 50) == 20


def test_the_memory_for_hosts_is_limited(monkeypatch):
    monkeypatch.setattr(port_limits, "_HOSTS_MAX", 100)
    now_s = 0.0
    limits = HandshakeLimits(count_max=10, burst=20, per_s=1, clock_s=lambda: now_s)
    for number in range(1_000):
        assert limits.begin_handshake(f"10.0.0.{number}") == ""
        limits.end_handshake(f"10.0.0.{number}")
        assert len(limits._tokens) <= 100
        now_s += 0.1


@run_on_loop
async def test_handshakes_alternate_between_hosts_with_pauses():
    scheduled: list[tuple[float, Callable[[], None]]] = []
    turns = HandshakeQueue(lambda pause_s, call: scheduled.append((pause_s, call)))
    added = {}
    closed = {"b1", "c1"}
    for name in ("a1", "a2", "a3", "b1", "2001:db8::1", "2001:db8::2", "c1"):
        added[name] = asyncio.get_running_loop().create_future()
        host = name if ":" in name else name[0]
        turns.add(host, added[name], lambda name=name: name in closed)
    added["a2"].cancel()
    started, pauses_s = ["a2"], []
    while scheduled:
        ((pause_s, begin_one),) = scheduled
        pauses_s.append(pause_s)
        scheduled.clear()
        begin_one()
        started += [name for name, turn in added.items() if turn.done() and name not in started]
    assert started == ["a2", "a1", "b1", "2001:db8::1", "c1", "2001:db8::2", "a3"]
    # There is a pause after the last handshake, but none before the first handshake or after closed
    # connections.
    pause = port_limits.HANDSHAKE_PAUSE_S
    assert pauses_s == [0, pause, 0, pause, 0, pause, pause]


@run_on_loop
async def test_a_handshake_waits_for_the_pause_after_the_previous_one():
    scheduled: list[tuple[float, Callable[[], None]]] = []
    turns = HandshakeQueue(lambda pause_s, call: scheduled.append((pause_s, call)))
    first, second = (asyncio.get_running_loop().create_future() for _ in range(2))
    turns.add("a", first, lambda: False)
    scheduled.pop()[1]()
    turns.add("a", second, lambda: False)
    ((_, begin_one),) = scheduled
    assert first.done()
    assert not second.done()
    begin_one()
    assert second.done()


@run_on_loop
async def test_a_host_that_dials_without_pause_is_disconnected_and_logged_once(
    files, caplog, monkeypatch
):
    tls._LAST_LOGGED.clear()
    # On a busy machine dials are slow, so the clock of the rate is stopped.
    stopped = functools.partial(HandshakeLimits, clock_s=lambda: 0.0)
    monkeypatch.setattr(tls_port, "HandshakeLimits", stopped)
    async with open_port(files, handshake_burst_max=10, handshakes_per_s_max=1) as port:
        context = tls.dial_context(ClientConfig(), trusting_connect_string(files))
        rejected = 0
        for _ in range(16):
            try:
                link = await net.dial(WireProtocol.STORAGE, port.address, ssl=context)
            except Unreachable:
                rejected += 1
            else:
                link.abort("done")
        assert rejected == 6
        lines = [message for message in caplog.messages if "handshakes per second" in message]
        assert lines == [
            (
                "tls.handshake_failed peer=127.0.0.1 error=this host begins more than 1 "
                "handshakes per second"
            )
        ]


# ---------------------------------------------------------------------------------------------
# links


class OneLink:
    """A link whose state a test sets."""

    def __init__(self, host="10.0.0.1", *, is_unauthorized=False, principal="anonymous"):
        self.principal = principal
        self.is_unauthorized, self.incomplete_bytes, self.aborted = is_unauthorized, 0, []
        self.host = host

    def abort(self, reason):
        self.aborted.append(reason)


def test_unauthorized_links_are_limited_in_total_and_by_host():
    limits, rejection = (
        LinkLimits(40),
        "the limit of connections of principals without permissions is reached",
    )
    unauthorized = [OneLink(is_unauthorized=True) for _ in range(6)]
    assert [limits.add_link(each) for each in unauthorized] == [""] * 5 + [rejection]
    links_of_other_hosts = [OneLink(f"10.0.1.{n}", is_unauthorized=True) for n in range(6)]
    assert [limits.add_link(host) for host in links_of_other_hosts] == [""] * 5 + [rejection]
    unauthorized[3].is_unauthorized = False  # its token was accepted
    assert limits.add_link(unauthorized[5]) == ""
    others = [OneLink() for _ in range(30)]
    assert [limits.add_link(other) for other in others] == [""] * 29 + [
        "the limit of connections is reached"
    ]
    for each in (*unauthorized, *links_of_other_hosts, *others):
        limits.remove_link(each)
    assert limits._unauthorized_links == {}
    assert limits.add_link(unauthorized[0]) == ""


def test_the_link_with_the_largest_incomplete_frame_is_closed():
    limits = LinkLimits(10, 1_000)
    links = [OneLink() for _ in range(3)]
    for each in links:
        limits.add_link(each)
    for link, size in zip(links, (300, 500, 200), strict=True):
        link.incomplete_bytes = size
        limits.note_incomplete(link)
    assert not any(each.aborted for each in links)
    links[0].incomplete_bytes = 301
    limits.note_incomplete(links[0])
    assert [len(each.aborted) for each in links] == [0, 1, 0]
    limits.remove_link(links[1])
    links[2].incomplete_bytes = 699
    limits.note_incomplete(links[2])
    assert [len(each.aborted) for each in links] == [0, 1, 0]
    links[2].incomplete_bytes = 700
    limits.note_incomplete(links[2])
    assert [len(each.aborted) for each in links] == [0, 1, 1]


def test_many_incomplete_frames_of_one_principal_close_no_link_of_another():
    limits = LinkLimits(10, 1_000)
    hostile = [OneLink(principal="bob") for _ in range(9)]
    server = OneLink(principal="s1.example")
    for each in (*hostile, server):
        limits.add_link(each)
        each.incomplete_bytes = 100
        limits.note_incomplete(each)
    server.incomplete_bytes = 400
    for _ in range(3):
        limits.note_incomplete(server)
    assert server.aborted == []
    assert sum(len(each.aborted) for each in hostile) == 3


@run_on_loop
async def test_incomplete_frames_of_real_connections_are_limited():
    peer = Peer()
    limits = LinkLimits(incomplete_bytes_max=3 * 1024 * 1024)
    listener = await listen(WireProtocol.STORAGE, ANY, 0, peer.connected, limits=limits)
    writers = []
    for size_mib in (1, 3):
        reader, writer = await asyncio.open_connection(ANY, listener.port)
        writer.write(HELLO + STATED_16_MIB + bytes(size_mib * 1024 * 1024))
        await reader.readexactly(7)
        writers.append(writer)
    await poll_until(lambda: peer.closed)
    assert "incomplete messages of all connections exceed 3145728 bytes" in peer.closed[0]
    assert len(listener.links) == 1
    (left,) = listener.links
    await poll_until(lambda: left.incomplete_bytes == 1024 * 1024)
    link = await net.dial(WireProtocol.STORAGE, f"{ANY}:{listener.port}")
    link.send(raw(2_000_000))
    await poll_until(lambda: len(peer.messages) == 1)
    assert limits._incomplete_bytes == 1024 * 1024
    for writer in writers:
        writer.transport.abort()
    link.abort("done")
    await poll_until(lambda: not limits._links)
    assert limits._incomplete_bytes == 0
    await listener.close()


# ---------------------------------------------------------------------------------------------
# principals without any permission

ONLY_READ = dataclasses.replace(GRANTED, grants=(Grant("spark-etl", False, READ, ((1, 1),)),))


async def dial_port(port, files):
    context = tls.dial_context(ClientConfig(), trusting_connect_string(files))
    return await net.dial(WireProtocol.STORAGE, port.address, ssl=context)


@run_on_loop
async def test_an_unauthorized_link_is_disconnected_after_its_denials(files, monkeypatch):
    monkeypatch.setattr(net, "UNAUTHORIZED_S_MAX", TEST_TIMEOUT_S)
    async with open_port(files, access="on") as port:
        port.apply(ONLY_READ)
        known = await dial_port(port, files)
        known.send(authentication.credential_message(WireProtocol.STORAGE, 4, SECRET))
        await known.receive()
        monkeypatch.setattr(net, "UNAUTHORIZED_S_MAX", 0.2)
        silent, asking = [await dial_port(port, files) for _ in range(2)]
        sides = port.peer.links
        assert [side.is_unauthorized for side in sides] == [False, True, True]
        error = sides[2].denial(Heartbeat(1, 0, 3))
        assert isinstance(error, PermissionDenied)
        asking.send(Heartbeat(1, 0, 3))
        await silent.wait_closed()
        await asking.wait_closed()
        assert sides[1].closed_reason == "the connection was still unauthorized after 0.2 s"
        sides[0]._on_tick()
        assert not sides[0].is_closed
        known.abort("done")


@run_on_loop
async def test_a_silent_connection_counts_towards_the_limit_of_its_principal(files, monkeypatch):
    limited = dataclasses.replace(
        ONLY_READ,
        grants=(*ONLY_READ.grants, Grant("anonymous", False, READ, None)),
        limits={each: PrincipalLimits(connections=1) for each in ("anonymous", "spark-etl")},
    )
    monkeypatch.setattr(net, "UNAUTHORIZED_S_MAX", TEST_TIMEOUT_S)
    async with open_port(files, access="on") as port:
        port.apply(limited)
        links = [await dial_port(port, files) for _ in range(3)]
        sides = port.peer.links
        for side in (*sides, sides[0]):
            side._on_tick()
        assert "anonymous exceeds its limit of 1 connection at" in sides[1].closed_reason
        assert [each.is_closed for each in sides] == [False, True, True]
        # A token that arrives later changes the principal of the connection.
        links[0].send(authentication.credential_message(WireProtocol.STORAGE, 4, SECRET))
        await links[0].receive()
        links.append(await dial_port(port, files))
        sides[3]._on_tick()
        assert [each.is_closed for each in sides] == [False, True, True, False]
        for link in links:
            link.abort("done")


@pytest.mark.parametrize(
    ("access", "secret", "is_closed"),
    [("on", None, True), ("on", SECRET, False), ("report", None, False)],
)
@run_on_loop
async def test_an_unauthorized_link_may_send_small_frames_only(files, access, secret, is_closed):
    async with open_port(files, access=access) as port:
        port.apply(ONLY_READ)
        link = await dial_port(port, files)
        if secret is not None:
            link.send(authentication.credential_message(WireProtocol.STORAGE, 4, secret))
            await link.receive()
        link.send(raw(1_000))
        await poll_until(lambda: len(port.peer.messages) == 1)
        link.send(raw(100_000))
        await poll_until(lambda: len(port.peer.messages) == 2 or port.peer.closed)
        assert bool(port.peer.closed) == is_closed
        assert not is_closed or "a payload of at most 65529 bytes" in port.peer.closed[0]
        link.abort("done")


@run_on_loop
async def test_an_invalid_token_gives_no_permission(files):
    async with open_port(files, access="on") as port:
        port.apply(ONLY_READ)
        link = await dial_port(port, files)
        link.send(authentication.credential_message(WireProtocol.STORAGE, 4, EXPIRED))
        await link.wait_closed()
        assert [each.is_unauthorized for each in port.peer.links] == [True]


# ---------------------------------------------------------------------------------------------
# logs


@run_on_loop
async def test_variants_of_a_protocol_error_are_logged_once(caplog):
    tls._LAST_LOGGED.clear()
    peer = Peer()
    listener = await listen(WireProtocol.STORAGE, ANY, 0, peer.connected)
    hellos = [
        codec.encode_hello(Hello((1_000 + number,), f'it\'s "{number}" {"x" * number}'))
        for number in range(20)
    ]
    frames = [HELLO + codec.FRAME_HEADER.pack(number + 100, 4, 0) for number in range(20)]
    for data in (*hellos, *frames):
        reader, writer = await asyncio.open_connection(ANY, listener.port)
        writer.write(data)
        await reader.read()
        writer.close()
    lines = [message for message in caplog.messages if message.startswith("net.protocol_error")]
    assert len(lines) == 2
    await listener.close()


def test_addresses_of_one_network_share_a_log_limit(monkeypatch):
    monkeypatch.setattr(tls, "_LAST_LOGGED", {})
    same = [f"2001:db8::{number:x}" for number in range(9)]
    others = ["2001:db8:0:1::1", "10.0.0.1", "10.0.0.2", "[2001:db8::1]:99", "[2001:db8::2]:99"]
    assert [tls.is_new_failure(each, "x") for each in same] == [True] + [False] * 8
    assert all(tls.is_new_failure(other, "x") for other in others)
