"""One partition as a client sees it: mount it, append, take in the feed, mount it again.

Why it stands alone: what a client may believe after a connection has broken is a protocol of its
own, with the server's half in `server/partition.py`. As a machine it is run by the client's driver
and, unchanged, by the simulator.

    IDLE -> LINKING -> MOUNTING -> SETTLING -> READY        STOPPED ends all of it
               ^           |           |         |
               +-- WAITING (back-off) <+---------+

Invariants:
    1. Nothing is appended but in READY: after a mount whose answer has proven everything older
       final, and after what was in doubt has been settled by reading the log back.
    2. Generations of mounts never decrease: a server that has lost the partition, and may not know
       it, cannot vouch for what a later owner does.
    3. A mount whose mark lies below one that is known is not believed.
    4. Connection sequences of mounts increase, so that the newest mount fences all others.
    5. Sequence numbers of appended rows are never used twice, whatever became of the rows.
    6. The feed is dense: the next transaction taken in is the one after the last.
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, assert_never

from waltz_core import errors
from waltz_core.client.cursor import FeedCursor
from waltz_core.client.events import (
    Append,
    Applied,
    Close,
    Effect,
    Event,
    Fed,
    Linked,
    LinkFailed,
    LinkLost,
    MarkMoved,
    Mount,
    Moved,
    NeedClientId,
    OpenLink,
    Ready,
    Received,
    Refused,
    Renewed,
    Send,
    Settled,
    Stopped,
    Subscribe,
)
from waltz_core.client.monitor import BatchOutcome, Monitor, Parcel, Pending, Single
from waltz_core.client.outbox import Limits, Outbox
from waltz_core.machine import Report, Wakeup
from waltz_core.record import BEFORE_FIRST, ClientId, Generation, PartitionId, ReqId, TransactionId
from waltz_core.wire import messages
from waltz_core.wire.messages import LATEST_MARK, ClientMessage, RangeForm, Reason

if TYPE_CHECKING:
    from random import Random

SEQUENCE_MAX = (1 << 31) - 1
# Requests that are no appends have negative sequence numbers, so that none is taken for a row.
# The client's other requests (`connections.py`) use those below.
CONTROL_SEQUENCE_MIN = -(1 << 30)

# What a refusal of a whole append says about its rows; any other error leaves them in doubt.
_REASONS: dict[int, Reason] = {
    errors.LockFailed.code: Reason.LOCK,
    errors.SessionLost.code: Reason.LOST,
    errors.ClientAhead.code: Reason.AHEAD,
    errors.NotMounted.code: Reason.NOT_MOUNTED,
    errors.NotOwned.code: Reason.NOT_MOUNTED,
    errors.GenerationMismatch.code: Reason.GENERATION,
    errors.NoSpace.code: Reason.NO_SPACE,
    errors.TooLarge.code: Reason.TOO_LARGE,
    errors.Overloaded.code: Reason.OVERLOADED,
}
# After these the partition has to be mounted again before anything else is sent.
_REMOUNT = (Reason.NOT_MOUNTED, Reason.GENERATION)


class Phase(Enum):
    """Where the stream stands (see the picture above)."""

    IDLE = auto()
    LINKING = auto()
    MOUNTING = auto()
    SETTLING = auto()
    READY = auto()
    WAITING = auto()
    STOPPED = auto()


_LINKED = (Phase.MOUNTING, Phase.SETTLING, Phase.READY)


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """The numbers a stream needs; times in ms."""

    request_timeout_ms: int  # from `Append` to `OutcomeUnknown`, or to a definite no
    mount_timeout_ms: int
    retry_interval_ms_min: int
    retry_interval_ms_max: int
    range_bytes_max: int
    in_flight_bytes_max: int
    feed_ahead_max: int  # transactions fed but not applied, beyond which no more is asked for


class PartitionStream:
    """The machine; see the module's docstring."""

    def __init__(
        self,
        client_id: int,
        partition_id: PartitionId,
        settings: StreamSettings,
        random: "Random",
    ) -> None:
        self._client_id = client_id
        self._partition_id = partition_id
        self._settings = settings
        self._random = random
        self._monitor = Monitor(client_id, partition_id)
        self._outbox = Outbox(partition_id)
        self._next_sequence = 1
        self._next_control = -1
        self.phase = Phase.IDLE
        self._attempt = 0
        self._failures = 0
        self._trouble = "not connected yet"
        self._wants_mount = False
        self._retry_at_ms = 0
        self._phase_deadline_ms = 0
        self._ready_since_ms = 0
        self._link = -1
        self._mount = 0
        self._mount_id: ReqId | None = None
        self._generation = Generation(-1)
        self._connection_sequence = -1
        self._limits = Limits(1, 1, 1)
        self._reading: messages.RangeRequest | None = None
        self._renewing = False
        self._stopped: errors.WaltzError | None = None
        # The greatest mark of the log that this client has heard of.
        self.high_water_mark = BEFORE_FIRST
        self._cursor = FeedCursor(settings.feed_ahead_max)

    # --- what the driver may look at

    @property
    def client_id(self) -> int:
        """The client id of what is sent from now on."""
        return self._client_id

    @property
    def generation(self) -> Generation:
        """The generation of the last mount, -1 before the first."""
        return self._generation

    @property
    def trouble(self) -> str:
        """Why it was not mounted when it last was not."""
        return self._trouble

    @property
    def is_fed(self) -> bool:
        """Whether a feed was asked for."""
        return self._cursor.is_wanted

    @property
    def limits(self) -> Limits:
        """What the server takes in one frame and in flight; next to nothing before a mount."""
        return self._limits

    @property
    def has_pending(self) -> bool:
        """Whether anything waits to be sent or to become final."""
        return len(self._outbox) > 0 or len(self._monitor) > 0

    @property
    def wake_at_ms(self) -> int | None:
        """When to send the next `Wakeup`."""
        times = []
        first = self._outbox.first
        if first is not None:
            times.append(first.deadline_ms)
        oldest = self._monitor.oldest
        if oldest is not None:
            times.append(oldest.deadline_ms)
        if self.phase in (Phase.MOUNTING, Phase.SETTLING):
            times.append(self._phase_deadline_ms)
        if self.phase is Phase.WAITING:
            times.append(self._retry_at_ms)
        return min(times, default=None)

    # --- what comes in

    def step(self, event: Event, now_ms: int) -> list[Effect]:  # noqa: C901, PLR0912
        """Take one event in; see `machine.py`."""
        out: list[Effect] = []
        match event:
            case Append():
                self._append(event.parcel, now_ms, out)
            case Received():
                self._received(event, now_ms, out)
            case Applied():
                self._take_applied(event.mark, out)
            case Mount():
                self._wants_mount = True
                self._start(out)
            case Subscribe():
                self._subscribe(event.mark, now_ms, out)
            case Linked():
                self._linked(event, now_ms, out)
            case LinkFailed():
                self._link_failed(event, now_ms, out)
            case LinkLost():
                if event.link == self._link and self.phase in _LINKED:
                    self._leave(event.reason, now_ms, out)
            case Moved():
                self._moved(event.generation, now_ms, out)
            case Renewed():
                self._renew(event.client_id, now_ms, out)
            case Close():
                self._stop(errors.Unreachable("the client was closed before it was sent"), out)
            case Wakeup():
                self._wake(now_ms, out)
            case _:
                assert_never(event)
        return out

    def _append(self, parcel: Parcel, now_ms: int, out: list[Effect]) -> None:
        if self._stopped is not None:
            out.append(Refused(parcel.token, self._stopped))
            return
        self._outbox.put(parcel, now_ms + self._settings.request_timeout_ms)
        if self.phase is Phase.READY:
            self._send_waiting(now_ms, out)
        else:
            self._start(out)

    def _subscribe(self, mark: TransactionId | None, now_ms: int, out: list[Effect]) -> None:
        self._cursor.want(mark)
        if self.phase in _LINKED:
            self._leave("a feed was asked for", now_ms, out)
        else:
            self._start(out)

    def _take_applied(self, mark: TransactionId, out: list[Effect]) -> None:
        self._cursor.applied(mark)
        self._ask_feed(out)

    def _wake(self, now_ms: int, out: list[Effect]) -> None:
        self._expire(now_ms, out)
        if self.phase is Phase.WAITING and now_ms >= self._retry_at_ms:
            self._open_link(out)
        elif self.phase in (Phase.MOUNTING, Phase.SETTLING) and now_ms >= self._phase_deadline_ms:
            self._leave("the server did not answer the mount in time", now_ms, out)

    # --- links

    def _start(self, out: list[Effect]) -> None:
        if self.phase is Phase.IDLE:
            self._open_link(out)

    def _open_link(self, out: list[Effect]) -> None:
        assert self.phase in (Phase.IDLE, Phase.WAITING)
        self.phase = Phase.LINKING
        self._attempt += 1
        out.append(OpenLink(self._attempt))

    def _linked(self, event: Linked, now_ms: int, out: list[Effect]) -> None:
        if self.phase is not Phase.LINKING or event.attempt != self._attempt:
            return
        if event.generation < self._generation:  # invariant 2
            self._wait(f"found generation {event.generation} after {self._generation}", now_ms, out)
            return
        assert event.connection_sequence > self._connection_sequence  # invariant 4
        self._connection_sequence = event.connection_sequence
        self._generation = event.generation
        self._link = event.link
        self._mount += 1
        self._mount_id = self._control_id()
        self.phase = Phase.MOUNTING
        self._phase_deadline_ms = now_ms + self._settings.mount_timeout_ms
        wants_feed = self._cursor.is_wanted
        mark = self._cursor.mount_mark if wants_feed else LATEST_MARK
        mount = messages.MountWriter(self._mount_id, event.connection_sequence, mark, wants_feed)
        out.append(Send(self._link, mount))

    def _link_failed(self, event: LinkFailed, now_ms: int, out: list[Effect]) -> None:
        if self.phase is not Phase.LINKING or event.attempt != self._attempt:
            return
        if event.error.retriable:
            self._wait(str(event.error), now_ms, out)
        else:
            self._stop(event.error, out)

    def _moved(self, generation: Generation, now_ms: int, out: list[Effect]) -> None:
        if self.phase is Phase.WAITING:
            self._open_link(out)
        elif self.phase in _LINKED and generation > self._generation:
            self._leave("the partition has moved", now_ms, out)

    def _leave(self, reason: str, now_ms: int, out: list[Effect]) -> None:
        """Give the link up and mount again if there is anything to mount for."""
        assert self.phase in _LINKED
        stable_ms = self._settings.retry_interval_ms_max
        if self.phase is Phase.READY and now_ms - self._ready_since_ms >= stable_ms:
            self._failures = 0
        self._link = -1
        self._mount_id = None
        self._reading = None
        self._wait(reason, now_ms, out)

    def _wait(self, reason: str, now_ms: int, out: list[Effect]) -> None:
        self._trouble = reason
        out.append(
            Report("stream_interrupted", (("partition", self._partition_id), ("reason", reason)))
        )
        if not (self.has_pending or self._cursor.is_wanted or self._wants_mount):
            self.phase = Phase.IDLE
            return
        self.phase = Phase.WAITING
        self._failures += 1
        if self._failures == 1:
            self._open_link(out)
            return
        # Half to the whole of an interval that doubles, so that clients of a server that has died
        # do not all come back at once.
        longest = self._settings.retry_interval_ms_max
        doubled = self._settings.retry_interval_ms_min << min(self._failures - 2, 20)
        interval_ms = min(doubled, longest)
        self._retry_at_ms = now_ms + interval_ms - self._random.randrange(interval_ms // 2 + 1)

    # --- messages

    def _received(self, event: Received, now_ms: int, out: list[Effect]) -> None:
        message = event.message
        if isinstance(message, messages.AppendResult):
            # Final whichever link brings it: the server answers when every row is.
            self._append_result(message, now_ms, out)
            return
        if event.link != self._link or self.phase not in _LINKED:
            return
        match message:
            case messages.FeedBatch():
                self._feed_batch(message, now_ms, out)
            case messages.FeedSuspended():
                self._cursor.is_suspended = True
                self._ask_feed(out)
            case messages.Mounted() if message.req_id == self._mount_id:
                self._mounted(message, now_ms, out)
            case messages.RangeData():
                self._range_data(message, now_ms, out)
            case messages.ErrorResponse():
                self._error(message, now_ms, out)
            case _:
                self._unexpected(message, out)

    def _mounted(self, message: messages.Mounted, now_ms: int, out: list[Effect]) -> None:
        if self.phase is not Phase.MOUNTING:
            return
        if message.high_water_mark < self.high_water_mark:  # invariant 3
            self._leave(
                f"the server's mark {message.high_water_mark} lies below {self.high_water_mark}, "
                "which was known before",
                now_ms,
                out,
            )
            return
        self._learn(TransactionId(message.high_water_mark), out)
        self._limits = Limits(
            message.batch_rows_max,
            message.batch_bytes_max,
            min(message.in_flight_bytes_max, self._settings.in_flight_bytes_max),
        )
        self._monitor.prove(self.high_water_mark)
        if self._cursor.is_wanted:
            self._cursor.mounted(TransactionId(message.high_water_mark))
            self._ask_feed(out)
        doubtful = self._monitor.unread()
        if doubtful is None:
            self._ready(now_ms, out)
        else:
            self.phase = Phase.SETTLING
            self._read_back(*doubtful, out)

    def _read_back(self, first: TransactionId, last: TransactionId, out: list[Effect]) -> None:
        assert first <= last
        self._reading = messages.RangeRequest(
            self._control_id(), first, last, self._settings.range_bytes_max, RangeForm.HEADERS, ()
        )
        out.append(Send(self._link, self._reading))

    def _range_data(self, message: messages.RangeData, now_ms: int, out: list[Effect]) -> None:
        asked = self._reading
        if asked is None or message.req_id != asked.req_id:
            return
        assert self.phase is Phase.SETTLING
        fits = (
            message.form == RangeForm.HEADERS
            and message.first == asked.first
            and message.count > 0
            and message.next == message.first + message.count
        )
        if not fits or not self._monitor.saw_headers(
            TransactionId(message.first), message.count, message.records
        ):
            self._leave(f"no dense headers in answer to transactions {asked.first}..", now_ms, out)
            return
        self._phase_deadline_ms = now_ms + self._settings.mount_timeout_ms
        if message.next <= asked.last:
            self._read_back(TransactionId(message.next), TransactionId(asked.last), out)
        else:
            self._ready(now_ms, out)

    def _ready(self, now_ms: int, out: list[Effect]) -> None:
        self._reading = None
        for pending, outcome in self._monitor.settle(self.high_water_mark):
            out.append(Settled(pending.parcel.token, outcome))
        assert len(self._monitor) == 0  # invariant 1
        self.phase = Phase.READY
        self._ready_since_ms = now_ms
        self._wants_mount = False
        out.append(Ready(self.high_water_mark))
        self._send_waiting(now_ms, out)

    def _error(self, message: messages.ErrorResponse, now_ms: int, out: list[Effect]) -> None:
        error = errors.from_code(message.error_code, message.message)
        pending = self._monitor.find(message.req_id)
        if pending is not None:
            self._append_error(pending, error, now_ms, out)
        elif message.req_id == self._mount_id:
            again = error.retriable or isinstance(error, errors.GenerationMismatch)
            if again:
                self._leave(str(error), now_ms, out)
            else:
                self._stop(error, out)
        elif self._reading is not None and message.req_id == self._reading.req_id:
            self._leave(f"reading back: {error}", now_ms, out)
        else:
            self._unexpected(message, out)

    def _unexpected(self, message: ClientMessage, out: list[Effect]) -> None:
        out.append(
            Report(
                "message_ignored",
                (("partition", self._partition_id), ("message", type(message).__name__)),
            )
        )

    # --- appends

    def _send_waiting(self, now_ms: int, out: list[Effect]) -> None:
        assert self.phase is Phase.READY  # invariant 1
        while (waiting := self._outbox.first) is not None:
            parcel = waiting.parcel
            refusal = self._outbox.refusal(parcel, self._limits)
            if refusal is not None:
                self._outbox.take()
                out.append(Refused(parcel.token, refusal))
                continue
            in_flight_bytes = self._monitor.in_flight_bytes + parcel.size_bytes
            if len(self._monitor) and in_flight_bytes > self._limits.in_flight_bytes_max:
                return
            if self._next_sequence + parcel.row_count > SEQUENCE_MAX:
                self._ask_client_id(out)
                return
            self._outbox.take()
            self._send_parcel(parcel, waiting.deadline_ms, out)

    def _send_parcel(self, parcel: Parcel, deadline_ms: int, out: list[Effect]) -> None:
        req_id = ReqId(
            ClientId(self._client_id), self._generation, self._partition_id, self._next_sequence
        )
        self._next_sequence += parcel.row_count  # invariant 5
        self._monitor.register(
            Pending(parcel, req_id, self._mount, self.high_water_mark, deadline_ms)
        )
        mark, content = parcel.client_high_water_mark, parcel.content
        message: ClientMessage
        if isinstance(content, Single):
            locks = (content.write_locks, content.read_locks, content.append_locks)
            message = messages.AppendRequest(
                req_id, mark, *locks, content.header, content.data, parcel.content_crc
            )
        else:
            message = messages.AppendBatch(req_id, mark, content, parcel.content_crc)
        out.append(Send(self._link, message))

    def _append_result(
        self, message: messages.AppendResult, now_ms: int, out: list[Effect]
    ) -> None:
        try:
            answer = self._monitor.answered(message)
        except errors.RemoteProtocolError as error:
            # In doubt then, like an append that was not answered at all.
            if self.phase in _LINKED:
                self._leave(str(error), now_ms, out)
            return
        if answer is None:
            return
        pending, outcome = answer
        self._conclude(pending, outcome, now_ms, out)

    def _append_error(
        self, pending: Pending, error: errors.WaltzError, now_ms: int, out: list[Effect]
    ) -> None:
        reason = _REASONS.get(error.code)
        if reason is not None:
            self._monitor.remove(pending)
            outcome = BatchOutcome.uniform(
                pending.parcel.row_count, reason, high_water_mark=self.high_water_mark
            )
            self._conclude(pending, outcome, now_ms, out)
        elif isinstance(error, errors.UsageError):
            self._monitor.remove(pending)
            out.append(Refused(pending.parcel.token, error))
        elif isinstance(error, errors.ConnectionSuperseded):
            # An answer to an older mount of ours may say so, too: that one was replaced by us.
            if pending.mount == self._mount:
                self._stop(error, out)
        else:
            self._leave(str(error), now_ms, out)

    def _conclude(
        self, pending: Pending, outcome: BatchOutcome, now_ms: int, out: list[Effect]
    ) -> None:
        self._learn(outcome.high_water_mark, out)
        out.append(Settled(pending.parcel.token, outcome))
        if self.phase is not Phase.READY:
            return
        if outcome.reasons.any() and pending.mount == self._mount:
            for reason in _REMOUNT:
                if (outcome.reasons == reason).any():
                    self._leave(f"an append was refused: {reason.name}", now_ms, out)
                    return
        self._send_waiting(now_ms, out)

    def _expire(self, now_ms: int, out: list[Effect]) -> None:
        timeout_ms = self._settings.request_timeout_ms
        for pending in [each for each in self._monitor if each.deadline_ms <= now_ms]:
            self._monitor.remove(pending)
            out.append(Refused(pending.parcel.token, self._unknown(pending, timeout_ms)))
        for waiting in self._outbox.take_expired(now_ms):
            error = errors.Unreachable(
                f"partition {self._partition_id}: not sent within {timeout_ms} ms "
                f"({self._trouble}); it is not in the log"
            )
            out.append(Refused(waiting.parcel.token, error))

    def _unknown(self, pending: Pending, timeout_ms: int | None = None) -> errors.OutcomeUnknown:
        when = "before the client was closed" if timeout_ms is None else f"within {timeout_ms} ms"
        return errors.OutcomeUnknown(
            f"partition {self._partition_id}: the outcome of {pending.parcel.row_count} rows from "
            f"request {tuple(pending.req_id)} on could not be settled {when} ({self._trouble}); "
            f"if they are in the log, then after transaction {pending.mark_before}"
        )

    # --- client ids

    def _ask_client_id(self, out: list[Effect]) -> None:
        # NB: the monitor must be empty before the id changes: rows are matched by it.
        if len(self._monitor) == 0 and not self._renewing:
            self._renewing = True
            out.append(NeedClientId())

    def _renew(self, client_id: int, now_ms: int, out: list[Effect]) -> None:
        assert self._renewing
        assert len(self._monitor) == 0
        self._renewing = False
        self._client_id = client_id
        self._monitor = Monitor(client_id, self._partition_id)
        self._next_sequence = 1
        if self.phase in _LINKED:
            self._leave("the client id has changed", now_ms, out)

    # --- feed

    def _feed_batch(self, message: messages.FeedBatch, now_ms: int, out: list[Effect]) -> None:
        stretch = self._cursor.take(message)
        if isinstance(stretch, str):  # invariant 6
            self._leave(stretch, now_ms, out)
        elif stretch is not None:
            self._monitor.saw_feed(stretch.first, stretch.headers)
            self._learn(stretch.last, out)
            out.append(Fed(stretch.first, stretch.count, stretch.headers))

    def _ask_feed(self, out: list[Effect]) -> None:
        """Ask for the next stretch, unless the application is too far behind already."""
        if self._mount_id is None:
            return
        mark = self._cursor.ask()
        if mark is not None:
            out.append(Send(self._link, messages.FeedRequest(self._mount_id, mark)))

    # --- the rest

    def _learn(self, mark: TransactionId, out: list[Effect]) -> None:
        if mark > self.high_water_mark:
            self.high_water_mark = mark
            out.append(MarkMoved(mark))

    def _control_id(self) -> ReqId:
        sequence = self._next_control
        self._next_control = sequence - 1 if sequence > CONTROL_SEQUENCE_MIN else -1
        generation = max(self._generation, Generation(0))
        return ReqId(ClientId(self._client_id), generation, self._partition_id, sequence)

    def _stop(self, error: errors.WaltzError, out: list[Effect]) -> None:
        if self.phase is Phase.STOPPED:
            return
        self.phase = Phase.STOPPED
        self._stopped = error
        self._trouble = str(error)
        self._link = -1
        for pending in list(self._monitor):
            self._monitor.remove(pending)
            out.append(Refused(pending.parcel.token, self._unknown(pending)))
        out.extend(Refused(waiting.parcel.token, error) for waiting in self._outbox.take_all())
        out.append(Stopped(error))
