"""The start of a batch read or of a stream's first micro-batch, and the end of a batch read.

To find a start by time, a read sends requests to the log or to its archive.

Transactions below the first available ID of the log have expired from the archive. A read that
requests such transactions is data loss. Data loss is an error unless the options allow it. There is
data loss in these cases:
- a start before the first available ID,
- requested IDs below the first available ID,
- a user-specified end below the first available ID, if the read begins at the beginning of the log.
"""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from waltz_core.client import ReplicaSet, WaltzClient
from waltz_core.client.read.start_times import last_id_before_time, stamp_ms_of
from waltz_core.errors import DataLoss
from waltz_core.records.record import BEFORE_FIRST
from waltz_spark import planning
from waltz_spark.datasource.archive_read import last_archived_before
from waltz_spark.options import ReadOptions

# A start by time takes about thirty sequential requests; at most this number of partitions do this
# concurrently.
CONCURRENT_PARTITIONS_MAX = 32

_log = logging.getLogger("waltz")


def determine_starts(
    client: WaltzClient, options: ReadOptions, sources: Mapping[int, ReplicaSet]
) -> dict[int, int]:
    """Return the exclusive start of each partition. `sources` has the current marks.

    Raises:
        BadConfig: the user specified marks, but none for one of the partitions.
        DataLoss: a specified mark is past the end of its log, transactions after a specified mark
            or time may have expired, or some of the specified IDs have expired.
        Unavailable: a partition does not answer.
    """
    marks, first_ids = high_water_marks_of(sources), first_available_ids(sources)
    if options.starting_marks == "earliest" and options.starting_time_ms is None:
        return _earliest_starts(options, first_ids)
    if options.starting_time_ms is None:
        given_marks = planning.resolve_starts(options, marks)
        return raise_to_first_available(
            options, given_marks, first_ids, "option 'startingHighWaterMarks'"
        )
    since_ms = options.starting_time_ms

    def start_by_time(partition: int) -> int:
        archived = sources[partition].archived
        older_id = first_ids[partition] - 1
        if options.archive_url is not None and archived is not None:
            older_id = last_archived_before(options.archive_url, partition, archived, since_ms)
            if BEFORE_FIRST < older_id < archived.last:
                return max(older_id, first_ids[partition] - 1)
        return last_id_before_time(
            partial(stamp_ms_of, client, partition), marks[partition], since_ms, older_id
        )

    with ThreadPoolExecutor(CONCURRENT_PARTITIONS_MAX) as pool:
        last_older_ids = dict(zip(marks, pool.map(start_by_time, marks), strict=True))
    # If no available transaction is older than the time, expired transactions may match it, too.
    start_marks = {
        each: at - 1 if 0 < first_ids[each] == at + 1 else at for each, at in last_older_ids.items()
    }
    return raise_to_first_available(options, start_marks, first_ids, "option 'startingTimestamp'")


def _earliest_starts(options: ReadOptions, first_ids: Mapping[int, int]) -> dict[int, int]:
    """Return the marks before the first available or requested ID of each log.

    Raises:
        DataLoss: as for `raise_to_first_available`.
    """
    ids = options.transaction_ids
    first_ids_of_ranges = [low for low, _ in ids]
    start_marks = {
        partition: min([first, *first_ids_of_ranges]) - 1 for partition, first in first_ids.items()
    }
    ranges_text = planning.first_items_text(
        [f"{low}-{high}" if low < high else low for low, high in ids]
    )
    return raise_to_first_available(
        options, start_marks, first_ids, f"option 'transactionIds' ({ranges_text})"
    )


def determine_ends(options: ReadOptions, sources: Mapping[int, ReplicaSet]) -> dict[int, int]:
    """Return the inclusive end of each partition in `sources`, at least the last expired ID.

    Raises:
        BadConfig: the user specified marks, but none for one of the partitions.
        DataLoss: a specified mark is past the end of its log, or all transactions up to it have
            expired.
    """
    first_ids = first_available_ids(sources)
    end_marks = planning.resolve_ends(options, high_water_marks_of(sources))
    is_earliest = options.starting_marks == "earliest" and options.starting_time_ms is None
    is_given = not isinstance(options.ending_marks, str)
    if is_earliest and is_given and not options.transaction_ids:
        last_requested = {
            partition: end for partition, end in end_marks.items() if end > BEFORE_FIRST
        }
        _check_not_expired(options, last_requested, first_ids, "option 'endingHighWaterMarks' ends")
    return {partition: max(end, first_ids[partition] - 1) for partition, end in end_marks.items()}


def high_water_marks_of(sources: Mapping[int, ReplicaSet]) -> dict[int, int]:
    """Return the high-water mark of each partition."""
    return {partition: int(source.high_water_mark) for partition, source in sources.items()}


def raise_to_first_available(
    options: ReadOptions, starts: Mapping[int, int], first_ids: Mapping[int, int], origin: str
) -> dict[int, int]:
    """Return the starts, raised to the first available ID of each log.

    Args:
        options: state whether data loss is allowed.
        starts: the exclusive start of each partition.
        first_ids: the first available ID of each of these partitions.
        origin: the origin of the starts, for an error message.

    Raises:
        DataLoss: a start is before the first available ID; the error names the partition and the
            ID.
    """
    _check_not_expired(
        options,
        {partition: start + 1 for partition, start in starts.items()},
        first_ids,
        f"{origin} begins",
    )
    return {partition: max(start, first_ids[partition] - 1) for partition, start in starts.items()}


def _check_not_expired(
    options: ReadOptions, ids: Mapping[int, int], first_ids: Mapping[int, int], subject: str
) -> None:
    """Raise DataLoss if IDs have expired, or log a warning if the options allow data loss.

    `subject` is the beginning of the message, such as "the stream begins".
    """
    expired = {
        each: first_ids[each] for each, wanted_id in ids.items() if wanted_id < first_ids[each]
    }
    if expired and options.fails_on_data_loss:
        partition, first = min(expired.items())
        raise DataLoss(
            f"{subject} before transaction {first}, the first available transaction of partition "
            f"{partition}: earlier transactions have expired in the archive. Hint: read from "
            "the first available transaction on, or set failOnDataLoss=false to skip the "
            "missing ones."
        )
    if expired:
        _log.warning("spark.transactions_expired first_available_by_partition=%s", expired)


def extend_to_first_available(
    options: ReadOptions,
    spans: Sequence[planning.TransactionRange],
    sources: Mapping[int, ReplicaSet],
) -> list[planning.TransactionRange]:
    """Return the spans of a change feed, which begin at the first available ID of each log.

    Raises:
        DataLoss: transactions have expired, and the options do not allow it.
    """
    first_ids = first_available_ids(sources)
    extended = [span._replace(first=first_ids[span.partition]) for span in spans]
    expired = [span for span in extended if span.first > 0]
    if expired and options.fails_on_data_loss:
        partition, first, _ = expired[0]
        raise DataLoss(
            f"the change feed needs all transactions of partition {partition}, but the first "
            f"available one is {first}: the earlier ones have expired in the archive, so the rows "
            "that they wrote are unknown. Hint: set failOnDataLoss=false to accept that the next "
            "change of such a row is an insert."
        )
    return extended


def first_available_ids(sources: Mapping[int, ReplicaSet]) -> dict[int, int]:
    """Return the first available ID of each partition."""
    archives = {partition: source.archived for partition, source in sources.items()}
    return {each: int(archived.first) if archived else 0 for each, archived in archives.items()}
