"""Reads committed ranges of a partition as bytes, from a replica or from the server.

Bulk readers use this code, mainly Spark on executors without access to ZooKeeper. The code itself
detects every missing transaction and every changed bit.

Rules:
    1. Without a filter, an answer has every ID from the first to the last requested ID. If an ID is
       missing, the reader raises an error.
    2. Every record's CRC and every length is checked before its bytes are returned. Headers alone
       have no CRC. So a replica's answer contains a CRC over its headers, and the reader checks
       this CRC. A server checks headers itself.
    3. A request to a replica contains the session that the server named, and asks only for records
       that this session has committed. If a replica does not return these records, the reader tries
       the next replica, and finally the server. There are two exceptions:
        - If the log begins after the first requested ID, the reader raises an error at once,
          because all replicas would answer the same.
        - If a replica requests a pause, the reader repeats the request after the pause, until the
          timeout.
    4. A chunk never ends in the middle of a record. The `next` of a chunk is the `first` of the
       following chunk.
    5. IDs after the last requested ID are rejected, because they may not be committed.
    6. Nearby replicas are read first, but only if the server named them: a nearby storage that is
       not engaged is not read.
    7. A replica on this machine answers with the positions of the records, and the client reads its
       files (`local_reader.py`). If this fails, the replica sends the records.
    8. A storage needs no disk to send its hello. A storage that sends no hello within
       `HANDSHAKE_TIMEOUT_S` may be frozen, so the reader tries the next replica. For the hello of
       the last replica, and for answers with records, the reader waits for the whole timeout.
    9. Reads from different IDs begin at different replicas, to distribute the load. A repeated read
       from the same ID begins at the same replica, because this replica has the data in its page
       cache.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from random import Random
from ssl import SSLContext
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from waltz_core import errors
from waltz_core.client.read.local_reader import GRANT_BYTES, LocalReader, ReadGrant
from waltz_core.legacy.interfaces import LegacyRecords
from waltz_core.records import raw_records
from waltz_core.records.checksum import crc32
from waltz_core.records.record import (
    BEFORE_FIRST,
    NO_SESSION,
    RECORD_OVERHEAD_BYTES,
    RECORD_PREFIX,
    LineageEntry,
    PartitionId,
    ReqId,
    SessionId,
    TransactionId,
)
from waltz_core.transport import descriptor_passing, net
from waltz_core.wire import messages
from waltz_core.wire.messages import Buffer, RangeForm, WireProtocol
from waltz_core.wire.record_locations import LOCATIONS, decode_locations, socket_name_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from waltz_core.encryption.envelopes import DecryptedPayload

I64 = npt.NDArray[np.int64]

HEADER_BYTES = raw_records.HEADER_DTYPE.itemsize
RANGE_BYTES_MAX = 4 * 1024 * 1024
HANDSHAKE_TIMEOUT_S = 1.0

# The bytes of a record before and after its payload.
_PREFIX_BYTES = RECORD_PREFIX.size
_SUFFIX_BYTES = RECORD_OVERHEAD_BYTES - _PREFIX_BYTES

_log = logging.getLogger(__name__)


class RangeRow(NamedTuple):
    """One transaction of a range: its ID, the application's header, its payload.

    With encryption, the payload may be None; `data_error` then has the reason.
    """

    transaction_id: TransactionId
    header: int
    data: bytes | Any  # None is rare; the type `Any` spares most users a check for None

    @property
    def data_error(self) -> str | None:
        """The reason why there is no data; None in all other cases."""
        return None


class _UnreadableRow(RangeRow):
    """A transaction whose data could not be decrypted; like `RangeRow`, a tuple of three."""

    reason: str | None = None

    @property
    def data_error(self) -> str | None:
        return self.reason


@dataclass(frozen=True, slots=True, eq=False)
class RangeChunk:
    """A part of a range: `count` transactions from `first` on (fewer records under a filter).

    With form WHOLE, `records` are the bytes of the segment file, and `lengths` are the lengths of
    the records. With form HEADERS, `records` has 28 bytes for each transaction, and `lengths` is
    empty. `next` is the first ID after the chunk. `lineage` has the batches of the chunk. `rows`
    uses `decrypt`; payloads in `records` stay encrypted.
    """

    form: RangeForm
    first: TransactionId
    count: int
    next: TransactionId
    lengths: I64
    records: Buffer
    session_id: SessionId
    high_water_mark: TransactionId
    lineage: tuple[LineageEntry, ...]
    decrypt: "Callable[..., DecryptedPayload] | None" = None

    @property
    def stamps(self) -> list[tuple[int, int, int]]:
        """The commit stamps for `batches.range_to_arrow`: (first ID, last ID, milliseconds)."""
        return [(entry.first, entry.last, entry.stamp_ms) for entry in self.lineage]

    def rows(self) -> Iterator[RangeRow]:
        """Yield the transactions one by one, in order; raises UsageError if no data was read.

        The method copies each payload; for millions of rows use `records` and `lengths` directly.
        With encryption, it may block to request a key, and raises the errors of the key provider.
        """
        return self._rows() if self.decrypt is None else self._decrypted_rows(self.decrypt)

    def _decrypted_rows(self, decrypt: "Callable[..., DecryptedPayload]") -> Iterator[RangeRow]:
        for row in self._rows():
            payload = decrypt(row.data, header=row.header)
            if payload.error is None:
                yield row._replace(data=payload.data)
            else:
                unreadable = _UnreadableRow(row.transaction_id, row.header, None)
                unreadable.reason = payload.error
                yield unreadable

    def _rows(self) -> Iterator[RangeRow]:
        if self.form is not RangeForm.WHOLE:
            raise errors.UsageError(
                "method rows needs a range that was read with form=RangeForm.WHOLE, found "
                f"{self.form!r}"
            )
        ids = raw_records.ids_of(self.records, self.lengths).tolist()
        headers = raw_records.application_headers_of(self.records, self.lengths).tolist()
        start = 0
        for index, length in enumerate(self.lengths.tolist()):
            data = self.records[start + _PREFIX_BYTES : start + length - _SUFFIX_BYTES]
            yield RangeRow(TransactionId(ids[index]), headers[index], bytes(data))
            start += length


@dataclass(frozen=True, slots=True)
class RangeQuery:
    """The range first..last (inclusive) to read, at most about `bytes_max` in one chunk."""

    first: TransactionId
    last: TransactionId
    form: RangeForm = RangeForm.WHOLE
    header_values: tuple[int, ...] = ()
    bytes_max: int = RANGE_BYTES_MAX

    def __post_init__(self) -> None:
        """Raise BadRequest for a filter that servers do not accept."""
        if (count := len(self.header_values)) > messages.FILTER_HEADERS_MAX:
            raise errors.BadRequest(
                f"argument headers: expected at most {messages.FILTER_HEADERS_MAX} headers, "
                f"found {count}"
            )


FetchRange = Callable[[RangeQuery], Coroutine[Any, Any, RangeChunk]]
StartFetch = Callable[[Coroutine[Any, Any, RangeChunk]], Awaitable[RangeChunk]]


async def read_chunks(
    partition_id: PartitionId, query: RangeQuery, fetch: FetchRange, start: StartFetch | None = None
) -> AsyncIterator[RangeChunk]:
    """Yield the chunks of a range in order.

    With `start`, which runs a fetch as a task, the next chunk is fetched while the caller uses the
    current one. A slow caller then keeps two chunks in memory.

    Raises:
        DataLoss: the log ends before `last`, or there is a gap.
        ChecksumMismatch, BadFormat: the bytes are damaged.
    """
    query_part = query
    next_fetch: Awaitable[RangeChunk] | None = None
    while query_part.first <= query_part.last:
        chunk = await (next_fetch or fetch(query_part))
        if chunk.next <= query_part.first:
            raise errors.DataLoss(
                f"partition {partition_id}: expected transactions "
                f"{query_part.first}..{query.last}, but the log ends at {chunk.high_water_mark}"
            )
        query_part = replace(query, first=chunk.next)
        if start is not None and query_part.first <= query_part.last:
            next_fetch = start(fetch(query_part))
        yield chunk


class InterruptibleChunks:
    """Steps through chunks on the loop; Ctrl-C ends the wait for a chunk, not its fetch."""

    def __init__(self, chunks: AsyncIterator[RangeChunk]) -> None:
        self._chunks = cast("AsyncGenerator[RangeChunk, None]", chunks)
        self._step_lock = asyncio.Lock()
        self._fetching: asyncio.Task[Any] | None = None

    async def next_or_none(self) -> RangeChunk | None:
        """Return the next chunk; None after the last one."""
        self._fetching = asyncio.current_task()
        try:
            async with self._step_lock:
                return await anext(self._chunks)
        except StopAsyncIteration:
            return None

    async def end(self) -> None:
        """Close the range and cancel a fetch whose caller has stopped waiting."""
        if self._fetching is not None:
            self._fetching.cancel()
        async with self._step_lock:
            await self._chunks.aclose()


# ---------------------------------------------------------------------------------------------
# from the server


def range_request_of(req_id: ReqId, query: RangeQuery) -> messages.RangeRequest:
    """Return the message that requests a range from a server."""
    return messages.RangeRequest(
        req_id, query.first, query.last, query.bytes_max, query.form, query.header_values
    )


def chunk_from_server(
    partition_id: PartitionId, query: RangeQuery, answer: messages.RangeData
) -> RangeChunk:
    """Verify a server's answer, and return it as a chunk (rules 1, 2 and 5)."""
    source = (
        f"answer of the server for partition {partition_id}, transactions "
        f"{query.first}..{query.last}"
    )
    if answer.form != query.form or answer.first != query.first or answer.count < 0:
        raise errors.RemoteProtocolError(
            f"{source}: expected form={query.form}, first={query.first} and count>=0, found "
            f"form={answer.form}, first={answer.first} and count={answer.count}"
        )
    _check_end(answer.next - 1, query, source)
    chunk = RangeChunk(
        query.form,
        query.first,
        answer.count,
        TransactionId(answer.next),
        _decode_lengths(answer.form, answer.lengths, answer.records, source),
        answer.records,
        SessionId(answer.session_id),
        TransactionId(answer.high_water_mark),
        answer.lineage,
    )
    _verify_chunk(chunk, source, is_filtered=bool(query.header_values))
    return chunk


