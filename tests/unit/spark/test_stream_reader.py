"""Stream reads when the log is recreated between planning and reading."""

import json
from collections.abc import Callable

import pytest

from tests.unit.spark.streams import Cluster, read, reader_of
from waltz_core.cluster.znodes.restore_sources import RestoreSources
from waltz_core.errors import DataLoss
from waltz_spark import lag_of
from waltz_spark.datasource import stream_read
from waltz_spark.datasource.stream_read import WaltzStreamReader
from waltz_spark.spark_version import ReadMaxRows

LIMIT = ReadMaxRows(1_000)


def offset(key: int, *marks: int) -> stream_read.Offset:
    by_name = {str(partition): mark for partition, mark in enumerate(marks)}
    return {**by_name, "cluster": bytes([key] * 16).hex()}


def do_nothing(_reader: WaltzStreamReader) -> None:
    pass


def report(reader: WaltzStreamReader) -> None:
    """Request the marks for the progress report, as Spark does between micro-batches."""
    reader.reportLatestOffset()


@pytest.mark.parametrize("between", [do_nothing, report])
@pytest.mark.parametrize("poll", ["0", "3600000"])
def test_a_micro_batch_does_not_read_a_recreated_log_with_old_offsets(
    cluster: Cluster, between: Callable[[WaltzStreamReader], None], poll: str
) -> None:
    reader = reader_of(pollInterval=poll)
    start = reader.initialOffset()
    end = reader.latestOffset(start, LIMIT)
    cluster.set_cluster(2, 50, 50)
    between(reader)
    with pytest.raises(DataLoss, match="is another cluster than that of the"):
        reader.partitions(start, end)


@pytest.mark.parametrize("between", [do_nothing, report])
@pytest.mark.parametrize("poll", ["0", "3600000"])
@pytest.mark.parametrize("marks", [(50, 50), (50, 3)])  # a longer log, and a shorter log
def test_with_data_loss_allowed_a_new_log_is_read_once_from_its_start(
    cluster: Cluster,
    between: Callable[[WaltzStreamReader], None],
    poll: str,
    marks: tuple[int, int],
) -> None:
    reader = reader_of(failOnDataLoss="false", pollInterval=poll)
    start = reader.initialOffset()
    end = reader.latestOffset(start, LIMIT)
    assert read(reader, start, end) == {0, 1}
    cluster.set_cluster(2, *marks)
    between(reader)
    assert read(reader, start, end) == set()
    assert read(reader, start, end) == set()  # Spark may plan it again
    again = reader.latestOffset(end, LIMIT)
    assert again == offset(2, -1, -1)
    assert read(reader, end, again) == set()
    last = reader.latestOffset(again, LIMIT)
    assert last == offset(2, *marks)
    assert read(reader, again, last) == {0, 1}


def test_a_log_that_grows_is_not_mistaken_for_another_log(cluster: Cluster) -> None:
    reader = reader_of(pollInterval="0")
    start = reader.initialOffset()
    end = reader.latestOffset(start, LIMIT)
    cluster.set_cluster(1, 50, 50)
    assert read(reader, start, end) == {0, 1}
    assert reader.latestOffset(end, LIMIT) == offset(1, 50, 50)


def test_a_restarted_query_does_not_read_another_longer_log(
    cluster: Cluster,
) -> None:
    reader = reader_of()
    end = reader.latestOffset(reader.initialOffset(), LIMIT)
    cluster.set_cluster(2, 50, 50)
    with pytest.raises(
        DataLoss, match=r"expected cluster key 0101.*, found 0202.*use another checkpoint"
    ):
        reader_of().latestOffset(end, LIMIT)
    allowed = reader_of(failOnDataLoss="false")
    again = allowed.latestOffset(end, LIMIT)
    assert again == offset(2, -1, -1)
    assert read(allowed, end, again) == set()
    assert reader_of().latestOffset(again, LIMIT) == offset(2, 50, 50)


def test_a_query_continues_from_its_checkpoint_in_a_restored_cluster(
    cluster: Cluster,
) -> None:
    start = reader_of().initialOffset()
    end = reader_of().latestOffset(start, LIMIT)
    source = RestoreSources({(bytes([1]) * 16).hex(): {0: 10, 1: 12}})
    cluster.set_cluster(2, 50, 50, restore_sources=source)
    assert read(reader_of(), start, end) == {0, 1}
    assert reader_of().latestOffset(end, LIMIT) == offset(2, 50, 50)


def test_a_checkpoint_past_the_restored_end_is_data_loss(cluster: Cluster) -> None:
    start = reader_of().initialOffset()
    end = reader_of().latestOffset(start, LIMIT)
    source = RestoreSources({(bytes([1]) * 16).hex(): {0: 10, 1: 9}})
    cluster.set_cluster(2, 50, 50, restore_sources=source)
    with pytest.raises(DataLoss, match="is another cluster than that of the"):
        reader_of().latestOffset(end, LIMIT)
    with pytest.raises(DataLoss, match="is another cluster than that of the"):
        reader_of().partitions(start, end)


def test_a_planned_micro_batch_reads_nothing_from_another_cluster(
    cluster: Cluster,
) -> None:
    start = reader_of().initialOffset()
    end = reader_of().latestOffset(start, LIMIT)
    cluster.set_cluster(2, 50, 50)
    with pytest.raises(DataLoss, match="is another cluster than that of the"):
        reader_of().partitions(start, end)
    assert read(reader_of(failOnDataLoss="false"), start, end) == set()


def test_offsets_of_development_versions_get_a_cluster_key_in_the_next_batch(
    cluster: Cluster,
) -> None:
    cluster.set_cluster(1, 50, 50)
    reader = reader_of()
    end = reader.latestOffset({"0": 10, "1": 10}, LIMIT)
    assert end == offset(1, 50, 50)
    assert read(reader, {"0": 10, "1": 10}, end) == {0, 1}


def test_the_lag_is_computed_only_from_the_partitions_of_an_offset() -> None:
    progress = {"latestOffset": offset(1, 9, 50), "endOffset": json.dumps(offset(1, 4, 50))}
    assert lag_of({"sources": [progress]}) == [{0: 5, 1: 0}]
