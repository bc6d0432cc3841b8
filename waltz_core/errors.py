"""Every exception of the project, sorted by what the caller should do about it.

Errors cross the wire, so each class carries its wire code and whether a retry can help, and both
ends must agree on them. Nothing else in the project defines exceptions.

    WaltzError
      UsageError        you called it wrong; do not retry
        BadConfig (NoCluster), BadRequest, ClientAhead, TooLarge, UnknownPartition, NotOpen
      Unavailable       try again (retriable)
        NotMounted, NotOwned, Overloaded, SessionLost, NoSpace, Unreachable (TlsMismatch),
        CoordinatorUnavailable, OutcomeUnknown, CoordinatorOutcomeUnknown, ViewBehind
      Superseded        someone newer owns this; give up the handle
        SessionFenced, GenerationMismatch, LockFailed, ConnectionSuperseded, CoordinatorConflict
      Damaged           bytes are wrong; stop and tell a human
        ChecksumMismatch, BadFormat, MissingSegment, ClusterKeyMismatch, StorageIdMismatch,
        DataLoss, ReplicaSuspect, DiskFailed (ReadFailed)
      ProtocolError     somebody broke the rules of the wire
        LocalProtocolError (we did), RemoteProtocolError (the peer did)

Rules:
    1. A message says what was expected, what was found, and where.
    2. Codes are unique and never reused; 0 means "no error" and belongs to nobody.
    3. `retriable` is a property of the class, never of the moment.
"""

from typing import Any, ClassVar


class WaltzError(Exception):
    """The base of every error raised on purpose."""

    code: ClassVar[int] = 1
    retriable: ClassVar[bool] = False


class UsageError(WaltzError):
    """The caller asked for something that can never work."""

    code = 10


class BadConfig(UsageError):
    """A setting, option or argument is unknown, misspelt or out of bounds."""

    code = 11


class NoCluster(BadConfig):
    """ZooKeeper answers, and has no cluster at the root that was named."""

    code = 16


class BadRequest(UsageError):
    """A request is well-formed but makes no sense to its receiver."""

    code = 12


class ClientAhead(UsageError):
    """A client's high-water mark lies above the log's: wrong cluster, or a log that was lost."""

    code = 13


class TooLarge(UsageError):
    """A transaction or a message is over its size limit."""

    code = 14


class UnknownPartition(UsageError):
    """There is no such partition in this cluster."""

    code = 15


class NotOpen(UsageError, AttributeError):
    """A client was used before it was opened; it has nothing of a client yet, `hasattr` says so."""

    code = 17


class Unavailable(WaltzError):
    """Not now; the same call may work later."""

    code = 20
    retriable = True


class NotMounted(Unavailable):
    """The connection has not mounted the partition (or was replaced since)."""

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
    """A storage has no room for the append; reads go on."""

    code = 25


class Unreachable(Unavailable):
    """No connection to a peer could be made, or it broke, or it did not answer in time."""

    code = 26


class TlsMismatch(Unreachable):
    """Somebody is there, and the two do not speak TLS alike, or do not believe each other."""

    code = 30


class CoordinatorUnavailable(Unavailable):
    """ZooKeeper did not answer."""

    code = 27


class OutcomeUnknown(Unavailable):
    """The append may or may not be in the log; only the log itself can tell."""

    code = 28


class CoordinatorOutcomeUnknown(Unavailable):
    """A write to ZooKeeper may or may not have happened; only reading again can tell."""

    code = 29


class ViewBehind(Unavailable):
    """A context's time was over before its callbacks had applied what the log holds.

    `applied` and `high_water_mark` are where the callbacks and the log are, and `rate_per_s` is how
    many transactions a second were applied meanwhile. The context is not in the log.
    """

    code = 31
    applied: int | None = None
    high_water_mark: int | None = None
    rate_per_s: float | None = None


class Superseded(WaltzError):
    """Somebody newer has taken over."""

    code = 40


class SessionFenced(Superseded):
    """A storage has promised itself to a later store session: `promised`, where it is known."""

    code = 41

    def __init__(self, message: str, promised: int = -1) -> None:
        super().__init__(message)
        self.promised = promised


class GenerationMismatch(Superseded):
    """The partition has moved on to another generation."""

    code = 42


class LockFailed(Superseded):
    """A lock of the transaction was written above the client's high-water mark.

    Where they are known, `conflicting` is the transaction that it conflicts with (or a later one),
    and `high_water_mark` a mark of the log from which to compute the transaction again.
    `following` is for who asked for it: what the next `append` may follow (`client.Following`).
    """

    code = 43
    conflicting: int | None = None
    high_water_mark: int | None = None
    following: Any = None


class ConnectionSuperseded(Superseded):
    """A later connection of the same client, or of a partition's same owner, is in its place."""

    code = 44


class CoordinatorConflict(Superseded):
    """A node in ZooKeeper has changed (or appeared, or gone) since it was read."""

    code = 45


class Damaged(WaltzError):
    """Stored bytes are not what was written."""

    code = 60


class ChecksumMismatch(Damaged):
    """A checksum does not fit its bytes."""

    code = 61


class BadFormat(Damaged):
    """A file, a node or a structure cannot be decoded."""

    code = 62


class MissingSegment(Damaged):
    """The segments of a partition do not follow one another."""

    code = 63


class ClusterKeyMismatch(Damaged):
    """A storage directory, a peer, or an application's view belongs to another cluster."""

    code = 64


class StorageIdMismatch(Damaged):
    """Another storage answers at this address than the one that was registered."""

    code = 65


class DataLoss(Damaged):
    """The log is shorter than a mark that was handed out, or has changed below it."""

    code = 66


class ReplicaSuspect(Damaged):
    """A replica cannot vouch for its own log until it has been repaired."""

    code = 67


class DiskFailed(Damaged):
    """A write or an fsync failed; the file it was meant for is given up."""

    code = 68


class ReadFailed(DiskFailed):
    """The disk did not give bytes that were asked for; what is written is not touched by that."""

    code = 69


class ProtocolError(WaltzError):
    """The rules of the wire were broken."""

    code = 80


class LocalProtocolError(ProtocolError):
    """Our own side tried to send what the protocol does not allow."""

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
    """Rebuild an error that came over the wire; an unknown code gives the base class."""
    return BY_CODE.get(code, WaltzError)(message)
