"""The metrics of Spark's streaming queries: `export_metrics` (docs/decisions/067).

Rules:
    1. Each scrape computes the lag from the last progress of a query and the current marks of its
       logs. So the lag also grows while a micro-batch hangs.
    2. The position of a failed query is kept, so that its lag grows. The position is also kept if
       the query starts again and fails in its first micro-batch. A stopped query is removed. Spark
       may report the end of a run only after the next run has begun.
    3. A scrape waits at most `REQUEST_S_MAX` for the marks of the logs; without an answer, it shows
       no lag.
    4. Each value is exported once, even after several calls for the same session or cluster.
"""

import contextlib
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import nan
from typing import Final, NamedTuple

from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from waltz_core.client import WaltzClient
from waltz_core.client.read.start_times import UNSTAMPED, stamp_ms_of
from waltz_core.errors import WaltzError
from waltz_core.exported_metrics import MetricValues, export
from waltz_spark.monitoring.lag import parse_progress_offset
from waltz_spark.offsets import StreamOffset
from waltz_spark.shared_clients import with_client
from waltz_spark.writer.write_counts import (
    NO_ROWS,
    WriteCounts,
    make_directory,
    open_counts,
    read_counts,
    remove_counts,
)

REQUEST_S_MAX: Final = 2.0


class _LagKey(NamedTuple):
    """The labels of a lag."""

    cluster: str
    query: str
    source: int
    partition: int


class _Lag(NamedTuple):
    transactions: int
    seconds: float


@dataclass
class _Progress:
    """The state of a query as of its last event."""

    name: str
    run: str
    end_offsets: list[StreamOffset] = field(default_factory=list)  # of the sources that are logs
    counts: WriteCounts = NO_ROWS
    has_failed: bool = False


class _Queries:
    """The queries of all sessions, by ID; used by listeners and scrapes, on their threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queries: dict[str, _Progress] = {}

    def begin(self, query: str, run: str, name: str) -> None:
        """Record the start of a run; it replaces a failed query with the same name."""
        with self._lock:
            progress = self._queries.setdefault(query, _Progress(name, run))
            progress.name, progress.run, progress.has_failed = name, run, False
            for other_query, each in list(self._queries.items()):
                if each.name == name and each.has_failed:
                    del self._queries[other_query]

    def record(self, query: str, progress: _Progress) -> None:
        """Record the position of a query, and the counts of its rows."""
        with self._lock:
            recorded = self._queries.setdefault(query, progress)
            recorded.end_offsets, recorded.counts = progress.end_offsets, progress.counts

    def end(self, query: str, run: str, *, has_failed: bool) -> bool:
        """Forget a query, unless it has failed (rule 2); return False if a later run has begun."""
        with self._lock:
            progress = self._queries.get(query)
            if progress is not None and progress.run != run:
                return False
            if not has_failed:
                self._queries.pop(query, None)
            elif progress is not None:
                progress.has_failed = True
            return True

    def counts(self) -> dict[str, WriteCounts]:
        """Return the counts of written rows, by the name of the query."""
        counts_by_name: dict[str, WriteCounts] = {}
        with self._lock:
            for query in self._queries.values():
                counts_by_name[query.name] = counts_by_name.get(query.name, NO_ROWS).plus(
                    query.counts
                )
        return counts_by_name

    def positions(self, cluster: str, key: bytes) -> dict[_LagKey, int]:
        """Return the last transactions that queries have read of a cluster."""
        marks_by_key: dict[_LagKey, int] = {}
        with self._lock:
            for query in self._queries.values():
                for source, end in enumerate(query.end_offsets):
                    if end.cluster_key != key.hex():
                        continue
                    for partition, mark in end.marks.items():
                        position = _LagKey(cluster, query.name, source, partition)
                        marks_by_key[position] = min(mark, marks_by_key.get(position, mark))
        return marks_by_key


_queries: Final = _Queries()


class _ProgressListener(StreamingQueryListener):
    """Passes the events of one session's queries on."""

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 - Spark's name
        """Record the start of a query."""
        open_counts(str(event.id))
        _queries.begin(str(event.id), str(event.runId), event.name or str(event.id))

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802 - Spark's name
        """Record the position of a query."""
        progress = event.progress
        query = str(progress.id)
        open_counts(query)  # it may have started before the export
        ends = [parse_progress_offset(source["endOffset"]) for source in progress["sources"]]
        log_ends = [end for end in ends if end is not None]
        now = _Progress(progress.name or query, str(progress.runId), log_ends, read_counts(query))
        _queries.record(query, now)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802 - Spark's name
        """Do nothing: the last position is still valid."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802 - Spark's name
        """Record the end of a query."""
        query, has_failed = str(event.id), event.exception is not None
        if _queries.end(query, str(event.runId), has_failed=has_failed):
            remove_counts(query)


_connect_strings: Final[dict[str, None]] = {}


class _LagRequest:
    """Requests the lags of all queries at a cluster, in a separate thread (rule 3)."""

    def __init__(self, connect: str) -> None:
        self._connect = connect
        self._lags: dict[_LagKey, _Lag] = {}
        self._thread = threading.Thread(target=self._run, name="waltz-lags", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether an answer is outstanding."""
        return self._thread.is_alive()

    def wait(self, timeout_s: float) -> Mapping[_LagKey, _Lag]:
        """Return the lags; none if they do not arrive in time."""
        self._thread.join(timeout_s)
        return {} if self.is_running else self._lags

    def _run(self) -> None:
        # An unavailable cluster has alerts of its own.
        with contextlib.suppress(WaltzError):
            with_client(self._connect, self._request)

    def _request(self, client: WaltzClient) -> None:
        cluster = client.cluster()
        positions = _queries.positions(cluster.name, cluster.key)
        if positions:
            partitions = sorted({key.partition for key in positions})
            marks = client.high_water_marks(partitions)
            for key, end in positions.items():
                lag = max(0, marks[key.partition] - end)
                seconds = _age_s(client, key.partition, end + 1) if lag else 0.0
                self._lags[key] = _Lag(lag, seconds)


