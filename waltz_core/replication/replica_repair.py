"""Makes one replica's log equal to the decided log: truncate, copy, repair damage, set the mark.

Only this module removes records. It processes one replica and the goal (the decided log).
`repair_runner.py` chooses the sources and has the connections.

Rules (docs/design/correctness.md 2.1 F):
    1. A repair starts only after the high-water mark is decided. In this module, "the mark" is this
       high-water mark.
    2. Records above the mark were never acknowledged and are truncated.
    3. Below the mark, the log is truncated only if its hash chain differs from the goal's chain. It
       is truncated to the last batch end where both chains are equal. It is never truncated below
       the replica's own confirmed low-water mark.
    4. Copied records are checked by their CRCs and by the chain before they are sent to the
       replica.
    5. The mark is set only when the log ends at the mark with the goal's chain.
    6. Before a truncation, the repair requests the log's newest batch. `repair_runner.py` then
       checks that ZooKeeper knows the session of this batch.
    7. If no source has the records that a log lacks, the log is reset: it begins again after the
       archived mark (AR 12 in decision 047). There are two such cases:
        - The log is empty and ends below the archived mark.
        - The log and the sources have no common batch end at or above the lowest start of the
          sources.
    8. If a source cannot read its batch entries, it reconstructs batches, and marks them as
       reconstructed. Reconstructed batches may differ from the original batches. So they are never
       copied, and no other log is truncated to match them.

The next step follows from the known state of the log. One step is in flight at a time:

    longer than the mark    own lineage at the mark, and its newest batch -> Truncation
    below all starts        its newest batch -> ReplicaReset (rule 7)
    chain differs           the source's chain at the end of this log; if it differs, both lineages,
                            newest first -> Truncation to the last common batch end (rule 6)
    damaged                 FetchCopy -> OverwriteDamage. Damage below the previous mark does not
                            delay the mark: it is repaired before the mark is set if a source has
                            the records, or later
    shorter                 FetchCopy -> AppendCopy
    equal                   SetMark
"""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from waltz_core.cluster.znodes.model import ArchivedMark
from waltz_core.errors import BadFormat, ChecksumMismatch, DataLoss, RemoteProtocolError
from waltz_core.records import raw_records
from waltz_core.records.checksum import crc32
from waltz_core.records.record import (
    BEFORE_FIRST,
    RECONSTRUCTED,
    Chain,
    SessionId,
    TransactionId,
    next_chain,
)
from waltz_core.wire.messages import LineageResponse, Prepared, RangeBytes

_LOST_BATCHES_TEXT = "the source replica has lost the batches of transactions {}..{}"


class RepairGoal(NamedTuple):
    """The decided mark, and the log's hash chain there.

    `chain` is None until a log ends at the mark. `archived_mark` is set only if the log may be
    reset (rule 7). `lowest_source_start` is the lowest ID after which the log of a source begins.
    """

    mark: TransactionId
    chain: Chain | None
    archived_mark: ArchivedMark | None = None
    lowest_source_start: TransactionId = BEFORE_FIRST


class FetchOwnLineage(NamedTuple):
    """Request the lineage of this replica."""

    first: TransactionId
    last: TransactionId


class FetchSourceLineage(NamedTuple):
    """Request the lineage of the source."""

    first: TransactionId
    last: TransactionId


class Truncation(NamedTuple):
    """Truncate this replica's log after `last_to_keep`.

    `base` is a batch end at or below `last_to_keep`, and `base_chain` is the hash chain there.
    """

    last_to_keep: TransactionId
    base: TransactionId
    base_chain: Chain


class ReplicaReset(NamedTuple):
    """Delete the records of this replica: its log begins again after an archived ID."""

    last: TransactionId
    chain: Chain


class FetchCopy(NamedTuple):
    """Read from the source: whole batches to append, or records to replace damaged ones."""

    first: TransactionId
    last: TransactionId
    needs_whole_batches: bool


class AppendCopy(NamedTuple):
    """Append the fetched batches; `chain` is the hash chain of the log after them."""

    fetched_range: RangeBytes
    chain: Chain


class OverwriteDamage(NamedTuple):
    """Overwrite damaged records with the fetched records."""

    fetched_range: RangeBytes


class SetMark(NamedTuple):
    """Make the session and the low-water mark durable."""

    mark: TransactionId
    chain: Chain


# Returns whether another replica has the records of a damaged range.
HasSource: TypeAlias = Callable[[TransactionId, TransactionId], bool]
RepairStep: TypeAlias = (
    FetchOwnLineage
    | FetchSourceLineage
    | Truncation
    | ReplicaReset
    | FetchCopy
    | AppendCopy
    | OverwriteDamage
    | SetMark
)


