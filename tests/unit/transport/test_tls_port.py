"""Handshakes over real sockets: accepted and rejected peers, and the errors on both sides."""

import asyncio
import contextlib
import logging
import re
import shutil
import socket
import ssl
import struct
import warnings

import pytest

from tests.certificates import create_certificates
from tests.loops import poll_until, run_on_loop
from tests.time_limits import TEST_TIMEOUT_S
from tests.unit.transport.peer import ANY, Peer, raw
from waltz_core.config import ClientConfig, ServerConfig, StorageConfig
from waltz_core.errors import RemoteProtocolError, TlsFailed, Unreachable
from waltz_core.transport import client_hello, net, tls, tls_port
from waltz_core.transport.listening import listen
from waltz_core.wire.messages import Appended, WireProtocol

MIB = 1024 * 1024


@pytest.fixture
def logged(caplog, monkeypatch):
    """The lines of the log so far; nothing was logged before."""
    monkeypatch.setattr(tls, "_LAST_LOGGED", {})
    caplog.set_level(logging.INFO)
    return lambda: "\n".join(record.getMessage() for record in caplog.records)


def listen_context(files, **settings):
    server_settings = {"tls_require_certificate": False} | files.settings | settings
    return tls.listen_context(StorageConfig(connect="zk:1/w", directory="d", **server_settings))


def dial_context(files, **settings):
    """The context of a client without a certificate."""
    server_settings = {"tls": "on", "tls_authorities": files.authorities} | settings
    return tls.dial_context(ClientConfig(**server_settings), "")


@contextlib.asynccontextmanager
async def open_port(context):
    """Yield the peer behind a port, the port's listener and its address."""
    peer = Peer()
    listener = await listen(WireProtocol.STORAGE, ANY, 0, peer.connected, ssl=context)
    try:
        yield peer, listener, f"{ANY}:{listener.port}"
    finally:
        await listener.close()


@contextlib.asynccontextmanager
async def dial(address, context, protocol=WireProtocol.STORAGE):
    link = await net.dial(protocol, address, ssl=context)
    try:
        yield link
    finally:
        link.close("done")
        await link.wait_closed()


# ---------------------------------------------------------------------------------------------
# links


SENT = [raw(size, n) for n, size in enumerate((0, 16 * 1024, 15 * MIB, 1, 300_000))]
SMALL = [Appended(1, n, 3, n) for n in range(4_000)]


async def send_and_return(files):
    """Send more data than the buffers hold, both ways; return what both sides receive."""
    async with (
        open_port(listen_context(files)) as (peer, _, address),
        dial(address, dial_context(files)) as link,
    ):
        for message in SENT:
            link.send(message)
        for offset in range(0, len(SMALL), 50):
            link.send_all(SMALL[offset : offset + 50])
            await link.wait_drained()
        await poll_until(lambda: len(peer.messages) == len(SENT) + len(SMALL))
        for message in SENT:
            peer.links[0].send(message)
        back = []
        while len(back) < len(SENT):
            back += await link.receive()
        return peer.messages, back


@pytest.mark.parametrize("run", [net.run, asyncio.run], ids=["of a daemon", "of a notebook"])
def test_frames_of_all_sizes_go_in_both_directions_on_each_kind_of_event_loop(files, run):
    arrived, back = run(asyncio.wait_for(send_and_return(files), TEST_TIMEOUT_S))
    assert arrived == SENT + SMALL
    assert back == SENT


@pytest.mark.parametrize("spoken", ["TLSv1.2", "TLSv1.3"])
@run_on_loop
async def test_peers_of_this_version_use_tls_1_3_and_clients_may_use_1_2(files, spoken):
    context = dial_context(files)
    if spoken == "TLSv1.2":
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    async with (
        open_port(listen_context(files)) as (peer, _, address),
        dial(address, context) as link,
    ):
        assert link._transport.get_extra_info("ssl_object").version() == spoken
        link.send(Appended(1, 7, 3, 9))
        await poll_until(lambda: peer.messages)


