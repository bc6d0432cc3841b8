"""A storage as a state machine: requests of servers in, answers out. No sockets, no threads.

The same code runs with threads in the daemon, and without threads in the simulator.

Each partition has a lane: one piece of work at a time, in the order of arrival. `RunWork` starts a
piece: the driver calls `work.run()`, on any thread, and returns the result as `WorkDone`. One piece
of work writes consecutive waiting appends together, up to `GROUP_BYTES_MAX`, and syncs them once
(group commit). Reads wait in a separate queue, and take turns with appends.

Rules:
    1. Only PREPARE raises a partition's session. If a request names another session, the storage
       rejects it, and the error states the promised session.
    2. A request that changes a partition, or reads it for the owner, must arrive on the connection
       over which the owner has prepared the session. `ADMIN_CONNECTION` may read, too.
    3. A later session ends earlier sessions at once: their queued requests are rejected, and their
       connections are closed. A session begins when PREPARE arrives, not when PREPARE is answered.
    4. No change is answered as done before the engine has made it durable (`work.py`, rule 2).
    5. A reader (not the owner) is answered only while this replica is engaged in the session that
       the reader states, and only up to the last synced ID.
    6. After a failed write or sync, the partition leaves its session. After a second failure, the
       process exits.
    7. The queues are bounded: a connection that sends more is not read until there is space
       (`queue_limits.py`).
    8. The owner is notified of each damage at once, so that it can repair the records while other
       replicas still have them. The scrub looks for damage, and other work runs between its pieces.
    9. While appends are rejected for lack of space, the free space is queried repeatedly.
   10. An owner has one connection at a time: the latest one. Late requests from its earlier
       connections change nothing. An earlier connection never counts as another owner.
   11. If the files of an open partition were deleted or replaced, the storage stops serving only
       this partition. The partition is not opened again, because the new files may lack a promise.
   12. The storage changes the archive only for the owner of the session (by uploads, expiry and
       collection), and reports the result on the same connection (`archive_jobs.py`). The archived
       mark of a session ends with the session (`retention.py`, `archive_reads.py`).
"""

from collections import deque
from typing import Final, TypeAlias, assert_never

import numpy as np

from waltz_core.errors import (
    BadRequest,
    BeforeLogStart,
    ClusterKeyMismatch,
    ConnectionSuperseded,
    NotMounted,
    ReplicaSuspect,
    SessionFenced,
    StorageIdMismatch,
    UnknownPartition,
    WaltzError,
)
from waltz_core.machine import Report, Wakeup, earliest
from waltz_core.records.record import (
    BEFORE_FIRST,
    NO_SESSION,
    Chain,
    PartitionId,
    SessionId,
    TransactionId,
)
from waltz_core.storage.files.disk_space import DiskSpace
from waltz_core.storage.files.format import AckedMarker, Promise
from waltz_core.storage.files.id_ranges import format_ranges
from waltz_core.storage.log.archive_pieces import ArchivePiece, RetentionPiece
from waltz_core.storage.log.log_files import MARKER_INTERVAL_MS
from waltz_core.storage.log.partition_log import PartitionLog
from waltz_core.storage.log.scrub import Scrub, ScrubState
from waltz_core.storage.service.archive_jobs import (
    ArchiveJobs,
    ArchiveLimits,
    ArchiveProgressed,
    ExpiryWritten,
    FilesCollected,
    UploadDone,
)
from waltz_core.storage.service.archive_reads import ArchiveQuery, ArchiveReads
from waltz_core.storage.service.lane import SESSION_JUMP_MAX, Lane
from waltz_core.storage.service.queue_limits import QueueLimits
from waltz_core.storage.service.retention import NO_RETENTION_LIMITS, Retention, RetentionLimits
from waltz_core.storage.service.service_effects import (
    CheckSpace,
    CloseConnection,
    CollectFiles,
    DropPartition,
    Effect,
    EndProcess,
    PartitionIdle,
    PauseReading,
    ReadArchive,
    ResumeReading,
    RunWork,
    SendStorageMessage,
    WriteExpiry,
)
from waltz_core.storage.service.work import (
    ConnectionId,
    LanePiece,
    LaneRequest,
    Work,
    WorkOutcome,
    WorkResult,
)
from waltz_core.values import value
from waltz_core.wire.messages import (
    AppendRaw,
    ArchiveRange,
    CollectGarbage,
    DamageFound,
    Engage,
    ExpireObjects,
    Heartbeat,
    HeartbeatResponse,
    LineageRequest,
    LockBlocksRequest,
    Nack,
    OpenRequest,
    Prepare,
    Prepared,
    RangeRaw,
    Repair,
    ReplaceObject,
    ResetLog,
    SetArchived,
    SetLowWaterMark,
    StorageMessage,
    SuccessResponse,
    Truncate,
)

