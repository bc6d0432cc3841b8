"""The administration of a storage as a state machine: requests in, answers and tasks out.

This code decides whether acknowledged data may be deleted. It has no sockets, threads or ZooKeeper,
so that tests can cover every case. `admin_port.py` executes the decisions on the disk, through
`storage_engine.py` and `removal.py`.

A task is a query or a change that a request needs. One `AdminTaskDone` event reports the result of
each task. Each request is executed by a generator (`RequestHandler`), which yields tasks and
returns the answer.

Rules:
    1. Changes of all connections are made one at a time, in the order of arrival. Queries do not
       wait for changes.
    2. If ZooKeeper records a replica as engaged in the last session, the replica is removed or
       emptied only with `is_forced`. If ZooKeeper assigns a replica to this storage, the replica is
       never removed, because the storage would immediately create it again (empty, if its files
       were deleted). ZooKeeper is queried for each request.
    3. Records are copied only to an offline partition, and only up to the confirmed low-water mark
       of the source. Records above this mark may still be truncated, so they must not make another
       log longer.
    4. A request for several partitions ends at the first partition for which it is rejected. The
       error lists the partitions that are done.
    5. A change is durable before it is answered. A change that has begun is completed even if the
       client has disconnected (but see rule 6).
    6. With access control, the end of a connection ends its requests, because a revocation of
       permissions may have closed it. Waiting requests are dropped, and a running request ends
       after its current task.
    7. A peer with version 0 of the administration protocol (A 0) receives errors in the form of
       Waltz 0.13: as a text.
"""

import json
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Final, TypeAlias, assert_never

import numpy as np

from waltz_core.errors import BadRequest, ClusterKeyMismatch, Overloaded, Unavailable, WaltzError
from waltz_core.machine import Report, Wakeup
from waltz_core.records import raw_records
from waltz_core.records.record import (
    GENESIS_CHAIN,
    RECORD_OVERHEAD_BYTES,
    PartitionId,
    Record,
    ReqId,
    TransactionId,
)
from waltz_core.replication.quorum import quorum_size
from waltz_core.storage.log.scrub import ScrubState
from waltz_core.storage.service import admin_tasks
from waltz_core.storage.service.admin_tasks import (
    NO_LOG,
    AdminTask,
    ArchiveState,
    Assign,
    DiskStatus,
    FindArchiveState,
    FindDiskStatus,
    FindHeldPartitions,
    FindScrubState,
    FindZooKeeperState,
    HeldPartition,
    InspectReplica,
    LogStatus,
    PutCopy,
    ReadRange,
    ReplicaStatus,
    Unassign,
    ZooKeeperState,
)
from waltz_core.storage.service.service import REJECTION_CHARACTERS_MAX, StorageIdentity
from waltz_core.storage.service.work import RANGE_BYTES_MAX, ConnectionId
from waltz_core.values import value
from waltz_core.wire import admin_messages as wire
from waltz_core.wire.admin_messages import AdminMessage
from waltz_core.wire.messages import ENTRIES_MAX, RangeBytes

# The maximum number of requests that wait, over all connections; there are only a few operators.
WAITING_REQUESTS_MAX: Final = 256
# The names of the gauges for the fields of `DiskStatus`, in their order.
DISK_GAUGES: Final = (
    "free-bytes",
    "reserved-bytes",
    "is-full",
    "clock-ms",
    "disk-error",
    "size-bytes",
    "filling-bytes-per-day",
)


# ---------------------------------------------------------------------------------------------
# Events and effects


@value(frozen=True, slots=True)
class AdminRequest:
    """A request arrived on a connection with this version of the administration protocol."""

    connection: ConnectionId
    version: int
    message: AdminMessage


@value(frozen=True, slots=True)
class AdminTaskDone:
    """A task is done; `value` is its result or its error."""

    task_id: int
    value: object


@value(frozen=True, slots=True)
class AdminDisconnected:
    """A connection with access control is closed; it sends no further requests."""

    connection: ConnectionId


Event: TypeAlias = AdminRequest | AdminTaskDone | AdminDisconnected | Wakeup