@run_on_loop
async def test_an_aborted_connection_is_detected_at_once(files):
    async with open_port(listen_context(files)) as (peer, _, address):
        link = await net.dial(WireProtocol.STORAGE, address, ssl=dial_context(files))
        await poll_until(lambda: peer.links)
        link.abort("enough")
        await link.wait_closed()
        await poll_until(lambda: peer.closed)
        assert peer.links[0].is_closed


@run_on_loop
async def test_a_close_does_not_wait_long_for_a_silent_peer(files, monkeypatch):
    monkeypatch.setattr(net, "CLOSE_S_MAX", 0.1)
    async with open_port(listen_context(files)) as (peer, _, address):
        link = await net.dial(WireProtocol.STORAGE, address, ssl=dial_context(files))
        await poll_until(lambda: peer.links)
        peer.links[0].pause_reading()
        for n in range(30):
            link.send(raw(MIB, n))
        link.close("done")
        await link.wait_closed()
        assert link.closed_reason == "done"
        peer.links[0].resume_reading()


# ---------------------------------------------------------------------------------------------
# a 0.13 peer (docs/design/wire-format.md 1.2 and 1.3)

HELLOS_OF_0_13 = {
    WireProtocol.CLIENT: ((0, 1, 2, 3, 4), "Waltz Server"),
    WireProtocol.STORAGE: ((0,), "Waltz Storage Server"),
    WireProtocol.ADMIN: ((0,), "Waltz Storage Admin Server"),
}


def hello_of_0_13(versions, text):
    payload = struct.pack(f">i{len(versions)}h", len(versions), *versions)
    payload += struct.pack(">i", len(text)) + text.encode()
    return b"H" + struct.pack(">hi", 0, len(payload)) + payload


@contextlib.asynccontextmanager
async def daemon_of_0_13(protocol, directory):
    """A daemon of 0.13: TLS 1.2, a self-signed certificate; yield address and hellos."""
    hellos = []

    async def greet(reader, writer):
        writer.write(hello_of_0_13(*HELLOS_OF_0_13[protocol]))
        head = await reader.readexactly(7)
        hellos.append(head + await reader.readexactly(struct.unpack(">i", head[3:])[0]))
        while await reader.read(1024):
            pass
        writer.close()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    untrusted = create_certificates(directory, name="nobodys", hosts=("localhost",))
    context.load_cert_chain(untrusted.certificate, untrusted.key)
    async with await asyncio.start_server(greet, ANY, 0, ssl=context) as server:
        yield f"{ANY}:{server.sockets[0].getsockname()[1]}", hellos


@pytest.mark.parametrize("protocol", HELLOS_OF_0_13)
@run_on_loop
async def test_an_unverified_dial_reaches_a_0_13_daemon(protocol, tmp_path):
    async with daemon_of_0_13(protocol, tmp_path) as (address, hellos):
        with pytest.raises(TlsFailed, match="the certificate of the peer is not valid"):
            await net.dial(protocol, address, ssl=tls.dial_context_for("on"))
        # The supported protocol versions do not matter here.
        with contextlib.suppress(RemoteProtocolError):
            async with dial(address, tls.dial_context_for("unverified"), protocol):
                pass
        await poll_until(lambda: hellos)
    assert hellos[0][:3] == b"H\0\0"


