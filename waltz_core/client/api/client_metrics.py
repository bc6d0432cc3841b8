"""The metrics of the clients of this process: `export_metrics` (docs/decisions/067).

Rules:
    1. A counter never decreases, so the counts of a closed client remain.
    2. A scrape may run on any thread, even on the loop of a client, so a scrape must not wait. It
       starts requests for marks; the next scrape shows the answers.
    3. A forked child cannot use the clients of its parent, so it counts from 0.
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from waltz_core import errors
from waltz_core.client.stream.append_counts import AppendCounts

if TYPE_CHECKING:
    from waltz_core.client.api.async_client import AsyncWaltzClient
    from waltz_core.client.stream.client_partition import ClientPartition
    from waltz_core.exported_metrics import MetricValues

_lock = threading.Lock()
_open_clients: Final[dict["ClientMetrics", None]] = {}
_closed_counts: Final[dict[tuple[str, int], AppendCounts]] = {}


def _forget_clients() -> None:
    """Forget the parent's clients (rule 3) and the parent's lock: a thread may have held it."""
    global _lock  # noqa: PLW0603 - a lock cannot be reset
    _lock = threading.Lock()
    _open_clients.clear()
    _closed_counts.clear()


os.register_at_fork(after_in_child=_forget_clients)


def export_metrics(port: int | None = None, host: str = "127.0.0.1") -> None:
    """Export the metrics of all clients of this process to `prometheus_client.REGISTRY`.

    Call this function before or after clients are opened. Omit `port` if the application already
    serves this registry.

    Args:
        port: serve the registry at this HTTP port.
        host: the address to listen at; Prometheus on another machine must reach it.

    Raises:
        BadConfig: it is not possible to listen at the address.
    """
    from waltz_core.exported_metrics import export  # noqa: PLC0415 - costs an import

    export(_add_values, port, host)


class ClientMetrics:
    """An open client, as its metrics see it."""

    def __init__(
        self, client: "AsyncWaltzClient", partitions: Mapping[int, "ClientPartition"]
    ) -> None:
        self._client = client
        self._partitions = partitions
        self._cluster = client.cluster().name
        self._loop = asyncio.get_running_loop()
        self._marks: dict[int, int] = {}
        self._requested_partitions: set[int] = set()  # partitions whose mark is being requested
        with _lock:
            _open_clients[self] = None

    def close(self) -> None:
        """Keep the counts, without the client (rule 1)."""
        with _lock:
            if self in _open_clients:
                del _open_clients[self]
                self.add_counts(_closed_counts)

    def add_counts(self, totals: dict[tuple[str, int], AppendCounts]) -> None:
        """Add the counts of this client to `totals`."""
        for partition_id, partition in list(self._partitions.items()):
            total = totals.setdefault((self._cluster, int(partition_id)), AppendCounts())
            total.add(partition.appends.counts)

    def add_feed_lags(self, lags: dict[tuple[str, int], int]) -> None:
        """Add the lags of this client's feeds to `lags`, and request the current marks (rule 2)."""
        for partition_id, partition in list(self._partitions.items()):
            applier = partition.applier
            if applier is None or applier.mark is None or not partition.has_feed:
                continue
            mark = max(partition.stream.high_water_mark, self._marks.get(partition_id, -1))
            key = self._cluster, int(partition_id)
            lags[key] = max(lags.get(key, 0), mark - applier.mark)
        with contextlib.suppress(RuntimeError):  # the loop has ended without closing the client
            self._loop.call_soon_threadsafe(self._request_marks)

    def _request_marks(self) -> None:
        for partition_id, partition in self._partitions.items():
            if partition.has_feed and partition_id not in self._requested_partitions:
                self._requested_partitions.add(partition_id)
                self._client.spawn(self._request_mark(partition_id), "metrics")

    async def _request_mark(self, partition: int) -> None:
        try:
            self._marks[partition] = await self._client.high_water_mark(partition)
        except errors.WaltzError:
            pass  # the known mark remains; the feed reports the outage
        finally:
            self._requested_partitions.discard(partition)


def _add_values(values: "MetricValues") -> None:
    totals: dict[tuple[str, int], AppendCounts] = {}
    lags: dict[tuple[str, int], int] = {}
    with _lock:
        for key, counts in _closed_counts.items():
            totals.setdefault(key, AppendCounts()).add(counts)
        for client in _open_clients:
            client.add_counts(totals)
            client.add_feed_lags(lags)
    counts_by_cluster: dict[str, AppendCounts] = {}
    for (cluster, partition), counts in sorted(totals.items()):
        counts_by_cluster.setdefault(cluster, AppendCounts()).add(counts)
        labels: dict[str, str | int] = {"cluster": cluster, "partition": partition}
        values.add("waltz_client_appended_transactions_total", counts.committed, **labels)
        values.add("waltz_client_retried_transactions_total", counts.retried, **labels)
        for reason, count in sorted(counts.rejected.items()):
            name = "waltz_client_rejected_transactions_total"
            values.add(name, count, reason=reason, **labels)
    for cluster, counts in counts_by_cluster.items():
        values.add_histogram(
            "waltz_client_append_seconds",
            counts.bucket_counts,
            counts.latency_s_sum,
            cluster=cluster,
        )
    for (cluster, partition), lag in sorted(lags.items()):
        values.add("waltz_client_feed_lag_transactions", lag, cluster=cluster, partition=partition)
