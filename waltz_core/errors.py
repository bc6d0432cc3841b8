"""Every exception of the project, grouped by what the caller should do.

Errors cross the wire, so each class has a wire code and states whether a retry can help. No other
module defines exceptions.

    WaltzError
      UsageError        the call is wrong; do not retry
        BadConfig (NoCluster), BadRequest, ClientAhead, TooLarge, UnknownPartition, NotOpen
      Unavailable       try again (retriable)
        NotMounted, NotOwned, Overloaded, SessionLost, NoSpace, Unreachable (TlsMismatch),
        CoordinatorUnavailable, OutcomeUnknown, CoordinatorOutcomeUnknown, ViewBehind
      Superseded        a newer owner or writer exists; start again from current state
        SessionFenced, GenerationMismatch, LockFailed, ConnectionSuperseded, CoordinatorConflict
      Damaged           bytes are wrong; stop and notify an operator
        ChecksumMismatch, BadFormat, MissingSegment, ClusterKeyMismatch, StorageIdMismatch,
        DataLoss, ReplicaSuspect, DiskFailed (ReadFailed)
      ProtocolError     the wire protocol was broken
        LocalProtocolError (by this side), RemoteProtocolError (by the peer)

Rules:
    1. A message states what was expected, what was found, and where.
    2. Codes are unique and never reused; 0 means "no error".
    3. `retriable` is a property of the class, not of the situation.
"""

from typing import Any, ClassVar


class WaltzError(Exception):
    """The base of every error raised on purpose."""

    code: ClassVar[int] = 1
    retriable: ClassVar[bool] = False


class UsageError(WaltzError):
    """The call can never succeed."""

    code = 10


class BadConfig(UsageError):
    """A setting, option or argument is unknown, misspelled or out of bounds."""

    code = 11


class NoCluster(BadConfig):
    """ZooKeeper answers, and has no cluster at the given root."""

    code = 16


class BadRequest(UsageError):
    """A request is well-formed but not valid."""

    code = 12


class ClientAhead(UsageError):
    """A client's high-water mark is above the log's: wrong cluster, or a lost log."""

    code = 13


class TooLarge(UsageError):
    """A transaction or a message is over its size limit."""

    code = 14


class UnknownPartition(UsageError):
    """The cluster has no such partition."""

    code = 15


class NotOpen(UsageError, AttributeError):
    """A client was used before it was opened; `hasattr` is false for its attributes until then."""

    code = 17


class Unavailable(WaltzError):
    """The call failed now; the same call may succeed later."""

    code = 20
    retriable = True


class NotMounted(Unavailable):
    """The connection has not mounted the partition, or was replaced since."""

    code = 21


class NotOwned(Unavailable):
    """This server does not own the partition now."""

    code = 22


class Overloaded(Unavailable):
    """A queue or a memory budget is full."""

    code = 23


class SessionLost(Unavailable):
    """The store session broke before the append was committed; it is not in the log."""

    code = 24


class NoSpace(Unavailable):
    """A storage has no space for the append; reads continue."""

    code = 25


class Unreachable(Unavailable):
    """No connection to a peer, or it broke, or the peer did not answer in time."""

    code = 26


class TlsMismatch(Unreachable):
    """A TLS handshake failed: one side does not use TLS, or does not trust the other."""

    code = 30


class CoordinatorUnavailable(Unavailable):
    """ZooKeeper did not answer."""

    code = 27


class OutcomeUnknown(Unavailable):
    """The append may or may not be in the log; reading the log shows it."""

    code = 28


class CoordinatorOutcomeUnknown(Unavailable):
    """A write to ZooKeeper may or may not have happened; reading again shows it."""

    code = 29


class ViewBehind(Unavailable):
    """A context timed out before its callbacks had applied the log.

    `applied` and `high_water_mark` are the positions of the callbacks and the log, and `rate_per_s`
    is the number of transactions applied per second. The context is not in the log.
    """

    code = 31
    applied: int | None = None
    high_water_mark: int | None = None
    rate_per_s: float | None = None


class Superseded(WaltzError):
    """A newer owner, session or writer has taken over."""

    code = 40


class SessionFenced(Superseded):
    """A storage has promised a later store session: `promised`, if known."""

    code = 41

    def __init__(self, message: str, promised: int = -1) -> None:
        super().__init__(message)
        self.promised = promised


class GenerationMismatch(Superseded):
    """The partition has another generation."""

    code = 42


class LockFailed(Superseded):
    """A lock of the transaction was written above the client's high-water mark.

    If known, `conflicting` is the transaction that it conflicts with (or a later one), and
    `high_water_mark` a mark of the log from which to compute the transaction again. For appends
    that may depend on others, `following` is the state for the next `append` (`client.Following`).
    """

    code = 43
    conflicting: int | None = None
    high_water_mark: int | None = None
    following: Any = None


class ConnectionSuperseded(Superseded):
    """A later connection of the same client, or of the same partition owner, has replaced it."""

    code = 44


class CoordinatorConflict(Superseded):
    """A node in ZooKeeper was changed, created or deleted since it was read."""

    code = 45


class Damaged(WaltzError):
    """Stored bytes are not what was written."""

    code = 60


class ChecksumMismatch(Damaged):
    """A checksum does not match its bytes."""

    code = 61


class BadFormat(Damaged):
    """A file, a node or a structure cannot be decoded."""

    code = 62


class MissingSegment(Damaged):
    """The segments of a partition are not contiguous."""

    code = 63


class ClusterKeyMismatch(Damaged):
    """A storage directory, a peer, or an application's view belongs to another cluster."""

    code = 64


class StorageIdMismatch(Damaged):
    """The storage at this address is not the registered one."""

    code = 65


class DataLoss(Damaged):
    """The log is shorter than a reported mark, or has changed below it."""

    code = 66


class ReplicaSuspect(Damaged):
    """A replica's log is not trusted until it was repaired."""

    code = 67


class DiskFailed(Damaged):
    """A write or an fsync failed; its file is not used any more."""

    code = 68


class ReadFailed(DiskFailed):
    """The disk failed to read bytes; writes are not affected."""

    code = 69


class ProtocolError(WaltzError):
    """The wire protocol was broken."""

    code = 80


class LocalProtocolError(ProtocolError):
    """This side tried to send what the protocol does not allow."""

    code = 81


class RemoteProtocolError(ProtocolError):
    """The peer sent bytes that the protocol does not allow."""

    code = 82


def _family(root: type[WaltzError]) -> list[type[WaltzError]]:
    found = [root]
    for child in root.__subclasses__():
        found.extend(_family(child))
    return found


BY_CODE: dict[int, type[WaltzError]] = {cls.code: cls for cls in _family(WaltzError)}
assert len(BY_CODE) == len(_family(WaltzError)), "rule 2: two errors share a code"


def from_code(code: int, message: str) -> WaltzError:
    """Rebuild an error from the wire; an unknown code gives the base class."""
    return BY_CODE.get(code, WaltzError)(message)
