"""A read of a log that begins above 0 starts there, or reports expired transactions."""

import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.spark.streams import CONNECT, Cluster, reader_of
from waltz_core.client.read.ranges import ArchivedRange, ReplicaSet
from waltz_core.errors import BeforeLogStart, DataLoss
from waltz_core.records.record import TransactionId
from waltz_spark.datasource import batch_read
from waltz_spark.datasource.batch_read import ReadTask, WaltzBatchReader
from waltz_spark.datasource.start_offsets import determine_starts
from waltz_spark.options import parse_read
from waltz_spark.spark_version import ReadMaxRows

FIRST, MARK = 5, 9
LIMIT = ReadMaxRows(1_000)
HINT = r"begins before transaction 5, .* of partition 0: .* Hint: .* failOnDataLoss=false"


class Log:
    """Partition 0 with the IDs 5..9; the commit time of an ID, in seconds, is ten times the ID."""

    def read_range(self, partition: int, first: int, last: int, **_: Any) -> list[Any]:
        assert (partition, first) == (0, last)
        if first < FIRST:
            raise BeforeLogStart(f"expected IDs from {FIRST} on", FIRST)
        return [SimpleNamespace(stamps=[(first, first, 10_000 * first)])]


def replica_set(first: int | None = FIRST) -> ReplicaSet:
    archived = None
    if first is not None:
        archived = ArchivedRange(TransactionId(first), TransactionId(MARK), "m", 0)
    return ReplicaSet(bytes(16), 1, 1, MARK, ("s:1",), archived=archived)


def start_of(first: int | None = FIRST, **options: str) -> int:
    chosen = parse_read({"path": CONNECT, **options})
    return determine_starts(Log(), chosen, {0: replica_set(first)})[0]


@pytest.mark.parametrize(("first", "start"), [(None, -1), (0, -1), (5, 4), (10, 9)])
def test_the_earliest_start_is_the_first_available_id(first: int | None, start: int) -> None:
    assert start_of(first, startingHighWaterMarks="earliest") == start


@pytest.mark.parametrize(("mark", "is_lost"), [(-1, True), (3, True), (4, False), (9, False)])
def test_a_given_mark_below_the_first_available_id_is_data_loss(mark: int, is_lost: bool) -> None:
    options = {"startingHighWaterMarks": json.dumps({"0": mark})}
    if is_lost:
        with pytest.raises(DataLoss, match=HINT):
            start_of(**options)
    else:
        assert start_of(**options) == mark
    assert start_of(**options, failOnDataLoss="false") == max(mark, FIRST - 1)


@pytest.mark.parametrize(
    ("seconds", "start", "is_lost"), [(40, 4, True), (50, 4, True), (51, 5, False), (99, 9, False)]
)
def test_a_start_time_before_the_first_available_transaction_is_data_loss(
    seconds: int, start: int, is_lost: bool
) -> None:
    options = {"startingTimestamp": f"1970-01-01T00:{seconds // 60:02}:{seconds % 60:02}Z"}
    if is_lost:
        with pytest.raises(DataLoss, match=HINT):
            start_of(**options)
    assert start_of(**options, failOnDataLoss="false") == start


@pytest.mark.parametrize(
    ("ids", "is_lost"), [("0-1", True), ("3-7", True), ("7,4", True), ("5-7", False), ("12", False)]
)
def test_ids_below_the_first_available_id_are_data_loss(
    ids: str, is_lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"startingHighWaterMarks": "earliest", "transactionIds": ids}
    if is_lost:
        shown = "4, 7" if ids == "7,4" else ids
        with pytest.raises(DataLoss, match=rf"option 'transactionIds' \({shown}\) {HINT}"):
            start_of(**options)
    else:
        assert start_of(**options) == FIRST - 1
    with caplog.at_level(logging.WARNING, "waltz"):
        assert start_of(**options, failOnDataLoss="false") == FIRST - 1
    assert (
        "spark.transactions_expired first_available_by_partition={0: 5}" in caplog.text
    ) is is_lost


def test_an_error_shows_the_first_ten_ranges_of_ids() -> None:
    ids = ",".join(map(str, range(0, 100, 2)))
    with pytest.raises(DataLoss, match=r"\(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, \.\.\.\) begins"):
        start_of(transactionIds=ids)


def test_ids_before_the_start_of_a_read_are_not_requested() -> None:
    ids = {"transactionIds": "0-1"}
    assert start_of(**ids, startingHighWaterMarks='{"0": 4}') == 4
    assert start_of(**ids, startingHighWaterMarks="latest") == MARK
    assert start_of(**ids, startingTimestamp="1970-01-01T00:00:51Z") == 5
    assert start_of(None, **ids) == start_of(0, **ids) == -1


def test_a_start_time_before_an_unexpired_log_selects_the_beginning_of_the_log() -> None:
    log = SimpleNamespace(
        read_range=lambda _, first, *__, **___: [SimpleNamespace(stamps=[(first, first, 77_000)])]
    )
    options = parse_read({"path": CONNECT, "startingTimestamp": "1970-01-01T00:00:09Z"})
    assert determine_starts(log, options, {0: replica_set(0)}) == {0: -1}
    assert determine_starts(log, options, {0: replica_set(None)}) == {0: -1}


