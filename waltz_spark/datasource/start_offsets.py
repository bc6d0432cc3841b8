"""The start of a read, of a batch or of the first micro-batch of a stream; the end of a batch.

A start by time needs requests to the log, or a look into its archive. A start before the first
available ID of the log is data loss, unless the options allow it: the archive has expired the
transactions in between. So are requested IDs below it, and a given end below it, if the read has no
other start.
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

# A start by time takes about thirty sequential requests; for this many partitions concurrently.
CONCURRENT_PARTITIONS_MAX = 32

_log = logging.getLogger("waltz")


def starts(
    client: WaltzClient, options: ReadOptions, sources: Mapping[int, ReplicaSet]
) -> dict[int, int]:
    """Return the exclusive start of each partition in `sources`, which have the marks now.

    Raises:
        BadConfig: marks were given, but none for one of the partitions.
        DataLoss: a given mark is past the end of its log, transactions since a given mark or time
            may have expired, or some of the given IDs have.
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
    # If no available transaction is older than the time, expired ones may be as recent.
    wanted = {each: at - 1 if 0 < firsts[each] == at + 1 else at for each, at in found.items()}
    return check_available(options, wanted, firsts, "option 'startingTimestamp'")


def _earliest(options: ReadOptions, firsts: Mapping[int, int]) -> dict[int, int]:
    """Return the start of each log, unless given IDs below it have expired.

    Raises:
        DataLoss: as `check_available`.
    """
    ids = options.transaction_ids
    lows = [low for low, _ in ids]
    wanted = {partition: min([first, *lows]) - 1 for partition, first in firsts.items()}
    shown = planning.parts_text([f"{low}-{high}" if low < high else low for low, high in ids])
    return check_available(options, wanted, firsts, f"option 'transactionIds' ({shown})")


def ends(options: ReadOptions, sources: Mapping[int, ReplicaSet]) -> dict[int, int]:
    """Return the inclusive end of each partition in `sources`, none before an expired ID.

    Raises:
        BadConfig: marks were given, but none for one of the partitions.
        DataLoss: a given mark is past the end of its log, or everything up to it has expired.
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
    """Return the starts, none before the first available ID of its log.

    Args:
        options: say whether data loss is allowed.
        starts: the exclusive start of each partition.
        firsts: the first available ID of each of them.
        what: the origin of the starts, for an error.

    Raises:
        DataLoss: names a partition and the first available ID.
    """
    _check_expired(
        options, {each: start + 1 for each, start in starts.items()}, firsts, f"{what} begins"
    )
    return {each: max(start, firsts[each] - 1) for each, start in starts.items()}


def _check_expired(
    options: ReadOptions, ids: Mapping[int, int], firsts: Mapping[int, int], what: str
) -> None:
    """Report IDs that have expired; raises DataLoss as `check_available`, if it is not allowed."""
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
    """Return the spans, each from the first available transaction of its log: for a change feed.

    Raises:
        DataLoss: transactions have expired, unless that is allowed.
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
