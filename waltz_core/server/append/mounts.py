"""The mounts of a partition: which connection of each client may append, and which are fenced.

If the connection of a client breaks, the client mounts again to learn the outcome of its appends.
Then the client may send these appends again. This is safe only if no append that was sent on an
older connection can still enter the log. To ensure this, this module keeps a *fence* for each
client: the highest connection sequence of its mounts.

Rules (docs/design/correctness.md 2.3 and 2.4, row 22; docs/spark.md, "Exactly once"):
    1. For each client, only the connection with the highest sequence may append, for the whole
       generation. This rule holds even after that connection was closed. It also holds when the
       server has released the partition and owns it again in the same generation. A mount with an
       equal sequence is accepted only on the same connection.
    2. Appends are accepted only after the server has answered the mount.
    3. The fences of at most `limit` disconnected clients are remembered. Above this limit, the
       client that disconnected first is forgotten. So a fence can fail only after `limit` other
       clients have disconnected.
    4. A client's appends must not overtake each other. So after one of these events, the client's
       later appends are rejected until the client mounts again, on the same connection or on
       another one:
        - The client has lost a row.
        - An append was rejected because the queue was full, or because the client's principal was
          over a limit.
    5. Each mount has its own number, even a repeated mount on the same connection. So an append
       that was sent under an earlier mount does not enter the log under a later one.
    6. A peer must not exhaust memory. So at most `CLIENTS_MAX` clients are mounted on one
       connection, and the filter of a feed has at most `FILTER_HEADERS_MAX` headers.
    7. With access control, a client ID without a proof belongs to the principal that has mounted it
       first in the generation. This holds as long as the client's fence is remembered (rule 3).
"""

from collections import OrderedDict
from dataclasses import dataclass
from itertools import count
from typing import Final, NamedTuple

from waltz_core.errors import (
    BadRequest,
    ClientAheadOfLog,
    ClientIdDenied,
    ConnectionSuperseded,
    GenerationMismatch,
    NotOwned,
    Overloaded,
    WaltzError,
)
from waltz_core.records.record import ClientId, Generation, PartitionId, TransactionId
from waltz_core.server.partition_events import ConnectionId
from waltz_core.wire.messages import FILTER_HEADERS_MAX, LATEST_MARK, MountRequest, MountWriter

# Rule 6. A client uses one ID on a connection, and another ID after 2^31 appends.
CLIENTS_MAX: Final = 64


class PartitionPosition(NamedTuple):
    """A partition, with its generation and its high-water mark."""

    partition_id: PartitionId
    generation: Generation
    high_water_mark: TransactionId

    def __str__(self) -> str:
        return f"partition {self.partition_id}"


@dataclass(slots=True)
class _MountEntry:
    """The latest mount of one client."""

    connection: ConnectionId
    sequence: int
    number: int
    is_ready: bool
    principal: str  # rule 7; empty if the client ID has a proof
    # Whether an append was rejected because of a full queue or a limit (rule 4).
    has_rejected_append: bool = False


