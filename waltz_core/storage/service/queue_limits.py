"""Limits the memory of requests that wait in a storage.

Rules:
    1. If a new request makes all waiting requests together exceed the limit, the connection of this
       request is not read until half of the limit is free.
    2. Reads of readers have a separate limit. With a common limit, readers (there may be many
       tenants) could stop the appends and heartbeats of sessions.
"""

from waltz_core.storage.service.lane import queue_bytes
from waltz_core.storage.service.work import ConnectionId, LaneRequest
from waltz_core.wire.messages import RangeRaw


class QueueLimits:
    """Counts the bytes of waiting requests, and decides which connections are not read."""

    def __init__(self, bytes_max: int) -> None:
        assert bytes_max > 0
        self._bytes_max = bytes_max
        self.owner_bytes = 0
        self.reader_bytes = 0
        self._paused_connections: dict[ConnectionId, bool] = {}  # True: by the limit of readers

    def add(self, request: LaneRequest) -> bool:
        """Count a request; return whether its connection must not be read any more."""
        is_read = _is_from_reader(request)
        self._count(queue_bytes(request.message), is_read=is_read)
        held_bytes = self.reader_bytes if is_read else self.owner_bytes
        if held_bytes <= self._bytes_max or request.connection in self._paused_connections:
            return False
        self._paused_connections[request.connection] = is_read
        return True

    def subtract(self, request: LaneRequest) -> None:
        """Stop counting a request, which was answered or dropped."""
        self._count(-queue_bytes(request.message), is_read=_is_from_reader(request))
        assert min(self.owner_bytes, self.reader_bytes) >= 0

    def _count(self, size_bytes: int, *, is_read: bool) -> None:
        if is_read:
            self.reader_bytes += size_bytes
        else:
            self.owner_bytes += size_bytes

    def take_resumed_connections(self) -> list[ConnectionId]:
        """Return the connections that must be read again."""
        if not self._paused_connections:
            return []
        room_bytes = self._bytes_max // 2
        connections = [
            connection
            for connection, is_read in self._paused_connections.items()
            if (self.reader_bytes if is_read else self.owner_bytes) <= room_bytes
        ]
        for connection in connections:
            del self._paused_connections[connection]
        return connections

    def forget(self, connection: ConnectionId) -> None:
        """Forget a closed connection; the caller subtracts its requests one by one."""
        self._paused_connections.pop(connection, None)


def _is_from_reader(request: LaneRequest) -> bool:
    return isinstance(request.message, RangeRaw) and request.message.reader
