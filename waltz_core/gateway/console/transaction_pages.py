"""Pages of a partition's log for the transaction browser: forwards, backwards, and by time.

A page contains up to `count` transactions, as dicts for JSON. With a header filter, a page contains
only matching transactions, but the server also reads the transactions between them.

Rules:
    1. The work of a request is bounded. It sends at most `FETCHES_MAX` queries for transactions,
       and the server reads about `PAGE_BYTES_MAX` bytes of the log for each query. After about
       `PAGE_BYTES_MAX` bytes of records, the request sends no further query. So a page may contain
       fewer transactions than requested, or none, although the log contains more.
    2. Each page makes progress: `next` is above `first`, and `previous` is below `last`, unless the
       log ends there. To read on, the caller requests the page from `next`, or the page that ends
       at `previous`. If `previous` is -1, no earlier transaction is available.
    3. Together, consecutive pages contain every matching transaction exactly once.
    4. A backward page is read in windows of IDs, from newer to older windows. If a window cannot be
       read completely, its newest transactions are missing. Such a window is dropped, and a smaller
       window is read instead. A window of one ID is always read completely.
    5. A backward page ends at the first available transaction, even if transactions expire at the
       same time. A forward page that begins at an expired transaction raises BeforeLogStart.
    6. The text of a payload has at most `TEXT_BYTES_MAX` bytes. After the texts of a page have
       reached about 512 KiB, each further text has at most `SHORT_TEXT_BYTES_MAX` bytes. This limit
       does not apply to the first transaction of a page, so a page of one transaction shows the
       longest text.
"""

import asyncio
from bisect import bisect_right
from functools import partial
from operator import itemgetter
from typing import Any, Final, NamedTuple

from waltz_core import errors
from waltz_core.client import AsyncWaltzClient, RangeForm
from waltz_core.client.read.ranges import RangeChunk, RangeQuery
from waltz_core.client.read.start_times import (
    UNSTAMPED,
    async_last_id_before_time,
    async_stamp_ms_of,
)
from waltz_core.gateway.console.payload_text import decode_payload
from waltz_core.gateway.request_parsing import check_integer
from waltz_core.records import raw_records
from waltz_core.records.record import BEFORE_FIRST, PartitionId, ReqId, TransactionId

COUNT_MAX: Final = 200
PAGE_BYTES_MAX: Final = 1024 * 1024
FETCHES_MAX: Final = 8
# The maximum number of bytes of a payload's text (rule 6).
TEXT_BYTES_MAX: Final = 16 * 1024
SHORT_TEXT_BYTES_MAX: Final = 512
_PAGE_TEXT_BYTES: Final = 512 * 1024
# A server answers a query with at most this number of IDs (`reads.py`).
_WINDOW_IDS_MAX: Final = 65_536
_WINDOW_GROWTH: Final = 8
_FILTERED_WINDOW_IDS: Final = 512  # the first window with a header filter


async def read_page_from(
    client: AsyncWaltzClient,
    partition: int,
    first: int,
    count: int,
    header_values: tuple[int, ...] = (),
) -> dict[str, Any]:
    """Return the page of transactions that starts at an ID.

    Raises:
        RequestRejected: the ID or the count is out of range.
        BeforeLogStart: the log begins after the ID; the error states the first available one.
    """
    check_integer(first, "first")
    check_integer(count, "count", minimum=1, maximum=COUNT_MAX)
    ends = await _read_log_ends(client, partition)
    if first < ends.first_available:  # a server may still have the transaction in its cache
        raise errors.BeforeLogStart(
            f"partition {partition}: cannot read from transaction {first}, because the "
            f"transactions before {ends.first_available} have expired",
            ends.first_available,
        )
    fetches = _PageFetches(client, partition, header_values)
    rows: list[_PageRow] = []
    following = first
    while following <= ends.mark and len(rows) < count and fetches.may_continue:
        missing = count - len(rows)
        last = ends.mark if header_values else min(ends.mark, following + missing - 1)
        chunk = await fetches.fetch(following, last)
        if chunk.next <= following:
            break  # another server has opened the partition, with a lower mark
        chunk_rows = _rows_of(chunk)
        rows += chunk_rows[:missing]
        is_cut = len(chunk_rows) > missing
        following = rows[-1].transaction_id + 1 if is_cut else int(chunk.next)
    return {
        "transactions": await _transaction_fields(rows),
        "next": following,
        "first_available": ends.first_available,
        "high_water_mark": ends.mark,
    }