@run_on_loop
async def test_a_0_13_client_connects_with_any_certificate(files, tmp_path):
    """A 0.13 client verifies nothing, and presents a self-signed certificate on request."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    untrusted = create_certificates(tmp_path, name="nobodys")
    context.load_cert_chain(untrusted.certificate, untrusted.key)
    async with open_port(listen_context(files)) as (peer, _, address):
        reader, writer = await asyncio.open_connection(*address.split(":"), ssl=context)
        writer.write(hello_of_0_13((0, 1), "Waltz Storage Client"))
        assert (await reader.readexactly(3)) == b"H\0\0"
        await poll_until(lambda: peer.links)
        writer.close()


# ---------------------------------------------------------------------------------------------
# mismatched peers


@run_on_loop
async def test_both_sides_report_plain_tcp_at_a_tls_port(files, logged):
    async with open_port(listen_context(files)) as (_, listener, address):
        text = f"{address}: expected plain TCP, found TLS. Hint: the peer expects TLS; add ?tls="
        with pytest.raises(TlsFailed, match=re.escape(text)):
            await net.dial(WireProtocol.STORAGE, address)
        await poll_until(lambda: "error=expected TLS, found plain TCP" in logged())
        assert listener.links == ()


@run_on_loop
async def test_a_repeated_error_of_a_peer_is_logged_once_per_interval(files, logged, monkeypatch):
    async def plain_to_tls():
        with pytest.raises(TlsFailed):
            await net.dial(WireProtocol.STORAGE, address)
        await poll_until(lambda: not listener._tls_port._limits._count)

    async with open_port(listen_context(files)) as (_, listener, address):
        for _ in range(5):
            await plain_to_tls()
        assert logged().count("tls.handshake_failed peer=127.0.0.1 error=") == 1
        assert logged().count(f"tls.handshake_failed peer={address} error=") == 1
        monkeypatch.setattr(tls, "LOG_INTERVAL_S", 0.0)
        monkeypatch.setattr(tls, "_LAST_LOGGED_MAX", 1)
        await plain_to_tls()
        assert logged().count("tls.handshake_failed peer=127.0.0.1 error=") == 2
        assert len(tls._LAST_LOGGED) == 1


@run_on_loop
async def test_both_sides_report_tls_at_a_plain_port(files, logged):
    async with open_port(None) as (_, _, address):
        with pytest.raises(TlsFailed, match=f"{address}: expected TLS, found plain TCP"):
            await net.dial(WireProtocol.STORAGE, address, ssl=dial_context(files))
        await poll_until(lambda: "peer=127.0.0.1 error=expected plain TCP, found TLS" in logged())
        assert f"peer={address} error=expected TLS, found plain TCP" in logged()


@run_on_loop
async def test_both_sides_report_a_certificate_of_another_authority(files, tmp_path, logged):
    async with open_port(listen_context(files)) as (_, _, address):
        with pytest.raises(TlsFailed, match="the certificate of the peer is not valid: unable to"):
            await net.dial(
                WireProtocol.STORAGE, address, ssl=dial_context(create_certificates(tmp_path))
            )
        await poll_until(lambda: "It may not trust the certificate" in logged())


@run_on_loop
async def test_a_certificate_for_another_host_is_reported(tmp_path):
    files = create_certificates(tmp_path, hosts=("storage1.example",))
    async with open_port(listen_context(files)) as (_, _, address):
        with pytest.raises(TlsFailed, match=r"not valid: .*IP address mismatch"):
            await net.dial(WireProtocol.STORAGE, address, ssl=dial_context(files))
        async with dial(address, dial_context(files, tls_verify="chain")):
            pass
        async with dial(address, dial_context(create_certificates(tmp_path), tls_verify="nothing")):
            pass


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@run_on_loop
async def test_both_sides_report_a_missing_certificate(files, version, logged):
    required = listen_context(files, tls_require_certificate=True)
    async with open_port(required) as (peer, _, address):
        context = dial_context(files)
        context.maximum_version = version
        with pytest.raises(TlsFailed, match=r"expects? a certificate"):
            await net.dial(WireProtocol.STORAGE, address, ssl=context)
        await poll_until(lambda: "expected a certificate of the peer, found none" in logged())
        assert peer.links == []
        async with dial(address, tls.dial_context(ClientConfig(**files.settings), "")):
            pass


@run_on_loop
async def test_both_sides_report_a_self_signed_certificate(files, tmp_path, logged):
    stranger = create_certificates(tmp_path, name="stranger")
    settings = stranger.settings | {"tls_authorities": files.authorities}
    async with open_port(listen_context(files, tls_require_certificate=True)) as (_, _, address):
        with pytest.raises(TlsFailed, match="the peer rejects the certificate of this process:"):
            await net.dial(
                WireProtocol.STORAGE, address, ssl=tls.dial_context(ClientConfig(**settings), "")
            )
        await poll_until(lambda: "the certificate of the peer is not valid" in logged())


def hello_of_tls_1_1():
    """A ClientHello of an old client, which offers at most TLS 1.1."""
    ciphers = struct.pack(">H2H", 4, 0xC013, 0x002F)
    body = struct.pack(">H", 0x0302) + bytes(32) + b"\0" + ciphers + b"\1\0"
    handshake = b"\1" + len(body).to_bytes(3, "big") + body
    return struct.pack(">BHH", 0x16, 0x0301, len(handshake)) + handshake


@run_on_loop
async def test_tls_1_1_is_rejected(files, logged):
    async with open_port(listen_context(files)) as (_, _, address):
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(hello_of_tls_1_1())
        answer = await reader.read(7)
        assert answer[0] == tls.ALERT_RECORD
        assert answer[5:] == bytes((2, 70))  # fatal, protocol_version
        writer.close()
        await poll_until(lambda: "no common version: expected TLS 1.2 or 1.3" in logged())


@run_on_loop
async def test_a_port_that_offers_only_tls_1_1_is_rejected(files):
    with warnings.catch_warnings(action="ignore"):
        old = listen_context(files)
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
        old.set_ciphers("ALL:@SECLEVEL=0")
    async with open_port(old) as (_, _, address):
        with pytest.raises(TlsFailed, match=r"no common version: expected TLS 1\.2"):
            await net.dial(WireProtocol.STORAGE, address, ssl=dial_context(files))


@run_on_loop
async def test_replaced_certificate_files_are_used_if_they_are_valid(tmp_path, logged):
    used, new = create_certificates(tmp_path), create_certificates(tmp_path, name="new")
    config = StorageConfig(connect="zk:1/w", directory="d", **used.settings)
    ports, dials = tls.listen_context(config), tls.dial_context(config, "")
    before = tls.dial_context(ClientConfig(**used.settings), "")
    async with open_port(ports) as (_, _, address), dial(address, dials) as kept:
        shutil.copyfile(new.certificate, used.certificate)
        tls.reload_files(config, ports, dials)  # only one of two files that belong together exists
        assert "tls.reload_failed error=setting tls_certificate: " in logged()
        async with dial(address, before):
            pass
        shutil.copyfile(new.key, used.key)
        shutil.copyfile(new.authorities, used.authorities)
        tls.reload_files(config, ports, dials)
        assert f"tls.reloaded certificate={used.certificate}" in logged()
        async with dial(address, tls.dial_context(ClientConfig(**new.settings), "")):
            pass
        async with dial(address, dials):
            assert not kept.is_closed
        with pytest.raises(TlsFailed, match="is not valid"):
            await net.dial(WireProtocol.STORAGE, address, ssl=before)


# --------------------------------------------------------------------------------------------- a
# port that accepts plain TCP and TLS, and attempts to downgrade a connection


def of_daemon(files, **settings):
    return ServerConfig(**{"connect": "zk:1/w"} | files.settings | settings)


@pytest.mark.parametrize("transition", ["accept", "dial"])
@run_on_loop
async def test_a_port_in_transition_accepts_tls_and_plain_tcp(files, logged, transition):
    context = listen_context(
        files,
        tls_transition=transition,
        tls_require_certificate=True,
        access="report",
        principal_pattern="DNS=(localhost)",
    )
    async with (
        open_port(context) as (peer, _, address),
        dial(address, None) as plain,
        dial(address, tls.dial_context(of_daemon(files), "")) as encrypted,
    ):
        for link in (plain, encrypted):
            link.send(Appended(1, 7, 3, 9))
        await poll_until(lambda: len(peer.messages) == 2)
        assert sorted(each.principal for each in peer.links) == ["anonymous", "localhost"]
        with pytest.raises(TlsFailed, match=r"expects a certificate"):
            await net.dial(WireProtocol.STORAGE, address, ssl=dial_context(files))
    # Operators must know about peers with plain TCP before the transition ends.
    assert ("tls.plain_tcp_accepted peer=127.0.0.1" in logged()) == (transition == "dial")


@run_on_loop
async def test_a_port_in_transition_rejects_other_protocols(files, logged):
    async with open_port(listen_context(files, tls_transition="accept")) as (_, listener, _):
        reader, writer = await asyncio.open_connection(ANY, listener.port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await reader.read()
        writer.close()
        await poll_until(lambda: listener.links == ())
        assert "net.protocol_error" in logged()


class ManInTheMiddle:
    """A man in the middle: `attack` answers each connection. The first bytes are recorded."""

    def __init__(self, attack):
        self.first_bytes = []
        self._attack = attack

    @contextlib.asynccontextmanager
    async def open(self):
        async with await asyncio.start_server(self._answer, ANY, 0) as server:
            yield f"{ANY}:{server.sockets[0].getsockname()[1]}"

    async def _answer(self, reader, writer):
        self.first_bytes.append(await reader.read(1024))
        await self._attack(reader, writer)
        with contextlib.suppress(ConnectionError):
            while await reader.read(1024):
                pass
        writer.close()


ALERTS = {
    "handshake failure": bytes((tls.ALERT_RECORD, 3, 3, 0, 2, 2, 40)),
    "protocol version": bytes((tls.ALERT_RECORD, 3, 3, 0, 2, 2, 70)),
    "a hello in plain text": hello_of_0_13((64,), "Waltz Storage Server"),
    "nothing": b"",
}


@pytest.mark.parametrize("answer", ALERTS.values(), ids=ALERTS)
@run_on_loop
async def test_a_stripped_handshake_never_leads_to_plain_tcp(files, answer, tmp_path):
    token = tmp_path / "token"
    token.write_text("ab" * 32)
    config = of_daemon(files, tls_transition="dial")
    contexts = (
        tls.dial_context(config, ""),
        tls.dial_context(config, f"zk:1/w?token_file={token}"),
    )

    async def strip(_reader, writer):
        writer.write(answer)
        writer.write_eof()

    middle = ManInTheMiddle(strip)
    async with middle.open() as address:
        for context in contexts:
            with pytest.raises((TlsFailed, Unreachable)):
                await net.dial(WireProtocol.STORAGE, address, ssl=context)
    assert [each[0] for each in middle.first_bytes] == [tls.HANDSHAKE_RECORD] * len(contexts)


# ---------------------------------------------------------------------------------------------
# handshakes that stop


@run_on_loop
async def test_a_connection_without_data_is_not_logged(files, logged):
    async with open_port(listen_context(files)) as (_, listener, address):
        for is_reset in (False, True, False):
            with socket.create_connection(("127.0.0.1", listener.port)) as closed_connection:
                closed_connection.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", is_reset, 0)
                )
        async with dial(address, dial_context(files)):
            pass
        await poll_until(lambda: not listener._tls_port._limits._count)
        assert logged() == ""


def hello_of_client(files, group=None, version=None):
    """The first bytes of a client, which offers all groups or one."""
    context, outgoing = dial_context(files), ssl.MemoryBIO()
    if group is not None:
        context.set_ecdh_curve(group)
    if version is not None:
        context.maximum_version = version
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=ANY).do_handshake()
    return outgoing.read()


@pytest.mark.parametrize("missing", ["all", "most", "the last byte", "the second part"])
@run_on_loop
async def test_a_slow_handshake_is_disconnected(files, monkeypatch, logged, missing):
    monkeypatch.setattr(tls_port, "HANDSHAKE_S_MAX", 0.1)
    hello = hello_of_client(files)
    sent = {"all": b"", "most": hello[:2], "the last byte": hello[:-1]}.get(missing, hello)
    async with open_port(listen_context(files)) as (_, listener, _):
        reader, writer = await asyncio.open_connection(ANY, listener.port)
        writer.write(sent)
        with contextlib.suppress(ConnectionResetError):  # the port has not read the bytes
            await reader.read()
        writer.close()
        line = "is taking longer than" if sent == hello else "handshake did not complete within"
        await poll_until(lambda: line in logged())


@run_on_loop
async def test_half_open_handshakes_do_not_delay_other_peers(files, monkeypatch, logged):
    monkeypatch.setattr(tls_port, "HANDSHAKE_S_MAX", 3600.0)
    async with open_port(listen_context(files, tls_transition="accept")) as (
        peer,
        listener,
        address,
    ):
        connections = [await asyncio.open_connection(ANY, listener.port) for _ in range(100)]
        hello = hello_of_tls_1_1()
        for number, (_, writer) in enumerate(connections):
            writer.write(hello[: number % len(hello)])  # includes zero bytes
        await poll_until(lambda: listener._tls_port._limits._count == len(connections))
        for context in (dial_context(files), None):
            async with dial(address, context) as link:
                link.send(Appended(1, 7, 3, 9))
        await poll_until(lambda: len(peer.messages) == 2)
        assert listener._tls_port._limits._count == len(connections)
        for _, writer in connections:
            writer.transport.abort()
        await poll_until(lambda: not listener._tls_port._limits._count)


@run_on_loop
async def test_each_loop_iteration_answers_one_handshake(files, monkeypatch):
    loop, answered = asyncio.get_running_loop(), [0]
    do_handshake = tls._Handshake.do_handshake

    def counting(handshake):
        if answered[-1] == 0:
            loop.call_soon(answered.append, 0)  # after all data that has arrived in this iteration
        had_bytes = handshake.outgoing.pending
        try:
            do_handshake(handshake)
        finally:
            answered[-1] += handshake.outgoing.pending > had_bytes

    monkeypatch.setattr(tls._Handshake, "do_handshake", counting)
    hello = hello_of_client(files)
    async with open_port(listen_context(files)) as (_, listener, _):
        connections = [await asyncio.open_connection(ANY, listener.port) for _ in range(50)]
        await poll_until(lambda: listener._tls_port._limits._count == len(connections))
        for _, writer in connections:
            writer.write(hello[:-1])
        for _, writer in connections:
            writer.write(hello[-1:])
        for reader, _ in connections:
            await reader.readexactly(1)
        assert sum(answered) == len(connections)
        assert max(answered) == 1
        for _, writer in connections:
            writer.transport.abort()


@run_on_loop
async def test_a_slow_client_hello_takes_three_turns(files):
    hello = hello_of_client(files)
    async with open_port(listen_context(files)) as (_, listener, address):
        turns = listener._tls_port._queue
        add, hosts = turns.add, []
        turns.add = lambda host, *each: (hosts.append(host), add(host, *each))
        reader, writer = await asyncio.open_connection(ANY, listener.port)
        others_count = 0
        for each in range(0, 60, 4):
            writer.write(hello[each : each + 4])
            async with dial(address, dial_context(files)):  # in the meantime the bytes have arrived
                others_count += 1
        writer.write(hello[60:])
        await reader.readexactly(1)
        assert len(hosts) == others_count + 3
        writer.transport.abort()


@pytest.mark.parametrize("first_size", [0, 30])
@run_on_loop
async def test_a_client_hello_in_two_records_is_rejected(files, logged, first_size):
    hello = hello_of_client(files)
    size = len(hello) - 5
    header = hello[:3]
    split = [
        header + first_size.to_bytes(2, "big") + hello[5 : 5 + first_size],
        header + (size - first_size).to_bytes(2, "big") + hello[5 + first_size :],
    ]
    async with open_port(listen_context(files)) as (_, listener, _):
        reader, writer = await asyncio.open_connection(ANY, listener.port)
        writer.write(b"".join(split))
        assert await reader.readexactly(7) == tls.HANDSHAKE_FAILURE_ALERT
        writer.transport.abort()
        await poll_until(lambda: "expected a complete TLS ClientHello in one record" in logged())


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_only_a_fast_key_exchange_is_accepted(files, version):
    for group in (None, *filter(can_select, ("X25519",)), "prime256v1"):
        assert client_hello.reject_reason(hello_of_client(files, group, version)) == ""
    slow = ["secp384r1", "secp521r1", *filter(can_select, ("X448",))]
    if version == ssl.TLSVersion.TLSv1_3:
        slow += filter(can_select, ("ffdhe2048", "ffdhe8192"))
    for group in slow:
        hello = hello_of_client(files, group, version)
        assert (
            client_hello.reject_reason(hello)
            == "expected a client that offers a key exchange with X25519 or P-256, found none"
        )
    assert listen_context(files).options & ssl.OP_CIPHER_SERVER_PREFERENCE  # with TLS 1.2


def can_select(group):
    """Whether this Python can select groups that are not elliptic curves of OpenSSL 1.1."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).set_ecdh_curve(group)
    except ssl.SSLError:
        return False
    return True


