"""The limits of an HTTP port against slow, greedy and hostile clients."""

import asyncio
import contextlib
import logging
import signal

import pytest

from tests.http_client import get, send_request
from tests.loops import poll_until
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.errors import BadConfig
from waltz_core.transport import http_port, net
from waltz_core.transport.http_port import CONNECTIONS_MAX, HEAD_BYTES_MAX, serve_http

BAD_REQUEST = "HTTP/1.1 400 Bad Request"
OK = "HTTP/1.1 200 OK"
LARGE = bytes(64 * 1024 * 1024)


class App:
    """An application: "/" answers at once, "/large" with many bytes, and "/hang" not at all."""

    def __init__(self):
        self.hanging_count = self.sent_count = 0

    async def __call__(self, scope, receive, send):
        if scope["path"] == "/hang":
            self.hanging_count += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.hanging_count -= 1
        body = LARGE if scope["path"] == "/large" else b"ok"
        length = str(len(body)).encode()
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]}
        )
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body"})  # waits while the client does not read
        self.sent_count += 1


def run_with_port(scenario):
    """Run a scenario with a port and its application."""

    async def main():
        app = App()
        async with (
            asyncio.timeout(TEST_TIMEOUT_S),
            serve_http(app, host="127.0.0.1", port=0) as port,
        ):
            return await scenario(port, app)

    return net.run(main())


def response_to(request):
    return run_with_port(lambda port, _: send_request(port, request))


def test_the_error_names_an_address_in_use():
    async def scenario(port, app):
        expected = f"http_port: the daemon cannot listen at 127.0.0.1:{port}:"
        with pytest.raises(BadConfig, match=expected):
            async with serve_http(app, host="127.0.0.1", port=port):
                pass
        return True

    assert run_with_port(scenario)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",  # no host
        bytes(range(256)) * 64,
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * HEAD_BYTES_MAX,
    ],
)
def test_bad_requests_are_rejected_and_not_logged(caplog, request_bytes):
    caplog.set_level(logging.DEBUG)
    assert response_to(request_bytes)[0] == BAD_REQUEST
    assert [record for record in caplog.records if record.name != "asyncio"] == []


def test_an_http_connection_serves_one_request():
    assert response_to(get("/") + get("/")) == (OK, b"ok")


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: x",
        get("/hang"),
        b"POST /hang HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n" + bytes(400_000),
    ],
)
def test_a_slow_connection_is_closed(monkeypatch, request_bytes):
    monkeypatch.setattr(http_port, "REQUEST_S_MAX", 0.05)
    assert response_to(request_bytes) == ("", b"")


def test_a_client_that_does_not_read_is_disconnected(monkeypatch):
    monkeypatch.setattr(http_port, "REQUEST_S_MAX", 0.05)

    async def scenario(port, app):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.transport.pause_reading()
        writer.write(get("/large"))
        await poll_until(lambda: app.sent_count)
        writer.transport.resume_reading()
        found = 0
        with contextlib.suppress(ConnectionResetError):
            while received := await reader.read(1 << 20):
                found += len(received)
        writer.close()
        return found

    assert run_with_port(scenario) < len(LARGE)


def test_the_number_of_connections_is_limited():
    async def scenario(port, _app):
        connections = [
            await asyncio.open_connection("127.0.0.1", port) for _ in range(CONNECTIONS_MAX)
        ]
        rejected = await send_request(port, get("/"))
        for _, writer in connections:
            writer.close()
        while (served_again := await send_request(port, get("/"))) != (OK, b"ok"):
            pass
        return rejected, served_again

    rejected, served_again = run_with_port(scenario)
    assert rejected == ("", b"")
    assert served_again[0] == OK


def test_running_requests_of_disconnected_clients_count_towards_the_limit():
    async def scenario(port, app):
        for number in range(CONNECTIONS_MAX + 1):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(get("/hang"))
            await poll_until(lambda count=number + 1: app.hanging_count == count)
            writer.close()
            await writer.wait_closed()
        return await send_request(port, get("/"))

    assert run_with_port(scenario) == ("", b"")


def test_the_shutdown_waits_neither_for_idle_connections_nor_for_pages(caplog):
    async def main():
        app = App()
        async with serve_http(app, host="127.0.0.1", port=0) as port:
            idle, idle_writer = await asyncio.open_connection("127.0.0.1", port)
            hanging, hanging_writer = await asyncio.open_connection("127.0.0.1", port)
            hanging_writer.write(get("/hang"))
            await poll_until(lambda: app.hanging_count == 1)
        assert app.hanging_count == 0
        for reader, writer in ((idle, idle_writer), (hanging, hanging_writer)):
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()

    net.run(main())
    assert caplog.messages == []


def test_signal_handlers_and_loggers_are_not_changed():
    def state():
        loggers = [logging.getLogger(each) for each in ("", "uvicorn", "uvicorn.access")]
        return (
            [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)],
            [(logger.level, logger.propagate, list(logger.handlers)) for logger in loggers],
        )

    async def main():
        before = state()
        async with serve_http(App(), host="127.0.0.1", port=0) as port:
            await send_request(port, get("/"))
            assert state() == before

    net.run(main())
