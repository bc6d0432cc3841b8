"""What a storage's machine wants done: the effects of `service.py`, and nothing else.

The daemon and the simulator carry them out, each in its own way, and both read here what each of
them means.
"""

from typing import TypeAlias

from waltz_core.errors import WaltzError
from waltz_core.machine import Report
from waltz_core.storage.files.room import Room
from waltz_core.storage.log.partition_log import PartitionLog
from waltz_core.storage.service.work import ConnectionId, Work
from waltz_core.values import value
from waltz_core.wire.messages import StorageMessage


@value(frozen=True, slots=True)
class StorageAnswer:
    """Send a message on a connection; nothing happens when the connection is gone."""

    connection: ConnectionId
    message: StorageMessage


@value(frozen=True, slots=True)
class CloseConnection:
    """Send what was answered so far, then close."""

    connection: ConnectionId
    reason: str


@value(frozen=True, slots=True)
class PauseReading:
    """Take nothing more from a connection (rule 7)."""

    connection: ConnectionId


@value(frozen=True, slots=True)
class ResumeReading:
    """Read a connection again."""

    connection: ConnectionId


@value(frozen=True, slots=True)
class RunWork:
    """Call `work.run()` and bring the result back; there is one at a time for a partition."""

    work: Work


@value(frozen=True, slots=True)
class Idle:
    """A dropped partition has no work under way any more: its log may be closed."""

    log: PartitionLog


@value(frozen=True, slots=True)
class DropPartition:
    """The files of a partition were deleted or replaced: drop it, and do not open it again."""

    log: PartitionLog
    why: WaltzError


@value(frozen=True, slots=True)
class LookForRoom:
    """Call `room.look_again()`, which blocks, and bring `LookedForRoom` back (rule 9)."""

    room: Room


@value(frozen=True, slots=True)
class EndProcess:
    """The disk cannot be trusted any more (rule 6)."""

    reason: str


Effect: TypeAlias = (
    StorageAnswer
    | CloseConnection
    | PauseReading
    | ResumeReading
    | RunWork
    | Idle
    | DropPartition
    | LookForRoom
    | EndProcess
    | Report
)