def hello_of_tls_1_3(groups):
    """A ClientHello with a key share of each group."""
    shares = b"".join(struct.pack(">HH", group, 1) + b"k" for group in groups)
    versions = struct.pack(">HHB", 43, 3, 2) + b"\3\4"
    extensions = versions + struct.pack(">3H", 51, 2 + len(shares), len(shares)) + shares
    body = struct.pack(">H", 0x0303) + bytes(32) + b"\0" + struct.pack(">2H", 2, 0x1301) + b"\1\0"
    body += struct.pack(">H", len(extensions)) + extensions
    return struct.pack(">BHHBBH", 0x16, 0x0301, 4 + len(body), 1, 0, len(body)) + body


def test_a_client_hello_is_judged_by_its_first_key_share_that_openssl_knows():
    p_256, x25519, p_384, ffdhe8192, unknown = 0x17, 0x1D, 0x18, 0x0104, 0x0A0A
    accepted = [(x25519,), (p_256,), (unknown, x25519), (p_256, p_384), (x25519, ffdhe8192)]
    rejected = [(), (unknown,), (p_384, p_256), (unknown, ffdhe8192, x25519)]
    for each in accepted:
        assert client_hello.reject_reason(hello_of_tls_1_3(each)) == ""
    for each in rejected:  # without a matching key share, OpenSSL requests a second ClientHello
        assert "X25519 or P-256" in client_hello.reject_reason(hello_of_tls_1_3(each))


