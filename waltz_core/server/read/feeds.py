"""The feed of one partition: sends every committed transaction, in order, to each mounted client.

Clients derive their state from the feed. So each client must receive every transaction in order,
however slow the client is. A client that does not read must cost no more memory than the frames in
its connection's buffer.

Rules (docs/design/wire-format.md 2.2 and 2.3; docs/design/correctness.md 2.4, row 22):
    1. The feed of a client sends each of the IDs `next..until` once, and nothing above the
       high-water mark.
    2. A feed sends only transactions that were *granted*. A mount grants the transactions up to the
       high-water mark at the time of the mount. A feed request grants at least
       `feed_request_count_min` transactions after the client's mark. When all granted transactions
       are sent, the request is answered.
    3. A congested connection receives nothing. In one turn each feed sends at most one frame.
    4. Headers that are not cached are fetched once for all feeds at the same ID.
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
    """The feed of one client: the transactions `next_id` to `until_id` are granted."""

    request: RequestReceived  # the mount until it is answered, then the last granted feed request
    mount_id: ReqId
    next_id: TransactionId
    until_id: TransactionId
    is_mounting: bool
    header_values: tuple[int, ...]  # empty: no filter
    is_granted: bool = True
    is_fetching: bool = False

    @property
    def connection(self) -> ConnectionId:
        """The connection that receives the feed."""
        return self.request.connection


class ClientFeeds:
    """The feeds of one partition's clients, by the module's rules."""

    def __init__(self, limits: PartitionLimits, header_cache: HeaderCache) -> None:
        self._limits = limits
        self._header_cache = header_cache
        # The feeds, in the order of their turns.
        self._client_feeds: OrderedDict[FeedKey, _ClientFeed] = OrderedDict()
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
        return len(self._client_feeds)

    @property
    def fetched_first_ids(self) -> set[TransactionId]:
        """The first IDs of the ranges that are being fetched for feeds."""
        return {
            client_feed.next_id
            for client_feed in self._client_feeds.values()
            if client_feed.is_fetching
        }

    def lag_max(self) -> int:
        """Return how many committed transactions are not yet sent to the slowest client.

        Return 0 if there is no client.
        """
        next_ids = [client_feed.next_id for client_feed in self._client_feeds.values()]
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
        assert key not in self._client_feeds
        first = TransactionId(mark + 1)
        message = request.message
        values = message.header_values if isinstance(message, MountWriter) else ()
        self._client_feeds[key] = _ClientFeed(
            request, mount_id, first, until, is_mounting=True, header_values=values
        )
        self._has_more = True

    def is_mounted(self, request: RequestReceived) -> bool:
        """Whether a feed request belongs to a mount of its connection."""
        mount_id = request.message.req_id
        client_feed = self._client_feeds.get((request.connection, mount_id.client_id))
        return client_feed is not None and client_feed.mount_id == mount_id

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
        if mark < BEFORE_FIRST:
            return BadRequest(f"{description}: expected a high-water mark of -1 or more")
        if not self.grant(request, mark=TransactionId(mark)):
            return BadRequest(
                f"{description}: the server has not answered the client's earlier feed request yet"
            )
        return None

    def grant(self, request: RequestReceived, *, mark: TransactionId) -> bool:
        """Grant a feed request: continue after the client's mark.

        Return False if the client is not mounted, or if an earlier request is not answered yet. At
        the end of the granted range, `FeedSuspended` answers the request.
        """
        mount_id = request.message.req_id
        client_feed = self._client_feeds.get((request.connection, mount_id.client_id))
        if client_feed is None or not self.is_mounted(request) or client_feed.is_granted:
            return False
        assert mark <= self._high_water_mark
        client_feed.request = request
        client_feed.next_id = TransactionId(mark + 1)
        client_feed.until_id = max(
            self._high_water_mark, TransactionId(mark + self._limits.feed_request_count_min)
        )
        client_feed.is_granted = True
        self._has_more = True
        return True

    def drop_client(self, client_id: ClientId) -> list[RequestReceived]:
        """End all feeds of one client; return its unanswered mounts and feed requests."""
        keys = [key for key in self._client_feeds if key[1] == client_id]
        dropped = [self._client_feeds.pop(key) for key in keys]
        return [client_feed.request for client_feed in dropped if client_feed.is_granted]

    def close(self, connection: ConnectionId) -> None:
        """A connection was closed: end its feeds."""
        for key in [key for key in self._client_feeds if key[0] == connection]:
            del self._client_feeds[key]
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
        waiting = [
            client_feed.request
            for client_feed in self._client_feeds.values()
            if client_feed.is_granted
        ]
        self._client_feeds.clear()
        self._has_more = False
        return waiting

    # -----------------------------------------------------------------------------------------
    # frames

    def deliver(self) -> list[FeedOutcome]:
        """Send a frame of each ready feed, up to `FRAMES_PER_TURN_MAX` frames (rule 3)."""
        out: list[FeedOutcome] = []
        self._has_more = False
        frames = 0
        for key, client_feed in list(self._client_feeds.items()):
            if client_feed.connection in self._congested or client_feed.is_fetching:
                continue
            if not client_feed.is_granted:
                continue
            if frames == FRAMES_PER_TURN_MAX:
                self._has_more = True
                break
            if self._serve_client_feed(client_feed, out):
                frames += 1
                self._client_feeds.move_to_end(key)
        return out

    def on_headers_fetched(self, fetched_headers: FeedHeaders) -> list[FeedOutcome]:
        """Send fetched headers to all feeds that wait at the first ID of these headers."""
        out: list[FeedOutcome] = []
        for client_feed in self._client_feeds.values():
            if client_feed.is_fetching and client_feed.next_id == fetched_headers.first:
                client_feed.is_fetching = False
                if client_feed.connection not in self._congested:
                    self._send_frame(client_feed, fetched_headers, out)
                    self._end_grant(client_feed, out)
                self._has_more = True
        return out

    def on_fetch_failed(self, first: TransactionId) -> list[RequestReceived]:
        """End the feeds that wait at an ID that no replica can return; return their requests."""
        keys = [
            key
            for key, client_feed in self._client_feeds.items()
            if client_feed.is_fetching and client_feed.next_id == first
        ]
        return [self._client_feeds.pop(key).request for key in keys]

    def _serve_client_feed(self, client_feed: _ClientFeed, out: list[FeedOutcome]) -> bool:
        """Send a frame, end the grant, or fetch headers; return whether a frame was sent."""
        last = min(client_feed.until_id, self._high_water_mark)
        if client_feed.next_id > last:
            self._end_grant(client_feed, out)
            return False
        last = min(last, TransactionId(client_feed.next_id + self._limits.feed_frame_count_max - 1))
        cached_headers = self._header_cache.read_cached(client_feed.next_id, last)
        if cached_headers is None:
            client_feed.is_fetching = True
            fetch = FetchHeaders(
                client_feed.next_id,
                TransactionId(client_feed.next_id + self._limits.feed_frame_count_max - 1),
            )
            if fetch not in out:
                out.append(fetch)
            return False
        self._send_frame(client_feed, cached_headers, out)
        self._end_grant(client_feed, out)
        return True

    def _send_frame(
        self, client_feed: _ClientFeed, feed_headers: FeedHeaders, out: list[FeedOutcome]
    ) -> None:
        # Headers that were fetched for another feed may exceed the grant of this one.
        count = min(feed_headers.size, client_feed.until_id - client_feed.next_id + 1)
        assert feed_headers.first == client_feed.next_id
        assert count > 0
        assert client_feed.next_id + count - 1 <= self._high_water_mark
        chain_at, chain = feed_headers.chain_at, feed_headers.chain
        if chain_at >= client_feed.next_id + count:
            chain_at, chain = BEFORE_FIRST, GENESIS_CHAIN
        headers: Buffer = memoryview(feed_headers.headers)[: count * FEED_HEADER_BYTES]
        offsets = b""
        if client_feed.header_values:
            headers, offsets = select_headers(headers, client_feed.header_values)
        message = FeedBatch(
            client_feed.mount_id,
            client_feed.next_id,
            count,
            headers,
            self._session_id,
            chain_at,
            chain,
            offsets,
        )
        client_feed.next_id = TransactionId(client_feed.next_id + count)
        out.append(SendToClient(client_feed.connection, message, 0))
        if client_feed.next_id <= min(client_feed.until_id, self._high_water_mark):
            self._has_more = True

    def _end_grant(self, client_feed: _ClientFeed, out: list[FeedOutcome]) -> None:
        if client_feed.next_id <= client_feed.until_id:
            return
        client_feed.is_granted = False
        if client_feed.is_mounting:
            client_feed.is_mounting = False
            out.append(MountCaughtUp(client_feed.request))
            return
        message = FeedSuspended(client_feed.mount_id)
        out.append(SendToClient(client_feed.connection, message, client_feed.request.cost_bytes))


def select_headers(headers: Buffer, header_values: tuple[int, ...]) -> tuple[Buffer, bytes]:
    """Return the headers with one of these values, and their offsets.

    If all headers have one of the values, there are no offsets.
    """
    feed_headers = np.frombuffer(headers, dtype=FEED_HEADER_DTYPE)
    offsets = np.flatnonzero(np.isin(feed_headers["header"].astype(np.int32), header_values))
    if offsets.size == feed_headers.size:
        return headers, b""
    return feed_headers[offsets].tobytes(), offsets.astype(">i4").tobytes()
