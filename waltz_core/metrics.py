"""The table of all metrics, and the metrics of a process in Prometheus's text format.

Dashboards and alerts depend on the names of metrics, so one table contains all names.

Rules:
    1. A name is `waltz_<area>_<what>_<unit>`; a counter ends with `_total`, times are in seconds.
    2. A name or label that is not in `METRIC_BY_NAME` is a bug, and raises an exception.
    3. The `Report`s of machines are counted in one metric, with the name of the report as the label
       `event`. The log line of a report has the same name.
    4. Each process, and in tests each daemon, has one object `Metrics`, which only one thread uses.
       Between two requests for the page, counters are plain sums. Reason: each append increases
       five counters, and for each increase, prometheus_client would lock a mutex.
    5. The values of labels come from limited sets (partitions, replicas, reasons, principals with a
       grant), never from the input of clients.
"""

import contextlib
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Final, NamedTuple, Protocol, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4  # the content type of `Metrics.page`
# The buckets, in seconds, range from a sync in the page cache to a stalling disk.
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
    """One row of the table; the unit is the end of the name, before `_total`."""

    name: str
    kind: MetricKind
    labels: tuple[str, ...]
    help: str


_COUNTER, _GAUGE, _HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM
_PARTITION_LABELS, _REPLICA_LABELS = ("partition",), ("partition", "replica")
_CLIENT_LABELS = ("cluster", "partition")
_SOURCE_LABELS = ("cluster", "query", "source", "partition")
_PRINCIPAL_LABELS = ("principal",)  # the first 100 principals with a grant, then "other"
# Name after `waltz_`, type, labels, help.
_ROWS: Final[tuple[tuple[str, MetricKind, tuple[str, ...], str], ...]] = (
    (
        "server_events_total",
        _COUNTER,
        ("event",),
        (
            "Events that state machines of the server reported. Label event: the name of the "
            "event, as in the log."
        ),
    ),
    (
        "server_appended_transactions_total",
        _COUNTER,
        _PARTITION_LABELS,
        "Transactions that this server has committed.",
    ),
    (
        "server_appended_bytes_total",
        _COUNTER,
        _PARTITION_LABELS,
        "Bytes of the records that this server has committed.",
    ),
    (
        "server_appended_batches_total",
        _COUNTER,
        _PARTITION_LABELS,
        "Batches of appends that this server has committed.",
    ),
    (
        "server_rejected_transactions_total",
        _COUNTER,
        ("partition", "reason"),
        (
            "Transactions that the server has not committed, by reason. Label reason: lock, lost "
            "(the store session ended before the commit), ahead (the client's high-water mark is "
            "above that of the log), not_mounted, generation (the append names another "
            "generation of the partition), no_space, too_large or overloaded."
        ),
    ),
    (
        "server_append_seconds",
        _HISTOGRAM,
        (),
        "Time from the arrival of an append batch at the server to its commit.",
    ),
    (
        "server_replica_append_seconds",
        _HISTOGRAM,
        ("replica",),
        "Time from an append request of the server to the acknowledgement of the replica.",
    ),
    (
        "server_high_water_mark",
        _GAUGE,
        _PARTITION_LABELS,
        "ID of the last committed transaction; -1 if the log is empty.",
    ),
    (
        "server_first_available_transaction",
        _GAUGE,
        _PARTITION_LABELS,
        "ID of the first available transaction; 0 if no transaction has expired.",
    ),
    (
        "server_archived_transaction",
        _GAUGE,
        _PARTITION_LABELS,
        "ID of the last archived transaction; -1 if there is none.",
    ),
    (
        "server_unarchived_transactions",
        _GAUGE,
        _PARTITION_LABELS,
        "Committed transactions that are not in the archive yet.",
    ),
    (
        "server_unarchived_bytes",
        _GAUGE,
        _PARTITION_LABELS,
        (
            "Approximate size of the committed transactions that are not in the archive yet; "
            "NaN until a storage has reported it."
        ),
    ),
    (
        "server_unarchived_seconds",
        _GAUGE,
        _PARTITION_LABELS,
        (
            "Age of the oldest committed transaction that is not in the archive yet; 0 if there "
            "is none."
        ),
    ),
    (
        "server_store_session",
        _GAUGE,
        _PARTITION_LABELS,
        "Number of the open store session; -1 if none is open.",
    ),
    (
        "server_feed_lag_transactions",
        _GAUGE,
        _PARTITION_LABELS,
        (
            "Committed transactions that the server has not sent to its slowest feed yet; 0 if "
            "there is no feed."
        ),
    ),
    (
        "server_engaged_replicas",
        _GAUGE,
        _PARTITION_LABELS,
        "Replicas that are in sync, so that their acknowledgements count for a commit.",
    ),
    (
        "server_replica_in_sync",
        _GAUGE,
        _REPLICA_LABELS,
        "1 if the assigned replica is in sync, otherwise 0. It is 0 without an open store session.",
    ),
    (
        "server_replica_wait_seconds",
        _GAUGE,
        _REPLICA_LABELS,
        "Age of the oldest unanswered request to a replica; 0 if the age is less than a second.",
    ),
    (
        "server_false_rejections_ratio",
        _GAUGE,
        _PARTITION_LABELS,
        (
            "Estimated probability that a lock causes a rejection without a real conflict, for a "
            "client that lags by 1,000 transactions. The cause is the fixed size of the lock "
            "table."
        ),
    ),
    ("server_lock_table_bytes", _GAUGE, (), "Memory of the lock tables of all partitions."),
    (
        "server_feed_cache_bytes",
        _GAUGE,
        (),
        "Memory of the feed caches of all partitions: headers of recent transactions.",
    ),
    (
        "server_transaction_cache_bytes",
        _GAUGE,
        (),
        "Memory of the transaction cache: recent transactions with their data.",
    ),
    (
        "server_cache_reads_total",
        _COUNTER,
        ("cache", "outcome"),
        "Reads from a cache. Label cache: feed or transaction. Label outcome: hit or miss.",
    ),
    (
        "server_fetched_bytes_total",
        _COUNTER,
        _PARTITION_LABELS,
        "Bytes of records that the server has read from storages for readers and feeds.",
    ),
    (
        "server_queued_bytes",
        _GAUGE,
        (),
        "Bytes of requests that the server has not answered yet.",
    ),
    ("server_connections", _GAUGE, (), "Open connections of clients."),
    ("server_legacy_client_connections", _GAUGE, (), "Open connections of Waltz 0.13 clients."),
    ("server_partitions", _GAUGE, (), "Partitions that this server owns."),
    (
        "server_zookeeper_connected",
        _GAUGE,
        (),
        "1 if ZooKeeper has answered within two session timeouts, otherwise 0.",
    ),
    (
        "server_principal_bytes_total",
        _COUNTER,
        _PRINCIPAL_LABELS,
        (
            "Bytes of requests from the principal, and of the ranges and feeds that the server "
            "has sent to it; only for principals with limits."
        ),
    ),
    (
        "server_principal_delayed_requests_total",
        _COUNTER,
        _PRINCIPAL_LABELS,
        "Requests that waited because their principal was over a limit.",
    ),
    (
        "server_principal_rejected_requests_total",
        _COUNTER,
        _PRINCIPAL_LABELS,
        "Requests and connections that were rejected because their principal was over a limit.",
    ),
    (
        "server_principal_connections",
        _GAUGE,
        _PRINCIPAL_LABELS,
        "Open connections of the principal; only for principals with limits.",
    ),
    (
        "server_principal_appends_total",
        _COUNTER,
        _PRINCIPAL_LABELS,
        "Append requests of the principal; only for principals with limits.",
    ),
    (
        "server_principal_feeds",
        _GAUGE,
        _PRINCIPAL_LABELS,
        "Open feeds of the principal; only for principals with limits.",
    ),
    (
        "server_denied_requests_total",
        _COUNTER,
        (),
        (
            'Requests that access control has denied. With access = "report", requests that '
            "it would deny."
        ),
    ),
    (
        "storage_info",
        _GAUGE,
        ("replica",),
        "Always 1. Label replica: the address of this storage, as in the metrics of servers.",
    ),
    (
        "storage_events_total",
        _COUNTER,
        ("event",),
        (
            "Events that the state machine of the storage reported. Label event: the name of "
            "the event, as in the log."
        ),
    ),
    (
        "storage_requests_total",
        _COUNTER,
        ("request",),
        (
            "Requests that the storage has received. Label request: the type of the message, "
            "such as AppendRaw."
        ),
    ),
    (
        "storage_appended_transactions_total",
        _COUNTER,
        _PARTITION_LABELS,
        "Transactions that this storage has appended and synced.",
    ),
    (
        "storage_appended_bytes_total",
        _COUNTER,
        _PARTITION_LABELS,
        "Bytes of the records that this storage has appended and synced.",
    ),
    ("storage_syncs_total", _COUNTER, (), "Calls of fdatasync on segment files."),
    (
        "storage_sync_seconds",
        _HISTOGRAM,
        (),
        "Duration of a call of fdatasync on a segment file.",
    ),
    (
        "storage_read_transactions_total",
        _COUNTER,
        _PARTITION_LABELS,
        "Transactions that this storage has sent to readers and servers.",
    ),
    (
        "storage_read_bytes_total",
        _COUNTER,
        _PARTITION_LABELS,
        "Bytes of the records that this storage has sent to readers and servers.",
    ),
    (
        "storage_last_transaction",
        _GAUGE,
        _PARTITION_LABELS,
        "ID of the last transaction that is synced on this storage; -1 if there is none.",
    ),
    (
        "storage_low_water_mark",
        _GAUGE,
        _PARTITION_LABELS,
        "Low-water mark of the replica: the replica never truncates transactions up to this ID.",
    ),
    (
        "storage_suspect_replicas",
        _GAUGE,
        (),
        "Replicas of this storage whose log is not trusted until it is repaired.",
    ),
    ("storage_failed_writes_total", _COUNTER, (), "Writes and syncs of files that failed."),
    ("storage_failed_reads_total", _COUNTER, _PARTITION_LABELS, "Reads of files that failed."),
    (
        "storage_damaged_transactions",
        _GAUGE,
        _PARTITION_LABELS,
        "Transactions that are damaged or unreadable on this storage and not repaired yet.",
    ),
    (
        "storage_damage_found_transactions_total",
        _COUNTER,
        _PARTITION_LABELS,
        "Transactions that this storage has found damaged.",
    ),
    (
        "storage_repaired_transactions_total",
        _COUNTER,
        _PARTITION_LABELS,
        "Damaged transactions that were repaired with copies from other replicas.",
    ),
    (
        "storage_scrubbed_bytes_total",
        _COUNTER,
        _PARTITION_LABELS,
        "Bytes of the records that scrubs have verified.",
    ),
    (
        "storage_archived_transactions_total",
        _COUNTER,
        _PARTITION_LABELS,
        "Transactions that this storage has written to the archive and verified.",
    ),
    (
        "storage_archived_bytes_total",
        _COUNTER,
        _PARTITION_LABELS,
        "Bytes of the records that this storage has written to the archive and verified.",
    ),
    (
        "storage_archived_objects_total",
        _COUNTER,
        _PARTITION_LABELS,
        "Objects that this storage has written to the archive and verified.",
    ),
    (
        "storage_failed_uploads_total",
        _COUNTER,
        _PARTITION_LABELS,
        "Uploads to the archive that failed.",
    ),
    (
        "storage_running_upload_seconds",
        _GAUGE,
        (),
        (
            "Age of the running upload to the archive, or of the running garbage collection; 0 "
            "if none runs."
        ),
    ),
    (
        "storage_garbage_collected_files_total",
        _COUNTER,
        _PARTITION_LABELS,
        "Files that this storage has deleted from the archive because no manifest lists them.",
    ),
    (
        "storage_garbage_collected_bytes_total",
        _COUNTER,
        _PARTITION_LABELS,
        "Bytes of the files that this storage has deleted from the archive.",
    ),
    (
        "storage_archive_read_bytes_total",
        _COUNTER,
        _PARTITION_LABELS,
        "Bytes of records and headers that this storage has returned from the archive.",
    ),
    (
        "storage_failed_archive_reads_total",
        _COUNTER,
        _PARTITION_LABELS,
        "Requests for archived records that this storage could not answer.",
    ),
    (
        "storage_scrub_passes_total",
        _COUNTER,
        _PARTITION_LABELS,
        ("Completed scrubs: each has verified the whole log of a partition."),
    ),
    (
        "storage_full_disks",
        _GAUGE,
        (),
        "1 while the storage rejects appends because its disk is full, otherwise 0.",
    ),
    (
        "storage_reserve_bytes",
        _GAUGE,
        (),
        "Disk space that the storage has allocated in advance for repairs on a full disk.",
    ),
    ("storage_queued_bytes", _GAUGE, (), "Bytes of appends that wait for a writer thread."),
    (
        "storage_free_bytes",
        _GAUGE,
        (),
        "Free space of the disk that has the storage's directory; NaN if it cannot be read.",
    ),
    (
        "storage_disk_bytes",
        _GAUGE,
        (),
        "Size of the disk that has the storage's directory; NaN if it cannot be read.",
    ),
    ("storage_connections", _GAUGE, (), "Open connections of servers and readers."),
    (
        "storage_principal_bytes_total",
        _COUNTER,
        _PRINCIPAL_LABELS,
        (
            "Bytes of requests from the principal, and of the ranges that the storage has sent "
            "to it; only for principals with limits."
        ),
    ),
    (
        "storage_principal_delayed_requests_total",
        _COUNTER,
        _PRINCIPAL_LABELS,
        "Requests that waited because their principal was over a limit.",
    ),
    (
        "storage_principal_rejected_requests_total",
        _COUNTER,
        _PRINCIPAL_LABELS,
        "Requests and connections that were rejected because their principal was over a limit.",
    ),
    (
        "storage_principal_connections",
        _GAUGE,
        _PRINCIPAL_LABELS,
        "Open connections of the principal; only for principals with limits.",
    ),
    (
        "storage_denied_requests_total",
        _COUNTER,
        (),
        (
            'Requests that access control has denied. With access = "report", requests that '
            "it would deny."
        ),
    ),
    (
        "gateway_requests_total",
        _COUNTER,
        ("operation", "status"),
        (
            "HTTP requests that the gateway has answered. Label operation: append, marks, range, "
            "feed, or an operation of the console, such as console_cluster."
        ),
    ),
    (
        "gateway_request_seconds",
        _HISTOGRAM,
        ("operation",),
        "Time from a request to its response; for a feed, to the beginning of the response.",
    ),
    (
        "gateway_appended_transactions_total",
        _COUNTER,
        (),
        "Transactions that the gateway has reported as committed.",
    ),
    (
        "gateway_callers",
        _GAUGE,
        (),
        "Callers (different tokens) for which the gateway has a client.",
    ),
    ("gateway_feeds", _GAUGE, (), "Feeds that are open."),
    (
        "client_appended_transactions_total",
        _COUNTER,
        _CLIENT_LABELS,
        "Transactions that the client has reported as committed.",
    ),
    (
        "client_rejected_transactions_total",
        _COUNTER,
        (*_CLIENT_LABELS, "reason"),
        (
            "Transactions that the client has reported as not committed, and rejected attempts of "
            "contexts. Label reason: as for waltz_server_rejected_transactions_total; unknown if "
            "the outcome is unknown; failed for other errors, such as a timeout."
        ),
    ),
    (
        "client_retried_transactions_total",
        _COUNTER,
        _CLIENT_LABELS,
        (
            "Repeated appends: the client has sent a transaction again after a temporary error, or "
            "a context has begun another attempt."
        ),
    ),
    (
        "client_append_seconds",
        _HISTOGRAM,
        ("cluster",),
        (
            "Time from an append to its commit, including repetitions by the client. For a "
            "context, the duration of its last attempt only."
        ),
    ),
    (
        "client_feed_lag_transactions",
        _GAUGE,
        _CLIENT_LABELS,
        (
            "Committed transactions that the callbacks have not applied yet, calculated with the "
            "high-water mark of the previous scrape."
        ),
    ),
    (
        "spark_lag_transactions",
        _GAUGE,
        _SOURCE_LABELS,
        (
            "Committed transactions that the query has not read yet. Label source: the position "
            "of the log among the logs that the query reads, from 0."
        ),
    ),
    (
        "spark_lag_seconds",
        _GAUGE,
        _SOURCE_LABELS,
        (
            "Age of the oldest transaction that the query has not read yet; 0 if it has read all "
            "of them, NaN if the age is unknown."
        ),
    ),
    (
        "spark_committed_rows_total",
        _COUNTER,
        ("query",),
        "Rows of the query that are committed to a log; 0 if the query writes to no log.",
    ),
    (
        "spark_rejected_rows_total",
        _COUNTER,
        ("query",),
        "Rows of the query that a lock has rejected.",
    ),
    (
        "spark_retried_rows_total",
        _COUNTER,
        ("query",),
        (
            "Repeated appends of rows: after a temporary error, or after a recomputation. A row "
            "counts once for each repetition."
        ),
    ),
)
METRIC_BY_NAME: Final = {f"waltz_{row[0]}": Metric(f"waltz_{row[0]}", *row[1:]) for row in _ROWS}
assert len(METRIC_BY_NAME) == len(_ROWS), "a duplicate name in the table"


