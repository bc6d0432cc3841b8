"""The requests of a partition that wait: for a store session, or for older appends to be final.

Rules:
    1. A request that needs a session waits for at most `session_wait_ms_max`, and is then rejected.
    2. Mounts and flushes wait for older appends. Each has a token; the append pipeline returns the
       token (`BarrierReached`) when these appends are final. Only the latest mount of a client
       waits.
"""

from collections import deque
from itertools import count
from typing import NamedTuple

from waltz_core.records.record import ClientId
from waltz_core.server.partition_events import ConnectionId, RequestReceived


class WaitingMount(NamedTuple):
    """A mount that waits until older appends of its client are final, and then for its feed."""

    request: RequestReceived
    wants_feed: bool


class WaitingRequests:
    """The waiting requests of one partition, by the module's rules."""

    def __init__(self, session_wait_ms_max: int) -> None:
        self._open_wait_ms = session_wait_ms_max
        self._waiting_for_session: deque[tuple[int, RequestReceived]] = deque()
        self._mounts: dict[int, WaitingMount] = {}
        self._flushes: dict[int, RequestReceived] = {}
        self._tokens = count(1)

    # ---- requests that wait for a session

    @property
    def due_ms(self) -> int | None:
        """When the next request times out; None if no request waits."""
        return self._waiting_for_session[0][0] if self._waiting_for_session else None

    def wait_for_session(self, request: RequestReceived, now_ms: int) -> None:
        """Keep a request until a session opens (rule 1)."""
        self._waiting_for_session.append((now_ms + self._open_wait_ms, request))

    def take_overdue(self, now_ms: int) -> list[RequestReceived]:
        """Remove and return the requests that have timed out."""
        overdue: list[RequestReceived] = []
        while self._waiting_for_session and self._waiting_for_session[0][0] <= now_ms:
            overdue.append(self._waiting_for_session.popleft()[1])
        return overdue

    def on_session_opened(self) -> list[RequestReceived]:
        """Remove and return the requests that waited for a session."""
        waiting, self._waiting_for_session = self._waiting_for_session, deque()
        return [request for _, request in waiting]

    def drop(self, connection: ConnectionId) -> None:
        """Drop the requests of a closed connection, which could otherwise wait for days."""
        self._waiting_for_session = deque(
            entry for entry in self._waiting_for_session if entry[1].connection != connection
        )
        for token, mount in list(self._mounts.items()):
            if mount.request.connection == connection:
                del self._mounts[token]
        for token, flush in list(self._flushes.items()):
            if flush.connection == connection:
                del self._flushes[token]

    # ---- requests that wait for a token (rule 2)

    def add_mount(self, request: RequestReceived, *, wants_feed: bool) -> int:
        """Add a mount; return the token for which it waits."""
        token = next(self._tokens)
        self._mounts[token] = WaitingMount(request, wants_feed)
        return token

    def take_older_mounts(self, client_id: ClientId) -> list[RequestReceived]:
        """Remove and return the older mounts of a client."""
        older_mounts = [
            token
            for token, mount in self._mounts.items()
            if mount.request.message.req_id.client_id == client_id
        ]
        return [self._mounts.pop(token).request for token in older_mounts]

    def add_flush(self, request: RequestReceived) -> int:
        """Add a flush; return the token for which it waits."""
        token = next(self._tokens)
        self._flushes[token] = request
        return token

    def take_waiting(self, token: int) -> WaitingMount | RequestReceived | None:
        """Remove and return the mount or flush that waits for a token; None if it was dropped."""
        return self._mounts.pop(token, None) or self._flushes.pop(token, None)

    def take_all(self) -> list[RequestReceived]:
        """Remove and return all waiting requests."""
        waiting = self.on_session_opened()
        waiting += self._flushes.values()
        waiting += (mount.request for mount in self._mounts.values())
        self._flushes.clear()
        self._mounts.clear()
        return waiting
