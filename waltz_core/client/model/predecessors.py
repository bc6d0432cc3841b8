"""What an author has been told of transactions that are in flight, to compute the next one from it.

It is the one thing that a client knows of what may never be in the log. It is good for the store
session and the mount in which it was told, and nothing that is kept longer is made of it: no mark,
no feed, no callback.

Rules (decision 017):
    1. An author has seen everything up to `base` in his own state, and `predecessors` are all
       above it, up to `mark`, that have written one of his locks.
    2. What is sent in another mount than the one in which it was told is not sent at all: its
       author computes anew (`outbox.py`).
    3. What was sent and lost is never sent again as it is, for the same reason (`appends.py`).
    4. Of locks that he was not told of he has seen what his own state holds. An attempt with one of
       them is sent with its state's mark, and with the session all the same: it was computed from
       what may be lost with that.
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeVar, overload

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

# More than that is not carried from attempt to attempt: the author then waits for the log.
CARRIED_MAX = 1_024
CRC_BYTES: Final = 4
_LENGTH: Final = struct.Struct(">i")

T = TypeVar("T")


class Predecessor(NamedTuple):
    """A transaction with a lock of the author's that his state does not hold yet.

    It is in the log already, or in flight in the order of its id. What follows it is in the log
    only if it is.
    """

    transaction_id: TransactionId
    req_id: ReqId
    header: int
    data: bytes

    @overload
    def value(self) -> Any: ...  # noqa: ANN401 - whatever msgpack has

    @overload
    def value(self, serializer: Serializer[T]) -> T: ...

    def value(self, serializer: Serializer[Any] = MSGPACK) -> Any:
        """Return the data deserialized."""
        return serializer.deserialize(self.data)


@value(frozen=True, slots=True, eq=False)
class FollowedState:
    """What an author has seen beyond his own state; see the module's rules."""

    session_id: SessionId
    partition_id: PartitionId
    mount: int  # the number of the mount in which it was told
    base: TransactionId
    mark: TransactionId
    predecessors: tuple[Predecessor, ...]
    locks: frozenset[int]  # which the predecessors are those of

    @property
    def has_seen(self) -> bool:
        """Whether anything was told yet; if not, it says only that the author wants to know."""
        return self.session_id != NO_SESSION

    def above(self, mark: TransactionId) -> tuple[Predecessor, ...]:
        """Return those that a state at this mark does not hold."""
        return tuple(each for each in self.predecessors if each.transaction_id > mark)

    def claim(
        self, mark: TransactionId, locks: Iterable[int] = ()
    ) -> tuple[TransactionId, "FollowedState"]:
        """Return the mark to send, and with what, for what was computed from a state at a mark.

        `locks` are those that are checked against it.
        """
        if not self.has_seen or not self.base <= mark < self.mark:
            return mark, FOLLOW
        if not self.locks.issuperset(locks):
            return self.without(mark)
        return self.mark, self

    def without(self, mark: TransactionId) -> tuple[TransactionId, "FollowedState"]:
        """Return the same for what was computed from it and is judged by its own mark (rule 4)."""
        if not self.has_seen:
            return mark, FOLLOW
        return mark, replace(self, base=mark, mark=mark, predecessors=(), locks=frozenset())

    def told(
        self, message: Predecessors, mark: TransactionId, mount: int, locks: Iterable[int]
    ) -> "FollowedState":
        """Return what an author knows who was refused with `mark`, with this in his hands before.

        `locks` are the write and read locks that he was refused with. Raises RemoteProtocolError
        for what does not follow the mark.
        """
        known, base = (self.predecessors, self.base) if self.has_seen else ((), mark)
        told = list(_predecessors_in(message))
        ids = [mark, *(each.transaction_id for each in told)]
        if ids != sorted(set(ids)) or ids[-1] > message.last:
            raise errors.RemoteProtocolError(
                f"predecessors {tuple(message.req_id)}: expected ids that rise from {mark} to "
                f"{message.last}, found {ids[1:]}"
            )
        if len(known) + len(told) > CARRIED_MAX:
            return FOLLOW
        found = (*known, *told)
        return FollowedState(
            SessionId(message.session_id),
            message.req_id.partition_id,
            mount,
            base,
            TransactionId(message.last),
            found,
            frozenset(locks),
        )


def _predecessors_in(message: Predecessors) -> Iterator[Predecessor]:
    """Yield what the records say; raises RemoteProtocolError for bytes that are none."""
    records, start = bytes(message.records), 0
    for (length,) in _LENGTH.iter_unpack(message.lengths):
        crc_at = start + length - CRC_BYTES
        if length < RECORD_OVERHEAD_BYTES or crc_at + CRC_BYTES > len(records):
            break
        found = crc32(records[start:crc_at])
        if found != int.from_bytes(records[crc_at : crc_at + CRC_BYTES], "big"):
            break
        transaction_id, req_id, header, _, _ = RECORD_PREFIX.unpack_from(records, start)
        data = records[start + RECORD_PREFIX.size : crc_at]
        yield Predecessor(TransactionId(transaction_id), ReqId.from_bytes(req_id), header, data)
        start += length
    if start != len(records):
        raise errors.RemoteProtocolError(
            f"predecessors {tuple(message.req_id)}: what stands at byte {start} is no record"
        )


# An author who wants to follow and has seen nothing yet.
FOLLOW = FollowedState(NO_SESSION, PartitionId(-1), 0, BEFORE_FIRST, BEFORE_FIRST, (), frozenset())
