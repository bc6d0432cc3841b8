"""Mutants of the server. Each mutant breaks one rule."""

import dataclasses

import numpy as np

from tests.sim.switches import Patches, do_nothing, replaced, switch
from waltz_core.cluster.zookeeper.watchdog import Watchdog
from waltz_core.records.batches import LockColumn
from waltz_core.records.lock_blocks import LockBlockReader
from waltz_core.server.append import pipeline
from waltz_core.server.append.admission import Admission
from waltz_core.server.append.mounts import Mounts
from waltz_core.server.append.outcomes import BarrierReached
from waltz_core.server.append.pipeline import AppendPipeline
from waltz_core.server.locking import validation
from waltz_core.server.locking.dependent_appends import DependentAppends, RecentAppends
from waltz_core.server.locking.lock_queues import LockQueues
from waltz_core.server.locking.lock_table import LockTable
from waltz_core.server.locking.pending_appends import PendingBatch
from waltz_core.server.locking.validation import ValidatedPiece
from waltz_core.server.partition.linearizable_requests import LinearizableRequests
from waltz_core.server.partition.served_partition import Partition
from waltz_core.server.read.reads import Reads
from waltz_core.wire.messages import RowOutcomeCode


@switch
def locks_kept_over_foreign_session() -> Patches:
    """A server keeps its lock table although another server may have written since."""
    yield replaced(LockTable, "reset", do_nothing)


@switch
def fences_end_with_a_release() -> Patches:
    """A server that releases a partition forgets which older attempts it has to reject."""
    yield replaced(Mounts, "on_partition_released", Mounts.on_generation_started)


@switch
def lost_locks_are_not_clamped() -> Patches:
    """The locks of transactions that were lost stay in the lock table."""
    yield replaced(LockTable, "undo_entries_above", do_nothing)


@switch
def locks_written_at_commit() -> Patches:
    """A lock is entered into the lock table at the commit, not when it is checked."""
    validate, validate_one, committed = (
        LockTable.validate,
        LockTable.validate_one,
        AppendPipeline.on_committed,
    )
    later = {}  # table -> the locks that are entered later, by ID

    def without_entries(self, call, next_id):
        before = self._slots.copy()
        found = call()
        changed = np.flatnonzero(self._slots != before)
        entries = later.setdefault(id(self), [])
        entries += [(int(self._slots[slot]), int(slot)) for slot in changed]
        self._slots[changed] = before[changed]
        return found

    def validate_later(self, requests, *, high_water_mark, next_id):
        marks = {"high_water_mark": high_water_mark, "next_id": next_id}
        return without_entries(self, lambda: validate(self, requests, **marks), next_id)

    def validate_one_later(self, locks, mark, *, high_water_mark, next_id):
        marks = {"high_water_mark": high_water_mark, "next_id": next_id}
        return without_entries(self, lambda: validate_one(self, locks, mark, **marks), next_id)

    def committed_then_entered(self, last, chain, *, now_ms):
        entries = later.pop(id(self._lock_table), [])
        for entered, slot in entries:
            if entered <= last:
                self._lock_table._slots[slot] = max(entered, self._lock_table._slots[slot])
        later[id(self._lock_table)] = [entry for entry in entries if entry[0] > last]
        return committed(self, last, chain, now_ms=now_ms)

    yield replaced(LockTable, "validate", validate_later)
    yield replaced(LockTable, "validate_one", validate_one_later)
    yield replaced(AppendPipeline, "on_committed", committed_then_entered)


@switch
def read_locks_unchecked() -> Patches:
    """Read locks are not checked."""
    yield from without_locks("read")


@switch
def append_locks_not_entered() -> Patches:
    """Append locks are not entered into the lock table."""
    yield from without_locks("append")


def without_locks(kind):
    """Validate every row as if it had requested no locks of a kind."""
    validate, validate_one = LockTable.validate, LockTable.validate_one

    def validate_rows(self, requests, *, high_water_mark, next_id):
        requested = getattr(requests, kind)
        none = requested._replace(
            offsets=np.zeros_like(requested.offsets), values=requested.values[:0]
        )
        marks = {"high_water_mark": high_water_mark, "next_id": next_id}
        return validate(self, requests._replace(**{kind: none}), **marks)

    def validate_row(self, locks, mark, *, high_water_mark, next_id):
        marks = {"high_water_mark": high_water_mark, "next_id": next_id}
        write, read, append = locks
        remaining_locks = (write, (), append) if kind == "read" else (write, read, ())
        return validate_one(self, remaining_locks, mark, **marks)

    yield replaced(LockTable, "validate", validate_rows)
    yield replaced(LockTable, "validate_one", validate_row)


