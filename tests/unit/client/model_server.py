"""A model of a server for clients: links break, answers are lost, owners change.

The model keeps only the rules of `server/append/mounts.py` and `server/locking/pending_appends.py`.
So `ModelWorld.check` detects a client that relies on other behavior.
"""

import struct
from collections import deque
from dataclasses import dataclass, field
from random import Random

import numpy as np

from waltz_core import errors
from waltz_core.client.stream import stream_events
from waltz_core.client.stream.outcome_tracker import SingleRow, Submission
from waltz_core.client.stream.partition_stream import PartitionStream
from waltz_core.client.stream.stream_events import Phase, StreamSettings
from waltz_core.machine import Report, Wakeup
from waltz_core.records.record import BEFORE_FIRST, RECORD_HEADER, PartitionId, ReqId, TransactionId
from waltz_core.server.read.feeds import select_headers
from waltz_core.wire import messages as m

CLIENT = 7
PARTITION = PartitionId(3)
SETTINGS = StreamSettings(
    request_timeout_ms=10_000,
    mount_timeout_ms=2_000,
    retry_interval_ms_min=10,
    retry_interval_ms_max=500,
    range_bytes_max=28 * 5,
    in_flight_bytes_max=1 << 20,
    feed_ahead_max=50,
    feed_lag_max=15,
)
FEED = struct.Struct(">16si")


@dataclass
class Wire:
    """One link, with the messages in flight in both directions."""

    number: int
    to_server: deque = field(default_factory=deque)
    to_client: deque = field(default_factory=deque)
    is_broken: bool = False


def header_of(row: ReqId) -> int:
    """Return the application's header of a row."""
    return row.sequence % 3


