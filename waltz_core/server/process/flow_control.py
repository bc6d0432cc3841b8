"""Flow control: limits on the requests of each connection, and on the memory of all connections.

A client that floods the server, or never reads, must not take much memory or time from other
clients. This module counts requests and bytes, without any sockets.

Rules (docs/design/correctness.md 5, "Limits"):
    1. For each connection, the number and the bytes of requests in progress are limited. Further
       requests wait. While a request waits, the connection is not read.
    2. The bytes of the answer to a range request count as soon as the request is admitted. Range
       requests may use only half of a connection's bytes. No requests of a congested connection are
       admitted.
    3. Above the memory limit, two further rules apply:
        - The connections that use most memory are not read until an eighth of the limit is free.
        - A connection begins a read (a range, or a transaction's data) only while no other read and
          no request with data is in progress on it. Without this rule, a client that reads no
          answers could open many connections, and use half of the limit of each. A request without
          data does not prevent a read. For example, a feed request may be open for a long time, and
          its client may need a transaction's data to continue.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from waltz_core.server.partition_events import ConnectionId
from waltz_core.wire.messages import (
    AddPreferredRequest,
    AppendBatch,
    AppendRequest,
    ClientMessage,
    MountWriter,
    ObjectReplacementRequest,
    RangeRequest,
    RegistryRequest,
    RemovePreferredRequest,
    TransactionDataRequest,
)

# The memory of a request's Python objects, in addition to its bytes.
REQUEST_OVERHEAD_BYTES: Final = 512
# The memory of a lock, header or partition number in a request. In the frame, it uses 4 bytes.
NUMBER_BYTES: Final = 40


class FlowLimits(NamedTuple):
    """The limits of `FlowControl`: requests and bytes of each connection, and bytes in total."""

    connection_in_flight_count_max: int
    connection_in_flight_bytes_max: int
    memory_bytes_max: int
    range_bytes_max: int


class AdmittedRequest(NamedTuple):
    """A request that may be processed, and the bytes that are counted until it is answered."""

    message: ClientMessage
    cost_bytes: int


@dataclass(slots=True)
class _Account:
    """The requests and bytes that one connection uses."""

    in_flight_count: int = 0
    in_flight_bytes: int = 0
    waiting_requests: deque[ClientMessage] = field(default_factory=deque)
    waiting_bytes: int = 0
    backlog_bytes: int = 0
    is_congested: bool = False

    @property
    def memory_bytes(self) -> int:
        return self.in_flight_bytes + self.waiting_bytes + self.backlog_bytes

    @property
    def has_data(self) -> bool:
        """Whether a request with data, or a read, is in progress."""
        return self.in_flight_bytes > self.in_flight_count * REQUEST_OVERHEAD_BYTES


class FlowControl:
    """The accounts of all connections, by the module's rules."""

    def __init__(self, limits: FlowLimits) -> None:
        self._limits = limits
        self._accounts: dict[ConnectionId, _Account] = {}
        self._paused: dict[ConnectionId, None] = {}  # connections that are not read (rule 3)
        self._reads_waiting_for_memory: dict[
            ConnectionId, None
        ] = {}  # connections whose reads wait (rule 3)
        self.memory_bytes = 0

    # -----------------------------------------------------------------------------------------
    # connections

    def open(self, connection: ConnectionId) -> None:
        """Open the account of a new connection."""
        assert connection not in self._accounts
        self._accounts[connection] = _Account()

    def close(self, connection: ConnectionId) -> None:
        """Close the account of a closed connection; its bytes are free."""
        self.memory_bytes -= self._accounts.pop(connection).memory_bytes
        self._paused.pop(connection, None)
        self._reads_waiting_for_memory.pop(connection, None)
        assert self.memory_bytes >= 0

    def may_read(self, connection: ConnectionId) -> bool:
        """Whether the server should read more from the connection."""
        return not self._accounts[connection].waiting_requests and connection not in self._paused

    def in_flight_count(self, connection: ConnectionId) -> int:
        """Return how many requests of the connection are in progress."""
        return self._accounts[connection].in_flight_count

    # -----------------------------------------------------------------------------------------
    # requests and answers

    def receive(self, connection: ConnectionId, messages: Iterable[ClientMessage]) -> None:
        """Queue the requests of a connection until `admit` returns them."""
        account = self._accounts[connection]
        for message in messages:
            request_bytes = _request_bytes(message)
            account.waiting_requests.append(message)
            account.waiting_bytes += request_bytes
            self.memory_bytes += request_bytes

    def admit(self, connection: ConnectionId) -> list[AdmittedRequest]:
        """Remove and return the requests that may be processed now, in order."""
        account = self._accounts.get(connection)
        admitted: list[AdmittedRequest] = []
        while account and account.waiting_requests and self._has_capacity(connection, account):
            message = account.waiting_requests.popleft()
            request_bytes, answer_bytes = _request_bytes(message), self._answer_bytes(message)
            account.waiting_bytes -= request_bytes
            account.in_flight_bytes += request_bytes + answer_bytes
            account.in_flight_count += 1
            self.memory_bytes += answer_bytes
            admitted.append(AdmittedRequest(message, request_bytes + answer_bytes))
        return admitted

    def on_answered(self, connection: ConnectionId, cost_bytes: int) -> None:
        """A request was answered: free its bytes. Does nothing if `cost_bytes` is 0."""
        account = self._accounts.get(connection)
        if account is None or not cost_bytes:
            return
        account.in_flight_count -= 1
        account.in_flight_bytes -= cost_bytes
        self.memory_bytes -= cost_bytes
        assert account.in_flight_count >= 0
        assert account.in_flight_bytes >= 0

    def note_backlog(
        self, connection: ConnectionId, backlog_bytes: int, *, is_congested: bool
    ) -> None:
        """Record how many bytes of answers a connection has buffered."""
        account = self._accounts.get(connection)
        if account is not None:
            self.memory_bytes += backlog_bytes - account.backlog_bytes
            account.backlog_bytes = backlog_bytes
            account.is_congested = is_congested

    # -----------------------------------------------------------------------------------------
    # memory

    @property
    def is_over_limit(self) -> bool:
        """Whether all connections together, with their last known backlogs, exceed the limit."""
        return self.memory_bytes > self._limits.memory_bytes_max

    @property
    def has_paused_connections(self) -> bool:
        """Whether a connection is not read because of rule 3."""
        return bool(self._paused)

    def apply_memory_limit(self) -> list[ConnectionId]:
        """Apply rule 3; return the connections for which `admit` or `may_read` may have changed."""
        if self.is_over_limit:
            return self._pause_largest()
        unpaused = self._reads_waiting_for_memory
        self._reads_waiting_for_memory = {}
        if self._paused and self.memory_bytes <= self._limits.memory_bytes_max // 8 * 7:
            unpaused |= self._paused
            self._paused.clear()
        return list(unpaused)

    def _pause_largest(self) -> list[ConnectionId]:
        """Stop reading the largest connections, until these account for the excess bytes."""
        over_bytes = self.memory_bytes - self._limits.memory_bytes_max
        paused_now: list[ConnectionId] = []
        connections_by_size = sorted(
            (
                (account.memory_bytes, connection_id)
                for connection_id, account in self._accounts.items()
            )
        )
        while over_bytes > 0 and connections_by_size:
            size_bytes, connection = connections_by_size.pop()
            over_bytes -= size_bytes
            if connection not in self._paused:
                self._paused[connection] = None
                paused_now.append(connection)
        return paused_now

    # -----------------------------------------------------------------------------------------
    # implementation

    def _has_capacity(self, connection: ConnectionId, account: _Account) -> bool:
        limits = self._limits
        if account.is_congested or account.in_flight_count >= limits.connection_in_flight_count_max:
            return False
        bytes_max = limits.connection_in_flight_bytes_max
        is_read = isinstance(account.waiting_requests[0], RangeRequest | TransactionDataRequest)
        if is_read and account.has_data and self.is_over_limit:
            self._reads_waiting_for_memory[connection] = None
            return False
        if isinstance(account.waiting_requests[0], RangeRequest):
            bytes_max //= 2
        return account.in_flight_bytes < bytes_max

    def _answer_bytes(self, message: ClientMessage) -> int:
        if isinstance(message, TransactionDataRequest):
            return 1  # The size is not known; a nonzero number marks a read (rule 3).
        if not isinstance(message, RangeRequest):
            return 0
        return min(max(message.bytes_max, 1), self._limits.range_bytes_max)


def _request_bytes(message: ClientMessage) -> int:
    data_bytes = number_count = 0
    if isinstance(message, AppendBatch):
        data_bytes = len(message.payload)
    elif isinstance(message, AppendRequest):
        data_bytes = len(message.data)
        number_count = (
            len(message.write_locks) + len(message.read_locks) + len(message.append_locks)
        )
    elif isinstance(message, MountWriter | RangeRequest):
        number_count = len(message.header_values)
    elif isinstance(message, AddPreferredRequest | RemovePreferredRequest):
        number_count = len(message.partitions)
    elif isinstance(message, RegistryRequest):
        data_bytes = len(message.write) + len(message.marks) + len(message.arguments)
        number_count = len(message.partitions)
    elif isinstance(message, ObjectReplacementRequest):
        data_bytes = len(message.object)
    return REQUEST_OVERHEAD_BYTES + data_bytes + NUMBER_BYTES * number_count
