"""Finds the start of a read by time: the mark before the first transaction at or after a time.

Rules:
    1. A start by time may be too early, but never too late: only transactions that are known to be
       older are skipped.
"""

from collections.abc import Awaitable, Callable, Generator
from typing import TYPE_CHECKING, TypeAlias

from waltz_core.client.read.ranges import RangeQuery
from waltz_core.records.record import BEFORE_FIRST, PartitionId, TransactionId
from waltz_core.wire.messages import RangeForm

if TYPE_CHECKING:
    from waltz_core.client.api.async_client import AsyncWaltzClient
    from waltz_core.client.api.sync_client import WaltzClient

UNSTAMPED = 0  # the commit stamp of transactions that a 0.13 server wrote
UNSTAMPED_READS_MAX = 32

# A generator that yields the IDs whose commit stamps it needs, receives the stamps, and returns an
# ID.
StartSearch: TypeAlias = Generator[int, int, int]


def last_id_before_time(
    stamp_ms_of: Callable[[int], int], mark: int, since_ms: int, known_older_id: int = BEFORE_FIRST
) -> int:
    """Return the ID before the first transaction that may be committed at or after a time.

    The result is at most `mark`. `known_older_id` is the ID of a transaction that is known to be
    older, or -1.
    """
    search = _search_last_id_before_time(mark, since_ms, known_older_id)
    try:
        transaction_id = next(search)
        while True:
            transaction_id = search.send(stamp_ms_of(transaction_id))
    except StopIteration as end:
        return int(end.value)


async def async_last_id_before_time(
    stamp_ms_of: Callable[[int], Awaitable[int]],
    mark: int,
    since_ms: int,
    known_older_id: int = BEFORE_FIRST,
) -> int:
    """Return the same as `last_id_before_time`; `stamp_ms_of` is awaited."""
    search = _search_last_id_before_time(mark, since_ms, known_older_id)
    try:
        transaction_id = next(search)
        while True:
            transaction_id = search.send(await stamp_ms_of(transaction_id))
    except StopIteration as end:
        return int(end.value)


def _search_last_id_before_time(mark: int, since_ms: int, known_older_id: int) -> StartSearch:
    """Search for the result of `last_id_before_time`.

    Commit stamps never decrease in a partition, so a binary search finds the ID. Transactions that
    a 0.13 server wrote have no stamp (0); they are known to be older only if a later transaction is
    older. After `UNSTAMPED_READS_MAX` reads of transactions without a stamp, the search assumes
    that the rest of them is not older (rule 1).
    """
    last_older = known_older_id
    unstamped_left = UNSTAMPED_READS_MAX
    parts = [(known_older_id + 1, mark)]  # the parts left to search, latest part first
    while parts:
        low, high = parts.pop()
        if low > high:
            continue
        middle = (low + high) // 2
        stamp_ms = yield middle
        if stamp_ms == UNSTAMPED:
            parts.append((low, middle - 1))
            if unstamped_left:
                unstamped_left -= 1
                parts.append((middle + 1, high))
            else:
                del parts[1:]  # rule 1
        elif stamp_ms < since_ms:
            # All transactions before `middle` are older, too.
            last_older, parts = middle, [(middle + 1, high)]
        else:
            parts.append((low, middle - 1))
    return last_older


def stamp_ms_of(client: "WaltzClient", partition: int, transaction_id: int) -> int:
    """Return the commit stamp of a transaction, in ms; 0 if a 0.13 server wrote it."""
    chunks = client.read_range(partition, transaction_id, transaction_id, form=RangeForm.HEADERS)
    return max((stamp_ms for chunk in chunks for _, _, stamp_ms in chunk.stamps), default=0)


async def async_stamp_ms_of(client: "AsyncWaltzClient", partition: int, transaction_id: int) -> int:
    """Return the same as `stamp_ms_of`; the server answers, not a replica."""
    first = TransactionId(transaction_id)
    chunk = await client.requests.fetch_range(
        PartitionId(partition), RangeQuery(first, first, RangeForm.HEADERS)
    )
    return max((stamp_ms for _, _, stamp_ms in chunk.stamps), default=UNSTAMPED)
