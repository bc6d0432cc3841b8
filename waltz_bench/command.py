"""`waltz-core bench WORKLOAD`: load a cluster, check what came of it, print one JSON line.

Why it stands alone: every workload is started, measured and reported in the same way, so that
figures of different days and workloads can be compared.

Rules:
    1. The last line on standard output is one JSON object with at least the keys of `Report`.
    2. CPU is what the operating system charged the daemons between start and end of the load.
    3. Speed without a check is worth nothing: `lost` and `doubled` come from reading the log back.
"""

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import waltz_core.local
from waltz_bench import workloads
from waltz_core import __version__
from waltz_core.cli.output import say, show, show_json
from waltz_core.errors import BadConfig
from waltz_core.local import LocalCluster

# Packages beside this one add workloads by entry points of this group (Spark's are among them).
WORKLOAD_GROUP = "waltz.workloads"
MIB = 1024 * 1024
BATCH_ROWS = 1000


@dataclass
class Load:
    """What a workload is told: the cluster and the knobs."""

    connect: str
    payload_bytes: int
    lock_count: int
    batch: int | None  # rows of a batch; None where nothing was asked
    seconds: float
    in_flight: int
    rows: int
    peer: str | None = None
    directory: str | None = None
    mib: int | None = None
    segments: int = 1
    writers: int = 1
    interval_ms: float = 0.0
    lock_pool: int = 0
    partitions: int | None = None
    database: str | None = None

    @property
    def batch_rows(self) -> int:
        """Rows of a batch."""
        return self.batch or BATCH_ROWS


@dataclass
class Measured:
    """What a workload tells: counts and times of the load alone, without its set-up.

    Latencies are of one request, in seconds; `gap_s_max` is the longest time without any answer.
    """

    rows: int
    seconds: float
    bytes: int
    latencies_s: list[float] = field(default_factory=list)
    gap_s_max: float = 0.0
    acknowledged: int = 0
    lost: int = 0
    doubled: int = 0
    errors: int = 0
    extra: dict[str, object] = field(default_factory=dict)
    cpu_seconds: dict[str, float] | None = None  # by role, where the workload measured it itself
    of_ceiling: float | None = None  # share of a rate that no log could exceed, from the same run


@dataclass
class Report:
    """The JSON line."""

    workload: str
    rate_per_s: float
    mb_per_s: float
    cpu_us_per_tx: float | None
    p50_ms: float | None
    p99_ms: float | None
    max_gap_s: float
    acknowledged: int
    lost: int
    doubled: int
    errors: int
    rows: int
    seconds: float
    of_ceiling: float | None
    cpu_us_per_tx_by_role: dict[str, float]
    load: dict[str, object]
    ran_on: dict[str, object]
    extra: dict[str, object]


# One from another package returns the fields of `Measured` as a dict: it need not import us.
Workload = Callable[[Load, "Meter"], "Measured | dict[str, Any]"]


class Meter:
    """Reads the daemons' CPU time; None where they run on other machines."""

    def __init__(self, cluster: LocalCluster | None) -> None:
        self.cluster = cluster
        self._began: dict[str, float] = {}
        self._spent: dict[str, float] | None = None

    def start(self) -> None:
        """Begin: what is spent from here on counts."""
        if self.cluster is not None:
            self._began = self.cluster.cpu_seconds()

    def stop(self) -> None:
        """End."""
        if self.cluster is not None:
            now = self.cluster.cpu_seconds()
            self._spent = {name: now[name] - self._began.get(name, 0.0) for name in now}

    def spent(self) -> dict[str, float] | None:
        """Return CPU seconds by role ("server", "storage", "zookeeper")."""
        if self._spent is None:
            return None
        roles: dict[str, float] = {}
        for name, seconds in self._spent.items():
            role = name.split("-")[0]
            roles[role] = roles.get(role, 0.0) + seconds
        return roles


