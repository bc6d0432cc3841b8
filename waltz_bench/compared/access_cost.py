"""The CPU cost of access control: a workload on two clusters, with `access` off and on.

Rules:
    1. Both clusters use TLS with the same settings, and run all the time. Each round runs the
       workload on both clusters. The order changes with each round.
    2. The figure of a run is the CPU time of servers, storages and clients per transaction. The
       cost of access control is the median of the ratios of the rounds, because the speed of a
       machine changes over time.
    3. The client has a token, permissions for a list of partitions, and limits that it does not
       reach. With these settings, a request costs the most CPU time.
"""

import asyncio
import secrets
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from waltz_bench.measuring import BenchLoad, Meter, Workload, WorkloadResult
from waltz_core.access.permissions import Grant, Permissions, PrincipalLimits, StoredToken
from waltz_core.access.principals import ANONYMOUS
from waltz_core.access.requirements import AccessVerb
from waltz_core.access.tokens import TOKEN_BYTES, hash_of
from waltz_core.cli.output import print_error
from waltz_core.cluster.change.stored_permissions import Author
from waltz_core.cluster.zookeeper import zookeeper_session
from waltz_core.config.connect_string import parse_connect_string
from waltz_core.local import LocalCluster

_PRINCIPAL: Final = "bench"
_TOKEN_LIFETIME_MS: Final = 365 * 86_400_000
_LIMITS: Final = PrincipalLimits(1 << 40, 1 << 40, 1_000, 1_000)
_ROLES: Final = ("server", "storage", "client")


@dataclass
class _ComparedCluster:
    """One of the two clusters, and the results of the runs on it."""

    cluster: LocalCluster
    connect: str
    runs: list[WorkloadResult] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)
    cpu_seconds: dict[str, float] = field(default_factory=dict)

    def run(self, workload: Workload, load: BenchLoad, other_cluster: LocalCluster) -> None:
        """Run the workload once; `other_cluster` is the cluster that this run does not use."""
        meter = Meter(self.cluster, [other_cluster])
        measured = workload(replace(load, connect=self.connect), meter)
        cpu_s = meter.cpu_seconds_by_role() or {}
        for role, seconds in cpu_s.items():
            self.cpu_seconds[role] = self.cpu_seconds.get(role, 0.0) + seconds
        seconds = sum(cpu_s[role] for role in _ROLES)
        self.runs.append(measured)
        self.cpu_us.append(seconds * 1e6 / max(measured.rows, 1))


def compare(workload: Workload, load: BenchLoad, tls_file: Path, rounds: int) -> WorkloadResult:
    """Run `rounds` rounds; return the result with access control, and `access_ratio`."""
    print_error("starting two local clusters")
    with (
        _run_cluster(tls_file, "off") as without_access,
        _run_cluster(tls_file, "on") as with_access,
    ):
        for number in range(rounds):
            print_error(f"round {number + 1} of {rounds}")
            pair = (
                (without_access, with_access) if number % 2 == 0 else (with_access, without_access)
            )
            for each, other_side in (pair, pair[::-1]):
                each.run(workload, load, other_side.cluster)
    runs, every = with_access.runs, [*without_access.runs, *with_access.runs]
    ratios = [
        with_access_us / without_access_us
        for without_access_us, with_access_us in zip(
            without_access.cpu_us, with_access.cpu_us, strict=True
        )
    ]
    return WorkloadResult(
        rows=sum(run.rows for run in runs),
        seconds=sum(run.seconds for run in runs),
        bytes=sum(run.bytes for run in runs),
        latencies_s=[latency for run in runs for latency in run.latencies_s],
        gap_s_max=max(run.gap_s_max for run in runs),
        acknowledged=sum(run.acknowledged for run in runs),
        lost=sum(each.lost for each in every),
        duplicated=sum(each.duplicated for each in every),
        errors=sum(each.errors for each in every),
        cpu_seconds=with_access.cpu_seconds,
        access_ratio=round(statistics.median(ratios), 3),
        extra={
            "access_ratios": [round(ratio, 3) for ratio in ratios],
            "cpu_us_per_tx_off": [round(cpu_time, 3) for cpu_time in without_access.cpu_us],
            "cpu_us_per_tx_on": [round(cpu_time, 3) for cpu_time in with_access.cpu_us],
        },
    )


@contextmanager
def _run_cluster(tls_file: Path, access: str) -> Iterator[_ComparedCluster]:
    """Run one of the two clusters; `access` is "off" or "on"."""
    with cluster_with_permissions(tls_file, access, {_PRINCIPAL: _LIMITS}) as (cluster, connects):
        yield _ComparedCluster(cluster, connects[_PRINCIPAL])


@contextmanager
def cluster_with_permissions(
    tls_file: Path,
    access: str,
    limits: Mapping[str, PrincipalLimits],
    other_settings: Mapping[str, object] | None = None,
) -> Iterator[tuple[LocalCluster, dict[str, str]]]:
    """Run a temporary cluster whose permissions are created before its daemons start.

    Yields the cluster, and the connect string of each principal in `limits`. All of these
    principals may read and append. `other_settings` are further settings of all daemons.
    """
    # No certificate has a name that matches this pattern, so the daemons are anonymous.
    settings = {"access": access, "principal_pattern": "NONE=(.+)", **(other_settings or {})}
    with TemporaryDirectory(prefix="waltz-") as directory:
        kinds = {"server": settings, "storage": settings}
        cluster = LocalCluster(
            Path(directory) / "cluster", exit_with_parent=True, tls=tls_file, settings=kinds
        )
        try:
            cluster.prepare()
            secrets_by_name = {name: secrets.token_bytes(TOKEN_BYTES) for name in limits}
            for name, secret in secrets_by_name.items():
                (Path(directory) / name).write_text(secret.hex())
            asyncio.run(_store_permissions(cluster, secrets_by_name, limits))
            cluster.up()
            connect_prefix = f"{cluster.connect}&token_file={directory}"
            yield cluster, {name: f"{connect_prefix}/{name}" for name in limits}
        finally:
            if cluster.exists():
                cluster.down()


async def _store_permissions(
    cluster: LocalCluster,
    secrets_by_name: Mapping[str, bytes],
    limits: Mapping[str, PrincipalLimits],
) -> None:
    """Store permissions: the daemons may replicate, and clients with tokens may read and append."""
    now_ms = time.time_ns() // 1_000_000
    partitions = ((0, cluster.partition_count - 1),)
    permissions = Permissions(
        1,
        "",
        0,
        secrets.token_bytes(32),
        grants=(
            Grant(ANONYMOUS, False, AccessVerb.READ, None),  # noqa: FBT003 - no group
            Grant(ANONYMOUS, False, AccessVerb.REPLICATE, None),  # noqa: FBT003
            *(
                Grant(name, False, verb, partitions)  # noqa: FBT003
                for name in limits
                for verb in (AccessVerb.READ, AccessVerb.APPEND)
            ),
        ),
        limits=dict(limits),
        tokens={
            hash_of(secret): StoredToken(f"t{number}", name, now_ms + _TOKEN_LIFETIME_MS)
            for number, (name, secret) in enumerate(secrets_by_name.items(), 1)
        },
    )
    async with zookeeper_session.open_session(parse_connect_string(cluster.connect)) as coordinator:
        await coordinator.permissions.create(permissions, Author("bench", now_ms))
