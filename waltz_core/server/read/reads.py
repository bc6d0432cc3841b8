"""Reads of committed transactions: recent ones from the caches, others from a storage.

Reads must not slow down appends or other readers. This module decides which records are cached,
which storage is queried for a read, and how often.

Rules:
    1. Nothing above the high-water mark is ever returned or requested.
    2. Equal fetches share one answer. A failed fetch is retried at the next replica, and after the
       last replica again at the first replica. So a single failing replica makes no transaction
       unreadable.
    3. An answer of a storage is checked completely: its first ID, every CRC, and that no ID is
       missing.
    4. At most `concurrent_fetches_max` fetches are in progress; the others wait in order.
    5. If a session ends while a fetch is pending, the fetch is repeated in the next session.
    6. Nearby replicas are queried first, in turn. Replicas outside the session are never queried.
    7. A replica that answers slowly may be frozen. So the timeout is short, and another replica is
       queried next, until all were tried. A failed replica is queried last for the next
       `AVOIDED_FETCH_COUNT` fetches.
    8. Consecutive requests for single transactions are answered by a read-ahead. If the read-ahead
       fails, each transaction is fetched separately.
    9. Reads for closed connections and ended feeds are dropped. Without this rule, a client that
       connects and sends requests again and again would make all other clients wait.
    10. If the log begins after the first ID of a fetch, the fetch fails at once. The archive does
        not contain the missing records either, so no other replica can return them.
    11. A request fails after `ROUNDS_MAX` rounds over all replicas. If a replica has reported
        damage, the error states the damage. If in the last round all replicas of the session have
        reported damage, locally and in the archive, the error is not retriable.
    12. A feed waits after `ROUNDS_MAX` rounds. The feed fails only if all replicas of the session
        report damage, and the pause between rounds has grown to `RETRY_MS_MAX`. The feed's error is
        retriable, so that the feed continues after a repair.
"""

from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from waltz_core.errors import (
    BadFormat,
    BadRequest,
    BeforeLogStart,
    ChecksumMismatch,
    Unreachable,
    WaltzError,
    error_from_code,
)
from waltz_core.records import raw_records
from waltz_core.records.batches import select_records
from waltz_core.records.checksum import crc32
from waltz_core.records.record import (
    BEFORE_FIRST,
    GENESIS_CHAIN,
    NO_SESSION,
    RECONSTRUCTED,
    RECORD_HEADER,
    RECORD_PREFIX,
    ClientId,
    LineageEntry,
    PartitionId,
    ReplicaId,
    SessionId,
    TransactionId,
)
from waltz_core.replication.session_events import Batch
from waltz_core.server.append.answers import request_error_answer
from waltz_core.server.partition_events import (
    ConnectionId,
    FeedFailed,
    FeedHeaders,
    Fetch,
    FetchFailed,
    PartitionLimits,
    RequestReceived,
    SendToClient,
)
from waltz_core.server.read.cache import FeedCache, TransactionCache
from waltz_core.server.read.read_ahead import PREFETCH_BYTES_MAX, PREFETCH_COUNT_MAX, ReadAhead
from waltz_core.wire.messages import (
    FILTER_HEADERS_MAX,
    OWN_HEADERS,
    Buffer,
    RangeBytes,
    RangeData,
    RangeForm,
    RangeRaw,
    RangeRequest,
    TransactionDataRequest,
    TransactionDataResponse,
)

I64 = npt.NDArray[np.int64]

# How many times all replicas are tried for a request before the request fails.
ROUNDS_MAX: Final = 2
RETRY_MS_MIN: Final = 100
RETRY_MS_MAX: Final = 5_000
AVOIDED_FETCH_COUNT: Final = 64
# The number of the newest batches whose lineage entries are kept, even if the caches have dropped
# the batches.
KEPT_LINEAGE_ENTRIES_MAX: Final = 16_384
_UNLIMITED_BYTES: Final = 1 << 62
# The maximum number of rows in an answer. With up to 48 bytes of lineage for each row, the answer
# must fit into a frame.
ROWS_MAX: Final = 65_536


class _RangeRecords(NamedTuple):
    """The records first..last, as in a range answer; for headers, `lengths` is empty."""

    first: TransactionId
    last: TransactionId
    form: int
    lengths: I64
    records: Buffer
    lineage: tuple[LineageEntry, ...]


