"""Derives findings from the facts that the doctor has collected.

The module uses no sockets and no clock, so that each finding can be tested without a cluster.

Rules:
    1. A cause is reported, but its mere consequences are not. For example, if a storage does not
       answer, there is no finding that servers cannot reach it.
    2. Unknown is not wrong: if a process could not be queried, this is the only finding about it.
    3. The loss of a quorum is always reported, whatever the cause, because it stops appends.
    4. Findings are in the order of the table in `findings.py`, then in the order of their objects.
    5. Deleting files is proposed only for a log with an open session in which all of its replicas
       are engaged. If ZooKeeper is wrong about the replicas, files that it does not name may be the
       only copy.
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
    Facts,
    LocalFacts,
    MemberFacts,
    ReplicaFacts,
    ServerFacts,
    SpaceFacts,
    StorageFacts,
    ZooKeeperServerFacts,
)
from waltz_core.ops.findings import KINDS, Finding, finding
from waltz_core.records.record import PartitionId, ReplicaId

MIB: Final = 1024 * 1024
# The clocks of machines with NTP differ by less. No decision depends on clocks.
CLOCK_MS_MAX: Final = 1_000
# A disk is nearly full below a twentieth of its size, which leaves the same time on large and small
# disks. The minimum is four times the default reserve: without it, a small disk would be full, and
# reject appends, before it counts as nearly full.
NEARLY_FULL_PART: Final = 20
NEARLY_FULL_BYTES_MIN: Final = 256 * MIB
NEARLY_FULL_BYTES: Final = 1024 * MIB  # for an older storage that does not report its disk size
# The lag of a replica that receives its records from memory is below this number of transactions.
LAG_MAX: Final = 100_000
# A storage is slow if it takes this many times as long to answer an append as the others, over at
# least this number of seconds with appends. No application notices a time below SLOW_MS_MIN.
SLOW_TIMES_MIN: Final = 5
SLOW_MS_MIN: Final = 50
SLOW_SECONDS_MIN: Final = 10
# If fewer days are left, there may be no time to add a storage or to archive.
FULL_SOON_DAYS: Final = 7
# One failure may be a throttled request. The next attempt uses another storage.
ARCHIVE_FAILURES_MIN: Final = 2
# A transaction is archived at the first attempt after `archive_age_ms`, when earlier ranges are
# done. So the limit is twice the age, plus the interval between attempts, plus an hour for uploads.
ARCHIVE_LAG_AGES: Final = 2
ARCHIVE_LAG_S: Final = 3_600
FINDING_OF_REASON: Final = {
    UnavailableReason.OFFLINE: "replica-offline",
    UnavailableReason.NOT_HELD: "replica-not-held",
    UnavailableReason.OPENING: "replica-opening",
    UnavailableReason.UNREADABLE: "replica-unreadable",
    UnavailableReason.STUCK: "replica-stuck",
}
_CONFIGS: Final = {"zookeeper": "zoo.cfg", "server": "server.toml", "storage": "storage.toml"}


def diagnose(facts: Facts) -> list[Finding]:
    """Return a finding for every problem in the facts, in the order of rule 4."""
    case = _Diagnosis(facts)
    case.check_zookeeper()
    case.check_processes()
    if facts.cluster is not None:
        _ClusterDiagnosis(case, facts.cluster).check()
    order = list(KINDS)
    return sorted(case.found, key=lambda each: order.index(each.name))


def summary(facts: Facts) -> str:
    """Return a summary of the cluster, for a report without findings."""
    cluster = facts.cluster
    assert cluster is not None
    replicas = sorted({len(each) for each in cluster.assigned.values()})
    return (
        f"{_count(len(cluster.servers), 'server')}, {_count(len(cluster.storages), 'storage')}, "
        f"{_count(cluster.partition_count, 'partition')} with "
        f"{' or '.join(map(str, replicas))} replica{'' if replicas == [1] else 's'} each, "
        f"{_count(len(facts.zookeeper_servers), 'ZooKeeper server')}"
    )


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


@dataclass(slots=True)
class _Diagnosis:
    """The findings so far, and the commands that start processes of the cluster."""

    facts: Facts
    found: list[Finding] = field(default_factory=list)

    def report(self, name: str, about: object, **fields: object) -> None:
        places = {
            "connect": self.connect,
            "scheme_free": self.scheme_free,
            "with_token": self.with_token,
        }
        self.found.append(finding(name, about, **places, **fields))

    @property
    def scheme_free(self) -> str:
        """The connect string with a placeholder for the file with TLS settings."""
        return shlex.quote(str(replace(parse_connect_string(self.facts.connect), tls="FILE")))

    @property
    def with_token(self) -> str:
        """The connect string with a placeholder for the file with another token."""
        place = parse_connect_string(self.facts.connect)
        place = replace(place, token_file="FILE", token_env="")  # noqa: S106 - no secret
        return shlex.quote(str(place))

    @property
    def connect(self) -> str:
        """The connect string, quoted for a shell."""
        return shlex.quote(self.facts.connect)

    def member_at(self, address: str) -> MemberFacts | None:
        """Return the process of the cluster on this machine at an address; None if unknown."""
        members = () if self.facts.local is None else self.facts.local.members
        return next((each for each in members if each.address == address), None)

    def is_reported_down(self, address: str) -> bool:
        """Whether a finding reports that the process at an address does not run (rule 1)."""
        member = self.member_at(address)
        return member is not None and member.state != "up"

    def start(self, kind: str, address: str = "") -> str:
        """Return the command that starts a process, or restarts a process that hangs."""
        local, member = self.facts.local, self.member_at(address)
        if local is None or (address and member is None):
            return f"waltz-core {kind} run --config {_CONFIGS[kind]}"
        up = f"waltz-core local up --directory {shlex.quote(local.directory)}"
        return f"kill -9 {member.pid}; {up}" if member and member.state == "up" else up

    def start_with(self, kind: str, option: str, *, archive: str) -> str:
        """Return the command that starts a process with an option; locally, all with an archive."""
        local = self.facts.local
        if local is None:
            return f"waltz-core {kind} run --config {_CONFIGS[kind]} {option}"
        directory = f"--directory {shlex.quote(local.directory)}"
        up = f"waltz-core local up {directory} --archive {archive}"
        return f"waltz-core local down {directory} && {up}"

    def rebuild_steps(self, rebuild: str, *before: str) -> str:
        """Return the steps with `rebuild-metadata`: no process may run before the znodes exist."""
        local = self.facts.local
        if local is None:
            return " && ".join([*before, rebuild])
        directory = f"--directory {shlex.quote(local.directory)}"
        steps = [f"waltz-core local down --keep-zookeeper {directory}", *before]
        together = f"{{ {rebuild} & waltz-core local up {directory}; wait $!; }}"
        return " && ".join([*steps, f"{rebuild} --only-znodes", together])

    def _report_lost(self, local: LocalFacts) -> None:
        """Report that ZooKeeper no longer has the cluster of this machine."""
        storages = [each for each in local.members if each.name.startswith("storage")]
        directory = shlex.quote(local.directory)
        words = [f"--from-directory {directory}/{storages[0].name} --replicas COUNT"]
        words += [f"--storage {each.address}:{each.admin_port}" for each in storages]
        connect = f"--connect {self.connect}"
        rebuild = f"waltz-core cluster rebuild-metadata {connect} --name local {' '.join(words)}"
        self.report(
            "cluster-lost",
            self.facts.connect,
            directory=directory,
            rebuild=self.rebuild_steps(rebuild),
        )

    def check_zookeeper(self) -> None:
        facts = self.facts
        start = self.start("zookeeper")
        if facts.zookeeper_failure:
            self.report(
                "zookeeper-unavailable", facts.connect, why=facts.zookeeper_failure, start=start
            )
        for server in facts.zookeeper_servers:
            self._check_zookeeper_server(server)
        if facts.access_error:
            hosts = facts.connect.partition("?")[0]
            self.report(
                "zookeeper-access-denied", facts.connect, why=facts.access_error, hosts=hosts
            )
        if facts.is_no_cluster:
            if facts.local is None:
                self.report("no-cluster", facts.connect)
            else:
                self._report_lost(facts.local)

    def _check_zookeeper_server(self, server: ZooKeeperServerFacts) -> None:
        start = self.start("zookeeper", server.address)
        if server.failure and not self.is_reported_down(server.address):
            self.report(
                "zookeeper-server-unavailable",
                server.address,
                server=server.address,
                why=server.failure,
                start=start,
            )
        elif not server.failure and not server.mode:
            self.report(
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
            if self.facts.is_no_cluster and not member.name.startswith("zookeeper"):
                continue  # rule 1: without its cluster, none of the processes can run
            assert local is not None
            name = "process-down" if member.state == "down" else "process-stopped"
            where = shlex.quote(local.directory)
            self.report(name, member.name, member=member.name, pid=member.pid, directory=where)


class _ClusterDiagnosis:
    """The findings about one cluster."""

    def __init__(self, case: _Diagnosis, cluster: ClusterFacts) -> None:
        self._case = case
        self._cluster = cluster
        self._report = case.report
        self.left_over: dict[ReplicaId, list[PartitionId]] = {}

    def check(self) -> None:
        for server in self._cluster.servers.values():
            self._check_server(server)
        self._check_assignment()
        for storage in self._cluster.storages.values():
            self._check_storage(storage)
        storages = self._cluster.storages.values()
        if storages and all(each.is_tls_mismatch or each.is_denied for each in storages):
            return  # rule 1: the states of the storages are unknown
        self._check_speed()
        self._check_archive()
        partitions_in_too_few_groups = replica_steps.partitions_in_too_few_groups(
            self._cluster.assigned, self._cluster.groups
        )
        for number in range(self._cluster.partition_count):
            partition_id = PartitionId(number)
            _PartitionDiagnosis(self._case, self._cluster, self, partition_id).check()
            if partition_id in partitions_in_too_few_groups:
                spread = self._spread_command(partition_id)
                self._report(
                    "replicas-share-group", partition_id, partition=partition_id, spread=spread
                )
        for address, partitions in self.left_over.items():
            names = _ranges(partitions)
            self._report("replica-left-over", address, storage=address, partitions=names)

    # --- servers

    def _check_server(self, server: ServerFacts) -> None:
        address = server.address
        if server.is_left_out:
            why = "; ".join(server.unreachable) or "none has connected to it yet"
            self._report("server-unreachable", address, server=address, why=why)
        if server.failure:
            if not self._case.is_reported_down(address):
                name = "server-silent" if server.is_silent else "server-unavailable"
                if server.is_tls_mismatch:
                    name = "server-tls-failed"
                if server.is_denied:
                    name = "server-access-denied"
                start, why = self._case.start("server", address), server.failure
                self._report(name, address, server=address, why=why, start=start)
            return
        for storage in server.out_of_reach:
            known = self._cluster.storages.get(storage)
            if known is not None and not known.failure and known.is_of_cluster:
                about = f"{address} {storage}"
                self._report("storage-out-of-reach", about, server=address, storage=storage)

    def _check_assignment(self) -> None:
        cluster = self._cluster
        if not cluster.servers:
            self._report("no-server", "servers", start=self._case.start("server"))
            return
        leader = cluster.servers[min(cluster.servers)]
        if not cluster.is_settled:
            if not leader.failure:  # a failure has its own finding, with the same command
                start = self._case.start("server", leader.address)
                self._report("assignment-stale", leader.address, server=leader.address, start=start)
            return
        for server in cluster.servers.values():
            for partition_id in server.preferred:
                owner = PartitionCondition(cluster, partition_id).owner
                if owner is None or owner is server or partition_id not in owner.preferred:
                    continue
                self._report(
                    "preference-not-granted",
                    f"{partition_id} {server.address}",
                    partition=partition_id,
                    server=server.address,
                    owner=owner.address,
                )

    # --- storages

    def _failure_name(self, storage: StorageFacts) -> str:
        if storage.is_denied:
            return "storage-access-denied"
        if storage.is_tls_mismatch:
            return "storage-tls-failed"
        if self.is_starting(storage):
            return "storage-starting"
        if storage.registered_id is None:
            return "storage-never-started"
        return "storage-silent" if storage.is_silent else "storage-unavailable"

    def _check_storage(self, storage: StorageFacts) -> None:
        address = storage.address
        start = self._case.start("storage", address)
        if storage.failure and self._case.is_reported_down(address):
            return
        if storage.failure or storage.is_denied:
            name, why = self._failure_name(storage), storage.failure or storage.admin_failure
            self._report(name, address, storage=address, why=why, start=start)
        elif not storage.is_of_cluster:
            self._report("storage-cluster-mismatch", address, storage=address, start=start)
        elif storage.storage_id is not None and storage.storage_id != storage.registered_id:
            self._report(
                "storage-id-mismatch",
                address,
                storage=address,
                found=storage.storage_id,
                expected=storage.registered_id or "none",
            )
        elif storage.is_hanging:
            why = storage.admin_failure
            self._report("storage-unresponsive", address, storage=address, why=why, start=start)
        elif storage.admin_failure:
            self._report(
                "admin-port-wrong",
                address,
                storage=address,
                admin=storage.admin,
                why=storage.admin_failure,
                port=storage.other_admin or "ADMIN_PORT",
            )
        else:
            self._check_machine(storage)

    def is_starting(self, storage: StorageFacts) -> bool:
        """Whether a storage's process runs but has no open port yet: no command may end it."""
        member = self._case.member_at(storage.address)
        is_running = member is not None and member.state == "up"
        return bool(storage.failure) and is_running and not storage.is_silent

    def _check_machine(self, storage: StorageFacts) -> None:
        held = [each for each, names in self._cluster.assigned.items() if storage.address in names]
        space = storage.space
        if space is not None and held and _is_nearly_full(space):
            self._report(
                "disk-full" if space.is_full else "disk-nearly-full",
                storage.address,
                storage=storage.address,
                free=space.free_bytes // MIB,
                empty=self.drain_command(storage.address, held),
            )
        elif space is not None and held and space.filling_bytes_per_day:
            days = space.free_bytes / space.filling_bytes_per_day
            if days < FULL_SOON_DAYS:
                self._report(
                    "disk-full-soon",
                    storage.address,
                    storage=storage.address,
                    days=f"{days:.1f}",
                    free=space.free_bytes // MIB,
                    rate=space.filling_bytes_per_day // MIB,
                    empty=self.drain_command(storage.address, held),
                )
        ahead = storage.clock_ahead_ms
        if ahead is not None and abs(ahead) > CLOCK_MS_MAX:
            self._report(
                "storage-clock-skew",
                storage.address,
                storage=storage.address,
                seconds=f"{abs(ahead) / 1000:.1f}",
                way="ahead of" if ahead > 0 else "behind",
            )

    # --- the archive

    def _check_archive(self) -> None:
        """Report why the archive does not work; if it works, report whether it lags (rule 1)."""
        storages = [
            each
            for each in self._cluster.storages.values()
            if each.is_of_cluster and not (each.failure or each.admin_failure)
        ]
        urls = ["" if each.archive is None else each.archive.url for each in storages]
        usual = max(urls, key=lambda each: (bool(each), urls.count(each), each), default="")
        archived = [
            partition_id for partition_id, each in self._cluster.partitions.items() if each.archived
        ]
        if storages and archived and not usual:
            self._report(
                "archive-url-missing",
                about="archive",
                partitions=_ranges(archived),
                start=self._case.start_with("storage", "--archive-url URL", archive="URL"),
            )
            return
        differing = [each for each, url in zip(storages, urls, strict=True) if url != usual]
        quoted = shlex.quote(usual)
        for storage in differing:
            self._report(
                "archive-settings-differ",
                storage.address,
                storage=storage.address,
                found=storage.archive.url if storage.archive else "(none)",
                expected=usual,
                start=self._case.start_with("storage", f"--archive-url {quoted}", archive=quoted),
            )
        working = [each for each in storages if each.archive and each.archive.url == usual]
        lags_s = self._archive_lags_s(working)
        if not self._check_uploads(working, is_lagging=bool(lags_s)) and not differing:
            self._check_archive_lag(usual, lags_s)

    def _archive_lags_s(self, storages: Iterable[StorageFacts]) -> dict[PartitionId, float]:
        """Return the lags over the limit, in seconds; none if no owner has archiving turned on."""
        partitions = self._cluster.partitions
        interval_ms = max((each.archive_interval_ms for each in partitions.values()), default=0)
        if interval_ms == 0:
            return {}
        age_ms = max((each.archive.age_ms for each in storages if each.archive), default=0)
        limit_s = ARCHIVE_LAG_AGES * age_ms / 1000 + interval_ms / 1000 + ARCHIVE_LAG_S
        lags_s = {each: found.unarchived_s or 0.0 for each, found in partitions.items()}
        return {each: lag_s for each, lag_s in lags_s.items() if lag_s > limit_s}

    def _check_uploads(self, storages: Iterable[StorageFacts], *, is_lagging: bool) -> bool:
        """Report damage and failed writes of the archive; return whether there was a finding.

        Storages share the object store and its files. So equal damage is one finding, and failures
        to write are one finding. If everything is archived, a storage's last failure does not
        matter: the storage tries again when there is something to archive. If the archive lags, a
        single failure is enough for a finding.
        """
        damage: dict[str, list[ReplicaId]] = {}
        failed: dict[ReplicaId, ArchiveFacts] = {}
        failures_min = 1 if is_lagging else ARCHIVE_FAILURES_MIN
        for storage in storages:
            archive = storage.archive
            assert archive is not None
            partitions = self._cluster.partitions
            waits = any(partitions[each].unarchived_count for each in storage.replicas)
            has_failed = waits and bool(archive.error)
            if archive.read_damage or (has_failed and archive.is_damaged):
                why = archive.read_damage or archive.error
                damage.setdefault(why, []).append(storage.address)
            elif has_failed and archive.failure_count >= failures_min:
                failed[storage.address] = archive
        for why, addresses in damage.items():
            names = ", ".join(addresses)
            self._report("archive-damaged", names, storages=names, why=why)
        if failed:
            names, worst = ", ".join(failed), max(failed.values(), key=lambda x: x.failure_count)
            fields = {"why": worst.error, "count": worst.failure_count}
            self._report("archive-unavailable", names, storages=names, **fields)
        return bool(damage or failed)

    def _check_archive_lag(self, url: str, lags_s: Mapping[PartitionId, float]) -> None:
        partitions = self._cluster.partitions
        if url and all(each.archived is None for each in partitions.values()):
            if any(each.unarchived_count for each in partitions.values()):
                option = "--archive-interval-ms 10000"
                start = self._case.start_with("server", option, archive=shlex.quote(url))
                self._report("archive-idle", url, url=url, start=start)
            return
        for partition_id, lag_s in lags_s.items():
            count, hours = partitions[partition_id].unarchived_count, f"{lag_s / 3600:.1f}"
            fields = {"partition": partition_id, "count": count, "hours": hours}
            self._report("archive-lagging", partition_id, **fields)

    def _check_speed(self) -> None:
        """Compare the times that storages take to answer appends; report slow storages."""
        figures: dict[ReplicaId, list[tuple[int, int]]] = {}
        for server in self._cluster.servers.values():
            for address, figure in server.append_times.items():
                figures.setdefault(address, []).append(figure)
        times_ms: dict[ReplicaId, float] = {}
        for address, of_servers in figures.items():
            seconds = sum(count for count, _ in of_servers)
            if seconds >= SLOW_SECONDS_MIN and address in self._cluster.storages:
                times_ms[address] = sum(count * us for count, us in of_servers) / seconds / 1000
        for address, time_ms in times_ms.items():
            others = [each for name, each in times_ms.items() if name != address]
            if not others or time_ms < SLOW_MS_MIN or self._cluster.storages[address].failure:
                continue
            times = time_ms / max(1.0, median(others))
            if times >= SLOW_TIMES_MIN:
                fields = {"took": round(time_ms), "times": round(times)}
                self._report("storage-slow", address, storage=address, **fields)

    def _is_fit(self, storage: StorageFacts) -> bool:
        """Whether a storage can take more replicas: it answers, and its disk is not nearly full."""
        space = storage.space
        return not (
            storage.failure or storage.admin_failure or space is None or _is_nearly_full(space)
        )

    def _spread_command(self, partition_id: PartitionId) -> str:
        """Return a command that spreads replicas, but not to a nearly full disk."""
        groups, connect = self._cluster.groups, self._case.connect
        taken = {groups.get(each) for each in self._cluster.assigned[partition_id]}
        others = [each for each in self._cluster.storages.values() if self._is_fit(each)]
        if any(groups.get(each.address) not in taken for each in others):
            return f"waltz-core cluster auto-assign --connect {connect}"
        group = min(each for each in groups.values() if each not in taken)
        return f"waltz-core cluster add-storage HOST:PORT --group {group} --connect {connect}"

    def drain_command(self, address: ReplicaId, partitions: Collection[PartitionId]) -> str:
        """Return the command that moves replicas to the storage that can take most of them."""

        def movable(name: ReplicaId) -> list[PartitionId]:
            return [each for each in partitions if name not in self._cluster.assigned[each]]

        group = self._cluster.groups.get(address)
        spare = [each.address for each in self._cluster.storages.values() if self._is_fit(each)]
        spare = [each for each in spare if each != address and movable(each)]
        if not spare:
            return f"waltz-core cluster add-storage HOST:PORT --connect {self._case.connect}"
        chosen = max(
            spare, key=lambda each: (self._cluster.groups.get(each) == group, len(movable(each)))
        )
        return (
            f"waltz-core cluster move-replica {_ranges(movable(chosen))} {address} {chosen} "
            f"--connect {self._case.connect}"
        )

    def move_command(self, partition_id: PartitionId, owner: ServerFacts) -> str:
        """Return the command that moves a partition to another server, or restarts the only one."""
        others = [
            each.address
            for each in self._cluster.servers.values()
            if each is not owner and not each.failure
        ]
        if not others:
            return self._case.start("server", owner.address)
        return (
            f"waltz-core cluster prefer {partition_id} {others[0]} --connect {self._case.connect}"
        )

    def rebuild_command(self, count: int | None) -> str:
        """Return the command that rebuilds the znodes; `count` is the number of replicas, or None.

        With a count that is too small, the command would trust the logs of too few replicas.
        """
        cluster, connect = self._cluster, self._case.connect
        words = [
            f"--name {shlex.quote(cluster.name)} --cluster-key {cluster.cluster_key}",
            f"--partitions {cluster.partition_count} --replicas {count or 'COUNT'}",
        ]
        for each in self._cluster.storages.values():
            words.append(f"--storage {each.address}:{split_address(each.admin)[1]}")
            group = self._cluster.groups.get(each.address)
            words[-1] += "" if group is None else f":{group}"
        rebuild = f"waltz-core cluster rebuild-metadata --connect {connect} {' '.join(words)}"
        if count is None:
            return rebuild  # the znodes exist, and processes may run
        delete = f"waltz-core cluster delete {shlex.quote(cluster.name)} --connect {connect}"
        return self._case.rebuild_steps(rebuild, delete)


