"""Tasks of a change feed: one for each partition, with the log from its first available ID."""

import pytest

from tests.unit.spark.feeds import SCHEMA, options_of
from tests.unit.spark.streams import Cluster
from waltz_core.errors import DataLoss
from waltz_spark.datasource.batch_read import ReadTask
from waltz_spark.datasource.stream_read import WaltzStreamReader
from waltz_spark.spark_version import ReadAllAvailable

EARLIEST = {"startingHighWaterMarks": "earliest"}


def plan(cluster: Cluster, begin: dict[int, int], **options: str) -> list[tuple[int, ...]]:
    """Return partition, first ID, begin and last ID of each task."""
    marks = {str(partition): mark for partition, mark in begin.items()}
    start = marks | {"cluster": cluster.info.key.hex()}
    reader = WaltzStreamReader(options_of(**EARLIEST, **options), SCHEMA)
    end = reader.latestOffset(start, ReadAllAvailable())
    tasks = reader.partitions(start, end)
    assert all(isinstance(task, ReadTask) for task in tasks)
    return [
        (task.partition, task.first, task.feed_start_mark, task.last)
        for task in tasks
        if isinstance(task, ReadTask)
    ]


def test_one_task_reads_the_whole_log_of_each_partition_with_new_transactions(
    cluster: Cluster,
) -> None:
    cluster.set_cluster(1, 5_000_000, 10, 7)
    assert plan(cluster, {0: 3_999_999, 1: -1, 2: 7}) == [
        (0, 0, 3_999_999, 5_000_000),
        (1, 0, -1, 10),
    ]


def test_expired_transactions_before_the_start_are_data_loss_too(cluster: Cluster) -> None:
    cluster.set_cluster(1, 50, 10)
    cluster.firsts = {0: 20}
    with pytest.raises(DataLoss, match=r"all transactions of partition 0, .* is 20: .*Hint: set"):
        plan(cluster, {0: 30, 1: 9})
    assert plan(cluster, {0: 50, 1: 9}) == [(1, 0, 9, 10)]
    found = plan(cluster, {0: 30, 1: 9}, failOnDataLoss="false")
    assert found == [(0, 20, 30, 50), (1, 0, 9, 10)]
    assert plan(cluster, {0: 5, 1: 10}, failOnDataLoss="false") == [(0, 20, 19, 50)]
