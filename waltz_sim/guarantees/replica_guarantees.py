"""Checks of replicas: their promises, marks and records.

The checks read disks and the answers of storages. They do not depend on how a server interprets
these answers.

Rules:
    1. If a storage has answered that rows are synced, the rows stay on its disk. Only a truncation
       by a later session, or a fault that restores an older disk (`on_disk_rolled_back`), removes
       them.
    2. Records are compared byte by byte with the reference history. The checks trust no checksum
       and no hash chain.
    3. The checks never read through a log object, because such a read could fail or repair data,
       and would change the run.
"""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from waltz_core.errors import DataLoss, DiskFailed, NoSpace, WaltzError
from waltz_core.records.record import (
    BEFORE_FIRST,
    RECONSTRUCTED,
    RECORD_HEADER,
    RECORD_PREFIX,
    Chain,
    LineageEntry,
    SessionId,
    TransactionId,
)
from waltz_core.storage.files.format import SEGMENT_HEADER_BYTES
from waltz_core.wire.messages import (
    AppendRaw,
    LineageResponse,
    Prepared,
    RangeBytes,
    RangeForm,
    Repair,
    SetLowWaterMark,
    Truncate,
)
from waltz_sim.guarantees.history import NUMBER_BYTES

if TYPE_CHECKING:
    from waltz_core.storage.log.partition_log import PartitionLog
    from waltz_core.storage.service.work import Work, WorkOutcome, WorkResult
    from waltz_sim.cluster.simulated_storages import SimStorage
    from waltz_sim.guarantees.checker_state import CheckerState
    from waltz_sim.guarantees.session_guarantees import SessionGuarantees

PARTITION_DIRECTORY: Final = Path("/waltz/0")
# The records of a replica are compared with the history after every WORK_PER_CHECK pieces of work.
WORK_PER_CHECK: Final = 200


class DurableValues(NamedTuple):
    """The durable values of a replica that may never decrease."""

    promised: SessionId
    last_session: SessionId
    confirmed_mark: TransactionId


class LogStateBeforeWork(NamedTuple):
    """The state of a log before a piece of work: the values that the checks need."""

    synced_max: TransactionId = BEFORE_FIRST
    segment_count: int = 0


class _RequestedTruncation(NamedTuple):
    """A requested truncation: the last ID to keep, and the last committed ID at that time."""

    last_to_keep: int
    committed_last: int


_NO_LOG_STATE: Final = LogStateBeforeWork()