NO_STORAGE_ID: Final = bytes(16)
ADMIN_CONNECTION: Final = ConnectionId(0)  # no link has this number
REJECTION_CHARACTERS_MAX: Final = 1_000
SPACE_CHECK_INTERVAL_MS: Final = 1_000


# ---------------------------------------------------------------------------------------------
# Events (a `LaneRequest` is an event, too)


@value(frozen=True, slots=True)
class Disconnected:
    """A connection was closed, by either side."""

    connection: ConnectionId


@value(frozen=True, slots=True)
class PartitionOpened:
    """A partition is assigned to this storage and its log is open."""

    log: PartitionLog


@value(frozen=True, slots=True)
class PartitionDropped:
    """A partition is no longer served; `PartitionIdle` follows when its log may be closed."""

    partition_id: PartitionId


@value(frozen=True, slots=True)
class WorkDone:
    """A piece of work is done; `result` is the value that its `run` returned."""

    work: Work
    result: WorkResult


@value(frozen=True, slots=True)
class ScrubRequested:
    """Request a scrub of a partition from its beginning, or of all partitions (None)."""

    partition_id: PartitionId | None = None


@value(frozen=True, slots=True)
class SpaceChecked:
    """The check of a `CheckSpace` effect is done."""


@value(frozen=True, slots=True)
class ArchiveReadDone:
    """The read of a `ReadArchive` effect is done."""

    read: ArchiveQuery
    outcome: WorkOutcome


Event: TypeAlias = (
    LaneRequest
    | Disconnected
    | PartitionOpened
    | PartitionDropped
    | WorkDone
    | ScrubRequested
    | SpaceChecked
    | UploadDone
    | FilesCollected
    | ExpiryWritten
    | ArchiveProgressed
    | ArchiveReadDone
    | Wakeup
)


@value(frozen=True, slots=True)
class StorageIdentity:
    """The cluster to which a storage belongs, and the ID of the storage."""

    cluster_key: bytes
    partition_count: int
    storage_id: bytes