class _FetchKey(NamedTuple):
    """Identifies a fetch; requests with equal keys share one answer (rule 2)."""

    first: TransactionId
    last: TransactionId
    bytes_max: int
    form: int
    is_read_ahead: bool = False  # rule 8


@dataclass(slots=True)
class _RangeFetch:
    """A range that must be fetched from a storage, and the requests that wait for it."""

    key: _FetchKey
    waiting: list[RequestReceived] = field(default_factory=list)
    is_for_feed: bool = False
    tried_replicas: list[ReplicaId] = field(default_factory=list)
    round_count: int = 0
    retry_ms: int = RETRY_MS_MIN
    # For rules 11 and 12: whether all replicas of this round have reported damage, and the last
    # damage with its code.
    is_damaged_everywhere: bool = True
    damage: str = ""
    damage_code: int = 0


ReadOutcome: TypeAlias = SendToClient | Fetch | FeedHeaders | FeedFailed


class Reads:
    """The reads of one partition, by the module's rules."""

    def __init__(
        self,
        partition_id: PartitionId,
        limits: PartitionLimits,
        transactions: TransactionCache,
        feed: FeedCache,
    ) -> None:
        self._partition_id = partition_id
        self._limits = limits
        self._transactions = transactions
        self._feed = feed
        self._read_ahead = ReadAhead(transactions.budget)
        self._prefetch_keys: dict[_FetchKey, None] = {}
        self._entries: list[LineageEntry] = []
        self._session_id = NO_SESSION
        self._high_water_mark = BEFORE_FIRST
        self._is_open = False
        self._range_fetches: dict[_FetchKey, _RangeFetch] = {}
        self._fetches_to_start: deque[_RangeFetch] = deque()
        self._running: dict[int, _RangeFetch | None] = {}  # None: no request waits any more
        self._delayed: list[tuple[int, _RangeFetch]] = []
        self._token = 0
        self._replica_turn = 0
        # Each failed replica is avoided until `fetch_count` reaches this number (rule 7).
        self._avoided_until: dict[ReplicaId, int] = {}
        self.replicas: Sequence[ReplicaId] = ()
        # The storages in the group of this server. The set may change at any time (rule 6).
        self.replicas_in_group: Container[ReplicaId] = ()
        self.fetch_count = 0
        self.failed_fetch_count = 0

    # -----------------------------------------------------------------------------------------
    # counters

    def cache_reads(self) -> dict[tuple[str, str], int]:
        """Return the hits and misses of each cache."""
        return {
            ("transaction", "hit"): self._transactions.hits + self._read_ahead.hits,
            ("transaction", "miss"): self._transactions.misses,
            ("feed", "hit"): self._feed.hits,
            ("feed", "miss"): self._feed.misses,
        }

    # -----------------------------------------------------------------------------------------
    # the session

    def on_session_opened(
        self, session_id: SessionId, high_water_mark: TransactionId
    ) -> list[ReadOutcome]:
        """A session has opened: start all waiting fetches in it (rule 5)."""
        self._session_id, self._high_water_mark = session_id, high_water_mark
        self._is_open = True
        self._fetches_to_start.extend(range_fetch for _, range_fetch in self._delayed)
        self._delayed.clear()
        return self._start_fetches()

    def on_session_closed(self) -> None:
        """The session has ended; its fetches may still succeed, and new fetches wait."""
        self._is_open = False

    def on_mark_advanced(self, high_water_mark: TransactionId) -> None:
        """The high-water mark has moved."""
        self._high_water_mark = high_water_mark

    def cache_batch(self, entry: LineageEntry, batch: Batch) -> None:
        """Add a committed batch to the caches."""
        lengths = raw_records.lengths_from_wire(batch.lengths, len(batch.records))
        self._transactions.put(entry, lengths, batch.records)
        self._feed.put(entry.first, raw_records.feed_headers_of(batch.records, lengths))
        if self._entries and self._entries[-1].last + 1 != entry.first:
            self._entries.clear()
        self._entries.append(entry)
        if len(self._entries) > 2 * KEPT_LINEAGE_ENTRIES_MAX:
            del self._entries[:-KEPT_LINEAGE_ENTRIES_MAX]

    def clear_caches(self) -> None:
        """Clear all caches, because another owner may have written the log."""
        self._transactions.clear()
        self._read_ahead.clear()
        self._prefetch_keys.clear()
        self._feed.clear()
        self._entries.clear()

    def abandon(self) -> list[RequestReceived]:
        """The server releases the partition: remove and return all waiting requests."""
        waiting = [
            request
            for range_fetch in self._range_fetches.values()
            for request in range_fetch.waiting
        ]
        self._range_fetches.clear()
        self._fetches_to_start.clear()
        # Fetches in progress count for rule 4 until they are answered, even after the release.
        self._running = dict.fromkeys(self._running)
        self._delayed.clear()
        self._is_open = False
        self.clear_caches()
        return waiting

    # -----------------------------------------------------------------------------------------
    # requests

    def request_range(self, request: RequestReceived, message: RangeRequest) -> list[ReadOutcome]:
        """Answer a range request from memory, or fetch the range."""
        if error_text := _range_request_error(message):
            return [request_error_answer(request, BadRequest(error_text))]
        form = RangeForm.HEADERS if message.form == OWN_HEADERS else message.form
        first = TransactionId(message.first)
        last = TransactionId(min(message.last, self._high_water_mark, first + ROWS_MAX - 1))
        if first > last:
            range_records = _RangeRecords(
                first, TransactionId(first - 1), form, _NO_LENGTHS, b"", ()
            )
            return [self._range_answer(request, message, range_records)]
        bytes_max = min(max(message.bytes_max, 1), self._limits.range_bytes_max)
        run_or_none = self._read_cached_run(first, last, bytes_max, form)
        if run_or_none is not None:
            return [self._range_answer(request, message, run_or_none)]
        return self._request_fetch(_FetchKey(first, last, bytes_max, form), request)

    def request_data(
        self, request: RequestReceived, message: TransactionDataRequest
    ) -> list[ReadOutcome]:
        """Answer a request for one transaction's data from memory, or fetch the transaction."""
        transaction_id = TransactionId(message.transaction_id)
        if not 0 <= transaction_id <= self._high_water_mark:
            error_text = (
                f"transaction {transaction_id} of partition {self._partition_id} is not in the "
                f"log, which ends at transaction {self._high_water_mark}"
            )
            answer = TransactionDataResponse(message.req_id, transaction_id, (None, error_text))
            return [SendToClient(request.connection, answer, request.cost_bytes)]
        record = self._read_ahead.find(transaction_id)
        if record is not None:
            return [_data_answer(request, message, record)]
        range_records = self._read_cached_run(transaction_id, transaction_id, 1, RangeForm.WHOLE)
        if range_records is not None:
            return [_data_answer(request, message, range_records.records)]
        return self._request_fetch(self._fetch_key_of(transaction_id), request)

    def _fetch_key_of(self, transaction_id: TransactionId) -> _FetchKey:
        """Return the key of the fetch for a single transaction (rule 8)."""
        for key in self._prefetch_keys:
            if key.first <= transaction_id <= key.last:
                return key
        if not self._read_ahead.should_fetch(transaction_id):
            return _single_fetch_key(transaction_id)
        last = TransactionId(min(transaction_id + PREFETCH_COUNT_MAX - 1, self._high_water_mark))
        key = _FetchKey(
            transaction_id, last, PREFETCH_BYTES_MAX, RangeForm.WHOLE, is_read_ahead=True
        )
        self._prefetch_keys[key] = None
        return key

    def request_headers(self, first: TransactionId, last: TransactionId) -> list[ReadOutcome]:
        """Fetch feed headers from a storage; a `FeedHeaders` follows."""
        last = min(last, self._high_water_mark)
        assert first <= last
        bytes_max = self._limits.feed_frame_count_max * RECORD_HEADER.size
        return self._request_fetch(_FetchKey(first, last, bytes_max, RangeForm.HEADERS), None)

    def close(self, connection: ConnectionId, awaited_firsts: Container[TransactionId]) -> None:
        """Drop the requests of a closed connection, as in `on_feeds_ended` (rule 9)."""
        for range_fetch in self._range_fetches.values():
            range_fetch.waiting = [
                request for request in range_fetch.waiting if request.connection != connection
            ]
        self.on_feeds_ended(awaited_firsts)

    def on_feeds_ended(self, awaited_firsts: Container[TransactionId]) -> None:
        """Drop the fetches that were only for feeds that have ended (rule 9).

        `awaited_firsts` are the first IDs of the headers for which the remaining feeds wait.
        """
        running = {
            range_fetch.key for range_fetch in self._running.values() if range_fetch is not None
        }
        dropped: set[_FetchKey] = set()
        for key, range_fetch in self._range_fetches.items():
            range_fetch.is_for_feed = range_fetch.is_for_feed and key.first in awaited_firsts
            if not (range_fetch.waiting or range_fetch.is_for_feed or key in running):
                dropped.add(key)
        if dropped:
            self._fetches_to_start = deque(
                range_fetch
                for range_fetch in self._fetches_to_start
                if range_fetch.key not in dropped
            )
            self._delayed = [entry for entry in self._delayed if entry[1].key not in dropped]
        for key in dropped:
            del self._range_fetches[key]
            self._prefetch_keys.pop(key, None)

    # -----------------------------------------------------------------------------------------
    # caches

    def read_cached(self, first: TransactionId, last: TransactionId) -> FeedHeaders | None:
        """Return cached feed headers (`feeds.HeaderCache`)."""
        headers = self._feed.read(first, last)
        if not headers:
            return None
        cached_last = first + len(headers) // raw_records.FEED_HEADER_BYTES - 1
        end = self._last_entry_within(TransactionId(first), TransactionId(cached_last))
        if end is None:
            return FeedHeaders(first, headers)
        return FeedHeaders(first, headers, end.last, end.chain)

    def _last_entry_within(self, first: TransactionId, last: TransactionId) -> LineageEntry | None:
        low, high = 0, len(self._entries)
        while low < high:
            middle = (low + high) // 2
            if self._entries[middle].last <= last:
                low = middle + 1
            else:
                high = middle
        if low == 0 or self._entries[low - 1].last < first:
            return None
        return self._entries[low - 1]

    def _read_cached_run(
        self, first: TransactionId, last: TransactionId, bytes_max: int, form: int
    ) -> _RangeRecords | None:
        if form == RangeForm.HEADERS:
            last = min(last, TransactionId(first + max(1, bytes_max // RECORD_HEADER.size) - 1))
            bytes_max = _UNLIMITED_BYTES
        parts = self._transactions.read(first, last, bytes_max)
        if not parts:
            return None
        lineage = tuple(part.entry for part in parts)
        run_last = parts[-1].last
        if form == RangeForm.HEADERS:
            record_headers = [raw_records.headers_of(part.records, part.lengths) for part in parts]
            return _RangeRecords(
                first, run_last, form, _NO_LENGTHS, b"".join(record_headers), lineage
            )
        if len(parts) == 1:
            return _RangeRecords(first, run_last, form, parts[0].lengths, parts[0].records, lineage)
        lengths = np.concatenate([part.lengths for part in parts])
        return _RangeRecords(
            first, run_last, form, lengths, b"".join(part.records for part in parts), lineage
        )

    # -----------------------------------------------------------------------------------------
    # storages

    @property
    def wake_at_ms(self) -> int | None:
        """When the next delayed fetch is due; None if no fetch is delayed."""
        if not self._is_open or not self._delayed:
            return None
        return min(at_ms for at_ms, _ in self._delayed)

    def wake(self, now_ms: int) -> list[ReadOutcome]:
        """Retry the delayed fetches that are due."""
        if not self._delayed:
            return []
        due_fetches = [range_fetch for at_ms, range_fetch in self._delayed if at_ms <= now_ms]
        self._delayed = [
            (at_ms, range_fetch) for at_ms, range_fetch in self._delayed if at_ms > now_ms
        ]
        self._fetches_to_start.extend(due_fetches)
        return self._start_fetches()

    def on_range_fetched(self, token: int, message: RangeBytes, now_ms: int) -> list[ReadOutcome]:
        """A storage has sent a range: check it, and answer the requests that wait for it."""
        range_fetch = self._running.get(token)
        if range_fetch is None:
            return self._ignore_answer(token)
        try:
            range_records = _check_range(message, range_fetch.key)
        except WaltzError as error:
            return self.on_fetch_failed(FetchFailed(token, str(error)), now_ms)
        del self._running[token], self._range_fetches[range_fetch.key]
        if range_fetch.key in self._prefetch_keys:
            del self._prefetch_keys[range_fetch.key]
            self._read_ahead.keep(range_records.first, range_records.lengths, range_records.records)
        elif range_fetch.key == _single_fetch_key(range_records.first):
            self._read_ahead.note_fetched_up_to(range_records.last)
        out: list[ReadOutcome] = []
        if range_fetch.is_for_feed:
            out.append(_feed_headers_in(range_records))
        for request in range_fetch.waiting:
            out += self._range_answers(request, range_records)
        return out + self._start_fetches()

    def on_fetch_failed(self, event: FetchFailed, now_ms: int) -> list[ReadOutcome]:
        """A fetch has failed: retry it, or reject its requests (rules 2 and 10 to 12)."""
        range_fetch = self._running.get(event.token)
        if range_fetch is None:
            return self._ignore_answer(event.token)
        del self._running[event.token]
        if event.first_available > range_fetch.key.first:
            return self._reject_before_log_start(range_fetch, event.first_available)
        self.failed_fetch_count += 1
        self._avoided_until[range_fetch.tried_replicas[-1]] = self.fetch_count + AVOIDED_FETCH_COUNT
        if range_fetch.key.is_read_ahead:
            return self._fetch_separately(range_fetch)
        range_fetch.is_damaged_everywhere &= event.damage_code != 0
        if event.damage_code:
            range_fetch.damage, range_fetch.damage_code = event.reason, event.damage_code
        out: list[ReadOutcome] = []
        if all(replica in range_fetch.tried_replicas for replica in self.replicas):
            out = self._on_round_ended(range_fetch, event.reason)
        if not range_fetch.waiting and not range_fetch.is_for_feed:
            del self._range_fetches[range_fetch.key]
        elif range_fetch.tried_replicas:
            self._fetches_to_start.append(range_fetch)
        else:
            self._delayed.append((now_ms + range_fetch.retry_ms, range_fetch))
            range_fetch.retry_ms = min(2 * range_fetch.retry_ms, RETRY_MS_MAX)
        return out + self._start_fetches()

    def _on_round_ended(self, range_fetch: _RangeFetch, reason: str) -> list[ReadOutcome]:
        """Reject the requests for which all replicas have failed often enough (rules 11 and 12)."""
        range_fetch.tried_replicas.clear()
        range_fetch.round_count += 1
        text = (
            f"no replica of partition {self._partition_id} returned transactions "
            f"{range_fetch.key.first}..{range_fetch.key.last}: {range_fetch.damage or reason}"
        )
        error = Unreachable(text)
        out: list[ReadOutcome] = []
        if range_fetch.round_count >= ROUNDS_MAX and range_fetch.waiting:
            final = (
                error_from_code(range_fetch.damage_code, text)
                if range_fetch.is_damaged_everywhere
                else error
            )
            out.extend(request_error_answer(request, final) for request in range_fetch.waiting)
            range_fetch.waiting.clear()
            range_fetch.round_count = 0
        if (
            range_fetch.is_for_feed
            and range_fetch.is_damaged_everywhere
            and range_fetch.retry_ms >= RETRY_MS_MAX
        ):
            out.append(FeedFailed(range_fetch.key.first, error))
            range_fetch.is_for_feed = False
        range_fetch.is_damaged_everywhere = True
        return out

    def _reject_before_log_start(
        self, range_fetch: _RangeFetch, first_available: TransactionId
    ) -> list[ReadOutcome]:
        """Reject the requests for records below the start of the log (rule 10)."""
        if range_fetch.key.is_read_ahead:
            return self._fetch_separately(range_fetch)
        del self._range_fetches[range_fetch.key]
        error = BeforeLogStart(
            f"partition {self._partition_id}: the log begins at transaction "
            f"{first_available}, so transaction {range_fetch.key.first} is not available",
            first_available,
        )
        out: list[ReadOutcome] = [
            request_error_answer(request, error) for request in range_fetch.waiting
        ]
        if range_fetch.is_for_feed:
            out.append(FeedFailed(range_fetch.key.first, error))
        return out + self._start_fetches()

    def _fetch_separately(self, range_fetch: _RangeFetch) -> list[ReadOutcome]:
        """Fetch each requested transaction separately, because others may be damaged (rule 8)."""
        del self._range_fetches[range_fetch.key]
        self._prefetch_keys.pop(range_fetch.key, None)
        out: list[ReadOutcome] = []
        for request in range_fetch.waiting:
            assert isinstance(request.message, TransactionDataRequest)
            transaction_id = TransactionId(request.message.transaction_id)
            out += self._request_fetch(_single_fetch_key(transaction_id), request)
        return out

    def _ignore_answer(self, token: int) -> list[ReadOutcome]:
        """Ignore an answer for which no request waits, and start a waiting fetch."""
        self._running.pop(token, None)
        return self._start_fetches()

    def _request_fetch(self, key: _FetchKey, request: RequestReceived | None) -> list[ReadOutcome]:
        range_fetch = self._range_fetches.get(key)
        if range_fetch is None:
            range_fetch = self._range_fetches[key] = _RangeFetch(key)
            self._fetches_to_start.append(range_fetch)
        if request is None:
            range_fetch.is_for_feed = True
        else:
            range_fetch.waiting.append(request)
        return self._start_fetches()

    def _start_fetches(self) -> list[ReadOutcome]:
        out: list[ReadOutcome] = []
        while (
            self._is_open
            and self._fetches_to_start
            and self.replicas
            and len(self._running) < self._limits.concurrent_fetches_max
        ):
            range_fetch = self._fetches_to_start.popleft()
            out.append(self._create_fetch(range_fetch))
        return out

    def _create_fetch(self, range_fetch: _RangeFetch) -> Fetch:
        untried_replicas = [
            replica for replica in self.replicas if replica not in range_fetch.tried_replicas
        ]
        untried_replicas = untried_replicas or list(self.replicas)
        trusted_replicas = [
            replica_id
            for replica_id in untried_replicas
            if self._avoided_until.get(replica_id, 0) <= self.fetch_count
        ]
        trusted_replicas = trusted_replicas or untried_replicas
        candidates = [
            replica for replica in trusted_replicas if replica in self.replicas_in_group
        ] or trusted_replicas
        replica = candidates[self._replica_turn % len(candidates)]
        self._replica_turn += 1
        self._token += 1
        self.fetch_count += 1
        range_fetch.tried_replicas.append(replica)
        self._running[self._token] = range_fetch
        key = range_fetch.key
        message = RangeRaw(
            self._session_id,
            self._token,
            self._partition_id,
            key.first,
            key.last,
            key.bytes_max,
            key.form,
            whole_batches=False,
            reader=True,
        )
        is_urgent = range_fetch.round_count == 0 and len(self.replicas) > 1
        return Fetch(self._token, replica, message, is_urgent)

    # -----------------------------------------------------------------------------------------
    # answers

    def _range_answers(
        self, request: RequestReceived, range_records: _RangeRecords
    ) -> list[ReadOutcome]:
        message = request.message
        if isinstance(message, RangeRequest):
            return [self._range_answer(request, message, range_records)]
        assert isinstance(message, TransactionDataRequest)
        skip = message.transaction_id - range_records.first
        if skip >= range_records.lengths.size:
            return self.request_data(request, message)  # the read-ahead ended before this ID
        record, _ = raw_records.slice_records(
            range_records.records, range_records.lengths, skip=skip, count=1
        )
        return [_data_answer(request, message, record)]

    def _range_answer(
        self, request: RequestReceived, message: RangeRequest, range_records: _RangeRecords
    ) -> SendToClient:
        lengths, records = range_records.lengths, range_records.records
        count = range_records.last - range_records.first + 1
        lineage = range_records.lineage
        if message.form == OWN_HEADERS:
            records, count = _headers_of_client(range_records, message.req_id.client_id)
            lineage = ()
        elif message.header_values and count:
            lengths, records, count = _filter_records(range_records, message.header_values)
        answer = RangeData(
            message.req_id,
            range_records.first,
            count,
            range_records.last + 1,
            message.form,
            raw_records.lengths_to_wire(lengths),
            records,
            self._session_id,
            self._high_water_mark,
            lineage,
        )
        return SendToClient(request.connection, answer, request.cost_bytes)


_NO_LENGTHS: Final = np.empty(0, dtype=np.int64)


def _range_request_error(message: RangeRequest) -> str | None:
    """Return the error text for an invalid range request; None if it is valid."""
    if not 0 <= message.first <= message.last:
        return (
            "range request: expected IDs with 0 <= first <= last, found "
            f"{message.first}..{message.last}"
        )
    valid_forms = [*map(int, RangeForm), OWN_HEADERS]
    if message.form not in valid_forms:
        return f"range request: expected one of {valid_forms} in field form, found {message.form}"
    if (count := len(message.header_values)) > FILTER_HEADERS_MAX:
        return f"range request: expected at most {FILTER_HEADERS_MAX} headers, found {count}"
    return None


def _single_fetch_key(transaction_id: TransactionId) -> _FetchKey:
    return _FetchKey(transaction_id, transaction_id, 1, RangeForm.WHOLE)


def _data_answer(
    request: RequestReceived, message: TransactionDataRequest, record: Buffer
) -> SendToClient:
    data = memoryview(record)[RECORD_PREFIX.size : -4]
    answer = TransactionDataResponse(message.req_id, message.transaction_id, (data, None))
    return SendToClient(request.connection, answer, request.cost_bytes)


def _feed_headers_in(range_records: _RangeRecords) -> FeedHeaders:
    record_headers = np.frombuffer(range_records.records, dtype=np.uint8).reshape(
        -1, RECORD_HEADER.size
    )
    headers = record_headers[:, RECORD_HEADER.size - raw_records.FEED_HEADER_BYTES :].tobytes()
    chain_at, chain = BEFORE_FIRST, GENESIS_CHAIN
    for entry in reversed(range_records.lineage):
        # If a storage has reconstructed a batch, no other replica has the chain of this batch.
        if (
            range_records.first <= entry.last <= range_records.last
            and entry.session_id != RECONSTRUCTED
        ):
            chain_at, chain = entry.last, entry.chain
            break
    return FeedHeaders(range_records.first, headers, chain_at, chain)


def _headers_of_client(range_records: _RangeRecords, client_id: ClientId) -> tuple[Buffer, int]:
    """Return the headers of one client's transactions, and their number."""
    record_headers = np.frombuffer(range_records.records, dtype=raw_records.HEADER_DTYPE)
    client_headers = record_headers[record_headers["req_id"]["client_id"] == client_id]
    return client_headers.tobytes(), int(client_headers.size)


def _filter_records(
    range_records: _RangeRecords, header_values: Sequence[int]
) -> tuple[I64, Buffer, int]:
    """Return lengths, records and count of the records with one of the header values."""
    if range_records.form == RangeForm.HEADERS:
        record_headers = np.frombuffer(range_records.records, dtype=raw_records.HEADER_DTYPE)
        matching_headers = record_headers[
            np.isin(record_headers["header"].astype(np.int32), header_values)
        ]
        return _NO_LENGTHS, matching_headers.tobytes(), int(matching_headers.size)
    values = raw_records.application_headers_of(range_records.records, range_records.lengths)
    records, lengths = select_records(
        range_records.records, range_records.lengths, np.isin(values, header_values)
    )
    return lengths, records, int(lengths.size)


def _check_range(message: RangeBytes, key: _FetchKey) -> _RangeRecords:
    """Check a storage's answer (rule 3); raises BadFormat or ChecksumMismatch."""
    first, last, form = key.first, key.last, key.form
    range_last = TransactionId(message.first + message.count - 1)
    if message.first != first or not first <= range_last <= last or message.form != form:
        raise BadFormat(
            f"range from a storage: expected transactions from {first} up to {last} with "
            f"form={form}, found {message.first}..{range_last} with form={message.form}"
        )
    if form == RangeForm.HEADERS:
        _check_headers(message)
        return _RangeRecords(first, range_last, form, _NO_LENGTHS, message.records, message.lineage)
    lengths = raw_records.lengths_from_wire(message.lengths, len(message.records))
    if lengths.size != message.count:
        raise BadFormat(
            f"range from a storage: expected {message.count} lengths, found {lengths.size}"
        )
    first_bad = raw_records.first_bad_record(message.records, lengths)
    if first_bad is None:
        first_bad = raw_records.first_gap(message.records, lengths, first)
    if first_bad is not None:
        raise ChecksumMismatch(
            f"range from a storage: the record at the position of transaction {first + first_bad} "
            "is damaged, or belongs to another transaction"
        )
    return _RangeRecords(first, range_last, form, lengths, message.records, message.lineage)


def _check_headers(message: RangeBytes) -> None:
    if len(message.records) != message.count * RECORD_HEADER.size:
        raise BadFormat(
            f"range from a storage: expected {message.count} headers of {RECORD_HEADER.size} "
            f"bytes, found {len(message.records)} bytes"
        )
    if crc32(message.records) != message.records_crc:
        raise ChecksumMismatch("range from a storage: the CRC of the headers does not match")
    record_headers = np.frombuffer(message.records, dtype=raw_records.HEADER_DTYPE)
    expected = np.arange(message.first, message.first + message.count, dtype=np.int64)
    if (record_headers["transaction_id"] != expected).any():
        raise BadFormat(
            f"range from a storage: the transaction IDs from {message.first} on are not consecutive"
        )
