"""All errors of the project, grouped by the action that the caller should take.

Processes send errors to each other. So each class has a wire code, and states whether a retry can
succeed. No other module defines exceptions.

    WaltzError
      UsageError        the call is wrong; do not retry
        BadConfig (ClusterNotFound),
        BadRequest (RequestRejected (IdempotencyKeyReused, UnsupportedMediaType)), ClientAheadOfLog,
        TooLarge, UnknownPartition, ClientNotOpen, BeforeLogStart,
        PermissionDenied (ClientIdDenied)
      Unavailable       try again (retriable)
        NotMounted, NotOwned, Overloaded, SessionLost, NoSpace, Unreachable (TlsFailed,
        AuthenticationFailed), CoordinatorUnavailable, OutcomeUnknown, CoordinatorOutcomeUnknown,
        ViewBehind, ArchiveUnavailable, PermissionsNotLoaded
      Superseded        a newer owner or writer exists; start again from current state
        SessionFenced, GenerationMismatch, LockFailed, ConnectionSuperseded, CoordinatorConflict
      Damaged           bytes are wrong; stop and notify an operator
        ChecksumMismatch, BadFormat, MissingSegment, ClusterKeyMismatch, StorageIdMismatch,
        DataLoss, ReplicaSuspect, DiskFailed (ReadFailed), ObjectMissing
      ProtocolError     the wire protocol was broken
        LocalProtocolError (by this side), RemoteProtocolError (by the peer)

Rules:
    1. A message states what was expected, what was found, and where.
    2. Codes are unique and never reused; 0 means "no error".
    3. `retriable` is a property of the class, not of the situation.
    4. The docstring of a class describes the error, and under "Action:" the action of the caller or
       of an operator. docs/reference/errors.md shows both.
"""

import json
from typing import Any, ClassVar, Final

FOUND_TEXT_CHARACTERS_MAX: Final = 200


class WaltzError(Exception):
    """The base class of all errors of Waltz.

    Action: Catch it only where all errors are handled alike.
    """

    code: ClassVar[int] = 1
    retriable: ClassVar[bool] = False


class UsageError(WaltzError):
    """The call can never succeed.

    Action: Correct the call; do not repeat it.
    """

    code = 10


class BadConfig(UsageError):
    """A setting, option or argument is unknown, misspelled or out of bounds.

    Action: Correct the value that the message names.
    """

    code = 11


class ClusterNotFound(BadConfig):
    """ZooKeeper answers, but there is no cluster at the given root.

    Action: Check the root in the connect string; `waltz-core cluster list` shows the clusters.
    """

    code = 16


class BadRequest(UsageError):
    """A server, a storage or the client rejects a request, because its content is not valid.

    Action: Correct the request as the message states.
    """

    code = 12


class RequestRejected(BadRequest):
    """The gateway rejects an HTTP request: a part is missing, unknown or not valid.

    `part` names this part; `expected`, `found` and `hint` describe it.

    Action: Correct the part that the message names.
    """

    code = 51

    def __init__(
        self, part: str, *, expected: str = "", found: object = None, hint: str = ""
    ) -> None:
        shown = _shortened_json(found)
        super().__init__(f"{part}: expected {expected}, found {shown}" if expected else part)
        self.part = part
        self.expected = expected
        self.hint = hint
        is_short = isinstance(found, bool | int | float) or (
            isinstance(found, str) and len(found) <= FOUND_TEXT_CHARACTERS_MAX
        )
        self.found = found if found is None or is_short else shown


def _shortened_json(found: object) -> str:
    """Return the JSON text of a value from a peer; a long text ends with "..."."""
    if found is None or isinstance(found, dict):
        return "nothing" if found is None else "an object"
    text = ""
    for part in json.JSONEncoder(ensure_ascii=False).iterencode(found):
        text += part[: FOUND_TEXT_CHARACTERS_MAX + 1]
        if len(text) > FOUND_TEXT_CHARACTERS_MAX:
            return text[:FOUND_TEXT_CHARACTERS_MAX] + "..."
    return text


class IdempotencyKeyReused(RequestRejected):
    """An idempotency key was used for a request with other transactions.

    Action: Use a new key for each request.
    """

    code = 52


class UnsupportedMediaType(RequestRejected):
    """The body of an HTTP request is not JSON, or is compressed.

    Action: Send JSON with the header `Content-Type: application/json`, without an encoding.
    """

    code = 53


class ClientAheadOfLog(UsageError):
    """A client's high-water mark is above the last transaction of the log.

    The client is connected to another cluster, or the log has lost data.

    Action: Check the connect string. If the log was created again, also delete the view (the state
    that the application has computed from the log), and build it again.
    """

    code = 13


class TooLarge(UsageError):
    """A transaction or a message is over its size limit.

    Action: Make the transaction or the batch smaller.
    """

    code = 14


class UnknownPartition(UsageError):
    """The cluster has no such partition.

    Action: Use a partition number below the cluster's partition count.
    """

    code = 15


