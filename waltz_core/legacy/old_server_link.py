"""The partitions of one connection to an original server.

Partitions share what the server knows of a connection, its sequence, and nothing else; each of them
is an `OriginalPartition`.

Rule: all mounts of one connection have the connection sequence of the first one. An original goes
by that for as long as the connection lasts, and drops whatever comes from another one.
"""

from collections.abc import Iterable

from waltz_core.legacy.old_server_stream import (
    Effect,
    OriginalPartition,
)
from waltz_core.wire.messages import ClientMessage, MountWriter


class OriginalLink:
    """The partitions of one connection to an original."""

    def __init__(self) -> None:
        self._partitions: dict[int, OriginalPartition] = {}
        self._connection_sequence: int | None = None
        # The earliest that was wanted since all of them were asked: most have nothing to wake for.
        self._wake_at_ms: int | None = None

    @property
    def wake_at_ms(self) -> int | None:
        """When to call `wake` next, or before that; what is not due then is left alone."""
        return self._wake_at_ms

    def say(self, message: ClientMessage, now_ms: int) -> list[Effect]:
        """Say what a stream says; raises LocalProtocolError for what an original cannot hear."""
        if self._connection_sequence is None and isinstance(message, MountWriter):
            self._connection_sequence = message.connection_sequence
        assert self._connection_sequence is not None, "a stream mounts first"
        partition_id = message.req_id.partition_id
        partition = self._partitions.get(partition_id)
        if partition is None:
            partition = self._partitions[partition_id] = OriginalPartition(partition_id)
        effects = partition.say(message, self._connection_sequence, now_ms)
        self._note(partition)
        return effects

    def hear(self, received: Iterable[ClientMessage], now_ms: int) -> list[Effect]:
        """Take in what the server has sent, in order."""
        by_partition: dict[int, list[ClientMessage]] = {}
        for message in received:
            by_partition.setdefault(message.req_id.partition_id, []).append(message)
        effects: list[Effect] = []
        for partition_id, each in by_partition.items():
            partition = self._partitions.get(partition_id)
            if partition is not None:
                assert self._connection_sequence is not None
                effects += partition.hear(each, self._connection_sequence, now_ms)
                self._note(partition)
        return effects

    def proven(
        self, partition_id: int, number: int, *, is_owner: bool, now_ms: int
    ) -> list[Effect]:
        """ZooKeeper has answered what `Prove` has asked."""
        partition = self._partitions[partition_id]
        effects = partition.proven(number, is_owner=is_owner, now_ms=now_ms)
        self._note(partition)
        return effects

    def wake(self, now_ms: int) -> list[Effect]:
        """Do what is due."""
        self._wake_at_ms = None
        effects: list[Effect] = []
        for partition in self._partitions.values():
            effects += partition.wake(now_ms)
            self._note(partition)
        return effects

    def _note(self, partition: OriginalPartition) -> None:
        wanted_ms = partition.wake_at_ms
        if wanted_ms is not None and (self._wake_at_ms is None or wanted_ms < self._wake_at_ms):
            self._wake_at_ms = wanted_ms
