"""A simulated operator that rebuilds ZooKeeper's metadata from the storages' logs.

The production code (`cluster/change/rebuilding.py`) chooses the log, and the order of the durable
steps. This module queries storages and writes to ZooKeeper, as the commands do.

Rules:
    1. The command claims a session that is later than the promises of all storages. The command
       uses only answers in this session. `accept-replicas` first claims the session in ZooKeeper.
    2. The command may die after each durable step. Afterwards it may be run again, or not.
    3. With `accept-replicas` an operator may decide to lose acknowledged transactions. The checkers
       would report such a loss. So a command that would lose transactions dies before it writes to
       ZooKeeper. A command that has written to ZooKeeper is run again until the partition can be
       opened.
    4. With `may_lose_archived` the operator accepts a log that ends below the archived mark. The
       checkers verify that no session opens afterwards (AR 8 of decision 047).
"""

import asyncio
from typing import TYPE_CHECKING, Final

from waltz_core.cluster.change import rebuilding
from waltz_core.cluster.change.rebuilding import RebuildDecision, ReportedLog
from waltz_core.cluster.znodes.model import MarkerState, PartitionMarker, PartitionMetadata
from waltz_core.records.record import NO_SESSION, PartitionId, ReplicaId, SessionId, TransactionId
from waltz_core.replication.quorum import quorum_size
from waltz_core.replication.replica_repair import decode_damaged_ranges
from waltz_core.replication.session_recovery import NO_STORAGE_ID
from waltz_core.wire.messages import (
    Nack,
    Prepare,
    Prepared,
    ReplicaEnd,
    SetLowWaterMark,
    StorageMessage,
)
from waltz_sim.cluster.peer import PeerAnswers, SimPeer
from waltz_sim.world.event_loop import create_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from waltz_sim.cluster.simulated_cluster import SimCluster

# The steps after which a command may die (rule 2).
DEATH_STEPS: Final = ("claim", "fence", "write", "mark", "assign", "add")
BEST_REPLICA: Final = ReplicaId("")
ATTEMPTS_MAX: Final = 10
POLL_INTERVAL_S: Final = 0.1
POLLS_MAX: Final = 30


class CommandDied(Exception):
    """The command has died, or cannot continue."""


