"""Transactions in flight, from which a writer computes its next transaction.

The server sends these transactions, the predecessors, to the writer (the author of the next
transaction).

Predecessors may get lost, so they are valid only in the store session and the mount in which they
were received. Marks, feeds and callbacks outlive sessions and mounts, so they never depend on
predecessors.

Rules (decision 017):
    1. The author's own state contains everything up to `base`. `predecessors` are all transactions
       above `base`, up to `mark`, that have written one of the author's locks.
    2. If a row depends on predecessors from another mount, the row is not sent: its author computes
       the row again (`outbox.py`).
    3. If a row that depends on predecessors is lost, the row is not sent again, for the same reason
       (`appends.py`).
    4. The predecessors cover only the locks of the author's last rejected attempt. If the next
       attempt has another lock, the client sends the attempt with the mark of the author's own
       state. The request still contains the session, because the attempt was computed from
       transactions that may be lost with the session.
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, overload

from waltz_core import errors
from waltz_core.client.model.serializers import MSGPACK, Serializer
from waltz_core.records.checksum import crc32
from waltz_core.records.record import (
    BEFORE_FIRST,
    NO_SESSION,
    RECORD_OVERHEAD_BYTES,
    RECORD_PREFIX,
    PartitionId,
    ReqId,
    SessionId,
    TransactionId,
)
from waltz_core.values import value
from waltz_core.wire.messages import Predecessors

if TYPE_CHECKING:
    from waltz_core.encryption.envelopes import Encryption

# The maximum number of predecessors that are kept from attempt to attempt. If there are more, the
# author waits until the predecessors are in the log.
PREDECESSORS_MAX = 1_024
CRC_BYTES: Final = 4
_LENGTH_STRUCT: Final = struct.Struct(">i")

T = TypeVar("T")


class Predecessor(NamedTuple):
    """A transaction that wrote one of the author's locks and is missing in the author's state.

    The predecessor is already in the log, or in flight. A transaction that depends on the
    predecessor enters the log only if the predecessor does.
    """

    transaction_id: TransactionId
    req_id: ReqId
    header: int
    # None if the data could not be decrypted. The type `Any` spares most users a check for None.
    data: bytes | Any

    @property
    def data_error(self) -> str | None:
        """The reason why there is no data; None in all other cases."""
        return None

    @overload
    def value(self) -> Any: ...  # noqa: ANN401 - any msgpack value

    @overload
    def value(self, serializer: Serializer[T]) -> T | Any: ...  # noqa: ANN401 - None without data

    def value(self, serializer: Serializer[Any] = MSGPACK) -> Any:
        """Return the deserialized data; None if the data could not be decrypted."""
        return None if self.data is None else serializer.deserialize(self.data)


class _UnreadablePredecessor(Predecessor):
    """A predecessor whose data could not be decrypted; like `Predecessor`, a tuple of four."""

    reason: str | None = None

    @property
    def data_error(self) -> str | None:
        return self.reason


@value(frozen=True, slots=True, eq=False)
class PipelinedState:
    """The transactions that an author has received in addition to its own state (rule 1)."""

    session_id: SessionId
    partition_id: PartitionId
    mount: int  # the number of the mount in which it was received
    base_mark: TransactionId
    mark: TransactionId
    received_predecessors: tuple[Predecessor, ...]  # the predecessors, as they are in the log
    locks: frozenset[int]  # the locks that the predecessors cover
    encryption: "Encryption | None" = None

    @property
    def has_received_predecessors(self) -> bool:
        """Whether the author has received predecessors; False if this state only requests them."""
        return self.session_id != NO_SESSION

    @property
    def predecessors(self) -> tuple[Predecessor, ...]:
        """All received predecessors, decrypted if the client has keys."""
        return self.predecessors_above(BEFORE_FIRST)

    def predecessors_above(self, mark: TransactionId) -> tuple[Predecessor, ...]:
        """Return the predecessors that a state at this mark does not contain."""
        newer = tuple(
            predecessor
            for predecessor in self.received_predecessors
            if predecessor.transaction_id > mark
        )
        if self.encryption is None:
            return newer
        return tuple(self._decrypt(predecessor, self.encryption) for predecessor in newer)

    def _decrypt(self, predecessor: Predecessor, encryption: "Encryption") -> Predecessor:
        payload = encryption.decrypt(
            predecessor.data, partition=self.partition_id, header=predecessor.header
        )
        if payload.error is None:
            return predecessor._replace(data=payload.data)
        unreadable = _UnreadablePredecessor(*predecessor[:-1], None)
        unreadable.reason = payload.error
        return unreadable

    def without_predecessors(self) -> "PipelinedState":
        """Return the state of the same author before it has received any predecessors."""
        return initial_state(self.encryption)

    def mark_and_state(
        self, mark: TransactionId, locks: Iterable[int] = ()
    ) -> tuple[TransactionId, "PipelinedState"]:
        """Return the mark and the pipelined state to send for a row.

        The author computed the row from its own state at `mark`. `locks` are the locks of the row
        that the server checks.
        """
        if not self.has_received_predecessors or not self.base_mark <= mark < self.mark:
            return mark, self.without_predecessors()
        if not self.locks.issuperset(locks):
            return self.without_predecessors_at(mark)
        return self.mark, self

    def without_predecessors_at(
        self, mark: TransactionId
    ) -> tuple[TransactionId, "PipelinedState"]:
        """Return the mark and the state to send for a row that must not use the predecessors.

        The server then checks all locks of the row against `mark` (rule 4).
        """
        if not self.has_received_predecessors:
            return mark, self.without_predecessors()
        return mark, replace(
            self, base_mark=mark, mark=mark, received_predecessors=(), locks=frozenset()
        )

    def with_predecessors(
        self, message: Predecessors, mark: TransactionId, mount: int, locks: Iterable[int]
    ) -> "PipelinedState":
        """Return this state, extended by the predecessors that came with a rejection at `mark`.

        `locks` are the write and read locks of the rejected row. Raises RemoteProtocolError unless
        the IDs of the predecessors are ascending, above `mark`, and at most `message.last`.
        """
        earlier_predecessors, base_mark = (
            (self.received_predecessors, self.base_mark)
            if self.has_received_predecessors
            else ((), mark)
        )
        received = list(_predecessors_in(message))
        ids = [mark, *(predecessor.transaction_id for predecessor in received)]
        if ids != sorted(set(ids)) or ids[-1] > message.last:
            raise errors.RemoteProtocolError(
                f"predecessors of append {message.req_id}: expected ascending "
                f"transaction IDs from {mark} to {message.last}, found {ids[1:]}"
            )
        if len(earlier_predecessors) + len(received) > PREDECESSORS_MAX:
            return self.without_predecessors()
        all_predecessors = (*earlier_predecessors, *received)
        return PipelinedState(
            SessionId(message.session_id),
            message.req_id.partition_id,
            mount,
            base_mark,
            TransactionId(message.last),
            all_predecessors,
            frozenset(locks),
            self.encryption,
        )


def _predecessors_in(message: Predecessors) -> Iterator[Predecessor]:
    """Yield the predecessors in a message; raises RemoteProtocolError for invalid records."""
    records, start = bytes(message.records), 0
    for (length,) in _LENGTH_STRUCT.iter_unpack(message.lengths):
        crc_at = start + length - CRC_BYTES
        if length < RECORD_OVERHEAD_BYTES or crc_at + CRC_BYTES > len(records):
            break
        actual_crc = crc32(records[start:crc_at])
        if actual_crc != int.from_bytes(records[crc_at : crc_at + CRC_BYTES], "big"):
            break
        transaction_id, req_id, header, _, _ = RECORD_PREFIX.unpack_from(records, start)
        data = records[start + RECORD_PREFIX.size : crc_at]
        yield Predecessor(TransactionId(transaction_id), ReqId.from_bytes(req_id), header, data)
        start += length
    if start != len(records):
        raise errors.RemoteProtocolError(
            f"predecessors of append {message.req_id}: expected a record at byte "
            f"{start}, found other bytes"
        )


# The state of an author that requests predecessors and has received none yet.
NO_PREDECESSORS = PipelinedState(
    NO_SESSION, PartitionId(-1), 0, BEFORE_FIRST, BEFORE_FIRST, (), frozenset()
)


def initial_state(encryption: "Encryption | None") -> PipelinedState:
    """Return `NO_PREDECESSORS` with the encryption of a client, to decrypt predecessors."""
    return (
        NO_PREDECESSORS if encryption is None else replace(NO_PREDECESSORS, encryption=encryption)
    )
