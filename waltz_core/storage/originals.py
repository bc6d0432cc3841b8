"""What a storage says to an original's server, and when it lets one in: the rules of S 0.

Why it stands alone: S 0 has other rules of who may ask than S 1 has, and says no in other words.
The lanes, their order and what is durable when are the same (`service.py`).

Rules (interop.md 3.1 and 3.3, correctness.md "Room for our rules"):
    1. A request with a higher session raises the partition's, whoever sends it and whatever it is.
       It is promised before it is answered (`replica_log.py`).
    2. A request of the session that is promised is served, on whatever connection it comes. One of
       a lower session is refused, and so is one of a session that an owner of ours has.
    3. One connection serves all partitions of a server, so it is not closed when one of them gets
       another owner. Whatever was queued in the older session is refused.
    4. Reads and writes of a partition are answered in the order in which they were asked.
    5. What is refused is told as the text of a Java exception; the stack is empty, it is nobody's
       business.
    6. Offline recovery, which is the original's own tool, is for partitions that are not online. It
       is not served here: what mends a replica is `waltz-core storage` and `waltz-core cluster`.
"""

from typing import Final

from waltz_core.errors import (
    BadRequest,
    ClusterKeyMismatch,
    SessionFenced,
    UnknownPartition,
    WaltzError,
)
from waltz_core.record import PartitionId, SessionId
from waltz_core.storage.format import NO_NONCE
from waltz_core.storage.lane import SESSION_JUMP_MAX, Lane
from waltz_core.wire.messages import OpenRequest, StorageMessage
from waltz_core.wire.original_messages import (
    AppendRecordsRequest,
    FailureResponse,
    LastSessionInfoRequest,
    MaxTransactionIdRequest,
    SetLowWaterMarkRequest,
    TruncateRequest,
)

_PACKAGE: Final = "com.wepay.waltz.storage.exception"
_TEXT_CHARACTERS_MAX: Final = 1_000


def check_cluster(message: OpenRequest, cluster_key: bytes, partition_count: int) -> None:
    """Raise ClusterKeyMismatch, in the original's words, for another cluster."""
    if message.cluster_key != cluster_key:
        raise ClusterKeyMismatch("Provided cluster key is inconsistent with key in control file.")
    if message.partition_count != partition_count:
        raise ClusterKeyMismatch(
            "Provided number of partitions is inconsistent with the total number of partitions in "
            "control file."
        )


def check_session(lane: Lane, message: StorageMessage) -> bool:
    """Tell whether a request raises its partition's session (rule 1).

    Raises:
        SessionFenced: rule 2.
        BadRequest: it is one of offline recovery, or its session is far above all others.
    """
    if is_offline(message):
        raise BadRequest("cannot run offline recovery while partition is online")
    session = message.session_id
    if session > lane.promised + SESSION_JUMP_MAX:
        raise BadRequest(f"session {session}: expected one soon after {lane.promised}")
    if session < lane.promised or (session == lane.promised and lane.nonce != NO_NONCE):
        raise SessionFenced(str(session), lane.promised)
    return session > lane.promised


def is_offline(message: StorageMessage) -> bool:
    """Tell whether it is a request of the original's offline recovery."""
    match message:
        case (
            LastSessionInfoRequest()
            | MaxTransactionIdRequest()
            | SetLowWaterMarkRequest()
            | TruncateRequest()
            | AppendRecordsRequest()
        ):
            return message.is_offline
        case _:
            return False


def not_served(message: StorageMessage, *, is_held: bool) -> WaltzError:
    """Return why a partition is not served: it is offline, or not assigned at all."""
    partition_id = message.partition_id
    if not is_held:
        return UnknownPartition(f"partition {partition_id} is not assigned to this storage")
    if is_offline(message):
        return BadRequest("offline recovery is not served here, see waltz-core storage")
    return BadRequest(
        f"read and write for partition={partition_id} have been disabled on storage node"
    )


def failure(message: StorageMessage, error: WaltzError, promised: SessionId) -> FailureResponse:
    """Return the answer to a request that is refused (rule 5)."""
    text = str(error)[:_TEXT_CHARACTERS_MAX]
    if isinstance(error, SessionFenced):
        said = (
            f"{_PACKAGE}.ConcurrentUpdateException: session id has changed to {promised}, "
            f"but request context contains {message.session_id}"
        )
    elif isinstance(error, UnknownPartition):
        said = f"java.lang.Exception: Partition:{message.partition_id} is not assigned."
    else:
        said = f"{_PACKAGE}.StorageException: {text}"
    prefix = (message.session_id, message.sequence, message.partition_id)
    if isinstance(message, OpenRequest):
        prefix = (-1, -1, PartitionId(-1))
    return FailureResponse(*prefix, said, ())