class ReplicaGuarantees:
    """Checks all replicas that ever belonged to the partition."""

    def __init__(self, state: "CheckerState", sessions: "SessionGuarantees") -> None:
        self._state = state
        self._sessions = sessions
        self.durable_values: dict[str, DurableValues] = {}
        # By replica: the highest ID that was answered as synced and not truncated since.
        self.answered_last: dict[str, int] = {}
        # By replica: the batches on its disk, with the last ID of each batch.
        self._batches_on_disk: dict[str, dict[Chain, int]] = {}
        # Replicas on whose disks a fault has changed bytes.
        self.corrupted_replicas: dict[str, None] = {}
        self._chain_of_batch: dict[tuple[int, SessionId], Chain] = {}
        self._truncations: dict[str, _RequestedTruncation] = {}  # truncations in progress
        self._work_count = 0

    # ---- starting

    def on_log_opened(self, storage: "SimStorage", log: "PartitionLog") -> None:
        """Check a log that was opened after a restart: 3. PromiseMono and rule 1."""
        if storage.name in self.corrupted_replicas and log.suspect:
            self.durable_values.pop(storage.name, None)  # The replica uses its older slot now.
        self._check_durable_values(storage.name, log)
        cutting = self._truncations.get(storage.name)
        if cutting is not None and log.max_id <= cutting.last_to_keep and not log.is_broken:
            # A truncation had failed, and opening the log has completed it. The check ignores rows
            # that other replicas have acknowledged since, in a later session.
            self._check_truncation(storage, log, cutting)
        answered_last = self.answered_last.get(storage.name, BEFORE_FIRST)
        if log.synced_max < answered_last and not log.suspect:
            self._state.fail(
                "PromiseMono",
                f"{storage.name} had synced transaction {answered_last}, restarts with "
                f"{log.synced_max}, and is not suspect",
            )
        self._check_torn_records(storage, log)

    def _check_torn_records(self, storage: "SimStorage", log: "PartitionLog") -> None:
        """21. NoRotServed: check, before any read, that no torn record counts after a crash."""
        if storage.name in self.corrupted_replicas or log.suspect or log.damaged:
            return
        operations = self._state.history.operations
        for position, data in enumerate(self.data_on_disk(storage)):
            operation = operations.get(int.from_bytes(data[:NUMBER_BYTES], "big"))
            if operation is None or operation.data != data:
                self._state.fail(
                    "NoRotServed",
                    f"{storage.name} treats a torn record, {position}, as a part of its log",
                )

    def on_disk_rolled_back(self, storage: "SimStorage") -> None:
        """Record that a fault has restored an older disk of a replica, so its promises are lost."""
        self.durable_values.pop(storage.name, None)
        self.answered_last.pop(storage.name, None)
        self._batches_on_disk.pop(storage.name, None)
        self._truncations.pop(storage.name, None)
        # The earlier answers of the replica still count, because they may be in flight.

    def on_disk_corrupted(self, storage: "SimStorage") -> None:
        """Record that a fault has changed bytes on the disk of a replica."""
        self.corrupted_replicas[storage.name] = None

    # ---- working

    def before_work(self, storage: "SimStorage", work: "Work") -> LogStateBeforeWork:
        """Return the state of a log before a piece of work, for `on_work_done`."""
        if not work.requests:
            return _NO_LOG_STATE
        message, log = work.requests[0].message, work.log
        if isinstance(message, Truncate) and message.session_id == log.promised:
            self._truncations[storage.name] = _RequestedTruncation(
                message.last_to_keep, self._state.history.last
            )
        if isinstance(message, SetLowWaterMark):
            return LogStateBeforeWork(synced_max=log.synced_max)
        if isinstance(message, AppendRaw) and _is_catch_up(message):
            return LogStateBeforeWork(segment_count=len(segments_of(storage)))
        return _NO_LOG_STATE

    def on_work_done(
        self, storage: "SimStorage", work: "Work", result: "WorkResult", before: LogStateBeforeWork
    ) -> None:
        """Check a finished piece of work, before the storage answers its requests."""
        for request, outcome in zip(work.requests, result.outcomes, strict=True):
            message = request.message
            if isinstance(outcome, WaltzError):
                self._on_request_rejected(storage, message, outcome)
            elif isinstance(message, AppendRaw):
                self._check_append(storage, work.log, message, before)
            elif isinstance(message, SetLowWaterMark):
                self._check_low_water_mark(storage, message, before)
            elif isinstance(message, Truncate):
                self._check_truncation(storage, work.log, self._truncations[storage.name])
            elif isinstance(message, Repair):
                is_live = work.log.is_engaged(SessionId(message.session_id))
                self._state.counts["damage repaired in an open session"] += is_live
                self._state.count("damage repaired")
            else:
                self._check_answer(storage, outcome)
        self._state.counts["scrub found damage"] += work.piece is not None and bool(
            result.new_damage
        )
        if work.requests:
            self._check_durable_values(storage.name, work.log)
        self._work_count += 1
        if self._work_count % WORK_PER_CHECK == 0:
            self.check_log_state(storage, work.log)

    def _on_request_rejected(
        self, storage: "SimStorage", message: object, error: WaltzError
    ) -> None:
        self._state.counts[f"nack {type(message).__name__}"] += 1
        if isinstance(message, Truncate) and not isinstance(error, DiskFailed):
            self._truncations.pop(storage.name, None)
        if isinstance(error, NoSpace):
            self._state.count("NO_SPACE")
        if isinstance(message, Truncate) and isinstance(error, DataLoss):
            # The storage's own check has rejected the truncation. A server may not rely on this
            # check.
            if storage.name in self.corrupted_replicas:
                self._state.count("truncation of a corrupt log rejected")
                return
            self._state.fail("NoCutCommitted", f"{storage.name} rejected a truncation: {error}")

    def _check_append(
        self,
        storage: "SimStorage",
        log: "PartitionLog",
        message: AppendRaw,
        before: LogStateBeforeWork,
    ) -> None:
        """Check an append: 4. SingleWriter, 7. GateCAS2, 22. Identity, 23. LogMatching."""
        name, session = storage.name, SessionId(message.session_id)
        self._check_storage_identity(storage, "an append")
        self._sessions.on_batches_synced(name, session, log.slot.nonce, message.lineage)
        batches = self._batches_on_disk.setdefault(name, {})
        for entry in message.lineage:
            batches[entry.chain] = entry.last
            known = self._chain_of_batch.setdefault((entry.last, entry.session_id), entry.chain)
            if known != entry.chain:
                self._state.fail(
                    "LogMatching",
                    f"transaction {entry.last} of session {entry.session_id} has two chains "
                    f"({name})",
                )
        self.answered_last[name] = log.synced_max
        if before.segment_count and len(segments_of(storage)) > before.segment_count:
            self._state.count("segment roll during recovery")

    def _check_low_water_mark(
        self, storage: "SimStorage", message: SetLowWaterMark, before: LogStateBeforeWork
    ) -> None:
        """10. LwmFull: check that a low-water mark is set to exactly the last synced ID."""
        self._check_storage_identity(storage, "a mark")
        if message.mark != before.synced_max:
            self._state.fail(
                "LwmFull",
                f"{storage.name} sets low-water mark {message.mark}, but is synced up to "
                f"{before.synced_max}",
            )

    def _check_truncation(
        self, storage: "SimStorage", log: "PartitionLog", truncation: "_RequestedTruncation"
    ) -> None:
        """9. NoCutCommitted: check that no truncated row was in the log with the same chain.

        A replica that no session needs may lose rows that the archive has, before it is reset.
        """
        last_to_keep = truncation.last_to_keep
        is_needed = self._sessions.is_trusted(log.promised, storage.name)
        archived_last = BEFORE_FIRST if is_needed else self._state.archived_last
        self._truncations.pop(storage.name, None)
        chains = self._state.history.chains
        batches = self._batches_on_disk.get(storage.name, {})
        for chain, last in [each for each in batches.items() if each[1] > last_to_keep]:
            is_acked = (
                archived_last < last <= truncation.committed_last and chains.get(last) == chain
            )
            if is_acked and storage.name not in self.corrupted_replicas:
                self._state.fail(
                    "NoCutCommitted",
                    f"{storage.name} truncates its log after {last_to_keep}, but has acknowledged "
                    f"transaction {last}",
                )
            del batches[chain]
        if last_to_keep < log.slot.low_water_mark:
            self._state.fail(
                "NoCutCommitted",
                f"{storage.name} truncates its log after {last_to_keep}, below its low-water mark "
                f"{log.slot.low_water_mark}",
            )
        self._check_storage_identity(storage, "a truncation")
        self.answered_last[storage.name] = min(
            self.answered_last.get(storage.name, BEFORE_FIRST), log.synced_max
        )
        self._sessions.on_log_truncated(storage.name, log.synced_max)

    def _check_answer(self, storage: "SimStorage", outcome: "WorkOutcome") -> None:
        """Check the answer of a storage: 21. NoRotServed and 22. Identity."""
        if isinstance(outcome, RangeBytes):
            self.check_range(storage.name, outcome)
        elif isinstance(outcome, LineageResponse):
            for entry in outcome.lineage:
                if self._is_reconstructed(storage.name, entry):
                    continue
                if self._state.history.batch_at(entry.chain, entry.last) is None:
                    self._state.fail(
                        "NoRotServed", f"{storage.name} sends an unknown batch: {entry}"
                    )
        elif isinstance(outcome, Prepared):
            assert storage.engine is not None
            if outcome.storage_id != storage.engine.storage_id:
                self._state.fail(
                    "Identity", f"{storage.name} answers with the ID of another storage"
                )

    def _is_reconstructed(self, name: str, entry: LineageEntry) -> bool:
        """Whether a batch entry may be a substitute for other entries that were unreadable."""
        return name in self.corrupted_replicas and entry.session_id == RECONSTRUCTED

    def _check_storage_identity(self, storage: "SimStorage", data: str) -> None:
        """22. Identity: check that only the registered disk of a replica is changed."""
        assert storage.engine is not None
        registered = self._state.cluster.coordinator.storage_ids.get(storage.replica)
        if registered not in (None, storage.engine.storage_id):
            self._state.fail(
                "Identity", f"{storage.name} has accepted {data}, but has another storage ID"
            )

    def _check_durable_values(self, name: str, log: "PartitionLog") -> None:
        """3. PromiseMono: check that the durable values of a replica did not decrease."""
        slot = log.slot
        now = DurableValues(slot.promised, slot.last_session, slot.low_water_mark)
        before = self.durable_values.get(name)
        if now == before:
            return
        if before is not None and (
            now.promised < before.promised
            or now.last_session < before.last_session
            or now.confirmed_mark < before.confirmed_mark
        ):
            self._state.fail(
                "PromiseMono", f"the durable values of {name} decrease: {before}, then {now}"
            )
        if now.last_session > now.promised:
            self._state.fail("PromiseMono", f"{name} has not promised its last session: {now}")
        self.durable_values[name] = now
        self._sessions.on_slot_written(name, now.promised, now.last_session)

    # ---- records

    def check_range(self, name: str, answer: RangeBytes) -> None:
        """21. NoRotServed: check that records read from a replica equal those sent to replicas."""
        nodes = self._state.history
        records = bytes(answer.records)
        end = 0
        is_whole = answer.form == RangeForm.WHOLE
        if name in self.corrupted_replicas and not _is_contiguous(answer):
            return  # Some batch entries are lost. The requester detects that.
        for entry in answer.lineage:
            if self._is_reconstructed(name, entry):
                return
            node = nodes.batch_at(entry.chain, entry.last)
            if node is None:
                self._state.fail("NoRotServed", f"{name} has an unknown batch: {entry}")
            starts = (0, *node.ends)
            first = max(answer.first, entry.first) - entry.first
            stop = min(answer.first + answer.count - 1, entry.last) - entry.first + 1
            if is_whole:
                wanted = node.records[starts[first] : starts[stop]]
            else:
                size = RECORD_HEADER.size
                wanted = b"".join(node.records[at : at + size] for at in starts[first:stop])
            if records[end : end + len(wanted)] != wanted:
                self._state.fail(
                    "NoRotServed", f"{name} sends wrong records in {entry.first}..{entry.last}"
                )
            end += len(wanted)
        if end != len(records):
            self._state.fail(
                "NoRotServed", f"{name} sends {len(records)} bytes of records, expected {end}"
            )

    def check_log_state(self, storage: "SimStorage", log: "PartitionLog") -> None:
        """24. Fixed: check that a replica has the rows of the history up to its low-water mark.

        A suspect replica counts in no quorum, and is not checked. An example is a replica that has
        lost its segments and was reset.
        """
        if storage.name in self.corrupted_replicas or log.damaged or log.slot.suspect:
            return
        if storage.name not in self._sessions.engaged_replicas:
            return
        mark = min(log.confirmed_low_water_mark, self._state.history.last)
        self.check_records(storage, mark)

    def segment_bytes(self, storage: "SimStorage") -> int:
        """Return the total size in bytes of a replica's segment files."""
        return sum(len(storage.disk.visible_content(path)) for path in segments_of(storage))

    def data_on_disk(self, storage: "SimStorage") -> Iterator[bytes]:
        """Yield the application's data in each record on a replica's disk."""
        for path in segments_of(storage):
            yield from data_of_records(storage.disk.visible_content(path), SEGMENT_HEADER_BYTES)

    def check_records(self, storage: "SimStorage", last: int) -> None:
        """24. Fixed: compare the bytes of all records up to an ID with the history."""
        first = first_id_on_disk(storage)
        wanted = b"".join(self._state.history.records[first : last + 1])
        found = b"".join(
            storage.disk.visible_content(path)[SEGMENT_HEADER_BYTES:]
            for path in segments_of(storage)
        )
        if found[: len(wanted)] == wanted:
            return
        offset = 0
        for position, record in enumerate(self._state.history.records[first : last + 1], first):
            if found[offset : offset + len(record)] != record:
                self._state.fail("Fixed", f"{storage.name} has a wrong record {position}")
            offset += len(record)


