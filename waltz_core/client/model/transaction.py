"""The application programming model: contexts, builders, transactions and locks.

These types depend on no connection, event loop or thread. So the asyncio client, the sync client,
the SQL callbacks and the in-memory Waltz for tests share these types.

Rules:
    1. A lock is a name and a key; only its 32-bit hash is sent. Locks apply within one partition.
    2. A context may be executed any number of times. Each attempt gets a new builder with a later
       high-water mark; a rejected attempt is never sent again.
    3. Exactly one of `on_completion`, `on_expiration`, `on_exception` ends a context.
"""

import operator
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex, TypeVar, cast, overload

from waltz_core import errors
from waltz_core.client.model.payloads import decrypt_payload
from waltz_core.client.model.predecessors import PipelinedState, Predecessor
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
    partition_of_hash,
)

if TYPE_CHECKING:
    from waltz_core.encryption.envelopes import DecryptedPayload, Encryption

INT32_MIN, INT32_MAX = -(1 << 31), (1 << 31) - 1
INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1

T = TypeVar("T")


# ---------------------------------------------------------------------------------------------
# locks


def lock(name: str, key: int | str = 0) -> int:
    """Return the 32-bit hash of a lock (docs/design/wire-format.md 4).

    A text key is replaced by the CRC-32 of its UTF-8 bytes, as in Spark's `functions.lock`.

    Raises:
        BadRequest: the name is not text, or the key is neither text nor a 64-bit integer.
    """
    if not isinstance(name, str):
        raise errors.BadRequest(f"lock {name!r}: expected a string as its name")
    try:
        number = crc32(key.encode()) if isinstance(key, str) else operator.index(key)
    except (TypeError, UnicodeEncodeError):
        raise errors.BadRequest(
            f"lock {name!r}: expected an integer or a string as its key, found {key!r}"
        ) from None
    if not INT64_MIN <= number <= INT64_MAX:
        raise errors.BadRequest(
            f"lock {name!r}: expected a key that fits into 64 bits, found {number}"
        )
    return lock_hash(name, number)


def partition_of(hashed: int, partition_count: int) -> PartitionId:
    """Return the partition of a lock hash, the same on every client and in Spark."""
    return partition_of_hash(hashed, partition_count)


def check_locks(kind: str, locks: Iterable[int]) -> tuple[int, ...]:
    """Return lock hashes as a tuple; raises BadRequest for other values, and for too many locks."""
    try:
        lock_hashes = tuple(locks)
    except TypeError:
        raise errors.BadRequest(
            f"{kind} locks: expected a list of lock hashes, as lock(name, key) returns them, "
            f"found {locks!r}"
        ) from None
    if len(lock_hashes) > LOCKS_MAX:
        raise errors.BadRequest(
            f"{kind} locks: expected at most {LOCKS_MAX} locks, found {len(lock_hashes)}"
        )
    for hashed in lock_hashes:
        if not _is_int32(hashed):
            raise errors.BadRequest(
                f"{kind} locks: expected 32-bit hashes, as lock(name, key) returns them, "
                f"found {hashed!r}"
            )
    return lock_hashes


# ---------------------------------------------------------------------------------------------
# writing