@run_on_loop
async def test_a_slow_key_exchange_is_rejected_on_both_sides(files, logged):
    slow = dial_context(files)
    slow.set_ecdh_curve("secp521r1")
    async with open_port(listen_context(files)) as (_, _, address):
        with pytest.raises(TlsFailed, match="or a key exchange with X25519 or P-256"):
            await net.dial(WireProtocol.STORAGE, address, ssl=slow)
        assert "tls.handshake_failed peer=127.0.0.1 error=expected a client that offers" in logged()


@run_on_loop
async def test_a_queued_handshake_does_not_time_out(files, monkeypatch, logged):
    timeouts, timeout_at = [], asyncio.timeout_at
    async with open_port(listen_context(files)) as (_, listener, address):
        turns = listener._tls_port._queue
        delayed, call_later = [], turns._call_later
        turns._call_later = lambda *each: delayed.append(each)
        monkeypatch.setattr(
            asyncio, "timeout_at", lambda when: timeouts.append(timeout_at(when)) or timeouts[-1]
        )
        with socket.create_connection((ANY, listener.port)) as closed_connection:
            closed_connection.sendall(hello_of_client(files))
            await poll_until(lambda: delayed)
            assert [timeout.when() for timeout in timeouts] == [None]
        turns._call_later = call_later
        turns._begin_one()
        await poll_until(lambda: "closed the connection while its handshake waited" in logged())
        async with dial(address, dial_context(files)):
            assert len(listener.links) == 1