class ClientNotOpen(UsageError, AttributeError):
    """A client was used before it was opened.

    Until then, the client has no attributes, so `hasattr` returns False for them.

    Action: Use the client inside its `with` or `async with` block.
    """

    code = 17


class BeforeLogStart(UsageError):
    """The log begins after the requested transaction.

    `first_available`, if known, is the ID of the first transaction in the log.

    Action: Read from the first available ID on.
    """

    code = 18

    def __init__(self, message: str, first_available: int = -1) -> None:
        super().__init__(message)
        self.first_available = first_available


class PermissionDenied(UsageError):
    """The principal of the connection does not have a permission that the request requires.

    Action: Use other credentials, or let an administrator run `waltz-core access grant`.
    """

    code = 19


class ClientIdDenied(PermissionDenied):
    """The client ID of a mount does not belong to the principal of the connection.

    Action: Open a client without `client_id`; it requests another ID from a server.
    """

    code = 50


class Unavailable(WaltzError):
    """The call failed now; the same call may succeed later.

    Action: Repeat the call after a pause.
    """

    code = 20
    retriable = True


class NotMounted(Unavailable):
    """The connection has not mounted the partition, or a later mount has replaced its mount.

    Action: Repeat the call; the client mounts the partition again.
    """

    code = 21


class NotOwned(Unavailable):
    """This server does not own the partition now.

    Action: Repeat the call; the client finds the new owner.
    """

    code = 22


class Overloaded(Unavailable):
    """A queue or a memory budget is full, or the principal is over one of its limits.

    `retry_after_ms` is the time after which the server expects to accept the request; 0 if unknown.

    Action: Repeat the call after a pause, and append less at once. If the message names a limit of
    the principal, an administrator can raise it with `waltz-core access limit`.
    """

    code = 23

    def __init__(self, message: str, retry_after_ms: int = 0) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class SessionLost(Unavailable):
    """The store session ended before the append was committed; the append is not in the log.

    Action: Repeat the append.
    """

    code = 24


class NoSpace(Unavailable):
    """A storage has no space for the append; reads continue.

    Action: Free space on the storage's disk, then repeat the append.
    """

    code = 25


class Unreachable(Unavailable):
    """A connection to a peer could not be opened or has ended, or the peer did not answer in time.

    Action: Repeat the call; if it fails again, check the peer and the network.
    """

    code = 26


class TlsFailed(Unreachable):
    """A TLS handshake failed: one side does not use TLS, or does not trust the other side.

    Action: Compare the TLS settings of both sides (docs/operations.md).
    """

    code = 30


class AuthenticationFailed(Unreachable):
    """The peer rejects the token of this process, or the process cannot read its token.

    Action: Check the token in the token file: it must belong to this cluster, and be neither
    revoked nor expired.
    """

    code = 33


class CoordinatorUnavailable(Unavailable):
    """ZooKeeper did not answer.

    Action: Repeat the call; if it fails again, check ZooKeeper.
    """

    code = 27


class OutcomeUnknown(Unavailable):
    """It is unknown whether the append is in the log; a read of the log shows this.

    Action: Read the log before you append the same data again.
    """

    code = 28


class CoordinatorOutcomeUnknown(Unavailable):
    """It is unknown whether a write to ZooKeeper has happened; a new read shows this.

    Action: Read the state again before you repeat the change.
    """

    code = 29


class ViewBehind(Unavailable):
    """A context timed out before the callbacks of the application had applied the log.

    A context is code that computes a transaction; this transaction is not in the log. `applied` and
    `high_water_mark` are the positions of the callbacks and the log, and `rate_per_s` is the number
    of transactions that the callbacks apply per second.

    Action: Repeat the context when the view has caught up, or make its callbacks faster.
    """

    code = 31
    applied: int | None = None
    high_water_mark: int | None = None
    rate_per_s: float | None = None


class ArchiveUnavailable(Unavailable):
    """The object store of the archive did not answer a request, or rejected it.

    Action: Repeat the call; if it fails again, check the store, its credentials and the network.
    """

    code = 32


class PermissionsNotLoaded(Unavailable):
    """The process has not read the permissions of the cluster yet.

    Action: Repeat the call after a pause. If the call fails again, check the connection of the
    process to ZooKeeper, and run `waltz-core access list`.
    """

    code = 34


class Superseded(WaltzError):
    """A newer owner, session or writer has taken over.

    Action: Start again from the current state.
    """

    code = 40


class SessionFenced(Superseded):
    """A storage rejects a store session: it has promised a later session to another server.

    `promised`, if known, is the number of the later session.

    Action: None: the server opens a later session itself.
    """

    code = 41

    def __init__(self, message: str, promised: int = -1) -> None:
        super().__init__(message)
        self.promised = promised


class GenerationMismatch(Superseded):
    """The generation in the request is not the generation of the partition at this server.

    The generation rises whenever the partition moves to another server.

    Action: Find the owner again; the client does this itself.
    """

    code = 42


