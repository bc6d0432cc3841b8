"""Mutants of replication and store sessions. Each mutant breaks one rule."""

from tests.sim.switches import Patches, do_nothing, replaced, switch
from waltz_core.cluster.change import rebuilding
from waltz_core.cluster.znodes.model import UNRESOLVED, ReplicaState
from waltz_core.replication import (
    partition_store,
    replica_repair,
    session_claim,
    session_recovery,
    store_session,
)
from waltz_core.replication.in_doubt_queries import InDoubtQueries
from waltz_core.replication.partition_store import PartitionStore, _PendingRequest
from waltz_core.replication.quorum import Tally, VoteResult, quorum_mark, quorum_size
from waltz_core.replication.repair_runner import RepairRunner
from waltz_core.replication.replica_repair import ReplicaRepair, SetMark
from waltz_core.replication.replica_session import NO_CORRELATION_ID, ReplicaSession, ReplicaStage
from waltz_core.replication.session_events import TransactionsCommitted
from waltz_core.replication.session_recovery import HistoryOrigin, Recovery
from waltz_core.replication.store_session import StoreSession
from waltz_core.storage.log.partition_log import PartitionLog


@switch
def quorum_minus_one() -> Patches:
    """A quorum is one replica less than a majority."""

    def smaller(count):
        return max(1, count // 2)

    yield replaced(store_session, "quorum_size", smaller)


@switch
def older_replica_votes() -> Patches:
    """A replica is trusted although its session is older than the one in ZooKeeper."""

    def is_credible(answer, state, registered_id):
        return not answer.suspect

    yield replaced(session_recovery, "is_credible", is_credible)


@switch
def suspect_counts_as_empty() -> Patches:
    """A suspect replica counts as one that has no records."""
    original = Recovery.on_prepared

    def answered(self, replica, answer, registered_id):
        original(self, replica, answer, registered_id)
        if replica in self.engaged and self._synced_last[replica] is None:
            self._synced_last[replica] = -1

    yield replaced(Recovery, "on_prepared", answered)


@switch
def absent_counts_as_empty() -> Patches:
    """A replica that does not answer counts as one that has no records."""

    def decided_mark(synced_lasts, *, unknown_count, quorum):
        return quorum_mark([*synced_lasts, *[-1] * unknown_count], quorum)

    yield replaced(session_recovery, "decided_mark", decided_mark)


@switch
def suspect_is_trusted() -> Patches:
    """A replica with a suspect log is trusted."""

    def is_credible(answer, state, registered_id):
        return answer.last_session >= state.session_id

    yield replaced(session_recovery, "is_credible", is_credible)


@switch
def damage_is_not_suspect() -> Patches:
    """A replica with damage above its mark is trusted, and gets a mark without a repair."""
    original = ReplicaRepair._complete_step

    def is_credible(answer, state, registered_id):
        return answer.last_session >= state.session_id and not answer.suspect

    def _complete(self, mark, chain, *, has_source):
        self.damaged = []
        return original(self, mark, chain, has_source=has_source)

    yield replaced(session_recovery, "is_credible", is_credible)
    yield replaced(ReplicaRepair, "_complete_step", _complete)


@switch
def storage_id_ignored() -> Patches:
    """Any storage that answers at an address counts as the registered storage."""
    is_credible = session_recovery.is_credible

    def of_any(answer, state, registered_id):
        return is_credible(answer, state, session_recovery.NO_STORAGE_ID)

    def _prepared(self, each, answer, now_ms):
        facts = self._constants
        self._constants = facts._replace(storage_ids={})
        try:
            prepared(self, each, answer, now_ms)
        finally:
            self._constants = facts

    prepared = StoreSession._on_replica_prepared
    yield replaced(session_recovery, "is_credible", of_any)
    yield replaced(StoreSession, "_on_replica_prepared", _prepared)


@switch
def mark_is_the_lowest_end() -> Patches:
    """The decided mark is the lowest of the logs' ends, not the highest ID that a quorum has."""

    def lowest(marks, quorum):
        return min(marks) if len(marks) >= quorum else None

    yield replaced(session_recovery, "quorum_mark", lowest)


@switch
def decided_by_answering_replicas() -> Patches:
    """The replicas that answer decide by majority, even if they are not a quorum."""

    def decided_mark(synced_lasts, *, unknown_count, quorum):
        return quorum_mark(synced_lasts, quorum_size(len(synced_lasts))) if synced_lasts else None

    yield replaced(session_recovery, "decided_mark", decided_mark)


@switch
def cut_before_decision() -> Patches:
    """A replica is truncated to its own mark as soon as it answers (as in Waltz 0.13)."""
    original = StoreSession._on_replica_prepared

    def _prepared(self, each, answer, now_ms):
        original(self, each, answer, now_ms)
        mark = answer.low_water_mark
        if each.repair is not None and self.window is None and answer.synced_max > mark:
            each.repair._confirmed_mark = mark
            each.repair.last = answer.synced_max
            self.recovery._synced_last[each.replica] = mark

    yield replaced(StoreSession, "_on_replica_prepared", _prepared)


@switch
def mark_on_a_short_log() -> Patches:
    """A low-water mark is set on a replica whose log does not reach it."""
    next_step, changed, set_mark = (
        ReplicaRepair.next_step,
        RepairRunner._on_log_changed,
        PartitionLog.set_low_water_mark,
    )

    def _next_step(self, goal, *, has_source):
        step = next_step(self, goal, has_source=has_source)
        if step is not None and goal.chain is not None and self.last < goal.mark:
            return SetMark(goal.mark, goal.chain)
        return step

    def _changed(self, each, repair, step, answer):
        if isinstance(step, SetMark):
            repair.on_mark_written()
            each.on_mark_written(step.mark, step.chain)
        else:
            changed(self, each, repair, step, answer)

    def set_low_water_mark(self, session, mark, chain):
        files = self._files
        chain_before, files.chain = files.chain, chain
        last, files.synced_max = files.synced_max, mark
        try:
            with replaced(PartitionLog, "max_id", property(lambda _: mark)):
                set_mark(self, session, mark, chain)
        finally:
            files.chain, files.synced_max = chain_before, last

    yield replaced(ReplicaRepair, "next_step", _next_step)
    yield replaced(RepairRunner, "_on_log_changed", _changed)
    yield replaced(PartitionLog, "set_low_water_mark", set_low_water_mark)


@switch
def open_before_second_cas() -> Patches:
    """A session opens before the states of its replicas are in ZooKeeper."""
    original = PartitionStore._write_metadata

    def _write(self, view, waiting):
        original(self, view, waiting)
        if waiting is _PendingRequest.STATES_WRITE and self._session.window is None:
            self._pending_request = _PendingRequest.NO_REQUEST
            self._on_metadata_written(as_written(view))

    yield replaced(PartitionStore, "_write_metadata", _write)


def as_written(view):
    """Return the view as if it had been written successfully."""
    return view._replace(
        metadata_version=view.metadata_version + 1, marker_version=view.marker_version + 1
    )


@switch
def unknown_cas_taken_as_success() -> Patches:
    """A write to ZooKeeper with an unknown outcome counts as successful."""
    original = PartitionStore._on_coordinator_unavailable

    def _on_coordinator_unavailable(self, waiting, reason):
        if waiting in (_PendingRequest.STATES_WRITE, _PendingRequest.CLAIM):
            self._on_metadata_written(as_written(self._nodes_being_written))
        else:
            original(self, waiting, reason)

    yield replaced(PartitionStore, "_on_coordinator_unavailable", _on_coordinator_unavailable)


@switch
def conflict_taken_as_success() -> Patches:
    """A write of replica states counts as successful although ZooKeeper reported a conflict."""
    original = PartitionStore._on_metadata_read

    def _on_metadata_read(self, waiting, view):
        if waiting is _PendingRequest.STATES_CHECK:
            self._on_metadata_written(self._nodes_being_written)
        else:
            original(self, waiting, view)

    yield replaced(PartitionStore, "_on_metadata_read", _on_metadata_read)


@switch
def late_replica_counts_at_once() -> Patches:
    """A late replica gets appends, and counts towards the quorum, before it is engaged."""
    original = StoreSession._send_from_window

    def _feed(self, each, now_ms):
        stage, each.stage = each.stage, ReplicaStage.ENGAGED
        original(self, each, now_ms)
        if each.stage is ReplicaStage.ENGAGED:
            each.stage = stage

    def _commit(self, now_ms):
        marked = (ReplicaStage.ENGAGED, ReplicaStage.READY)
        marks = [
            replica.synced_last for replica in self.replicas.values() if replica.stage in marked
        ]
        if self.window.commit(min(quorum_mark(marks, self.quorum), self.window.last)):
            self._progress_ms = now_ms
            chain = self.window.committed_chain
            self._outbox.append(
                TransactionsCommitted(self.claim.session_id, self.window.committed, chain)
            )

    def submit(self, batch, now_ms):
        self.window.add(batch, self.claim.session_id, now_ms)
        for replica in self.replicas.values():
            if replica.is_mark_set:
                self._send_from_window(replica, now_ms)

    yield replaced(StoreSession, "_send_from_window", _feed)
    yield replaced(StoreSession, "_commit", _commit)
    yield replaced(StoreSession, "submit", submit)
    yield replaced(StoreSession, "_joined_states", do_nothing)


@switch
def lost_replica_rejoins() -> Patches:
    """An engaged replica whose connection broke continues in the same session."""
    original = StoreSession._drop_replica

    def _drop_replica(self, each, reason, now_ms, **why):
        if each.stage is not ReplicaStage.ENGAGED or len(self.engaged) <= self.quorum:
            original(self, each, reason, now_ms, **why)
            return
        self.repairs.on_connection_lost(each)
        each.close()
        each.on_connection_lost(now_ms, self._rng)
        each.cannot_rejoin = False

    yield replaced(StoreSession, "_drop_replica", _drop_replica)


@switch
def connections_are_replaced() -> Patches:
    """The owner reconnects to a replica in the same session although log writes are unanswered.

    The owner also sends no query before a truncation. During such a query, messages in flight on
    the old connection would arrive, and 3,000 seeds would not detect the fault. In addition, the
    owner ignores that a storage was engaged in a session that ZooKeeper does not know. If the owner
    did not ignore this, the partition would halt.
    """

    def _reset_connection_state(self):
        self.stage, self.repair, self.correlation_id = ReplicaStage.ABSENT, None, NO_CORRELATION_ID
        self.unanswered_bytes = 0
        self._requests.clear()

    def _next_step(self, goal, *, has_source):
        return None if self.is_mark_set else self._choose_step(goal, has_source=has_source)

    def exclusion_reason(self, answer):
        return (
            "has records of an unrecorded partition"
            if self.has_unexpected_records(answer)
            else None
        )

    yield replaced(ReplicaSession, "_reset_connection_state", _reset_connection_state)
    yield replaced(ReplicaRepair, "next_step", _next_step)
    yield replaced(Recovery, "exclusion_reason", exclusion_reason)


@switch
def appends_settled_by_id_alone() -> Patches:
    """An append of the previous session counts as committed if the log reaches its ID."""
    original = InDoubtQueries._set_outcome

    def _set_outcome(self, committed_last):
        range_in_doubt = self._claim.in_doubt
        original(
            self, committed_last if range_in_doubt is None else min(range_in_doubt.last, self._mark)
        )

    yield replaced(InDoubtQueries, "_set_outcome", _set_outcome)


@switch
def empty_metadata_taken_as_new() -> Patches:
    """A partition that ZooKeeper has forgotten counts as a new one."""

    def history_origin_of(metadata, marker):
        return (
            HistoryOrigin.RECORDED
            if metadata is not None and metadata.states
            else HistoryOrigin.NEW
        )

    for module in (partition_store, session_claim, session_recovery):
        yield replaced(module, "history_origin_of", history_origin_of)
    yield replaced(partition_store, "claim_rejection", do_nothing)
    yield replaced(Recovery, "exclusion_reason", do_nothing)


@switch
def older_generation_claims() -> Patches:
    """A server claims a session for a generation that is over."""

    def is_later_generation(one, other):
        return False

    yield replaced(partition_store, "is_later_generation", is_later_generation)
    yield replaced(session_claim, "is_later_generation", is_later_generation)


@switch
def writes_of_other_servers_not_checked() -> Patches:
    """A server assumes that no other server has written between two of its sessions."""
    original = PartitionStore._claim_session

    def _claim_session(self, view):
        had_one = bool(self._own_claims)
        original(self, view)
        self._follows_own_session = had_one

    yield replaced(PartitionStore, "_claim_session", _claim_session)


@switch
def engaged_although_not_ready() -> Patches:
    """All assigned replicas are recorded as engaged, even those that are not ready."""
    original = Recovery.opening_states

    def opening_states(self, session_id, assigned, ready):
        states = original(self, session_id, assigned, ready)
        return {replica: ReplicaState(session_id, UNRESOLVED) for replica in states}

    yield replaced(Recovery, "opening_states", opening_states)


@switch
def missed_append_counts_as_synced() -> Patches:
    """An append that a replica has missed counts as synced by this replica."""

    def appended(self, request, answer):
        self.unanswered_bytes -= len(request.records)
        self.synced_last = max(self.synced_last, request.lineage[-1].last)

    original = ReplicaSession.append_from_window

    def append_from_window(self, window_batch, now_ms):
        if window_batch.entry.last % 7 == 3:
            self.next_id, self.next_chain = window_batch.entry.last + 1, window_batch.entry.chain
            self.synced_last = window_batch.entry.last
        else:
            original(self, window_batch, now_ms)

    yield replaced(ReplicaSession, "on_append_synced", appended)
    yield replaced(ReplicaSession, "append_from_window", append_from_window)


@switch
def sent_counts_as_synced() -> Patches:
    """Records that were sent to a replica count as synced there."""
    original = StoreSession._send_from_window

    def _feed(self, each, now_ms):
        original(self, each, now_ms)
        if each.stage is ReplicaStage.ENGAGED:
            each.synced_last = max(each.synced_last, each.next_id - 1)
            self._commit(now_ms)

    yield replaced(StoreSession, "_send_from_window", _feed)


@switch
def lineage_not_compared() -> Patches:
    """A log that is shorter than the decided log is filled up without a comparison of lineages."""

    def _check_aligned(self):
        self._is_aligned = True
        return True

    def verify_batches(answer, chain):
        return answer.lineage[-1].chain

    yield replaced(ReplicaRepair, "_check_aligned", _check_aligned)
    yield replaced(replica_repair, "verify_batches", verify_batches)


@switch
def mark_answered_without_a_session() -> Patches:
    """The answer of one storage, not of a quorum, confirms that a mark is current."""

    def result(self):
        return VoteResult.COMMITTED if self._voters else VoteResult.OPEN

    yield replaced(Tally, "result", property(result))


@switch
def appends_in_flight_are_forgotten() -> Patches:
    """Appends in flight count as lost when their session ends, without a check of the log."""
    original = InDoubtQueries.begin

    def begin(self, now_ms):
        range_in_doubt = self._claim.in_doubt
        if range_in_doubt is None or self._stamp_ms is None:
            original(self, now_ms)
        else:
            self._set_outcome(range_in_doubt.committed)

    yield replaced(InDoubtQueries, "begin", begin)


@switch
def former_quorum_not_needed() -> Patches:
    """A session opens although no quorum of the last assignment has its mark."""

    def _has_quorum(self, ready):
        return sum(replica in self.claim.assigned for replica in ready) >= self.quorum

    yield replaced(StoreSession, "_has_quorum", _has_quorum)


@switch
def stamps_continue_from_the_clock() -> Patches:
    """A new owner stamps batches by its own clock, and ignores the log's last stamp."""
    original = InDoubtQueries.begin

    def begin(self, now_ms):
        self._stamp_ms = self._stamp_ms or 0
        original(self, now_ms)

    yield replaced(InDoubtQueries, "begin", begin)


@switch
def marked_before_zookeeper() -> Patches:
    """`accept-replicas` marks the replica as trusted before it writes to ZooKeeper."""

    async def declare(metadata, operations):
        await operations.set_low_water_mark()
        await operations.write_metadata(metadata)
        await operations.assign_replicas()

    yield replaced(rebuilding, "declare_log", declare)