@value(frozen=True, slots=True)
class SendAdminResponse:
    """Send the answer to a request; do nothing if the connection is closed."""

    connection: ConnectionId
    message: AdminMessage
    request: AdminMessage


@value(frozen=True, slots=True)
class RunAdminTask:
    """Execute a task, and return its outcome as `AdminTaskDone`."""

    task_id: int
    task: AdminTask


Effect: TypeAlias = SendAdminResponse | RunAdminTask | Report

RequestHandler: TypeAlias = Generator[AdminTask, object, AdminMessage]
_CHANGE_REQUESTS: Final = (
    wire.SetAvailable,
    wire.SetAssigned,
    wire.RemovePartition,
    wire.MarkSuspect,
    wire.ReSeed,
    wire.Copy,
)


class AdminService:
    """The state machine of a storage's administration; rules refer to this module."""

    def __init__(self, identity: StorageIdentity, *, address: str) -> None:
        self._identity = identity
        self._address = address
        self._task_count = 0
        self._suspended_handlers: dict[int, tuple[AdminRequest, RequestHandler]] = {}
        # The IDs of the tasks after which a request ends (rule 6).
        self._ending_task_ids: set[int] = set()
        self._waiting_requests: deque[AdminRequest] = deque()
        self._running_change: AdminRequest | None = None
        self._effects: list[Effect] = []
        self._handler_factories: dict[type[AdminMessage], Callable[..., RequestHandler]] = {
            wire.CheckCluster: self._check_cluster,
            wire.SetAvailable: self._set_available,
            wire.SetAssigned: self._set_assigned,
            wire.RecordListRequest: self._list_records,
            wire.SessionInfoRequest: self._answer_marks,
            wire.MetricsRequest: self._answer_gauges,
            wire.HeldRequest: self._answer_held,
            wire.StorageRequest: self._answer_held,
            wire.ReplicaRequest: self._answer_replica,
            wire.RemovePartition: self._remove,
            wire.MarkSuspect: self._mark_suspect,
            wire.ReSeed: self._re_seed,
            wire.CopyRequest: self._send_copy,
            wire.Copy: self._receive_copy,
            wire.ScrubRequest: self._scrub,
        }

    @property
    def wake_at_ms(self) -> int | None:
        """Always None: this machine needs no clock."""
        return None

    def step(self, event: Event, now_ms: int) -> list[Effect]:
        """Process one event, and return the effects (`machine.py`)."""
        del now_ms
        match event:
            case AdminRequest():
                self._receive_request(event)
            case AdminTaskDone():
                request, handler = self._suspended_handlers.pop(event.task_id)
                ends = event.task_id in self._ending_task_ids
                self._ending_task_ids.discard(event.task_id)
                self._continue_request(request, handler, event.value, ends=ends)
            case AdminDisconnected():
                self._end_requests(event.connection)
            case Wakeup():
                pass
            case _:
                assert_never(event)
        effects, self._effects = self._effects, []
        return effects

    def _receive_request(self, request: AdminRequest) -> None:
        if len(self._suspended_handlers) + len(self._waiting_requests) >= WAITING_REQUESTS_MAX:
            self._reject_request(
                request,
                Overloaded(
                    f"{WAITING_REQUESTS_MAX} administration requests are waiting already, which is "
                    "the limit"
                ),
            )
        elif not isinstance(request.message, _CHANGE_REQUESTS):
            self._begin_request(request)
        elif self._running_change is None:
            self._running_change = request
            self._begin_request(request)
        else:
            self._waiting_requests.append(request)  # rule 1

    def _end_requests(self, connection: ConnectionId) -> None:
        """Drop a connection's waiting requests; end running requests after their task (rule 6)."""
        waiting, self._waiting_requests = self._waiting_requests, deque()
        for request in waiting:
            if request.connection == connection:
                self._reject_request(request, _disconnected_error())
            else:
                self._waiting_requests.append(request)
        self._ending_task_ids |= {
            task_id
            for task_id, (request, _) in self._suspended_handlers.items()
            if request.connection == connection
        }

    def _begin_request(self, request: AdminRequest) -> None:
        self._continue_request(request, self._create_handler(request.message), None)

    def _continue_request(
        self, request: AdminRequest, handler: RequestHandler, value: object, *, ends: bool = False
    ) -> None:
        """Continue a request until its next task or its answer.

        If `ends` is set, the request ends after the task that is done now.
        """
        try:
            task = handler.throw(value) if isinstance(value, WaltzError) else handler.send(value)
            if ends:
                # The handler raises the error, perhaps with a list of the done partitions.
                task = handler.throw(_disconnected_error())
        except StopIteration as end:
            self._effects.append(SendAdminResponse(request.connection, end.value, request.message))
            if isinstance(request.message, _CHANGE_REQUESTS):
                self._report_event("storage.admin_request_completed", request)
        except WaltzError as error:
            self._reject_request(request, error)
        else:
            self._task_count += 1
            self._suspended_handlers[self._task_count] = (request, handler)
            self._effects.append(RunAdminTask(self._task_count, task))
            return
        if request is self._running_change:
            self._running_change = (
                self._waiting_requests.popleft() if self._waiting_requests else None
            )
            if self._running_change is not None:
                self._begin_request(self._running_change)

    def _reject_request(self, request: AdminRequest, error: WaltzError) -> None:
        text = str(error)[:REJECTION_CHARACTERS_MAX]
        sequence = request.message.sequence
        answer: AdminMessage = wire.AdminRejected(sequence, error.code, text)
        if request.version == 0:  # rule 7
            answer = wire.AdminFailure(sequence, f"{type(error).__name__}: {text}", ())
        self._effects.append(SendAdminResponse(request.connection, answer, request.message))
        self._report_event("storage.admin_request_rejected", request, error=text)

    def _report_event(self, name: str, request: AdminRequest, **fields: object) -> None:
        message = request.message
        request_fields = (
            ("request", type(message).__name__),
            ("partition", getattr(message, "partition_id", "none")),
        )
        self._effects.append(Report(name, (*request_fields, *fields.items())))

    # ------------------------------------------------------------------ requests

    def _create_handler(self, message: AdminMessage) -> RequestHandler:
        create_handler: Callable[..., RequestHandler] = self._handler_factories.get(
            type(message), self._reject_kind
        )
        return create_handler(message)

    def _reject_kind(self, message: AdminMessage) -> RequestHandler:
        yield from ()
        raise BadRequest(f"a storage does not accept {type(message).__name__} at this port")

    def _check_cluster(self, message: wire.CheckCluster) -> RequestHandler:
        yield from ()
        expected = (self._identity.cluster_key, self._identity.partition_count)
        if (message.cluster_key, message.partition_count) != expected:
            raise ClusterKeyMismatch(
                "the request is for another cluster: expected cluster key "
                f"{expected[0].hex()} with {expected[1]} partitions, found "
                f"{message.cluster_key.hex()} with {message.partition_count}"
            )
        return wire.Done(message.sequence)

    def _set_available(self, message: wire.SetAvailable) -> RequestHandler:
        def change(partition_id: PartitionId) -> Generator[AdminTask, object, None]:
            yield admin_tasks.SetAvailableTask(partition_id, message.is_available)

        yield from _apply_to_each(message.partitions, change)
        return wire.Done(message.sequence)

    def _set_assigned(self, message: wire.SetAssigned) -> RequestHandler:
        def change(partition_id: PartitionId) -> Generator[AdminTask, object, None]:
            if message.is_assigned:
                yield Assign(partition_id)
            else:
                yield from _remove_partition(
                    partition_id, deletes_files=message.deletes_files, is_forced=False
                )

        yield from _apply_to_each(message.partitions, change)
        return wire.Done(message.sequence)

    def _remove(self, message: wire.RemovePartition) -> RequestHandler:
        partition_id = PartitionId(message.partition_id)
        yield from _remove_partition(
            partition_id, deletes_files=message.deletes_files, is_forced=message.is_forced
        )
        return wire.Done(message.sequence)

    def _mark_suspect(self, message: wire.MarkSuspect) -> RequestHandler:
        partition_id = PartitionId(message.partition_id)
        if not message.is_forced:
            state = yield from _zookeeper_state(partition_id)
            if state.is_engaged and quorum_size(state.replica_count) == 1:
                raise BadRequest(
                    f"the replica of partition {partition_id} was not marked as suspect, because "
                    f"it is the only one in sync in store session {state.session_id}, so no "
                    "other replica can prove which appends were acknowledged. Hint: use --force "
                    "to accept that."
                )
        yield admin_tasks.MarkSuspectTask(partition_id)
        return wire.Done(message.sequence)

    def _re_seed(self, message: wire.ReSeed) -> RequestHandler:
        partition_id = PartitionId(message.partition_id)
        if not message.is_forced:
            state = yield from _zookeeper_state(partition_id)
            if state.is_engaged:
                raise BadRequest(
                    f"the replica of partition {partition_id} was not deleted, because "
                    f"{_engaged_replicas_text(state)}. Hint: take it offline first (`storage "
                    "availability`), so that the session continues without it, or use --force."
                )
        yield admin_tasks.ReSeedTask(partition_id)
        return wire.Done(message.sequence)

    def _answer_held(self, message: wire.HeldRequest | wire.StorageRequest) -> RequestHandler:
        partitions = yield from _find_held_partitions()
        if isinstance(message, wire.HeldRequest):
            pairs = tuple(
                (int(partition.partition_id), partition.is_available) for partition in partitions
            )
            return wire.HeldResponse(message.sequence, pairs)
        return wire.StorageResponse(
            message.sequence,
            storage_id=self._identity.storage_id,
            cluster_key=self._identity.cluster_key,
            partition_count=self._identity.partition_count,
            address=self._address,
            held=tuple(int(partition.partition_id) for partition in partitions),
        )

    def _answer_gauges(self, message: wire.MetricsRequest) -> RequestHandler:
        partitions = yield from _find_held_partitions()
        disk_status = yield FindDiskStatus()
        assert isinstance(disk_status, DiskStatus)
        archive = yield FindArchiveState()
        assert archive is None or isinstance(archive, ArchiveState)
        return wire.MetricsResponse(message.sequence, gauges_json(partitions, disk_status, archive))

    def _answer_marks(self, message: wire.SessionInfoRequest) -> RequestHandler:
        info = (yield from _replica_status(PartitionId(message.partition_id))).info
        marks = (info.session_id, info.low_water_mark, info.local_low_water_mark)
        return wire.SessionInfoResponse(message.sequence, message.partition_id, *marks)

    def _answer_replica(self, message: wire.ReplicaRequest) -> RequestHandler:
        status = yield from _replica_status(PartitionId(message.partition_id), must_be_held=False)
        log = status.log or NO_LOG
        return wire.ReplicaResponse(
            message.sequence,
            message.partition_id,
            is_held=status.is_held,
            is_available=status.is_available,
            is_served=status.is_served,
            reason=status.reason,
            is_suspect=log.is_suspect,
            promised=log.promised,
            last_session=log.last_session,
            low_water_mark=log.low_water_mark,
            synced_max=log.synced_max,
            chain=log.chain,
            damaged=np.array(log.damaged, dtype=">i8").tobytes(),
        )

    def _scrub(self, message: wire.ScrubRequest) -> RequestHandler:
        partition_id = PartitionId(message.partition_id)
        yield from _replica_status(partition_id)
        state = yield FindScrubState(partition_id, message.begins)
        if state is None:
            raise BadRequest(
                f"partition {partition_id} cannot be scrubbed, because it is offline or not "
                "open. Hint: `storage list` shows the state of each partition."
            )
        assert isinstance(state, ScrubState)
        return wire.ScrubResponse(
            message.sequence,
            message.partition_id,
            is_running=state.is_running,
            next_id=state.next_id,
            last_id=state.last_id,
            read_bytes=state.read_bytes,
            passes_count=state.passes_count,
            finished_age_ms=state.finished_age_ms,
            error=state.error,
        )

    def _list_records(self, message: wire.RecordListRequest) -> RequestHandler:
        log = yield from _log_of(PartitionId(message.partition_id))
        count = min(message.count_max, ENTRIES_MAX)
        last = TransactionId(min(message.first + count - 1, log.synced_max))
        records: tuple[Record, ...] = ()
        if 0 <= message.first <= last:
            first = TransactionId(message.first)
            read = yield from _read_range(
                ReadRange(PartitionId(message.partition_id), first, last, RANGE_BYTES_MAX)
            )
            records = _records_of(read)
        return wire.RecordListResponse(message.sequence, message.partition_id, records)

    # ------------------------------------------------------------------ copying (rule 3)

    def _send_copy(self, message: wire.CopyRequest) -> RequestHandler:
        partition_id = PartitionId(message.partition_id)
        log = yield from _log_of(partition_id)
        if message.first < 0:
            raise BadRequest(
                f"partition {partition_id}: expected a transaction ID, found {message.first}"
            )
        if message.first > log.low_water_mark:
            empty_copy = (message.first, b"", b"", 0, GENESIS_CHAIN, ())
            return wire.Copy(message.sequence, partition_id, *empty_copy)
        first, bytes_max = TransactionId(message.first), min(message.bytes_max, RANGE_BYTES_MAX)
        read = yield from _read_range(
            ReadRange(partition_id, first, log.low_water_mark, bytes_max, whole_batches=True)
        )
        return wire.Copy(
            message.sequence,
            partition_id,
            read.first,
            read.lengths,
            read.records,
            read.records_crc,
            read.chain_before,
            read.lineage,
        )

    def _receive_copy(self, message: wire.Copy) -> RequestHandler:
        partition_id = PartitionId(message.partition_id)
        status = yield from _replica_status(partition_id)
        if status.is_available:
            raise BadRequest(
                f"the replica of partition {partition_id} must be offline while it receives a "
                "copy, but it is online. Hint: take it offline first (`storage availability`)."
            )
        last = yield PutCopy(message)
        assert isinstance(last, int)
        return wire.Copied(message.sequence, partition_id, last)


