"""The command `waltz-core bench`: options, the table of workloads, and how one is run."""

import argparse
from contextlib import ExitStack
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import waltz_core.local
from waltz_bench.measuring import BenchLoad, BenchReport, Meter, Workload, make_report
from waltz_core.cli.output import say, show, show_json
from waltz_core.errors import BadConfig
from waltz_core.local import LocalCluster

# workload -> its module and function; a module is imported only when one of its workloads runs.
WORKLOADS: dict[str, tuple[str, str]] = {
    "append-batch": ("batch_appends", "append_batch"),
    "append-one": ("single_appends", "append_one"),
    "append-single": ("single_appends", "append_single"),
    "checkpoint": ("checkpoint", "checkpoint"),
    "conditional": ("single_appends", "conditional"),
    "failover-freeze": ("failover", "failover_freeze"),
    "failover-kill": ("failover", "failover_kill"),
    "failover-term": ("failover", "failover_term"),
    "false-refusals": ("batch_appends", "false_refusals"),
    "feed": ("single_appends", "feed"),
    "flood": ("flood", "flood"),
    "hot-lock": ("hot_lock", "hot_lock"),
    "many-partitions": ("many_partitions", "many_partitions"),
    "move-refusals": ("refusals", "move_refusals"),
    "replay": ("batch_appends", "replay"),
    "rolling-restart": ("failover", "rolling_restart"),
    "spark-read": ("spark_workloads", "read"),
    "spark-write": ("spark_workloads", "write"),
    "sql-view": ("sql_view", "sql_view"),
    "storage-append": ("storage_bench", "storage_append"),
    "storage-open": ("storage_bench", "storage_open"),
    "test-consumers": ("single_appends", "feed"),  # the name in Waltz 0.13
    "test-producers": ("producers", "producers"),
    "zookeeper-loss": ("failover", "zookeeper_loss"),
}
WITHOUT_CLUSTER = ("storage-append", "storage-open", "many-partitions")


def add(command: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    command.add_argument(
        "workload",
        help=f"one of {', '.join(sorted(WORKLOADS))}; docs/performance.md has what they measure",
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


def _workload(name: str) -> Workload:
    if name not in WORKLOADS:
        raise BadConfig(f"no workload {name!r}; there are {', '.join(sorted(WORKLOADS))}")
    module, function = WORKLOADS[name]
    if module == "spark_workloads" and find_spec("pyspark") is None:
        raise BadConfig(f"{name} needs PySpark. Hint: pip install 'waltz-spark[spark]'")
    found: Workload = getattr(import_module(f"waltz_bench.{module}"), function)
    return found


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
        if arguments.workload in WITHOUT_CLUSTER:
            pass
        elif arguments.directory is not None:
            cluster = LocalCluster(arguments.directory)
        elif arguments.connect is None:
            say("starting a local cluster")
            cluster = stack.enter_context(waltz_core.local.running())
        connect = arguments.connect or (cluster.connect if cluster else "")
        load = BenchLoad(
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
        measured = workload(load, meter)
        cpu = measured.cpu_seconds or meter.spent()
        report = make_report(arguments.workload, load, measured, cpu)
    if not arguments.json:
        for line in _lines(report):
            show(line)
    show_json(asdict(report))
    return 1 if report.lost or report.doubled or report.errors else 0


def _lines(report: BenchReport) -> list[str]:
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
