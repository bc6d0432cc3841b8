"""Every event and effect of a partition's stream (`partition_stream.py`).

The client's driver and the simulator speak to a stream in these words only.

Rules:
    1. `OpenLink` has one outcome with the same attempt number: `Linked` or `LinkFailed`.
    2. A link that was handed over is lost once, by `LinkLost`; what else comes from a link that
       is not the current one does no harm.
    3. A parcel that was taken in by `SendAppends` has one outcome: `ParcelSettled` or
       `ParcelRefused`.
    4. `ParcelRefused` with `OutcomeUnknown` leaves the parcel in doubt; with any other error, none
       of its rows is in the log nor ever will be.
"""

from collections.abc import Sequence
from enum import Enum, auto
from typing import TypeAlias

from waltz_core.client.stream.monitor import BatchOutcome, Parcel
from waltz_core.errors import WaltzError
from waltz_core.machine import Report, Wakeup
from waltz_core.records.record import Generation, TransactionId
from waltz_core.values import value
from waltz_core.wire.messages import Buffer, ClientMessage


class Phase(Enum):
    """Where the stream stands (the picture is in `partition_stream.py`)."""

    IDLE = auto()
    LINKING = auto()
    MOUNTING = auto()
    SETTLING = auto()
    READY = auto()
    WAITING = auto()
    STOPPED = auto()


@value(frozen=True, slots=True)
class StreamSettings:
    """The numbers a stream needs; times in ms."""

    request_timeout_ms: int  # from `SendAppends` to `OutcomeUnknown`, or to a definite no
    mount_timeout_ms: int
    retry_interval_ms_min: int
    retry_interval_ms_max: int
    range_bytes_max: int
    in_flight_bytes_max: int
    feed_ahead_max: int  # transactions fed but not applied, beyond which no more is asked for
    feed_lag_max: int = 20_000  # nearer to the end of the log than this, the server feeds


# ---------------------------------------------------------------------------------------------
# Events


@value(frozen=True, slots=True, eq=False)
class SendAppends:
    """Send a parcel, and tell what became of it."""

    parcel: Parcel


@value(frozen=True, slots=True)
class Mount:
    """Mount the partition even if there is nothing to send yet."""


@value(frozen=True, slots=True)
class Subscribe:
    """Bring the feed after this mark; None starts at the end of the log.

    With `header_values` only transactions with one of these headers are brought.
    """

    mark: TransactionId | None
    header_values: tuple[int, ...] = ()


@value(frozen=True, slots=True)
class Unsubscribe:
    """Bring no feed any more; a later `Subscribe` begins another one."""


@value(frozen=True, slots=True)
class Resume:
    """What `FeedLags` has asked for was fetched up to this mark: let the server feed the rest."""

    mark: TransactionId


@value(frozen=True, slots=True)
class Applied:
    """The application has taken the feed up to here; more may come."""

    mark: TransactionId


@value(frozen=True, slots=True)
class Linked:
    """A connection to the partition's owner stands.

    `link` numbers the connection; `connection_sequence` is higher than in every mount before.
    `may_follow`: the server knows authors who follow what is in flight.
    """

    attempt: int
    link: int
    generation: Generation
    connection_sequence: int
    may_follow: bool = False


@value(frozen=True, slots=True)
class LinkFailed:
    """There is no owner, or no connection to it."""

    attempt: int
    error: WaltzError


@value(frozen=True, slots=True)
class LinkLost:
    """A connection broke."""

    link: int
    reason: str


@value(frozen=True, slots=True)
class Moved:
    """The assignment has the partition at this generation now."""

    generation: Generation


@value(frozen=True, slots=True)
class MessageReceived:
    """A message came in."""

    link: int
    message: ClientMessage


@value(frozen=True, slots=True)
class Renewed:
    """A client id that nobody had before; it ends the wait of `NeedClientId`."""

    client_id: int


@value(frozen=True, slots=True)
class Close:
    """Give up everything that is not final."""


Event: TypeAlias = (
    SendAppends
    | Mount
    | Subscribe
    | Unsubscribe
    | Resume
    | Applied
    | Linked
    | LinkFailed
    | LinkLost
    | Moved
    | MessageReceived
    | Renewed
    | Close
    | Wakeup
)

# ---------------------------------------------------------------------------------------------
# Effects


@value(frozen=True, slots=True)
class OpenLink:
    """Find the partition's owner and connect to it, on another link than the `spoiled` ones."""

    attempt: int
    spoiled: tuple[int, ...]


@value(frozen=True, slots=True)
class Send:
    """Send a message on a link; if that is not possible the link is lost."""

    link: int
    message: ClientMessage


@value(frozen=True, slots=True)
class NeedClientId:
    """The sequence numbers of this client id are used up; answer with `Renewed`."""


@value(frozen=True, slots=True)
class Ready:
    """The partition is mounted, nothing older is in doubt, appends flow."""

    high_water_mark: TransactionId


@value(frozen=True, slots=True, eq=False)
class ParcelSettled:
    """The outcome of every row of a parcel."""

    token: int
    outcome: BatchOutcome


@value(frozen=True, slots=True)
class ParcelRefused:
    """A parcel without an outcome for its rows (rule 4)."""

    token: int
    error: WaltzError


@value(frozen=True, slots=True)
class Fed:
    """Committed transactions, dense and in order: 20 bytes each, request id and header.

    Of a filtered feed `picked` are those that have headers here; None: all of them.
    """

    first: TransactionId
    count: int
    headers: Buffer
    picked: Sequence[int] | None = None

    @property
    def ids(self) -> Sequence[int]:
        """Return the ids that have headers here."""
        everything = range(self.first, self.first + self.count)
        return everything if self.picked is None else self.picked

    @property
    def last(self) -> TransactionId:
        """Return the last transaction that is covered."""
        return TransactionId(self.first + self.count - 1)


@value(frozen=True, slots=True)
class FeedLags:
    """The feed after `fed` is too long to be sent; fetch it in ranges, then `Resume`.

    Comes once, until `Resume`. What is fetched is not told to the stream.
    """

    fed: TransactionId
    high_water_mark: TransactionId


@value(frozen=True, slots=True)
class MarkMoved:
    """The log is known to reach further than before."""

    high_water_mark: TransactionId


@value(frozen=True, slots=True)
class Stopped:
    """The stream has ended for good; whatever comes later is refused with this error."""

    error: WaltzError


Effect: TypeAlias = (
    OpenLink
    | Send
    | NeedClientId
    | Ready
    | ParcelSettled
    | ParcelRefused
    | Fed
    | FeedLags
    | MarkMoved
    | Stopped
    | Report
)
