"""Every metric by name, and the three pages that a daemon shows: /metrics, /health, /ping.

Names are an interface to people's dashboards, so they stand in one table, and prometheus_client is
named nowhere else.

Rules:
    1. A name is `waltz_<area>_<what>_<unit>`; a counter ends with `_total`, times are in seconds.
    2. What is not in `TABLE` cannot be counted: a misspelt name or label is our bug.
    3. A machine's `Report` is counted under its own name, as the label `event`; its log line has
       the same name.
    4. Each process, and in tests each daemon, has a `Metrics` of its own, used on one thread.
       Counters are sums of our own until somebody looks: prometheus_client takes a lock for each
       count, which is felt where there are five for every append.
    5. Labels come from closed sets (partitions, replicas, reasons), never from what clients send.
    6. The pages take GET only, within `HEAD_BYTES_MAX`, `HEAD_S_MAX` and `PAGES_MAX`: whoever is
       slow or greedy loses the connection.
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

# From a sync in the page cache to a disk that stalls.
SECONDS_BUCKETS: Final = (
    *(0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)


class MetricKind(Enum):
    """What prometheus calls a type."""

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
        ("server_refused_transactions_total", counter, ("partition", "reason"), "not appended"),
        ("server_append_seconds", histogram, (), "from a batch's arrival to its answer"),
        ("server_replica_append_seconds", histogram, replica[1:], "until an append's answer"),
        ("server_high_water_mark", gauge, one, "id of the last committed transaction"),
        ("server_store_session", gauge, one, "number of the open store session, 0 when none"),
        ("server_feed_lag_transactions", gauge, one, "committed, and not sent to the slowest feed"),
        ("server_engaged_replicas", gauge, one, "replicas whose acknowledgement counts"),
        ("server_replica_wait_ms", gauge, replica, "for how long a replica has owed an answer"),
        ("server_false_refusals_ratio", gauge, one, "estimate: refused by a shared slot alone"),
        ("server_lock_table_bytes", gauge, (), "all lock tables"),
        ("server_feed_cache_bytes", gauge, (), "the feed cache of all partitions"),
        ("server_transaction_cache_bytes", gauge, (), "the transaction cache of all partitions"),
        ("server_cache_reads_total", counter, ("cache", "outcome"), "outcome: hit or miss"),
        ("server_fetched_bytes_total", counter, one, "read from storages for readers and feeds"),
        ("server_queued_bytes", gauge, (), "requests that are not answered yet"),
        ("server_connections", gauge, (), "clients connected now"),
        ("server_original_connections", gauge, (), "of them those of the original's versions"),
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
        ("storage_low_water_mark", gauge, one, "below it nothing is ever cut"),
        ("storage_suspect_replicas", gauge, (), "replicas whose log is not trusted"),
        ("storage_failed_writes_total", counter, (), "writes and syncs that failed"),
        ("storage_failed_reads_total", counter, one, "reads that the disk refused"),
        ("storage_damaged_transactions", gauge, one, "known here, and not to be read"),
        ("storage_damage_found_transactions_total", counter, one, "found damaged here"),
        ("storage_damage_mended_transactions_total", counter, one, "mended from other replicas"),
        ("storage_scrubbed_bytes_total", counter, one, "bytes of records read again and right"),
        ("storage_scrub_passes_total", counter, one, "logs read again from beginning to end"),
        ("storage_full_disks", gauge, (), "1 while appends are refused for want of room, else 0"),
        ("storage_reserve_bytes", gauge, (), "kept back for repair on a full disk"),
        ("storage_queued_bytes", gauge, (), "appends that wait for a writer"),
        ("storage_free_bytes", gauge, (), "free on the disk of the directory"),
        ("storage_connections", gauge, (), "servers and readers connected now"),
        ("client_events_total", counter, ("event",), "reports of streams"),
        ("client_appended_transactions_total", counter, (), "reported as committed"),
        ("client_refused_transactions_total", counter, ("reason",), "reported as failed"),
    ]
    table = {f"waltz_{row[0]}": Metric(f"waltz_{row[0]}", *row[1:]) for row in rows}
    assert len(table) == len(rows), "a name stands twice in the table"
    return table


TABLE: Final = _table()


class Reported(Protocol):
    """What is counted of a `machine.Report`."""

    @property
    def name(self) -> str:
        """The name of the event."""


class Metrics:
    """The metrics of one daemon; `area` is "server", "storage" or "client"."""

    def __init__(self, area: str, *, with_process: bool = False) -> None:
        self._area = area
        self._registry = CollectorRegistry(auto_describe=False)
        self._live: dict[str, Any] = {}
        # What counters have grown by since somebody looked (rule 4).
        self._grown: dict[tuple[object, ...], float] = {}
        # By name and labels, as they were given: finding them anew costs more than counting.
        self._labelled: dict[tuple[object, ...], Any] = {}
        # The same, by one label and its text: what one partition has is found without the others'.
        self._of_label: dict[tuple[str, str], dict[tuple[object, ...], None]] = {}
        prefix = f"waltz_{area}_"
        for metric in TABLE.values():
            if metric.name.startswith(prefix):
                self._live[metric.name] = _made(metric, self._registry)
        assert self._live, f"no metric of the area {area!r}"
        if with_process:
            ProcessCollector(registry=self._registry)

    def add(self, name: str, amount: float = 1, **labels: str | int) -> None:
        """Count something up."""
        assert amount >= 0
        key = (name, *labels.items())
        try:
            self._grown[key] += amount
        except KeyError:
            assert TABLE[name].kind is MetricKind.COUNTER
            self._at(name, labels)  # Shown from now on, if only as 0.
            self._grown[key] = amount

    def set(self, name: str, value: float, **labels: str | int) -> None:
        """Say how much of something there is now."""
        assert TABLE[name].kind is MetricKind.GAUGE
        self._at(name, labels).set(value)

    def ask(self, name: str, read: Callable[[], float], **labels: str | int) -> None:
        """Have a gauge read whenever the page is; `read` runs on the thread that shows the page."""
        assert TABLE[name].kind is MetricKind.GAUGE
        self._at(name, labels).set_function(read)

    def observe(self, name: str, seconds: float, **labels: str | int) -> None:
        """Put a duration into its histogram."""
        assert TABLE[name].kind is MetricKind.HISTOGRAM
        self._at(name, labels).observe(seconds)

    def report(self, report: Reported) -> None:
        """Count a machine's report under its own name (rule 3)."""
        self.add(f"waltz_{self._area}_events_total", event=report.name)

    def forget(self, **labels: str | int) -> None:
        """Drop everything with these labels, such as a partition that moved away."""
        wanted = {(label, str(value)) for label, value in labels.items()}
        assert wanted, "forgetting everything is never meant"
        for key in list(self._of_label.get(min(wanted), ())):
            name, *given = key
            texts = {label: str(value) for label, value in cast("list[tuple[str, object]]", given)}
            if not wanted <= texts.items():
                continue
            self._labelled.pop(key, None)
            self._grown.pop(key, None)
            for pair in texts.items():
                self._of_label[pair].pop(key)
            # Absent where the same labels were given in another order, and dropped with that.
            with contextlib.suppress(KeyError):
                self._live[str(name)].remove(*(texts[label] for label in TABLE[str(name)].labels))

    def value(self, name: str, **labels: str | int) -> float:
        """Return what a counter or gauge shows; 0 when it was never touched."""
        assert name in self._live
        self._settle()
        texts = {key: str(value) for key, value in labels.items()}
        return self._registry.get_sample_value(name, texts) or 0.0

    def page(self) -> bytes:
        """Return all metrics in prometheus' text format."""
        self._settle()
        return generate_latest(self._registry)

    def _settle(self) -> None:
        """Bring the counters up to date."""
        for (name, *labels), amount in self._grown.items():
            if amount:
                pairs = cast("list[tuple[str, str | int]]", labels)
                self._at(cast("str", name), dict(pairs)).inc(amount)
        self._grown = dict.fromkeys(self._grown, 0.0)

    def _at(self, name: str, labels: Mapping[str, str | int]) -> Any:  # noqa: ANN401 - three types
        if not labels and not TABLE[name].labels:
            return self._live[name]
        key = (name, *labels.items())
        found = self._labelled.get(key)
        if found is None:
            found = self._labelled[key] = self._live[name].labels(**labels)
            for label, value in labels.items():
                self._of_label.setdefault((label, str(value)), {})[key] = None
        return found


def _made(metric: Metric, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
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
    """Whether a daemon does its work, and what a person should know about it."""

    is_well: bool
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
    """Serve /metrics, /health and /ping while the block runs; gives the port (0 asks for any).

    Raises:
        BadConfig: the address cannot be listened at.
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
        writer.transport.abort()  # rule 6; what is not taken yet must not wait in memory
    except Exception:  # noqa: BLE001 - the top of a task; a page must not end a daemon
        _log.exception("page_failed")


async def _page(head: bytes, metrics: Metrics, health: HealthCallback) -> Page:
    """Return the page that a request's head asks for."""
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
            status = "200 OK" if found.is_well else "503 Service Unavailable"
            body = json.dumps({"is_well": found.is_well, **found.details}, default=str)
            return Page(status, "application/json", body.encode() + b"\n")
        case _:
            return Page("404 Not Found", "text/plain", b"expected /metrics, /health or /ping\n")


def _answer(page: Page) -> bytes:
    head = (
        f"HTTP/1.1 {page.status}\r\nContent-Type: {page.content_type}\r\n"
        f"Content-Length: {len(page.body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode("ascii") + page.body