class Mounts:
    """The mounts of one partition in one generation."""

    __slots__ = (
        "_clients_by_connection",
        "_disconnected_clients",
        "_limit",
        "_mount_numbers",
        "_mounts",
    )

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._mounts: dict[ClientId, _MountEntry] = {}
        self._clients_by_connection: dict[ConnectionId, list[ClientId]] = {}
        # Fences of disconnected clients: the highest sequence, and the principal. The dict begins
        # with the client that disconnected first.
        self._disconnected_clients: OrderedDict[ClientId, tuple[int, str]] = OrderedDict()
        self._mount_numbers = count(1)

    def highest_sequence(self, client_id: ClientId) -> int | None:
        """Return the highest connection sequence of the client's mounts; None if unknown."""
        mount = self._last_known_mount(client_id)
        return None if mount is None else mount[0]

    def _last_known_mount(self, client_id: ClientId) -> tuple[int, str] | None:
        mount = self._mounts.get(client_id)
        if mount is None:
            return self._disconnected_clients.get(client_id)
        return mount.sequence, mount.principal

    def mount_error(
        self,
        message: MountRequest | MountWriter,
        connection: ConnectionId,
        position: PartitionPosition,
        principal: str = "",
    ) -> WaltzError | None:
        """Return why this connection may not mount; None if it may.

        `principal` is the principal of the connection if access control applies to its client ID
        (rule 7).
        """
        generation, mark = message.req_id.generation, requested_mark_of(message)
        if generation > position.generation:
            return NotOwned(
                f"{position}: the request is for generation {generation} of the partition, but "
                f"this server owns it in generation {position.generation}"
            )
        if generation < position.generation:
            return GenerationMismatch(
                f"{position}: the request is for generation {generation} of the partition, "
                f"which is now in generation {position.generation}"
            )
        if mark < LATEST_MARK:
            return BadRequest(f"{position}: expected a high-water mark of -1 or more, found {mark}")
        if mark > position.high_water_mark:
            return ClientAheadOfLog(
                f"{position}: the client's high-water mark {mark} is above the log's "
                f"high-water mark {position.high_water_mark}. Hint: the client may be connected to "
                "another cluster, or the log has lost transactions."
            )
        limit_error = self._limit_error(message, connection, position)
        client_id, sequence = message.req_id.client_id, message.connection_sequence
        foreign_id_error = self._foreign_id_error(client_id, principal)
        return (
            limit_error or foreign_id_error or self._fenced_error(client_id, connection, sequence)
        )

    def _foreign_id_error(self, client_id: ClientId, principal: str) -> ClientIdDenied | None:
        """Return the error if the client ID belongs to another principal (rule 7)."""
        mount = self._last_known_mount(client_id)
        if not principal or mount is None or mount[1] in ("", principal):
            return None
        return ClientIdDenied(
            f"client ID {client_id} has no proof, so it belongs to the principal that has first "
            f"mounted the partition with this ID, and not to {principal}"
        )

    def _limit_error(
        self,
        message: MountRequest | MountWriter,
        connection: ConnectionId,
        position: PartitionPosition,
    ) -> WaltzError | None:
        """Return the error if the mount exceeds a limit (rule 6)."""
        count = len(message.header_values) if isinstance(message, MountWriter) else 0
        if count > FILTER_HEADERS_MAX:
            return BadRequest(
                f"{position}: expected at most {FILTER_HEADERS_MAX} headers to filter by, found "
                f"{count}"
            )
        others = self._clients_by_connection.get(connection, ())
        if len(others) < CLIENTS_MAX or self.has_mount(message.req_id.client_id, connection):
            return None
        return Overloaded(
            f"{position}: the connection has {CLIENTS_MAX} client IDs already, which is the "
            "limit, and requests another one"
        )

    def _fenced_error(
        self, client_id: ClientId, connection: ConnectionId, sequence: int
    ) -> ConnectionSuperseded | None:
        """Return the error if a newer connection of the client has mounted (rule 1)."""
        highest = self.highest_sequence(client_id)
        if highest is None or sequence > highest:
            return None
        if sequence == highest and self.has_mount(client_id, connection):
            return None
        return ConnectionSuperseded(
            f"client {client_id} has mounted over a newer connection, with connection sequence "
            f"{highest}; this connection has connection sequence {sequence}"
        )

    def begin_mount(
        self, client_id: ClientId, connection: ConnectionId, sequence: int, principal: str = ""
    ) -> None:
        """Start a mount: fence the client's older connections, and bind its ID (rule 7)."""
        assert self._fenced_error(client_id, connection, sequence) is None
        mount = self._mounts.get(client_id)
        if mount is not None:
            self._clients_by_connection[mount.connection].remove(client_id)
        self._disconnected_clients.pop(client_id, None)
        number = next(self._mount_numbers)
        self._mounts[client_id] = _MountEntry(
            connection, sequence, number, is_ready=False, principal=principal
        )
        self._clients_by_connection.setdefault(connection, []).append(client_id)

    def mount_number(self, client_id: ClientId, connection: ConnectionId) -> int:
        """Return the number of the client's mount on this connection; 0 if none (rule 5)."""
        mount = self._mounts.get(client_id)
        return mount.number if mount is not None and mount.connection == connection else 0

    def mount_number_on_arrival(self, client_id: ClientId, connection: ConnectionId) -> int:
        """Return the mount number for an append that arrives now; 0 if it must be rejected."""
        mount = self._mounts.get(client_id)
        is_open = (
            mount is not None and mount.connection == connection and not mount.has_rejected_append
        )
        return mount.number if mount is not None and is_open else 0

    def note_rejected_append(self, client_id: ClientId, connection: ConnectionId) -> None:
        """Record that an append was rejected because of a full queue or a limit.

        No append that arrives later on this mount may enter the log (rule 4).
        """
        mount = self._mounts.get(client_id)
        if mount is not None and mount.connection == connection:
            mount.has_rejected_append = True

    def has_mount(self, client_id: ClientId, connection: ConnectionId) -> bool:
        """Whether the client has mounted, or is mounting, on this connection."""
        mount = self._mounts.get(client_id)
        return mount is not None and mount.connection == connection

    def finish_mount(self, client_id: ClientId, connection: ConnectionId) -> None:
        """Accept appends on this connection from now on: the mount was answered (rule 2)."""
        assert self.has_mount(client_id, connection)
        self._mounts[client_id].is_ready = True

    def is_ready(self, client_id: ClientId, connection: ConnectionId) -> bool:
        """Whether an append of the client on this connection may enter the log."""
        mount = self._mounts.get(client_id)
        return mount is not None and mount.is_ready and mount.connection == connection

    def require_remount(self, client_id: ClientId) -> None:
        """Reject the client's appends until it mounts again, because it has lost a row (rule 4)."""
        mount = self._mounts.get(client_id)
        if mount is not None:
            mount.is_ready = False

    def on_connection_closed(self, connection: ConnectionId) -> None:
        """The connection was closed: end its mounts, but keep their fences (rule 1)."""
        for client_id in self._clients_by_connection.pop(connection, ()):
            mount = self._mounts.pop(client_id)
            self._disconnected_clients[client_id] = mount.sequence, mount.principal
        while len(self._disconnected_clients) > self._limit:
            self._disconnected_clients.popitem(last=False)

    def on_partition_released(self) -> None:
        """The server has released the partition: no connection may append; fences stay (rule 1)."""
        for mount in self._mounts.values():
            mount.is_ready = False

    def on_generation_started(self) -> None:
        """A new generation begins: every client must mount again, with any sequence."""
        self._mounts.clear()
        self._clients_by_connection.clear()
        self._disconnected_clients.clear()

    @property
    def mounted_client_count(self) -> int:
        """The number of mounted clients."""
        return len(self._mounts)


def requested_mark_of(message: MountRequest | MountWriter) -> int:
    """Return the high-water mark in a mount request: the client's mark, or `LATEST_MARK`."""
    if isinstance(message, MountWriter):
        return message.high_water_mark
    return message.client_high_water_mark
