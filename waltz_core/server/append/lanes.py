"""Fair queues of appends: one lane (queue) for each connection, with start-time fair queueing.

Only this module decides about fairness between clients. A client that floods the server waits in
its own lane. A client with few requests never waits for more than one request of each other client.

Rules:
    1. Within a lane, requests are taken in the order of arrival. So a client's appends enter the
       log in the order in which the client sent them.
    2. The lane that was served least goes first. To measure this, each lane has a clock that
       advances by the number of bytes taken from the lane. The lane with the lowest clock is next.
       When an empty lane gets a request, its clock starts at the clock of the lane served last. So
       an idle lane does not accumulate turns.
    3. A large request may be taken in parts. The request stays at the head of its lane until its
       last part is taken. The clock advances for each part separately.
    4. While large requests have to wait, lanes with a small request at their head are served first.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeAlias, TypeVar

from waltz_core.server.partition_events import ConnectionId


class LaneItem(Protocol):
    """A request that can wait in a lane."""

    @property
    def connection(self) -> ConnectionId:
        """The connection whose lane contains this request."""

    @property
    def cost_bytes(self) -> int:
        """The memory that the request uses, in bytes."""

    @property
    def is_large(self) -> bool:
        """Whether small requests may overtake this request (rule 4)."""


WaitingT = TypeVar("WaitingT", bound=LaneItem)
_LaneEntry: TypeAlias = tuple[
    int, int, ConnectionId
]  # clock, serial number, connection of the lane


@dataclass(slots=True)
class _Lane(Generic[WaitingT]):
    """The queue of one connection, with its clock for fair queueing."""

    items: deque[WaitingT] = field(default_factory=deque)
    queued_bytes: int = 0
    clock: int = 0
    head_taken_bytes: int = 0  # how many bytes of the first item were already taken


class Lanes(Generic[WaitingT]):
    """The lanes of all connections, and the order of their turns."""

    __slots__ = ("_clock", "_lanes", "_large", "_last_serial_number", "_small", "queued_bytes")

    def __init__(self) -> None:
        # All lanes. Empty lanes are removed when no lane has a request.
        self._lanes: dict[ConnectionId, _Lane[WaitingT]] = {}
        # Heaps of the lanes with requests, ordered by clock and then by arrival. The request at the
        # head of a lane determines the heap. The heaps also contain stale entries.
        self._small: list[_LaneEntry] = []
        self._large: list[_LaneEntry] = []
        self._last_serial_number = 0
        self._clock = 0
        self.queued_bytes = 0

    def __bool__(self) -> bool:
        return self.queued_bytes > 0

    def __len__(self) -> int:
        return sum(len(lane.items) for lane in self._lanes.values())

    def queued_bytes_of(self, connection: ConnectionId) -> int:
        """Return how many bytes of requests wait in the lane of a connection."""
        lane = self._lanes.get(connection)
        return 0 if lane is None else lane.queued_bytes

    @property
    def lane_count(self) -> int:
        """The number of lanes that have requests, or were emptied recently."""
        return len(self._lanes)

    def is_over_share(self, connection: ConnectionId, cost_bytes: int, limit: int) -> bool:
        """Whether the lanes are full and this connection has used its share of `limit`."""
        if self.queued_bytes + cost_bytes <= limit:
            return False
        return self.queued_bytes_of(connection) + cost_bytes > limit // (self.lane_count + 1)

    def push(self, item: WaitingT) -> None:
        """Put a request at the end of its connection's lane."""
        assert item.cost_bytes > 0
        lane = self._lanes.get(item.connection)
        if lane is None:
            lane = self._lanes[item.connection] = _Lane(clock=self._clock)
        was_empty = not lane.items
        lane.items.append(item)
        if was_empty:
            lane.clock = max(lane.clock, self._clock)
            self._push_entry(item.connection, lane)
        lane.queued_bytes += item.cost_bytes
        self.queued_bytes += item.cost_bytes

    def peek(self, *, with_large: bool = True) -> WaitingT | None:
        """Return the next request, or None; if `with_large` is False, the next small request."""
        entry = self._first_entry(with_large=with_large)
        return None if entry is None else self._lanes[entry[2]].items[0]

    def take(self, *, with_large: bool = True) -> WaitingT | None:
        """Remove and return the next request, or the rest of it; None if no request waits."""
        lane = self._take_lane(with_large=with_large)
        if lane is None:
            return None
        item = lane.items.popleft()
        self._charge(lane, item.cost_bytes - lane.head_taken_bytes)
        lane.head_taken_bytes = 0
        if lane.items:
            self._push_entry(item.connection, lane)
        elif not self.queued_bytes:
            self._lanes.clear()  # No request waits, so the clocks are no longer needed.
            self._small.clear()
            self._large.clear()
        return item

    def charge_part(self, part_bytes: int) -> None:
        """Charge the next lane for a part of its request; the rest stays at the head (rule 3)."""
        lane = self._take_lane(with_large=True)
        assert lane is not None
        item = lane.items[0]
        lane.head_taken_bytes += part_bytes
        assert 0 <= part_bytes <= lane.head_taken_bytes < item.cost_bytes
        self._charge(lane, part_bytes)
        self._push_entry(item.connection, lane)

    def drop(self, connection: ConnectionId) -> list[WaitingT]:
        """Empty the lane of a connection and return its requests."""
        lane = self._lanes.pop(connection, None)
        if lane is None:
            return []
        self.queued_bytes -= lane.queued_bytes
        assert self.queued_bytes >= 0
        return list(lane.items)

    def drop_all(self) -> list[WaitingT]:
        """Empty all lanes and return their requests."""
        dropped = [item for connection in list(self._lanes) for item in self.drop(connection)]
        assert self.queued_bytes == 0
        return dropped

    def _first_entry(self, *, with_large: bool) -> _LaneEntry | None:
        """Remove stale entries; return the entry of the next lane, or None."""
        small_entry = self._drop_stale_entries(self._small, is_large=False) if self._small else None
        large_entry = (
            self._drop_stale_entries(self._large, is_large=True)
            if with_large and self._large
            else None
        )
        if small_entry is None or large_entry is None:
            return small_entry or large_entry
        return min(small_entry, large_entry)

    def _drop_stale_entries(self, heap: list[_LaneEntry], *, is_large: bool) -> _LaneEntry | None:
        while heap:
            clock, _, connection = heap[0]
            lane = self._lanes.get(connection)
            if lane and lane.items and lane.clock == clock and lane.items[0].is_large == is_large:
                return heap[0]
            heapq.heappop(heap)
        return None

    def _take_lane(self, *, with_large: bool) -> _Lane[WaitingT] | None:
        """Remove the next lane from its heap and return it; advance the common clock."""
        entry = self._first_entry(with_large=with_large)
        if entry is None:
            return None
        self._clock = max(self._clock, entry[0])  # A delayed large request has an old clock.
        lane = self._lanes[entry[2]]
        heapq.heappop(self._large if lane.items[0].is_large else self._small)
        return lane

    def _charge(self, lane: _Lane[WaitingT], part_bytes: int) -> None:
        lane.queued_bytes -= part_bytes
        lane.clock += part_bytes
        self.queued_bytes -= part_bytes

    def _push_entry(self, connection: ConnectionId, lane: _Lane[WaitingT]) -> None:
        self._last_serial_number += 1
        heap = self._large if lane.items[0].is_large else self._small
        heapq.heappush(heap, (lane.clock, self._last_serial_number, connection))