class _PartitionDiagnosis:
    """The findings about one partition."""

    def __init__(
        self,
        case: _Diagnosis,
        cluster: ClusterFacts,
        whole: _ClusterDiagnosis,
        partition_id: PartitionId,
    ) -> None:
        self._case, self._cluster, self._whole, self._id = case, cluster, whole, partition_id
        self._now = PartitionCondition(cluster, partition_id)

    def check(self) -> None:
        if self._check_metadata():
            return
        if not self._now.assigned:
            self._report("no-replicas")
            return
        self._check_count()
        for storage in self._now.storages:
            self._check_replica(storage)
        has_votes = self._check_quorum()
        self._check_owner(has_votes=has_votes)
        self._check_leftovers()

    def _report(self, name: str, about: object = "", **fields: object) -> None:
        about = f"{self._id} {about}".strip()
        self._case.report(name, about, partition=self._id, **fields)

    # --- replicas

    def _check_leftovers(self) -> None:
        now, metadata = self._now, self._now.facts.metadata
        if metadata is None or not now.is_open or now.not_engaged:
            return  # rule 5: not all replicas are engaged in an open session
        for storage in self._cluster.storages.values():
            held = storage.replicas.get(self._id)
            is_wanted = storage.address in now.assigned or storage.address in metadata.states
            if held is None or not held.is_held or is_wanted:
                continue
            if held.last <= now.last_id and held.last_session <= metadata.session_id:
                self._whole.left_over.setdefault(storage.address, []).append(self._id)

    def _check_count(self) -> None:
        counts = [len(each) for each in self._cluster.assigned.values()]
        usual = max(counts, key=lambda each: (counts.count(each), each))
        count = len(self._now.assigned)
        if count < usual:
            self._report("too-few-replicas", count=count, usual=usual)

    def _check_metadata(self) -> bool:
        """Report metadata that ZooKeeper has lost; return whether it was lost."""
        if rebuilding.is_waiting(self._now.facts.metadata, self._now.facts.marker):
            # The assignment contains only the decisions so far, not the former replicas.
            self._report("rebuilding-unfinished", rebuild=self._whole.rebuild_command(None))
            return True
        if self._now.is_state_lost:
            counts = map(len, self._cluster.assigned.values())
            self._report(
                "metadata-lost", rebuild=self._whole.rebuild_command(max(counts, default=0))
            )
            return True
        return False

    def _check_replica(self, storage: StorageFacts) -> None:
        held, address = storage.replicas.get(self._id), storage.address
        if held is None or storage.failure:
            return
        unavailable = unavailable_reason(held)
        if unavailable is None:
            self._check_log(storage, held)
        else:
            start = self._case.start("storage", address)
            self._report(
                FINDING_OF_REASON[unavailable],
                address,
                storage=address,
                why=held.reason,
                start=start,
            )

    def _check_log(self, storage: StorageFacts, held: ReplicaFacts) -> None:
        now, address = self._now, storage.address
        if held.damaged_count:
            self._report("replica-damaged", address, storage=address, count=held.damaged_count)
        if held.is_suspect:
            if not now.has_no_trusted_quorum:
                self._report("replica-suspect", address, storage=address)
        elif now.is_open and address in now.not_engaged:
            full = storage.space is not None and storage.space.is_full
            if not full and address in now.states:
                self._report("replica-not-engaged", address, storage=address, last=held.last)
        elif now.is_open and now.last_id - held.last > LAG_MAX:
            count = now.last_id - held.last
            empty = self._whole.drain_command(address, [self._id])
            self._report("replica-lagging", address, storage=address, count=count, empty=empty)

    # --- the quorum (rule 3)

    def _check_quorum(self) -> bool:
        """Report a missing quorum; return whether the replicas permit an open session."""
        now, count = self._now, len(self._now.assigned)
        if len(now.answering_replicas) < now.quorum:
            # Do not propose to restart healthy processes: offline and broken logs have their own
            # findings.
            away = [
                each.address
                for each in now.storages
                if each.failure and not self._whole.is_starting(each)
            ]
            again = f"waltz-core doctor --connect {self._case.connect}"
            self._report(
                "no-quorum",
                count=count,
                answering=len(now.answering_replicas),
                quorum=now.quorum,
                start=self._case.start("storage", away[0]) if away else again,
            )
            return False
        if now.has_no_trusted_quorum:
            able = count - len(now.suspects)
            self._report("no-trusted-quorum", count=count, able=able, quorum=now.quorum)
            return False
        return len(now.unknown) < now.quorum

    # --- the owner

    def _check_owner(self, *, has_votes: bool) -> None:
        now, owner = self._now, self._now.owner
        if owner is None:
            if self._cluster.servers and self._cluster.is_settled:
                self._report("partition-without-server", start=self._case.start("server"))
            return
        for other in self._cluster.servers.values():
            if other is not owner and self._id in other.served and self._cluster.is_settled:
                start = self._case.start("server", other.address)
                fields = {"server": other.address, "owner": owner.address, "start": start}
                self._report("partition-served-by-another", other.address, **fields)
        if owner.failure or not self._cluster.is_settled:
            return
        fields = {"server": owner.address, "move": self._whole.move_command(self._id, owner)}
        if not now.is_served:
            self._report("partition-not-served", **fields)
        elif not now.is_open:
            if has_votes:
                was_opened = now.replicas.was_opened
                self._report("session-not-open" if was_opened else "never-opened", **fields)
        else:
            self._check_session(owner, fields)

    def _check_session(self, owner: ServerFacts, fields: dict[str, str]) -> None:
        facts = self._now.facts
        if self._now.is_of_other_replicas:
            assigned, replicas = ", ".join(self._now.assigned), ", ".join(self._now.states)
            self._report(
                "session-replicas-outdated", assigned=assigned, replicas=replicas, **fields
            )
        if facts.mark_failure:
            self._report("high-water-mark-unknown", why=facts.mark_failure, **fields)
        if facts.stamp_ahead_ms is not None and facts.stamp_ahead_ms > CLOCK_MS_MAX:
            seconds = f"{facts.stamp_ahead_ms / 1000:.1f}"
            self._report("server-clock-skew", owner.address, seconds=seconds, **fields)


def _is_nearly_full(space: SpaceFacts) -> bool:
    """Whether the free space is below the limit, or the disk is full."""
    least = NEARLY_FULL_BYTES
    if space.size_bytes is not None:
        least = max(space.size_bytes // NEARLY_FULL_PART, NEARLY_FULL_BYTES_MIN)
    return space.is_full or space.free_bytes < least


def _ranges(partitions: Iterable[int]) -> str:
    """Return partitions as ranges, in the syntax of commands: 0-6,9."""
    runs: list[list[int]] = []
    for each in sorted(partitions):
        if runs and runs[-1][1] == each - 1:
            runs[-1][1] = each
        else:
            runs.append([each, each])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