class LockFailed(Superseded):
    """Another transaction has written one of the append's locks after the client's high-water mark.

    `conflicting` is the ID of the transaction that has written the lock, or a later ID.
    `high_water_mark` is a mark that includes this transaction. Each of these two attributes is None
    if the server does not know its value. After an `append` with the argument `pipelined`,
    `pipelined_state` is the value of this argument for the next `append`.

    Action: Apply the log up to `high_water_mark`, compute the transaction again, and append the
    new transaction.
    """

    code = 43
    conflicting: int | None = None
    high_water_mark: int | None = None
    pipelined_state: Any = None


class ConnectionSuperseded(Superseded):
    """A later connection of the same client, or of the same owner, has replaced this connection.

    Action: Stop this client, writer or task; a later one has taken over.
    """

    code = 44


class CoordinatorConflict(Superseded):
    """Another process has changed, created or deleted a znode since it was read.

    Action: Read the state again before you decide on the change; a repeated command does this.
    """

    code = 45


class Damaged(WaltzError):
    """Stored bytes differ from the bytes that were written.

    Action: Stop, and notify an operator.
    """

    code = 60


class ChecksumMismatch(Damaged):
    """A checksum does not match its bytes.

    Action: On a storage, run `waltz-core disk verify`; replicas repair each other.
    """

    code = 61


class BadFormat(Damaged):
    """A file, a znode or a structure cannot be decoded.

    Action: Check whether the file or znode was changed by another program or version.
    """

    code = 62


class MissingSegment(Damaged):
    """The segments of a partition are not contiguous.

    Action: Restore the segment file, or copy the replica: `waltz-core storage re-seed`.
    """

    code = 63


class ClusterKeyMismatch(Damaged):
    """A storage directory, a peer, or an application's view belongs to another cluster.

    Action: Check the connect string and the directory; do not mix clusters.
    """

    code = 64


class StorageIdMismatch(Damaged):
    """The storage at this address is not the registered one.

    Action: Use `waltz-core cluster replace-storage` if the storage was replaced.
    """

    code = 65


class DataLoss(Damaged):
    """The log ends before a mark that was reported earlier, or has changed before this mark.

    Action: Check the connect string. Restore the lost storages before you change anything else.
    """

    code = 66


class ReplicaSuspect(Damaged):
    """A replica has lost data, or may have lost data. Its log is not trusted until it is repaired.

    Action: Wait for the repair; `waltz-core doctor` shows what prevents it.
    """

    code = 67


class DiskFailed(Damaged):
    """A write or an fsync of a file failed; the storage does not use the file any more.

    Action: Check the disk, then restart the storage (docs/disks.md).
    """

    code = 68


class ReadFailed(DiskFailed):
    """The disk failed to read bytes; writes are not affected.

    Action: Check the disk; readers use other replicas meanwhile (docs/disks.md).
    """

    code = 69


class ObjectMissing(Damaged):
    """A file that a manifest of the archive lists does not exist.

    Action: Restore the file from a copy or an earlier version in the object store.
    """

    code = 70


# A file of the archive is missing or corrupt.
ARCHIVE_DAMAGE_ERRORS: Final = (ObjectMissing, BadFormat, ChecksumMismatch)


class ProtocolError(WaltzError):
    """The wire protocol was broken.

    Action: Check that both sides are supported versions of Waltz.
    """

    code = 80


class LocalProtocolError(ProtocolError):
    """This side tried to send a message that the protocol does not allow.

    Action: Report it as a bug.
    """

    code = 81


class RemoteProtocolError(ProtocolError):
    """The peer sent bytes that the protocol does not allow.

    Action: Check which program and which version the peer is.
    """

    code = 82


def _with_subclasses(error_class: type[WaltzError]) -> list[type[WaltzError]]:
    """Return an error class and all classes derived from it."""
    classes = [error_class]
    for child in error_class.__subclasses__():
        classes.extend(_with_subclasses(child))
    return classes


ERROR_CLASSES_BY_CODE: dict[int, type[WaltzError]] = {
    cls.code: cls for cls in _with_subclasses(WaltzError)
}
assert len(ERROR_CLASSES_BY_CODE) == len(_with_subclasses(WaltzError)), (
    "rule 2: two errors share a code"
)


def first_error_in(group: BaseExceptionGroup[WaltzError]) -> WaltzError:
    """Return the first error in an exception group, which may contain other groups."""
    error = group.exceptions[0]
    return error if isinstance(error, WaltzError) else first_error_in(error)


def error_from_code(
    code: int, message: str, first_available: int = -1, retry_after_ms: int = 0
) -> WaltzError:
    """Return the error for a code from the wire; for an unknown code, a `WaltzError`.

    `first_available` is for `BeforeLogStart`, and `retry_after_ms` is for `Overloaded`.
    """
    if code == BeforeLogStart.code:
        return BeforeLogStart(message, first_available)
    if code == Overloaded.code:
        return Overloaded(message, retry_after_ms)
    return ERROR_CLASSES_BY_CODE.get(code, WaltzError)(message)