def _is_contiguous(answer: RangeBytes) -> bool:
    """Whether the batch entries of a range are contiguous from its first ID to its last ID."""
    next_id = answer.first
    for entry in answer.lineage:
        if not entry.first <= next_id <= entry.last:
            return False
        next_id = entry.last + 1
    return next_id >= answer.first + answer.count


def _is_catch_up(message: AppendRaw) -> bool:
    return any(entry.session_id != message.session_id for entry in message.lineage)


def segments_of(storage: "SimStorage") -> list[Path]:
    """Return the paths of a storage's segment files, sorted by their first ID."""
    return [
        _path_of(name) for name in storage.disk.list(PARTITION_DIRECTORY) if name.endswith(".seg")
    ]


def first_id_on_disk(storage: "SimStorage") -> int:
    """Return the first ID on the disk of a storage. Older IDs are only in the archive."""
    return int(segments_of(storage)[0].stem)


def data_of_records(content: bytes, offset: int) -> Iterator[bytes]:
    """Yield the application's data in each record from an offset on."""
    while offset < len(content):
        size = RECORD_PREFIX.unpack_from(content, offset)[3]
        data_offset = offset + RECORD_PREFIX.size
        yield content[data_offset : data_offset + size]
        offset = data_offset + size + 4


@lru_cache(maxsize=4_096)
def _path_of(name: str) -> Path:
    return PARTITION_DIRECTORY / name  # cached, because building and hashing a path is slow
