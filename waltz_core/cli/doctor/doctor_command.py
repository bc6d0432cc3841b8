"""`waltz-core doctor`: report the problems of a cluster, with commands that repair them.

`ops/findings.py` lists all possible findings.

Rules:
    1. The doctor changes nothing. It always ends, because each query has a timeout.
    2. It omits temporary problems (`administration/lasting_findings.py`).
    3. Exit code 0: no problem; 1: problems, or no process could be queried.
"""

from pathlib import Path
from typing import Final

import click

from waltz_core.administration import member_connections
from waltz_core.administration.lasting_findings import RECHECK_INTERVAL_S, lasting_findings
from waltz_core.cli import shared_options as options
from waltz_core.cli.output import print_json, print_result
from waltz_core.cli.subcommands import subcommand
from waltz_core.config.declarations import LocalConfig
from waltz_core.errors import BadConfig
from waltz_core.local import LocalCluster
from waltz_core.ops.diagnosis import cluster_summary
from waltz_core.ops.facts import Facts, LocalFacts, MemberFacts, ServerFacts
from waltz_core.ops.findings import FINDING_KINDS, Finding
from waltz_core.records.record import PartitionId

ANSWER_TIMEOUT_S: Final = 3.0
NOT_MEASURED: Final = (
    "the clocks of ZooKeeper servers, because ZooKeeper does not report them",
    "the clocks of servers; the doctor only reports commit times in the future",
    "connections between processes, except those from servers to storages",
    "which machines can connect to the ports: without TLS, use a private network",
)


@subcommand
@click.option(
    "--connect",
    envvar=options.CONNECT_VARIABLE,
    metavar="CONNECT",
    help=f"connect string, for example {options.CONNECT_EXAMPLE} "
    f"[default: ${options.CONNECT_VARIABLE}, otherwise the cluster of `waltz-core local up` on "
    "this machine]",
)
@click.option(
    "--directory",
    type=options.PATH_TYPE,
    envvar="WALTZ_LOCAL_DIRECTORY",
    default=LocalConfig().directory,
    help="the directory of a cluster on this machine; the doctor then also checks its processes "
    f"[default: $WALTZ_LOCAL_DIRECTORY, otherwise {LocalConfig().directory}]",
)
@click.option(
    "--timeout-s",
    type=float,
    default=ANSWER_TIMEOUT_S,
    metavar="S",
    help=f"seconds to wait for each answer [default: {ANSWER_TIMEOUT_S:g}]",
)
@options.json_option
async def doctor(*, connect: str | None, directory: Path, timeout_s: float, as_json: bool) -> int:
    """Report the problems of a cluster; exit code 1 if there are any."""
    if timeout_s <= 0:
        raise BadConfig(f"--timeout-s: expected a number above 0, found {timeout_s:g}")
    connect, local = _find_cluster(connect, directory)
    member_connections.use_settings_of(connect)
    member_connections.ssl_context()  # raises BadConfig for the files of ?tls= before any query
    facts, findings = await lasting_findings(
        connect, timeout_s=timeout_s, local=None if local is None else _local_facts(local)
    )
    if as_json:
        print_json(findings_json(facts, findings))
    else:
        for line in findings_text(facts, findings):
            print_result(line)
    return 0 if _is_healthy(facts, findings) else 1


doctor.help_details = (
    "The doctor changes nothing. If it finds problems, it checks the cluster again after "
    f"{RECHECK_INTERVAL_S:g} s, and reports the problems that remain. For each problem, it prints "
    "a command that repairs it; replace the words in capitals in this command. The exit code is 0 "
    "if there is no problem, and 1 if there are problems or the cluster could not be queried. "
    "docs/doctor.md lists all findings."
)


def find_local_cluster(directory: Path) -> LocalCluster | None:
    """Return the local cluster in a directory, or None if there is none."""
    local_cluster = LocalCluster(directory)
    return local_cluster if local_cluster.exists() else None


