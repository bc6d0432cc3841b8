"""The state of the cluster as JSON for the console: members, partitions, replicas and findings.

Rules (decision 069):
    1. Servers and storages (the members) are queried with the token of the caller. If a member
       denies the query, its state is "unknown". If members deny the caller and no server answers,
       the gateway denies the whole request.
    2. ZooKeeper is read through the session of the gateway (`snapshot_reader.py`). If ZooKeeper
       does not answer, the view contains the members of the last read, and the error.
    3. A query waits only `TIMEOUT_S` for each answer, so that the page shows a failure within
       seconds. A query causes no reads of records on storages.
    4. Concurrent requests of one caller share one answer or error. The answer is reused for a short
       time, at least for as long as the query took. So many open pages cause no more queries than
       one page.
    5. If no member answers, no member has checked the token of the caller. In this case, the
       gateway itself checks that the caller's principal may administer all partitions.
    6. Findings do not contain paths of the gateway's files; the commands in findings contain
       placeholders instead of these paths.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, Generic, NamedTuple, TypeVar

from waltz_core import __version__, errors
from waltz_core.administration.change_run import now_ms
from waltz_core.administration.cluster_probes import query_zookeeper_servers
from waltz_core.administration.lasting_findings import lasting_findings
from waltz_core.cluster.coordinator import Coordinator
from waltz_core.config.connect_string import parse_connect_string
from waltz_core.gateway.console.administrators import check_administrator
from waltz_core.gateway.console.change_kinds import change_in_command
from waltz_core.gateway.console.snapshot_reader import SnapshotReader
from waltz_core.ops.condition import PartitionCondition, unavailable_reason
from waltz_core.ops.facts import (
    ClusterFacts,
    ReplicaFacts,
    ServerFacts,
    StorageFacts,
    ZooKeeperServerFacts,
)
from waltz_core.ops.findings import FINDING_KINDS, Finding
from waltz_core.records.record import PartitionId, ReplicaId

TIMEOUT_S: Final = 0.8
FINDINGS_TIMEOUT_S: Final = 3.0
VIEW_AGE_S_MAX: Final = 0.4
FINDINGS_AGE_S_MAX: Final = 4.0
_PLACEHOLDER: Final = "FILE"
OTHER_CLUSTER_TEXT: Final = "the storage belongs to another cluster"
AnswerT = TypeVar("AnswerT")
MemberT = TypeVar("MemberT", ServerFacts, StorageFacts)
Fields = dict[str, Any]


class _SharedAnswer(NamedTuple, Generic[AnswerT]):
    """The outcome of one query, and the time until which it is used."""

    until_s: float
    answer: AnswerT | None
    error: errors.WaltzError | None


class SharedAnswers(Generic[AnswerT]):
    """The recent answers to one query, by caller (rule 4)."""

    def __init__(self, age_s_max: float) -> None:
        self._age_s_max = age_s_max
        self._answers: dict[str, _SharedAnswer[AnswerT]] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def get(self, caller: str, query: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
        """Return the recent answer for a caller; if there is none, run the query."""
        lock = self._locks.setdefault(caller, asyncio.Lock())
        async with lock:
            self._forget_old_answers()
            cached = self._answers.get(caller)
            if cached is None:
                cached = self._answers[caller] = await self._query(query)
        if cached.error is not None:
            raise cached.error.with_traceback(None)
        assert cached.answer is not None
        return cached.answer

    async def _query(self, query: Callable[[], Awaitable[AnswerT]]) -> _SharedAnswer[AnswerT]:
        answer, error, start_s = None, None, time.monotonic()
        try:
            answer = await query()
        except errors.WaltzError as failure:
            error = failure
        now_s = time.monotonic()
        return _SharedAnswer(now_s + max(self._age_s_max, now_s - start_s), answer, error)

    def _forget_old_answers(self) -> None:
        now_s = time.monotonic()
        for caller, cached in list(self._answers.items()):
            if cached.until_s < now_s:
                del self._answers[caller]
        for caller, lock in list(self._locks.items()):
            if not lock.locked() and caller not in self._answers:
                del self._locks[caller]


class ClusterViewer:
    """Reads the state of the cluster for the callers of one gateway."""

    def __init__(
        self, connect: str, coordinator: Callable[[], Coordinator], tasks: asyncio.TaskGroup
    ) -> None:
        self._connect, self._address = connect, parse_connect_string(connect)
        self._reader = SnapshotReader(coordinator, tasks)

    def close(self) -> None:
        """Stop reading, because the gateway stops."""
        self._reader.close()

    async def view(self, token_hash: str) -> Fields:
        """Return the members, partitions and replicas of the cluster (rules 1 to 3).

        `token_hash` is the hash of the caller's token, empty without a token.

        Raises:
            PermissionDenied, AuthenticationFailed: the caller has no permission.
            CoordinatorUnavailable: ZooKeeper does not answer, and was never read.
        """
        # NB: this call is not in the task group, because the group would wrap an error in an
        # ExceptionGroup.
        snapshot, error = await self._reader.read()
        async with asyncio.TaskGroup() as tasks:
            zookeepers = tasks.create_task(query_zookeeper_servers(self._address, TIMEOUT_S))
            cluster = await snapshot.probe(TIMEOUT_S, reads_logs=False)
        await self._check_permitted(cluster, token_hash)
        return {
            "name": cluster.name,
            "version": __version__,
            "time_ms": now_ms(),
            "partition_count": cluster.partition_count,
            "zookeeper_error": error,
            "is_settled": cluster.is_assignment_settled,
            "zookeeper": [_zookeeper_fields(each) for each in await zookeepers],
            "servers": [
                _server_fields(each) for each in _sorted_by_address(cluster.servers.values())
            ],
            "storages": [
                _storage_fields(cluster, each)
                for each in _sorted_by_address(cluster.storages.values())
            ],
            "partitions": [
                _partition_fields(cluster, PartitionId(each))
                for each in range(cluster.partition_count)
            ],
        }

    async def findings(self, token_hash: str) -> Fields:
        """Return the findings of the doctor, with the changes that the console can make.

        Raises PermissionDenied, AuthenticationFailed and CoordinatorUnavailable, like `view`.
        """
        address = self._address
        placeholder = str(
            replace(
                address,
                auth_file=_PLACEHOLDER if address.auth_file else "",
                tls=_PLACEHOLDER if address.tls else "",
            )
        )
        facts, lasting_problems = await lasting_findings(
            self._connect, timeout_s=FINDINGS_TIMEOUT_S, displayed_connect=placeholder
        )
        await self._check_permitted(facts.cluster, token_hash)
        return {
            "time_ms": now_ms(),
            "findings": [self._finding_fields(finding) for finding in lasting_problems],
        }

    def _finding_fields(self, finding: Finding) -> Fields:
        return {
            "name": finding.name,
            "area": FINDING_KINDS[finding.name].area.value,
            "subject": finding.subject,
            "partition": finding.partition,
            "sentence": self._without_paths(finding.sentence),
            "command": self._without_paths(finding.command),
            "change": change_in_command(finding.command),
        }

    def _without_paths(self, text: str) -> str:
        """Replace the paths of the gateway's files, which errors may contain (rule 6)."""
        for path in (self._address.auth_file, self._address.tls):
            if "/" in path:
                text = text.replace(path, _PLACEHOLDER)
        return text

    async def _check_permitted(self, cluster: ClusterFacts | None, token_hash: str) -> None:
        """Raise an error if the caller has no permission (rules 1 and 5)."""
        if cluster is not None:
            _check_not_denied(cluster)
        if cluster is None or not _has_any_answer(cluster):
            permissions = await self._reader.known_permissions()
            if permissions is not None:
                check_administrator(permissions, token_hash, "see the cluster")