def _age_s(client: WaltzClient, partition: int, transaction_id: int) -> float:
    """Return the age of a transaction; NaN if a 0.13 server wrote it, or if it has expired."""
    try:
        stamp_ms = stamp_ms_of(client, partition, transaction_id)
    except WaltzError:
        return nan
    now_s = time.time()  # noqa: TID251 - commit stamps are times
    return nan if stamp_ms == UNSTAMPED else max(0.0, now_s - stamp_ms / 1_000)


class _Scrape:
    """Reads the values of each scrape."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: dict[str, _LagRequest] = {}  # by connect string

    def add_values(self, values: MetricValues) -> None:
        """Add the metrics of all queries."""
        for query, counts in sorted(_queries.counts().items()):
            values.add("waltz_spark_committed_rows_total", counts.committed, query=query)
            values.add("waltz_spark_rejected_rows_total", counts.rejected, query=query)
            values.add("waltz_spark_retried_rows_total", counts.retried, query=query)
        with self._lock:
            for connect in list(_connect_strings):
                if connect not in self._requests or not self._requests[connect].is_running:
                    self._requests[connect] = _LagRequest(connect)
            requests = list(self._requests.values())
        until_s = time.monotonic() + REQUEST_S_MAX
        lags: dict[_LagKey, _Lag] = {}
        for request in requests:
            lags |= request.wait(max(0.0, until_s - time.monotonic()))
        for key, lag in sorted(lags.items()):
            labels = key._asdict()
            values.add("waltz_spark_lag_transactions", lag.transactions, **labels)
            values.add("waltz_spark_lag_seconds", lag.seconds, **labels)


_scrape: Final = _Scrape()


def export_metrics(
    spark: SparkSession, connect: str, port: int | None = None, host: str = "127.0.0.1"
) -> None:
    """Export the metrics of the session's streaming queries to `prometheus_client.REGISTRY`.

    Call the function before the queries start. Omit `port` if the driver serves this registry
    already. If queries read several clusters, call the function for each cluster.

    Args:
        spark: the session.
        connect: the cluster whose log the queries read; their lag is computed from its marks.
        port: serve the registry at this HTTP port of the driver.
        host: the address to listen at; Prometheus on another machine must reach it.

    Raises:
        BadConfig: the connect string is not valid, it is not possible to listen at the address, or
            the directory for counts of rows is not usable.
        CoordinatorUnavailable: ZooKeeper does not answer.
    """
    with_client(connect, lambda client: client.cluster())
    make_directory()
    export(_scrape.add_values, port, host)
    _connect_strings[connect] = None
    spark.streams.addListener(_ProgressListener())
