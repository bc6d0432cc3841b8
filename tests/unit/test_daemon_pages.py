"""The HTTP pages of a daemon, over real sockets."""

import asyncio
import json
import subprocess
import sys

import pytest

from tests.http_client import get, send_request
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.daemon_pages import Health, serve_pages
from waltz_core.metrics import Metrics
from waltz_core.transport import net

HEALTHY = Health(is_healthy=True, unready_reasons=[], details={"partitions": [0, 1]})
UNHEALTHY = Health(
    is_healthy=False, unready_reasons=["no quorum", "no disk"], details={"error": "x"}
)
OK = "HTTP/1.1 200 OK"
UNAVAILABLE = "HTTP/1.1 503 Service Unavailable"


def pages(*requests, health):
    """Return the answers of a daemon whose health check returns a value, or raises an error."""

    async def find():
        if isinstance(health, Exception):
            raise health
        return health

    async def main():
        metrics = Metrics("server")
        metrics.set("waltz_server_partitions", 2)
        async with (
            asyncio.timeout(TEST_TIMEOUT_S),
            serve_pages(metrics, find, host="127.0.0.1", port=0) as port,
        ):
            return [await send_request(port, request) for request in requests]

    return net.run(main())


def page(path, health):
    (found,) = pages(get(path), health=health)
    return found


def test_metrics_are_served():
    status, body = page("/metrics?name=x", HEALTHY)
    assert status == OK
    assert b"waltz_server_partitions 2.0\n" in body


@pytest.mark.parametrize("health", [HEALTHY, UNHEALTHY, RuntimeError("broken")])
def test_livez_depends_only_on_the_event_loop(health):
    assert page("/livez", health) == (OK, b"ok\n")


def test_readyz_lists_each_reason_for_which_a_daemon_is_not_ready():
    status, body = page("/readyz", HEALTHY)
    assert (status, json.loads(body)) == (OK, {"is_ready": True, "reasons": []})
    status, body = page("/readyz", UNHEALTHY)
    assert status == UNAVAILABLE
    assert json.loads(body) == {"is_ready": False, "reasons": ["no quorum", "no disk"]}


def test_health_has_a_status_and_details():
    status, body = page("/health", HEALTHY)
    assert (status, json.loads(body)) == (OK, {"is_healthy": True, "partitions": [0, 1]})
    status, body = page("/health", UNHEALTHY)
    assert (status, json.loads(body)) == (UNAVAILABLE, {"is_healthy": False, "error": "x"})


def test_a_daemon_may_be_ready_and_not_healthy():
    health = UNHEALTHY._replace(unready_reasons=[])
    (readyz, _), (health_page, _) = pages(get("/readyz"), get("/health"), health=health)
    assert (readyz, health_page) == (OK, UNAVAILABLE)


def test_pages_accept_get_and_head_only():
    head, post, other = pages(
        b"HEAD /livez HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx",
        get("/ping"),
        health=HEALTHY,
    )
    assert head == (OK, b"")
    assert post[0] == "HTTP/1.1 405 Method Not Allowed"
    assert other[0] == "HTTP/1.1 404 Not Found"


def test_a_failing_page_affects_neither_the_daemon_nor_other_pages(caplog):
    failed, next_page = pages(get("/health"), get("/livez"), health=RuntimeError("broken"))
    assert failed[0] == "HTTP/1.1 500 Internal Server Error"
    assert b"broken" not in failed[1]
    assert next_page[0] == OK
    assert caplog.messages == ["http.page_failed page=/health"]
    assert "RuntimeError: broken" in caplog.text


def test_a_hanging_page_does_not_delay_other_pages():
    async def main():
        started = asyncio.Event()

        async def hang():
            started.set()
            await asyncio.Event().wait()

        async with (
            asyncio.timeout(TEST_TIMEOUT_S),
            serve_pages(Metrics("server"), hang, host="127.0.0.1", port=0) as port,
            asyncio.TaskGroup() as tasks,
        ):
            hanging = tasks.create_task(send_request(port, get("/readyz")))
            await started.wait()
            assert await send_request(port, get("/livez")) == (OK, b"ok\n")
            hanging.cancel()

    net.run(main())


def test_a_daemon_without_an_http_port_imports_no_http_library():
    code = (
        "import sys\n"
        "import waltz_core.server.process.server_daemon\n"
        "import waltz_core.storage.process.storage_daemon\n"
        "found = {'h11', 'starlette', 'uvicorn'} & sys.modules.keys()\n"
        "assert not found, found\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, timeout=TEST_TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