@switch
def conflict_in_flight_answered_at_once() -> Patches:
    """A row is rejected while the transaction that it conflicts with is still in flight."""
    rows, singles = pipeline.validate_rows, pipeline.validate_singles

    def validate_rows(pending, stop, table, position):
        piece = rows(pending, stop, table, position)
        return (
            piece
            if piece.part is not None
            else ValidatedPiece(None, [], [*piece.unsettled_appends, *piece.rejected_appends])
        )

    def validate_singles(group, table, position):
        piece = singles(group, table, position)
        assigned = [pending for pending in piece.unsettled_appends if pending.transaction_id >= 0]
        outcome = [pending for pending in piece.unsettled_appends if pending.transaction_id < 0]
        return ValidatedPiece(piece.part, assigned, [*piece.rejected_appends, *outcome])

    yield replaced(pipeline, "validate_rows", validate_rows)
    yield replaced(pipeline, "validate_singles", validate_singles)


@switch
def rows_see_no_rows_of_their_batch() -> Patches:
    """A row of a batch is not checked against the preceding rows of the batch."""
    original = LockTable._estimates

    def _estimates(self, requests, entered_rows, entered_slots):
        found = original(self, requests, entered_rows, entered_slots)
        return found._replace(values_before_row=found.values_before_batch)

    yield replaced(LockTable, "_estimates", _estimates)


@switch
def client_ahead_accepted() -> Patches:
    """The server accepts a transaction although its author's mark is above the end of the log."""
    validate, validate_one = LockTable.validate, LockTable.validate_one

    def validate_rows(self, requests, *, high_water_mark, next_id):
        marks = np.minimum(requests.marks, high_water_mark)
        known = {"high_water_mark": high_water_mark, "next_id": next_id}
        return validate(self, requests._replace(marks=marks), **known)

    def validate_row(self, locks, mark, *, high_water_mark, next_id):
        known = {"high_water_mark": high_water_mark, "next_id": next_id}
        return validate_one(self, locks, min(mark, high_water_mark), **known)

    yield replaced(LockTable, "validate", validate_rows)
    yield replaced(LockTable, "validate_one", validate_row)


@switch
def loss_answered_before_settled() -> Patches:
    """When a session ends, its appends in flight are reported as LOST at once."""
    original = Partition._on_session_closed

    def _on_session_closed(self, event):
        original(self, event)
        pipeline = self.pipeline
        outcomes = []
        pipeline._in_flight.draft = None
        for sent in pipeline._in_flight.pop_lost_batches()[0]:
            for pending in sent.appends:
                if pending.mark_if_lost(pipeline.high_water_mark):
                    pipeline._mounts.require_remount(pending.req_id.client_id)
                pipeline._finish_part(pending, outcomes)
            outcomes.extend(BarrierReached(token) for token in sent.waiting_tokens)
        self._route_appends(outcomes)

    yield replaced(Partition, "_on_session_closed", _on_session_closed)


@switch
def mount_does_not_wait() -> Patches:
    """A mount is answered before the client's older appends are final."""

    def add_barrier(self, token):
        return [BarrierReached(token)]

    yield replaced(AppendPipeline, "add_barrier", add_barrier)


@switch
def connection_checked_on_arrival_only() -> Patches:
    """The right to append is checked when a request arrives, not when the request is processed."""
    receive, stale = AppendPipeline.receive, Admission.invalid_mount_code
    passed = {}

    def receive_checked(self, connection, message, **others):
        if self._mounts.is_ready(message.req_id.client_id, connection):
            passed[(connection, message.req_id)] = True
        return receive(self, connection, message, **others)

    def still_fresh(self, pending):
        if passed.pop((pending.connection, pending.req_id), False):
            return None
        return stale(self, pending)

    def drop_nothing(self, connection):
        return []

    yield replaced(AppendPipeline, "receive", receive_checked)
    yield replaced(Admission, "invalid_mount_code", still_fresh)
    yield replaced(AppendPipeline, "close", drop_nothing)


@switch
def older_connections_may_append() -> Patches:
    """After a newer mount of a client, an append on its older connection enters the log."""

    def is_ready(self, client_id, connection):
        mount = self._mounts.get(client_id)
        return mount is not None and mount.is_ready

    yield replaced(Mounts, "is_ready", is_ready)