def test_a_stream_continues_at_the_first_available_id_and_reports_it(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    reader = reader_of(pollInterval="0")
    start = reader.initialOffset()
    end = reader.latestOffset(start, LIMIT)
    cluster.firsts = {0: FIRST, 1: 0}
    for request in (
        lambda: reader.latestOffset(start, LIMIT),
        lambda: reader.partitions(start, end),
    ):
        with pytest.raises(DataLoss, match=f"the stream {HINT}"):
            request()
    reader = reader_of(pollInterval="0", failOnDataLoss="false")
    with caplog.at_level(logging.WARNING, "waltz"):
        later = reader.latestOffset(start, ReadMaxRows(4))
    assert "spark.transactions_expired first_available_by_partition={0: 5}" in caplog.text
    assert (later["0"], later["1"]) == (5, 2), "the limit counts available transactions"
    tasks = reader.partitions(start, end)
    spans = [
        (task.partition, task.first, task.last) for task in tasks if isinstance(task, ReadTask)
    ]
    assert spans == [(0, FIRST, 10), (1, 0, 10)]


def test_a_micro_batch_of_expired_transactions_reads_no_rows(cluster: Cluster) -> None:
    reader = reader_of(pollInterval="0", failOnDataLoss="false")
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadMaxRows(4))
    cluster.firsts = {0: FIRST, 1: 11}
    assert not reader.partitions(start, end)


@pytest.fixture
def batch(monkeypatch: pytest.MonkeyPatch, cluster: Cluster) -> Cluster:
    monkeypatch.setattr(batch_read, "query_replica_sets", cluster.sources)
    cluster.firsts = {0: FIRST, 1: 0}
    return cluster


def scan_ranges_of(**options: str) -> list[tuple[int, int, int]]:
    chosen = parse_read({"path": CONNECT, **options})
    tasks = WaltzBatchReader(chosen, None).partitions()
    return [(task.partition, task.first, task.last) for task in tasks if isinstance(task, ReadTask)]


def test_a_batch_read_is_limited_to_the_available_transactions(batch: Cluster) -> None:
    ends = {"endingHighWaterMarks": '{"0": 3, "1": 3}'}
    assert scan_ranges_of() == [(0, FIRST, 10), (1, 0, 10)]
    given = {"startingHighWaterMarks": '{"0": 1, "1": 1}', "failOnDataLoss": "false"}
    assert scan_ranges_of(**given, **ends) == [(1, 2, 3)]
    batch.firsts = {0: 11, 1: 0}
    assert scan_ranges_of() == [(1, 0, 10)], "all transactions of partition 0 have expired"


@pytest.mark.usefixtures("batch")
@pytest.mark.parametrize(
    ("end", "is_lost"), [(-1, False), (0, True), (FIRST - 1, True), (FIRST, False)]
)
def test_a_batch_read_that_ends_before_the_first_available_id_fails(
    end: int, is_lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    ends = {"endingHighWaterMarks": json.dumps({"0": end, "1": 3})}
    spans = [*([(0, FIRST, FIRST)] if end == FIRST else []), (1, 0, 3)]
    if is_lost:
        with pytest.raises(
            DataLoss, match=rf"'endingHighWaterMarks' {HINT.replace('begin', 'end')}"
        ):
            scan_ranges_of(**ends)
    else:
        assert scan_ranges_of(**ends) == spans
    assert scan_ranges_of(**ends, transactionIds="5-9") == spans[:-1]
    with caplog.at_level(logging.WARNING, "waltz"):
        assert scan_ranges_of(**ends, failOnDataLoss="false") == spans
    assert (
        "spark.transactions_expired first_available_by_partition={0: 5}" in caplog.text
    ) is is_lost


@pytest.mark.usefixtures("batch")
def test_a_batch_read_of_expired_ids_fails_or_returns_the_available_transactions() -> None:
    for ids in ("0-3", "3-6"):
        with pytest.raises(DataLoss, match=rf"\({ids}\) {HINT}"):
            scan_ranges_of(transactionIds=ids)
    assert scan_ranges_of(transactionIds="0-3", partitions="1") == [(1, 0, 3)]
    allowed = {"failOnDataLoss": "false"}
    assert scan_ranges_of(transactionIds="0-3", **allowed) == [(1, 0, 3)]
    assert scan_ranges_of(transactionIds="3-6", **allowed) == [(0, FIRST, 6), (1, 3, 6)]


def test_a_stream_of_expired_ids_fails_if_it_starts_at_the_earliest(cluster: Cluster) -> None:
    cluster.firsts = {0: FIRST, 1: 0}
    with pytest.raises(DataLoss, match=rf"\(0-3\) {HINT}"):
        reader_of(transactionIds="0-3").initialOffset()
    latest = reader_of(transactionIds="0-3", startingHighWaterMarks="latest").initialOffset()
    assert (latest["0"], latest["1"]) == (10, 10)