class ReplicaRepair:
    """The known state of one replica's log, and the next step of its repair.

    Raises DataLoss if the log contradicts the goal below the replica's confirmed low-water mark. If
    copied records are wrong, raises the errors of `verify_records` and `verify_batches`.
    """

    def __init__(self, answer: Prepared) -> None:
        self.last = TransactionId(answer.synced_max)
        self.chain = Chain(bytes(answer.chain))
        self.is_mark_set = False
        self.start = TransactionId(max(answer.start, BEFORE_FIRST))
        self._start_chain = Chain(bytes(answer.start_chain))
        # A provisional mark protects no records, and the answer contains no older mark.
        confirmed = answer.low_water_mark if answer.mark_confirmed else BEFORE_FIRST
        self._confirmed_mark = TransactionId(confirmed)
        self._old_mark = answer.low_water_mark
        self.damaged = decode_damaged_ranges(answer.damaged)
        # Whether the goal's log, whose chain is `_goal_chain`, is known to have the batch end
        # (last, chain).
        self._is_aligned = False
        self._goal_chain: Chain | None = None
        # The session of this log's newest batch (None: not known), and whether to request it now.
        self.newest_session: SessionId | None = None
        self._needs_newest_session = False
        self._own_lineage: LineageResponse | None = None
        self._source_lineage: LineageResponse | None = None
        self._search_end: TransactionId | None = None
        self._fetched_range: RangeBytes | None = None
        self._fetched_chain = self.chain

    def reaches(self, goal: RepairGoal) -> bool:
        """Whether the log ends exactly at the goal."""
        return self.last == goal.mark and self.chain == goal.chain

    # -----------------------------------------------------------------------------------------
    # the next step

    def next_step(self, goal: RepairGoal, *, has_source: HasSource) -> RepairStep | None:
        """Return the next step; None if the repair is done or must wait.

        The repair waits for the goal's chain, or for a source with the damaged records.
        """
        if self.is_mark_set:
            return None
        step = self._choose_step(goal, has_source=has_source)
        is_destructive = isinstance(step, Truncation | ReplicaReset) and self.last > self.start
        self._needs_newest_session = is_destructive and self.newest_session is None
        return FetchOwnLineage(self.last, self.last) if self._needs_newest_session else step

    def _choose_step(self, goal: RepairGoal, *, has_source: HasSource) -> RepairStep | None:
        if self.last > goal.mark:
            return self._truncation_step(goal.mark)
        archived = goal.archived_mark
        if archived is not None and self._must_reset(archived, goal.lowest_source_start):
            return ReplicaReset(archived.last, archived.chain)
        if goal.chain is None:
            return None
        if goal.chain != self._goal_chain:
            self._discard_answers()
            self._goal_chain, self._is_aligned = goal.chain, False
        if self.reaches(goal) or self.last == BEFORE_FIRST:
            self._is_aligned = True
        if not self._is_aligned and not self._check_aligned():
            return self._align_step(goal.lowest_source_start)
        return self._complete_step(goal.mark, goal.chain, has_source=has_source)

    def _must_reset(self, archived: ArchivedMark, lowest_source_start: TransactionId) -> bool:
        """Whether to reset the log: it is empty, or no source has its next batches (rule 7)."""
        is_empty = self.last == self.start
        return self.last < archived.last and (is_empty or self.last < lowest_source_start)

    def overwrite_step(self, damaged: tuple[TransactionId, TransactionId]) -> RepairStep:
        """Return the step that repairs a damaged range of a marked replica.

        The range may be above the mark. It is one of `self.damaged`, and another replica has its
        records.
        """
        assert damaged in self.damaged
        return self._overwrite_step(*damaged)

    def _complete_step(
        self, mark: TransactionId, chain: Chain, *, has_source: HasSource
    ) -> RepairStep | None:
        """The log is a prefix of the goal's log: repair damage, complete the log, set its mark."""
        assert self.last <= mark
        # A truncation may have removed a part of a damaged range. This part needs no repair.
        self.damaged = [
            (first, min(last, self.last)) for first, last in self.damaged if first <= self.last
        ]
        for first, last in self.damaged:
            if has_source(first, last):
                return self._overwrite_step(first, last)
        if any(self._blocks_marking(last) for _, last in self.damaged):
            return None
        if self.last < mark:
            return self._copy_step(mark)
        assert self.chain == chain, "rule 5"
        return SetMark(mark, chain)

    def _blocks_marking(self, last: TransactionId) -> bool:
        # Damage up to the previous mark can wait, because other replicas also have these records.
        return not self.is_mark_set and last > self._old_mark

    def _truncation_step(self, mark: TransactionId) -> RepairStep:
        if mark == self.start:
            return Truncation(mark, mark, self._start_chain)
        if self._own_lineage is None:
            return FetchOwnLineage(mark, mark)
        entry = self._own_lineage.lineage[-1]
        if entry.last == mark:
            return Truncation(mark, mark, entry.chain)
        return Truncation(
            mark, TransactionId(entry.first - 1), Chain(bytes(self._own_lineage.chain_before))
        )

    def _check_aligned(self) -> bool:
        """Whether the log's end is known to be a batch end of the source's log."""
        if self._source_lineage is not None:
            # The answer may be to an earlier request for other IDs, so search the whole answer.
            if (self.last, self.chain) in _batch_ends(self._source_lineage):
                self._discard_answers()
                self._is_aligned = True
            elif self._search_end is None:
                self._search_end, self._source_lineage = self.last, None
        return self._is_aligned

    def _align_step(self, lowest_source_start: TransactionId) -> RepairStep:
        """Find the last batch end that both logs have, and return the truncation to it (rule 3)."""
        if self._search_end is None:
            # Usually the log is a prefix of the source's log, so the log's end is a batch end of
            # both logs. If the source's log starts at this end, request its first batch: the answer
            # contains the chain hash before this batch.
            point = TransactionId(self.last + (self.last == lowest_source_start))
            return FetchSourceLineage(point, point)
        lowest = TransactionId(self._confirmed_mark + 1)
        if lowest > self._search_end:
            raise self._divergence_error()
        if self._own_lineage is None:
            return FetchOwnLineage(lowest, self._search_end)
        if self._search_end <= lowest_source_start:
            # No source has batches up to `_search_end`. So first truncate the log to the confirmed
            # low-water mark, and then reset it.
            batch_end, chain = _batch_ends(self._own_lineage)[0]
            if batch_end < self._confirmed_mark:
                raise self._divergence_error()
            return Truncation(batch_end, batch_end, chain)
        if self._source_lineage is None:
            return FetchSourceLineage(
                TransactionId(self._own_lineage.lineage[0].first), self._search_end
            )
        source_chains = dict(_batch_ends(self._source_lineage))
        for last, chain in reversed(_batch_ends(self._own_lineage)):
            if source_chains.get(last) == chain and last < self.last:
                if last < self._confirmed_mark:
                    raise self._lost_batches_error(self._own_lineage)
                return Truncation(last, last, chain)
        # The last common batch end is before both answers: request earlier parts of the lineages.
        oldest_seen = max(self._own_lineage.lineage[0].first, self._source_lineage.lineage[0].first)
        self._search_end = TransactionId(oldest_seen - 1)
        self._own_lineage = self._source_lineage = None
        return self._align_step(lowest_source_start)

    def _overwrite_step(self, first: TransactionId, last: TransactionId) -> RepairStep:
        if self._fetched_range is None or self._fetched_range.first != first:
            return FetchCopy(first, last, needs_whole_batches=False)
        return OverwriteDamage(self._fetched_range)

    def _copy_step(self, mark: TransactionId) -> RepairStep:
        first = TransactionId(self.last + 1)
        if self._fetched_range is None or self._fetched_range.first != first:
            return FetchCopy(first, mark, needs_whole_batches=True)
        return AppendCopy(self._fetched_range, self._fetched_chain)

    # -----------------------------------------------------------------------------------------
    # answers

    def on_own_lineage(self, answer: LineageResponse, *, first: int, last: int) -> None:
        """The replica under repair has returned its lineage."""
        _check_lineage(answer, first, last)
        if last == self.last and self.newest_session is None:
            self.newest_session = SessionId(answer.lineage[-1].session_id)
        if not self._needs_newest_session:
            self._own_lineage = answer

    def on_source_lineage(self, answer: LineageResponse, *, first: int, last: int) -> None:
        """The source has returned its lineage."""
        _check_lineage(answer, first, last)
        if self._own_lineage is not None:
            _check_not_reconstructed(answer, self._own_lineage)
        self._source_lineage = answer

    def on_copy_fetched(self, answer: RangeBytes, request: FetchCopy) -> None:
        """The source has returned records; verify these before they are kept."""
        verify_records(answer, first=request.first, last=request.last)
        if request.needs_whole_batches:
            chain = verify_batches(answer, self.chain)
            if answer.first + answer.count - 1 == request.last and chain != self._goal_chain:
                raise ChecksumMismatch(
                    f"copied records from ID {answer.first}: the chain hash after the "
                    "last of these records does not match the decided log"
                )
            self._fetched_chain = chain
        self._fetched_range = answer

    def on_log_truncated(self, last: TransactionId, chain: Chain, step: Truncation) -> None:
        """The replica has truncated its log."""
        if last != min(self.last, step.last_to_keep):
            raise RemoteProtocolError(
                f"truncation: expected a log that ends at transaction {step.last_to_keep}, "
                f"found {last}"
            )
        # The log may now end inside a batch, and the known lineage describes the log before the
        # truncation.
        is_batch_end = step.base == last and step.base_chain == chain
        was_aligning = self._search_end is not None
        self._discard_answers()
        self.last, self.chain = last, chain
        self._is_aligned = is_batch_end and was_aligning

    def on_log_reset(self, step: ReplicaReset) -> None:
        """The replica has deleted its records; its log begins after the archived mark."""
        self._discard_answers()
        self.last, self.chain = step
        self.start = self._confirmed_mark = step.last
        self._start_chain = step.chain
        self.damaged = []
        self._is_aligned = False

    def on_copy_appended(self, step: AppendCopy) -> None:
        """The replica has the copied batches on disk."""
        assert step.fetched_range.first == self.last + 1
        self.last = TransactionId(self.last + step.fetched_range.count)
        self.chain = step.chain
        self._fetched_range = None

    def on_damage_found(self, damaged: list[tuple[TransactionId, TransactionId]]) -> None:
        """The replica has reported all known damage; a step in progress continues."""
        self.damaged = damaged

    def on_damage_overwritten(self, step: OverwriteDamage) -> None:
        """The replica has overwritten damaged records."""
        filled_first, filled_last = (
            step.fetched_range.first,
            step.fetched_range.first + step.fetched_range.count - 1,
        )
        remaining: list[tuple[TransactionId, TransactionId]] = []
        for first, last in self.damaged:
            if first < filled_first:
                remaining.append((first, TransactionId(min(last, filled_first - 1))))
            if filled_last < last:
                remaining.append((TransactionId(max(first, filled_last + 1)), last))
        self.damaged, self._fetched_range = remaining, None

    def on_overwrite_rejected(self, step: OverwriteDamage) -> bool:
        """The replica has rejected these records; return whether its mark must wait for a repair.

        If the damage can wait, it is ignored until the replica reports it again.
        """
        rejected = [damage for damage in self.damaged if damage[0] == step.fetched_range.first]
        is_needed = any(self._blocks_marking(last) for _, last in rejected)
        if not is_needed:
            self.damaged = [damage for damage in self.damaged if damage not in rejected]
        self._fetched_range = None
        return is_needed

    def on_mark_written(self) -> None:
        """The replica has stored the session and the low-water mark durably, so it is ready."""
        self.is_mark_set = True

    def restart(self) -> None:
        """Discard the source's answers, because its connection or the step was lost."""
        self._discard_answers()
        self._is_aligned = False

    def _discard_answers(self) -> None:
        self._own_lineage = self._source_lineage = self._search_end = None
        self._fetched_range = None

    def _lost_batches_error(self, own: LineageResponse) -> DataLoss:
        if all(entry.session_id != RECONSTRUCTED for entry in own.lineage):
            return self._divergence_error()
        return DataLoss(
            f"the replica has lost batches up to transaction {self.last}, even batches below its "
            f"confirmed low-water mark {self._confirmed_mark}. Hint: restart the storage; it then "
            "withdraws the low-water mark."
        )

    def _divergence_error(self) -> DataLoss:
        return DataLoss(
            "the replica cannot be repaired: from its confirmed low-water mark "
            f"{self._confirmed_mark} to its last transaction {self.last}, its log has no batch end "
            "in common with the decided log"
        )


