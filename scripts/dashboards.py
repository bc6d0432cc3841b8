"""The Grafana dashboards in `conf/grafana/`: `make docs` writes them from the declarations here.

Rules:
    1. A dashboard shows one view: cluster, partition, storage, client or Spark query. From top to
       bottom it shows problems, the amount of work, latencies, and resources that may run out.
    2. Each panel has a unit, legends, and a description with an action, or a place to look at next.
    3. In a query, `[[]]` is replaced by matchers for the dashboard's variables. If a variable has
       the value All, its matcher also accepts series without the label.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

SCHEMA_VERSION: Final = 39  # of Grafana 11.0; later versions migrate it
COLUMNS: Final = 24
SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}


class Panel(NamedTuple):
    """A panel. `queries`: legends and PromQL; `limits` of a stat: colors and lowest values."""

    title: str
    description: str
    unit: str
    queries: Sequence[tuple[str, str]]
    kind: str = "timeseries"
    width: int = 12
    limits: Sequence[tuple[str, float | None]] = ()
    no_value: str = ""


class Variable(NamedTuple):
    """A variable of a dashboard: the values of a label."""

    name: str
    query: str


class Dashboard(NamedTuple):
    """A dashboard; `name` is the name of its file."""

    name: str
    title: str
    variables: Sequence[Variable]
    panels: Sequence[Panel]


CLUSTER = Variable("cluster", 'label_values(up{job=~"waltz-(server|storage)"}, cluster)')
STORAGE = Variable("instance", 'label_values(waltz_storage_info{cluster=~"$cluster"}, instance)')
PARTITION = Variable(
    "partition", 'label_values(waltz_storage_last_transaction{cluster=~"$cluster"}, partition)'
)
CLIENT_CLUSTER = Variable(
    "cluster", "label_values(waltz_client_appended_transactions_total, cluster)"
)
CLIENT = Variable(
    "instance",
    'label_values(waltz_client_appended_transactions_total{cluster=~"$cluster"}, instance)',
)
QUERY = Variable("query", "label_values(waltz_spark_committed_rows_total, query)")
FREE_BYTES: Final = "waltz_storage_free_bytes{[[]]}"
USED_SHARE: Final = f"1 - {FREE_BYTES} / waltz_storage_disk_bytes{{[[]]}}"
DAYS_LEFT: Final = f"{FREE_BYTES} / (-86400 * deriv({FREE_BYTES}[1d]) > 0)"
REPLICA_LAG: Final = (
    "clamp_min(max by (cluster, partition) (waltz_server_high_water_mark{[[]]})"
    " - on (cluster, partition) group_right waltz_storage_last_transaction{[[]]}, 0)"
)
BAD_FROM_1: Final = (("green", None), ("red", 1))
DAYS_LEFT_LIMITS: Final = (("red", None), ("orange", 7), ("green", 30))


def stat(title: str, description: str, query: str, **overrides: Any) -> Panel:  # noqa: ANN401 - fields
    """Return a panel with one number; a value of 1 or more is shown as bad."""
    fields: dict[str, Any] = {"unit": "short", "limits": BAD_FROM_1, "width": 4} | overrides
    return Panel(title, description, queries=[("", query)], kind="stat", **fields)


def quantiles(histogram: str, by: str = "", legend: str = "") -> list[tuple[str, str]]:
    """Return the queries of the median and the 99th percentile of a histogram."""
    rates = f"sum by (le{by and ', ' + by}) (rate({histogram}_bucket{{[[]]}}[$__rate_interval]))"
    return [
        (f"{name} {legend}".strip(), f"histogram_quantile({quantile}, {rates})")
        for name, quantile in (("median", 0.5), ("99 %", 0.99))
    ]


def rate(metric: str, by: str) -> str:
    """Return a query of a rate, summed by labels."""
    return f"sum by ({by}) (rate({metric}{{[[]]}}[$__rate_interval]))"


DAYS_UNTIL_FULL = Panel(
    "Days until full",
    "Free space divided by the growth of the last day. The alert WaltzDiskFullSoon fires at 7 "
    "days; `waltz-core doctor` prints the command that moves replicas away.",
    "d",
    [("{{instance}}", DAYS_LEFT)],
    kind="stat",
    limits=DAYS_LEFT_LIMITS,
    no_value="not filling",
)

DASHBOARDS: Final = (
    Dashboard(
        "waltz-cluster",
        "Waltz: cluster",
        (CLUSTER,),
        (
            stat(
                "Alerts",
                "Alerts that fire. docs/alerts.md has a section for each of them.",
                'count(ALERTS{alertname=~"Waltz.+", alertstate="firing", cluster=~"$cluster"})'
                " or vector(0)",
            ),
            stat(
                "Servers down",
                "Servers whose page /metrics does not answer.",
                'count(up{job="waltz-server", [[]]} == 0) or vector(0)',
            ),
            stat(
                "Storages down",
                "Storages whose page /metrics does not answer.",
                'count(up{job="waltz-storage", [[]]} == 0) or vector(0)',
            ),
            stat(
                "Partitions unavailable",
                "Partitions without an open store session: they accept no appends.",
                "count(group by (cluster, partition) (waltz_storage_last_transaction{[[]]})"
                " unless on (cluster, partition) waltz_server_store_session >= 0) or vector(0)",
            ),
            stat(
                "Replicas not in sync",
                "Replicas that do not count for a quorum, including those of stopped storages.",
                "count(waltz_server_replica_in_sync{[[]]} == 0) or vector(0)",
            ),
            stat(
                "Servers without ZooKeeper",
                "Servers without a connection to ZooKeeper. Their appends continue.",
                "count(waltz_server_zookeeper_connected{[[]]} == 0) or vector(0)",
            ),
            Panel(
                "Appended transactions",
                "Transactions that each server has committed. The sum is the load of the cluster.",
                "cps",
                [("{{instance}}", rate("waltz_server_appended_transactions_total", "instance"))],
            ),
            Panel(
                "Appended bytes",
                "Bytes of the committed records; each storage writes those of its replicas.",
                "Bps",
                [("{{instance}}", rate("waltz_server_appended_bytes_total", "instance"))],
            ),
            Panel(
                "Time of an append",
                "From the arrival of an append batch at a server to its commit.",
                "s",
                quantiles("waltz_server_append_seconds"),
            ),
            Panel(
                "Append time of each storage",
                "Median time from an append request to the acknowledgement of each storage. "
                "Appends wait for a quorum only, so one slow storage is seen here first.",
                "s",
                quantiles("waltz_server_replica_append_seconds", "replica", "{{replica}}")[:1],
            ),
            Panel(
                "Rejected transactions",
                "By reason. lock: a lock conflict between transactions; no_space: full disks; "
                "overloaded: the server has too many requests.",
                "cps",
                [("{{reason}}", rate("waltz_server_rejected_transactions_total", "reason"))],
            ),
            Panel(
                "Waiting requests",
                "Bytes of requests that the server has not answered. If they approach "
                "memory_bytes_max, the server rejects appends.",
                "bytes",
                [("{{instance}}", "waltz_server_queued_bytes{[[]]}")],
            ),
            Panel(
                "Lag of the slowest feeds",
                "Committed transactions that were not sent to the slowest feed; the ten partitions "
                "with the largest lag.",
                "short",
                [("partition {{partition}}", "topk(10, waltz_server_feed_lag_transactions{[[]]})")],
            ),
            Panel(
                "Lag of the archive",
                "Age of the oldest transaction that is not archived; the ten partitions with the "
                "largest lag. No values without an archive.",
                "s",
                [("partition {{partition}}", "topk(10, waltz_server_unarchived_seconds{[[]]})")],
            ),
            DAYS_UNTIL_FULL,
            Panel(
                "Connections and partitions",
                "Of each server. Partitions move from a server that stops.",
                "short",
                [
                    ("connections {{instance}}", "waltz_server_connections{[[]]}"),
                    ("partitions {{instance}}", "waltz_server_partitions{[[]]}"),
                ],
            ),
        ),
    ),
    Dashboard(
        "waltz-partition",
        "Waltz: partition",
        (CLUSTER, PARTITION),
        (
            Panel(
                "Store session",
                "The number of the owner's open store session. -1: no session is open. The number "
                "only grows. At each new number, appends pause for a short time.",
                "none",
                [("{{partition}} at {{instance}}", "waltz_server_store_session{[[]]}")],
            ),
            Panel(
                "Replicas in sync",
                "1: the replica counts for a quorum. 0: it does not; `waltz-core doctor` has the "
                "reason.",
                "bool_on_off",
                [("{{partition}} at {{replica}}", "waltz_server_replica_in_sync{[[]]}")],
            ),
            Panel(
                "Appended transactions",
                "Transactions that were committed.",
                "cps",
                [
                    (
                        "{{partition}}",
                        rate("waltz_server_appended_transactions_total", "partition"),
                    )
                ],
            ),
            Panel(
                "Transactions per batch",
                "The server joins appends of clients. Few transactions per batch mean that clients "
                "wait for each answer.",
                "short",
                [
                    (
                        "{{partition}}",
                        rate("waltz_server_appended_transactions_total", "partition")
                        + " / "
                        + rate("waltz_server_appended_batches_total", "partition"),
                    )
                ],
            ),
            Panel(
                "Rejected transactions",
                "By reason; `lock` is a lock conflict between transactions.",
                "cps",
                [
                    (
                        "{{partition}} {{reason}}",
                        rate("waltz_server_rejected_transactions_total", "partition, reason"),
                    )
                ],
            ),
            Panel(
                "False rejections",
                "Probability that a lock is rejected without a conflict, for a client that lags by "
                "1,000 transactions. Raise lock_slot_count if it exceeds 1 %.",
                "percentunit",
                [("{{partition}}", "waltz_server_false_rejections_ratio{[[]]}")],
            ),
            Panel(
                "Lag of the replicas",
                "Committed transactions that a storage has not synced yet. The lag grows while "
                "a storage is slow, and shrinks while the storage catches up.",
                "short",
                [
                    (
                        "{{partition}} at {{instance}}",
                        REPLICA_LAG,
                    )
                ],
            ),
            Panel(
                "Unanswered requests",
                "Age of the oldest request that a replica has not answered. Above 10 s the disk of "
                "the storage may hang.",
                "s",
                [("{{partition}} at {{replica}}", "waltz_server_replica_wait_seconds{[[]]}")],
            ),
            Panel(
                "Lag of the slowest feed",
                "Committed transactions that were not sent to the slowest feed. If it only grows, "
                "its client processes too slowly.",
                "short",
                [("{{partition}}", "waltz_server_feed_lag_transactions{[[]]}")],
            ),
            Panel(
                "Reads from storages",
                "Bytes that the owner has read for feeds and readers, because its caches do not "
                "have them.",
                "Bps",
                [("{{partition}}", rate("waltz_server_fetched_bytes_total", "partition"))],
            ),
            Panel(
                "Lag of the archive",
                "Transactions that are committed and not archived. No values without an archive.",
                "short",
                [("{{partition}}", "waltz_server_unarchived_transactions{[[]]}")],
            ),
            Panel(
                "Damaged transactions",
                "Not repaired yet. They are served from other replicas meanwhile.",
                "short",
                [("{{partition}} at {{instance}}", "waltz_storage_damaged_transactions{[[]]}")],
            ),
        ),
    ),
    Dashboard(
        "waltz-storage",
        "Waltz: storage",
        (CLUSTER, STORAGE),
        (
            DAYS_UNTIL_FULL,
            stat(
                "Full disks",
                "Storages that reject appends, because their disk is full.",
                "sum(waltz_storage_full_disks{[[]]})",
            ),
            stat(
                "Suspect replicas",
                "Replicas whose log is not trusted until it is repaired.",
                "sum(waltz_storage_suspect_replicas{[[]]})",
            ),
            stat(
                "Damaged transactions",
                "Not repaired yet.",
                "sum(waltz_storage_damaged_transactions{[[]]})",
            ),
            Panel(
                "Free space",
                "Of the disk that has the storage's directory.",
                "bytes",
                [("{{instance}}", FREE_BYTES)],
            ),
            Panel(
                "Used space",
                "Used share of the disk that has the storage's directory, including the files of "
                "other programs and the space that is reserved for root.",
                "percentunit",
                [("{{instance}}", USED_SHARE)],
            ),
            Panel(
                "Appended and read bytes",
                "Bytes of records: appended and synced, or sent to readers and servers.",
                "Bps",
                [
                    (
                        "appended {{instance}}",
                        rate("waltz_storage_appended_bytes_total", "instance"),
                    ),
                    ("read {{instance}}", rate("waltz_storage_read_bytes_total", "instance")),
                ],
            ),
            Panel(
                "Time of a sync",
                "Duration of fdatasync. Compare the storages: a failing or busy disk is slower "
                "than the others.",
                "s",
                quantiles("waltz_storage_sync_seconds", "instance", "{{instance}}"),
            ),
            Panel(
                "Waiting appends",
                "Bytes of appends that wait for a writer thread. They stay near 0 unless the disk "
                "is too slow.",
                "bytes",
                [("{{instance}}", "waltz_storage_queued_bytes{[[]]}")],
            ),
            Panel(
                "Disk errors and damage",
                "Failed reads and writes, and transactions that were found damaged and repaired, "
                "within an hour. Replace a disk with repeated errors.",
                "short",
                [
                    (
                        f"{legend} {{{{instance}}}}",
                        f"sum by (instance) (increase(waltz_storage_{name}_total{{[[]]}}[1h]))",
                    )
                    for legend, name in (
                        ("failed writes", "failed_writes"),
                        ("failed reads", "failed_reads"),
                        ("damaged", "damage_found_transactions"),
                        ("repaired", "repaired_transactions"),
                    )
                ],
            ),
            Panel(
                "Archive",
                "Bytes that were archived, and bytes that were read from the archive. No values "
                "without an archive.",
                "Bps",
                [
                    (
                        "archived {{instance}}",
                        rate("waltz_storage_archived_bytes_total", "instance"),
                    ),
                    (
                        "read {{instance}}",
                        rate("waltz_storage_archive_read_bytes_total", "instance"),
                    ),
                ],
            ),
            Panel(
                "Running upload",
                "Age of the running upload or garbage collection. Above 10 minutes the object "
                "store does not answer.",
                "s",
                [("{{instance}}", "waltz_storage_running_upload_seconds{[[]]}")],
            ),
            Panel(
                "Requests",
                "By type of message.",
                "reqps",
                [("{{request}}", rate("waltz_storage_requests_total", "request"))],
            ),
        ),
    ),
    Dashboard(
        "waltz-client",
        "Waltz: client",
        (CLIENT_CLUSTER, CLIENT),
        (
            Panel(
                "Lag of the feeds",
                "Committed transactions that the callbacks have not applied; the ten partitions "
                "with the largest lag. If it only grows, the callbacks are too slow.",
                "short",
                [
                    (
                        "partition {{partition}} at {{instance}}",
                        "topk(10, waltz_client_feed_lag_transactions{[[]]})",
                    )
                ],
            ),
            Panel(
                "Rejected transactions",
                "By reason. lock: a conflict with another client; failed or unknown: the servers "
                "have not answered in time; see the dashboard of the cluster.",
                "cps",
                [("{{reason}}", rate("waltz_client_rejected_transactions_total", "reason"))],
            ),
            Panel(
                "Appended transactions",
                "Transactions that were reported to the application as committed.",
                "cps",
                [("{{instance}}", rate("waltz_client_appended_transactions_total", "instance"))],
            ),
            Panel(
                "Repeated appends",
                "Appends after a temporary error, and further attempts of contexts. Many of them, "
                "together with many lock conflicts, mean that clients contend for the same locks.",
                "cps",
                [("{{instance}}", rate("waltz_client_retried_transactions_total", "instance"))],
            ),
            Panel(
                "Time of an append",
                "From an append to its commit, as the application sees it. Compare it with the "
                "dashboard of the cluster: the difference is network and client.",
                "s",
                quantiles("waltz_client_append_seconds", "instance", "{{instance}}"),
            ),
        ),
    ),
    Dashboard(
        "waltz-spark",
        "Waltz: Spark query",
        (QUERY,),
        (
            Panel(
                "Lag in transactions",
                "Committed transactions that the query has not read; the ten partitions with the "
                "largest lag. It also grows while a micro-batch hangs, and after a failure.",
                "short",
                [
                    (
                        "{{query}} partition {{partition}} of {{cluster}}",
                        "topk(10, waltz_spark_lag_transactions{[[]]})",
                    )
                ],
            ),
            Panel(
                "Lag in seconds",
                "Age of the oldest transaction that the query has not read; the ten partitions "
                "with the largest lag.",
                "s",
                [
                    (
                        "{{query}} partition {{partition}} of {{cluster}}",
                        "topk(10, waltz_spark_lag_seconds{[[]]})",
                    )
                ],
            ),
            Panel(
                "Committed rows",
                "Rows that the query has written to a log.",
                "cps",
                [("{{query}}", rate("waltz_spark_committed_rows_total", "query"))],
            ),
            Panel(
                "Rejected rows",
                "Rows that a lock has rejected. The results of the write name the transaction "
                "that won (option resultsPath).",
                "cps",
                [("{{query}}", rate("waltz_spark_rejected_rows_total", "query"))],
            ),
            Panel(
                "Repeated appends of rows",
                "After a temporary error, such as a full queue, or after a recomputation.",
                "cps",
                [("{{query}}", rate("waltz_spark_retried_rows_total", "query"))],
            ),
        ),
    ),
)


def dashboards() -> dict[str, str]:
    """Return the JSON of each dashboard by the name of its file."""
    return {
        f"{dashboard.name}.json": json.dumps(_dashboard(dashboard), indent=2) + "\n"
        for dashboard in DASHBOARDS
    }


def _dashboard(dashboard: Dashboard) -> dict[str, object]:
    names = ", ".join(f'{variable.name}=~"${variable.name}"' for variable in dashboard.variables)
    return {
        "uid": dashboard.name,
        "title": dashboard.title,
        "tags": ["waltz"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "links": [
            {
                "type": "dashboards",
                "title": "Waltz",
                "tags": ["waltz"],
                "asDropdown": True,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "templating": {"list": [_source(), *map(_variable, dashboard.variables)]},
        "panels": list(_place_panels(dashboard.panels, names)),
    }


def _source() -> dict[str, object]:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
    }


def _variable(variable: Variable) -> dict[str, object]:
    return {
        "name": variable.name,
        "label": variable.name.capitalize(),
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": variable.query, "refId": variable.name},
        "refresh": 2,
        "sort": 3,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _place_panels(panels: Iterable[Panel], names: str) -> Iterable[dict[str, object]]:
    """Yield the panels, from left to right and from top to bottom."""
    x = y = row = 0
    for number, panel in enumerate(panels, 1):
        height = 4 if panel.kind == "stat" else 8
        if x + panel.width > COLUMNS:
            x, y, row = 0, y + row, 0
        yield {
            "id": number,
            "gridPos": {"x": x, "y": y, "w": panel.width, "h": height},
            **_panel(panel, names),
        }
        x, row = x + panel.width, max(row, height)


def _panel(definition: Panel, names: str) -> dict[str, object]:
    is_stat = definition.kind == "stat"
    defaults: dict[str, object] = {"unit": definition.unit}
    if is_stat:
        steps = [{"color": color, "value": value} for color, value in definition.limits]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
        options: dict[str, object] = {
            "reduceOptions": {"calcs": ["lastNotNull"]},
            "colorMode": "background",
        }
    else:
        defaults["custom"] = {"fillOpacity": 10, "showPoints": "never"}
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    if definition.no_value:
        defaults["noValue"] = definition.no_value
    return {
        "title": definition.title,
        "description": definition.description,
        "type": definition.kind,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": SOURCE,
                "expr": query.replace("[[]]", names),
                "legendFormat": legend or "__auto",
                "instant": is_stat,
                "range": not is_stat,
            }
            for number, (legend, query) in enumerate(definition.queries)
        ],
    }