async def read_page_until(
    client: AsyncWaltzClient,
    partition: int,
    last: int | None,
    count: int,
    header_values: tuple[int, ...] = (),
) -> dict[str, Any]:
    """Return the page of transactions that ends at `last`; if None, at the end of the log.

    In the result, `previous` is the last ID of the previous page, or -1 if there is none. `next` is
    the ID after this page.

    Raises:
        RequestRejected: the ID or the count is out of range.
    """
    if last is not None:
        check_integer(last, "last", minimum=BEFORE_FIRST)
    check_integer(count, "count", minimum=1, maximum=COUNT_MAX)
    ends = await _read_log_ends(client, partition)
    end = ends.mark if last is None else min(last, ends.mark)
    search = _BackwardSearch(
        _PageFetches(client, partition, header_values),
        end=end,
        first_available=ends.first_available,
        count=count,
    )
    await search.run()
    has_previous = search.end >= search.first_available
    return {
        "transactions": await _transaction_fields(search.rows),
        "next": max(end + 1, search.first_available),
        "previous": search.end if has_previous else int(BEFORE_FIRST),
        "first_available": search.first_available,
        "high_water_mark": ends.mark,
    }


async def first_transaction_at(
    client: AsyncWaltzClient, partition: int, time_ms: int
) -> dict[str, Any]:
    """Return the ID of the first available transaction that may be committed at or after a time.

    If all transactions are older, the ID is the high-water mark + 1. The answer also contains the
    high-water mark, because the mark that the page shows may be outdated.

    Raises:
        RequestRejected: the time is out of range.
    """
    check_integer(time_ms, "time_ms")
    ends = await _read_log_ends(client, partition)
    first = ends.first_available
    while True:
        try:
            stamp_ms_of = partial(async_stamp_ms_of, client, partition)
            last_older_id = await async_last_id_before_time(
                stamp_ms_of, ends.mark, time_ms, first - 1
            )
        except errors.BeforeLogStart as error:
            first = _available_start_in(error, first)
            if first > ends.mark:
                return {"transaction_id": first, "high_water_mark": ends.mark}
        else:
            return {"transaction_id": last_older_id + 1, "high_water_mark": ends.mark}


# --- the log


class _LogEnds(NamedTuple):
    """The first available ID of a partition and its high-water mark."""

    first_available: int
    mark: int


async def _read_log_ends(client: AsyncWaltzClient, partition: int) -> _LogEnds:
    replica_set = await client.replicas(partition)
    first = int(replica_set.archived.first) if replica_set.archived else 0
    return _LogEnds(first, int(replica_set.high_water_mark))


def _available_start_in(error: errors.BeforeLogStart, known_first: int) -> int:
    """Return the first available ID in an error; raise the error if `known_first` is not lower."""
    if error.first_available <= known_first:
        raise error
    return error.first_available


class _PageRow(NamedTuple):
    """One transaction of a page; `time_ms` is None if a 0.13 server wrote it."""

    transaction_id: int
    header: int
    time_ms: int | None
    request_id: ReqId
    data: bytes


class _PageFetches:
    """Fetches transactions for one page, and counts the queries and their bytes (rule 1)."""

    def __init__(
        self, client: AsyncWaltzClient, partition: int, header_values: tuple[int, ...]
    ) -> None:
        self._client = client
        self._partition_id = PartitionId(partition)
        self._header_values = header_values
        self.remaining_count = FETCHES_MAX
        self.remaining_bytes = PAGE_BYTES_MAX

    @property
    def is_filtered(self) -> bool:
        """Whether only transactions with some headers are fetched."""
        return bool(self._header_values)

    @property
    def may_continue(self) -> bool:
        """Whether the page may send another query (rule 1)."""
        return self.remaining_count > 0 and self.remaining_bytes > 0

    async def fetch(self, first: int, last: int) -> RangeChunk:
        """Return the first chunk of a range."""
        self.remaining_count -= 1
        query = RangeQuery(
            TransactionId(first),
            TransactionId(last),
            RangeForm.WHOLE,
            self._header_values,
            PAGE_BYTES_MAX if self._header_values else max(1, self.remaining_bytes),
        )
        chunk = await self._client.requests.fetch_range(self._partition_id, query)
        self.remaining_bytes -= len(chunk.records)
        return chunk


# --- backwards