# ---------------------------------------------------------------------------------------------
# checks of copies (rule 4)


def verify_records(answer: RangeBytes, *, first: int, last: int) -> None:
    """Check a range against the request and against its own checksums.

    Raises:
        RemoteProtocolError: the answer is not the requested range.
        BadFormat, ChecksumMismatch: the bytes are not records, or not the requested records.
    """
    if answer.first != first or not 1 <= answer.count <= last - first + 1:
        raise RemoteProtocolError(
            f"copied records: expected records in {first}..{last}, beginning with {first}, "
            f"found {answer.count} records from {answer.first} on"
        )
    lengths = raw_records.lengths_from_wire(answer.lengths, len(answer.records))
    if lengths.size != answer.count:
        raise BadFormat(f"copied records: expected {answer.count} lengths, found {lengths.size}")
    if crc32(answer.records) != answer.records_crc:
        raise ChecksumMismatch(
            f"copied records from ID {first}: the records do not match their CRC"
        )
    bad_index = raw_records.first_bad_record(answer.records, lengths)
    if bad_index is not None:
        raise ChecksumMismatch(
            f"copied records from ID {first}: record {first + bad_index} does not match its CRC"
        )
    gap_index = raw_records.first_gap(answer.records, lengths, TransactionId(first))
    if gap_index is not None:
        found_id = raw_records.ids_of(answer.records, lengths)[gap_index]
        raise BadFormat(
            f"copied records from ID {first}: expected transaction ID {first + gap_index}, "
            f"found {found_id}"
        )