class LaterLoop:
    """A loop whose clock is an hour ahead."""

    def __init__(self, loop):
        self._loop = loop

    def __getattr__(self, name):
        return getattr(self._loop, name)

    def time(self):
        return self._loop.time() + 3_600


@run_on_loop
async def test_the_time_limit_of_a_client_hello_does_not_include_the_wait_for_a_turn(
    files, monkeypatch
):
    timeouts, timeout_at, hello = [], asyncio.timeout_at, hello_of_client(files)
    async with open_port(listen_context(files)) as (_, listener, _):
        port, loop = listener._tls_port, asyncio.get_running_loop()
        delayed, call_later = [], port._queue._call_later
        port._queue._call_later = lambda *each: delayed.append(each)
        monkeypatch.setattr(
            asyncio, "timeout_at", lambda when: timeouts.append(timeout_at(when)) or timeouts[-1]
        )
        begun_s = loop.time()
        _, writer = await asyncio.open_connection(ANY, listener.port)
        writer.write(hello[:4])
        await poll_until(lambda: delayed)
        monkeypatch.setattr(port, "_loop", LaterLoop(loop))
        port._queue._call_later = call_later
        port._queue._begin_one()
        await poll_until(lambda: timeouts[0].when() is not None)
        assert timeouts[0].when() > begun_s + 3_500
        writer.transport.abort()