@switch
def mount_fences_when_answered() -> Patches:
    """After a mount request, older connections of the client may append until the answer."""
    begin, finish, is_ready = Mounts.begin_mount, Mounts.finish_mount, Mounts.is_ready
    older = {}  # the mounts of one partition -> by client, the connection that still appends

    def begin_keeping_the_older(self, client_id, connection, *others):
        mount = self._mounts.get(client_id)
        if mount is not None and mount.is_ready:
            older.setdefault(id(self), {})[client_id] = mount.connection
        begin(self, client_id, connection, *others)

    def finish_alone(self, client_id, connection):
        older.get(id(self), {}).pop(client_id, None)
        finish(self, client_id, connection)

    def is_either_ready(self, client_id, connection):
        is_older = older.get(id(self), {}).get(client_id) == connection
        return is_older or is_ready(self, client_id, connection)

    yield replaced(Mounts, "begin_mount", begin_keeping_the_older)
    yield replaced(Mounts, "finish_mount", finish_alone)
    yield replaced(Mounts, "is_ready", is_either_ready)


@switch
def lost_row_keeps_its_mount() -> Patches:
    """After a lost row, the server accepts later appends that the client had already sent."""
    yield replaced(Mounts, "require_remount", do_nothing)


@switch
def cache_filled_at_submission() -> Patches:
    """Appends in flight can be read from the caches, and stay there when they are lost."""
    original = Partition._route_appends

    def _route_appends(self, outcomes):
        for outcome in outcomes:
            if isinstance(outcome, pipeline.SubmitBatch):
                sent = [*self.pipeline._in_flight][-1]
                self.reads.cache_batch(sent.entry, sent.batch)
            if not isinstance(outcome, pipeline.BatchCommitted):
                original(self, [outcome])

    yield replaced(Partition, "_route_appends", _route_appends)
    yield replaced(Reads, "clear_caches", do_nothing)


@switch
def feed_includes_transactions_in_flight() -> Patches:
    """The feed includes transactions in flight."""
    original = Partition._route_appends

    def _route_appends(self, outcomes):
        original(self, outcomes)
        for outcome in outcomes:
            if isinstance(outcome, pipeline.SubmitBatch):
                sent = next(reversed([*self.pipeline._in_flight]), None)
                if sent is not None and sent.batch is outcome.batch:
                    self.reads.cache_batch(sent.entry, sent.batch)
                    self.reads.on_mark_advanced(sent.entry.last)
                    self.feed.on_mark_advanced(self._session_id, sent.entry.last)

    yield replaced(Partition, "_route_appends", _route_appends)


@switch
def appends_taken_after_the_session() -> Patches:
    """A session accepts appends after its end, and the next session does not settle them."""
    closed, settled = AppendPipeline.on_session_closed, AppendPipeline.on_session_settled

    def closed_but_open(self, loss=RowOutcomeCode.LOST):
        outcome = closed(self, loss)
        self._is_open = True
        return outcome

    def settled_again(self, opened, last, *, follows_own_session, stamp_ms=0):
        self._is_open = False
        return settled(
            self, opened, last, follows_own_session=follows_own_session, stamp_ms=stamp_ms
        )

    yield replaced(AppendPipeline, "on_session_closed", closed_but_open)
    yield replaced(AppendPipeline, "on_session_settled", settled_again)


@switch
def mark_answered_without_proof() -> Patches:
    """A server answers with its mark without checking whether a later session exists."""

    def is_proof_fresh(self, now_ms):
        return True

    def _answer_mark(self, event, *, needs_proof=False):
        self._effects.append(self._current_mark_answer(event))

    yield replaced(LinearizableRequests, "is_proof_fresh", is_proof_fresh)
    yield replaced(Partition, "_answer_mark", _answer_mark)


@switch
def flush_does_not_wait() -> Patches:
    """A flush is answered before the preceding appends are final."""

    def flush(self, token):
        return [BarrierReached(token)]

    yield replaced(AppendPipeline, "flush", flush)


@switch
def released_counts_as_lost() -> Patches:
    """A server that releases a partition reports waiting appends as not in the log."""
    original = AppendPipeline.abandon

    def abandon(self):
        queued, doubtful, outcomes = original(self)
        return [*queued, *doubtful], [], outcomes

    yield replaced(AppendPipeline, "abandon", abandon)


@switch
def doubtful_batches_are_committed() -> Patches:
    """Appends in flight are reported as committed when their session is lost."""
    original = AppendPipeline.on_session_settled

    def settled(self, opened, last, *, follows_own_session, stamp_ms=0):
        for sent in self._in_flight:
            last = max(last, min(sent.entry.last, opened.high_water_mark))
        return original(
            self, opened, last, follows_own_session=follows_own_session, stamp_ms=stamp_ms
        )

    yield replaced(AppendPipeline, "on_session_settled", settled)


