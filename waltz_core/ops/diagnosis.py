"""Derives the findings of the doctor from the facts that it has collected.

The module uses no sockets and no clock, so that each finding can be tested without a cluster.

Rules:
    1. The doctor reports a cause, but not its consequences. For example, if a storage does not
       answer, the doctor does not also report that servers cannot connect to this storage.
    2. If a process could not be queried, the doctor reports no other finding about it.
    3. The loss of a quorum is always reported, whatever the cause, because it stops appends.
    4. Findings are in the order of the table in `findings.py`, then in the order of their objects.
    5. The doctor proposes to delete a partition's files only if the partition has an open session
       in which all of its replicas are engaged. Without such a session, the data in ZooKeeper may
       be wrong, and the files of a replica that ZooKeeper does not list may be the only copy.
"""

import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Final

from waltz_core.cluster.change import rebuilding, replica_steps
from waltz_core.config.connect_string import parse_connect_string, split_address
from waltz_core.ops.condition import PartitionCondition, UnavailableReason, unavailable_reason
from waltz_core.ops.facts import (
    ArchiveFacts,
    ClusterFacts,
    DiskFacts,
    Facts,
    LocalFacts,
    MemberFacts,
    ReplicaFacts,
    ServerFacts,
    StorageFacts,
    ZooKeeperServerFacts,
)
from waltz_core.ops.findings import FINDING_KINDS, Finding, new_finding
from waltz_core.records.record import PartitionId, ReplicaId

MIB: Final = 1024 * 1024
# The clocks of machines with NTP differ by less than this. No decision of Waltz depends on clocks.
CLOCK_DIFFERENCE_MS_MAX: Final = 1_000
# A disk is nearly full if less than a twentieth of its size is free. This limit leaves the same
# time on large and small disks. The minimum is four times the default reserve: without this
# minimum, a small disk would reject appends before it counts as nearly full.
NEARLY_FULL_SIZE_DIVISOR: Final = 20
NEARLY_FULL_FREE_BYTES_MIN: Final = 256 * MIB
NEARLY_FULL_FREE_BYTES_DEFAULT: Final = (
    1024 * MIB
)  # the limit for an older storage, which does not report its disk size
# While an owner sends a replica its missing records from memory, the lag of the replica is below
# this number of transactions.
LAG_TRANSACTIONS_MAX: Final = 100_000
# A storage is slow if its append latency is at least `SLOW_APPEND_RATIO_MIN` times the median of
# the other storages. The measurement needs at least `SLOW_APPEND_SECONDS_MIN` seconds with appends.
# Latencies below `SLOW_APPEND_MS_MIN` are never reported, because applications do not notice them.
SLOW_APPEND_RATIO_MIN: Final = 5
SLOW_APPEND_MS_MIN: Final = 50
SLOW_APPEND_SECONDS_MIN: Final = 10
# If fewer days are left until the disk is full, there may be no time to add a storage or to
# archive.
FULL_SOON_DAYS_MAX: Final = 7
# A single failure is not reported, because it may be a throttled request, and because the next
# attempt uses another storage.
ARCHIVE_FAILURES_MIN: Final = 2
# A transaction is archived at the first attempt after `archive_age_ms`, when earlier ranges are
# archived. So the limit for the age of the transaction is twice this setting, plus the interval
# between attempts, plus an hour for uploads.
ARCHIVE_LAG_AGE_FACTOR: Final = 2
ARCHIVE_UPLOAD_TIME_S: Final = 3_600
FINDING_NAME_BY_REASON: Final = {
    UnavailableReason.OFFLINE: "replica-offline",
    UnavailableReason.MISSING: "replica-not-held",
    UnavailableReason.OPENING: "replica-opening",
    UnavailableReason.UNREADABLE: "replica-unreadable",
    UnavailableReason.STUCK: "replica-stuck",
}
_CONFIG_FILE_NAMES: Final = {
    "zookeeper": "zoo.cfg",
    "server": "server.toml",
    "storage": "storage.toml",
}


def diagnose(facts: Facts) -> list[Finding]:
    """Return a finding for every problem in the facts, in the order of rule 4."""
    diagnosis = _Diagnosis(facts)
    diagnosis.check_zookeeper()
    diagnosis.check_processes()
    if facts.cluster is not None:
        _ClusterDiagnosis(diagnosis, facts.cluster).check()
    order = list(FINDING_KINDS)
    return sorted(diagnosis.findings, key=lambda each: order.index(each.name))


