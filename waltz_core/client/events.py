"""Every event and effect of a partition's stream (`stream.py`).

Why it stands alone: the client's driver and the simulator speak to a stream in these words only.

Rules:
    1. `OpenLink` has one outcome with the same attempt number: `Linked` or `LinkFailed`.
    2. A link that was handed over is lost once, by `LinkLost`; what else comes from a link that
       is not the current one does no harm.
    3. A parcel that was taken in by `Append` has one outcome: `Settled` or `Refused`.
    4. `Refused` with `OutcomeUnknown` leaves the parcel in doubt; with any other error, none of its
       rows is in the log nor ever will be.
"""

from dataclasses import dataclass
from typing import TypeAlias

from waltz_core.client.monitor import BatchOutcome, Parcel
from waltz_core.errors import WaltzError
from waltz_core.machine import Report, Wakeup
from waltz_core.record import Generation, TransactionId
from waltz_core.wire.messages import Buffer, ClientMessage

# ---------------------------------------------------------------------------------------------
# Events


@dataclass(frozen=True, slots=True, eq=False)
class Append:
    """Send a parcel, and tell what became of it."""

    parcel: Parcel


@dataclass(frozen=True, slots=True)
class Mount:
    """Mount the partition even if there is nothing to send yet."""


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Bring the feed after this mark; None starts at the end of the log."""

    mark: TransactionId | None


@dataclass(frozen=True, slots=True)
class Applied:
    """The application has taken the feed up to here; more may come."""

    mark: TransactionId


@dataclass(frozen=True, slots=True)
class Linked:
    """A connection to the partition's owner stands.

    `link` numbers the connection; `connection_sequence` is higher than in every mount before.
    """

    attempt: int
    link: int
    generation: Generation
    connection_sequence: int


@dataclass(frozen=True, slots=True)
class LinkFailed:
    """There is no owner, or no connection to it."""

    attempt: int
    error: WaltzError


@dataclass(frozen=True, slots=True)
class LinkLost:
    """A connection broke."""

    link: int
    reason: str


@dataclass(frozen=True, slots=True)
class Moved:
    """The assignment has the partition at this generation now."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Received:
    """A message came in."""

    link: int
    message: ClientMessage


@dataclass(frozen=True, slots=True)
class Renewed:
    """A client id that nobody had before; it ends the wait of `NeedClientId`."""

    client_id: int


@dataclass(frozen=True, slots=True)
class Close:
    """Give up everything that is not final."""


Event: TypeAlias = (
    Append
    | Mount
    | Subscribe
    | Applied
    | Linked
    | LinkFailed
    | LinkLost
    | Moved
    | Received
    | Renewed
    | Close
    | Wakeup
)

# ---------------------------------------------------------------------------------------------
# Effects


@dataclass(frozen=True, slots=True)
class OpenLink:
    """Find the partition's owner and connect to it."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message on a link; if that is not possible the link is lost."""

    link: int
    message: ClientMessage


@dataclass(frozen=True, slots=True)
class NeedClientId:
    """The sequence numbers of this client id are used up; answer with `Renewed`."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The partition is mounted, nothing older is in doubt, appends flow."""

    high_water_mark: TransactionId


@dataclass(frozen=True, slots=True, eq=False)
class Settled:
    """The outcome of every row of a parcel."""

    token: int
    outcome: BatchOutcome


@dataclass(frozen=True, slots=True)
class Refused:
    """A parcel without an outcome for its rows (rule 4)."""

    token: int
    error: WaltzError


@dataclass(frozen=True, slots=True)
class Fed:
    """Committed transactions, dense and in order: 20 bytes each, request id and header."""

    first: TransactionId
    count: int
    headers: Buffer


@dataclass(frozen=True, slots=True)
class MarkMoved:
    """The log is known to reach further than before."""

    high_water_mark: TransactionId


@dataclass(frozen=True, slots=True)
class Stopped:
    """The stream has ended for good; whatever comes later is refused with this error."""

    error: WaltzError


Effect: TypeAlias = (
    OpenLink | Send | NeedClientId | Ready | Settled | Refused | Fed | MarkMoved | Stopped | Report
)