def _has_any_answer(cluster: ClusterFacts) -> bool:
    """Return whether a member has answered the caller, and so has checked the caller's token."""
    storages = cluster.storages.values()
    return any(not member.failure for member in cluster.servers.values()) or any(
        not member.failure and not member.admin_failure for member in storages
    )


def _check_not_denied(cluster: ClusterFacts) -> None:
    """Raise PermissionDenied if the members deny the caller (rule 1)."""
    servers, storages = cluster.servers.values(), cluster.storages.values()
    denials = [member.failure for member in servers if member.is_denied]
    denials += [member.admin_failure or member.failure for member in storages if member.is_denied]
    if denials and all(member.failure for member in servers):
        raise errors.PermissionDenied(
            f"{denials[0]}. Hint: to see the cluster, the principal of your token needs "
            "the verb administer for all partitions (docs/console.md)."
        )


# --- members


def _sorted_by_address(members: Iterable[MemberT]) -> list[MemberT]:
    """Return members sorted by address, so that their order on the page does not change."""
    return sorted(members, key=lambda each: each.address)


def _zookeeper_fields(server: ZooKeeperServerFacts) -> Fields:
    is_up = not server.failure and server.mode != ""
    error = server.failure or ("" if is_up else "it is not part of a quorum")
    return {
        "address": server.address,
        "state": "up" if is_up else "down",
        "mode": server.mode,
        "error": error,
    }


