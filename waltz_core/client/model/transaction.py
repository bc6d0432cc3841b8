"""What an application says to the log, and what it hears: contexts, builders, transactions, locks.

These are the words of the application programming model. They know of no connection, no event loop
and no thread, so the asyncio client, the sync client, the SQL callbacks and the in-memory Waltz for
tests all share them.

Rules:
    1. A lock is a name and a key; only its 32-bit hash travels. Locks hold within one partition.
    2. A context may be executed any number of times: each attempt gets a fresh builder with a
       later high-water mark, and nothing of a refused attempt is ever sent again.
    3. Exactly one of `on_completion`, `on_expiration`, `on_exception` ends a context.
"""

import operator
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Protocol, SupportsIndex, TypeVar, cast, overload

from waltz_core import errors
from waltz_core.client.model.predecessors import FollowedState, Predecessor
from waltz_core.client.model.serializers import MSGPACK, Serializer
from waltz_core.records.checksum import crc32
from waltz_core.records.record import (
    BEFORE_FIRST,
    LOCKS_MAX,
    TRANSACTION_BYTES_MAX,
    ClientId,
    Generation,
    PartitionId,
    ReqId,
    TransactionId,
    lock_hash,
    spread,
)

INT32_MIN, INT32_MAX = -(1 << 31), (1 << 31) - 1
INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1

T = TypeVar("T")


# ---------------------------------------------------------------------------------------------
# locks


def lock(name: str, key: int | str = 0) -> int:
    """Return the 32-bit hash that is sent for a lock (docs/design/wire-format.md 4).

    A text key stands for the CRC-32 of its UTF-8 bytes, as in Spark's `functions.lock`.

    Raises:
        BadRequest: the name is no text, or the key is neither text nor an integer of 64 bits.
    """
    if not isinstance(name, str):
        raise errors.BadRequest(f"lock {name!r}: expected a text as its name")
    try:
        number = crc32(key.encode()) if isinstance(key, str) else operator.index(key)
    except (TypeError, UnicodeEncodeError):
        raise errors.BadRequest(
            f"lock {name!r}: expected a whole number or a text as its key, found {key!r}"
        ) from None
    if not INT64_MIN <= number <= INT64_MAX:
        raise errors.BadRequest(f"lock {name!r}: expected a key of 64 bits, found {number}")
    return lock_hash(name, number)


def partition_of(hashed: int, partition_count: int) -> PartitionId:
    """Return the partition of a lock hash, the same on every client and in Spark."""
    return spread(hashed, partition_count)


def check_locks(kind: str, locks: Iterable[int]) -> tuple[int, ...]:
    """Return lock hashes as a tuple; raises BadRequest for what is none, or more than one takes."""
    try:
        checked = tuple(locks)
    except TypeError:
        raise errors.BadRequest(
            f"{kind} locks: expected a list of hashes as lock(name, key) makes them, "
            f"found {locks!r}"
        ) from None
    if len(checked) > LOCKS_MAX:
        raise errors.BadRequest(f"{kind} locks: expected at most {LOCKS_MAX}, found {len(checked)}")
    for hashed in checked:
        if not _is_int32(hashed):
            raise errors.BadRequest(
                f"{kind} locks: expected 32-bit hashes as lock(name, key) makes them, "
                f"found {hashed!r}"
            )
    return checked


# ---------------------------------------------------------------------------------------------
# writing


class TransactionBuilder:
    """One attempt at a transaction: what `execute` fills in."""

    __slots__ = (
        "append_locks",
        "client_high_water_mark",
        "data",
        "followed_from",
        "following",
        "header",
        "partition_id",
        "read_locks",
        "write_locks",
    )

    def __init__(self, partition_id: PartitionId, client_high_water_mark: TransactionId) -> None:
        self.partition_id = partition_id
        # Taken before `execute`: what the application reads is at least this new. An application
        # that reads its mark together with its data, from one database transaction, puts the
        # mark it has read in place of this one.
        self.client_high_water_mark = client_high_water_mark
        # For a context that `follows`: what it was told, and the mark from which it has asked.
        self.following: FollowedState | None = None
        self.followed_from: TransactionId | None = None
        self.header = 0
        self.data: bytes | None = None
        self.write_locks: tuple[int, ...] = ()
        self.read_locks: tuple[int, ...] = ()
        self.append_locks: tuple[int, ...] = ()

    def predecessors(self, mark: int) -> tuple[Predecessor, ...]:
        """Return what has been written under its locks and a state at a mark does not hold.

        For a context that `follows`, to compute from that state as though all of them were in it,
        in the order of their ids. Read the mark together with the state: callbacks may apply one of
        them meanwhile. The mark becomes the transaction's.
        """
        self.client_high_water_mark = self.followed_from = check_mark(mark)
        if self.following is None:
            return ()
        return self.following.claim(self.followed_from)[1].above(self.followed_from)

    def claim(self) -> tuple[TransactionId, FollowedState | None]:
        """Return the mark to send, and what is followed: nothing that was not asked for."""
        mark = check_mark(self.client_high_water_mark)
        if self.following is None or self.followed_from is None:
            return mark, None  # told at once it would come again at once, and no further
        if self.followed_from != mark:  # it was computed from another state than it is judged by
            return self.following.without(mark)
        return self.following.claim(mark, (*self.write_locks, *self.read_locks))

    def set_header(self, header: int) -> None:
        """Set the application's metadata, a 32-bit integer; 0 if never called."""
        self.header = check_header(header)

    def set_transaction_data(self, value: T, serializer: Serializer[T] = MSGPACK) -> None:
        """Set the payload; raises TooLarge over 4 MiB."""
        self.data = check_data(serializer.serialize(value))

    def set_write_locks(self, locks: Iterable[int]) -> None:
        """Check these locks against the mark, and leave this transaction's id on them."""
        self.write_locks = check_locks("write", locks)

    def set_read_locks(self, locks: Iterable[int]) -> None:
        """Check these locks against the mark."""
        self.read_locks = check_locks("read", locks)

    def set_append_locks(self, locks: Iterable[int]) -> None:
        """Leave this transaction's id on these locks without checking them."""
        self.append_locks = check_locks("append", locks)


