"""Connections of the gateway's port: any number of requests, and limits for slow clients."""

import asyncio
import contextlib
import socket
import ssl
from unittest.mock import Mock

import pytest
from uvicorn.config import Config
from uvicorn.server import ServerState

from tests.certificates import create_certificates
from tests.http_client import get
from tests.loops import poll_until
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.errors import BadConfig
from waltz_core.transport import http_port, net
from waltz_core.transport.http_port import serve_http

KEPT_MAX = 3
CHUNK = bytes(1024 * 1024)


class App:
    """Pages: `/wait` waits for `may_answer`, `/endless` never ends, others answer at once."""

    def __init__(self):
        self.may_answer = asyncio.Event()
        self.sent_count = self.ended_count = 0

    async def __call__(self, scope, receive, send):
        body = b""
        while scope["path"] != "/early":
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if scope["path"] == "/wait":
            await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while scope["path"] == "/endless":
            await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
            self.sent_count += 1
            if (await self._poll(receive)) == "http.disconnect":
                self.ended_count += 1
                return
        await send({"type": "http.response.body", "body": str(len(body)).encode()})

    async def _poll(self, receive):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0):
                return (await receive())["type"]
        return None


def run_with_port(scenario, **more):
    async def main():
        app = App()
        async with (
            asyncio.timeout(TEST_TIMEOUT_S),
            serve_http(
                app, host="127.0.0.1", port=0, keep_alive_connections_max=KEPT_MAX, **more
            ) as port,
        ):
            return await scenario(port, app)

    return net.run(main())


def tls_contexts(directory):
    """Return the contexts of a server and of a client."""
    files = create_certificates(directory)
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(files.certificate, files.key)
    return server_context, ssl.create_default_context(cafile=files.authorities)


async def answer(reader):
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    size = int(await reader.readline(), 16)
    body = await reader.readexactly(size)
    assert await reader.readexactly(7) == b"\r\n0\r\n\r\n"
    return body


def test_a_connection_serves_any_number_of_requests():
    async def scenario(port, _app):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        found = []
        for _ in range(3):
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nab")
            found.append(await answer(reader))
        writer.write(get("/") + get("/"))
        found += [await answer(reader), await answer(reader)]
        writer.close()
        return found

    assert run_with_port(scenario) == [b"2", b"2", b"2", b"0", b"0"]


def test_the_arrival_timeout_does_not_limit_the_processing_of_a_request(monkeypatch):
    monkeypatch.setattr(http_port, "RECEIVE_S_MAX", 0.05)
    monkeypatch.setattr(http_port, "CHECK_INTERVAL_S", 0.01)

    async def scenario(port, app):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get("/wait"))
        silent, silent_writer = await asyncio.open_connection("127.0.0.1", port)
        assert await silent.read() == b""  # the port closed this one, and could close the other
        silent_writer.close()
        app.may_answer.set()
        found = await answer(reader)
        writer.close()
        return found

    assert run_with_port(scenario) == b"0"


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: x",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n" + bytes(1000),
        get("/") + b"GET / HTTP/1.1\r\nHost: x",
        get("/") + b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nab",
        b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nab",
    ],
)
def test_a_request_that_arrives_too_slowly_is_abandoned(monkeypatch, request_bytes):
    monkeypatch.setattr(http_port, "RECEIVE_S_MAX", 0.05)
    monkeypatch.setattr(http_port, "CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(http_port, "IDLE_S_MAX", 0.05)

    async def scenario(port, _app):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_bytes)
        with contextlib.suppress(ConnectionResetError):
            await reader.read()
        writer.close()
        return True

    assert run_with_port(scenario)


@pytest.mark.parametrize("is_tls", [False, True])
def test_a_client_that_does_not_read_is_disconnected(monkeypatch, tmp_path, is_tls):
    ours, theirs = tls_contexts(tmp_path) if is_tls else (None, None)
    monkeypatch.setattr(http_port, "STALLED_S_MAX", 0.05)
    monkeypatch.setattr(http_port, "CHECK_INTERVAL_S", 0.01)

    async def scenario(port, app):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=theirs)
        writer.transport.pause_reading()
        writer.write(get("/endless"))
        await poll_until(lambda: app.ended_count)
        sent_count = app.sent_count
        writer.transport.resume_reading()
        with contextlib.suppress(ConnectionResetError):
            while await reader.read(1 << 20):
                pass
        writer.close()
        return sent_count

    assert run_with_port(scenario, ssl=ours) < 64  # the capacity of the sockets and one buffer


class Clock:
    """A loop with one timer, whose time the test sets."""

    def __init__(self):
        self.now_s, self.timer = 0.0, None

    def time(self):
        return self.now_s

    def call_later(self, _delay_s, callback):
        self.timer = callback
        return Mock()

    def advance(self, seconds):
        for _ in range(seconds):
            self.now_s += 1
            self.timer()


@pytest.fixture
def connection_with_clock():
    """Yield a clock, the transport of a connection with a request, and the connection."""
    clock, transport = Clock(), Mock()
    ours, theirs = socket.socketpair()
    transport.get_extra_info.side_effect = lambda name: ours if name == "socket" else None
    transport.is_closing.return_value = False
    transport.get_write_buffer_size.return_value = 100_000
    connection = http_port._KeepAliveConnection(Config(App()), ServerState(), clock, KEPT_MAX)
    connection.connection_made(transport)
    connection.timeout_keep_alive_task = Mock()  # a request has arrived
    yield clock, transport, connection
    ours.close()
    theirs.close()


def test_a_client_that_reads_slowly_stays_connected(connection_with_clock):
    clock, transport, connection = connection_with_clock
    connection.pause_writing()
    for size in range(100_000, 0, -10_000):
        transport.get_write_buffer_size.return_value = size
        clock.advance(25)
    assert not transport.abort.called
    clock.advance(10)
    assert transport.abort.called


def test_a_connection_to_a_dead_host_is_closed(connection_with_clock, monkeypatch):
    clock, transport, _ = connection_with_clock
    clock.advance(100)
    assert not transport.abort.called
    monkeypatch.setattr(http_port.tcp, "silence_ms", lambda _sock: 10_000)
    clock.advance(1)
    assert transport.abort.called


def test_the_number_of_connections_is_limited():
    async def scenario(port, _app):
        connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(KEPT_MAX)]
        rejected, rejected_writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionResetError):
            assert await rejected.read() == b""
        rejected_writer.close()
        for reader, writer in connections:
            writer.write(get("/"))
            assert await answer(reader) == b"0"
            writer.close()
        return True

    assert run_with_port(scenario)


def test_a_tls_handshake_has_a_time_limit(monkeypatch, tmp_path):
    monkeypatch.setattr(http_port, "RECEIVE_S_MAX", 0.05)
    context, _ = tls_contexts(tmp_path)

    async def scenario(port, _app):
        for sent in (b"", get("/")):  # no bytes, and bytes that are not TLS
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()
        return True

    assert run_with_port(scenario, ssl=context)


def test_the_error_names_an_address_in_use():
    async def scenario(port, app):
        with pytest.raises(BadConfig, match=f"setting port: .* cannot listen at 127.0.0.1:{port}:"):
            async with serve_http(app, host="127.0.0.1", port=port, keep_alive_connections_max=1):
                pass
        return True

    assert run_with_port(scenario)
