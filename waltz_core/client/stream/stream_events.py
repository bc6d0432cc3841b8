"""The events and effects of a partition's stream (`partition_stream.py`).

The client's driver and the simulator communicate with a stream only through these events and
effects.

Rules:
    1. `OpenLink` has one outcome with the same attempt number: `LinkOpened` or `LinkFailed`.
    2. A link that was opened (`LinkOpened`) ends once, with `LinkLost`. Events of all links except
       the current one have no effect.
    3. A submission in `SendAppends` has one outcome: `SubmissionSettled` or `SubmissionRejected`.
    4. After `SubmissionRejected` with `OutcomeUnknown`, the rows of the submission may be in the
       log. With any other error, none of its rows is or will ever be in the log.
"""

from collections.abc import Sequence
from dataclasses import field
from enum import Enum, auto
from typing import TypeAlias

from waltz_core.access.client_ids import NO_PROOF
from waltz_core.client.stream.outcome_tracker import BatchOutcome, Submission
from waltz_core.errors import WaltzError
from waltz_core.machine import Report, Wakeup
from waltz_core.records.record import Generation, TransactionId
from waltz_core.values import value
from waltz_core.wire.messages import Buffer, ClientMessage


class Phase(Enum):
    """The phase of a stream (diagram in `partition_stream.py`)."""

    IDLE = auto()
    LINKING = auto()
    MOUNTING = auto()
    SETTLING = auto()
    READY = auto()
    WAITING = auto()
    STOPPED = auto()


@value(frozen=True, slots=True)
class StreamSettings:
    """The settings of a stream; times are in ms."""

    request_timeout_ms: int  # from `SendAppends` to an error: `OutcomeUnknown`, or "not sent"
    mount_timeout_ms: int
    retry_interval_ms_min: int
    retry_interval_ms_max: int
    range_bytes_max: int
    in_flight_bytes_max: int
    feed_ahead_max: int  # the limit of transactions that are fed but not applied
    feed_lag_max: int = 20_000  # the server sends the feed up to this lag


# ---------------------------------------------------------------------------------------------
# Events


@value(frozen=True, slots=True, eq=False)
class SendAppends:
    """Send a submission, and report its outcome."""

    submission: Submission


@value(frozen=True, slots=True)
class MountPartition:
    """Mount the partition even if there are no appends to send yet."""


@value(frozen=True, slots=True)
class Subscribe:
    """Start the feed after `mark`; None starts at the end of the log.

    With `header_values`, the feed has only transactions with one of these headers.
    """

    mark: TransactionId | None
    header_values: tuple[int, ...] = ()


@value(frozen=True, slots=True)
class Unsubscribe:
    """End the feed; a later `Subscribe` starts another one."""


@value(frozen=True, slots=True)
class ResumeFeed:
    """The range of `FeedLagging` was fetched up to `mark`: request the rest from the server."""

    mark: TransactionId


@value(frozen=True, slots=True)
class FeedApplied:
    """The application has applied the feed up to `mark`, so the stream may request more."""

    mark: TransactionId


@value(frozen=True, slots=True)
class LinkOpened:
    """A connection to the partition's owner is open.

    `link` is the number of the connection; `connection_sequence` is higher than in every earlier
    mount. With `supports_pipelining`, the server supports pipelined dependent appends. With
    `supports_own_ranges`, it supports ranges of a client's own headers.
    """

    attempt: int
    link: int
    generation: Generation
    connection_sequence: int
    supports_pipelining: bool = False
    supports_own_ranges: bool = False


@value(frozen=True, slots=True)
class LinkFailed:
    """The partition has no owner, or the driver could not connect to the owner."""

    attempt: int
    error: WaltzError


@value(frozen=True, slots=True)
class LinkLost:
    """A connection has ended."""

    link: int
    reason: str


@value(frozen=True, slots=True)
class GenerationChanged:
    """The partition has a new generation in the assignment."""

    generation: Generation


@value(frozen=True, slots=True)
class MessageReceived:
    """A message has arrived on a connection."""

    link: int
    message: ClientMessage


@value(frozen=True, slots=True)
class ClientIdRenewed:
    """A client ID and its proof: the answer to `RequestClientId`.

    While the stream has `needs_client_id` set, the driver also sends this event before
    `LinkOpened`.
    """

    client_id: int
    proof: bytes = field(default=NO_PROOF, repr=False)


@value(frozen=True, slots=True)
class CloseStream:
    """Abandon all appends that are not final."""


Event: TypeAlias = (
    SendAppends
    | MountPartition
    | Subscribe
    | Unsubscribe
    | ResumeFeed
    | FeedApplied
    | LinkOpened
    | LinkFailed
    | LinkLost
    | GenerationChanged
    | MessageReceived
    | ClientIdRenewed
    | CloseStream
    | Wakeup
)

# ---------------------------------------------------------------------------------------------
# Effects


@value(frozen=True, slots=True)
class OpenLink:
    """Find the partition's owner and connect to it, on a link that is not in `avoided_links`."""

    attempt: int
    avoided_links: tuple[int, ...]


@value(frozen=True, slots=True)
class SendOnLink:
    """Send a message on a link; if sending fails, the link is lost."""

    link: int
    message: ClientMessage


@value(frozen=True, slots=True)
class RequestClientId:
    """The sequence numbers of this client ID are used up: post `ClientIdRenewed`."""


@value(frozen=True, slots=True)
class StreamReady:
    """The partition is mounted, no older append is in doubt, and appends can be sent."""

    high_water_mark: TransactionId


@value(frozen=True, slots=True, eq=False)
class SubmissionSettled:
    """The outcomes of all rows of a submission."""

    token: int
    outcome: BatchOutcome


@value(frozen=True, slots=True)
class SubmissionRejected:
    """A submission ended with an error, without outcomes for its rows (rule 4)."""

    token: int
    error: WaltzError


@value(frozen=True, slots=True)
class FeedAdvanced:
    """Committed transactions of the feed, in order, without gaps.

    `headers` has 20 bytes for each transaction: request ID and header. In a filtered feed, `picked`
    are the IDs that have headers; None: all of them.
    """

    first: TransactionId
    count: int
    headers: Buffer
    picked: Sequence[int] | None = None

    @property
    def ids(self) -> Sequence[int]:
        """The IDs of the transactions that have headers."""
        everything = range(self.first, self.first + self.count)
        return everything if self.picked is None else self.picked

    @property
    def last(self) -> TransactionId:
        """The last transaction of the range, with or without a header."""
        return TransactionId(self.first + self.count - 1)


@value(frozen=True, slots=True)
class FeedLagging:
    """The feed after `feed_mark` is too long to be sent.

    The driver fetches it in ranges, and then posts `ResumeFeed`.

    The effect is not repeated before `ResumeFeed`. The driver passes the fetched transactions to
    the application, not to the stream.
    """

    feed_mark: TransactionId
    high_water_mark: TransactionId


@value(frozen=True, slots=True)
class MarkAdvanced:
    """The known high-water mark of the log has advanced."""

    high_water_mark: TransactionId


@value(frozen=True, slots=True)
class StreamStopped:
    """The stream has ended and will not restart; later submissions fail with this error."""

    error: WaltzError


Effect: TypeAlias = (
    OpenLink
    | SendOnLink
    | RequestClientId
    | StreamReady
    | SubmissionSettled
    | SubmissionRejected
    | FeedAdvanced
    | FeedLagging
    | MarkAdvanced
    | StreamStopped
    | Report
)
