"""Carries out the repairs of a session's replicas, and copies batches to replicas that lag.

A repair needs two replicas: the replica that lacks records (the target), and a source that has
them. This module chooses the source and handles its failures. Before a replica is marked, the
module repairs it (`ReplicaRepair`). If a marked replica lacks batches that are no longer in memory,
the module copies these batches to it.

Rules:
    1. Each target has at most one step in progress. A step is dropped if the connection to its
       target or to its source is lost.
    2. A source must have records that are certain to be right:
        - Until the target is marked, the source is a marked replica, or a replica whose log ends
          exactly at the goal (the decided high-water mark).
        - After the target is marked, the source is engaged, and has synced all requested records.
        - For damage above the mark, in the running session, the source is any marked replica that
          has synced the records.
        - If damaged records are archived, and no log can repair them, the source is any other
          engaged replica. This replica reads the records from the archive.
    3. If a source fails, the repair continues with another source. The failed source is not used
       for this target until `answer_ms_max` has passed.
    4. Only opened sessions have batches, and ZooKeeper records each session before it opens. So if
       a log has a batch of a session that ZooKeeper does not know, ZooKeeper's data is too old.
       Nothing is truncated from this log.
    5. The goal's hash chain is the chain of the first credible log that ends at the mark. The
       goal's chain is fixed as soon as one replica is marked.
    6. Damage is repaired in the session in which it is found. A marked replica with damage stays
       usable, even if the repair fails. But a replica with damage above its previous mark is not
       marked until it has received the records from another replica.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple, assert_never

from waltz_core.cluster.znodes.model import ArchivedMark
from waltz_core.errors import (
    BeforeLogStart,
    Damaged,
    ProtocolError,
    RemoteProtocolError,
    WaltzError,
)
from waltz_core.machine import Report
from waltz_core.records.record import BEFORE_FIRST, NO_SESSION, Chain, ReplicaId, TransactionId
from waltz_core.replication.limits import SessionLimits
from waltz_core.replication.replica_repair import (
    AppendCopy,
    FetchCopy,
    FetchOwnLineage,
    FetchSourceLineage,
    OverwriteDamage,
    RepairGoal,
    RepairStep,
    ReplicaRepair,
    ReplicaReset,
    SetMark,
    Truncation,
    decode_damaged_ranges,
    verify_batches,
    verify_records,
)
from waltz_core.replication.replica_session import (
    MARK_SET_STAGES,
    NO_CORRELATION_ID,
    ReplicaSession,
    ReplicaStage,
)
from waltz_core.replication.session_events import Effect
from waltz_core.replication.session_recovery import HistoryOrigin, Recovery
from waltz_core.wire import messages
from waltz_core.wire.messages import RangeForm, StorageMessage

_WHOLE_RECORDS: Final = int(RangeForm.WHOLE)


class RunningStep(NamedTuple):
    """A step in progress: the replica under repair, and the replica that received the request."""

    target: ReplicaSession
    source: ReplicaSession
    step: RepairStep


class RepairRunner:
    """Runs the repairs of one session by the rules above; the session owns the connections."""

    def __init__(
        self,
        replicas: Mapping[ReplicaId, ReplicaSession],
        recovery: Recovery,
        archived: ArchivedMark | None = None,
        *,
        outbox: list[Effect],
        limits: SessionLimits,
    ) -> None:
        self.goal: RepairGoal | None = None
        self.archived = archived
        self.is_open = False  # ZooKeeper has this session's states.
        self.contradiction: str | None = None  # the error text for rule 4
        self._failed_replicas: list[tuple[ReplicaId, str]] = []
        self._replicas = replicas
        self._recovery = recovery
        self._outbox = outbox
        self._limits = limits
        self._running: dict[int, RunningStep] = {}
        self._damage_sources: dict[ReplicaId, ReplicaId] = {}  # the last source of each replica
        self._correlation_id = 0
        self._avoided_until_ms: dict[tuple[ReplicaId, ReplicaId], int] = {}

    # -----------------------------------------------------------------------------------------
    # steps

    def on_mark_decided(self, mark: TransactionId) -> None:
        """The high-water mark is decided: from now on logs may be changed."""
        assert self.goal is None
        self.goal = RepairGoal(mark, self._recovery.known_chain)

    def advance(self, now_ms: int) -> None:
        """Take the next step of every replica that has no step in progress."""
        assert self.goal is not None
        self._update_goal_chain()
        for peer in self._replicas.values():
            if peer.repair is None or peer.correlation_id != NO_CORRELATION_ID:
                continue
            if peer.stage is ReplicaStage.REPAIRING:
                self._start_next_step(peer, peer.repair, now_ms)
            elif peer.repair.damaged:
                self._repair_next_damage(peer, peer.repair, now_ms)

    def take_failed_replicas(self) -> list[tuple[ReplicaId, str]]:
        """Remove and return the replicas that cannot be repaired, with the reasons."""
        failed, self._failed_replicas = self._failed_replicas, []
        return failed

    def _update_goal_chain(self) -> None:
        """Set the goal's chain, or clear the chain if no replica has it any longer (rule 5)."""
        assert self.goal is not None
        goal = self.goal
        if self._recovery.known_chain is not None:
            return
        for peer in self._replicas.values():
            if peer.stage in MARK_SET_STAGES:
                return
        repairing = [peer for peer in self._replicas.values() if peer.repair is not None]
        if any(peer.repair is not None and peer.repair.reaches(goal) for peer in repairing):
            return
        for peer in repairing:
            assert peer.repair is not None
            if peer.repair.last == goal.mark and self._recovery.is_credible(peer.replica):
                self.goal = RepairGoal(goal.mark, peer.repair.chain)
                return
        self.goal = RepairGoal(goal.mark, None)

    def _start_next_step(self, target: ReplicaSession, repair: ReplicaRepair, now_ms: int) -> None:
        assert self.goal is not None

        def has_source(first: TransactionId, last: TransactionId) -> bool:
            return self._choose_source(target, first, last, now_ms) is not None

        try:
            step = repair.next_step(self._goal_of(target, self.goal, now_ms), has_source=has_source)
        except WaltzError as error:
            self._failed_replicas.append((target.replica, str(error)))
            return
        if isinstance(step, Truncation | ReplicaReset) and self._contradicts_zookeeper(repair):
            self.contradiction = (
                f"replica {target.replica} has batches of store session {repair.newest_session}, "
                f"but in ZooKeeper the last opened session is {self._recovery.newest_session}: "
                "ZooKeeper's data was rolled back"
            )
            self._failed_replicas.append((target.replica, self.contradiction))
        elif step is not None:
            self._start_step(target, step, now_ms)

    def _goal_of(self, target: ReplicaSession, goal: RepairGoal, now_ms: int) -> RepairGoal:
        """Return the goal of one replica, with or without a reset (replica_repair.py, rule 7).

        A credible replica is not reset before ZooKeeper has this session's states, because the next
        session may need the replica for its decision. A replica is also not reset if the version of
        its storage does not support the request.
        """
        is_needed = not self.is_open and self._recovery.is_credible(target.replica)
        archived = self.archived
        if archived is not None and archived.last > goal.mark:
            # After a reset, the log begins after the goal's mark, although the archived mark is
            # higher. The batches after the goal's mark belong to this session. They are copied to
            # the replica when it is marked.
            chain = goal.chain
            archived = None if chain is None else archived._replace(last=goal.mark, chain=chain)
        if archived is None or is_needed or not target.supports_archiving:
            return goal
        starts = [
            other.repair.start
            for other in self._possible_sources(target, now_ms)
            if other.repair is not None and (other.is_mark_set or other.repair.reaches(goal))
        ]
        return goal._replace(
            archived_mark=archived, lowest_source_start=min(starts, default=BEFORE_FIRST)
        )

    def _repair_next_damage(
        self, target: ReplicaSession, repair: ReplicaRepair, now_ms: int
    ) -> None:
        """Repair the first damaged range of a marked replica for which there is a source."""
        assert target.is_mark_set
        for damaged in repair.damaged:
            if self._choose_damage_source(target, *damaged, now_ms) is not None:
                self._start_step(target, repair.overwrite_step(damaged), now_ms)
                return

    def _contradicts_zookeeper(self, repair: ReplicaRepair) -> bool:
        newest = NO_SESSION if repair.newest_session is None else repair.newest_session
        is_recorded = self._recovery.origin is HistoryOrigin.RECORDED
        return is_recorded and newest > self._recovery.newest_session

    def _start_step(self, target: ReplicaSession, step: RepairStep, now_ms: int) -> None:
        if isinstance(step, FetchSourceLineage | FetchCopy):
            is_fill = isinstance(step, FetchCopy) and not step.needs_whole_batches
            find = self._choose_damage_source if is_fill else self._choose_source
            source = find(target, step.first, step.last, now_ms)
            if source is None:
                return
            if isinstance(step, FetchCopy):
                self._fetch_range(target, source, step, now_ms)
            else:
                self._send_step(target, source, step, messages.LineageRequest, tuple(step), now_ms)
            return
        kind, fields = _request_for_step(step)
        self._send_step(target, target, step, kind, fields, now_ms)

    def copy_next_batches(self, target: ReplicaSession, last: TransactionId, now_ms: int) -> None:
        """Copy the next committed batches, up to ID `last`, to a marked replica."""
        assert target.is_mark_set
        assert target.next_id <= last
        if (
            target.correlation_id != NO_CORRELATION_ID
            or target.unanswered_bytes > self._limits.range_bytes_max
        ):
            return
        for source in self._possible_sources(target, now_ms):
            if source.stage is ReplicaStage.ENGAGED and source.synced_last >= last:
                step = FetchCopy(target.next_id, last, needs_whole_batches=True)
                self._fetch_range(target, source, step, now_ms)
                return

    def _fetch_range(
        self, target: ReplicaSession, source: ReplicaSession, step: FetchCopy, now_ms: int
    ) -> None:
        bytes_max, is_reader = self._limits.range_bytes_max, False
        fields = (
            step.first,
            step.last,
            bytes_max,
            _WHOLE_RECORDS,
            step.needs_whole_batches,
            is_reader,
        )
        self._send_step(target, source, step, messages.RangeRaw, fields, now_ms)

    def _send_step(
        self,
        target: ReplicaSession,
        source: ReplicaSession,
        step: RepairStep,
        kind: type[StorageMessage],
        fields: tuple[object, ...],
        now_ms: int,
    ) -> None:
        assert target.correlation_id == NO_CORRELATION_ID, "rule 1"
        self._correlation_id += 1
        target.correlation_id = self._correlation_id
        self._running[self._correlation_id] = RunningStep(target, source, step)
        source.send_request(kind, *fields, now_ms=now_ms, correlation_id=self._correlation_id)

    # -----------------------------------------------------------------------------------------
    # sources

    def _possible_sources(self, target: ReplicaSession, now_ms: int) -> list[ReplicaSession]:
        return [
            other
            for other in self._replicas.values()
            if other is not target
            and other.is_connected
            and self._avoided_until_ms.get((target.replica, other.replica), now_ms) <= now_ms
        ]

    def _choose_source(
        self, target: ReplicaSession, first: int, last: int, now_ms: int
    ) -> ReplicaSession | None:
        """Return a source without known damage in first..last (rule 2); None if there is none."""
        assert self.goal is not None
        for other in self._possible_sources(target, now_ms):
            if other.repair is None:
                continue
            if not (other.is_mark_set or other.repair.reaches(self.goal)):
                continue
            if last > self.goal.mark and not (other.is_mark_set and other.synced_last >= last):
                continue
            if first <= other.repair.start:
                continue
            if all(last < low or high < first for low, high in other.repair.damaged):
                return other
        return None

    def _choose_damage_source(
        self, target: ReplicaSession, first: int, last: int, now_ms: int
    ) -> ReplicaSession | None:
        """Return a source for damaged records, or None.

        If no log has the records, return a replica that can read them from the archive.
        """
        source = self._choose_source(target, first, last, now_ms)
        if source is not None or self.archived is None or last > self.archived.last:
            return source
        for other in self._possible_sources(target, now_ms):
            if other.stage is ReplicaStage.ENGAGED and other.supports_archiving:
                return other
        return None

    def wake_times(self, now_ms: int) -> list[int]:
        """Return when slow sources time out, and when avoided sources may be used again."""
        if not self._avoided_until_ms and not self._running:
            return []
        times = [at_ms for at_ms in self._avoided_until_ms.values() if at_ms > now_ms]
        for running in self._running.values():
            oldest_request_sent_ms = running.source.oldest_request_sent_ms
            if running.source is not running.target and oldest_request_sent_ms is not None:
                times.append(oldest_request_sent_ms + self._limits.answer_ms_max)
        return times

    def expire_slow_sources(self, now_ms: int) -> None:
        """Abandon the steps whose source has timed out (rule 3)."""
        for correlation_id, running in list(self._running.items()):
            oldest_request_sent_ms = running.source.oldest_request_sent_ms
            if running.source is running.target or oldest_request_sent_ms is None:
                continue
            if oldest_request_sent_ms + self._limits.answer_ms_max <= now_ms:
                self._avoid_source(correlation_id, running.source.replica, "no answer", now_ms)

    def on_connection_lost(self, peer: ReplicaSession) -> None:
        """A connection was lost: drop the steps that need it (rule 1)."""
        for correlation_id, running in list(self._running.items()):
            if running.source is peer or running.target is peer:
                self._drop_step(correlation_id)

    def on_source_rejected(
        self,
        correlation_id: int,
        source: ReplicaSession,
        error: WaltzError,
        reason: str,
        now_ms: int,
    ) -> bool:
        """A source has rejected a step's request: drop the step.

        Return False if the request was not a read from a source.
        """
        running = self._running.get(correlation_id)
        if running is None or running.source is not source or running.target is source:
            return False
        if (
            isinstance(error, BeforeLogStart)
            and self.archived is not None
            and source.repair is not None
        ):
            # In the meantime, the source has removed archived segments, at most up to the archived
            # mark.
            source.repair.start = self.archived.last
            self._drop_step(correlation_id)
            return True
        self._avoid_source(correlation_id, source.replica, reason, now_ms)
        return True

    def on_overwrite_rejected(
        self, correlation_id: int, peer: ReplicaSession, reason: str, now_ms: int
    ) -> bool:
        """A replica has rejected copies of damaged records; the replica stays usable (rule 6).

        Return False if the rejected request was a different one.
        """
        running = self._running.get(correlation_id)
        if running is None or not isinstance(running.step, OverwriteDamage):
            return False
        assert peer.repair is not None
        if peer.repair.on_overwrite_rejected(running.step):
            # The records may be wrong; another source may have the right ones.
            self._avoid_source(correlation_id, self._damage_sources[peer.replica], reason, now_ms)
        else:
            self._drop_step(correlation_id)
        return True

    def on_damage_found(self, peer: ReplicaSession, notice: messages.DamageFound) -> None:
        """A replica has reported records that it cannot read; `advance` repairs them.

        Raises:
            RemoteProtocolError: the message does not contain ranges of IDs.
        """
        damaged = decode_damaged_ranges(notice.damaged)
        if peer.repair is None:
            return  # Its PREPARED answer will include these records.
        peer.repair.on_damage_found(damaged)
        self._report("replica.damaged", peer, damaged)

    def _avoid_source(
        self, correlation_id: int, source: ReplicaId, reason: str, now_ms: int
    ) -> None:
        target = self._running[correlation_id].target
        self._outbox.append(
            Report(
                "replica.source_unusable",
                (("replica", source), ("target", target.replica), ("reason", reason)),
            )
        )
        until_ms = now_ms + self._limits.answer_ms_max
        self._avoided_until_ms[target.replica, source] = until_ms
        self._drop_step(correlation_id)

    def _drop_step(self, correlation_id: int) -> None:
        target, _, _ = self._running.pop(correlation_id)
        if target.correlation_id == correlation_id:
            target.correlation_id = NO_CORRELATION_ID
        if target.repair is not None:
            target.repair.restart()

    # -----------------------------------------------------------------------------------------
    # answers

    def on_step_answered(
        self, peer: ReplicaSession, correlation_id: int, answer: StorageMessage, now_ms: int
    ) -> None:
        """Process the answer to a step.

        Raises:
            RemoteProtocolError, Damaged: the answer of the replica is invalid.
        """
        running = self._running.get(correlation_id)
        if running is None:
            return  # Rule 1: the step was dropped or has timed out.
        target, source, step = running
        assert source is peer
        assert target.correlation_id == correlation_id
        if isinstance(step, FetchSourceLineage | FetchCopy):
            try:
                self._on_batches_supplied(target, source.replica, step, answer, now_ms)
            except (Damaged, ProtocolError) as error:
                self._avoid_source(correlation_id, source.replica, str(error), now_ms)
                return
        else:
            self._on_step_done(target, step, answer)
        del self._running[correlation_id]
        target.correlation_id = NO_CORRELATION_ID

    def _on_batches_supplied(
        self,
        target: ReplicaSession,
        source: ReplicaId,
        step: FetchSourceLineage | FetchCopy,
        answer: StorageMessage,
        now_ms: int,
    ) -> None:
        if target.is_mark_set and isinstance(step, FetchCopy) and step.needs_whole_batches:
            assert isinstance(answer, messages.RangeBytes)
            verify_records(answer, first=step.first, last=step.last)
            chain = verify_batches(answer, target.next_chain)
            target.append_range(answer, chain, now_ms)
            return
        repair = target.repair
        assert repair is not None
        if isinstance(step, FetchCopy):
            assert isinstance(answer, messages.RangeBytes)
            repair.on_copy_fetched(answer, step)
            self._damage_sources[target.replica] = source
        else:
            assert isinstance(answer, messages.LineageResponse)
            repair.on_source_lineage(answer, first=step.first, last=step.last)

    def _on_step_done(
        self, target: ReplicaSession, step: RepairStep, answer: StorageMessage
    ) -> None:
        repair = target.repair
        assert repair is not None
        if isinstance(answer, messages.LineageResponse):
            assert isinstance(step, FetchOwnLineage)
            repair.on_own_lineage(answer, first=step.first, last=step.last)
        elif isinstance(answer, messages.Appended):
            assert isinstance(step, AppendCopy)
            expected = step.fetched_range.first + step.fetched_range.count - 1
            if answer.synced_max != expected:
                raise RemoteProtocolError(
                    "copy to a replica: expected a log that is synced up to transaction "
                    f"{expected}, found {answer.synced_max}"
                )
            repair.on_copy_appended(step)
        else:
            assert isinstance(answer, messages.ReplicaEnd)
            self._on_log_changed(target, repair, step, answer)

    def _report(
        self, name: str, peer: ReplicaSession, ids: list[tuple[TransactionId, TransactionId]]
    ) -> None:
        ranges = ",".join(f"{first}..{last}" for first, last in ids)
        fields = (("replica", peer.replica), ("ids", ranges), ("is_live", peer.is_mark_set))
        self._outbox.append(Report(name, fields))

    def _on_log_changed(
        self,
        target: ReplicaSession,
        repair: ReplicaRepair,
        step: RepairStep,
        answer: messages.ReplicaEnd,
    ) -> None:
        last, chain = TransactionId(answer.synced_max), Chain(bytes(answer.chain))
        if isinstance(step, Truncation):
            repair.on_log_truncated(last, chain, step)
        elif isinstance(step, ReplicaReset):
            if (last, chain) != step:
                raise RemoteProtocolError(
                    "reset of a replica: expected a log that ends at transaction "
                    f"{step.last}, found {last}"
                )
            repair.on_log_reset(step)
            self._outbox.append(
                Report("replica.reset", (("replica", target.replica), ("last", step.last)))
            )
        elif isinstance(step, OverwriteDamage):
            repair.on_damage_overwritten(step)
            first, count = TransactionId(step.fetched_range.first), step.fetched_range.count
            self._report("replica.repaired", target, [(first, TransactionId(first + count - 1))])
        else:
            assert isinstance(step, SetMark)
            if (last, chain) != step:
                raise RemoteProtocolError(
                    "low-water mark of a replica: expected a log that ends at transaction "
                    f"{step.mark} with chain hash {step.chain.hex()}, found {last} with chain "
                    f"hash {chain.hex()}"
                )
            repair.on_mark_written()
            target.on_mark_written(step.mark, step.chain)


def _request_for_step(
    step: FetchOwnLineage | Truncation | ReplicaReset | AppendCopy | OverwriteDamage | SetMark,
) -> tuple[type[StorageMessage], tuple[object, ...]]:
    """Return the type and the fields of a request to the replica under repair, not to a source."""
    match step:
        case FetchOwnLineage():
            return messages.LineageRequest, tuple(step)
        case Truncation():
            return messages.Truncate, tuple(step)
        case ReplicaReset():
            return messages.ResetLog, tuple(step)
        case AppendCopy(answer, _):
            return messages.AppendRaw, (*_record_fields(answer), *_lineage_fields(answer))
        case OverwriteDamage(answer):
            return messages.Repair, _record_fields(answer)
        case SetMark():
            return messages.SetLowWaterMark, tuple(step)
        case _:
            assert_never(step)


def _record_fields(answer: messages.RangeBytes) -> tuple[object, ...]:
    return answer.first, answer.lengths, answer.records, answer.records_crc


def _lineage_fields(answer: messages.RangeBytes) -> tuple[object, ...]:
    return answer.chain_before, answer.lineage
