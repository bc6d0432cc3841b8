"""A client of the original at our server: what it is told, of what our partitions say.

Up to L 4 there is no word for the outcome of an append, for a refusal, or for the end of a mount.
Partitions need not know that. Here, between partitions and links, every answer becomes something
that such a client understands, or nothing, and in no case something untrue. docs/decisions/020 has
each state in which a client might wait for ever, and what becomes of it.

Rules:
    1. That an append has failed is told only when it is final: by LOCK_FAILURE, or by the answer to
       the flush that the client sends when it has mounted, and every 5 s while something is open.
    2. A mount that has ended is told as NOT_READY, under its own request id: the client mounts
       again on the same connection, and flushes. Once for each mount: the next one is its answer.
    3. A connection ends where the original ends it, and where a mark cannot be told: the client
       comes back with the next connection sequence, mounts again, and asks again.
    4. What was asked under a mount that is no longer the connection's latest is not answered.
    5. Who goes on as if his mount had not ended, `MOUNT_WAIT_S` after he was told, did not take it
       in: his connection ends.
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
    Reason,
    RemovePreferredRequest,
    RemovePreferredResponse,
    TransactionDataRequest,
    TransactionDataResponse,
)

VERSION_MAX: Final = 4
_OUTCOMES_UP_TO: Final = 2  # of versions: the mount's answer is a bool
# So long a question for a mark stays open that cannot be answered.
MARK_WAIT_S: Final = 5.0
# A client mounts again 500 ms after NOT_READY (docs/design/wire-format.md 2.2).
MOUNT_WAIT_S: Final = 5.0
# The original's words, which its clients know.
_NOT_FOUND: Final = "com.wepay.waltz.store.exception.TransactionNotFoundException: "
_NOT_HERE: Final = "partition not ready"

# What is refused for these is not in the log, and its client had better mount before it goes on.
_ENDS_MOUNT: Final = frozenset(
    (Reason.LOST, Reason.AHEAD, Reason.NOT_MOUNTED, Reason.GENERATION, Reason.NO_SPACE)
)
# Of a mount or a feed: the original ends the connection, or has no use for it.
_ENDS_CONNECTION: Final = frozenset(
    each.code for each in (errors.BadRequest, errors.ClientAhead, errors.ConnectionSuperseded)
)
# Of data: the partition is elsewhere, or between two sessions.
_ELSEWHERE: Final = frozenset(
    each.code
    for each in (
        errors.NotOwned,
        errors.UnknownPartition,
        errors.Unavailable,
        errors.SessionLost,
    )
)


@value(frozen=True, slots=True)
class Frames:
    """Whole frames of the agreed version."""

    data: bytes


@value(frozen=True, slots=True)
class EndConnection:
    """The connection ends, after so many seconds."""

    reason: str
    after_s: float = 0


@value(frozen=True, slots=True)
class Unheard:
    """Something that the client cannot be told, for whoever looks after the server."""

    text: str


OldAnswer: TypeAlias = ClientMessage | Frames | EndConnection | Unheard


@dataclass(slots=True)
class _Mount:
    """The latest mount of a partition on this connection; `is_ready` from READY to its end."""

    req_id: ReqId
    is_ready: bool = False


class Original:
    """One connection of an original; see the module's rules."""

    __slots__ = ("_ended_s", "_ends_soon", "_mounts", "_version")

    def __init__(self, version: int) -> None:
        assert version <= VERSION_MAX
        self._version = version
        self._mounts: dict[PartitionId, _Mount] = {}
        # When the client was told last that its mount has ended, where it has none now (rule 5).
        self._ended_s: dict[PartitionId, float] = {}
        self._ends_soon = False

    # -----------------------------------------------------------------------------------------
    # what it asks

    def ask(self, message: ClientMessage, now_s: float) -> EndConnection | None:
        """Note a request before it is dealt with; return the end that is made of it, if any."""
        partition_id = message.req_id.partition_id
        if isinstance(message, AppendRequest | FeedRequest):
            ended_s = self._ended_s.get(partition_id)
            if ended_s is not None and now_s - ended_s > MOUNT_WAIT_S:
                return EndConnection(
                    f"the mount of partition {partition_id} has ended, and it goes on"
                )
        if isinstance(message, MountRequest):
            self._ended_s.pop(partition_id, None)
            if message.client_high_water_mark < BEFORE_FIRST:
                return EndConnection(f"a mount with the mark {message.client_high_water_mark}")
            self._mounts[partition_id] = _Mount(message.req_id)
        if isinstance(message, AddPreferredRequest | RemovePreferredRequest):
            return None if message.partitions else EndConnection("a preference for no partition")
        return None

    # -----------------------------------------------------------------------------------------
    # what it is told

    def tell(
        self, message: ClientMessage, question: ClientMessage | None, now_s: float
    ) -> OldAnswer | None:
        """Return what the answer to a question becomes."""
        told = self._told(message, question)
        if isinstance(told, MountResponse | MountOutcome):
            partition_id = told.req_id.partition_id
            if partition_id not in self._mounts:
                self._ended_s[partition_id] = now_s
        return told

    def _told(self, message: ClientMessage, question: ClientMessage | None) -> OldAnswer | None:
        match message:
            case AppendResult():
                return self._append_ended(message)
            case FeedBatch():
                return Frames(feed_frames(message.first, message.headers, self._version))
            case MountResponse():
                return self._mount_answered(message.req_id, message.state)
            case TransactionDataResponse(result=(None, _)):
                return _data_not_found(message)
            case ErrorResponse():
                return self._refused(question, message)
            case _:
                return message

    def _append_ended(self, message: AppendResult) -> OldAnswer | None:
        """Tell the outcome of an append; that it is in the log is told by the feed alone."""
        req_id, reason = message.req_id, Reason(message.reasons[0])
        assert len(message.reasons) == 1, "an original appends one by one"
        if reason is Reason.LOCK:
            conflict = int.from_bytes(message.conflicting, "big", signed=True)
            # The client does not act before its mark is there, so it must be one that comes.
            assert conflict <= message.high_water_mark
            return LockFailure(req_id, conflict)
        if reason in _ENDS_MOUNT:
            return self._mount_ended(req_id.partition_id)
        if reason is Reason.TOO_LARGE:
            return Unheard(f"append {req_id} is too large, and will be sent again and again")
        return None  # In the log, or (OVERLOADED) refused until the client's next flush.

    # -----------------------------------------------------------------------------------------
    # mounts

    def _mount_answered(self, req_id: ReqId, state: int) -> OldAnswer | None:
        mount = self._mounts.get(req_id.partition_id)
        partition_id = req_id.partition_id
        if mount is None or mount.req_id != req_id:
            return None  # rule 4
        mount.is_ready = state == MountState.READY
        if not mount.is_ready:
            del self._mounts[partition_id]
        return self._mount_state(req_id, state)

    def _mount_ended(self, partition_id: PartitionId) -> OldAnswer | None:
        """Have the client mount again, unless it is about to (rule 2)."""
        mount = self._mounts.get(partition_id)
        if mount is None or not mount.is_ready:
            return None
        return self._mount_answered(mount.req_id, MountState.NOT_READY)

    def _mount_state(self, req_id: ReqId, state: int) -> ClientMessage:
        if self._version <= _OUTCOMES_UP_TO:
            return MountOutcome(req_id, is_ready=state == MountState.READY)
        return MountResponse(req_id, state)

    # -----------------------------------------------------------------------------------------
    # refusals

    def _refused(self, question: ClientMessage | None, error: ErrorResponse) -> OldAnswer | None:
        """Return what becomes of an error; it depends on what was asked."""
        req_id = error.req_id
        told: OldAnswer | None = None
        match question:
            case MountRequest() | FeedRequest():
                told = self._mount_refused(req_id, error)
            case AppendRequest():
                # Where the partition has gone, its feed is refused as well, and ends the mount.
                if error.error_code == errors.ChecksumMismatch.code:
                    told = EndConnection(error.message)
            case FlushRequest():
                told = self._flush_refused(req_id, error)
            case HighWaterMarkRequest():
                told = self._mark_refused(error)
            case TransactionDataRequest():
                text = _NOT_HERE if error.error_code in _ELSEWHERE else error.message
                told = TransactionDataResponse(req_id, question.transaction_id, (None, text))
            case AddPreferredRequest():
                told = AddPreferredResponse(req_id, is_done=False)
            case RemovePreferredRequest():
                told = RemovePreferredResponse(req_id, is_done=False)
            case _:
                told = EndConnection(error.message)
        return told

    def _mount_refused(self, req_id: ReqId, error: ErrorResponse) -> OldAnswer | None:
        mount = self._mounts.get(req_id.partition_id)
        if mount is None or mount.req_id != req_id:
            return None  # rule 4
        if error.error_code in _ENDS_CONNECTION:
            return EndConnection(error.message)
        return self._mount_answered(req_id, MountState.NOT_READY)

    def _flush_refused(self, req_id: ReqId, error: ErrorResponse) -> OldAnswer | None:
        """Say nothing, as the original does; where the mount goes on, have it begin anew."""
        if error.error_code in (errors.NotOwned.code, errors.UnknownPartition.code):
            return None
        return self._mount_ended(req_id.partition_id)

    def _mark_refused(self, error: ErrorResponse) -> OldAnswer | None:
        """Say nothing, and let the client ask again on its next connection (rule 3)."""
        if self._ends_soon:
            return None
        self._ends_soon = True
        return EndConnection(error.message, MARK_WAIT_S)


def _data_not_found(message: TransactionDataResponse) -> TransactionDataResponse:
    req_id, wanted = message.req_id, message.transaction_id
    text = f"{_NOT_FOUND}partition={req_id.partition_id}transactionId={wanted}"
    return TransactionDataResponse(req_id, wanted, (None, text))