class TransactionBuilder:
    """One attempt at a transaction, filled in by `execute`."""

    __slots__ = (
        "append_locks",
        "client_high_water_mark",
        "data",
        "encryption_key_id",
        "header",
        "partition_id",
        "pipelined_from",
        "pipelined_state",
        "read_locks",
        "write_locks",
    )

    def __init__(self, partition_id: PartitionId, client_high_water_mark: TransactionId) -> None:
        self.partition_id = partition_id
        # The client reads this mark before `execute`, so the application's state is at least as
        # new. An application that reads its own mark and its data in one database transaction sets
        # its own mark here.
        self.client_high_water_mark = client_high_water_mark
        # Only for a `pipelined` context: the transactions in flight, and the last mark that was
        # passed to `predecessors`.
        self.pipelined_state: PipelinedState | None = None
        self.pipelined_from: TransactionId | None = None
        self.header = 0
        self.data: bytes | None = None
        self.encryption_key_id: str | None = None
        self.write_locks: tuple[int, ...] = ()
        self.read_locks: tuple[int, ...] = ()
        self.append_locks: tuple[int, ...] = ()

    def predecessors(self, mark: int) -> tuple[Predecessor, ...]:
        """Return the transactions above `mark` that have written one of this transaction's locks.

        This method is for a context that is `pipelined`. Compute from the state as if it contained
        all of the returned transactions, in the order of their IDs. Read the mark together with the
        state, because callbacks may apply one of these transactions in between. This mark becomes
        the mark of the transaction.
        """
        self.client_high_water_mark = self.pipelined_from = check_mark(mark)
        if self.pipelined_state is None:
            return ()
        return self.pipelined_state.mark_and_state(self.pipelined_from)[1].predecessors_above(
            self.pipelined_from
        )

    def mark_and_state(self) -> tuple[TransactionId, PipelinedState | None]:
        """Return the mark to send, and the pipelined state if `predecessors` was called."""
        mark = check_mark(self.client_high_water_mark)
        if self.pipelined_state is None or self.pipelined_from is None:
            return mark, None  # with pipelining, the same attempt would be repeated at once
        if self.pipelined_from != mark:  # `predecessors` was called with another mark
            return self.pipelined_state.without_predecessors_at(mark)
        return self.pipelined_state.mark_and_state(mark, (*self.write_locks, *self.read_locks))

    def set_header(self, header: int) -> None:
        """Set the application's metadata, a 32-bit integer [default: 0]."""
        self.header = check_header(header)

    def set_transaction_data(
        self,
        value: T,
        serializer: Serializer[T] = MSGPACK,
        *,
        encryption_key_id: str | None = None,
    ) -> None:
        """Set the payload, and the ID of the key that encrypts it [default: the client's setting].

        Raises TooLarge if the payload has over 4 MiB.
        """
        self.data = check_data(serializer.serialize(value))
        self.encryption_key_id = encryption_key_id

    def set_write_locks(self, locks: Iterable[int]) -> None:
        """Set the locks that this transaction writes and the server checks against the mark."""
        self.write_locks = check_locks("write", locks)

    def set_read_locks(self, locks: Iterable[int]) -> None:
        """Set the locks that the server only checks against the mark."""
        self.read_locks = check_locks("read", locks)

    def set_append_locks(self, locks: Iterable[int]) -> None:
        """Set the locks that this transaction writes, and that the server does not check."""
        self.append_locks = check_locks("append", locks)


class TransactionContext(ABC):
    """A transaction that the application computes again when a lock rejects it.

    `retries_max` and `timeout_ms` limit the attempts; None means no limit. Each hook is called at
    most once, except `on_lock_failure`, which is called for every attempt that a lock rejects.
    """

    retries_max: int | None = None
    timeout_ms: int | None = 60_000
    # Whether `execute` uses `builder.predecessors`. Then an attempt does not wait until conflicting
    # transactions are durable. Use it for contended locks.
    pipelined: bool = False

    def __init__(self) -> None:
        self.creation_time_ms = time.time_ns() // 1_000_000

    @abstractmethod
    def partition_id(self, partition_count: int) -> int:
        """Return the partition; `partition_of(lock(...), partition_count)` is a good choice."""

    @abstractmethod
    def execute(self, builder: TransactionBuilder) -> bool:
        """Fill in the builder. Return False if there is nothing to do; this ends the context.

        The client runs `execute` again, with a new builder, whenever an attempt was rejected. In
        `AsyncWaltzClient`, `execute` may be `async`. In `WaltzClient`, `execute` runs on a worker
        thread.
        """

    # The hooks do nothing unless overridden; a context needs none of them.

    def on_completion(self, result: bool) -> None:  # noqa: B027, FBT001
        """The transaction is in the log (True), or `execute` returned False (False)."""

    def on_application(self) -> None:  # noqa: B027
        """The client's own callbacks have applied the transaction; only called with a feed."""

    def on_expiration(self) -> None:  # noqa: B027
        """The deadline has passed, or no retries are left; the transaction is not in the log."""

    def on_exception(self, error: BaseException) -> None:  # noqa: B027
        """`execute` raised, or a retry cannot help.

        After `OutcomeUnknown`, the transaction may be in the log. After any other error, it is not.
        """

    def on_lock_failure(self) -> None:  # noqa: B027
        """A lock rejected an attempt.

        A retry begins when the conflicting transaction is applied.
        """


