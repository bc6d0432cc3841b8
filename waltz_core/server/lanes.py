"""What waits to be appended, one lane for each connection, taken in turns.

Why it stands alone: fairness between clients is decided here and nowhere else. A client that
floods the server fills its own lane; the others' requests come up after one request of each lane.

Rules:
    1. Within a lane the order is that of arrival: a client's appends enter the log as it sent them.
    2. The lanes take turns, one request at a time; a lane that becomes busy goes last.
"""

from collections import OrderedDict, deque
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


class Lanes(Generic[WaitingT]):
    """Queues by connection, and whose turn it is."""

    __slots__ = ("_bytes_by_lane", "_lanes", "bytes")

    def __init__(self) -> None:
        # In order of turns: the first lane is next. Empty lanes are not kept.
        self._lanes: OrderedDict[ConnectionId, deque[WaitingT]] = OrderedDict()
        self._bytes_by_lane: dict[ConnectionId, int] = {}
        self.bytes = 0

    def __bool__(self) -> bool:
        return bool(self._lanes)

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values()))

    def bytes_of(self, connection: ConnectionId) -> int:
        """What waits in one lane."""
        return self._bytes_by_lane.get(connection, 0)

    @property
    def lane_count(self) -> int:
        """How many connections have something waiting."""
        return len(self._lanes)

    def push(self, item: WaitingT) -> None:
        """Put a request at the end of its connection's lane."""
        connection = item.connection
        lane = self._lanes.get(connection)
        if lane is None:
            self._lanes[connection] = lane = deque()
            self._bytes_by_lane[connection] = 0
        lane.append(item)
        self._bytes_by_lane[connection] += item.cost_bytes
        self.bytes += item.cost_bytes

    def take(self) -> WaitingT | None:
        """Take the request whose turn it is; None when nothing waits."""
        if not self._lanes:
            return None
        connection, lane = next(iter(self._lanes.items()))
        item = lane.popleft()
        self.bytes -= item.cost_bytes
        if lane:
            self._bytes_by_lane[connection] -= item.cost_bytes
            self._lanes.move_to_end(connection)
        else:
            del self._lanes[connection], self._bytes_by_lane[connection]
        return item

    def drop(self, connection: ConnectionId) -> list[WaitingT]:
        """Empty a connection's lane and return what was in it."""
        lane = self._lanes.pop(connection, None)
        if lane is None:
            return []
        self.bytes -= self._bytes_by_lane.pop(connection)
        assert self.bytes >= 0
        return list(lane)

    def drop_all(self) -> list[WaitingT]:
        """Empty all lanes and return what was in them."""
        dropped = [item for connection in list(self._lanes) for item in self.drop(connection)]
        assert self.bytes == 0
        return dropped