@run_on_loop
async def test_too_many_handshakes_of_one_host_are_rejected(files, monkeypatch, logged):
    monkeypatch.setattr(tls_port, "HANDSHAKES_MAX", 2)
    async with open_port(listen_context(files)) as (_, listener, address):
        with socket.create_connection((ANY, listener.port)):
            await poll_until(lambda: listener._tls_port._limits._count)
            with pytest.raises(Unreachable):
                await net.dial(WireProtocol.STORAGE, address, ssl=dial_context(files))
            assert "1 handshakes of this host are in progress; the limit is 1" in logged()
        await poll_until(lambda: not listener._tls_port._limits._count)
        async with dial(address, dial_context(files)):
            pass


@run_on_loop
async def test_a_failed_connection_does_not_end_the_port(files, monkeypatch, logged):
    async with open_port(listen_context(files)) as (_, listener, address):
        faults = [ZeroDivisionError("ours"), OSError(24, "Too many open files")]
        dup = socket.socket.dup

        def failing_dup(each):
            if faults:
                raise faults.pop()
            return dup(each)

        monkeypatch.setattr(socket.socket, "dup", failing_dup)
        for _ in range(2):
            with pytest.raises(Unreachable):
                await net.dial(WireProtocol.STORAGE, address, ssl=dial_context(files))
        assert "Too many open files" in logged()
        await poll_until(lambda: not listener._tls_port._limits._count)
        async with dial(address, dial_context(files)):
            assert listener.links


