"""Passes the segment files of a storage to readers on its machine (decision 016).

Rules:
    1. With access control, a request must contain a ticket. The storage has sent the ticket over a
       connection, together with record locations. This connection must still be open, and must
       still be permitted to read the partition (decision 048, AC 12).
    2. A ticket consists of the number of its connection and a code that only this process can
       compute. So the storage keeps no list of tickets. No ticket is valid after its connection or
       this process has ended.
"""

import asyncio
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from waltz_core.errors import PermissionDenied, UnknownPartition
from waltz_core.records.record import NO_SESSION, PartitionId
from waltz_core.storage.disk.file_system import descriptor_for_reader
from waltz_core.storage.process.served_replicas import ServedReplicas
from waltz_core.storage.service.storage_engine import StorageEngine
from waltz_core.storage.service.work import ConnectionId
from waltz_core.storage.service.writer_threads import CallThreads
from waltz_core.transport import descriptor_passing
from waltz_core.transport.net import Link
from waltz_core.wire.messages import RangeBytes, RangeRaw, StorageMessage
from waltz_core.wire.record_locations import (
    LOCATIONS,
    SEGMENT_REQUEST_BYTES,
    TICKET_BYTES,
    decode_segment,
    socket_name_of,
)

_NUMBER_BYTES: Final = 8


class SegmentSharing:
    """Passes segment files to readers; `links` are the open connections of the storage."""

    def __init__(
        self, links: Mapping[ConnectionId, Link], *, cluster_key: bytes, needs_ticket: bool
    ) -> None:
        self._links = links
        self._cluster_key = cluster_key
        self._needs_ticket = needs_ticket
        self._secret = secrets.token_bytes(32)

    def with_ticket(self, connection: ConnectionId, answer: StorageMessage) -> StorageMessage:
        """Add the connection's ticket to record locations; return any other answer unchanged."""
        if self._needs_ticket and isinstance(answer, RangeBytes) and answer.form == LOCATIONS:
            return replace(answer, ticket=self._ticket_of(connection))
        return answer

    async def serve(
        self, address: str, engine: StorageEngine, serving: ServedReplicas, pool: CallThreads
    ) -> None:
        """Serve requests for files until cancelled; return if the system does not support this.

        The files are opened on a thread of `pool`.
        """
        loop = asyncio.get_running_loop()

        async def open_segment(request: bytes) -> int:
            partition_id, first, ticket = decode_segment(request)
            if self._needs_ticket:
                self._check(ticket, partition_id)
            if partition_id not in serving.logs or first < 0:
                raise UnknownPartition(
                    f"this storage has no segment of partition {partition_id} that begins at "
                    f"transaction {first}"
                )
            path = engine.segment_path(partition_id, first)
            return await loop.run_in_executor(pool, descriptor_for_reader, path)

        name = socket_name_of(self._cluster_key, address, with_tickets=self._needs_ticket)
        request_bytes = SEGMENT_REQUEST_BYTES + (TICKET_BYTES if self._needs_ticket else 0)
        await descriptor_passing.serve_descriptors(name, request_bytes, open_segment)

    def _ticket_of(self, connection: ConnectionId) -> bytes:
        number = connection.to_bytes(_NUMBER_BYTES, "big")
        return (number + hmac.digest(self._secret, number, "sha256"))[:TICKET_BYTES]

    def _check(self, ticket: bytes, partition_id: PartitionId) -> None:
        """Raise PermissionDenied, or another error of the port, unless rule 1 is fulfilled."""
        connection = ConnectionId(int.from_bytes(ticket[:_NUMBER_BYTES], "big"))
        link = self._links.get(connection)
        if (
            link is None
            or link.is_closed
            or not hmac.compare_digest(ticket, self._ticket_of(connection))
        ):
            raise PermissionDenied(
                f"partition {partition_id}: expected the ticket of a connection that is "
                "open, found another one"
            )
        read = RangeRaw(
            NO_SESSION, -1, partition_id, 0, 0, 0, LOCATIONS, whole_batches=False, reader=True
        )
        error = link.denial(read)
        if error is not None:
            raise error
