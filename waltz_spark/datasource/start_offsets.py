"""The start of a batch read or of a stream's first micro-batch, and the end of a batch read.

A start by time requires requests to the log or to its archive. A start before the first available
ID of the log is data loss, unless the options allow it: the transactions in between have expired
from the archive. The same applies to requested IDs below the first available ID. It also applies to
an end that the user specifies below it, if the read has no other start.
"""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from waltz_core.client import ReplicaSet, WaltzClient
from waltz_core.client.read.start_times import first_since, stamp_ms_of
from waltz_core.errors import DataLoss
from waltz_core.records.record import BEFORE_FIRST
from waltz_spark import planning
from waltz_spark.datasource.archive_read import last_archived_before
from waltz_spark.options import ReadOptions

# A start by time takes about thirty sequential requests; this number of partitions does so at once.
CONCURRENT_PARTITIONS_MAX = 32

_log = logging.getLogger("waltz")


def starts(
    client: WaltzClient, options: ReadOptions, sources: Mapping[int, ReplicaSet]
) -> dict[int, int]:
    """Return the exclusive start of each partition in `sources`, which has the current marks.

    Raises:
        BadConfig: the user specified marks, but none for one of the partitions.
        DataLoss: a specified mark is past the end of its log, transactions after a specified mark
            or time may have expired, or some of the specified IDs have expired.
        Unavailable: a partition does not answer.
    """
    marks, firsts = marks_of(sources), firsts_of(sources)
    if options.starting == "earliest" and options.starting_ms is None:
        return _earliest(options, firsts)
    if options.starting_ms is None:
        given = planning.resolve_starts(options, marks)
        return check_available(options, given, firsts, "option 'startingHighWaterMarks'")
    since_ms = options.starting_ms

    def start(partition: int) -> int:
        archived = sources[partition].archived
        older = firsts[partition] - 1
        if options.archive is not None and archived is not None:
            older = last_archived_before(options.archive, partition, archived, since_ms)
            if BEFORE_FIRST < older < archived.last:
                return max(older, firsts[partition] - 1)
        return first_since(
            partial(stamp_ms_of, client, partition), marks[partition], since_ms, older
        )

    with ThreadPoolExecutor(CONCURRENT_PARTITIONS_MAX) as pool:
        found = dict(zip(marks, pool.map(start, marks), strict=True))
    # If no available transaction is older than the time, expired transactions may match it, too.
    wanted = {each: at - 1 if 0 < firsts[each] == at + 1 else at for each, at in found.items()}
    return check_available(options, wanted, firsts, "option 'startingTimestamp'")


def _earliest(options: ReadOptions, firsts: Mapping[int, int]) -> dict[int, int]:
    """Return the start of each log; expired IDs of option `transactionIds` are data loss.

    Raises:
        DataLoss: as for `check_available`.
    """
    ids = options.transaction_ids
    lows = [low for low, _ in ids]
    wanted = {partition: min([first, *lows]) - 1 for partition, first in firsts.items()}
    shown = planning.parts_text([f"{low}-{high}" if low < high else low for low, high in ids])
    return check_available(options, wanted, firsts, f"option 'transactionIds' ({shown})")


def ends(options: ReadOptions, sources: Mapping[int, ReplicaSet]) -> dict[int, int]:
    """Return the inclusive end of each partition in `sources`, never before an expired ID.

    Raises:
        BadConfig: the user specified marks, but none for one of the partitions.
        DataLoss: a specified mark is past the end of its log, or all transactions up to it have
            expired.
    """
    firsts = firsts_of(sources)
    found = planning.resolve_ends(options, marks_of(sources))
    is_earliest = options.starting == "earliest" and options.starting_ms is None
    is_given = not isinstance(options.ending, str)
    if is_earliest and is_given and not options.transaction_ids:
        last_requested = {each: end for each, end in found.items() if end > BEFORE_FIRST}
        _check_expired(options, last_requested, firsts, "option 'endingHighWaterMarks' ends")
    return {each: max(end, firsts[each] - 1) for each, end in found.items()}


def marks_of(sources: Mapping[int, ReplicaSet]) -> dict[int, int]:
    """Return the high-water mark of each partition."""
    return {partition: int(source.high_water_mark) for partition, source in sources.items()}


def check_available(
    options: ReadOptions, starts: Mapping[int, int], firsts: Mapping[int, int], what: str
) -> dict[int, int]:
    """Return the starts, raised to the first available ID of each log.

    Args:
        options: state whether data loss is allowed.
        starts: the exclusive start of each partition.
        firsts: the first available ID of each of these partitions.
        what: the origin of the starts, for an error message.

    Raises:
        DataLoss: a start is before the first available ID; the error names the partition and the
            ID.
    """
    _check_expired(
        options, {each: start + 1 for each, start in starts.items()}, firsts, f"{what} begins"
    )
    return {each: max(start, firsts[each] - 1) for each, start in starts.items()}


def _check_expired(
    options: ReadOptions, ids: Mapping[int, int], firsts: Mapping[int, int], what: str
) -> None:
    """Raise DataLoss if IDs have expired, or log a warning if the options allow data loss."""
    expired = {each: firsts[each] for each, found in ids.items() if found < firsts[each]}
    if expired and options.fail_on_data_loss:
        partition, first = min(expired.items())
        raise DataLoss(
            f"{what} before transaction {first} of partition {partition}, the first "
            "available one: the earlier ones have expired in the archive. Hint: read from "
            "the first available transaction on, or set failOnDataLoss=false to skip the "
            "missing ones."
        )
    if expired:
        _log.warning("spark.transactions_expired first_available=%s", expired)


def from_first_available(
    options: ReadOptions,
    spans: Sequence[planning.TransactionRange],
    sources: Mapping[int, ReplicaSet],
) -> list[planning.TransactionRange]:
    """Return the spans, extended to the first available transaction of the log, for a change feed.

    Raises:
        DataLoss: transactions have expired, and the options do not allow it.
    """
    firsts = firsts_of(sources)
    found = [span._replace(first=firsts[span.partition]) for span in spans]
    expired = [span for span in found if span.first > 0]
    if expired and options.fail_on_data_loss:
        partition, first, _ = expired[0]
        raise DataLoss(
            f"the change feed needs all transactions of partition {partition}, and the first "
            f"available one is {first}: the archive has expired the others, and rows that they "
            "wrote are unknown. Hint: set failOnDataLoss=false to accept that the next change of "
            "such a row is an insert."
        )
    return found


def firsts_of(sources: Mapping[int, ReplicaSet]) -> dict[int, int]:
    """Return the first available ID of each partition."""
    archives = {partition: source.archived for partition, source in sources.items()}
    return {each: int(found.first) if found else 0 for each, found in archives.items()}
