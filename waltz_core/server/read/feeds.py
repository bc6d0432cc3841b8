"""The feed of one partition: sends every committed transaction, in order, to each mounted client.

Clients derive their state from the feed. So each client must receive every transaction in order,
whatever its speed. A client that does not read must cost no more memory than the frames in its
connection's buffer.

Rules (docs/design/wire-format.md 2.2 and 2.3; docs/design/correctness.md 2.4, row 22):
    1. The feed of one client is called a context here. A context sends each of the IDs
       `next..until` once, and nothing above the high-water mark.
    2. A context sends only transactions that were *granted*. A mount grants the transactions up to
       the high-water mark at its time. A feed request grants at least `feed_request_count_min`
       transactions after the client's mark. When all granted transactions are sent, the request is
       answered.
    3. A congested connection receives nothing. In one turn each context sends at most one frame.
    4. Headers that are not cached are fetched once for all contexts at the same ID.
    5. A filter removes headers from a frame, but the frame is always sent, so that the client's
       mark advances.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from waltz_core.errors import BadRequest, ClientAheadOfLog, NotMounted, WaltzError
from waltz_core.records.raw_records import FEED_HEADER_BYTES, FEED_HEADER_DTYPE, Buffer
from waltz_core.records.record import (
    BEFORE_FIRST,
    GENESIS_CHAIN,
    NO_SESSION,
    ClientId,
    ReqId,
    SessionId,
    TransactionId,
)
from waltz_core.server.append.mounts import PartitionPosition
from waltz_core.server.partition_events import (
    ConnectionId,
    FeedHeaders,
    PartitionLimits,
    RequestReceived,
    SendToClient,
)
from waltz_core.values import value
from waltz_core.wire.messages import FeedBatch, FeedSuspended, MountWriter

# The maximum number of frames in one turn, so that a turn of the event loop is short with any
# number of clients.
FRAMES_PER_TURN_MAX = 64

FeedKey: TypeAlias = tuple[ConnectionId, ClientId]


class HeaderCache(Protocol):
    """A cache of feed headers."""

    def read_cached(self, first: TransactionId, last: TransactionId) -> FeedHeaders | None:
        """Return headers from `first` up to `last` or fewer; None if they must be fetched."""


@value(frozen=True, slots=True)
class FetchHeaders:
    """Fetch the feed headers from `first` up to `last` (or fewer) from a storage."""

    first: TransactionId
    last: TransactionId


@value(frozen=True, slots=True)
class MountCaughtUp:
    """The feed of a mounting client has reached the mark for which the mount waits."""

    request: RequestReceived


FeedOutcome: TypeAlias = SendToClient | FetchHeaders | MountCaughtUp


@dataclass(slots=True)
class _ClientFeed:
    """The feed of one client: the transactions `next` to `until` are granted."""

    request: RequestReceived  # the mount until it is answered, then the last granted feed request
    mount_id: ReqId
    next: TransactionId
    until: TransactionId
    is_mounting: bool
    header_values: tuple[int, ...]  # empty: no filter
    is_granted: bool = True
    is_fetching: bool = False

    @property
    def connection(self) -> ConnectionId:
        """The connection that receives the feed."""
        return self.request.connection


class Feed:
    """The feed contexts of one partition, by the module's rules."""

    def __init__(self, limits: PartitionLimits, memory: HeaderCache) -> None:
        self._limits = limits
        self._memory = memory
        # The contexts, in the order of their turns.
        self._contexts: OrderedDict[FeedKey, _ClientFeed] = OrderedDict()
        self._congested: set[ConnectionId] = set()
        self._high_water_mark = BEFORE_FIRST
        self._session_id = NO_SESSION
        self._has_more = False

    # -----------------------------------------------------------------------------------------
    # state and counters

    @property
    def has_work(self) -> bool:
        """Whether `deliver` may have something to send now."""
        return self._has_more

    @property
    def count(self) -> int:
        """The number of clients with a feed."""
        return len(self._contexts)

    @property
    def fetched_first_ids(self) -> set[TransactionId]:
        """The first IDs of the ranges that are being fetched for feeds."""
        return {context.next for context in self._contexts.values() if context.is_fetching}

    def lag_max(self) -> int:
        """Return how many committed transactions are not yet sent to the slowest client.

        Return 0 if there is no client.
        """
        next_ids = [context.next for context in self._contexts.values()]
        return self._high_water_mark + 1 - min(next_ids) if next_ids else 0

    # -----------------------------------------------------------------------------------------
    # requests

    def mount(self, request: RequestReceived, *, mark: TransactionId, until: TransactionId) -> None:
        """Start the feed of a mounting client, after its mark and up to `until`.

        `MountCaughtUp` follows.
        """
        assert BEFORE_FIRST <= mark <= until <= self._high_water_mark
        mount_id = request.message.req_id
        key = (request.connection, mount_id.client_id)
        assert key not in self._contexts
        first = TransactionId(mark + 1)
        message = request.message
        values = message.header_values if isinstance(message, MountWriter) else ()
        self._contexts[key] = _ClientFeed(
            request, mount_id, first, until, is_mounting=True, header_values=values
        )
        self._has_more = True

    def is_mounted(self, request: RequestReceived) -> bool:
        """Whether a feed request belongs to a mount of its connection."""
        mount_id = request.message.req_id
        context = self._contexts.get((request.connection, mount_id.client_id))
        return context is not None and context.mount_id == mount_id

    def add_request(
        self, request: RequestReceived, mark: int, position: PartitionPosition
    ) -> WaltzError | None:
        """Grant a feed request; return the error, or None if it is granted."""
        description = f"feed request after transaction {mark} of {position}"
        if not self.is_mounted(request):
            return NotMounted(
                f"{description}: the client has not mounted the partition, or only in an earlier "
                "generation"
            )
        if mark > position.high_water_mark:
            return ClientAheadOfLog(
                f"{description}: the log ends at transaction {position.high_water_mark}"
            )
        if mark < BEFORE_FIRST or not self.grant(request, mark=TransactionId(mark)):
            return BadRequest(
                f"{description}: expected a high-water mark of -1 or more, and no other open "
                "feed request of the client"
            )
        return None

    def grant(self, request: RequestReceived, *, mark: TransactionId) -> bool:
        """Grant a feed request: continue after the client's mark.

        Return False if the client is not mounted, or if an earlier request is not answered yet. At
        the end of the granted range, `FeedSuspended` answers the request.
        """
        mount_id = request.message.req_id
        context = self._contexts.get((request.connection, mount_id.client_id))
        if context is None or not self.is_mounted(request) or context.is_granted:
            return False
        assert mark <= self._high_water_mark
        context.request = request
        context.next = TransactionId(mark + 1)
        context.until = max(
            self._high_water_mark, TransactionId(mark + self._limits.feed_request_count_min)
        )
        context.is_granted = True
        self._has_more = True
        return True

    def drop_client(self, client_id: ClientId) -> list[RequestReceived]:
        """End all feeds of one client; return its unanswered mounts and feed requests."""
        keys = [key for key in self._contexts if key[1] == client_id]
        dropped = [self._contexts.pop(key) for key in keys]
        return [context.request for context in dropped if context.is_granted]

    def close(self, connection: ConnectionId) -> None:
        """A connection was closed: end its feeds."""
        for key in [key for key in self._contexts if key[0] == connection]:
            del self._contexts[key]
        self._congested.discard(connection)

    def on_connection_congested(self, connection: ConnectionId) -> None:
        """Send nothing to this connection until it has drained."""
        self._congested.add(connection)

    def on_connection_drained(self, connection: ConnectionId) -> None:
        """A congested connection accepts frames again."""
        self._congested.discard(connection)
        self._has_more = True

    def on_mark_advanced(self, session_id: SessionId, high_water_mark: TransactionId) -> None:
        """The high-water mark has moved, or a new session has confirmed it."""
        self._session_id = session_id
        self._high_water_mark = high_water_mark
        self._has_more = True

    def abandon(self) -> list[RequestReceived]:
        """End all feeds; return the unanswered mounts and feed requests."""
        waiting = [context.request for context in self._contexts.values() if context.is_granted]
        self._contexts.clear()
        self._has_more = False
        return waiting

    # -----------------------------------------------------------------------------------------
    # frames

    def deliver(self) -> list[FeedOutcome]:
        """Send a frame to each ready context, up to `FRAMES_PER_TURN_MAX` frames (rule 3)."""
        out: list[FeedOutcome] = []
        self._has_more = False
        frames = 0
        for key, context in list(self._contexts.items()):
            if context.connection in self._congested or context.is_fetching:
                continue
            if not context.is_granted:
                continue
            if frames == FRAMES_PER_TURN_MAX:
                self._has_more = True
                break
            if self._serve_context(context, out):
                frames += 1
                self._contexts.move_to_end(key)
        return out

    def on_headers_fetched(self, fetched_headers: FeedHeaders) -> list[FeedOutcome]:
        """Send fetched headers to all contexts that wait at the first ID of these headers."""
        out: list[FeedOutcome] = []
        for context in self._contexts.values():
            if context.is_fetching and context.next == fetched_headers.first:
                context.is_fetching = False
                if context.connection not in self._congested:
                    self._send_frame(context, fetched_headers, out)
                    self._end_grant(context, out)
                self._has_more = True
        return out

    def on_fetch_failed(self, first: TransactionId) -> list[RequestReceived]:
        """End the feeds that wait at an ID that no replica can return; return their requests."""
        keys = [
            key
            for key, context in self._contexts.items()
            if context.is_fetching and context.next == first
        ]
        return [self._contexts.pop(key).request for key in keys]

    def _serve_context(self, context: _ClientFeed, out: list[FeedOutcome]) -> bool:
        """Send a frame, end the grant, or fetch headers; return whether a frame was sent."""
        last = min(context.until, self._high_water_mark)
        if context.next > last:
            self._end_grant(context, out)
            return False
        last = min(last, TransactionId(context.next + self._limits.feed_frame_count_max - 1))
        cached_headers = self._memory.read_cached(context.next, last)
        if cached_headers is None:
            context.is_fetching = True
            fetch = FetchHeaders(
                context.next,
                TransactionId(context.next + self._limits.feed_frame_count_max - 1),
            )
            if fetch not in out:
                out.append(fetch)
            return False
        self._send_frame(context, cached_headers, out)
        self._end_grant(context, out)
        return True

    def _send_frame(
        self, context: _ClientFeed, feed_headers: FeedHeaders, out: list[FeedOutcome]
    ) -> None:
        # Headers that were fetched for another context may exceed the grant of this context.
        count = min(feed_headers.size, context.until - context.next + 1)
        assert feed_headers.first == context.next
        assert count > 0
        assert context.next + count - 1 <= self._high_water_mark
        chain_at, chain = feed_headers.chain_at, feed_headers.chain
        if chain_at >= context.next + count:
            chain_at, chain = BEFORE_FIRST, GENESIS_CHAIN
        headers: Buffer = memoryview(feed_headers.headers)[: count * FEED_HEADER_BYTES]
        offsets = b""
        if context.header_values:
            headers, offsets = select_headers(headers, context.header_values)
        message = FeedBatch(
            context.mount_id,
            context.next,
            count,
            headers,
            self._session_id,
            chain_at,
            chain,
            offsets,
        )
        context.next = TransactionId(context.next + count)
        out.append(SendToClient(context.connection, message, 0))
        if context.next <= min(context.until, self._high_water_mark):
            self._has_more = True

    def _end_grant(self, context: _ClientFeed, out: list[FeedOutcome]) -> None:
        if context.next <= context.until:
            return
        context.is_granted = False
        if context.is_mounting:
            context.is_mounting = False
            out.append(MountCaughtUp(context.request))
            return
        message = FeedSuspended(context.mount_id)
        out.append(SendToClient(context.connection, message, context.request.cost_bytes))


def select_headers(headers: Buffer, header_values: tuple[int, ...]) -> tuple[Buffer, bytes]:
    """Return the headers with one of these values, and their offsets.

    If all headers have one of the values, there are no offsets.
    """
    feed_headers = np.frombuffer(headers, dtype=FEED_HEADER_DTYPE)
    offsets = np.flatnonzero(np.isin(feed_headers["header"].astype(np.int32), header_values))
    if offsets.size == feed_headers.size:
        return headers, b""
    return feed_headers[offsets].tobytes(), offsets.astype(">i4").tobytes()