class TransactionContext(ABC):
    """A transaction that knows how to compute itself anew when it comes too late.

    `retries_max` and `timeout_ms` bound the attempts; None means no bound of its own. The hooks
    are called once each at most, apart from `on_lock_failure`, which tells every refused attempt.
    """

    retries_max: int | None = None
    timeout_ms: int | None = 60_000
    # Whether `execute` asks for `builder.predecessors`, so that an attempt need not wait until what
    # was faster is durable; for locks that many write.
    follows: bool = False

    def __init__(self) -> None:
        self.creation_time_ms = time.time_ns() // 1_000_000

    @abstractmethod
    def partition_id(self, partition_count: int) -> int:
        """Return the partition; `partition_of(lock(...), partition_count)` is a good choice."""

    @abstractmethod
    def execute(self, builder: TransactionBuilder) -> bool:
        """Fill in the builder. False means that there is nothing to do: the context completes.

        Runs again with a new builder whenever an attempt was refused. In `AsyncWaltzClient` it
        may be `async`; in `WaltzClient` it runs on a worker thread after the first attempt.
        """

    # The hooks do nothing unless overridden; a context needs none of them.

    def on_completion(self, result: bool) -> None:  # noqa: B027, FBT001
        """True: the transaction is in the log. False: `execute` gave it up."""

    def on_application(self) -> None:  # noqa: B027
        """The client's own callbacks have applied the transaction (needs a feed)."""

    def on_expiration(self) -> None:  # noqa: B027
        """The deadline has passed, or the retries are used up; it is not in the log."""

    def on_exception(self, error: BaseException) -> None:  # noqa: B027
        """`execute` raised, or no retry can help. Only `OutcomeUnknown` leaves it in doubt."""

    def on_lock_failure(self) -> None:  # noqa: B027
        """An attempt was refused by a lock; it is tried again once the winner was consumed."""


def check_context(context: object) -> TransactionContext:
    """Return a context; raises UsageError for what is none, a function that was not called, say,
    and for limits that are no numbers.
    """
    if not isinstance(context, TransactionContext):
        raise errors.UsageError(
            f"expected a TransactionContext, or what a function under @transactional returns "
            f"when it is called; found {context!r}"
        )
    for name in ("timeout_ms", "retries_max"):
        limit: object = getattr(context, name)
        if limit is not None and not isinstance(limit, float | SupportsIndex):
            raise errors.UsageError(f"{name}: expected a number, or None; found {limit!r}")
    return context


def check_partition(partition: object, cluster: str, partition_count: int) -> PartitionId:
    """Return a partition; raises UnknownPartition, BadRequest for what is no whole number."""
    try:
        number = operator.index(cast("SupportsIndex", partition))
    except TypeError:
        raise errors.BadRequest(
            f"partition: expected a whole number, found {partition!r}"
        ) from None
    if not 0 <= number < partition_count:
        raise errors.UnknownPartition(
            f"there is no partition {number}: cluster {cluster!r} has "
            f"partitions 0..{partition_count - 1}"
        )
    return PartitionId(number)


def each_of(what: str, given: Iterable[T]) -> tuple[T, ...]:
    """Return what was given; raises BadRequest for a single one where several are asked for."""
    try:
        each = iter(given)
    except TypeError:
        raise errors.BadRequest(
            f"{what}: expected a list such as [{given!r}], found {given!r}"
        ) from None
    return tuple(each)  # what a generator raises is its own