def chunk_from_legacy_records(query: RangeQuery, legacy_records: LegacyRecords) -> RangeChunk:
    """Return records from a 0.13 server as a chunk; the records were verified when they arrived."""
    is_whole = query.form is RangeForm.WHOLE
    return RangeChunk(
        query.form,
        query.first,
        len(legacy_records.lengths) if is_whole else len(legacy_records.records) // HEADER_BYTES,
        TransactionId(legacy_records.last + 1),
        np.array(legacy_records.lengths, dtype=np.int64),
        legacy_records.records,
        NO_SESSION,
        legacy_records.last,
        (),
    )


# ---------------------------------------------------------------------------------------------
# from a replica


@dataclass(frozen=True, slots=True)
class ArchivedRange:
    """The archived part of a partition: the IDs first..last; `manifest` lists the objects."""

    first: TransactionId
    last: TransactionId
    manifest: str
    manifest_crc: int


@dataclass(frozen=True, slots=True)
class ReplicaSet:
    """The replicas that may be read, from the answer of a server; plain values, for pickling."""

    cluster_key: bytes
    partition_count: int
    session_id: int
    high_water_mark: int
    replicas: tuple[str, ...]
    replicas_in_group: tuple[str, ...] = ()  # the replicas in the reader's own group
    archived: ArchivedRange | None = None


