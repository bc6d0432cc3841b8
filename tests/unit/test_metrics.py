"""The table of metrics, and the three pages over real sockets."""

import asyncio
import json
import re

import pytest

from tests.patience import HANG_S
from waltz_core.errors import BadConfig
from waltz_core.machine import Report
from waltz_core.metrics import (
    HEAD_BYTES_MAX,
    PAGES_MAX,
    TABLE,
    Health,
    MetricKind,
    Metrics,
    serve_pages,
)

HEALTHY = Health(is_healthy=True, details={"partitions": [0, 1]})
UNHEALTHY = Health(is_healthy=False, details={"reason": "no quorum"})


def test_metric_names_have_their_prefix_and_unit():
    for metric in TABLE.values():
        assert re.fullmatch(r"waltz_(server|storage|client)(_[a-z]+)+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER), metric.name
        assert metric.kind is not MetricKind.HISTOGRAM or metric.name.endswith("_seconds")
        assert metric.help


def test_counters_and_gauges_show_their_values():
    metrics = Metrics("server")
    metrics.add("waltz_server_appended_transactions_total", 10, partition=0)
    metrics.add("waltz_server_appended_transactions_total", 5, partition=0)
    metrics.add("waltz_server_appended_transactions_total", 1, partition=1)
    metrics.set("waltz_server_connections", 3)
    assert metrics.value("waltz_server_appended_transactions_total", partition=0) == 15
    assert metrics.value("waltz_server_appended_transactions_total", partition=1) == 1
    assert metrics.value("waltz_server_appended_transactions_total", partition=2) == 0
    assert metrics.value("waltz_server_connections") == 3


def test_a_counter_appears_on_the_page_with_its_first_count_and_grows():
    metrics, name = Metrics("server"), "waltz_server_appended_batches_total"
    metrics.add(name, 0, partition=4)
    assert b'waltz_server_appended_batches_total{partition="4"} 0.0\n' in metrics.page()
    for look in (1, 2):
        metrics.add(name, partition=4)
        metrics.add(name, partition="4")
        assert metrics.value(name, partition=4) == 2 * look
        assert f'{name}{{partition="4"}} {2.0 * look}\n'.encode() in metrics.page()


def test_a_gauge_with_a_callback_is_read_when_shown():
    metrics, held = Metrics("server"), [7.0]
    metrics.set_source("waltz_server_queued_bytes", lambda: held[0])
    assert metrics.value("waltz_server_queued_bytes") == 7
    held[0] = 9
    assert b"waltz_server_queued_bytes 9.0\n" in metrics.page()


def test_a_report_is_counted_under_its_name():
    metrics = Metrics("storage")
    metrics.report(Report("segment_rolled", (("partition", 3),)))
    metrics.report(Report("segment_rolled"))
    assert metrics.value("waltz_storage_events_total", event="segment_rolled") == 2


def test_moved_partitions_are_forgotten():
    metrics = Metrics("server")
    for partition in (1, 2):
        metrics.set("waltz_server_high_water_mark", 5, partition=partition)
        metrics.set("waltz_server_replica_wait_seconds", 1, partition=partition, replica="a:1")
    metrics.forget(partition=1)
    page = metrics.page()
    assert b'partition="1"' not in page
    assert page.count(b'partition="2"') == 2


def test_a_returning_partition_counts_from_zero():
    metrics, name = Metrics("server"), "waltz_server_appended_transactions_total"
    for partition in (1, 2):
        metrics.add(name, 5, partition=partition)
    metrics.forget(partition=1)
    metrics.add(name, 2, partition=1)
    metrics.add(name, 2, partition=2)
    assert metrics.value(name, partition=1) == 2
    assert metrics.value(name, partition=2) == 7


def test_counting_down_or_under_a_wrong_name_raises_an_assertion_error():
    metrics = Metrics("server")
    with pytest.raises(KeyError):
        metrics.add("waltz_server_apended_transactions_total", partition=0)
    with pytest.raises(ValueError, match="label"):
        metrics.add("waltz_server_appended_transactions_total", shard=0)
    with pytest.raises(AssertionError):
        metrics.set("waltz_server_appended_transactions_total", 1, partition=0)
    with pytest.raises(AssertionError):
        metrics.add("waltz_server_appended_transactions_total", -1, partition=0)
    with pytest.raises(AssertionError):
        metrics.add("waltz_server_connections")
    with pytest.raises(AssertionError, match="no metric of the area"):
        Metrics("sever")


def test_durations_fall_into_buckets():
    metrics = Metrics("storage")
    for seconds in (0.003, 0.005, 30):
        metrics.observe("waltz_storage_sync_seconds", seconds)
    page = metrics.page().decode()
    assert 'waltz_storage_sync_seconds_bucket{le="0.0025"} 0.0' in page
    assert 'waltz_storage_sync_seconds_bucket{le="0.005"} 2.0' in page
    assert 'waltz_storage_sync_seconds_bucket{le="10.0"} 2.0' in page
    assert 'waltz_storage_sync_seconds_bucket{le="+Inf"} 3.0' in page
    assert "waltz_storage_sync_seconds_count 3.0" in page
    assert "waltz_storage_sync_seconds_sum 30.008" in page


def test_two_daemons_in_one_process_do_not_mix():
    first, second = Metrics("server"), Metrics("server")
    first.set("waltz_server_partitions", 4)
    assert second.value("waltz_server_partitions") == 0


def test_the_metrics_of_the_process_are_optional():
    assert b"process_cpu_seconds_total" in Metrics("server", with_process=True).page()
    assert b"process_cpu_seconds_total" not in Metrics("server").page()


# --- The pages


async def well():
    return HEALTHY


async def ill():
    return UNHEALTHY


def served(scenario, health=well):
    """Run a scenario against the pages of a fresh server."""

    async def main():
        metrics = Metrics("server")
        metrics.set("waltz_server_partitions", 2)
        async with (
            asyncio.timeout(HANG_S),
            serve_pages(metrics, health, host="127.0.0.1", port=0) as port,
        ):
            return await scenario(port)

    return asyncio.run(main())


async def ask(port, request):
    """Send raw bytes; return (status line, body) of the answer, which ends with the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        answer = await reader.read()
    except ConnectionResetError:
        answer = b""
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.partition(b"\r\n")[0].decode(), body


def get(path, health=well):
    return served(
        lambda port: ask(port, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()), health
    )


def test_the_pages_ping_and_metrics_are_served():
    assert get("/ping") == ("HTTP/1.1 200 OK", b"pong\n")
    status, body = get("/metrics?name=x")
    assert status == "HTTP/1.1 200 OK"
    assert b"waltz_server_partitions 2.0\n" in body


def test_a_port_in_use_is_named():
    async def taken(port):
        with pytest.raises(
            BadConfig, match=f"http_port: the daemon cannot listen at 127.0.0.1:{port}:"
        ):
            async with serve_pages(Metrics("server"), well, host="127.0.0.1", port=port):
                pass
        return True

    assert served(taken)


def test_health_has_a_status_and_a_reason():
    status, body = get("/health")
    assert (status, json.loads(body)) == (
        "HTTP/1.1 200 OK",
        {"is_healthy": True, "partitions": [0, 1]},
    )
    status, body = get("/health", ill)
    assert status == "HTTP/1.1 503 Service Unavailable"
    assert json.loads(body) == {"is_healthy": False, "reason": "no quorum"}


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /secret HTTP/1.1\r\n\r\n", "HTTP/1.1 404 Not Found"),
        (b"POST /ping HTTP/1.1\r\n\r\n", "HTTP/1.1 405 Method Not Allowed"),
        (b"\r\n\r\n", "HTTP/1.1 405 Method Not Allowed"),
        (b"GET /ping HTTP/1.1\r\nX: " + b"x" * HEAD_BYTES_MAX + b"\r\n\r\n", ""),
    ],
)
def test_other_requests_are_rejected(request_bytes, status):
    assert served(lambda port: ask(port, request_bytes))[0] == status


def test_a_slow_connection_is_closed(monkeypatch):
    monkeypatch.setattr("waltz_core.metrics.HEAD_S_MAX", 0.05)
    assert served(lambda port: ask(port, b"GET /ping")) == ("", b"")


def test_many_connections_get_no_more_than_the_limit():
    async def scenario(port):
        crowd = [await asyncio.open_connection("127.0.0.1", port) for _ in range(PAGES_MAX)]
        refused = await ask(port, b"GET /ping HTTP/1.1\r\n\r\n")
        for _, writer in crowd:
            writer.close()
        while (served_again := await ask(port, b"GET /ping HTTP/1.1\r\n\r\n"))[1] != b"pong\n":
            pass
        return refused, served_again

    refused, served_again = served(scenario)
    assert refused == ("", b"")
    assert served_again[0] == "HTTP/1.1 200 OK"


def test_a_page_that_fails_ends_neither_the_server_nor_the_next_page(caplog):
    answers = iter([RuntimeError("broken"), HEALTHY])

    async def health():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def scenario(port):
        request = b"GET /health HTTP/1.1\r\n\r\n"
        return [await ask(port, request), await ask(port, request)]

    first, second = served(scenario, health)
    assert first == ("", b"")
    assert second[0] == "HTTP/1.1 200 OK"
    assert "metrics.page_failed" in caplog.text