def _local_facts(local: LocalCluster) -> LocalFacts:
    members = [
        MemberFacts(
            member.name, f"{local.host}:{member.port}", member.state, member.pid, member.admin_port
        )
        for member in local.members
    ]
    return LocalFacts(str(local.directory), tuple(members))


def _find_cluster(connect: str | None, directory: Path) -> tuple[str, LocalCluster | None]:
    """Return the connect string, and the local cluster if it runs on this machine."""
    local = find_local_cluster(directory)
    if connect is None:
        if local is None:
            raise BadConfig(
                "expected --connect zk1:2181,zk2:2181/waltz/payments, or a cluster of "
                f"`waltz-core local up` in {directory}; found neither"
            )
        return local.connect, local
    return connect, local if local and local.connect == connect else None


def findings_text(facts: Facts, findings: list[Finding]) -> list[str]:
    """Return the findings as lines of text."""
    if not findings:
        if facts.cluster is None:
            return [
                (
                    "the doctor found no lasting problem, but the cluster could not be queried. "
                    "Hint: run the command again."
                )
            ]
        return [f"no problems: {cluster_summary(facts)}", f"clocks: {_clocks_text(facts)}"]
    lines = []
    for number, finding in enumerate(findings, 1):
        lines += [f"{number}. {finding.sentence}", f"   {finding.command}"]
    return lines


def _clocks_text(facts: Facts) -> str:
    assert facts.cluster is not None
    reported_ms = [each.clock_ahead_ms for each in facts.cluster.storages.values()]
    known_ms = [0.0, *(each for each in reported_ms if each is not None)]
    if len(known_ms) == 1:
        return "no storage reports its clock"
    return (
        f"the clocks of {len(known_ms) - 1} storages and of this machine differ by at most "
        f"{max(known_ms) - min(known_ms):.0f} ms; servers and ZooKeeper do not report their clocks"
    )


def _is_healthy(facts: Facts, findings: list[Finding]) -> bool:
    return not findings and facts.cluster is not None


def findings_json(facts: Facts, findings: list[Finding]) -> dict[str, object]:
    """Return the findings and the facts as one value for JSON."""
    return {
        "connect": facts.connect,
        "is_healthy": _is_healthy(facts, findings),
        "findings": [
            {
                "name": finding.name,
                "area": FINDING_KINDS[finding.name].area.value,
                "about": finding.subject,
                "partition": finding.partition,
                "sentence": finding.sentence,
                "command": finding.command,
            }
            for finding in findings
        ],
        "facts": _facts_json(facts),
        "not_measured": list(NOT_MEASURED),
    }


def _open_partitions(server: ServerFacts) -> set[PartitionId]:
    return {number for number, is_open in server.served_partitions.items() if is_open}


def _facts_json(facts: Facts) -> dict[str, object]:
    zookeeper = {
        each.address: {"mode": each.mode, "latency_ms": each.latency_ms}
        for each in facts.zookeeper_servers
    }
    cluster = facts.cluster
    if cluster is None:
        return {"zookeeper": zookeeper}
    return {
        "zookeeper": zookeeper,
        "servers": {
            each.address: {
                "latency_ms": each.latency_ms,
                "open": sorted(_open_partitions(each)),
                "not_open": sorted(each.served_partitions.keys() - _open_partitions(each)),
                "preferred": sorted(each.preferred_partitions),
                "out_of_reach": sorted(each.unreachable_storages),
            }
            for each in cluster.servers.values()
        },
        "storages": {
            each.address: {
                "latency_ms": each.latency_ms,
                "free_bytes": None if each.disk is None else each.disk.free_bytes,
                "is_full": None if each.disk is None else each.disk.is_full,
                "clock_ahead_ms": each.clock_ahead_ms,
                "replicas": len(each.replicas),
            }
            for each in cluster.storages.values()
        },
        "marks": {number: each.high_water_mark for number, each in cluster.partitions.items()},
    }