@run_on_loop
async def test_a_closing_port_drops_connections_in_their_handshake(files):
    peer = Peer()
    listener = await listen(WireProtocol.STORAGE, ANY, 0, peer.connected, ssl=listen_context(files))
    reader, writer = await asyncio.open_connection(ANY, listener.port)
    writer.write(b"\x16\x03")
    await poll_until(lambda: listener._tls_port._limits._count)
    await listener.close()
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""
    writer.close()
    with pytest.raises(Unreachable):
        await net.dial(WireProtocol.STORAGE, f"{ANY}:{listener.port}", ssl=dial_context(files))


class FailingLoop:
    """A loop that has no free descriptor for the first connection."""

    def __init__(self, loop):
        self._loop = loop
        self.failures_count = 1

    def __getattr__(self, name):
        return getattr(self._loop, name)

    async def sock_accept(self, listening_socket):
        accepted = await self._loop.sock_accept(listening_socket)
        if self.failures_count:
            self.failures_count -= 1
            accepted[0].close()
            raise OSError(24, "Too many open files")
        return accepted


@run_on_loop
async def test_a_failed_accept_does_not_end_the_port(files, monkeypatch, logged):
    monkeypatch.setattr(tls_port, "_ACCEPT_PAUSE_S", 0.01)
    protocols = []
    port = tls_port.TlsPort(
        listen_context(files), lambda: protocols.append(1) or asyncio.Protocol()
    )
    port._loop = FailingLoop(port._loop)
    await port.open(ANY, 0)
    with socket.create_connection((ANY, port.port)):
        await poll_until(lambda: "tls.accept_failed" in logged())
    _, writer = await asyncio.open_connection(
        ANY, port.port, ssl=dial_context(files), server_hostname=ANY
    )
    await poll_until(lambda: protocols)
    assert protocols == [1]
    writer.transport.abort()
    await port.close()