NO_REPLICAS = ReplicaSet(b"", 0, NO_SESSION, BEFORE_FIRST, ())


class ReaderConnection:
    """One connection to one storage, to read from it."""

    def __init__(self, link: net.Link) -> None:
        self._link = link
        self._sequence = 0
        self._query_lock = asyncio.Lock()

    @staticmethod
    async def open(
        address: str, replicas: ReplicaSet, *, timeout_s: float, ssl: SSLContext | None = None
    ) -> "ReaderConnection":
        """Connect, and check that the storage belongs to this cluster.

        Raises Unreachable, ClusterKeyMismatch, or another error that the storage returns.
        """
        reader_connection = ReaderConnection(
            await net.dial(WireProtocol.STORAGE, address, timeout_s=timeout_s, ssl=ssl)
        )
        request = messages.OpenRequest(
            NO_SESSION, -1, -1, replicas.cluster_key, replicas.partition_count
        )
        try:
            await reader_connection._query(request, timeout_s)
        except BaseException:  # also when the caller is cancelled
            reader_connection.close()
            raise
        return reader_connection

    @property
    def is_closed(self) -> bool:
        """Whether the connection is closed."""
        return self._link.is_closed

    def close(self) -> None:
        """Close the connection at once."""
        self._link.abort("done")

    async def fetch(
        self,
        partition_id: PartitionId,
        query: RangeQuery,
        *,
        session_id: SessionId,
        high_water_mark: TransactionId,
        timeout_s: float,
    ) -> RangeChunk:
        """Read one chunk; raises SessionFenced, NotOwned, ... if the storage may not answer."""
        assert query.last <= high_water_mark
        assert not query.header_values
        answer, source = await self._request_range(
            partition_id, query, query.form, session_id, timeout_s
        )
        chunk = RangeChunk(
            query.form,
            query.first,
            answer.count,
            TransactionId(answer.first + answer.count),
            _decode_lengths(answer.form, answer.lengths, answer.records, source),
            answer.records,
            session_id,
            high_water_mark,
            answer.lineage,
        )
        _verify_chunk(chunk, source, is_filtered=False)
        return chunk

    async def request_locations(
        self,
        partition_id: PartitionId,
        query: RangeQuery,
        *,
        session_id: SessionId,
        timeout_s: float,
    ) -> ReadGrant:
        """Request the positions of a range's records.

        Raises the errors of `fetch`, and an error if the storage does not support this request.
        """
        grant_query = replace(query, bytes_max=max(query.bytes_max, GRANT_BYTES))
        answer, source = await self._request_range(
            partition_id, grant_query, LOCATIONS, session_id, timeout_s
        )
        if len(answer.lengths) != 4 * answer.count:
            raise errors.RemoteProtocolError(
                f"{source}: expected {answer.count} lengths, found {len(answer.lengths) / 4:g}"
            )
        lengths: I64 = np.frombuffer(answer.lengths, dtype=">i4").astype(np.int64)
        try:
            raw_records.lengths_from_wire(answer.lengths, int(lengths.sum()))
            locations = decode_locations(answer.records, int(lengths.sum()))
        except errors.BadFormat as error:
            raise errors.BadFormat(f"{source}: {error}") from error
        return ReadGrant(query.first, lengths, locations, answer.lineage, bytes(answer.ticket))

    async def _request_range(
        self,
        partition_id: PartitionId,
        query: RangeQuery,
        form: int,
        session_id: SessionId,
        timeout_s: float,
    ) -> tuple[messages.RangeBytes, str]:
        """Return the answer for a range, and a text that identifies the answer in errors."""
        self._sequence += 1
        request = messages.RangeRaw(
            session_id,
            self._sequence,
            partition_id,
            query.first,
            query.last,
            query.bytes_max,
            form,
            whole_batches=False,
            reader=True,
        )
        answer = await self._query(request, timeout_s)
        transactions = f"transactions {query.first}..{query.last}"
        source = f"answer of {self._link.address} for partition {partition_id}, {transactions}"
        if not isinstance(answer, messages.RangeBytes):
            raise errors.RemoteProtocolError(
                f"{source}: expected message RangeBytes, found {type(answer).__name__}"
            )
        if answer.first != query.first or answer.form != form or answer.count <= 0:
            raise errors.RemoteProtocolError(
                f"{source}: expected form={form}, first={query.first} and count>=1, found "
                f"form={answer.form}, first={answer.first} and count={answer.count}"
            )
        if form != RangeForm.WHOLE and crc32(answer.records) != answer.records_crc:
            raise errors.ChecksumMismatch(
                f"{source}: the CRC of the answer does not match its bytes"
            )
        _check_end(answer.first + answer.count - 1, query, source)
        return answer, source

    async def _query(
        self, request: messages.StorageMessage, timeout_s: float
    ) -> messages.StorageMessage:
        async with self._query_lock:
            self._link.send(request)
            try:
                async with asyncio.timeout(timeout_s):
                    answer = (await self._link.receive())[0]
            except TimeoutError as error:
                # A late answer must not be mistaken for the answer to another request.
                self.close()
                raise errors.Unreachable(
                    f"{self._link.address} did not answer the {type(request).__name__} within "
                    f"{timeout_s} s"
                ) from error
            except asyncio.CancelledError:
                self.close()
                raise
        assert isinstance(answer, messages.StorageMessage)
        if isinstance(answer, messages.Nack):
            text = f"{self._link.address}: {answer.message}"
            raise errors.error_from_code(
                answer.error_code, text, answer.first_available, answer.retry_after_ms
            )
        if answer.sequence != request.sequence:
            self.close()
            raise errors.RemoteProtocolError(
                f"{self._link.address}: expected an answer to request {request.sequence}, "
                f"found an answer to request {answer.sequence}"
            )
        return answer