def check_context(context: object) -> TransactionContext:
    """Return the given context; raises UsageError for any other object.

    The error is also raised for a decorated function that was not called, and for limits that are
    not numbers.
    """
    if not isinstance(context, TransactionContext):
        raise errors.UsageError(
            "expected a TransactionContext, or the object that a function decorated with "
            f"@transactional returns; found {context!r}"
        )
    for name in ("timeout_ms", "retries_max"):
        limit: object = getattr(context, name)
        if limit is not None and not isinstance(limit, float | SupportsIndex):
            raise errors.UsageError(f"{name}: expected a number, or None; found {limit!r}")
    return context


def check_partition(partition: object, cluster: str, partition_count: int) -> PartitionId:
    """Return a partition ID; raises UnknownPartition, or BadRequest if it is not an integer."""
    try:
        number = operator.index(cast("SupportsIndex", partition))
    except TypeError:
        raise errors.BadRequest(
            f"argument partition: expected an integer, found {partition!r}"
        ) from None
    if not 0 <= number < partition_count:
        raise errors.UnknownPartition(
            f"there is no partition {number}: cluster {cluster!r} has "
            f"partitions 0..{partition_count - 1}"
        )
    return PartitionId(number)


def check_items(description: str, items: Iterable[T]) -> tuple[T, ...]:
    """Return the items as a tuple; raises BadRequest for a single value."""
    try:
        iterator = iter(items)
    except TypeError:
        raise errors.BadRequest(
            f"{description}: expected a list such as [{items!r}], found {items!r}"
        ) from None
    return tuple(iterator)  # outside `try`, because a generator may itself raise a TypeError


def check_range(partition: PartitionId, first: int, last: int) -> None:
    """Raise BadRequest unless both ends are transaction IDs, and 0 <= first <= last + 1."""
    for name, end in (("first", first), ("last", last)):
        if isinstance(end, bool) or not isinstance(end, SupportsIndex):
            raise errors.BadRequest(
                f"range of partition {partition}: expected a transaction ID as its {name} ID, "
                f"found {end!r}"
            )
    if first < 0 or last < first - 1:
        raise errors.BadRequest(
            f"range of partition {partition}: expected 0 <= first <= last, found first "
            f"{first} and last {last}"
        )


def check_header(header: int) -> int:
    """Return a header; raises BadRequest for any value that is not a 32-bit integer."""
    if not _is_int32(header):
        raise errors.BadRequest(
            f"header: expected a signed 32-bit integer ({INT32_MIN}..{INT32_MAX}), found {header!r}"
        )
    return header


def check_mark(mark: object, name: str = "client_high_water_mark") -> TransactionId:
    """Return a partition's mark; raises BadRequest if it is neither a transaction ID nor -1."""
    try:
        number = operator.index(cast("SupportsIndex", mark))
    except TypeError:
        number = INT64_MIN
    if isinstance(mark, bool) or not BEFORE_FIRST <= number <= INT64_MAX:
        raise errors.BadRequest(
            f"{name}: expected a transaction ID, or -1 for none, found {mark!r} "
            f"({type(mark).__name__})"
        )
    return TransactionId(number)


def _is_int32(value: object) -> bool:
    return isinstance(value, int) and INT32_MIN <= value <= INT32_MAX


def check_data(data: bytes | bytearray | memoryview) -> bytes:
    """Return transaction data; raises BadRequest if not bytes, TooLarge over 4 MiB."""
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
    """Fetches the data of transactions on request; `encryption`, if given, decrypts it."""

    @property
    def encryption(self) -> "Encryption | None":
        """The encryption of the client; None if the client has no keys."""

    async def data_of(self, transaction_id: TransactionId) -> bytes:
        """Return the data of one transaction, from memory if cached."""

    def data_of_blocking(self, transaction_id: TransactionId) -> bytes:
        """Return the same as `data_of`, for threads other than the event loop's."""