def check_range(partition: PartitionId, first: int, last: int) -> None:
    """Refuse a range that begins before the log, ends before it begins, or has other than
    transaction ids as its ends; raises BadRequest.
    """
    for name, end in (("first", first), ("last", last)):
        if isinstance(end, bool) or not isinstance(end, SupportsIndex):
            raise errors.BadRequest(
                f"range of partition {partition}: {name}: expected a transaction id, found {end!r}"
            )
    if first < 0 or last < first - 1:
        raise errors.BadRequest(
            f"range of partition {partition}: expected 0 <= first <= last, found {first}..{last}"
        )


def check_header(header: int) -> int:
    """Return a header; raises BadRequest for what is no 32-bit integer."""
    if not _is_int32(header):
        raise errors.BadRequest(
            f"header: expected a signed 32-bit integer ({INT32_MIN}..{INT32_MAX}), found {header!r}"
        )
    return header


def check_mark(mark: object, name: str = "client_high_water_mark") -> TransactionId:
    """Return one partition's mark; raises BadRequest for what is no transaction id and not -1."""
    try:
        number = operator.index(cast("SupportsIndex", mark))
    except TypeError:
        number = INT64_MIN
    if isinstance(mark, bool) or not BEFORE_FIRST <= number <= INT64_MAX:
        raise errors.BadRequest(
            f"{name}: expected a transaction id, or -1 for none, found {mark!r} "
            f"({type(mark).__name__})"
        )
    return TransactionId(number)


def _is_int32(value: object) -> bool:
    return isinstance(value, int) and INT32_MIN <= value <= INT32_MAX


def check_data(data: bytes | bytearray | memoryview) -> bytes:
    """Return transaction data; raises BadRequest for no bytes, TooLarge over 4 MiB."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise errors.BadRequest(f"transaction data: expected bytes, found {type(data).__name__}")
    size = data.nbytes if isinstance(data, memoryview) else len(data)
    if size > TRANSACTION_BYTES_MAX:
        raise errors.TooLarge(
            f"transaction data: expected at most {TRANSACTION_BYTES_MAX} bytes, found {size}"
        )
    return bytes(data)


# ---------------------------------------------------------------------------------------------
# reading


class DataSource(Protocol):
    """Where a transaction's data comes from when it is asked for."""

    async def data_of(self, transaction_id: TransactionId) -> bytes:
        """Fetch the data of one transaction, from memory where it is there already."""

    def data_of_blocking(self, transaction_id: TransactionId) -> bytes:
        """Fetch the same from a thread that is not the event loop's."""


class FeedItem:
    """What the feed tells of one committed transaction; its data is fetched when asked for."""

    __slots__ = ("_source", "_words", "partition_id", "transaction_id")

    def __init__(
        self,
        partition_id: PartitionId,
        transaction_id: TransactionId,
        words: tuple[int, int, int, int, int],
        source: DataSource,
    ) -> None:
        self.partition_id = partition_id
        self.transaction_id = transaction_id
        # The five numbers of a feed header; a million of them a minute need no object each.
        self._words = words
        self._source = source

    @property
    def req_id(self) -> ReqId:
        """The identity of the append that wrote the transaction."""
        client_id, generation, partition_id, sequence, _ = self._words
        return ReqId(
            ClientId(client_id), Generation(generation), PartitionId(partition_id), sequence
        )

    @property
    def header(self) -> int:
        """The application's metadata."""
        return self._words[4]

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(partition {self.partition_id}, "
            f"id {self.transaction_id}, header {self.header})"
        )


class Transaction(FeedItem):
    """A committed transaction as `Callbacks` see it, on a worker thread of `WaltzClient`."""

    __slots__ = ()

    def data(self) -> bytes:
        """Return the data, fetched together with its neighbours' and kept for a while.

        Raises Unavailable when it cannot be had in time, Damaged when it is not what was written.
        """
        return self._source.data_of_blocking(self.transaction_id)

    @overload
    def value(self) -> Any: ...  # noqa: ANN401 - whatever msgpack has

    @overload
    def value(self, serializer: Serializer[T]) -> T: ...

    def value(self, serializer: Serializer[Any] = MSGPACK) -> Any:
        """Return the data deserialized."""
        return serializer.deserialize(self.data())


class AsyncTransaction(FeedItem):
    """A committed transaction as `AsyncCallbacks` see it, on the event loop."""

    __slots__ = ()

    async def data(self) -> bytes:
        """Return the data, fetched together with its neighbours' and kept for a while.

        Raises Unavailable when it cannot be had in time, Damaged when it is not what was written.
        """
        return await self._source.data_of(self.transaction_id)

    @overload
    async def value(self) -> Any: ...  # noqa: ANN401 - whatever msgpack has

    @overload
    async def value(self, serializer: Serializer[T]) -> T: ...

    async def value(self, serializer: Serializer[Any] = MSGPACK) -> Any:
        """Return the data deserialized."""
        return serializer.deserialize(await self.data())
