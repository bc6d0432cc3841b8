"""Plans the tasks of a read: which transactions to read, and how to split them into tasks.

Rules:
    1. A start is exclusive and an end is inclusive, like high-water marks.
    2. A mark past the end of its partition's log is data loss, unless the options allow it.
    3. Spans never overlap, and together cover exactly the requested transactions.
    4. If the user specifies marks, they must name each partition that is read. A default for the
       other partitions could read or skip transactions without the user's knowledge.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from waltz_core.errors import BadConfig, DataLoss
from waltz_core.records.record import BEFORE_FIRST
from waltz_spark.options import Marks, ReadOptions


class TransactionRange(NamedTuple):
    """Transactions first..last of one partition of the log."""

    partition: int
    first: int
    last: int


def chosen_partitions(options: ReadOptions, partition_count: int) -> list[int]:
    """Return the partitions to read.

    Raises:
        BadConfig: the options choose a partition that does not exist, or specify a mark for it.
    """
    check_partitions_of_marks(options, partition_count)
    partitions = range(partition_count) if options.partitions is None else options.partitions
    for partition in partitions:
        check_partition(partition, partition_count, "option 'partitions'")
    return list(partitions)


def check_partitions_of_marks(options: ReadOptions, partition_count: int) -> None:
    """Reject marks for partitions that the cluster does not have: they would have no effect.

    Raises:
        BadConfig: the error names the option and the partition.
    """
    for name, marks in (
        ("startingHighWaterMarks", options.starting_marks),
        ("endingHighWaterMarks", options.ending_marks),
    ):
        for partition in () if isinstance(marks, str) else marks:
            check_partition(partition, partition_count, f"option {name!r}")


def check_partition(partition: int, partition_count: int, subject: str) -> None:
    """Reject a partition that the cluster does not have.

    Raises:
        BadConfig: the error has the range of the existing partitions.
    """
    if not 0 <= partition < partition_count:
        raise BadConfig(
            f"{subject}: expected partitions in 0..{partition_count - 1}, found {partition}"
        )


def resolve_starts(options: ReadOptions, marks: Mapping[int, int]) -> dict[int, int]:
    """Return the exclusive start of each partition; `marks` has the log's marks now.

    Raises:
        BadConfig: the user specified marks, but none for one of the partitions (rule 4).
        DataLoss: a specified mark is past the end of its partition's log.
    """
    if options.starting_marks == "earliest":
        return dict.fromkeys(marks, int(BEFORE_FIRST))
    if options.starting_marks == "latest":
        return dict(marks)
    assert not isinstance(options.starting_marks, str)
    return _resolve_given_marks(options, options.starting_marks, marks, "startingHighWaterMarks")


def resolve_ends(options: ReadOptions, marks: Mapping[int, int]) -> dict[int, int]:
    """Return the inclusive end of each partition; `marks` has the log's marks now.

    Raises:
        The errors of `resolve_starts`.
    """
    if isinstance(options.ending_marks, str):
        return dict(marks)
    return _resolve_given_marks(options, options.ending_marks, marks, "endingHighWaterMarks")


def check_order(options: ReadOptions, starts: Mapping[int, int], ends: Mapping[int, int]) -> None:
    """Reject marks that end the read of a partition before its start.

    A start by time may be after the end, if no transaction up to the end is that recent.

    Raises:
        BadConfig: the error names the partition and both marks.
    """
    if options.starting_time_ms is not None:
        return
    for partition, end in ends.items():
        if starts[partition] > end:
            raise BadConfig(
                f"partition {partition}: the read starts after transaction "
                f"{starts[partition]}, but ends at transaction {end}. Hint: "
                "startingHighWaterMarks must not be above endingHighWaterMarks; with equal "
                "marks nothing is read."
            )


def _resolve_given_marks(
    options: ReadOptions, given_marks: Marks, marks: Mapping[int, int], name: str
) -> dict[int, int]:
    resolved: dict[int, int] = {}
    if missing := sorted(marks.keys() - given_marks.keys()):
        raise BadConfig(
            f"option {name!r} has no high-water mark for partition {first_items_text(missing)}: "
            f"expected marks for {len(marks)} partitions, found {len(given_marks)}. Hint: add a "
            'mark for each partition ("3": -1 means before the first transaction), or '
            "choose partitions with option 'partitions'."
        )
    for partition, mark in marks.items():
        given_mark = given_marks[partition]
        if given_mark > mark:
            if options.fails_on_data_loss:
                raise DataLoss(
                    f"option {name!r} names transaction {given_mark} of partition {partition}, "
                    f"but its log ends at transaction {mark}: the log belongs to another "
                    "cluster, or was created again. Hint: correct the option, or set "
                    "failOnDataLoss=false to read the transactions that exist."
                )
            given_mark = mark
        resolved[partition] = given_mark
    return resolved


def first_items_text(parts: Sequence[object]) -> str:
    """Return the first ten items as text for an error message, with `...` if there are more."""
    text = ", ".join(map(str, parts[:10]))
    return text if len(parts) <= 10 else f"{text}, ..."


def plan_spans(
    starts: Mapping[int, int],
    ends: Mapping[int, int],
    wanted_ranges: Sequence[tuple[int, int]] = (),
) -> list[TransactionRange]:
    """Return the ranges to read: `starts` to `ends`, within the wanted ID ranges if any."""
    ranges: list[TransactionRange] = []
    for partition in sorted(ends):
        first, last = starts[partition] + 1, ends[partition]
        floor = first
        for low, high in sorted(wanted_ranges) or [(first, last)]:
            wanted_range = TransactionRange(partition, max(floor, low), min(last, high))
            if wanted_range.first <= wanted_range.last:
                ranges.append(wanted_range)
                floor = wanted_range.last + 1
    return ranges


def split_spans(
    spans_to_split: Sequence[TransactionRange], *, task_count_min: int, per_task_max: int
) -> list[TransactionRange]:
    """Split spans into at least `task_count_min` tasks, of at most `per_task_max` transactions.

    Larger spans are split into more tasks. Each task has at least one transaction.
    """
    total = sum(span.last - span.first + 1 for span in spans_to_split)
    if total == 0:
        return []
    size = min(per_task_max, max(1, total // task_count_min))
    tasks: list[TransactionRange] = []
    for span in spans_to_split:
        count = span.last - span.first + 1
        part_count = -(-count // size)
        for index in range(part_count):
            first = span.first + count * index // part_count
            last = span.first + count * (index + 1) // part_count - 1
            tasks.append(TransactionRange(span.partition, first, last))
    return tasks
