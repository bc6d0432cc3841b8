"""The table of all metrics, and the three pages of a daemon: /metrics, /health, /ping.

Dashboards depend on the names, so they are in one table.

Rules:
    1. A name is `waltz_<area>_<what>_<unit>`; a counter ends with `_total`, times are in seconds.
    2. A name or label that is not in `TABLE` raises: it is a bug.
    3. A machine's `Report` is counted under its own name, as the label `event`; its log line has
       the same name.
    4. Each process, and in tests each daemon, has one `Metrics`, used on one thread. Counters are
       plain sums until a page is requested: prometheus_client takes a lock for each count, which is
       too slow for five counts in every append.
    5. Labels come from closed sets (partitions, replicas, reasons), never from clients' input.
    6. The pages accept GET only, within `HEAD_BYTES_MAX`, `HEAD_S_MAX` and `PAGES_MAX`: a client
       that is slower or sends more is disconnected.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from enum import Enum
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from waltz_core.errors import BadConfig

_log = logging.getLogger(__name__)

HEAD_BYTES_MAX: Final = 8 * 1024
HEAD_S_MAX: Final = 5.0
PAGES_MAX: Final = 32
CLOSE_S_MAX: Final = 1.0

# From a sync in the page cache to a stalling disk.
SECONDS_BUCKETS: Final = (
    *(0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)


class MetricKind(Enum):
    """The type of a metric in Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric(NamedTuple):
    """One line of the table; the unit is the end of the name, before `_total`."""

    name: str
    kind: MetricKind
    labels: tuple[str, ...]
    help: str


def _table() -> dict[str, Metric]:
    counter, gauge, histogram = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM
    one, replica = ("partition",), ("partition", "replica")
    rows = [
        ("server_events_total", counter, ("event",), "reports of machines and shells, by name"),
        ("server_appended_transactions_total", counter, one, "committed here"),
        ("server_appended_bytes_total", counter, one, "bytes of records committed here"),
        ("server_appended_batches_total", counter, one, "batches committed here"),
        ("server_rejected_transactions_total", counter, ("partition", "reason"), "not appended"),
        ("server_append_seconds", histogram, (), "from a batch's arrival to its answer"),
        ("server_replica_append_seconds", histogram, replica[1:], "until an append's answer"),
        ("server_high_water_mark", gauge, one, "id of the last committed transaction"),
        ("server_store_session", gauge, one, "number of the open store session, 0 when none"),
        ("server_feed_lag_transactions", gauge, one, "committed, not sent to the slowest feed"),
        ("server_engaged_replicas", gauge, one, "replicas whose acknowledgement counts"),
        ("server_replica_wait_ms", gauge, replica, "how long a replica has owed an answer"),
        ("server_false_rejections_ratio", gauge, one, "rejected only by a shared slot, estimated"),
        ("server_lock_table_bytes", gauge, (), "all lock tables"),
        ("server_feed_cache_bytes", gauge, (), "the feed cache of all partitions"),
        ("server_transaction_cache_bytes", gauge, (), "the transaction cache of all partitions"),
        ("server_cache_reads_total", counter, ("cache", "outcome"), "outcome: hit or miss"),
        ("server_fetched_bytes_total", counter, one, "read from storages for readers and feeds"),
        ("server_queued_bytes", gauge, (), "requests that are not answered yet"),
        ("server_connections", gauge, (), "clients connected now"),
        ("server_old_client_connections", gauge, (), "clients of Waltz 0.13 connected now"),
        ("server_partitions", gauge, (), "partitions owned now"),
        ("storage_events_total", counter, ("event",), "reports of the service and its shell"),
        ("storage_requests_total", counter, ("request",), "requests taken, by message"),
        ("storage_appended_transactions_total", counter, one, "synced here"),
        ("storage_appended_bytes_total", counter, one, "bytes of records synced here"),
        ("storage_syncs_total", counter, (), "calls of fdatasync on a segment"),
        ("storage_sync_seconds", histogram, (), "one call of fdatasync on a segment"),
        ("storage_read_transactions_total", counter, one, "given to readers and servers"),
        ("storage_read_bytes_total", counter, one, "bytes of records given to readers and servers"),
        ("storage_last_transaction", gauge, one, "id of the last transaction synced here"),
        ("storage_low_water_mark", gauge, one, "nothing below it is ever truncated"),
        ("storage_suspect_replicas", gauge, (), "replicas whose log is not trusted"),
        ("storage_failed_writes_total", counter, (), "writes and syncs that failed"),
        ("storage_failed_reads_total", counter, one, "reads that failed"),
        ("storage_damaged_transactions", gauge, one, "known and unreadable here"),
        ("storage_damage_found_transactions_total", counter, one, "found damaged here"),
        ("storage_damage_repaired_transactions_total", counter, one, "repaired from replicas"),
        ("storage_scrubbed_bytes_total", counter, one, "bytes of records verified by scrubs"),
        ("storage_scrub_passes_total", counter, one, "completely scrubbed logs"),
        ("storage_full_disks", gauge, (), "1 while appends are rejected: no space, else 0"),
        ("storage_reserve_bytes", gauge, (), "reserved for repairs on a full disk"),
        ("storage_queued_bytes", gauge, (), "appends that wait for a writer thread"),
        ("storage_free_bytes", gauge, (), "free on the disk of the directory"),
        ("storage_connections", gauge, (), "servers and readers connected now"),
        ("client_events_total", counter, ("event",), "reports of streams"),
        ("client_appended_transactions_total", counter, (), "reported as committed"),
        ("client_rejected_transactions_total", counter, ("reason",), "reported as failed"),
    ]
    table = {f"waltz_{row[0]}": Metric(f"waltz_{row[0]}", *row[1:]) for row in rows}
    assert len(table) == len(rows), "a duplicate name in the table"
    return table