class _BackwardSearch:
    """Collects a page in ascending order, but searches from `end` to older IDs (rule 4).

    After `run`, `end` is the ID before the page.
    """

    def __init__(
        self, fetches: _PageFetches, *, end: int, first_available: int, count: int
    ) -> None:
        self._fetches = fetches
        self._count = count
        self.end = end
        self.first_available = first_available
        self.rows: list[_PageRow] = []
        # The size of the next window, in IDs. Without a filter, the search begins with one ID,
        # because records may be large. With a filter, it begins with more IDs, because few records
        # match.
        self._size = _FILTERED_WINDOW_IDS if fetches.is_filtered else 1
        self._read_id_count = 0
        self._read_bytes = 0

    async def run(self) -> None:
        """Read windows until the page is complete, or a limit is reached."""
        while (
            self.end >= self.first_available
            and len(self.rows) < self._count
            and (self._fetches.may_continue or not self._read_id_count)  # rule 2
        ):
            low = max(self.first_available, self.end - self._size + 1)
            try:
                window_rows = await self._read_window(low)
            except errors.BeforeLogStart as error:  # rule 5
                self.first_available = _available_start_in(error, self.first_available)
                continue
            if window_rows is not None:
                self._add(window_rows, low)

    def _add(self, window_rows: list[_PageRow], low: int) -> None:
        missing = self._count - len(self.rows)
        self.rows = window_rows[-missing:] + self.rows
        self.end = (self.rows[0].transaction_id if len(window_rows) > missing else low) - 1

    async def _read_window(self, low: int) -> list[_PageRow] | None:
        """Return the transactions of the window low..end.

        Returns None if the window is too large, or if the log does not contain the window any more.
        Sets the size of the next window.
        """
        window_rows: list[_PageRow] = []
        first, chunk_ids = low, 0
        while first <= self.end:
            if first > low and not self._may_complete(self.end - first + 1, chunk_ids):
                may_continue = self._fetches.may_continue
                self._size = max(1, min(chunk_ids, self._size // 2)) if may_continue else 1
                return None
            chunk = await self._fetches.fetch(first, self.end)
            if chunk.next <= first:  # another server has opened the partition, with a lower mark
                self.end = first - 1
                return None
            window_rows += _rows_of(chunk)
            self._read_bytes += len(chunk.records)
            chunk_ids = max(chunk_ids, int(chunk.next) - first)
            first = int(chunk.next)
        self._size = self._next_size(self.end - low + 1, chunk_ids)
        return window_rows

    def _may_complete(self, ids: int, chunk_ids: int) -> bool:
        """Whether the rest of a window fits the limits, if each query returns `chunk_ids` IDs."""
        return self._fetches.may_continue and ids <= chunk_ids * self._fetches.remaining_count

    def _next_size(self, window_ids: int, chunk_ids: int) -> int:
        """Return the size of the next window, from the sizes of the records so far.

        `chunk_ids` is the maximum number of IDs that one query of the last window returned.
        """
        self._read_id_count += window_ids
        ids_within_limit = (
            self._fetches.remaining_bytes * self._read_id_count // max(1, self._read_bytes)
        )
        sizes = [window_ids * _WINDOW_GROWTH, ids_within_limit, _WINDOW_IDS_MAX]
        if chunk_ids < window_ids:
            sizes.append(
                chunk_ids * self._fetches.remaining_count * 3 // 4
            )  # records differ in size
        if not self._fetches.is_filtered:
            sizes.append(self._count - len(self.rows) - window_ids)
        return max(1, min(sizes))


# --- rows


def _rows_of(chunk: RangeChunk) -> list[_PageRow]:
    stamps = chunk.stamps
    request_ids = raw_records.req_ids_of(chunk.records, chunk.lengths).tolist()
    return [
        _PageRow(
            int(row.transaction_id),
            row.header,
            _time_ms_of(row.transaction_id, stamps),
            ReqId(*request_id),
            row.data,
        )
        for row, request_id in zip(chunk.rows(), request_ids, strict=True)
    ]


def _time_ms_of(transaction_id: int, stamps: list[tuple[int, int, int]]) -> int | None:
    stamp_index = bisect_right(stamps, transaction_id, key=itemgetter(0)) - 1
    if (
        stamp_index < 0
        or transaction_id > stamps[stamp_index][1]
        or stamps[stamp_index][2] == UNSTAMPED
    ):
        return None
    return stamps[stamp_index][2]


async def _transaction_fields(rows: list[_PageRow]) -> list[dict[str, Any]]:
    """Return the JSON fields of transactions."""
    fields = []
    text_bytes = 0
    for row in rows:
        is_short = text_bytes >= _PAGE_TEXT_BYTES  # rule 6
        payload = decode_payload(row.data, SHORT_TEXT_BYTES_MAX if is_short else TEXT_BYTES_MAX)
        text_bytes += len(payload.text.encode())
        fields.append(
            {
                "transaction_id": row.transaction_id,
                "header": row.header,
                "time_ms": row.time_ms,
                "client_id": int(row.request_id.client_id),
                "request_id": str(row.request_id),
                "size": len(row.data),
                "format": payload.format,
                "text": payload.text,
                "is_shortened": payload.is_shortened,
            }
        )
        await asyncio.sleep(0)  # decoding a hostile payload takes up to 30 ms
    return fields