class ModelWorld:
    """The log, the current server, the links, and one client's stream."""

    def __init__(
        self, random: Random, *, wants_feed: bool, header_values: tuple[int, ...] = ()
    ) -> None:
        self.random = random
        self.now_ms = 0
        self.log: list[ReqId] = []
        self.generation = 0
        self.fence: tuple[int, int] | None = None  # (link, connection sequence)
        self.queue: deque[tuple[int, m.ClientMessage]] = deque()  # received appends, not final
        self.wires: list[Wire] = []
        self.attempts: deque[stream_events.OpenLink] = deque()
        self.connection_sequence = 0
        self.stream = PartitionStream(CLIENT, PARTITION, SETTINGS, random)
        self.sent: dict[int, list[ReqId]] = {}
        self.row_counts: dict[int, int] = {}
        self.settled: dict[
            int, stream_events.SubmissionSettled | stream_events.SubmissionRejected
        ] = {}
        # The rows of the feed; None for a row that does not pass the filter.
        self.fed: list[ReqId | None] = []
        self.header_values = header_values
        self.feed_values: tuple[int, ...] = ()
        self.granted = -1
        self.feed_link = -1
        self.feed_at = 0
        self.mount_id: ReqId | None = None
        self.tokens = 0
        self.lagging_mark: int | None = None
        self.is_mounted = False
        self.stale: tuple[int, int] | None = None
        if wants_feed:
            self.step(stream_events.Subscribe(BEFORE_FIRST, header_values))

    # --- the client's side

    def step(self, event: stream_events.Event) -> None:
        for effect in self.stream.step(event, self.now_ms):
            match effect:
                case stream_events.OpenLink():
                    self.attempts.append(effect)
                case stream_events.SendOnLink():
                    self.send(effect)
                case stream_events.SubmissionSettled() | stream_events.SubmissionRejected():
                    assert effect.token not in self.settled, "settled twice"
                    self.settled[effect.token] = effect
                case stream_events.FeedAdvanced():
                    assert effect.first == len(self.fed), "the feed is not dense"
                    assert len(effect.headers) == 20 * len(effect.ids)
                    self.fed += [None] * effect.count
                    rows = FEED.iter_unpack(effect.headers)
                    for number, (packed, _) in zip(effect.ids, rows, strict=True):
                        self.fed[number] = ReqId.from_bytes(packed)
                case stream_events.FeedLagging():
                    assert self.lagging_mark is None, "the stream requests to catch up twice"
                    self.lagging_mark = effect.feed_mark
                case stream_events.StreamReady() | stream_events.MarkAdvanced():
                    assert effect.high_water_mark < len(self.log)
                case Report():
                    pass
                case _:
                    raise AssertionError(effect)

    def send(self, effect: stream_events.SendOnLink) -> None:
        message = effect.message
        if isinstance(message, m.AppendBatch | m.AppendRequest):
            token = int(
                bytes(message.payload if isinstance(message, m.AppendBatch) else message.data)
            )
            first = message.req_id
            rows = [
                first._replace(sequence=first.sequence + i) for i in range(self.row_counts[token])
            ]
            assert token not in self.sent, "sent twice"
            self.sent[token] = rows
        wire = self.wires[effect.link]
        if not wire.is_broken:
            wire.to_server.append(message)

    def append(self) -> None:
        token = self.tokens
        self.tokens += 1
        rows = self.random.choice((1, 1, 2, 5))
        text = str(token).encode()
        content = (
            SingleRow(0, text, (), (), ()) if rows == 1 and self.random.random() < 0.5 else text
        )
        self.row_counts[token] = rows
        self.step(stream_events.SendAppends(Submission(token, rows, BEFORE_FIRST, content, 0)))

    # --- the network

    def link(self) -> None:
        if not self.attempts:
            return
        opening = self.attempts.popleft()
        attempt = opening.attempt
        if self.random.random() < 0.2:
            self.step(stream_events.LinkFailed(attempt, errors.Unreachable("no")))
            return
        open_links = [
            wire.number
            for wire in self.wires
            if not wire.is_broken and wire.number not in opening.avoided_links
        ]
        if open_links and self.random.random() < 0.4:
            number = open_links[-1]
        else:
            number = len(self.wires)
            self.wires.append(Wire(number))
        self.connection_sequence += 1
        # Sometimes, the client has an old assignment.
        generation = max(0, self.generation - (self.random.random() < 0.2))
        self.step(stream_events.LinkOpened(attempt, number, generation, self.connection_sequence))

    def break_wire(self) -> None:
        open_wires = [wire for wire in self.wires if not wire.is_broken]
        if not open_wires:
            return
        wire = self.random.choice(open_wires)
        wire.is_broken = True
        # Messages to the server may still arrive; no answer returns.
        while wire.to_server and self.random.random() < 0.5:
            self.take(wire)
        wire.to_client.clear()
        self.step(stream_events.LinkLost(wire.number, "cut"))

    def deliver_to_server(self) -> None:
        waiting_wires = [wire for wire in self.wires if wire.to_server]
        if waiting_wires:
            self.take(self.random.choice(waiting_wires))

    def deliver_to_client(self) -> None:
        waiting_wires = [wire for wire in self.wires if wire.to_client and not wire.is_broken]
        if waiting_wires:
            wire = self.random.choice(waiting_wires)
            self.step(stream_events.MessageReceived(wire.number, wire.to_client.popleft()))

    def answer(self, link: int, message: m.ClientMessage) -> None:
        wire = self.wires[link]
        if not wire.is_broken:
            wire.to_client.append(message)

    def reject(self, link: int, req_id: ReqId, error: errors.WaltzError) -> None:
        self.answer(link, m.ErrorResponse(req_id, error.code, error.retriable, str(error)))

    # --- the server's side

    def take(self, wire: Wire) -> None:
        message = wire.to_server.popleft()
        match message:
            case m.MountWriter():
                self.mount(wire.number, message)
            case m.AppendBatch() | m.AppendRequest():
                if self.random.random() < 0.05:
                    self.reject(wire.number, message.req_id, errors.Overloaded("full"))
                else:
                    self.queue.append((wire.number, message))
            case m.RangeRequest():
                self.range(wire.number, message)
            case m.FeedRequest():
                if message.req_id == self.mount_id and wire.number == self.feed_link:
                    self.granted = max(self.granted, message.client_high_water_mark + 7)
                    self.feed_at = message.client_high_water_mark + 1
            case _:
                raise AssertionError(message)

    def mount(self, link: int, message: m.MountWriter) -> None:
        if self.stale is not None and message.req_id.generation == self.stale[0]:
            # The previous owner has not noticed the move. It has no appends of this client in
            # flight.
            self.answer(link, m.Mounted(message.req_id, 0, self.stale[1], 100, 1 << 20, 1 << 20))
            return
        if message.req_id.generation != self.generation:
            self.reject(link, message.req_id, errors.NotOwned("moved"))
            return
        if self.fence is not None:
            number, sequence = self.fence
            newer = message.connection_sequence > sequence
            if not newer and not (message.connection_sequence == sequence and number == link):
                self.reject(link, message.req_id, errors.ConnectionSuperseded("older"))
                return
        # The server validates queued appends of an older link later, and this fence rejects them.
        self.fence = (link, message.connection_sequence)
        self.is_mounted = True
        mark = len(self.log) - 1
        self.feed_link, self.mount_id = (link, message.req_id) if message.wants_feed else (-1, None)
        self.granted = -1
        self.feed_values = message.header_values
        if message.wants_feed:
            self.feed_at = message.high_water_mark + 1
            while self.feed_at <= mark:
                self.feed_some(mark)
        self.answer(link, m.Mounted(message.req_id, 1, mark, 100, 1 << 20, 1 << 20))

    def process(self) -> None:
        """Commit or reject the oldest received append."""
        if not self.queue:
            return
        link, message = self.queue.popleft()
        if self.fence is None or self.fence[0] != link or not self.is_mounted:
            self.reject(link, message.req_id, errors.NotMounted("no"))
            return
        if message.req_id.generation != self.generation:
            self.reject(link, message.req_id, errors.GenerationMismatch("no"))
            return
        token = int(bytes(message.payload if isinstance(message, m.AppendBatch) else message.data))
        ids, reasons, conflicting = [], [], []
        lost = self.random.random() < 0.1
        if lost:
            self.is_mounted = False  # as the server does: no append may overtake the lost one
        for row in self.sent[token]:
            if lost or self.random.random() < 0.2:
                reason = m.RowOutcomeCode.LOST if lost else m.RowOutcomeCode.LOCK
                ids.append(-1)
            else:
                reason = m.RowOutcomeCode.COMMITTED
                ids.append(len(self.log))
                self.log.append(row)
            reasons.append(reason)
            conflicting.append(0 if reason is m.RowOutcomeCode.LOCK else -1)
        if self.random.random() < 0.05:
            self.reject(link, message.req_id, errors.OutcomeUnknown("unknown"))
            return
        self.answer(
            link,
            m.AppendResult(
                message.req_id,
                len(self.log) - 1,
                np.array(ids, dtype=">i8").tobytes(),
                bytes(reasons),
                np.array(conflicting, dtype=">i8").tobytes(),
            ),
        )

    def range(self, link: int, message: m.RangeRequest) -> None:
        if self.random.random() < 0.1:
            self.reject(link, message.req_id, errors.Overloaded("busy"))
            return
        assert message.form == m.RangeForm.HEADERS
        last = min(message.last, len(self.log) - 1, message.first + message.bytes_max // 28 - 1)
        count = last - message.first + 1
        headers = b"".join(
            RECORD_HEADER.pack(i, self.log[i].to_bytes(), 0) for i in range(message.first, last + 1)
        )
        self.answer(
            link,
            m.RangeData(
                message.req_id,
                message.first,
                count,
                last + 1,
                m.RangeForm.HEADERS,
                b"",
                headers,
                1,
                len(self.log) - 1,
                (),
            ),
        )

    def feed(self) -> None:
        if self.feed_link < 0 or self.granted < 0:
            return
        if self.feed_at > self.granted:
            self.granted = -1
            self.answer(self.feed_link, m.FeedSuspended(self.mount_id))
            return
        self.feed_some(min(len(self.log) - 1, self.granted))

    def feed_some(self, until: int) -> None:
        first = max(0, self.feed_at - self.random.choice((0, 0, 2)))
        last = min(self.feed_at + self.random.randrange(4), until)
        if last < self.feed_at:
            return
        rows = self.log[first : last + 1]
        headers = b"".join(FEED.pack(row.to_bytes(), header_of(row)) for row in rows)
        offset_bytes = b""
        if self.feed_values:
            headers, offset_bytes = select_headers(headers, self.feed_values)
        self.answer(
            self.feed_link,
            m.FeedBatch(self.mount_id, first, len(rows), headers, 1, -1, bytes(16), offset_bytes),
        )
        self.feed_at = last + 1

    def write_foreign(self) -> None:
        self.log.append(ReqId(99, self.generation, PARTITION, len(self.log)))

    def move(self) -> None:
        """Let another server take over; the old server's appends commit or are lost, unanswered."""
        while self.queue and self.random.random() < 0.5:
            self.process()
        self.queue.clear()
        for wire in self.wires:
            if self.random.random() < 0.5:
                wire.to_client.clear()
        self.stale = (self.generation, len(self.log) - 1) if self.random.random() < 0.7 else None
        self.generation += 1
        self.fence = None
        self.feed_link = -1
        if self.random.random() < 0.5:
            self.step(stream_events.GenerationChanged(self.generation))

    def pass_time(self) -> None:
        self.now_ms += self.random.choice((1, 20, 300, 2500))
        self.step(Wakeup())

    def catch_up(self) -> None:
        """Resume a lagging feed, as the driver does some time after `FeedLagging`."""
        if self.lagging_mark is not None:
            self.lagging_mark = None
            rows = self.log[: max(len(self.fed), len(self.log) - 3)]
            self.fed = [self.requested_row(row) for row in rows]
            self.step(stream_events.ResumeFeed(TransactionId(len(self.fed) - 1)))

    def requested_row(self, row: ReqId) -> ReqId | None:
        return row if not self.header_values or header_of(row) in self.header_values else None

    def subscribe_again(self) -> None:
        self.lagging_mark = None
        self.step(stream_events.Unsubscribe())
        mark = TransactionId(self.random.randrange(len(self.fed) + 1) - 1)
        del self.fed[mark + 1 :]
        self.step(stream_events.Subscribe(mark, self.header_values))

    def apply(self) -> None:
        if self.fed:
            self.step(stream_events.FeedApplied(TransactionId(len(self.fed) - 1)))

    # --- complete runs

    def run(self, steps: int) -> None:
        weights = {
            self.append: 6,
            self.deliver_to_server: 8,
            self.deliver_to_client: 8,
            self.process: 6,
            self.link: 4,
            self.feed: 4,
            self.apply: 2,
            self.catch_up: 1,
            self.write_foreign: 1,
            self.break_wire: 1,
            self.pass_time: 1,
            self.move: 1,
        }
        if self.header_values:
            weights[self.subscribe_again] = 1
        # Each run prefers some actions, so that queues build up at different places. Some runs
        # omit some faults, because frequent faults hide the effects of others.
        faults = (self.break_wire, self.move, self.pass_time)
        actions = [
            action
            for action, weight in weights.items()
            for _ in range(
                self.random.choice((0, 1, 2))
                if action in faults
                else round(weight * self.random.choice((0.25, 1, 3)) + 0.5)
            )
        ]
        for _ in range(steps):
            self.random.choice(actions)()

    def finish_without_faults(self) -> None:
        """End all faults: every append in doubt must get an outcome."""
        for _ in range(2000):
            if not self.stream.has_pending and self.stream.phase in (Phase.READY, Phase.IDLE):
                return
            self.link()
            self.deliver_to_server()
            self.deliver_to_client()
            self.process()
            self.apply()
            self.catch_up()
            wake = self.stream.wake_at_ms
            if wake is not None:
                self.now_ms = max(self.now_ms, min(wake, self.now_ms + 20))
                self.step(Wakeup())
        raise AssertionError(f"not settled: {self.stream.phase}")

    def check(self) -> None:
        id_by_row = {row: i for i, row in enumerate(self.log)}
        assert len(id_by_row) == len(self.log)
        assert set(self.settled) == set(range(self.tokens))
        for token, outcome_effect in self.settled.items():
            rows = self.sent.get(token, [])
            if isinstance(outcome_effect, stream_events.SubmissionRejected):
                if not isinstance(outcome_effect.error, errors.OutcomeUnknown):
                    assert not any(row in id_by_row for row in rows), (token, outcome_effect)
                continue
            assert rows
            outcome = outcome_effect.outcome
            for i, row in enumerate(rows):
                if outcome.reasons[i] == m.RowOutcomeCode.COMMITTED:
                    assert id_by_row.get(row) == outcome.transaction_ids[i], (token, i)
                else:
                    assert row not in id_by_row, (token, i, outcome.reasons[i])
                    assert outcome.transaction_ids[i] == BEFORE_FIRST
        assert self.fed == [self.requested_row(row) for row in self.log[: len(self.fed)]]
