"""The parameters and the result of a workload, and the report.

Rules:
    1. The report is one JSON object with at least the keys of `BenchReport`.
    2. CPU time is user and system time between the start and the end of the load, by role. The
       roles are the roles of the daemons, and "client" for this process and its other child
       processes, such as Spark's processes.
    3. Each workload reads the log back to compute `lost` and `duplicated`.
"""

import os
import platform
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import psutil

from waltz_core import __version__

if TYPE_CHECKING:
    from waltz_core.local import LocalCluster

MIB = 1024 * 1024
BATCH_ROWS = 1000


@dataclass
class BenchLoad:
    """The parameters of a workload: the connect string, and the options of the command."""

    connect: str
    payload_bytes: int
    lock_count: int
    batch: int | None  # the number of rows in a batch; None for the default of the workload
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
    flood_connect: str | None = None

    @property
    def batch_rows(self) -> int:
        return self.batch or BATCH_ROWS


@dataclass
class WorkloadResult:
    """The result of a workload: counts and times of the load, without the set-up before it.

    Each latency is the time of one request in seconds. `gap_s_max` is the longest time in seconds
    without any answer.
    """

    rows: int
    seconds: float
    bytes: int
    latencies_s: list[float] = field(default_factory=list)
    gap_s_max: float = 0.0
    acknowledged: int = 0
    lost: int = 0
    duplicated: int = 0
    errors: int = 0
    extra: dict[str, object] = field(default_factory=dict)
    cpu_seconds: dict[str, float] | None = None  # by role; None if the workload does not measure it
    of_ceiling: float | None = None  # the share of the maximum rate, measured in the same run
    # CPU time with access control, divided by CPU time without access control.
    access_ratio: float | None = None


@dataclass
class BenchReport:
    """The report of a run, which is printed as one line of JSON (rule 1)."""

    workload: str
    rate_per_s: float
    mb_per_s: float
    cpu_us_per_tx: float | None
    p50_ms: float | None
    p99_ms: float | None
    max_gap_s: float
    acknowledged: int
    lost: int
    duplicated: int
    errors: int
    rows: int
    seconds: float
    of_ceiling: float | None
    access_ratio: float | None
    cpu_us_per_tx_by_role: dict[str, float]
    load: dict[str, object]
    environment: dict[str, object]
    extra: dict[str, object]


class Meter:
    """Measures the CPU time of a run (rule 2). `cluster` is None if the daemons run elsewhere.

    `other_clusters` are further clusters of this process, which this run does not use.
    """

    def __init__(
        self, cluster: "LocalCluster | None", other_clusters: "Iterable[LocalCluster]" = ()
    ) -> None:
        self.cluster = cluster
        self._other_clusters = tuple(other_clusters)
        self._seconds_at_start: dict[str, float] = {}
        self._cpu_seconds_by_role: dict[str, float] = {}

    def start(self) -> None:
        """Begin to count CPU time."""
        self._seconds_at_start = self._seconds()

    def stop(self) -> None:
        """Stop counting CPU time. After another `start`, more time is added."""
        for name, seconds in self._seconds().items():
            earlier_s = self._cpu_seconds_by_role.get(name, 0.0)
            start_s = self._seconds_at_start.get(name, 0.0)
            self._cpu_seconds_by_role[name] = earlier_s + seconds - start_s

    def _seconds(self) -> dict[str, float]:
        if self.cluster is None:
            return {}
        clusters = (self.cluster, *self._other_clusters)
        daemons = {member.pid for cluster in clusters for member in cluster.members}
        return self.cluster.cpu_seconds() | {"client": _client_cpu_seconds(daemons)}

    def cpu_seconds_by_role(self) -> dict[str, float] | None:
        """Return CPU seconds by role, for example "server" or "client"; None if there are none."""
        if not self._cpu_seconds_by_role:
            return None
        roles: dict[str, float] = {}
        for name, seconds in self._cpu_seconds_by_role.items():
            role = name.split("-")[0]
            roles[role] = roles.get(role, 0.0) + seconds
        return roles


def cpu_seconds_of(pid: int) -> float:
    """Return the CPU time of one process."""
    cpu_times = psutil.Process(pid).cpu_times()
    return float(cpu_times.user + cpu_times.system)


def _client_cpu_seconds(daemons: set[int]) -> float:
    """Return the CPU seconds of this process and of its descendants that are not daemons."""
    process = psutil.Process()
    processes = [process]
    for child in process.children():
        if child.pid not in daemons:
            processes += [child, *child.children(recursive=True)]
    seconds = 0.0
    for each in processes:
        with suppress(psutil.NoSuchProcess):
            cpu_times = each.cpu_times()
            # The last two are the times of child processes that have exited.
            seconds += (
                cpu_times.user
                + cpu_times.system
                + cpu_times.children_user
                + cpu_times.children_system
            )
    return seconds


Workload = Callable[[BenchLoad, Meter], WorkloadResult]


def make_report(
    name: str, load: BenchLoad, measured: WorkloadResult, cpu: dict[str, float] | None
) -> BenchReport:
    """Compute the report of a run from its result; `cpu` is CPU seconds by role."""
    rows = max(measured.rows, 1)
    by_role = {role: round(seconds * 1e6 / rows, 3) for role, seconds in (cpu or {}).items()}
    daemon_us = [by_role[role] for role in ("server", "storage") if role in by_role]
    omitted_names = ("connect", "flood_connect")
    load_options = {key: value for key, value in asdict(load).items() if key not in omitted_names}
    return BenchReport(
        workload=name,
        rate_per_s=round(measured.rows / measured.seconds, 1),
        mb_per_s=round(measured.bytes / measured.seconds / MIB, 3),
        cpu_us_per_tx=round(sum(daemon_us), 3) if daemon_us else None,
        p50_ms=percentile_ms(measured.latencies_s, 0.50),
        p99_ms=percentile_ms(measured.latencies_s, 0.99),
        max_gap_s=round(measured.gap_s_max, 4),
        acknowledged=measured.acknowledged,
        lost=measured.lost,
        duplicated=measured.duplicated,
        errors=measured.errors,
        rows=measured.rows,
        seconds=round(measured.seconds, 3),
        of_ceiling=measured.of_ceiling,
        access_ratio=measured.access_ratio,
        cpu_us_per_tx_by_role=by_role,
        load=load_options,
        environment={
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
    """Return a percentile in ms of values in s, such as share 0.99; None for an empty list."""
    if not values:
        return None
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1000, 3)
