"""The command `waltz-core bench`: its options, the table of workloads, and how they run."""

from contextlib import ExitStack
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

import waltz_core.local
from waltz_bench.measuring import BenchLoad, BenchReport, Meter, Workload, make_report
from waltz_core.cli import shared_options as options
from waltz_core.cli.output import print_error, print_json, print_result
from waltz_core.cli.subcommands import SubcommandFunction, subcommand
from waltz_core.errors import BadConfig
from waltz_core.local import LocalCluster

# The key is the name of a workload, the value is its module and function. A module is imported only
# when one of its workloads runs.
WORKLOADS: dict[str, tuple[str, str]] = {
    "append-batch": ("batch_appends", "append_batch"),
    "append-one": ("single_appends", "append_one"),
    "append-single": ("single_appends", "append_single"),
    "archive": ("archive_workload", "archive"),
    "checkpoint": ("checkpoint", "checkpoint"),
    "conditional": ("single_appends", "conditional"),
    "failover-freeze": ("failover", "failover_freeze"),
    "failover-kill": ("failover", "failover_kill"),
    "failover-term": ("failover", "failover_term"),
    "false-rejections": ("batch_appends", "false_rejections"),
    "feed": ("single_appends", "feed"),
    "flood": ("flood", "flood"),
    "gateway": ("gateway_appends", "gateway"),
    "hot-lock": ("hot_lock", "hot_lock"),
    "many-partitions": ("many_partitions", "many_partitions"),
    "move-rejections": ("rejections", "move_rejections"),
    "replay": ("batch_appends", "replay"),
    "rolling-restart": ("failover", "rolling_restart"),
    "spark-read": ("spark_workloads", "read"),
    "spark-write": ("spark_workloads", "write"),
    "sql-view": ("sql_view", "sql_view"),
    "storage-append": ("storage_bench", "storage_append"),
    "storage-open": ("storage_bench", "storage_open"),
    "test-consumers": ("single_appends", "feed"),  # the name in Waltz 0.13
    "test-producers": ("single_appends", "producers"),
    "zookeeper-loss": ("failover", "zookeeper_loss"),
}
WITHOUT_CLUSTER = ("archive", "storage-append", "storage-open", "many-partitions")


# option -> its type, its default, its help text
LOAD: dict[str, tuple[type, int | float | None, str]] = {
    "--payload": (int, 512, "bytes of data in a transaction"),
    "--locks": (int, 1, "number of write locks of a transaction"),
    "--batch": (
        int,
        None,
        (
            "number of rows in an append batch [default: 1000; for Spark writes the default of the "
            "option batchSize]"
        ),
    ),
    "--seconds": (float, 10.0, "duration of the load in seconds"),
    "--in-flight": (int, 2, "number of batches in flight for each partition"),
    "--mib": (
        int,
        None,
        "MiB of data [default: 1024; for storage-open 10240]",
    ),
    "--segments": (int, 1, "storage-open: minimum number of segments of the log"),
    "--writers": (int, 1, "test-producers: number of writers"),
    "--interval-ms": (
        float,
        0.0,
        "test-producers: pause of a writer after each transaction, in milliseconds",
    ),
    "--lock-pool": (int, 0, "test-producers: number of different locks from which writers choose"),
    "--partitions": (int, None, "many-partitions: number of partitions [default: 1000]"),
    "--rows": (int, 500_000, "number of rows for workloads with a fixed size"),
}
POSITIVE = (
    "seconds", "batch", "in_flight", "rows", "mib", "segments", "writers", "partitions"
)  # fmt: skip
NOT_NEGATIVE = ("interval_ms", "lock_pool")


def _load_options(function: SubcommandFunction) -> SubcommandFunction:
    for name, (kind, default, text) in reversed(LOAD.items()):
        help_text = text if default is None else f"{text} [default: {default:g}]"
        function = click.option(name, type=kind, default=default, metavar="N", help=help_text)(
            function
        )
    return function