class StorageService:
    """The state machine of a storage; rules refer to this module."""

    def __init__(
        self,
        identity: StorageIdentity,
        *,
        queue_bytes_max: int,
        space: DiskSpace | None = None,
        scrub: Scrub | None = None,
        archive: ArchiveLimits | None = None,
        retention: RetentionLimits = NO_RETENTION_LIMITS,
    ) -> None:
        self._identity = identity
        self._space = space
        self._space_check_at_ms: int | None = None
        self._scrub = scrub if scrub is not None else Scrub()
        self._archive = ArchiveJobs(archive)
        self._archive_reads = ArchiveReads(has_archive=archive is not None)
        self._retention = Retention(retention)
        self._lanes: dict[PartitionId, Lane] = {}
        self._readers: dict[ConnectionId, None] = {}  # connections with a valid OpenRequest
        self.queue_limits = QueueLimits(queue_bytes_max)
        self._failures_count = 0
        self._is_full = False  # the state that was reported last
        self._mark_at_ms: int | None = None
        self._effects: list[Effect] = []

    @property
    def wake_at_ms(self) -> int | None:
        """When to move markers, run a piece, query the free space, or check archive jobs."""
        pieces = earliest(self._scrub.wake_at_ms, self._retention.wake_at_ms)
        pieces = earliest(pieces, self._archive.wake_at_ms)
        return earliest(earliest(self._mark_at_ms, pieces), self._space_check_at_ms)

    @property
    def archive_running_since_ms(self) -> int | None:
        """When the running upload, collection or expiry began; None if no job runs."""
        return self._archive.running_since_ms

    @property
    def archived_marks(self) -> dict[PartitionId, SetArchived]:
        """The archived marks of the present sessions (`archive_reads.py`, rule 2)."""
        return self._archive_reads.marks

    @property
    def partitions(self) -> tuple[PartitionId, ...]:
        """The partitions that are served, sorted."""
        return tuple(sorted(self._lanes))

    @property
    def queued_count(self) -> int:
        """The number of requests without an answer; `queue_limits` has their bytes."""
        lanes = self._lanes.values()
        waiting = sum(len(lane.writes) + len(lane.reads) for lane in lanes)
        return waiting + sum(len(lane.work.requests) for lane in lanes if lane.work is not None)

    def scrub_states(self, now_ms: int) -> list[ScrubState]:
        """Return the progress of the scrub in each partition."""
        return self._scrub.states(now_ms)

    @property
    def scrub_positions(self) -> dict[PartitionId, TransactionId]:
        """The ID from which the scrub of each partition continues after a restart."""
        return self._scrub.positions

    def step(self, event: Event, now_ms: int) -> list[Effect]:
        """Process one event, and return the effects (`machine.py`)."""
        assert not self._effects
        match event:
            case LaneRequest():
                self._receive_request(event)
            case WorkDone():
                self._on_work_done(event.work, event.result, now_ms)
            case Disconnected():
                self._on_connection_closed(event.connection)
            case PartitionOpened():
                self._on_partition_opened(event.log, now_ms)
            case PartitionDropped():
                self._on_partition_dropped(event.partition_id)
            case ScrubRequested(partition_id):
                ids = self._lanes if partition_id is None else {partition_id} & {*self._lanes}
                self._scrub.request(sorted(ids), now_ms)
                self._queue_scrub_piece(now_ms)
            case SpaceChecked():
                self._space_check_at_ms = None
                self._note_space(now_ms)
            case (
                UploadDone()
                | FilesCollected()
                | ExpiryWritten()
                | ArchiveProgressed()
                | ArchiveReadDone()
            ):
                self._on_archive_done(event, now_ms)
            case Wakeup():
                self._effects += self._archive.on_wakeup(now_ms)
                self._move_idle_markers(now_ms)
                self._queue_scrub_piece(now_ms)
                self._check_space(now_ms)
            case _:
                assert_never(event)
        self._queue_background_pieces(now_ms)
        self._resume()
        effects = self._effects
        self._effects = []
        return effects

    # ------------------------------------------------------------------ events

    def _receive_request(self, request: LaneRequest) -> None:
        try:
            self._admit_request(request)
        except WaltzError as error:
            self._send_error(request, error)

    def _admit_request(self, request: LaneRequest) -> None:
        """Answer a request, queue it, or raise the error that rejects it."""
        message = request.message
        match message:
            case (
                AppendRaw()
                | SetLowWaterMark()
                | Truncate()
                | ResetLog()
                | Engage()
                | Repair()
                | SetArchived()
            ):
                self._admit_change(request)
            case ArchiveRange() | CollectGarbage() | ExpireObjects() | ReplaceObject():
                lane = self._lane_of(message)
                self._check_session(lane, message)
                _check_owner(lane, request)
                self._archive.add(request.connection, lane.promise.nonce, message)
                self._send_response(request, SuccessResponse(*_prefix_of(message)))
            case OpenRequest():
                self._check_cluster(message.cluster_key, message.partition_count)
                self._readers[request.connection] = None
                self._send_response(request, SuccessResponse(-1, -1, -1))
            case Prepare():
                self._admit_prepare(request, message)
            case Heartbeat():
                lane = self._lane_of(message)
                self._check_session(lane, message)
                if request.connection not in self._readers:
                    _check_owner(lane, request)
                self._send_response(request, HeartbeatResponse(*_prefix_of(message)))
            case RangeRaw(reader=True) | LockBlocksRequest():
                lane = self._lane_of(message)
                self._check_reader(lane, request)
                self._queue_request(lane, lane.reads, request)
            case RangeRaw() | LineageRequest():
                lane = self._lane_of(message)
                if request.connection != ADMIN_CONNECTION:
                    self._check_session(lane, message)
                    _check_owner(lane, request)
                self._queue_request(lane, lane.reads, request)
            case _:
                raise BadRequest(f"a storage does not accept {type(message).__name__} at this port")

    def _admit_change(self, request: LaneRequest) -> None:
        message = request.message
        lane = self._lane_of(message)
        self._check_session(lane, message)
        _check_owner(lane, request)
        # A mark is only compared with the log, so it is queued as a read. Reads keep their order.
        queue = lane.reads if isinstance(message, SetArchived) else lane.writes
        self._queue_request(lane, queue, request)

    def _admit_prepare(self, request: LaneRequest, message: Prepare) -> None:
        """Raise the session at once (rule 3); queued work makes the promise durable."""
        self._check_cluster(message.cluster_key, message.partition_count)
        if message.storage_id not in (self._identity.storage_id, NO_STORAGE_ID):
            raise StorageIdMismatch(
                "the request is for another storage: expected storage ID "
                f"{message.storage_id.hex()} at this address, found "
                f"{self._identity.storage_id.hex()}"
            )
        lane = self._lane_of(message)
        session = SessionId(message.session_id)
        promise = lane.promise
        if not 0 <= session <= promise.session_id + SESSION_JUMP_MAX:
            raise BadRequest(
                f"partition {message.partition_id}: expected a store session in "
                f"0..{promise.session_id + SESSION_JUMP_MAX}, found {session}"
            )
        if promise.is_after_loss and session in (promise.last_seen_session, promise.session_id):
            # The sender may be the owner of this session, so the error is not SessionFenced.
            raise ReplicaSuspect(
                f"partition {message.partition_id}: the owner of store session {session} is "
                "unknown, because a control slot was lost. Hint: the replica accepts "
                f"sessions from {promise.session_id + 1} on."
            )
        requested_promise = Promise(session, message.nonce)
        if session <= promise.session_id and requested_promise != promise:
            raise SessionFenced(
                f"partition {message.partition_id}: store session {session} is rejected, "
                f"because the replica has promised session {promise.session_id} to another "
                "server"
            )
        error: WaltzError = SessionFenced(f"a later store session, {session}, was prepared")
        if requested_promise == promise:  # rule 10
            error = ConnectionSuperseded(
                f"a later connection of the same server, for store session {session}, has "
                "replaced this connection"
            )
            if lane.owner is not None and request.connection < lane.owner:
                raise error
        # Set the promise first: rejected owners must receive this session in the error.
        lane.promise = requested_promise
        self._fence(lane, error, kept_connection=request.connection)
        lane.owner = request.connection
        self._queue_request(lane, lane.writes, request)

    def _fence(
        self, lane: Lane, error: WaltzError, *, kept_connection: ConnectionId | None = None
    ) -> None:
        """End the lane's session: reject its queued requests, and close its connection.

        `error` states the reason; SessionFenced would mean that there is a later session.
        """
        for request in (*lane.writes, *lane.reads):
            self.queue_limits.subtract(request)
            self._send_error(request, error)
        lane.writes.clear()
        lane.reads.clear()
        if lane.owner not in (None, kept_connection):
            self._effects.append(CloseConnection(lane.owner, str(error)))
        lane.owner = None
        lane.engaged_session = NO_SESSION
        self._forget_archiving(lane)
        self._retention.forget(lane.log.partition_id)
        lane.retention_piece = None

    def _on_connection_closed(self, connection: ConnectionId) -> None:
        """Forget a connection and its queued requests."""
        self._readers.pop(connection, None)
        self.queue_limits.forget(connection)
        for lane in self._lanes.values():
            if lane.owner == connection:
                lane.owner = None
                self._forget_archiving(lane)
            for queue in filter(None, (lane.writes, lane.reads)):
                removed = [request for request in queue if request.connection == connection]
                for request in removed:
                    queue.remove(request)
                    self.queue_limits.subtract(request)

    def _on_partition_opened(self, log: PartitionLog, now_ms: int) -> None:
        assert log.partition_id not in self._lanes
        self._lanes[log.partition_id] = Lane(log, log.slot.promise)
        self._scrub.on_partition_opened(log.partition_id, now_ms)
        self._retention.on_partition_opened(log.partition_id)
        self._note_space(now_ms)

    def _on_partition_dropped(self, partition_id: PartitionId) -> None:
        lane = self._lanes.pop(partition_id)
        self._scrub.on_partition_dropped(partition_id)
        error = UnknownPartition(
            f"partition {partition_id} was taken offline, or is no longer assigned to this storage"
        )
        self._fence(lane, error)
        self._retention.on_partition_dropped(partition_id)
        if lane.work is None:
            self._effects.append(PartitionIdle(lane.log))

    # ------------------------------------------------------------------ checks

    def _check_cluster(self, cluster_key: bytes, partition_count: int) -> None:
        expected = (self._identity.cluster_key, self._identity.partition_count)
        if (cluster_key, partition_count) != expected:
            raise ClusterKeyMismatch(
                "the request is for another cluster: expected cluster key "
                f"{expected[0].hex()} with {expected[1]} partitions, found "
                f"{cluster_key.hex()} with {partition_count}"
            )

    def _lane_of(self, message: StorageMessage) -> Lane:
        lane = self._lanes.get(PartitionId(message.partition_id))
        if lane is None or lane.has_lost_files:
            raise UnknownPartition(
                f"partition {message.partition_id} is offline, or not assigned to this storage"
            )
        return lane

    def _check_session(self, lane: Lane, message: StorageMessage) -> None:
        if message.session_id != lane.promise.session_id:
            raise SessionFenced(
                f"partition {message.partition_id}: expected {type(message).__name__} of the "
                f"promised store session {lane.promise.session_id}, found session "
                f"{message.session_id}"
            )

    def _check_reader(self, lane: Lane, request: LaneRequest) -> None:
        """Raise an error unless the storage may answer the reader (rule 5)."""
        message = request.message
        if request.connection not in self._readers:
            raise BadRequest(f"reader: expected OpenRequest, found {type(message).__name__}")
        self._check_session(lane, message)
        if lane.engaged_session != message.session_id:
            raise NotMounted(
                f"partition {message.partition_id}: the replica is not in sync in store "
                f"session {message.session_id}"
            )

    # ------------------------------------------------------------------ lanes

    def _queue_request(self, lane: Lane, queue: deque[LaneRequest], request: LaneRequest) -> None:
        queue.append(request)
        if self.queue_limits.add(request):
            self._effects.append(PauseReading(request.connection))
        if lane.work is None:
            self._start_work(lane)

    def _start_work(self, lane: Lane) -> None:
        """Start the next piece of work in a lane, if any waits (`lane.py`)."""
        requests, piece = lane.take_next()
        if requests or piece is not None:
            self._run_work(lane, requests, piece)

    def _run_work(
        self, lane: Lane, requests: tuple[LaneRequest, ...], piece: LanePiece | None = None
    ) -> None:
        if lane.has_lost_files:
            return
        lane.work = Work(
            lane.log,
            requests,
            self._identity.storage_id,
            space=self._space,
            piece=piece,
            has_archive=self._archive.has_archive,
        )
        self._effects.append(RunWork(lane.work))

    def _on_work_done(self, work: Work, result: WorkResult, now_ms: int) -> None:
        for request, outcome in zip(work.requests, result.outcomes, strict=True):
            answer: WorkOutcome | ArchiveQuery = outcome
            if isinstance(outcome, WaltzError):
                answer = self._archive_reads.archive_query_for(request, outcome)
            self.queue_limits.subtract(request)
            if isinstance(answer, ArchiveQuery):
                self._effects.append(ReadArchive(answer))
            else:
                self._respond(request, answer)
        lane = self._lanes.get(work.partition_id)
        if lane is None or lane.work is not work:
            self._effects.append(PartitionIdle(work.log))  # the partition was dropped meanwhile
            return
        lane.work = None
        self._update_lane(lane, work, result, now_ms)
        self._on_background_piece_done(lane, work.piece, result, now_ms)
        self._report_findings(lane, result)
        self._note_space(now_ms)
        scrubbed = result.scrub_result
        if scrubbed is not None and self._scrub.on_piece_done(work.partition_id, scrubbed, now_ms):
            self._report_event("storage.scrub_finished", partition=work.partition_id)
            self._notify_owner(lane)  # Again: unrepaired damage may be repairable now.
        is_marked = not work.requests and work.piece is None
        lane.has_unmarked_batches = result.appended_count > 0 or (
            lane.has_unmarked_batches and not is_marked
        )
        if lane.has_unmarked_batches and self._mark_at_ms is None:
            self._mark_at_ms = now_ms + MARKER_INTERVAL_MS
        self._start_work(lane)

    def _respond(self, request: LaneRequest, outcome: WorkOutcome) -> None:
        if isinstance(outcome, WaltzError):
            self._send_error(request, outcome)
        else:
            self._send_response(request, outcome)

    def _move_idle_markers(self, now_ms: int) -> None:
        """Move the acked markers of logs that had appends and are idle now."""
        if self._mark_at_ms is None or now_ms < self._mark_at_ms:
            return
        self._mark_at_ms = None
        for lane in self._lanes.values():
            if lane.has_unmarked_batches and lane.work is None:
                # A busy log moves its marker with a sync, and is checked again later.
                self._run_work(lane, ())

    def _queue_scrub_piece(self, now_ms: int) -> None:
        """Queue the next piece of the scrub, to run after the current work of its partition."""
        while (partition_id := self._scrub.next_partition(now_ms)) is not None:
            lane = self._lanes[partition_id]
            lane.scrub_piece = self._scrub.begin(partition_id, lane.log.synced_max, now_ms)
            if lane.scrub_piece is not None and lane.work is None:
                self._start_work(lane)

    def _report_findings(self, lane: Lane, result: WorkResult) -> None:
        """Report new damage, and notify the owner of all known damage (rule 8)."""
        partition_id = lane.log.partition_id
        if lane.has_lost_files:
            return  # The result is not about this partition's log.
        if result.has_released_reserve:
            self._report_event("storage.reserve_released", partition=partition_id)
        for error in result.failed_reads:
            self._report_event("storage.read_failed", partition=partition_id, error=error)
        if result.scrub_result is not None and result.scrub_result.error is not None:
            error = result.scrub_result.error
            self._report_event("storage.scrub_skipped", partition=partition_id, error=error)
        if result.repaired_ids is not None:
            self._report_event(
                "storage.damage_repaired",
                partition=partition_id,
                ids=format_ranges((result.repaired_ids,)),
            )
        if result.new_damage:
            self._report_event(
                "storage.damage_found", partition=partition_id, ids=format_ranges(result.new_damage)
            )
            self._notify_owner(lane)

    def _notify_owner(self, lane: Lane) -> None:
        """Notify the owner of all known damage, if there is any."""
        if lane.owner is not None and lane.log.damaged:
            damaged = np.array(lane.log.damaged, dtype=">i8").tobytes()
            notice = DamageFound(lane.promise.session_id, 0, lane.log.partition_id, damaged)
            self._effects.append(SendStorageMessage(lane.owner, notice))

    def _note_space(self, now_ms: int) -> None:
        if self._space is None:
            return
        if self._space.is_full != self._is_full:
            self._is_full = self._space.is_full
            if self._is_full:
                self._report_event("storage.disk_full", reserved_bytes=self._space.reserved_bytes)
            else:
                self._report_event(
                    "storage.disk_space_available", reserved_bytes=self._space.reserved_bytes
                )
        if self._is_full and self._space_check_at_ms is None:
            self._space_check_at_ms = now_ms + SPACE_CHECK_INTERVAL_MS

    def _check_space(self, now_ms: int) -> None:
        if (
            self._space is not None
            and self._space_check_at_ms is not None
            and self._space_check_at_ms <= now_ms
        ):
            # Set a late time, because no further check may begin before the answer arrives.
            self._space_check_at_ms = now_ms + 60 * SPACE_CHECK_INTERVAL_MS
            self._effects.append(CheckSpace(self._space))

    def _update_lane(self, lane: Lane, work: Work, result: WorkResult, now_ms: int) -> None:
        """Update the state of a lane after a piece of work."""
        if result.files_error is not None:
            self._stop_serving(lane, result.files_error)
            return
        if result.failure is not None:
            self._on_disk_failed(lane, result)
            return
        for request, outcome in zip(work.requests, result.outcomes, strict=True):
            message = request.message
            if message.session_id != lane.promise.session_id:
                continue  # a later session has begun in the meantime
            if not isinstance(outcome, WaltzError):
                self._update_lane_from_answer(lane, message, outcome, now_ms)
            elif isinstance(message, Prepare) and lane.owner == request.connection:
                self._fence(lane, outcome)

    def _update_lane_from_answer(
        self, lane: Lane, message: StorageMessage, answer: StorageMessage, now_ms: int
    ) -> None:
        partition_id = lane.log.partition_id
        if isinstance(message, Engage):
            lane.engaged_session = SessionId(message.session_id)
        elif isinstance(message, SetArchived):
            self._archive_reads.set_mark(message)
            archived_mark = AckedMarker(TransactionId(message.last), Chain(message.chain))
            self._retention.on_archived(partition_id, archived_mark, now_ms)
        elif isinstance(answer, Prepared):
            lane.prepared_end = TransactionId(answer.synced_max)
        elif isinstance(message, SetLowWaterMark) and message.mark != lane.prepared_end:
            self._report_event(
                "storage.replica_repaired",
                partition=partition_id,
                session=message.session_id,
                last_before=lane.prepared_end,
                last=message.mark,
            )

    def _stop_serving(self, lane: Lane, error: WaltzError) -> None:
        """Stop serving a partition whose files were deleted or replaced (rule 11)."""
        self._report_event("storage.files_replaced", partition=lane.log.partition_id, error=error)
        lane.has_lost_files = True
        self._fence(lane, error)
        self._effects.append(DropPartition(lane.log, error))

    def _on_disk_failed(self, lane: Lane, result: WorkResult) -> None:
        """Leave the session after a failure of the disk; exit after a second one (rule 6)."""
        assert result.failure is not None
        self._failures_count += 1
        partition_id = lane.log.partition_id
        self._report_event("storage.disk_failed", partition=partition_id, error=str(result.failure))
        if self._failures_count > 1:
            self._effects.append(EndProcess(str(result.failure)))
        self._fence(lane, result.failure)

    def _resume(self) -> None:
        self._effects += map(ResumeReading, self.queue_limits.take_resumed_connections())

    # ------------------------------------------------------------------ the archive (rule 12)

    def _queue_background_pieces(self, now_ms: int) -> None:
        """Queue the next pieces of the archive and the retention in their lanes."""
        archive_step = self._archive.next_step(now_ms)
        if isinstance(archive_step, CollectFiles | WriteExpiry):
            self._effects.append(archive_step)
        elif archive_step is not None:
            lane = self._lanes[archive_step[0]]
            lane.archive_piece = archive_step[1]
            if lane.work is None:
                self._start_work(lane)
        retention_step = self._retention.next_piece(now_ms)
        if retention_step is not None:
            lane = self._lanes[retention_step[0]]
            lane.retention_piece = retention_step[1]
            if lane.work is None:
                self._start_work(lane)

    def _on_background_piece_done(
        self, lane: Lane, piece: LanePiece | None, result: WorkResult, now_ms: int
    ) -> None:
        """Process the result of a piece of the archive or the retention."""
        partition_id = lane.log.partition_id
        if isinstance(piece, ArchivePiece):
            assert result.archive_read is not None
            self._effects += self._archive.on_piece_read(piece, result.archive_read, now_ms)
        elif isinstance(piece, RetentionPiece):
            self._retention.on_piece_done(partition_id, result.log_size)
            if result.log_size is not None and result.log_size.has_removed:
                start = lane.log.start.transaction_id
                self._report_event("storage.segment_removed", partition=partition_id, start=start)

    def _on_archive_done(
        self,
        event: UploadDone | FilesCollected | ExpiryWritten | ArchiveProgressed | ArchiveReadDone,
        now_ms: int,
    ) -> None:
        if isinstance(event, ArchiveReadDone):
            self._effects += self._archive_reads.on_answered(event.read, event.outcome, now_ms)
            self._respond(event.read.request, event.outcome)
        else:
            self._effects += self._archive.on_job_done(event, now_ms)

    def _forget_archiving(self, lane: Lane) -> None:
        self._archive.forget(lane.log.partition_id)
        self._archive_reads.forget(lane.log.partition_id)
        lane.archive_piece = None

    # ------------------------------------------------------------------ effects

    def _send_response(self, request: LaneRequest, message: StorageMessage) -> None:
        self._effects.append(SendStorageMessage(request.connection, message))

    def _send_error(self, request: LaneRequest, error: WaltzError) -> None:
        message = request.message
        lane = self._lanes.get(PartitionId(message.partition_id))
        # After a lost promise, the promised session may be greater than every session in ZooKeeper.
        # From such a session, an owner would conclude that ZooKeeper has lost data.
        promised = lane.promise.last_seen_session if lane is not None else NO_SESSION
        self._report_event(
            "storage.request_rejected", request=type(message).__name__, error=type(error).__name__
        )
        text = str(error)[:REJECTION_CHARACTERS_MAX]
        first = error.first_available if isinstance(error, BeforeLogStart) else BEFORE_FIRST
        self._send_response(request, Nack(*_prefix_of(message), error.code, promised, text, first))

    def _report_event(self, name: str, **fields: object) -> None:
        self._effects.append(Report(name, tuple(fields.items())))


def _check_owner(lane: Lane, request: LaneRequest) -> None:
    if lane.owner != request.connection:
        raise SessionFenced(
            f"partition {request.message.partition_id}: this connection has not prepared "
            f"store session {request.message.session_id}"
        )


def _prefix_of(message: StorageMessage) -> tuple[int, int, int]:
    return message.session_id, message.sequence, message.partition_id