class FeedItem:
    """One committed transaction as a feed delivers it; its data is fetched on request."""

    __slots__ = ("_data_error", "_feed_header", "_source", "partition_id", "transaction_id")

    def __init__(
        self,
        partition_id: PartitionId,
        transaction_id: TransactionId,
        feed_header: tuple[int, int, int, int, int],
        source: DataSource,
    ) -> None:
        self.partition_id = partition_id
        self.transaction_id = transaction_id
        # The five numbers of a feed header, in a plain tuple because a feed delivers millions of
        # headers per minute.
        self._feed_header = feed_header
        self._source = source

    @property
    def req_id(self) -> ReqId:
        """The request ID of the append that wrote the transaction."""
        client_id, generation, partition_id, sequence, _ = self._feed_header
        return ReqId(
            ClientId(client_id), Generation(generation), PartitionId(partition_id), sequence
        )

    @property
    def header(self) -> int:
        """The header: a 32-bit integer that the application has set."""
        return self._feed_header[4]

    @property
    def data_error(self) -> str | None:
        """The reason why `data` has returned None; None in all other cases."""
        # The attribute is set only with encryption, because a feed creates millions of items.
        return getattr(self, "_data_error", None)

    def _data_or_note_error(self, payload: "DecryptedPayload") -> bytes | None:
        self._data_error = payload.error
        return payload.data

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(partition {self.partition_id}, "
            f"id {self.transaction_id}, header {self.header})"
        )


class Transaction(FeedItem):
    """A committed transaction as `Callbacks` see it, on a worker thread of `WaltzClient`."""

    __slots__ = ()

    def data(self) -> bytes | Any:  # noqa: ANN401 - None only with encryption: spares the check
        """Return the data; it is fetched together with the data of neighboring IDs, and cached.

        With the setting `encryption_keys`, the data is decrypted. If this fails, for example
        because the key was destroyed, the result is None, and `data_error` has the reason.

        Raises Unavailable on timeout, Damaged if the data fails its checksum, and errors of the key
        provider.
        """
        data = self._source.data_of_blocking(self.transaction_id)
        encryption = self._source.encryption
        if encryption is None:
            return data
        context = {"partition": self.partition_id, "header": self.header}
        return self._data_or_note_error(encryption.decrypt(data, **context))

    @overload
    def value(self) -> Any: ...  # noqa: ANN401 - any msgpack value

    @overload
    def value(self, serializer: Serializer[T]) -> T | Any: ...  # noqa: ANN401 - None without data

    def value(self, serializer: Serializer[Any] = MSGPACK) -> Any:
        """Return the deserialized data; None if it could not be decrypted (see `data`)."""
        data = self.data()
        return None if data is None else serializer.deserialize(data)


class AsyncTransaction(FeedItem):
    """A committed transaction as `AsyncCallbacks` see it, on the event loop."""

    __slots__ = ()

    async def data(self) -> bytes | Any:  # noqa: ANN401 - None only with encryption: spares the check
        """Return the data; it is fetched together with the data of neighboring IDs, and cached.

        With the setting `encryption_keys`, the data is decrypted. If this fails, for example
        because the key was destroyed, the result is None, and `data_error` has the reason.

        Raises Unavailable on timeout, Damaged if the data fails its checksum, and errors of the key
        provider.
        """
        data = await self._source.data_of(self.transaction_id)
        encryption = self._source.encryption
        if encryption is None:
            return data
        context = {"partition": self.partition_id, "header": self.header}
        return self._data_or_note_error(await decrypt_payload(encryption, data, **context))

    @overload
    async def value(self) -> Any: ...  # noqa: ANN401 - any msgpack value

    @overload
    async def value(self, serializer: Serializer[T]) -> T | Any: ...  # noqa: ANN401 - None without data

    async def value(self, serializer: Serializer[Any] = MSGPACK) -> Any:
        """Return the deserialized data; None if it could not be decrypted (see `data`)."""
        data = await self.data()
        return None if data is None else serializer.deserialize(data)