def add(command: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    command.add_argument(
        "workload",
        help=f"one of {', '.join(sorted(_names()))}; docs/performance.md has what they measure",
    )
    command.add_argument("--connect", help="this cluster; else a local one is started and ended")
    command.add_argument(
        "--directory",
        type=Path,
        help="a local cluster's directory: use it, and measure its CPU; "
        "storage-append, storage-open, many-partitions, sql-view: on which disk",
    )
    command.add_argument("--payload", type=int, default=512, help="bytes of data (512)")
    command.add_argument("--locks", type=int, default=1, help="write locks of a transaction (1)")
    command.add_argument(
        "--batch", type=int, help="rows of a batch (1000; Spark writes: option batchSize's own)"
    )
    command.add_argument("--seconds", type=float, default=10.0, help="length of the load (10)")
    command.add_argument(
        "--in-flight", type=int, default=2, help="batches in flight for each partition (2)"
    )
    command.add_argument(
        "--peer", choices=("nats",), help="append-one: by turns with this one, in the same run"
    )
    command.add_argument(
        "--mib", type=int, help="storage-append, storage-open: MiB of data (1024, 10240)"
    )
    command.add_argument(
        "--segments", type=int, default=1, help="storage-open: at least so many segments (1)"
    )
    command.add_argument(
        "--writers", type=int, default=1, help="test-producers: so many at once (1)"
    )
    command.add_argument(
        "--interval-ms",
        type=float,
        default=0.0,
        help="test-producers: pause of a writer after each transaction (0)",
    )
    command.add_argument(
        "--lock-pool",
        type=int,
        default=0,
        help="test-producers: write locks are drawn from so many (0: no locks)",
    )
    command.add_argument("--partitions", type=int, help="many-partitions: how many (1000)")
    command.add_argument(
        "--database", help="sql-view: SQLAlchemy's URL of a database (a new SQLite file)"
    )
    command.add_argument(
        "--rows", type=int, default=500_000, help="rows, for workloads of so many (500000)"
    )
    command.add_argument("--json", action="store_true", help="print nothing but the JSON line")
    command.set_defaults(verb=_bench)


def _names() -> set[str]:
    return set(workloads.WORKLOADS) | {point.name for point in entry_points(group=WORKLOAD_GROUP)}


def _workload(name: str) -> Workload:
    if name in workloads.WORKLOADS:
        return workloads.WORKLOADS[name]
    for point in entry_points(group=WORKLOAD_GROUP):
        if point.name == name:
            loaded: Workload = point.load()
            return loaded
    raise BadConfig(f"no workload {name!r}; there are {', '.join(sorted(_names()))}")


def _bench(arguments: argparse.Namespace) -> int:
    workload = _workload(arguments.workload)
    positive = ("seconds", "batch", "in_flight", "rows", "mib", "segments", "writers", "partitions")
    for name in positive:
        given = getattr(arguments, name)
        if given is not None and given <= 0:
            flag = name.replace("_", "-")
            raise BadConfig(f"--{flag}: expected more than 0, found {given}")
    for name in ("interval_ms", "lock_pool"):
        if getattr(arguments, name) < 0:
            flag, found = name.replace("_", "-"), getattr(arguments, name)
            raise BadConfig(f"--{flag}: expected 0 or more, found {found}")
    with ExitStack() as stack:
        cluster: LocalCluster | None = None
        if arguments.workload in workloads.WITHOUT_CLUSTER:
            pass
        elif arguments.directory is not None:
            cluster = LocalCluster(arguments.directory)
        elif arguments.connect is None:
            say("starting a local cluster")
            cluster = stack.enter_context(waltz_core.local.running())
        connect = arguments.connect or (cluster.connect if cluster else "")
        load = Load(
            connect,
            arguments.payload,
            arguments.locks,
            arguments.batch,
            arguments.seconds,
            arguments.in_flight,
            arguments.rows,
            arguments.peer,
            None if arguments.directory is None else str(arguments.directory),
            arguments.mib,
            arguments.segments,
            arguments.writers,
            arguments.interval_ms,
            arguments.lock_pool,
            arguments.partitions,
            arguments.database,
        )
        meter = Meter(cluster)
        say(f"running {arguments.workload}")
        told = workload(load, meter)
        measured = told if isinstance(told, Measured) else Measured(**told)
        cpu = measured.cpu_seconds or meter.spent()
        report = make_report(arguments.workload, load, measured, cpu)
    if not arguments.json:
        for line in _lines(report):
            show(line)
    show_json(asdict(report))
    return 1 if report.lost or report.doubled or report.errors else 0


def make_report(name: str, load: Load, measured: Measured, cpu: dict[str, float] | None) -> Report:
    """Return the JSON line of a run."""
    rows = max(measured.rows, 1)
    by_role = {role: round(seconds * 1e6 / rows, 3) for role, seconds in (cpu or {}).items()}
    hot = [by_role[role] for role in ("server", "storage") if role in by_role]
    asked = {key: value for key, value in asdict(load).items() if key != "connect"}
    return Report(
        workload=name,
        rate_per_s=round(measured.rows / measured.seconds, 1),
        mb_per_s=round(measured.bytes / measured.seconds / MIB, 3),
        cpu_us_per_tx=round(sum(hot), 3) if hot else None,
        p50_ms=percentile_ms(measured.latencies_s, 0.50),
        p99_ms=percentile_ms(measured.latencies_s, 0.99),
        max_gap_s=round(measured.gap_s_max, 4),
        acknowledged=measured.acknowledged,
        lost=measured.lost,
        doubled=measured.doubled,
        errors=measured.errors,
        rows=measured.rows,
        seconds=round(measured.seconds, 3),
        of_ceiling=measured.of_ceiling,
        cpu_us_per_tx_by_role=by_role,
        load=asked,
        ran_on={
            "version": __version__,
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()}",
            "cores": os.cpu_count(),
            "load_average": [round(part, 2) for part in os.getloadavg()],
            "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "implementation": sys.implementation.name,
        },
        extra=measured.extra,
    )


def percentile_ms(values: list[float], share: float) -> float | None:
    """Return the value that this share of them does not exceed, in ms; None without any."""
    if not values:
        return None
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1000, 3)


def _lines(report: Report) -> list[str]:
    lines = [
        f"{report.workload}: {report.rows:,} transactions in {report.seconds:.2f} s",
        f"  {report.rate_per_s:,.0f} a second, {report.mb_per_s:,.1f} MiB/s of data",
    ]
    if report.cpu_us_per_tx is not None:
        parts = ", ".join(f"{role} {us}" for role, us in report.cpu_us_per_tx_by_role.items())
        lines.append(f"  {report.cpu_us_per_tx} us of CPU a transaction ({parts})")
    if report.of_ceiling is not None:
        lines.append(f"  {report.of_ceiling:.0%} of what Spark's Python workers can do at all")
    if report.p50_ms is not None:
        lines.append(f"  answers: p50 {report.p50_ms} ms, p99 {report.p99_ms} ms")
    lines.append(
        f"  longest gap {report.max_gap_s} s; lost {report.lost}, doubled {report.doubled}, "
        f"errors {report.errors}"
    )
    return lines