TABLE: Final = _table()


class Reported(Protocol):
    """The part of a `machine.Report` that is counted."""

    @property
    def name(self) -> str:
        """The name of the event."""


class Metrics:
    """The metrics of one daemon; `area` is "server", "storage" or "client"."""

    def __init__(self, area: str, *, with_process: bool = False) -> None:
        self._area = area
        self._registry = CollectorRegistry(auto_describe=False)
        self._live: dict[str, Any] = {}
        # The growth of counters since the last page (rule 4).
        self._counted: dict[tuple[object, ...], float] = {}
        # By name and labels as they were passed: looking them up costs more than counting.
        self._labeled: dict[tuple[object, ...], Any] = {}
        # The same, by one label and its text, to find the metrics of one partition.
        self._of_label: dict[tuple[str, str], dict[tuple[object, ...], None]] = {}
        prefix = f"waltz_{area}_"
        for metric in TABLE.values():
            if metric.name.startswith(prefix):
                self._live[metric.name] = _collector_of(metric, self._registry)
        assert self._live, f"no metric of the area {area!r}"
        if with_process:
            ProcessCollector(registry=self._registry)

    def add(self, name: str, amount: float = 1, **labels: str | int) -> None:
        """Increment a counter."""
        assert amount >= 0
        key = (name, *labels.items())
        try:
            self._counted[key] += amount
        except KeyError:
            assert TABLE[name].kind is MetricKind.COUNTER
            self._at(name, labels)  # Shown from now on, also as 0.
            self._counted[key] = amount

    def set(self, name: str, value: float, **labels: str | int) -> None:
        """Set a gauge."""
        assert TABLE[name].kind is MetricKind.GAUGE
        self._at(name, labels).set(value)

    def set_source(self, name: str, read: Callable[[], float], **labels: str | int) -> None:
        """Read a gauge at each page; `read` runs on the thread that builds the page."""
        assert TABLE[name].kind is MetricKind.GAUGE
        self._at(name, labels).set_function(read)

    def observe(self, name: str, seconds: float, **labels: str | int) -> None:
        """Add a duration to a histogram."""
        assert TABLE[name].kind is MetricKind.HISTOGRAM
        self._at(name, labels).observe(seconds)

    def report(self, report: Reported) -> None:
        """Count a machine's report under its own name (rule 3)."""
        self.add(f"waltz_{self._area}_events_total", event=report.name)

    def forget(self, **labels: str | int) -> None:
        """Drop everything with these labels, for a partition that has moved away, for example."""
        wanted = {(label, str(value)) for label, value in labels.items()}
        assert wanted, "expected at least one label"
        for key in list(self._of_label.get(min(wanted), ())):
            name, *given = key
            texts = {label: str(value) for label, value in cast("list[tuple[str, object]]", given)}
            if not wanted <= texts.items():
                continue
            self._labeled.pop(key, None)
            self._counted.pop(key, None)
            for pair in texts.items():
                self._of_label[pair].pop(key)
            # Absent if the same labels were passed in another order, and dropped with that.
            with contextlib.suppress(KeyError):
                self._live[str(name)].remove(*(texts[label] for label in TABLE[str(name)].labels))

    def value(self, name: str, **labels: str | int) -> float:
        """Return the value of a counter or gauge; 0 if it was never set."""
        assert name in self._live
        self._settle()
        texts = {key: str(value) for key, value in labels.items()}
        return self._registry.get_sample_value(name, texts) or 0.0

    def page(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        self._settle()
        return generate_latest(self._registry)

    def _settle(self) -> None:
        """Add the growth to the counters."""
        for (name, *labels), amount in self._counted.items():
            if amount:
                pairs = cast("list[tuple[str, str | int]]", labels)
                self._at(cast("str", name), dict(pairs)).inc(amount)
        self._counted = dict.fromkeys(self._counted, 0.0)

    def _at(self, name: str, labels: Mapping[str, str | int]) -> Any:  # noqa: ANN401 - three types
        if not labels and not TABLE[name].labels:
            return self._live[name]
        key = (name, *labels.items())
        found = self._labeled.get(key)
        if found is None:
            found = self._labeled[key] = self._live[name].labels(**labels)
            for label, value in labels.items():
                self._of_label.setdefault((label, str(value)), {})[key] = None
        return found


def _collector_of(metric: Metric, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    match metric.kind:
        case MetricKind.COUNTER:
            return Counter(metric.name, metric.help, metric.labels, registry=registry)
        case MetricKind.GAUGE:
            return Gauge(metric.name, metric.help, metric.labels, registry=registry)
        case MetricKind.HISTOGRAM:
            return Histogram(
                metric.name,
                metric.help,
                metric.labels,
                registry=registry,
                buckets=SECONDS_BUCKETS,
            )


# --- The pages


class Health(NamedTuple):
    """Whether a daemon works, and details for people."""

    is_healthy: bool
    details: Mapping[str, object]


class Page(NamedTuple):
    """An answer."""

    status: str
    content_type: str
    body: bytes


HealthCallback: TypeAlias = Callable[[], Awaitable[Health]]


@contextlib.asynccontextmanager
async def serve_pages(
    metrics: Metrics, health: HealthCallback, *, host: str, port: int
) -> AsyncIterator[int]:
    """Serve /metrics, /health and /ping while the block runs; yields the port (0: any free one).

    Raises:
        BadConfig: it is not possible to listen at the address.
    """
    open_count = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_count
        open_count += 1
        try:
            if open_count <= PAGES_MAX:
                await _serve_one(reader, writer, metrics, health)
        finally:
            open_count -= 1
            writer.close()

    try:
        server = await asyncio.start_server(serve, host, port, limit=HEAD_BYTES_MAX)
    except OSError as error:
        raise BadConfig(f"http_port: cannot listen at {host}:{port}: {error.strerror}") from None
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S_MAX):
                await server.wait_closed()


async def _serve_one(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    metrics: Metrics,
    health: HealthCallback,
) -> None:
    try:
        async with asyncio.timeout(HEAD_S_MAX):
            head = await reader.readuntil(b"\r\n\r\n")
            writer.write(_answer(await _page(head, metrics, health)))
            await writer.drain()
    except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
        writer.transport.abort()  # rule 6; unsent bytes must not stay in memory
    except Exception:  # noqa: BLE001 - the top of a task; a page must not end a daemon
        _log.exception("metrics.page_failed")


async def _page(head: bytes, metrics: Metrics, health: HealthCallback) -> Page:
    """Return the page for a request's head."""
    method, _, rest = head.partition(b"\r\n")[0].partition(b" ")
    path = rest.partition(b" ")[0].partition(b"?")[0]
    if method != b"GET":
        return Page("405 Method Not Allowed", "text/plain", b"expected GET\n")
    match path:
        case b"/ping":
            return Page("200 OK", "text/plain", b"pong\n")
        case b"/metrics":
            return Page("200 OK", CONTENT_TYPE_PLAIN_0_0_4, metrics.page())
        case b"/health":
            found = await health()
            status = "200 OK" if found.is_healthy else "503 Service Unavailable"
            body = json.dumps({"is_healthy": found.is_healthy, **found.details}, default=str)
            return Page(status, "application/json", body.encode() + b"\n")
        case _:
            return Page("404 Not Found", "text/plain", b"expected /metrics, /health or /ping\n")


def _answer(page: Page) -> bytes:
    head = (
        f"HTTP/1.1 {page.status}\r\nContent-Type: {page.content_type}\r\n"
        f"Content-Length: {len(page.body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode("ascii") + page.body