# ---------------------------------------------------------------------------------------------
# Parts of requests


def _disconnected_error() -> WaltzError:
    return Unavailable("the connection was closed before the request was done")


def _apply_to_each(
    partitions: Sequence[int], change: Callable[[PartitionId], Generator[AdminTask, object, None]]
) -> Generator[AdminTask, object, None]:
    """Apply a change to each partition; an error names the partitions that are done (rule 4)."""
    done: list[int] = []
    for partition_id in dict.fromkeys(partitions):
        try:
            yield from change(PartitionId(partition_id))
        except WaltzError as error:
            if not done:
                raise
            raise type(error)(f"{error}. Partitions already done: {done}") from error
        done.append(partition_id)


def _remove_partition(
    partition_id: PartitionId, *, deletes_files: bool, is_forced: bool
) -> Generator[AdminTask, object, None]:
    """Remove a partition, if rule 2 allows it."""
    yield from _replica_status(partition_id)
    state = yield from _zookeeper_state(partition_id)
    if state.is_assigned:
        raise BadRequest(
            f"the replica of partition {partition_id} was not removed, because ZooKeeper assigns "
            "it to this storage, which would create it again at once. Hint: remove the "
            "assignment first. To begin the replica again with an empty log, use `storage "
            "re-seed`."
        )
    if state.is_engaged and not is_forced:
        raise BadRequest(
            f"the replica of partition {partition_id} was not removed, because "
            f"{_engaged_replicas_text(state)}. Hint: the server that owns the partition drops the "
            "replica as soon as it can; try again, or use --force."
        )
    yield Unassign(partition_id, deletes_files)