def _server_fields(server: ServerFacts) -> Fields:
    served = server.served_partitions
    return {
        "address": server.address,
        "state": _member_state(server.failure, is_denied=server.is_denied),
        "error": server.failure or "; ".join(server.connection_errors),
        "latency_ms": server.latency_ms,
        "open": sorted(partition_id for partition_id, is_open in served.items() if is_open),
        "not_open": sorted(partition_id for partition_id, is_open in served.items() if not is_open),
        "preferred": sorted(server.preferred_partitions),
        "unreachable_storages": sorted(server.unreachable_storages),
    }


def _member_state(failure: str, *, is_denied: bool) -> str:
    if is_denied:
        return "unknown"
    return "down" if failure else "up"


def _storage_fields(cluster: ClusterFacts, storage: StorageFacts) -> Fields:
    disk = storage.disk
    failure = storage.failure or storage.admin_failure
    if not storage.belongs_to_cluster:
        failure = OTHER_CLUSTER_TEXT
    assigned = [
        replicas for replicas in cluster.assigned_replicas.values() if storage.address in replicas
    ]
    return {
        "address": storage.address,
        "group": cluster.storage_groups.get(storage.address),
        "state": _member_state(failure, is_denied=storage.is_denied),
        "error": failure,
        "latency_ms": storage.latency_ms,
        "replica_count": len(assigned),
        "free_bytes": None if disk is None else disk.free_bytes,
        "size_bytes": None if disk is None else disk.size_bytes,
        "is_full": disk is not None and disk.is_full,
        "days_until_full": None if disk is None else disk.days_until_full,
        "append_latency_ms": _append_latency_ms(cluster, storage.address),
    }


def _append_latency_ms(cluster: ClusterFacts, storage: ReplicaId) -> float | None:
    """Return the append latency of a storage: the highest of the servers' medians."""
    medians_us = [
        server.append_latencies[storage][1]
        for server in cluster.servers.values()
        if storage in server.append_latencies
    ]
    return max(medians_us) / 1000 if medians_us else None


# --- partitions


def _partition_fields(cluster: ClusterFacts, partition_id: PartitionId) -> Fields:
    condition = PartitionCondition(cluster, partition_id)
    facts, owner = condition.facts, condition.owner
    # Sorted, so that the order on the page does not change.
    replicas = [
        _replica_fields(cluster, condition, each) for each in sorted(condition.assigned_replicas)
    ]
    available = sum(each["state"] != "unavailable" for each in replicas)
    return {
        "partition": partition_id,
        "state": _partition_state(condition, available),
        "owner": None if owner is None else owner.address,
        "error": facts.high_water_mark_error,
        "session_id": None if facts.metadata is None else facts.metadata.session_id,
        "high_water_mark": facts.high_water_mark,
        "archived_mark": None if facts.archived_mark is None else facts.archived_mark.last,
        "replicas": replicas,
    }


def _partition_state(condition: PartitionCondition, available: int) -> str:
    """Return the state of a partition; `available` is its number of available replicas.

    An owner without a quorum keeps its session open for a while, but cannot confirm a high-water
    mark. If the owner confirms a mark, the partition has a quorum, even if the gateway itself
    cannot connect to the storages.
    """
    if condition.owner is None:
        return "no_owner"
    if condition.owner.is_denied:
        return "unknown"
    if not condition.has_open_session:
        return "closed"
    has_quorum = available >= condition.quorum_size or condition.facts.high_water_mark is not None
    return "open" if has_quorum else "no_quorum"


def _replica_fields(
    cluster: ClusterFacts, condition: PartitionCondition, address: ReplicaId
) -> Mapping[str, object]:
    replica = condition.replica_facts(address)
    state, reason = _replica_state(cluster.storages[address], condition)
    return {
        "storage": address,
        "state": state,
        "last_id": None if replica is None else replica.last_id,
        "reason": reason,
    }


def _replica_state(storage: StorageFacts, condition: PartitionCondition) -> tuple[str, str]:
    """Return the state of the replica on a storage, and the reason if it is not in sync."""
    if storage.is_denied:
        return "unknown", storage.failure or storage.admin_failure
    unavailable = _unavailable_text(storage, condition.replica_facts(storage.address))
    if unavailable:
        return "unavailable", unavailable
    if condition.is_suspect(storage.address):
        return "out_of_sync", "its log is not trusted"
    if storage.address in condition.not_engaged_replicas:
        return "out_of_sync", ""
    return "in_sync", ""


def _unavailable_text(storage: StorageFacts, replica: ReplicaFacts | None) -> str:
    """Return the reason why a replica is unavailable; empty if it is available."""
    if storage.failure or storage.is_hanging:
        return storage.failure or storage.admin_failure
    if not storage.belongs_to_cluster:
        return OTHER_CLUSTER_TEXT
    reason = None if replica is None else unavailable_reason(replica)
    if replica is None or reason is None:
        return ""
    return replica.open_error or reason.name.lower()