class DisasterRecovery:
    """One run of the command; `on_decision` receives the decision, or None if the command has died.

    The command accepts the log of the replica `accepted`. If `accepted` is `BEST_REPLICA`, it
    accepts the longest log. If `accepted` is None, it accepts the log that a rebuild would choose.
    """

    def __init__(
        self,
        cluster: "SimCluster",
        on_decision: "Callable[[RebuildDecision | None], None]",
        *,
        accepted: ReplicaId | None = None,
        dies_after: str = "",
        may_lose_archived: bool = False,
    ) -> None:
        assert dies_after in {"", *DEATH_STEPS}
        self._cluster = cluster
        cluster.disaster_recovery_count += (
            1  # each command has its own random numbers, and so its own nonces
        )
        self._peer = SimPeer(cluster, f"operator{cluster.disaster_recovery_count}")
        self._loop = create_loop(self._peer)
        self._on_decision = on_decision
        self._accepted_replica = accepted
        self._planned_death = dies_after
        self._may_lose_archived = may_lose_archived
        self._versions = (0, 0)
        self._nonce = self._peer.rng.randbytes(16)
        self._partition_id = PartitionId(cluster.partition_id)
        self._session_id: SessionId = NO_SESSION
        self._answers: dict[ReplicaId, StorageMessage | None] = {}
        self._loop.run_inside(
            lambda: self._loop.create_task(self._run_command(), name="disaster recovery")
        )

    async def _run_command(self) -> None:
        decision: RebuildDecision | None = None
        try:
            decision = await self._recover()
        except CommandDied as died:
            self._cluster.world.note(f"the operator's command has died: {died}")
        except Exception as error:  # noqa: BLE001 - of a checker, or a bug of the command
            self._loop.keep_error(error)
        self._on_decision(decision)

    def _die_if_planned_after(self, step: str) -> None:
        """Die if this step is planned (rule 2), unless all faults have ended."""
        if step == self._planned_death and not self._cluster.is_recovering:
            raise CommandDied(f"after {step}")

    async def _recover(self) -> RebuildDecision:
        """Run the command.

        Raises CommandDied, and BadRequest if a silent storage may have acknowledged data.
        """
        newest = NO_SESSION
        for _ in range(ATTEMPTS_MAX):
            self._claim_session(newest)
            await self._query_storages()
            nacks = [each for each in self._answers.values() if isinstance(each, Nack)]
            newest = SessionId(max((nack.promised for nack in nacks), default=NO_SESSION))
            if newest < self._session_id:
                return await self._decide()
        raise CommandDied("other owners claim later sessions")

    def _claim_session(self, newest: SessionId) -> None:
        """Choose a session, and claim it in ZooKeeper for `accept-replicas` (rule 1)."""
        coordinator = self._cluster.coordinator
        metadata = coordinator.metadata
        known = NO_SESSION if metadata is None else metadata.session_id
        self._session_id = SessionId(max(known, newest) + 1)
        if self._accepted_replica is None:
            return
        is_known = metadata is not None and metadata.states and coordinator.marker is not None
        if not is_known or coordinator.is_unavailable:
            raise CommandDied("ZooKeeper knows no replica, or does not answer")
        self._nonce = self._peer.rng.randbytes(16)
        coordinator.claim_session(self._peer.name, self._session_id, self._nonce)
        self._versions = coordinator.metadata_version, coordinator.marker_version
        self._die_if_planned_after("claim")

    async def _query_storages(self) -> None:
        """In the session, query the log of each storage that is assigned or known to ZooKeeper."""
        metadata = self._cluster.coordinator.metadata
        held = () if self._accepted_replica is None or metadata is None else metadata.states
        members = dict.fromkeys([*self._cluster.replicas, *held])
        identity = (NO_STORAGE_ID, self._cluster.key, 1)
        prepare = Prepare(self._session_id, 1, self._partition_id, self._nonce, *identity)
        answering_links = {member: self._send(member, [prepare]) for member in members}
        self._answers = {}
        for replica, answering in answering_links.items():
            answers = await answering
            self._answers[replica] = answers[0] if answers else None

    def _send(
        self, replica: ReplicaId, requests: "Sequence[StorageMessage]"
    ) -> "asyncio.Future[PeerAnswers]":
        answers = self._loop.create_future()
        storage = self._cluster.storages[replica]
        self._peer.request(
            storage, requests, lambda its: self._loop.run_inside(lambda: answers.set_result(its))
        )
        return answers

    async def _decide(self) -> RebuildDecision:
        prepared = {
            each: answer for each, answer in self._answers.items() if isinstance(answer, Prepared)
        }
        logs = {each: _reported_log(answer) for each, answer in prepared.items()}
        if self._accepted_replica is None:
            decision = rebuilding.choose_log(
                self._partition_id,
                logs,
                groups={},
                replica_count=len(self._cluster.replicas),
                unanswered=[each for each in self._answers if each not in prepared],
            )
        else:
            self._die_if_planned_after("fence")
            if self._accepted_replica == BEST_REPLICA and logs:
                self._accepted_replica = max(logs, key=lambda each: _sort_key(logs[each]))
            if self._accepted_replica not in logs:
                raise CommandDied(f"{self._accepted_replica} did not answer")
            others = sorted(logs, key=lambda each: logs[each].rank, reverse=True)
            members = (
                self._accepted_replica,
                *(other for other in others if other != self._accepted_replica),
            )
            log = logs[self._accepted_replica]
            decision = RebuildDecision(self._partition_id, self._accepted_replica, log, members)
        declared = decision.with_log_session(self._session_id)
        operations = _SimulatedOperations(self, declared, prepared[decision.source])
        generation = self._cluster.coordinator.assignment.generation
        await rebuilding.declare_log(declared.metadata(generation, self._session_id), operations)
        if self._accepted_replica is not None:
            await self._add_replicas(decision.members[2:])
        return decision

    # ---- the operations of a declaration

    def write_metadata(self, metadata: PartitionMetadata) -> None:
        """Write the metadata and the marker to ZooKeeper."""
        coordinator = self._cluster.coordinator
        if self._accepted_replica is not None:
            versions = coordinator.metadata_version, coordinator.marker_version
            if coordinator.is_unavailable or versions != self._versions:
                raise CommandDied("ZooKeeper does not answer, or was changed meanwhile")
            if not (
                self._is_below_archived_mark()
                if self._may_lose_archived
                else self._has_all_acknowledged()
            ):
                raise CommandDied("the accepted log lacks acknowledged transactions (rule 3)")
            self._cluster.unfinished_recovery = (
                None if self._may_lose_archived else self._accepted_replica
            )
            self._cluster.checks.count("replica accepted")
        before = coordinator.marker
        archived = None if before is None else before.archived
        marker = PartitionMarker(MarkerState.OPEN, self._session_id, self._nonce, archived)
        coordinator.replace_nodes(metadata, marker)
        self._die_if_planned_after("write")

    async def set_low_water_mark(self, decision: RebuildDecision, source: Prepared) -> None:
        """Set the log's low-water mark in the session, so that its replica is trusted."""
        prefix = self._session_id, 2, self._partition_id
        identity = (self._nonce, NO_STORAGE_ID, self._cluster.key, 1)
        again = Prepare(self._session_id, 1, self._partition_id, *identity)
        mark = SetLowWaterMark(*prefix, source.synced_max, bytes(source.chain))
        answers = await self._send(decision.source, [again, mark])
        if not answers or not isinstance(answers[-1], ReplicaEnd):
            raise CommandDied(f"{decision.source} was not marked")
        self._cluster.checks.count("replica marked by a command")
        self._die_if_planned_after("mark")

    def assign_replicas(self, decision: RebuildDecision) -> None:
        """Assign the first replicas of the decision to the partition."""
        self._cluster.reassign(decision.first_members)
        self._cluster.unfinished_recovery = None
        self._die_if_planned_after("assign")

    async def _add_replicas(self, others: "Sequence[ReplicaId]") -> None:
        """Assign the other replicas one by one, each when all assigned replicas are engaged."""
        cluster = self._cluster
        for other in others:
            for _ in range(POLLS_MAX):
                if cluster.has_all_engaged():
                    break
                await asyncio.sleep(POLL_INTERVAL_S)
            states = cluster.coordinator.metadata
            if not cluster.has_all_engaged() or states is None or other in cluster.replicas:
                raise CommandDied("the replicas do not recover, or were changed by another command")
            cluster.reassign((*cluster.replicas, other))
            self._die_if_planned_after("add")

    def _is_below_archived_mark(self) -> bool:
        """Whether the accepted log ends below the archived mark (rule 4)."""
        marker = self._cluster.coordinator.marker
        archived = None if marker is None else marker.archived
        accepted = None if self._accepted_replica is None else self._answers[self._accepted_replica]
        return (
            archived is not None
            and isinstance(accepted, Prepared)
            and accepted.synced_max < archived.last
        )

    def _has_all_acknowledged(self) -> bool:
        """Whether the accepted log has all acknowledged transactions (rule 3).

        The longest log has them if a quorum of replicas without losses has answered. Then older
        sessions can acknowledge nothing more, and these replicas contain all acknowledged
        transactions. A repeated command needs no quorum: the first run has checked the quorum, and
        since then ZooKeeper names only the accepted replica.
        """
        cluster, accepted = self._cluster, self._accepted_replica
        metadata = cluster.coordinator.metadata
        assert accepted is not None
        assert metadata is not None
        logs = {
            each: _reported_log(answer)
            for each, answer in self._answers.items()
            if isinstance(answer, Prepared)
        }
        sound = [
            replica
            for replica, log in logs.items()
            if log.is_trusted and not cluster.budget.has_lost_data(cluster.storages[replica])
        ]
        engaged = [each for each in sound if cluster.budget.is_engaged(cluster.storages[each])]
        is_whole = accepted in sound or not cluster.budget.has_rot(cluster.storages[accepted])
        is_longest = all(log.rank <= logs[accepted].rank for log in logs.values())
        if not (is_whole and is_longest):
            return False
        is_run_again = cluster.unfinished_recovery == accepted
        return is_run_again or len(engaged) >= quorum_size(len(metadata.states))