class CountableReport(Protocol):
    """The part of a `machine.Report` that is counted."""

    @property
    def name(self) -> str:
        """The name of the event."""


class Metrics:
    """The metrics of one daemon; `area` is "server", "storage" or "gateway"."""

    def __init__(self, area: str, *, has_process_metrics: bool = False) -> None:
        self._area = area
        self._registry = CollectorRegistry(auto_describe=False)
        self._collectors: dict[str, Any] = {}
        # The growth of counters since the last page (rule 4).
        self._counter_growth: dict[tuple[object, ...], float] = {}
        # A cache of the metrics by name and labels. A lookup in prometheus_client would take longer
        # than the count itself.
        self._labeled_metrics: dict[tuple[object, ...], Any] = {}
        # The keys of `_labeled_metrics` by label and value, for example to find all metrics of a
        # partition.
        self._keys_by_label: dict[tuple[str, str], dict[tuple[object, ...], None]] = {}
        prefix = f"waltz_{area}_"
        for metric in METRIC_BY_NAME.values():
            if metric.name.startswith(prefix):
                self._collectors[metric.name] = _collector_of(metric, self._registry)
        assert self._collectors, f"no metric of the area {area!r}"
        if has_process_metrics:
            ProcessCollector(registry=self._registry)

    def add(self, name: str, amount: float = 1, **labels: str | int) -> None:
        """Add `amount` to a counter."""
        assert amount >= 0
        key = (name, *labels.items())
        try:
            self._counter_growth[key] += amount
        except KeyError:
            assert METRIC_BY_NAME[name].kind is MetricKind.COUNTER
            self._find_metric(
                name, labels
            )  # From now on, the page contains the counter, even with value 0.
            self._counter_growth[key] = amount

    def set(self, name: str, value: float, **labels: str | int) -> None:
        """Set a gauge."""
        assert METRIC_BY_NAME[name].kind is MetricKind.GAUGE
        self._find_metric(name, labels).set(value)

    def set_source(self, name: str, read: Callable[[], float], **labels: str | int) -> None:
        """Read a gauge by calling `read` for each page, on the thread that builds the page."""
        assert METRIC_BY_NAME[name].kind is MetricKind.GAUGE
        self._find_metric(name, labels).set_function(read)

    def observe(self, name: str, seconds: float, **labels: str | int) -> None:
        """Add a duration, in seconds, to a histogram."""
        assert METRIC_BY_NAME[name].kind is MetricKind.HISTOGRAM
        self._find_metric(name, labels).observe(seconds)

    def report(self, report: CountableReport) -> None:
        """Count a machine's report under its own name (rule 3)."""
        self.add(f"waltz_{self._area}_events_total", event=report.name)

    def forget(self, **labels: str | int) -> None:
        """Remove all metrics with these labels, for example those of a partition that has moved."""
        wanted_labels = {(label, str(value)) for label, value in labels.items()}
        assert wanted_labels, "expected at least one label"
        for key in list(self._keys_by_label.get(min(wanted_labels), ())):
            name, *label_values = key
            texts = {
                label: str(value) for label, value in cast("list[tuple[str, object]]", label_values)
            }
            if not wanted_labels <= texts.items():
                continue
            self._labeled_metrics.pop(key, None)
            self._counter_growth.pop(key, None)
            for pair in texts.items():
                self._keys_by_label[pair].pop(key)
            # Another key may have had the same labels in another order. Then the metric was removed
            # with that key.
            with contextlib.suppress(KeyError):
                self._collectors[str(name)].remove(
                    *(texts[label] for label in METRIC_BY_NAME[str(name)].labels)
                )

    def value(self, name: str, **labels: str | int) -> float:
        """Return the value of a counter or gauge; 0 if it was never set."""
        assert name in self._collectors
        self._add_counter_growth()
        texts = {key: str(value) for key, value in labels.items()}
        return self._registry.get_sample_value(name, texts) or 0.0

    def page(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        self._add_counter_growth()
        return generate_latest(self._registry)

    def _add_counter_growth(self) -> None:
        """Add the growth since the last page to the counters of prometheus_client."""
        for (name, *labels), amount in self._counter_growth.items():
            if amount:
                pairs = cast("list[tuple[str, str | int]]", labels)
                self._find_metric(cast("str", name), dict(pairs)).inc(amount)
        self._counter_growth = dict.fromkeys(self._counter_growth, 0.0)

    def _find_metric(self, name: str, labels: Mapping[str, str | int]) -> Any:  # noqa: ANN401 - three types
        if not labels and not METRIC_BY_NAME[name].labels:
            return self._collectors[name]
        key = (name, *labels.items())
        metric = self._labeled_metrics.get(key)
        if metric is None:
            metric = self._labeled_metrics[key] = self._collectors[name].labels(**labels)
            for label, value in labels.items():
                self._keys_by_label.setdefault((label, str(value)), {})[key] = None
        return metric


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
