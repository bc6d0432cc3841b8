"""Helpers for scenarios of a stream: its inputs, and its expected outputs."""

from random import Random

import numpy as np

from waltz_core import errors
from waltz_core.client.stream import stream_events
from waltz_core.client.stream.outcome_tracker import SingleRow, Submission
from waltz_core.client.stream.partition_stream import PartitionStream
from waltz_core.client.stream.stream_events import StreamSettings
from waltz_core.machine import Report, Wakeup
from waltz_core.records.raw_records import FEED_HEADER_DTYPE
from waltz_core.records.record import (
    BEFORE_FIRST,
    GENESIS_CHAIN,
    RECORD_HEADER,
    Generation,
    LineageEntry,
    PartitionId,
    ReqId,
)
from waltz_core.wire import messages as m

CLIENT, PARTITION = 7, PartitionId(3)
SETTINGS = StreamSettings(
    request_timeout_ms=10_000,
    mount_timeout_ms=2_000,
    retry_interval_ms_min=100,
    retry_interval_ms_max=1_000,
    range_bytes_max=2_800,
    in_flight_bytes_max=1 << 20,
    feed_ahead_max=50,
    feed_lag_max=100,
)


def req(sequence: int, generation: int = 0, client_id: int = CLIENT) -> ReqId:
    return ReqId(client_id, generation, PARTITION, sequence)


def submission(token: int, rows: int = 1, data: bytes = b"data") -> Submission:
    """Return a submission: a single row is sent by itself, several rows as a batch."""
    content = SingleRow(5, data, (1,), (2,), (3,)) if rows == 1 else data
    return Submission(token, rows, BEFORE_FIRST, content, 99)


def result(req_id: ReqId, *rows: tuple[int, m.RowOutcomeCode, int], mark: int) -> m.AppendResult:
    ids, reasons, conflicting = zip(*rows, strict=True)
    return m.AppendResult(
        req_id,
        mark,
        np.array(ids, dtype=">i8").tobytes(),
        bytes(reasons),
        np.array(conflicting, dtype=">i8").tobytes(),
    )


def committed_result(req_id: ReqId, *ids: int) -> m.AppendResult:
    return result(req_id, *((i, m.RowOutcomeCode.COMMITTED, -1) for i in ids), mark=max(ids))


def headers(first: int, *req_ids: ReqId) -> bytes:
    """Return headers of 28 bytes each, as in a range of headers."""
    return b"".join(RECORD_HEADER.pack(first + i, r.to_bytes(), 0) for i, r in enumerate(req_ids))


def feed_headers(*req_ids: ReqId) -> bytes:
    """Return headers of 20 bytes each, as in a feed batch."""
    feed = np.zeros(len(req_ids), dtype=FEED_HEADER_DTYPE)
    for i, req_id in enumerate(req_ids):
        feed[i]["req_id"] = tuple(req_id)
    return feed.tobytes()


def range_data(
    range_request: m.RangeRequest,
    *req_ids: ReqId,
    mark: int,
    lineage: tuple[LineageEntry, ...] = (),
) -> m.RangeData:
    count = len(req_ids)
    return m.RangeData(
        range_request.req_id,
        range_request.first,
        count,
        range_request.first + count,
        m.RangeForm.HEADERS,
        b"",
        headers(range_request.first, *req_ids),
        1,
        mark,
        lineage,
    )


class Scenario:
    """A stream, its clock, and the effects of its last event."""

    def __init__(self, settings: StreamSettings = SETTINGS) -> None:
        self.stream = PartitionStream(CLIENT, PARTITION, settings, Random(1))
        self.now_ms = 0
        self.connection_sequence = 0
        self.last_effects: list[stream_events.Effect] = []
        self.opening = stream_events.OpenLink(0, ())

    def step(self, event: stream_events.Event) -> list[stream_events.Effect]:
        """Pass an event to the stream; return its effects without reports."""
        effects = self.stream.step(event, self.now_ms)
        self.last_effects = [effect for effect in effects if not isinstance(effect, Report)]
        for effect in self.last_effects:
            if isinstance(effect, stream_events.OpenLink):
                self.opening = effect
        return self.last_effects

    def wake(self, at_ms: int) -> list[stream_events.Effect]:
        self.now_ms = at_ms
        return self.step(Wakeup())

    def receive(self, message: m.ClientMessage, link: int = 1) -> list[stream_events.Effect]:
        return self.step(stream_events.MessageReceived(link, message))

    def reject(
        self, req_id: ReqId, error: errors.WaltzError, link: int = 1
    ) -> list[stream_events.Effect]:
        return self.receive(m.ErrorResponse(req_id, error.code, error.retriable, str(error)), link)

    def sent_messages(self, kind: type | None = None) -> list[m.ClientMessage]:
        """Return the messages that the last event has sent."""
        return [
            effect.message
            for effect in self.last_effects
            if isinstance(effect, stream_events.SendOnLink)
            and (kind is None or isinstance(effect.message, kind))
        ]

    def open_link(
        self, number: int = 1, generation: int = 0, *, supports_own_ranges: bool = False
    ) -> m.MountWriter:
        """Answer the last OpenLink; return the mount request that follows."""
        opening = self.opening
        assert number not in opening.avoided_links
        self.connection_sequence += 1
        self.step(
            stream_events.LinkOpened(
                opening.attempt,
                number,
                Generation(generation),
                self.connection_sequence,
                supports_own_ranges=supports_own_ranges,
            )
        )
        (mount,) = self.sent_messages(m.MountWriter)
        return mount

    def answer_mount(
        self, mount: m.MountWriter, mark: int, link: int = 1
    ) -> list[stream_events.Effect]:
        return self.receive(m.Mounted(mount.req_id, 1, mark, 100, 1_000, 5_000), link)

    def mount_partition(self, mark: int = BEFORE_FIRST) -> "Scenario":
        """Mount on link 1, generation 0."""
        self.step(stream_events.MountPartition())
        self.answer_mount(self.open_link(), mark)
        assert self.stream.phase is stream_events.Phase.READY
        return self

    def mount_with_feed(self, mark: int, log_mark: int | None = None) -> m.FeedRequest:
        """Subscribe after `mark` and mount with the feed; return the first feed request."""
        last = mark if log_mark is None else log_mark
        self.step(stream_events.Subscribe(mark))
        self.answer_mount(self.open_link(), last)
        (mount,) = self.sent_messages(m.MountWriter)
        assert mount.wants_feed
        self.answer_mount(mount, last)
        (request,) = self.sent_messages(m.FeedRequest)
        return request


def feed_batch(
    mount_id: ReqId, first: int, *req_ids: ReqId, chain_at: int = BEFORE_FIRST, chain: bytes = b""
) -> m.FeedBatch:
    return m.FeedBatch(
        mount_id,
        first,
        len(req_ids),
        feed_headers(*req_ids),
        1,
        chain_at,
        chain or bytes(GENESIS_CHAIN),
    )