def verify_batches(answer: RangeBytes, chain_before: Chain) -> Chain:
    """Check that a range of whole batches continues the hash chain; return the chain after it.

    Raises:
        ChecksumMismatch: the chain differs, or the source's batches are reconstructed (rule 8).
        BadFormat: the lineage does not cover the records.
    """
    if bytes(answer.chain_before) != chain_before:
        raise ChecksumMismatch(
            f"copied records from ID {answer.first}: expected chain hash {chain_before.hex()} "
            f"before them, found {bytes(answer.chain_before).hex()}"
        )
    lengths = raw_records.lengths_from_wire(answer.lengths, len(answer.records))
    crcs = raw_records.record_crcs(answer.records, lengths)
    chain, next_id, end = chain_before, answer.first, answer.first + answer.count
    for entry in answer.lineage:
        if entry.session_id == RECONSTRUCTED:
            raise ChecksumMismatch(_LOST_BATCHES_TEXT.format(entry.first, entry.last))
        if not next_id == entry.first <= entry.last < end:
            raise BadFormat(
                f"copied records from ID {answer.first}: expected a batch that begins at "
                f"transaction {next_id} and ends before {end}, found "
                f"{entry.first}..{entry.last}"
            )
        start, stop = entry.first - answer.first, entry.last + 1 - answer.first
        part = crcs[4 * start : 4 * stop]
        chain = next_chain(chain, entry.first, entry.last, entry.session_id, part)
        if chain != bytes(entry.chain):
            raise ChecksumMismatch(
                f"batch {entry.first}..{entry.last}: the chain hash does not match its records"
            )
        next_id = entry.last + 1
    if next_id != end:
        raise BadFormat(
            f"copied records from ID {answer.first}: expected batches up to transaction "
            f"{end - 1}, found batches up to {next_id - 1}"
        )
    return chain