def _engaged_replicas_text(state: ZooKeeperState) -> str:
    """Describe the engaged replicas, and state how many of them are left without this one."""
    remaining_count, quorum = len(state.engaged) - 1, quorum_size(state.replica_count)
    names = ", ".join(state.engaged)
    quorum_text = (
        "still a quorum" if remaining_count >= quorum else f"less than the quorum of {quorum}"
    )
    return (
        f"it is in sync, so its acknowledgements count in store session {state.session_id} "
        f"(replicas {names}; without it, {remaining_count} are left, {quorum_text})"
    )


def _replica_status(
    partition_id: PartitionId, *, must_be_held: bool = True
) -> Generator[AdminTask, object, ReplicaStatus]:
    status = yield InspectReplica(partition_id)
    assert isinstance(status, ReplicaStatus)
    if must_be_held and not status.is_held:
        raise BadRequest(f"this storage does not have partition {partition_id}")
    return status


def _log_of(partition_id: PartitionId) -> Generator[AdminTask, object, LogStatus]:
    status = yield from _replica_status(partition_id)
    if status.log is None:
        raise BadRequest(f"the log of partition {partition_id} cannot be read: {status.reason}")
    return status.log


def _zookeeper_state(partition_id: PartitionId) -> Generator[AdminTask, object, ZooKeeperState]:
    state = yield FindZooKeeperState(partition_id)
    assert isinstance(state, ZooKeeperState)
    return state


