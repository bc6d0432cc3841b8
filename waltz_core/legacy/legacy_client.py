"""Adapter for Waltz 0.13 clients: translates partition responses into messages they understand.

Up to version 4, the client protocol (protocol L) has no messages for three events: the outcome of
an append, a rejection, and the end of a mount. The adapter is between the server's partitions and a
connection. It translates each answer into a message that a 0.13 client understands, or drops the
answer. Each message that it sends is true. docs/decisions/020 lists each state in which a client
might wait forever, and how this state ends.

Rules:
    1. The adapter reports a failed append only when the failure is final: by LOCK_FAILURE, or by
       the answer to a flush. The client sends a flush after its mount, and every 5 s while an
       append has no outcome.
    2. The adapter reports the end of a mount as NOT_READY, with the request ID of the mount. The
       client then mounts again on the same connection, and flushes. The adapter sends this report
       once for each mount.
    3. The adapter closes a connection in all cases in which a 0.13 server closes it. The adapter
       also closes a connection if it cannot report a high-water mark. The client then reconnects
       with the next connection sequence, mounts, and requests the mark again.
    4. A request gets no answer if its mount is not the latest mount of the connection.
    5. After the report of rule 2, a client may continue to use the ended mount for at most
       `MOUNT_WAIT_S`. A client that uses the ended mount after this time has not processed the
       report, so the adapter closes the connection.
"""

from dataclasses import dataclass
from typing import Final, TypeAlias

from waltz_core import errors
from waltz_core.legacy.feed_frames import feed_frames
from waltz_core.records.record import BEFORE_FIRST, PartitionId, ReqId
from waltz_core.values import value
from waltz_core.wire.messages import (
    AddPreferredRequest,
    AddPreferredResponse,
    AppendRequest,
    AppendResult,
    ClientMessage,
    ErrorResponse,
    FeedBatch,
    FeedRequest,
    FlushRequest,
    HighWaterMarkRequest,
    LockFailure,
    MountOutcome,
    MountRequest,
    MountResponse,
    MountState,
    RemovePreferredRequest,
    RemovePreferredResponse,
    RowOutcomeCode,
    TransactionDataRequest,
    TransactionDataResponse,
)

VERSION_MAX: Final = 4
_MOUNT_OUTCOME_VERSION_MAX: Final = 2  # the last version in which a bool answers a mount
# How long a request for a high-water mark stays open if it cannot be answered.
MARK_WAIT_S: Final = 5.0
# A client mounts again 500 ms after NOT_READY (docs/design/wire-format.md 2.2).
MOUNT_WAIT_S: Final = 5.0
# The error texts of 0.13 that its clients check.
_NOT_FOUND_TEXT: Final = "com.wepay.waltz.store.exception.TransactionNotFoundException: "
_NOT_READY_TEXT: Final = "partition not ready"

# A row that was rejected for one of these reasons is not in the log, and the client must mount
# again.
_MOUNT_ENDING_REASONS: Final = frozenset(
    (
        RowOutcomeCode.LOST,
        RowOutcomeCode.AHEAD,
        RowOutcomeCode.NOT_MOUNTED,
        RowOutcomeCode.GENERATION,
        RowOutcomeCode.NO_SPACE,
    )
)
# If a mount or a feed fails with one of these errors, 0.13 closes the connection, or a 0.13 client
# cannot use the error.
_CONNECTION_ENDING_CODES: Final = frozenset(
    each.code for each in (errors.BadRequest, errors.ClientAheadOfLog, errors.ConnectionSuperseded)
)
# The errors that do not show whether the partition exists.
_UNKNOWN_PARTITION_CODES: Final = frozenset(
    each.code
    for each in (
        errors.UnknownPartition,
        errors.PermissionDenied,
        errors.ClientIdDenied,
        errors.PermissionsNotLoaded,
        errors.Overloaded,  # the principal exceeds a limit
    )
)
# The errors of a request for data if the partition has moved, or is between two sessions.
_NOT_OWNER_CODES: Final = frozenset(
    each.code
    for each in (
        errors.NotOwned,
        errors.UnknownPartition,
        errors.Unavailable,
        errors.SessionLost,
    )
)


@value(frozen=True, slots=True)
class EncodedFrames:
    """Complete frames, in the protocol version of the connection."""

    data: bytes