@subcommand
@options.argument(
    "workload",
    "WORKLOAD",
    f"one of {', '.join(sorted(WORKLOADS))}; docs/performance.md describes them",
)
@click.option(
    "--connect",
    help="the connect string of the cluster to measure [default: a temporary local cluster]",
)
@click.option(
    "--directory",
    type=options.PATH_TYPE,
    help="most workloads: the directory of the local cluster to use; its CPU is measured as "
    "well. archive, storage-append, storage-open, many-partitions, sql-view: a directory on "
    "the disk to measure",
)
@click.option(
    "--tls",
    "tls_file",
    type=options.PATH_TYPE,
    metavar="FILE.toml",
    help="a file with TLS settings for the temporary cluster (docs/operations.md); for the "
    "workload flood, the cluster also has access control",
)
@click.option(
    "--access-rounds",
    type=click.IntRange(min=1),
    metavar="N",
    help="run the workload N times with TLS alone and N times with TLS and access control, "
    "alternately, and compare the CPU; needs --tls",
)
@_load_options
@click.option(
    "--peer",
    type=options.SuggestingChoice(("nats",)),
    help="append-one: measure this system as well, alternately in the same run",
)
@click.option(
    "--database", help="sql-view: the SQLAlchemy URL of a database [default: a new SQLite file]"
)
@click.option(
    "--flood-connect",
    help="flood: the connect string of the clients that cause the load [default: the same "
    "as the measured client; with --tls, the connect string of a principal with limits]",
)
@click.option("--json", "as_json", is_flag=True, help="print only the line of JSON")
def bench(
    *,
    workload: str,
    connect: str | None,
    directory: Path | None,
    tls_file: Path | None,
    access_rounds: int | None,
    as_json: bool,
    **load: Any,  # noqa: ANN401
) -> int:
    run = _import_workload(workload)
    _check_options(load)
    if tls_file is not None and (connect or directory or workload in WITHOUT_CLUSTER):
        raise BadConfig("--tls needs a workload with a temporary cluster")
    bench_load = BenchLoad(
        connect or "",
        load.pop("payload"),
        load.pop("locks"),
        directory=None if directory is None else str(directory),
        **load,
    )
    if access_rounds is not None:
        if tls_file is None:
            raise BadConfig("--access-rounds needs --tls")
        from waltz_bench.compared import access_cost  # noqa: PLC0415 - costs start-up time

        measured = access_cost.compare(run, bench_load, tls_file, access_rounds)
        return _show_report(
            make_report(workload, bench_load, measured, measured.cpu_seconds), as_json=as_json
        )
    with ExitStack() as stack:
        cluster: LocalCluster | None = None
        if workload in WITHOUT_CLUSTER:
            pass
        elif directory is not None:
            cluster = LocalCluster(directory)
        elif connect is None:
            print_error("starting a local cluster")
            cluster = _start_cluster(stack, workload, tls_file, bench_load)
        if cluster is not None:
            bench_load.connect = bench_load.connect or cluster.connect
        meter = Meter(cluster)
        print_error(f"running {workload}")
        measured = run(bench_load, meter)
        cpu = measured.cpu_seconds or meter.cpu_seconds_by_role()
        report = make_report(workload, bench_load, measured, cpu)
    return _show_report(report, as_json=as_json)


def _start_cluster(
    stack: ExitStack, workload: str, tls_file: Path | None, load: BenchLoad
) -> LocalCluster:
    """Start a temporary cluster. For `flood` with TLS, its greedy tenants have limits."""
    if workload != "flood" or tls_file is None:
        return stack.enter_context(waltz_core.local.running_cluster(tls=tls_file))
    from waltz_bench.compared import tenant_load  # noqa: PLC0415 - costs start-up time

    running = tenant_load.limited_tenants(tls_file)
    cluster, load.connect, load.flood_connect = stack.enter_context(running)
    return cluster


def _check_options(values: dict[str, Any]) -> None:
    """Raise BadConfig for an option whose number is too low."""
    for name, value in values.items():
        flag = name.replace("_", "-")
        if name in POSITIVE and value is not None and value <= 0:
            raise BadConfig(f"--{flag}: expected more than 0, found {value}")
        if name in NOT_NEGATIVE and value < 0:
            raise BadConfig(f"--{flag}: expected 0 or more, found {value}")


def _show_report(report: BenchReport, *, as_json: bool) -> int:
    """Print a report; return the exit code of the command: 1 for lost, duplicated or wrong rows."""
    if not as_json:
        for line in _report_lines(report):
            print_result(line)
    print_json(asdict(report))
    return 1 if report.lost or report.duplicated or report.errors else 0


def _import_workload(name: str) -> Workload:
    if name not in WORKLOADS:
        raise BadConfig(
            f"unknown workload {name!r}; expected one of {', '.join(sorted(WORKLOADS))}"
        )
    module, function = WORKLOADS[name]
    if module in ("archive_workload", "spark_workloads") and find_spec("pyspark") is None:
        raise BadConfig(f"{name} needs PySpark. Hint: run pip install 'waltz-spark[spark]'.")
    function_object: Workload = getattr(import_module(f"waltz_bench.{module}"), function)
    return function_object


def _report_lines(report: BenchReport) -> list[str]:
    lines = [
        f"{report.workload}: {report.rows:,} transactions in {report.seconds:.2f} s",
        f"  {report.rate_per_s:,.0f} a second, {report.mb_per_s:,.1f} MiB/s of data",
    ]
    if report.cpu_us_per_tx is not None:
        parts = ", ".join(
            f"{role} {cpu_us}" for role, cpu_us in report.cpu_us_per_tx_by_role.items()
        )
        lines.append(f"  {report.cpu_us_per_tx} us of CPU a transaction ({parts})")
    if report.access_ratio is not None:
        lines.append(f"  with access control {report.access_ratio:.3f} times the CPU of TLS alone")
    if report.of_ceiling is not None:
        lines.append(f"  {report.of_ceiling:.0%} of the maximum of Spark's Python workers")
    if report.p50_ms is not None:
        lines.append(f"  answers: p50 {report.p50_ms} ms, p99 {report.p99_ms} ms")
    lines.append(
        f"  longest gap {report.max_gap_s} s; lost {report.lost}, duplicated {report.duplicated}, "
        f"errors {report.errors}"
    )
    return lines
