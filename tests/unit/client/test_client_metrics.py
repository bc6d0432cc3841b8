"""The metrics of clients, and the page that `export_metrics` serves."""

import os
import threading
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import REGISTRY

from tests.fault.load import wait_until
from tests.ports import free_port
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core import errors
from waltz_core.client import (
    Callbacks,
    Transaction,
    TransactionBuilder,
    TransactionContext,
    export_metrics,
    lock,
)
from waltz_core.client.api import client_metrics
from waltz_core.client.stream.append_counts import LATENCY_BUCKETS_S, AppendCounts
from waltz_core.memory_waltz import MemoryWaltz
from waltz_core.metrics import SECONDS_BUCKETS

APPENDED, REJECTED, RETRIED, SECONDS, LAG = (
    f"waltz_client_{name}"
    for name in (
        "appended_transactions_total",
        "rejected_transactions_total",
        "retried_transactions_total",
        "append_seconds_count",
        "feed_lag_transactions",
    )
)


@pytest.fixture(autouse=True)
def export_client_metrics() -> Iterator[None]:
    """Export the metrics, without those of clients of other tests."""
    with client_metrics._lock:
        client_metrics._closed_counts.clear()
    export_metrics()
    yield
    with client_metrics._lock:
        client_metrics._closed_counts.clear()


def value(name: str, partition: int | None = 0, **labels: str) -> float | None:
    if partition is not None:
        labels["partition"] = str(partition)
    return REGISTRY.get_sample_value(name, {"cluster": "memory", **labels})


class Increment(TransactionContext):
    """Appends one transaction with a lock."""

    def partition_id(self, partition_count: int) -> int:
        return 0

    def execute(self, builder: TransactionBuilder) -> bool:
        builder.set_transaction_data(b"one more")
        builder.set_write_locks([lock("counter", 1)])
        return True


class SlowView(Callbacks):
    """Applies transactions when the test permits it."""

    def __init__(self) -> None:
        self.permits = threading.Semaphore(0)

    def client_high_water_mark(self, partition: int) -> int:
        return -1

    def apply_transaction(self, transaction: Transaction) -> None:
        assert self.permits.acquire(timeout=TEST_TIMEOUT_S)


def test_client_histograms_have_the_buckets_of_the_daemons() -> None:
    assert LATENCY_BUCKETS_S == SECONDS_BUCKETS


def test_outcomes_are_counted_by_reason() -> None:
    counts = AppendCounts()
    counts.count_outcomes(bytes([0, 1, 1, 8, 0]), 0.003)
    counts.count_outcomes(b"", 0.003)
    counts.count_error(errors.OutcomeUnknown("?"), 2)
    counts.count_error(errors.TooLarge("?"), 1)
    counts.count_error(errors.Unreachable("?"), 3)
    assert counts.committed == 2
    assert counts.bucket_counts[LATENCY_BUCKETS_S.index(0.005)] == sum(counts.bucket_counts) == 2
    assert counts.latency_s_sum == pytest.approx(0.006)
    assert counts.rejected == {
        "lock": 2, "overloaded": 1, "unknown": 2, "too_large": 1, "failed": 3
    }  # fmt: skip
    total = AppendCounts()
    total.add(counts)
    total.add(counts)
    assert total.committed == sum(total.bucket_counts) == 4
    assert total.rejected["failed"] == 6


def test_counters_of_appends_rejections_and_attempts_include_all_clients() -> None:
    with MemoryWaltz(partition_count=2) as waltz:
        with waltz.client() as first_client, waltz.client() as second_client:
            for client in (first_client, second_client):
                client.append(b"data", partition=0).result(TEST_TIMEOUT_S)
            stale = first_client.append(
                b"data", partition=0, write_locks=[lock("counter", 1)], client_high_water_mark=-1
            )
            stale.result(TEST_TIMEOUT_S)
            with pytest.raises(errors.LockFailed):
                second_client.append(
                    b"data", partition=0, write_locks=[lock("counter", 1)],
                    client_high_water_mark=-1,
                ).result(TEST_TIMEOUT_S)  # fmt: skip
            assert value(APPENDED) == 3
            assert value(REJECTED, reason="lock") == 1
            waltz.reject_next(2)
            assert first_client.submit(Increment()).result(TEST_TIMEOUT_S) == 3
            assert value(RETRIED) == 2
        assert value(APPENDED) == 4  # also of closed clients
        assert value(REJECTED, reason="lock") == 3
        assert value(SECONDS, None) == 4
        assert value(APPENDED, 1) is None


def test_the_lag_of_a_feed_counts_the_transactions_not_applied_by_its_callbacks() -> None:
    view = SlowView()
    with (
        MemoryWaltz(partition_count=1) as waltz,
        waltz.client() as writer,
        waltz.client() as reader,
    ):
        for _ in range(3):
            writer.append(b"data", partition=0).result(TEST_TIMEOUT_S)
        assert value(LAG) is None
        reader.subscribe(view)
        wait_until("the mark is requested", lambda: value(LAG) == 3)
        view.permits.release(3)
        wait_until("three are applied", lambda: value(LAG) == 0)
        for _ in range(2):
            writer.append(b"data", partition=0).result(TEST_TIMEOUT_S)
        wait_until("the next scrape shows the mark", lambda: value(LAG) == 2)
        view.permits.release(100)
        wait_until("all are applied", lambda: value(LAG) == 0)
        reader.set_partitions([])
        assert value(LAG) is None


def test_export_metrics_with_a_port_serves_the_registry() -> None:
    port = free_port()
    export_metrics(port)
    export_metrics()  # a second call has no effect
    with MemoryWaltz(partition_count=1) as waltz, waltz.client() as client:
        client.append(b"data").result(TEST_TIMEOUT_S)
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}/metrics", timeout=TEST_TIMEOUT_S
        ) as page:
            text = page.read().decode()
    line = f'{APPENDED}{{cluster="memory",partition="0"}} 1.0\n'
    assert text.count(line) == 1
    assert 'waltz_client_append_seconds_bucket{cluster="memory",le="+Inf"} 1.0\n' in text
    with pytest.raises(errors.BadConfig, match=f"cannot serve metrics at 127.0.0.1:{port}: "):
        export_metrics(port)


def test_the_metrics_of_a_forked_child_start_at_zero() -> None:
    with MemoryWaltz(partition_count=1) as waltz, waltz.client() as client:
        client.append(b"data").result(TEST_TIMEOUT_S)
        with client_metrics._lock:  # the child inherits the lock as held by another thread
            child = os.fork()
            if not child:
                is_empty = not client_metrics._open_clients and client_metrics._lock.acquire(
                    timeout=1
                )
                os._exit(0 if is_empty else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert value(APPENDED) == 1
