"""The split of a read into tasks at the boundaries of archived objects."""

import pytest
from pyspark import cloudpickle

from waltz_core.archive.manifest import Manifest, ObjectEntry
from waltz_core.client import ArchivedObjects
from waltz_core.records.record import GENESIS_CHAIN, PartitionId, TransactionId
from waltz_spark.datasource.archive_read import TASK_BYTES_MAX, split_at_objects
from waltz_spark.planning import TransactionRange


def objects_with(*ends: tuple[int, float], first: int = 0) -> ArchivedObjects:
    """Return objects; `ends` has the last ID of each, and its size as a multiple of a task's."""
    entries, begin = [], 0
    for last, size in ends:
        record_bytes = int(size * TASK_BYTES_MAX)
        ids = TransactionId(begin), TransactionId(last)
        entries.append(ObjectEntry("o", *ids, GENESIS_CHAIN, 1, 2, record_bytes, 3, 4))
        begin = last + 1
    reach = TransactionId(begin - 1)
    manifest = Manifest(
        bytes(16), PartitionId(3), 1, TransactionId(first), reach, GENESIS_CHAIN, (), tuple(entries)
    )
    return ArchivedObjects("file:///a", manifest)


@pytest.mark.parametrize(
    ("objects", "span", "expected"),
    [
        (None, (0, 9), [(0, 9)]),
        (objects_with((9, 0.4), (19, 0.4), (29, 0.4)), (0, 29), [(0, 19), (20, 29)]),
        (objects_with((9, 0.4), (19, 0.4)), (5, 99), [(5, 19), (20, 99)]),
        (objects_with((9, 0.4), (19, 0.4)), (12, 15), [(12, 15)]),
        (objects_with((99, 4)), (0, 99), [(0, 24), (25, 49), (50, 74), (75, 99)]),
        (objects_with((99, 4)), (0, 49), [(0, 24), (25, 49)]),
        (
            objects_with((9, 0.4), (109, 2), (119, 0.9)),
            (0, 119),
            [(0, 9), (10, 59), (60, 109), (110, 119)],
        ),
        (objects_with((9, 0.4), (19, 0.4), first=7), (0, 25), [(0, 6), (7, 19), (20, 25)]),
        (objects_with((9, 1), (19, 1)), (20, 25), [(20, 25)]),
    ],
)
def test_tasks_end_at_object_boundaries_and_at_the_byte_limit(
    objects: ArchivedObjects | None, span: tuple[int, int], expected: list[tuple[int, int]]
) -> None:
    parts = split_at_objects(TransactionRange(3, *span), objects)
    assert [(part.first, part.last) for part in parts] == expected
    assert {part.partition for part in parts} == {3}


def test_a_task_receives_only_the_objects_of_its_range() -> None:
    whole = objects_with((9, 0.4), (19, 0.4), (29, 0.4))
    part = cloudpickle.loads(cloudpickle.dumps(whole.objects_between(12, 19)))
    assert [entry.last for entry in part.entries] == [19]
    assert (part.manifest.first, part.manifest.last) == (10, 19)
