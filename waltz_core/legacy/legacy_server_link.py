"""The partitions of one connection to a 0.13 server, as a state machine.

Each partition is a `LegacyServerPartition`; the partitions share only the connection sequence.

Rule: all mounts of one connection have the connection sequence of the first mount. The server
stores this sequence as long as the connection exists, and drops messages with another sequence.
"""

from collections.abc import Sequence
from typing import TypeAlias

from waltz_core.legacy.legacy_server_stream import Effect, LegacyServerPartition
from waltz_core.machine import Wakeup
from waltz_core.records.record import PartitionId
from waltz_core.values import value
from waltz_core.wire.messages import ClientMessage, MountWriter


@value(frozen=True, slots=True)
class SendToLegacyServer:
    """A message from a stream, to send to the server."""

    message: ClientMessage


@value(frozen=True, slots=True)
class ReceivedFromLegacyServer:
    """Messages from the server, in order."""

    messages: Sequence[ClientMessage]


@value(frozen=True, slots=True)
class OwnershipChecked:
    """ZooKeeper has answered `CheckOwnership`: whether the server owns the partition."""

    partition_id: PartitionId
    number: int
    is_owner: bool


Event: TypeAlias = SendToLegacyServer | ReceivedFromLegacyServer | OwnershipChecked | Wakeup


class LegacyServerLink:
    """The partitions of one connection to a 0.13 server."""

    def __init__(self) -> None:
        self._partitions: dict[int, LegacyServerPartition] = {}
        self._connection_sequence: int | None = None
        # The earliest wake-up time of all partitions, or an earlier time. Most partitions have no
        # wake-up time.
        self._wake_at_ms: int | None = None

    @property
    def wake_at_ms(self) -> int | None:
        """The time of the next `Wakeup`; it may be too early."""
        return self._wake_at_ms

    def step(self, event: Event, now_ms: int) -> list[Effect]:
        """Process one event; raises LocalProtocolError for a request that 0.13 does not have."""
        match event:
            case SendToLegacyServer():
                return self._send(event.message, now_ms)
            case ReceivedFromLegacyServer():
                return self._receive(event.messages, now_ms)
            case OwnershipChecked():
                partition = self._partitions[event.partition_id]
                effects = partition.on_ownership_checked(
                    event.number, is_owner=event.is_owner, now_ms=now_ms
                )
                self._update_wake_time(partition)
                return effects
            case Wakeup():
                return self._wake(now_ms)

    def _send(self, message: ClientMessage, now_ms: int) -> list[Effect]:
        if self._connection_sequence is None and isinstance(message, MountWriter):
            self._connection_sequence = message.connection_sequence
        assert self._connection_sequence is not None, "a stream mounts first"
        partition_id = message.req_id.partition_id
        partition = self._partitions.get(partition_id)
        if partition is None:
            partition = self._partitions[partition_id] = LegacyServerPartition(partition_id)
        effects = partition.send(message, self._connection_sequence, now_ms)
        self._update_wake_time(partition)
        return effects

    def _receive(self, received: Sequence[ClientMessage], now_ms: int) -> list[Effect]:
        by_partition: dict[int, list[ClientMessage]] = {}
        for message in received:
            by_partition.setdefault(message.req_id.partition_id, []).append(message)
        effects: list[Effect] = []
        for partition_id, messages_of_partition in by_partition.items():
            partition = self._partitions.get(partition_id)
            if partition is not None:
                assert self._connection_sequence is not None
                effects += partition.receive(
                    messages_of_partition, self._connection_sequence, now_ms
                )
                self._update_wake_time(partition)
        return effects

    def _wake(self, now_ms: int) -> list[Effect]:
        self._wake_at_ms = None
        effects: list[Effect] = []
        for partition in self._partitions.values():
            effects += partition.wake(now_ms)
            self._update_wake_time(partition)
        return effects

    def _update_wake_time(self, partition: LegacyServerPartition) -> None:
        wanted_ms = partition.wake_at_ms
        if wanted_ms is not None and (self._wake_at_ms is None or wanted_ms < self._wake_at_ms):
            self._wake_at_ms = wanted_ms