@value(frozen=True, slots=True)
class EndConnection:
    """Close the connection after a delay in seconds."""

    reason: str
    after_s: float = 0


@value(frozen=True, slots=True)
class InexpressibleError:
    """An error that the protocol cannot express, for the server's log."""

    text: str


LegacyResponse: TypeAlias = ClientMessage | EncodedFrames | EndConnection | InexpressibleError


@dataclass(slots=True)
class _LegacyMount:
    """The latest mount of a partition on this connection.

    `is_ready` is true after READY was reported, until the mount ends.
    """

    req_id: ReqId
    is_ready: bool = False


class LegacyClientAdapter:
    """Adapts one connection of a 0.13 client, by the module's rules."""

    __slots__ = ("_is_closing", "_mount_ended_s", "_mounts", "_version")

    def __init__(self, version: int) -> None:
        assert version <= VERSION_MAX
        self._version = version
        self._mounts: dict[PartitionId, _LegacyMount] = {}
        # For partitions without a mount: the time of the last report that a mount has ended
        # (rule 5).
        self._mount_ended_s: dict[PartitionId, float] = {}
        self._is_closing = False

    # -----------------------------------------------------------------------------------------
    # requests

    def check_request(self, message: ClientMessage, now_s: float) -> EndConnection | None:
        """Check a request before it is processed; return EndConnection to close the connection."""
        partition_id = message.req_id.partition_id
        if isinstance(message, AppendRequest | FeedRequest):
            ended_s = self._mount_ended_s.get(partition_id)
            if ended_s is not None and now_s - ended_s > MOUNT_WAIT_S:
                return EndConnection(
                    f"the client sends requests for partition {partition_id}, but its mount "
                    "of the partition has ended"
                )
        if isinstance(message, MountRequest):
            self._mount_ended_s.pop(partition_id, None)
            if message.client_high_water_mark < BEFORE_FIRST:
                return EndConnection(
                    "mount request: expected a high-water mark of -1 or more, found "
                    f"{message.client_high_water_mark}"
                )
            self._mounts[partition_id] = _LegacyMount(message.req_id)
        if isinstance(message, AddPreferredRequest | RemovePreferredRequest):
            return (
                None
                if message.partitions
                else EndConnection(
                    "change of preferences: expected at least one partition, found none"
                )
            )
        return None

    # -----------------------------------------------------------------------------------------
    # answers

    def translate_response(
        self, message: ClientMessage, request: ClientMessage | None, now_s: float
    ) -> LegacyResponse | None:
        """Translate the answer to a request; None if the client gets no answer."""
        answer = self._translate(message, request)
        if isinstance(answer, MountResponse | MountOutcome):
            partition_id = answer.req_id.partition_id
            if partition_id not in self._mounts and not _may_be_unknown_partition(message):
                self._mount_ended_s[partition_id] = now_s
        return answer

    def _translate(
        self, message: ClientMessage, request: ClientMessage | None
    ) -> LegacyResponse | None:
        match message:
            case AppendResult():
                return self._on_append_ended(message)
            case FeedBatch():
                return EncodedFrames(feed_frames(message.first, message.headers, self._version))
            case MountResponse():
                return self._on_mount_answered(message.req_id, message.state)
            case TransactionDataResponse(result=(None, _)):
                return _data_not_found(message)
            case ErrorResponse():
                return self._translate_error(request, message)
            case _:
                return message

    def _on_append_ended(self, message: AppendResult) -> LegacyResponse | None:
        """Report the outcome of a failed append; the feed reports the committed appends."""
        req_id, reason = message.req_id, RowOutcomeCode(message.reasons[0])
        assert len(message.reasons) == 1, "a 0.13 client appends single transactions"
        if reason is RowOutcomeCode.LOCK:
            conflict = int.from_bytes(message.conflicting, "big", signed=True)
            # The client waits until its mark reaches this ID, so the ID must be that of a committed
            # transaction.
            assert conflict <= message.high_water_mark
            return LockFailure(req_id, conflict)
        if reason in _MOUNT_ENDING_REASONS:
            return self._on_mount_ended(req_id.partition_id)
        if reason is RowOutcomeCode.TOO_LARGE:
            return InexpressibleError(
                f"append {req_id} is too large, and a Waltz 0.13 client sends it again and again"
            )
        return None  # committed, or OVERLOADED: the answer to the next flush reports the failure

    # -----------------------------------------------------------------------------------------
    # mounts

    def _on_mount_answered(self, req_id: ReqId, state: int) -> LegacyResponse | None:
        mount = self._mounts.get(req_id.partition_id)
        partition_id = req_id.partition_id
        if mount is None or mount.req_id != req_id:
            return None  # rule 4
        mount.is_ready = state == MountState.READY
        if not mount.is_ready:
            del self._mounts[partition_id]
        return self._mount_state(req_id, state)

    def _on_mount_ended(self, partition_id: PartitionId) -> LegacyResponse | None:
        """Make the client mount again, unless it is already mounting (rule 2)."""
        mount = self._mounts.get(partition_id)
        if mount is None or not mount.is_ready:
            return None
        return self._on_mount_answered(mount.req_id, MountState.NOT_READY)

    def _mount_state(self, req_id: ReqId, state: int) -> ClientMessage:
        if self._version <= _MOUNT_OUTCOME_VERSION_MAX:
            return MountOutcome(req_id, is_ready=state == MountState.READY)
        return MountResponse(req_id, state)

    # -----------------------------------------------------------------------------------------
    # rejections

    def _translate_error(
        self, request: ClientMessage | None, error: ErrorResponse
    ) -> LegacyResponse | None:
        """Translate an error; the translation depends on the request."""
        req_id = error.req_id
        answer: LegacyResponse | None = None
        match request:
            case MountRequest() | FeedRequest():
                answer = self._on_mount_rejected(req_id, error)
            case AppendRequest():
                # If the partition has moved, its feed is rejected as well, and this rejection ends
                # the mount.
                if error.error_code == errors.ChecksumMismatch.code:
                    answer = EndConnection(error.message)
            case FlushRequest():
                answer = self._on_flush_rejected(req_id, error)
            case HighWaterMarkRequest():
                answer = self._on_mark_rejected(error)
            case TransactionDataRequest():
                text = _NOT_READY_TEXT if error.error_code in _NOT_OWNER_CODES else error.message
                answer = TransactionDataResponse(req_id, request.transaction_id, (None, text))
            case AddPreferredRequest():
                answer = AddPreferredResponse(req_id, is_done=False)
            case RemovePreferredRequest():
                answer = RemovePreferredResponse(req_id, is_done=False)
            case _:
                answer = EndConnection(error.message)
        return answer

    def _on_mount_rejected(self, req_id: ReqId, error: ErrorResponse) -> LegacyResponse | None:
        mount = self._mounts.get(req_id.partition_id)
        if mount is None or mount.req_id != req_id:
            return None  # rule 4
        if error.error_code in _CONNECTION_ENDING_CODES:
            return EndConnection(error.message)
        return self._on_mount_answered(req_id, MountState.NOT_READY)

    def _on_flush_rejected(self, req_id: ReqId, error: ErrorResponse) -> LegacyResponse | None:
        """Send nothing, like 0.13. If the mount still exists, make the client mount again."""
        if error.error_code in (errors.NotOwned.code, errors.UnknownPartition.code):
            return None
        return self._on_mount_ended(req_id.partition_id)

    def _on_mark_rejected(self, error: ErrorResponse) -> LegacyResponse | None:
        """Send nothing. The client requests the mark again on its next connection (rule 3)."""
        if self._is_closing:
            return None
        self._is_closing = True
        return EndConnection(error.message, MARK_WAIT_S)


def _may_be_unknown_partition(message: ClientMessage) -> bool:
    """Whether it is possible that the partition does not exist.

    The adapter keeps no state for such a partition, so that invented partition IDs use no memory.
    """
    if not isinstance(message, ErrorResponse):
        return False
    return message.error_code in _UNKNOWN_PARTITION_CODES


def _data_not_found(message: TransactionDataResponse) -> TransactionDataResponse:
    req_id, requested_id = message.req_id, message.transaction_id
    text = f"{_NOT_FOUND_TEXT}partition={req_id.partition_id}transactionId={requested_id}"
    return TransactionDataResponse(req_id, requested_id, (None, text))