def _check_lineage(answer: LineageResponse, first: int, last: int) -> None:
    entries = answer.lineage
    is_without_gaps = all(
        entry.last + 1 == next_entry.first for entry, next_entry in pairwise(entries)
    )
    if not entries or not is_without_gaps or not entries[-1].first <= last <= entries[-1].last:
        raise RemoteProtocolError(
            f"lineage: expected batches that cover transactions {first}..{last}, found other "
            "batches"
        )


def _batch_ends(answer: LineageResponse) -> list[tuple[TransactionId, Chain]]:
    """Return the batch ends of a lineage and the hash chains there, in order."""
    start = TransactionId(answer.lineage[0].first - 1)
    batch_ends = [(start, Chain(bytes(answer.chain_before)))]
    batch_ends.extend((entry.last, Chain(bytes(entry.chain))) for entry in answer.lineage)
    return batch_ends


def decode_damaged_ranges(damaged: bytes | memoryview) -> list[tuple[TransactionId, TransactionId]]:
    """Decode the ranges of damaged IDs in a message, and sort them.

    Raises:
        RemoteProtocolError: the bytes are not pairs of IDs.
    """
    packed = bytes(damaged)
    values = [
        TransactionId(int.from_bytes(packed[offset : offset + 8], "big"))
        for offset in range(0, len(packed), 8)
    ]
    if len(values) % 2:
        raise RemoteProtocolError(
            f"damaged ranges: expected pairs of transaction IDs, found {len(values)} IDs"
        )
    return sorted(zip(values[::2], values[1::2], strict=True))


def _check_not_reconstructed(source: LineageResponse, own: LineageResponse) -> None:
    """Raise if the source has reconstructed batches where the replica has originals (rule 8)."""
    real_entries = [entry for entry in own.lineage if entry.session_id != RECONSTRUCTED]
    for entry in source.lineage if real_entries else ():
        if entry.session_id == RECONSTRUCTED and (
            entry.first <= real_entries[-1].last and real_entries[0].first <= entry.last
        ):
            raise ChecksumMismatch(_LOST_BATCHES_TEXT.format(entry.first, entry.last))