def cluster_summary(facts: Facts) -> str:
    """Return a summary of the cluster, for a report without findings."""
    cluster = facts.cluster
    assert cluster is not None
    replicas = sorted(
        {len(partition_replicas) for partition_replicas in cluster.assigned_replicas.values()}
    )
    return (
        f"{_count_text(len(cluster.servers), 'server')}, "
        f"{_count_text(len(cluster.storages), 'storage')}, "
        f"{_count_text(cluster.partition_count, 'partition')} with "
        f"{' or '.join(map(str, replicas))} replica{'' if replicas == [1] else 's'} each, "
        f"{_count_text(len(facts.zookeeper_servers), 'ZooKeeper server')}"
    )


def _count_text(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


@dataclass(slots=True)
class _Diagnosis:
    """Collects the findings, and creates commands that do not depend on the cluster's state."""

    facts: Facts
    findings: list[Finding] = field(default_factory=list)

    def add_finding(self, name: str, subject: object, **fields: object) -> None:
        """Add a finding; `fields` are the values for its sentence and its command."""
        common_fields = {
            "connect": self.connect,
            "connect_with_tls_file": self.connect_with_tls_file,
            "connect_with_token_file": self.connect_with_token_file,
        }
        self.findings.append(new_finding(name, subject, **common_fields, **fields))

    @property
    def connect_with_tls_file(self) -> str:
        """The connect string with a placeholder for the file with TLS settings."""
        return shlex.quote(str(replace(parse_connect_string(self.facts.connect), tls="FILE")))

    @property
    def connect_with_token_file(self) -> str:
        """The connect string with a placeholder for the file with another token."""
        address = parse_connect_string(self.facts.connect)
        address = replace(address, token_file="FILE", token_env="")  # noqa: S106 - no secret
        return shlex.quote(str(address))

    @property
    def connect(self) -> str:
        """The connect string, quoted for a shell."""
        return shlex.quote(self.facts.connect)

    def member_at(self, address: str) -> MemberFacts | None:
        """Return the process with this address in the cluster on this machine; None if unknown."""
        members = () if self.facts.local is None else self.facts.local.members
        return next((member for member in members if member.address == address), None)

    def is_reported_down(self, address: str) -> bool:
        """Whether a finding reports that the process at an address does not run (rule 1)."""
        member = self.member_at(address)
        return member is not None and member.state != "up"

    def start_command(self, kind: str, address: str = "") -> str:
        """Return the command that starts a process, or restarts a process that hangs."""
        local, member = self.facts.local, self.member_at(address)
        if local is None or (address and member is None):
            return f"waltz-core {kind} run --config {_CONFIG_FILE_NAMES[kind]}"
        up_command = f"waltz-core local up --directory {shlex.quote(local.directory)}"
        return (
            f"kill -9 {member.pid}; {up_command}" if member and member.state == "up" else up_command
        )

    def start_command_with_option(self, kind: str, option: str, *, archive: str) -> str:
        """Return the command that starts a process with an option, or restarts a local cluster."""
        local = self.facts.local
        if local is None:
            return f"waltz-core {kind} run --config {_CONFIG_FILE_NAMES[kind]} {option}"
        directory = f"--directory {shlex.quote(local.directory)}"
        up_command = f"waltz-core local up {directory} --archive {archive}"
        return f"waltz-core local down {directory} && {up_command}"

    def rebuild_steps(self, rebuild: str, *before: str) -> str:
        """Return the shell commands that stop the processes, rebuild the znodes and start again."""
        local = self.facts.local
        if local is None:
            return " && ".join([*before, rebuild])
        directory = f"--directory {shlex.quote(local.directory)}"
        steps = [f"waltz-core local down --keep-zookeeper {directory}", *before]
        rebuild_and_start = f"{{ {rebuild} & waltz-core local up {directory}; wait $!; }}"
        return " && ".join([*steps, f"{rebuild} --only-znodes", rebuild_and_start])

    def _report_lost_cluster(self, local: LocalFacts) -> None:
        """Report that ZooKeeper no longer has the cluster of this machine."""
        storages = [member for member in local.members if member.name.startswith("storage")]
        directory = shlex.quote(local.directory)
        option_texts = [f"--from-directory {directory}/{storages[0].name} --replicas COUNT"]
        option_texts += [f"--storage {member.address}:{member.admin_port}" for member in storages]
        connect = f"--connect {self.connect}"
        rebuild = (
            f"waltz-core cluster rebuild-metadata {connect} --name local {' '.join(option_texts)}"
        )
        self.add_finding(
            "cluster-lost",
            self.facts.connect,
            directory=directory,
            rebuild=self.rebuild_steps(rebuild),
        )

    def check_zookeeper(self) -> None:
        facts = self.facts
        start = self.start_command("zookeeper")
        if facts.zookeeper_failure:
            self.add_finding(
                "zookeeper-unavailable", facts.connect, why=facts.zookeeper_failure, start=start
            )
        for server in facts.zookeeper_servers:
            self._check_zookeeper_server(server)
        if facts.access_error:
            hosts = facts.connect.partition("?")[0]
            self.add_finding(
                "zookeeper-access-denied", facts.connect, why=facts.access_error, hosts=hosts
            )
        if facts.is_cluster_missing:
            if facts.local is None:
                self.add_finding("no-cluster", facts.connect)
            else:
                self._report_lost_cluster(facts.local)

    def _check_zookeeper_server(self, server: ZooKeeperServerFacts) -> None:
        start = self.start_command("zookeeper", server.address)
        if server.failure and not self.is_reported_down(server.address):
            self.add_finding(
                "zookeeper-server-unavailable",
                server.address,
                server=server.address,
                why=server.failure,
                start=start,
            )
        elif not server.failure and not server.mode:
            self.add_finding(
                "zookeeper-server-without-quorum",
                server.address,
                server=server.address,
                start=start,
            )

    def check_processes(self) -> None:
        local = self.facts.local
        for member in () if local is None else local.members:
            if member.state == "up":
                continue
            if self.facts.is_cluster_missing and not member.name.startswith("zookeeper"):
                continue  # rule 1: without its cluster, none of the processes can run
            assert local is not None
            name = "process-down" if member.state == "down" else "process-stopped"
            directory = shlex.quote(local.directory)
            self.add_finding(
                name, member.name, member=member.name, pid=member.pid, directory=directory
            )


class _ClusterDiagnosis:
    """Adds the findings about one cluster to a diagnosis."""

    def __init__(self, diagnosis: _Diagnosis, cluster: ClusterFacts) -> None:
        self._diagnosis = diagnosis
        self._cluster = cluster
        self._add_finding = diagnosis.add_finding
        self.left_over_partitions: dict[ReplicaId, list[PartitionId]] = {}

    def check(self) -> None:
        for server in self._cluster.servers.values():
            self._check_server(server)
        self._check_assignment()
        for storage in self._cluster.storages.values():
            self._check_storage(storage)
        storages = self._cluster.storages.values()
        if storages and all(storage.is_tls_mismatch or storage.is_denied for storage in storages):
            return  # rule 1: the states of the storages are unknown
        self._check_append_latencies()
        self._check_archive()
        partitions_in_too_few_groups = replica_steps.partitions_in_too_few_groups(
            self._cluster.assigned_replicas, self._cluster.storage_groups
        )
        for number in range(self._cluster.partition_count):
            partition_id = PartitionId(number)
            _PartitionDiagnosis(self._diagnosis, self._cluster, self, partition_id).check()
            if partition_id in partitions_in_too_few_groups:
                spread = self._spread_command(partition_id)
                self._add_finding(
                    "replicas-share-group", partition_id, partition=partition_id, spread=spread
                )
        for address, partitions in self.left_over_partitions.items():
            names = _ranges_text(partitions)
            self._add_finding("replica-left-over", address, storage=address, partitions=names)

    # --- servers

    def _check_server(self, server: ServerFacts) -> None:
        address = server.address
        if server.is_excluded_as_unreachable:
            reason = "; ".join(server.connection_errors) or "none has connected to it yet"
            self._add_finding("server-unreachable", address, server=address, why=reason)
        if server.failure:
            if not self._diagnosis.is_reported_down(address):
                name = "server-silent" if server.is_silent else "server-unavailable"
                if server.is_tls_mismatch:
                    name = "server-tls-failed"
                if server.is_denied:
                    name = "server-access-denied"
                start, reason = self._diagnosis.start_command("server", address), server.failure
                self._add_finding(name, address, server=address, why=reason, start=start)
            return
        for storage in server.unreachable_storages:
            storage_facts = self._cluster.storages.get(storage)
            if (
                storage_facts is not None
                and not storage_facts.failure
                and storage_facts.belongs_to_cluster
            ):
                subject = f"{address} {storage}"
                self._add_finding("storage-out-of-reach", subject, server=address, storage=storage)

    def _check_assignment(self) -> None:
        cluster = self._cluster
        if not cluster.servers:
            self._add_finding("no-server", "servers", start=self._diagnosis.start_command("server"))
            return
        leader = cluster.servers[min(cluster.servers)]
        if not cluster.is_assignment_settled:
            if not leader.failure:  # a failure has its own finding, with the same command
                start = self._diagnosis.start_command("server", leader.address)
                self._add_finding(
                    "assignment-stale", leader.address, server=leader.address, start=start
                )
            return
        for server in cluster.servers.values():
            for partition_id in server.preferred_partitions:
                owner = PartitionCondition(cluster, partition_id).owner
                if (
                    owner is None
                    or owner is server
                    or partition_id not in owner.preferred_partitions
                ):
                    continue
                self._add_finding(
                    "preference-not-granted",
                    f"{partition_id} {server.address}",
                    partition=partition_id,
                    server=server.address,
                    owner=owner.address,
                )

    # --- storages

    def _failure_finding_name(self, storage: StorageFacts) -> str:
        if storage.is_denied:
            return "storage-access-denied"
        if storage.is_tls_mismatch:
            return "storage-tls-failed"
        if self.is_starting(storage):
            return "storage-starting"
        if storage.registered_storage_id is None:
            return "storage-never-started"
        return "storage-silent" if storage.is_silent else "storage-unavailable"

    def _check_storage(self, storage: StorageFacts) -> None:
        address = storage.address
        start = self._diagnosis.start_command("storage", address)
        if storage.failure and self._diagnosis.is_reported_down(address):
            return
        if storage.failure or storage.is_denied:
            name, reason = (
                self._failure_finding_name(storage),
                storage.failure or storage.admin_failure,
            )
            self._add_finding(name, address, storage=address, why=reason, start=start)
        elif not storage.belongs_to_cluster:
            self._add_finding("storage-cluster-mismatch", address, storage=address, start=start)
        elif storage.storage_id is not None and storage.storage_id != storage.registered_storage_id:
            self._add_finding(
                "storage-id-mismatch",
                address,
                storage=address,
                found=storage.storage_id,
                expected=storage.registered_storage_id or "none",
            )
        elif storage.is_hanging:
            reason = storage.admin_failure
            self._add_finding(
                "storage-unresponsive", address, storage=address, why=reason, start=start
            )
        elif storage.admin_failure:
            self._add_finding(
                "admin-port-wrong",
                address,
                storage=address,
                admin=storage.admin_address,
                why=storage.admin_failure,
                port=storage.found_admin_port or "ADMIN_PORT",
            )
        else:
            self._check_disk_and_clock(storage)

    def is_starting(self, storage: StorageFacts) -> bool:
        """Whether a storage is starting (no port is open yet), so that it must not be stopped."""
        member = self._diagnosis.member_at(storage.address)
        is_running = member is not None and member.state == "up"
        return bool(storage.failure) and is_running and not storage.is_silent

    def _check_disk_and_clock(self, storage: StorageFacts) -> None:
        """Report a disk that is full or will be full soon, and a wrong clock."""
        partition_ids = [
            partition_id
            for partition_id, names in self._cluster.assigned_replicas.items()
            if storage.address in names
        ]
        disk = storage.disk
        if disk is not None and partition_ids and _is_nearly_full(disk):
            self._add_finding(
                "disk-full" if disk.is_full else "disk-nearly-full",
                storage.address,
                storage=storage.address,
                free=disk.free_bytes // MIB,
                drain=self.drain_command(storage.address, partition_ids),
            )
        elif disk is not None and partition_ids and disk.filling_bytes_per_day:
            days = disk.days_until_full
            if days is not None and days < FULL_SOON_DAYS_MAX:
                self._add_finding(
                    "disk-full-soon",
                    storage.address,
                    storage=storage.address,
                    days=f"{days:.1f}",
                    free=disk.free_bytes // MIB,
                    rate=disk.filling_bytes_per_day // MIB,
                    drain=self.drain_command(storage.address, partition_ids),
                )
        ahead = storage.clock_ahead_ms
        if ahead is not None and abs(ahead) > CLOCK_DIFFERENCE_MS_MAX:
            self._add_finding(
                "storage-clock-skew",
                storage.address,
                storage=storage.address,
                seconds=f"{abs(ahead) / 1000:.1f}",
                direction="ahead of" if ahead > 0 else "behind",
            )

    # --- the archive

    def _check_archive(self) -> None:
        """Report problems of the archive; without problems, transactions that the archive lacks."""
        storages = [
            each
            for each in self._cluster.storages.values()
            if each.belongs_to_cluster and not (each.failure or each.admin_failure)
        ]
        urls = ["" if each.archive is None else each.archive.url for each in storages]
        usual_url = max(urls, key=lambda each: (bool(each), urls.count(each), each), default="")
        archived = [
            partition_id
            for partition_id, each in self._cluster.partitions.items()
            if each.archived_mark
        ]
        if storages and archived and not usual_url:
            self._add_finding(
                "archive-url-missing",
                subject="archive",
                partitions=_ranges_text(archived),
                start=self._diagnosis.start_command_with_option(
                    "storage", "--archive-url URL", archive="URL"
                ),
            )
            return
        differing_storages = [
            each for each, url in zip(storages, urls, strict=True) if url != usual_url
        ]
        quoted_url = shlex.quote(usual_url)
        for storage in differing_storages:
            self._add_finding(
                "archive-settings-differ",
                storage.address,
                storage=storage.address,
                found=storage.archive.url if storage.archive else "(none)",
                expected=usual_url,
                start=self._diagnosis.start_command_with_option(
                    "storage", f"--archive-url {quoted_url}", archive=quoted_url
                ),
            )
        working = [each for each in storages if each.archive and each.archive.url == usual_url]
        lags_s = self._excessive_archive_lags_s(working)
        if not self._check_uploads(working, is_lagging=bool(lags_s)) and not differing_storages:
            self._check_archive_lag(usual_url, lags_s)

    def _excessive_archive_lags_s(
        self, storages: Iterable[StorageFacts]
    ) -> dict[PartitionId, float]:
        """Return the lags over the limit, in seconds by partition; empty if no owner archives."""
        partitions = self._cluster.partitions
        interval_ms = max((each.archive_interval_ms for each in partitions.values()), default=0)
        if interval_ms == 0:
            return {}
        age_ms = max((each.archive.age_ms for each in storages if each.archive), default=0)
        limit_s = (
            ARCHIVE_LAG_AGE_FACTOR * age_ms / 1000 + interval_ms / 1000 + ARCHIVE_UPLOAD_TIME_S
        )
        lags_s = {each: facts.oldest_unarchived_age_s or 0.0 for each, facts in partitions.items()}
        return {each: lag_s for each, lag_s in lags_s.items() if lag_s > limit_s}

    def _check_uploads(self, storages: Iterable[StorageFacts], *, is_lagging: bool) -> bool:
        """Report damage and failed writes of the archive; return whether a finding was added.

        All storages use the same object store. So the same damage at several storages is one
        finding, and all failures to write together are one finding. If everything is archived, the
        last failure of a storage is not reported, because the storage tries again when there is
        something to archive. If the archive lags, a single failure is sufficient for a finding.
        """
        damage: dict[str, list[ReplicaId]] = {}
        failed: dict[ReplicaId, ArchiveFacts] = {}
        failures_min = 1 if is_lagging else ARCHIVE_FAILURES_MIN
        for storage in storages:
            archive = storage.archive
            assert archive is not None
            partitions = self._cluster.partitions
            has_unarchived = any(
                partitions[partition_id].unarchived_count for partition_id in storage.replicas
            )
            has_failed = has_unarchived and bool(archive.error)
            if archive.read_damage or (has_failed and archive.is_damaged):
                reason = archive.read_damage or archive.error
                damage.setdefault(reason, []).append(storage.address)
            elif has_failed and archive.failure_count >= failures_min:
                failed[storage.address] = archive
        for reason, addresses in damage.items():
            names = ", ".join(addresses)
            self._add_finding("archive-damaged", names, storages=names, why=reason)
        if failed:
            names, worst_archive = (
                ", ".join(failed),
                max(failed.values(), key=lambda facts: facts.failure_count),
            )
            fields = {"why": worst_archive.error, "count": worst_archive.failure_count}
            self._add_finding("archive-unavailable", names, storages=names, **fields)
        return bool(damage or failed)

    def _check_archive_lag(self, url: str, lags_s: Mapping[PartitionId, float]) -> None:
        partitions = self._cluster.partitions
        if url and all(partition.archived_mark is None for partition in partitions.values()):
            if any(partition.unarchived_count for partition in partitions.values()):
                option = "--archive-interval-ms 10000"
                start = self._diagnosis.start_command_with_option(
                    "server", option, archive=shlex.quote(url)
                )
                self._add_finding("archive-idle", url, url=url, start=start)
            return
        for partition_id, lag_s in lags_s.items():
            count, hours = partitions[partition_id].unarchived_count, f"{lag_s / 3600:.1f}"
            fields = {"partition": partition_id, "count": count, "hours": hours}
            self._add_finding("archive-lagging", partition_id, **fields)

    def _check_append_latencies(self) -> None:
        """Compare the times that storages take to answer appends; report slow storages."""
        latencies: dict[ReplicaId, list[tuple[int, int]]] = {}
        for server in self._cluster.servers.values():
            for address, latency in server.append_latencies.items():
                latencies.setdefault(address, []).append(latency)
        times_ms: dict[ReplicaId, float] = {}
        for address, server_latencies in latencies.items():
            seconds = sum(count for count, _ in server_latencies)
            if seconds >= SLOW_APPEND_SECONDS_MIN and address in self._cluster.storages:
                times_ms[address] = (
                    sum(count * latency_us for count, latency_us in server_latencies)
                    / seconds
                    / 1000
                )
        for address, time_ms in times_ms.items():
            other_times_ms = [mean_ms for name, mean_ms in times_ms.items() if name != address]
            if (
                not other_times_ms
                or time_ms < SLOW_APPEND_MS_MIN
                or self._cluster.storages[address].failure
            ):
                continue
            ratio = time_ms / max(1.0, median(other_times_ms))
            if ratio >= SLOW_APPEND_RATIO_MIN:
                fields = {"latency_ms": round(time_ms), "ratio": round(ratio)}
                self._add_finding("storage-slow", address, storage=address, **fields)

    def _can_take_replicas(self, storage: StorageFacts) -> bool:
        """Whether a storage can take more replicas: it answers, and its disk is not nearly full."""
        disk = storage.disk
        return not (
            storage.failure or storage.admin_failure or disk is None or _is_nearly_full(disk)
        )

    def _spread_command(self, partition_id: PartitionId) -> str:
        """Return the command that spreads the replicas of a partition over more groups."""
        groups, connect = self._cluster.storage_groups, self._diagnosis.connect
        used_groups = {groups.get(each) for each in self._cluster.assigned_replicas[partition_id]}
        other_storages = [
            each for each in self._cluster.storages.values() if self._can_take_replicas(each)
        ]
        if any(groups.get(each.address) not in used_groups for each in other_storages):
            return f"waltz-core cluster auto-assign --connect {connect}"
        group = min(each for each in groups.values() if each not in used_groups)
        return f"waltz-core cluster add-storage HOST:PORT --group {group} --connect {connect}"

    def drain_command(self, address: ReplicaId, partitions: Collection[PartitionId]) -> str:
        """Return the command that moves replicas to the storage that can take the most of them."""

        def movable_partitions(name: ReplicaId) -> list[PartitionId]:
            return [
                each for each in partitions if name not in self._cluster.assigned_replicas[each]
            ]

        group = self._cluster.storage_groups.get(address)
        candidates = [
            each.address
            for each in self._cluster.storages.values()
            if self._can_take_replicas(each)
        ]
        candidates = [each for each in candidates if each != address and movable_partitions(each)]
        if not candidates:
            return f"waltz-core cluster add-storage HOST:PORT --connect {self._diagnosis.connect}"
        target = max(
            candidates,
            key=lambda each: (
                self._cluster.storage_groups.get(each) == group,
                len(movable_partitions(each)),
            ),
        )
        return (
            f"waltz-core cluster move-replica {_ranges_text(movable_partitions(target))} "
            f"{address} {target} --connect {self._diagnosis.connect}"
        )

    def move_command(self, partition_id: PartitionId, owner: ServerFacts) -> str:
        """Return the command that moves a partition, or restarts the only server."""
        other_servers = [
            server.address
            for server in self._cluster.servers.values()
            if server is not owner and not server.failure
        ]
        if not other_servers:
            return self._diagnosis.start_command("server", owner.address)
        return (
            f"waltz-core cluster prefer {partition_id} {other_servers[0]} "
            f"--connect {self._diagnosis.connect}"
        )

    def rebuild_command(self, replica_count: int | None) -> str:
        """Return the command that rebuilds the znodes; without a replica count, the user adds it.

        The doctor does not guess this count. With a count that is too small, the command would
        trust too few replicas.
        """
        cluster, connect = self._cluster, self._diagnosis.connect
        option_texts = [
            f"--name {shlex.quote(cluster.name)} --cluster-key {cluster.cluster_key}",
            f"--partitions {cluster.partition_count} --replicas {replica_count or 'COUNT'}",
        ]
        for storage in self._cluster.storages.values():
            option_texts.append(
                f"--storage {storage.address}:{split_address(storage.admin_address)[1]}"
            )
            group = self._cluster.storage_groups.get(storage.address)
            option_texts[-1] += "" if group is None else f":{group}"
        rebuild = (
            f"waltz-core cluster rebuild-metadata --connect {connect} {' '.join(option_texts)}"
        )
        if replica_count is None:
            return rebuild  # the znodes exist, and processes may run
        delete = f"waltz-core cluster delete {shlex.quote(cluster.name)} --connect {connect}"
        return self._diagnosis.rebuild_steps(rebuild, delete)


class _PartitionDiagnosis:
    """Adds the findings about one partition to a diagnosis."""

    def __init__(
        self,
        diagnosis: _Diagnosis,
        cluster: ClusterFacts,
        cluster_diagnosis: _ClusterDiagnosis,
        partition_id: PartitionId,
    ) -> None:
        self._diagnosis, self._cluster, self._cluster_diagnosis, self._partition_id = (
            diagnosis,
            cluster,
            cluster_diagnosis,
            partition_id,
        )
        self._condition = PartitionCondition(cluster, partition_id)

    def check(self) -> None:
        if self._check_metadata():
            return
        if not self._condition.assigned_replicas:
            self._add_finding("no-replicas")
            return
        self._check_replica_count()
        for storage in self._condition.assigned_storages:
            self._check_replica(storage)
        can_open_session = self._check_quorum()
        self._check_owner(can_open_session=can_open_session)
        self._check_left_over_replicas()

    def _add_finding(self, name: str, subject: object = "", **fields: object) -> None:
        subject = f"{self._partition_id} {subject}".strip()
        self._diagnosis.add_finding(name, subject, partition=self._partition_id, **fields)

    # --- replicas

    def _check_left_over_replicas(self) -> None:
        """Record storages that still have files of the partition, but no replica assigned."""
        condition, metadata = self._condition, self._condition.facts.metadata
        if metadata is None or not condition.has_open_session or condition.not_engaged_replicas:
            return  # rule 5: not all replicas are engaged in an open session
        for storage in self._cluster.storages.values():
            replica = storage.replicas.get(self._partition_id)
            is_wanted = (
                storage.address in condition.assigned_replicas or storage.address in metadata.states
            )
            if replica is None or not replica.is_present or is_wanted:
                continue
            if (
                replica.last_id <= condition.last_id
                and replica.last_session_id <= metadata.session_id
            ):
                self._cluster_diagnosis.left_over_partitions.setdefault(storage.address, []).append(
                    self._partition_id
                )

    def _check_replica_count(self) -> None:
        counts = [len(replicas) for replicas in self._cluster.assigned_replicas.values()]
        usual_count = max(counts, key=lambda replicas: (counts.count(replicas), replicas))
        count = len(self._condition.assigned_replicas)
        if count < usual_count:
            self._add_finding("too-few-replicas", count=count, usual=usual_count)

    def _check_metadata(self) -> bool:
        """Report metadata that ZooKeeper has lost; return whether it was lost."""
        if rebuilding.is_undecided(self._condition.facts.metadata, self._condition.facts.marker):
            # The assignment contains only the replicas that the rebuilding has already chosen, not
            # the former ones.
            self._add_finding(
                "rebuilding-unfinished", rebuild=self._cluster_diagnosis.rebuild_command(None)
            )
            return True
        if self._condition.is_metadata_lost:
            counts = map(len, self._cluster.assigned_replicas.values())
            self._add_finding(
                "metadata-lost",
                rebuild=self._cluster_diagnosis.rebuild_command(max(counts, default=0)),
            )
            return True
        return False

    def _check_replica(self, storage: StorageFacts) -> None:
        replica, address = storage.replicas.get(self._partition_id), storage.address
        if replica is None or storage.failure:
            return
        unavailable = unavailable_reason(replica)
        if unavailable is None:
            self._check_log(storage, replica)
        else:
            start = self._diagnosis.start_command("storage", address)
            self._add_finding(
                FINDING_NAME_BY_REASON[unavailable],
                address,
                storage=address,
                why=replica.open_error,
                start=start,
            )

    def _check_log(self, storage: StorageFacts, replica: ReplicaFacts) -> None:
        condition, address = self._condition, storage.address
        if replica.damaged_count:
            self._add_finding(
                "replica-damaged", address, storage=address, count=replica.damaged_count
            )
        if replica.is_suspect:
            if not condition.has_no_trusted_quorum:
                self._add_finding("replica-suspect", address, storage=address)
        elif condition.has_open_session and address in condition.not_engaged_replicas:
            full = storage.disk is not None and storage.disk.is_full
            if not full and address in condition.replica_states:
                self._add_finding(
                    "replica-not-engaged", address, storage=address, last=replica.last_id
                )
        elif (
            condition.has_open_session
            and condition.last_id - replica.last_id > LAG_TRANSACTIONS_MAX
        ):
            count = condition.last_id - replica.last_id
            drain = self._cluster_diagnosis.drain_command(address, [self._partition_id])
            self._add_finding("replica-lagging", address, storage=address, count=count, drain=drain)

    # --- the quorum (rule 3)

    def _check_quorum(self) -> bool:
        """Report a missing quorum; return whether the replicas permit an open session."""
        condition, count = self._condition, len(self._condition.assigned_replicas)
        if len(condition.answering_replicas) < condition.quorum_size:
            # Propose to restart only storages that do not answer. Replicas that are offline, and
            # logs that cannot be opened, have their own findings.
            unavailable = [
                storage.address
                for storage in condition.assigned_storages
                if storage.failure and not self._cluster_diagnosis.is_starting(storage)
            ]
            doctor = f"waltz-core doctor --connect {self._diagnosis.connect}"
            self._add_finding(
                "no-quorum",
                count=count,
                answering=len(condition.answering_replicas),
                quorum=condition.quorum_size,
                start=self._diagnosis.start_command("storage", unavailable[0])
                if unavailable
                else doctor,
            )
            return False
        if condition.has_no_trusted_quorum:
            trusted_count = count - len(condition.suspect_replicas)
            self._add_finding(
                "no-trusted-quorum",
                count=count,
                trusted=trusted_count,
                quorum=condition.quorum_size,
            )
            return False
        return len(condition.replicas_of_unknown_state) < condition.quorum_size

    # --- the owner

    def _check_owner(self, *, can_open_session: bool) -> None:
        condition, owner = self._condition, self._condition.owner
        if owner is None:
            if self._cluster.servers and self._cluster.is_assignment_settled:
                self._add_finding(
                    "partition-without-server", start=self._diagnosis.start_command("server")
                )
            return
        for other_server in self._cluster.servers.values():
            if (
                other_server is not owner
                and self._partition_id in other_server.served_partitions
                and self._cluster.is_assignment_settled
            ):
                start = self._diagnosis.start_command("server", other_server.address)
                fields = {"server": other_server.address, "owner": owner.address, "start": start}
                self._add_finding("partition-served-by-another", other_server.address, **fields)
        if owner.failure or not self._cluster.is_assignment_settled:
            return
        fields = {
            "server": owner.address,
            "move": self._cluster_diagnosis.move_command(self._partition_id, owner),
        }
        if not condition.is_served:
            self._add_finding("partition-not-served", **fields)
        elif not condition.has_open_session:
            if can_open_session:
                was_opened = condition.replicas.was_ever_opened
                self._add_finding("session-not-open" if was_opened else "never-opened", **fields)
        else:
            self._check_session(owner, fields)

    def _check_session(self, owner: ServerFacts, fields: dict[str, str]) -> None:
        facts = self._condition.facts
        if self._condition.has_outdated_session_replicas:
            assigned, replicas = (
                ", ".join(self._condition.assigned_replicas),
                ", ".join(self._condition.replica_states),
            )
            self._add_finding(
                "session-replicas-outdated", assigned=assigned, replicas=replicas, **fields
            )
        if facts.high_water_mark_error:
            self._add_finding("high-water-mark-unknown", why=facts.high_water_mark_error, **fields)
        if (
            facts.commit_stamp_ahead_ms is not None
            and facts.commit_stamp_ahead_ms > CLOCK_DIFFERENCE_MS_MAX
        ):
            seconds = f"{facts.commit_stamp_ahead_ms / 1000:.1f}"
            self._add_finding("server-clock-skew", owner.address, seconds=seconds, **fields)


def _is_nearly_full(disk: DiskFacts) -> bool:
    """Whether the free space is below the limit, or the disk is full."""
    free_bytes_min = NEARLY_FULL_FREE_BYTES_DEFAULT
    if disk.size_bytes is not None:
        free_bytes_min = max(
            disk.size_bytes // NEARLY_FULL_SIZE_DIVISOR, NEARLY_FULL_FREE_BYTES_MIN
        )
    return disk.is_full or disk.free_bytes < free_bytes_min


def _ranges_text(partitions: Iterable[int]) -> str:
    """Return partitions as ranges, in the syntax of commands: 0-6,9."""
    runs: list[list[int]] = []
    for partition_id in sorted(partitions):
        if runs and runs[-1][1] == partition_id - 1:
            runs[-1][1] = partition_id
        else:
            runs.append([partition_id, partition_id])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