def _find_held_partitions() -> Generator[AdminTask, object, tuple[HeldPartition, ...]]:
    partitions = yield FindHeldPartitions()
    assert isinstance(partitions, tuple)
    return partitions


def _read_range(task: ReadRange) -> Generator[AdminTask, object, RangeBytes]:
    read = yield task
    assert isinstance(read, RangeBytes)
    return read


def _records_of(read: RangeBytes) -> tuple[Record, ...]:
    """Return the records of a range as objects, which version 0 of the protocol needs."""
    lengths = raw_records.lengths_from_wire(read.lengths, len(read.records))
    ids = raw_records.ids_of(read.records, lengths)
    headers = raw_records.application_headers_of(read.records, lengths)
    view = memoryview(read.records)
    records, offset = [], 0
    for position, length in enumerate(lengths.tolist()):
        data = view[offset + RECORD_OVERHEAD_BYTES - 4 : offset + length - 4]
        req_id = ReqId.from_bytes(view[offset + 8 : offset + 24])
        records.append(
            Record(TransactionId(int(ids[position])), req_id, int(headers[position]), bytes(data))
        )
        offset += length
    return tuple(records)


def gauges_json(
    partitions: Sequence[HeldPartition], disk_status: DiskStatus, archive: ArchiveState | None
) -> bytes:
    """Return the gauges as JSON, under the names of Waltz 0.13, for its tools.

    docs/design/wire-format.md 3.2 lists the names. The gauges for disk, clock and archive are new;
    the 0.13 tools ignore unknown names. An unknown value has no gauge.
    """
    group = "waltz-storage"
    values: dict[str, object] = {
        f"{group}.waltz-storage-num-partitions": len(partitions),
        f"{group}.waltz-storage-partition-ids": [
            partition.partition_id for partition in partitions
        ],
    }
    disk_values = zip(DISK_GAUGES, disk_status, strict=True)
    values |= {f"{group}.{name}": value for name, value in disk_values if value is not None}
    if archive is not None:
        values[f"{group}.archive"] = archive._asdict()
    for partition in partitions:
        prefix = f"{group}.partition-{partition.partition_id}"
        values |= {
            f"{prefix}.session-id": partition.info.session_id,
            f"{prefix}.low-water-mark": partition.info.low_water_mark,
            f"{prefix}.local-low-water-mark": partition.info.local_low_water_mark,
            f"{prefix}.flags": partition.info.flags,
            f"{prefix}.sequence-number": partition.info.sequence,
            f"{prefix}.max-transaction-id": partition.synced_max,
        }
    gauges = {name: {"value": value} for name, value in values.items()}
    kinds = ("counters", "histograms", "meters", "timers")
    empty_kinds: dict[str, dict[str, object]] = {kind: {} for kind in kinds}
    document = {"metrics": gauges, "ids": list(gauges), "gauges": gauges, **empty_kinds}
    return json.dumps(document, separators=(",", ":")).encode()