class ReplicaReader:
    """Reads from one replica after the other, and from the server if all of them fail (rule 3)."""

    def __init__(
        self,
        partition_id: PartitionId,
        replicas: ReplicaSet,
        fallback: FetchRange,
        *,
        first: TransactionId,
        timeout_s: float,
        ssl: SSLContext | None = None,
    ) -> None:
        self._partition_id = partition_id
        self._replicas = replicas
        self._fallback = fallback
        self._timeout_s = timeout_s
        self._ssl = ssl
        # Rules 6 and 9.
        self._addresses = sorted(replicas.replicas)  # a server names the fastest first
        Random(f"{partition_id}:{first}").shuffle(self._addresses)  # noqa: S311 - no secret
        self._addresses.sort(key=lambda address: address not in replicas.replicas_in_group)
        self._link: ReaderConnection | None = None
        # The connected storage, if it is on this machine.
        self._local_reader: LocalReader | None = None
        self._is_closed = False
        self.from_replica_count = 0
        self.from_local_count = 0  # the chunks of replicas that were read from files directly

    async def fetch(self, query: RangeQuery) -> RangeChunk:
        """Read one chunk of a range from a replica, otherwise from the server (rule 3)."""
        while (
            self._addresses and not self._is_closed and query.last <= self._replicas.high_water_mark
        ):
            if query.header_values:
                break
            address = self._addresses[0]
            try:
                chunk = await self._fetch_with_retries(address, query)
            except errors.WaltzError as error:
                if isinstance(error, errors.BeforeLogStart) and error.first_available > query.first:
                    raise
                _log.info(
                    "ranges.replica_failed partition=%d replica=%s error=%s",
                    self._partition_id,
                    address,
                    error,
                )
                self._disconnect()
                del self._addresses[0]
                continue
            self.from_replica_count += 1
            return chunk
        return await self._fallback(query)

    def close(self) -> None:
        """Close the connection to the replica; no replica is read any more."""
        self._is_closed = True
        self._disconnect()

    def _disconnect(self) -> None:
        self._stop_local_reader()
        if self._link is not None:
            self._link.close()
            self._link = None

    async def _fetch_with_retries(self, address: str, query: RangeQuery) -> RangeChunk:
        """Read from a replica. If it requests a pause, wait, because all replicas have limits."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._timeout_s
        while True:
            try:
                return await self._fetch_from(address, query)
            except errors.Overloaded as error:
                retry_s = loop.time() + error.retry_after_ms / 1000
                if not error.retry_after_ms or retry_s > deadline_s or self._is_closed:
                    raise
                await asyncio.sleep(error.retry_after_ms / 1000)

    async def _fetch_from(self, address: str, query: RangeQuery) -> RangeChunk:
        if self._link is None or self._link.is_closed:
            self._disconnect()
            connection = await self._connect(address)
            if self._is_closed:  # otherwise the connection would stay open
                connection.close()
                raise errors.Unreachable(f"{address}: the reader was closed")
            self._link = connection
            self._local_reader = self._local_reader_at(address)
        link = self._link  # the reader may be closed during a read
        if self._local_reader is not None and query.form is RangeForm.WHOLE:
            try:
                return await self._fetch_locally(self._local_reader, link, query)
            except errors.BeforeLogStart:
                pass  # The file is not on the disk; the storage reads the records from the archive.
            except errors.Overloaded:
                raise
            except errors.WaltzError as error:
                if self._is_closed:
                    raise
                _log.warning(
                    "ranges.local_read_failed partition=%d replica=%s error=%s",
                    self._partition_id,
                    address,
                    error,
                )
                self._stop_local_reader()
        return await link.fetch(
            self._partition_id,
            query,
            session_id=SessionId(self._replicas.session_id),
            high_water_mark=TransactionId(self._replicas.high_water_mark),
            timeout_s=self._timeout_s,
        )

    async def _connect(self, address: str) -> ReaderConnection:
        """Return a connection to a replica (rule 8)."""
        is_last = len(self._addresses) == 1
        try:
            async with asyncio.timeout(None if is_last else HANDSHAKE_TIMEOUT_S):
                return await ReaderConnection.open(
                    address, self._replicas, timeout_s=self._timeout_s, ssl=self._ssl
                )
        except TimeoutError as error:
            raise errors.Unreachable(
                f"{address} did not send its hello message within {HANDSHAKE_TIMEOUT_S} s"
            ) from error

    def _local_reader_at(self, address: str) -> LocalReader | None:
        for with_tickets in (False, True):
            name = socket_name_of(self._replicas.cluster_key, address, with_tickets=with_tickets)
            if descriptor_passing.is_offered(name):
                return LocalReader(address, name, self._partition_id, timeout_s=self._timeout_s)
        return None

    def _stop_local_reader(self) -> None:
        """Stop reading files directly: the storage sends the records from now on."""
        if self._local_reader is not None:
            self._local_reader.close()
            self._local_reader = None

    async def _fetch_locally(
        self, local_reader: LocalReader, link: ReaderConnection, query: RangeQuery
    ) -> RangeChunk:
        session_id = SessionId(self._replicas.session_id)

        async def query_grant() -> ReadGrant:
            return await link.request_locations(
                self._partition_id, query, session_id=session_id, timeout_s=self._timeout_s
            )

        local_records = await local_reader.read(
            query.first, query.last, query.bytes_max, query_grant
        )
        count = int(local_records.lengths.size)
        self.from_local_count += 1
        return RangeChunk(
            query.form,
            query.first,
            count,
            TransactionId(query.first + count),
            local_records.lengths,
            local_records.records,
            session_id,
            TransactionId(self._replicas.high_water_mark),
            local_records.lineage,
        )


# ---------------------------------------------------------------------------------------------
# checks


def _check_end(last: int, query: RangeQuery, source: str) -> None:
    """Raise RemoteProtocolError for IDs beyond the last requested one (rule 5)."""
    if last > query.last:
        raise errors.RemoteProtocolError(
            f"{source}: expected no transaction after {query.last}, found transactions "
            f"{query.first}..{last}"
        )


def _decode_lengths(form: int, packed: Buffer, records: Buffer, source: str) -> I64:
    if form == RangeForm.WHOLE:
        try:
            return raw_records.lengths_from_wire(packed, len(records))
        except errors.BadFormat as error:
            raise errors.BadFormat(f"{source}: {error}") from error
    if len(records) % HEADER_BYTES:
        raise errors.BadFormat(
            f"{source}: expected {HEADER_BYTES} bytes for each header, found {len(records)} "
            "bytes in total"
        )
    return np.empty(0, dtype=np.int64)


def _verify_chunk(chunk: RangeChunk, source: str, *, is_filtered: bool) -> None:
    """Raise an error unless a chunk has exactly the records of its range, undamaged."""
    if (
        chunk.form is RangeForm.WHOLE
        and not is_filtered
        and chunk.lengths.size == chunk.count == chunk.next - chunk.first > 0
        and raw_records.verified_crcs(chunk.records, chunk.lengths, chunk.first) is not None
    ):
        return  # otherwise the checks below find the problem
    if chunk.form is RangeForm.WHOLE:
        bad_index = raw_records.first_bad_record(chunk.records, chunk.lengths)
        if bad_index is not None:
            raise errors.ChecksumMismatch(f"{source}: record {bad_index} of the answer is damaged")
        ids = raw_records.ids_of(chunk.records, chunk.lengths)
    else:
        record_headers = np.frombuffer(chunk.records, dtype=raw_records.HEADER_DTYPE)
        ids = record_headers["transaction_id"].astype(np.int64)
    if is_filtered:
        id_steps = np.diff(ids)
        is_within_chunk = ids.size == 0 or (ids[0] >= chunk.first and ids[-1] < chunk.next)
        if not is_within_chunk or bool((id_steps <= 0).any()):
            raise errors.DataLoss(f"{source}: the transaction IDs of the answer are not ascending")
        return
    # Compare the count first, because an array of all stated IDs could be larger than the memory.
    if ids.size != max(chunk.next - chunk.first, 0) or not np.array_equal(
        ids, np.arange(chunk.first, chunk.next, dtype=np.int64)
    ):
        raise errors.DataLoss(
            f"{source}: expected all transactions {chunk.first}..{chunk.next - 1}, found "
            f"{ids.size} transactions with other IDs"
        )
    if ids.size != chunk.count:
        raise errors.RemoteProtocolError(
            f"{source}: expected {chunk.count} records, as the answer states, found {ids.size}"
        )
