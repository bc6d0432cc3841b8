"""What waits to be appended, one lane for each connection, served by what each has cost so far.

Why it stands alone: fairness between clients is decided here and nowhere else. A client that
floods the server fills its own lane and runs ahead of the clock; whoever asks for little is never
behind more than one request of each of the others.

Rules:
    1. Within a lane the order is that of arrival: a client's appends enter the log as it sent them.
    2. Each lane has a clock that advances by the bytes it was served. The lane whose clock is
       behind goes first. A lane that was empty starts at the time of the lane served last, so
       nobody saves up turns (start-time fair queueing).
"""

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from waltz_core.server.events import ConnectionId


class Waiting(Protocol):
    """Anything that can wait in a lane."""

    @property
    def connection(self) -> ConnectionId:
        """Whose lane it waits in."""

    @property
    def cost_bytes(self) -> int:
        """What keeping it costs."""


WaitingT = TypeVar("WaitingT", bound=Waiting)


@dataclass(slots=True)
class _Lane(Generic[WaitingT]):
    items: deque[WaitingT] = field(default_factory=deque)
    bytes: int = 0
    clock: int = 0


class Lanes(Generic[WaitingT]):
    """Queues by connection, and whose turn it is."""

    __slots__ = ("_clock", "_lanes", "_order", "_serial", "bytes")

    def __init__(self) -> None:
        # Lanes with something in them, and those emptied whose clock is ahead of `_clock`.
        self._lanes: dict[ConnectionId, _Lane[WaitingT]] = {}
        # Lanes with something in them (and stale entries), by clock, then by who came first.
        self._order: list[tuple[int, int, ConnectionId]] = []
        self._serial = 0
        self._clock = 0
        self.bytes = 0

    def __bool__(self) -> bool:
        return self.bytes > 0

    def __len__(self) -> int:
        return sum(len(lane.items) for lane in self._lanes.values())

    def bytes_of(self, connection: ConnectionId) -> int:
        """What waits in one lane."""
        lane = self._lanes.get(connection)
        return 0 if lane is None else lane.bytes

    @property
    def lane_count(self) -> int:
        """How many connections have something waiting, or just had."""
        return len(self._lanes)

    def push(self, item: WaitingT) -> None:
        """Put a request at the end of its connection's lane."""
        assert item.cost_bytes > 0
        lane = self._lanes.get(item.connection)
        if lane is None:
            lane = self._lanes[item.connection] = _Lane(clock=self._clock)
        if not lane.items:
            lane.clock = max(lane.clock, self._clock)
            self._put_in_order(item.connection, lane)
        lane.items.append(item)
        lane.bytes += item.cost_bytes
        self.bytes += item.cost_bytes

    def peek(self) -> WaitingT | None:
        """Return the request whose turn it is; None when nothing waits."""
        while self._order:
            clock, _, connection = self._order[0]
            lane = self._lanes.get(connection)
            if lane is not None and lane.items and lane.clock == clock:
                return lane.items[0]
            heapq.heappop(self._order)
        return None

    def take(self) -> WaitingT | None:
        """Take the request whose turn it is; None when nothing waits."""
        if self.peek() is None:
            return None
        self._clock, _, connection = heapq.heappop(self._order)
        lane = self._lanes[connection]
        item = lane.items.popleft()
        lane.bytes -= item.cost_bytes
        self.bytes -= item.cost_bytes
        lane.clock += item.cost_bytes
        if lane.items:
            self._put_in_order(connection, lane)
        elif not self.bytes:
            self._lanes.clear()  # Nobody waits, so nobody is ahead of anybody.
            self._order.clear()
        return item

    def drop(self, connection: ConnectionId) -> list[WaitingT]:
        """Empty a connection's lane and return what was in it."""
        lane = self._lanes.pop(connection, None)
        if lane is None:
            return []
        self.bytes -= lane.bytes
        assert self.bytes >= 0
        return list(lane.items)

    def drop_all(self) -> list[WaitingT]:
        """Empty all lanes and return what was in them."""
        dropped = [item for connection in list(self._lanes) for item in self.drop(connection)]
        assert self.bytes == 0
        return dropped

    def _put_in_order(self, connection: ConnectionId, lane: _Lane[WaitingT]) -> None:
        self._serial += 1
        heapq.heappush(self._order, (lane.clock, self._serial, connection))