@switch
def batch_answered_before_all_rows_are_final() -> Patches:
    """A batch is answered when all its rows are validated, before they are final."""
    yield replaced(PendingBatch, "is_final", property(lambda self: self.is_validated))


@switch
def held_rejections_lost_with_session() -> Patches:
    """A rejection that waits for another transaction is never sent if the session ends."""

    def forgotten(self):
        self._queues.clear()
        return []

    yield replaced(LockQueues, "take_all", forgotten)


@switch
def lock_blocks_trusted_without_chain() -> Patches:
    """A lock block is accepted if its IDs fit, even if it is from another log."""

    def below(self, end, steps_max):
        for _ in range(steps_max):
            block = self._take_last_block()
            if block is None or block.end.last < end.last:
                self.is_exhausted = True
                return None
            if block.end.last == end.last:
                return block
        return None

    yield replaced(LockBlockReader, "block_ending_at", below)


@switch
def gap_between_lock_blocks_ignored() -> Patches:
    """If a lock block is missing, the earlier blocks are used anyway."""

    def below(self, end, steps_max):
        while (block := self._take_last_block()) is not None and block.end.last > end.last:
            pass
        self.is_exhausted = block is None
        return block

    yield replaced(LockBlockReader, "block_ending_at", below)


@switch
def lock_blocks_replace_newer_locks() -> Patches:
    """Lock blocks replace newer locks, which were written since the session opened."""
    enter_older_locks = LockTable.enter_older_locks

    def refine_all(self, floor, lower_floor, locks, ids):
        np.minimum(self._slots, floor, out=self._slots)
        enter_older_locks(self, floor, lower_floor, locks, ids)

    yield replaced(LockTable, "enter_older_locks", refine_all)


@switch
def append_locks_missing_in_lock_blocks() -> Patches:
    """A lock block contains only write locks, not append locks."""
    rows, singles = pipeline.validate_rows, pipeline.validate_singles

    def validate_rows(pending, stop, table, position):
        def without(outcome):
            def no_append_locks(rows_kept, keep):
                none = LockColumn(np.zeros(rows_kept.count + 1, np.int64), np.zeros(0, np.int32))
                return outcome(dataclasses.replace(rows_kept, append_locks=none), keep)

            return no_append_locks

        entered, lock_rows = without(validation.entered_locks), without(validation.lock_rows_of)
        with (
            replaced(validation, "entered_locks", entered),
            replaced(validation, "lock_rows_of", lock_rows),
        ):
            return rows(pending, stop, table, position)

    def validate_singles(group, table, position):
        piece = singles(group, table, position)
        assigned = [pending.message for pending in group if pending.transaction_id >= 0]
        locks = [lock for each in assigned for lock in each.write_locks]
        lock_rows = bytes(row for row, each in enumerate(assigned) for _ in each.write_locks)
        packed = np.array(locks, dtype=">i4").tobytes()
        return piece._replace(locks=packed, lock_rows=lock_rows)

    yield replaced(pipeline, "validate_rows", validate_rows)
    yield replaced(pipeline, "validate_singles", validate_singles)


@switch
def followed_session_not_compared() -> Patches:
    """A dependent append is accepted although it depends on appends of another session."""

    def holds(self, message, last):
        return message.client_high_water_mark <= last

    yield replaced(DependentAppends, "knows_predecessors", holds)


@switch
def predecessors_left_out() -> Patches:
    """The answer to a dependent append omits the last transaction with one of its locks."""
    original = RecentAppends.records_above

    def above(self, mark, locks):
        found = original(self, mark, locks)
        return found[:-1] if found else found

    yield replaced(RecentAppends, "records_above", above)


@switch
def append_locks_not_followed() -> Patches:
    """The answer to a dependent append omits predecessors that wrote the lock as an append lock."""
    original = RecentAppends.add

    def add(self, pending, record):
        message = dataclasses.replace(pending.message, append_locks=())
        original(self, dataclasses.replace(pending, message=message), record)

    yield replaced(RecentAppends, "add", add)


@switch
def hanging_server_keeps_its_session() -> Patches:
    """The watchdog never fires: a server whose event loop hangs stays in ZooKeeper."""

    def may_keep_session(self, now_ms):
        return True

    yield replaced(Watchdog, "may_keep_session", may_keep_session)
