"""Behavior on older PySpark: stream reader without admission control, Arrow batches."""

import logging

import pytest
from pyspark.sql.types import StructType

from tests.unit.spark.streams import Cluster, read, reader_of
from waltz_core.errors import DataLoss
from waltz_spark import spark_version
from waltz_spark.datasource.stream_read import WaltzStreamReader
from waltz_spark.offsets import Offset, encode_offset
from waltz_spark.spark_version import DataSourceStreamArrowWriter, adapt_stream_reader, arrow_schema


@pytest.fixture(autouse=True)
def without_admission_control(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_version, "HAS_ADMISSION_CONTROL", False)


def offset(*marks: int) -> Offset:
    return encode_offset(dict(enumerate(marks)), bytes([1]) * 16)


def old_reader_of(**options: str):
    return adapt_stream_reader(reader_of(pollInterval="0", **options))


def test_a_micro_batch_without_admission_control_reads_the_whole_log(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    reader = old_reader_of(maxTransactionsPerTrigger="3")
    start = reader.initialOffset()
    with caplog.at_level(logging.WARNING, "waltz"):
        end = reader.latestOffset()
    assert end == offset(10, 10)
    assert read(reader, start, end) == {0, 1}
    assert "micro_batch_over_limit transactions=22 maxTransactionsPerTrigger=3" in caplog.text


def test_offsets_never_go_back(cluster: Cluster) -> None:
    reader = old_reader_of()
    reader.partitions(offset(10, 10), offset(10, 10))  # as Spark does after a restart
    assert reader.latestOffset() == offset(10, 10)
    cluster.set_cluster(1, 9, 12)
    with pytest.raises(
        DataLoss, match="partition 0 up to transaction 10, but its log ends at transaction 9"
    ):
        reader.latestOffset()


def test_the_end_may_be_requested_before_the_start_is_known(cluster: Cluster) -> None:
    """With `availableNow`, PySpark requests the end first."""
    reader = old_reader_of()
    end = reader.latestOffset()
    assert end == offset(10, 10)
    with pytest.raises(
        DataLoss, match="partition 1 up to transaction 30, but its log ends at transaction 10"
    ):
        reader.partitions({"0": 4, "1": 30}, end)
    assert read(reader, {"0": 4, "1": 10}, end) == {0}


def test_a_start_above_an_outdated_end_is_not_data_loss(cluster: Cluster) -> None:
    reader = old_reader_of()
    end = reader.latestOffset()
    cluster.set_cluster(1, 12, 12)
    assert read(reader, {"0": 12, "1": 10}, end) == set()


def test_another_cluster_with_a_longer_log_is_data_loss(cluster: Cluster) -> None:
    reader = old_reader_of()
    start = offset(10, 10)
    cluster.set_cluster(2, 30, 30)
    end = reader.latestOffset()
    with pytest.raises(DataLoss, match="is another cluster than that of the"):
        reader.partitions(start, end)


def test_another_log_is_read_from_its_start_if_data_loss_is_allowed(cluster: Cluster) -> None:
    reader = old_reader_of(failOnDataLoss="false")
    end = reader.latestOffset()
    tasks = reader.partitions({"0": 10, "1": 30}, end)
    assert [(task.partition, task.first, task.last) for task in tasks] == [(1, 0, 10)]


def test_the_first_marks_are_confirmed_by_a_quorum(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a known start, only a quorum shows that a server is no longer the owner."""
    requests = []
    given = WaltzStreamReader._request_marks

    def record_linearizable(self: WaltzStreamReader, *, linearizable: bool):
        requests.append(linearizable)
        return given(self, linearizable=linearizable)

    monkeypatch.setattr(WaltzStreamReader, "_request_marks", record_linearizable)
    reader = old_reader_of()
    reader.latestOffset()
    reader.latestOffset()
    assert requests == [True, False]


def test_with_a_new_pyspark_the_reader_is_not_adapted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_version, "HAS_ADMISSION_CONTROL", True)
    reader = reader_of()
    assert adapt_stream_reader(reader) is reader


def test_timestamps_are_in_utc_with_any_version() -> None:
    schema = arrow_schema(StructType().add("at", "timestamp").add("local", "timestamp_ntz"))
    assert [str(part.type) for part in schema] == ["timestamp[us, tz=UTC]", "timestamp[us]"]


def test_a_stream_writer_gets_arrow_batches_with_any_version() -> None:
    """PySpark 4.0 looks for a batch writer, later versions for a stream writer."""
    from pyspark.sql import datasource  # noqa: PLC0415

    kind = getattr(datasource, "DataSourceStreamArrowWriter", datasource.DataSourceArrowWriter)
    assert issubclass(DataSourceStreamArrowWriter, kind)
    assert issubclass(DataSourceStreamArrowWriter, datasource.DataSourceStreamWriter)