class _SimulatedOperations:
    """The steps of a declaration for the simulated cluster; see `rebuilding.RebuildOperations`."""

    def __init__(
        self, recovery: DisasterRecovery, decision: RebuildDecision, source: Prepared
    ) -> None:
        self._recovery, self._decision, self._source = recovery, decision, source

    async def write_metadata(self, metadata: PartitionMetadata) -> None:
        """Write the metadata to ZooKeeper."""
        self._recovery.write_metadata(metadata)

    async def set_low_water_mark(self) -> None:
        """Set the low-water mark of the source replica."""
        await self._recovery.set_low_water_mark(self._decision, self._source)

    async def assign_replicas(self) -> None:
        """Assign the first replicas."""
        self._recovery.assign_replicas(self._decision)


def _sort_key(log: ReportedLog) -> tuple[bool, int, int, bool]:
    """Return the sort key of a log. As in the command, the best log has the greatest key."""
    return not log.is_damaged, *log.rank, not log.is_suspect


def _reported_log(prepared: Prepared) -> ReportedLog:
    lasts = [last for _, last in decode_damaged_ranges(prepared.damaged)]
    is_damaged = any(last > prepared.low_water_mark for last in lasts)
    last_id = TransactionId(prepared.synced_max)
    return ReportedLog(SessionId(prepared.last_session), last_id, prepared.suspect, is_damaged)
