"""The metrics of streaming queries, from the events that Spark sends and the marks of a log."""

import itertools
import json
import math
import stat
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client import REGISTRY

from tests.fault.load import wait_until
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.client import RowOutcomeCode, WaltzClient
from waltz_core.errors import BadConfig, Unreachable
from waltz_core.memory_waltz import MemoryWaltz
from waltz_spark import export_metrics
from waltz_spark.monitoring import query_metrics
from waltz_spark.offsets import encode_offset
from waltz_spark.options import parse_write
from waltz_spark.writer import stream_write
from waltz_spark.writer.appender import FinalRows
from waltz_spark.writer.stream_write import WaltzStreamWriter
from waltz_spark.writer.task import TaskResult, WriteJob
from waltz_spark.writer.write_counts import (
    NO_ROWS,
    WriteCounts,
    add_counts,
    make_directory,
    open_counts,
    read_counts,
)

CONNECT = "zk:2181/w/x"


class Progress(dict[str, Any]):
    """The used parts of a query progress."""

    def __init__(self, query: "Query", *ends: object) -> None:
        super().__init__(sources=[{"endOffset": end} for end in ends])
        self.id, self.runId, self.name = query.id, query.run, query.name


class Query:
    """A query and its events."""

    numbers = itertools.count(1)

    def __init__(self, listener: Any, name: str | None = None) -> None:
        self.id, self.run = (uuid.UUID(int=next(self.numbers)) for _ in range(2))
        self.name, self.listener = name, listener

    def start(self) -> None:
        event = SimpleNamespace(id=self.id, runId=self.run, name=self.name)
        self.listener.onQueryStarted(event)

    def progress(self, *ends: object) -> None:
        self.listener.onQueryProgress(SimpleNamespace(progress=Progress(self, *ends)))

    def end(self, run: uuid.UUID | None = None, exception: str | None = None) -> None:
        event = SimpleNamespace(id=self.id, runId=run or self.run, exception=exception)
        self.listener.onQueryTerminated(event)


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def client() -> Iterator[WaltzClient]:
    with MemoryWaltz(partition_count=2) as waltz, waltz.client() as memory_client:
        yield memory_client


@pytest.fixture
def listener(client: WaltzClient, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Export the metrics of a session; return its listener."""
    monkeypatch.setattr(query_metrics, "with_client", lambda _connect, use: use(client))
    monkeypatch.setattr(query_metrics, "_queries", query_metrics._Queries())
    monkeypatch.setattr(query_metrics, "_connect_strings", {})
    monkeypatch.setattr(query_metrics, "REQUEST_S_MAX", TEST_TIMEOUT_S)
    monkeypatch.setattr(query_metrics._scrape, "_requests", {})
    listeners: list[Any] = []
    spark: Any = SimpleNamespace(streams=SimpleNamespace(addListener=listeners.append))
    export_metrics(spark, CONNECT)
    export_metrics(spark, "zk:2181,zk2:2181/w/x")  # rule 4
    return listeners[0]


def offset(client: WaltzClient, *marks: int) -> str:
    """Return an offset in the format of a query progress."""
    return json.dumps(encode_offset(dict(enumerate(marks)), client.cluster().key))


def append(client: WaltzClient, partition: int, count: int) -> None:
    for _ in range(count):
        client.append(b"data", partition=partition).result(TEST_TIMEOUT_S)


def lag(unit: str, query: str, partition: int, source: int = 0) -> float | None:
    labels = {"cluster": "memory", "query": query}
    labels |= {"source": str(source), "partition": str(partition)}
    return REGISTRY.get_sample_value(f"waltz_spark_lag_{unit}", labels)


def rows(outcome: str, query: str) -> float | None:
    return REGISTRY.get_sample_value(f"waltz_spark_{outcome}_rows_total", {"query": query})


def test_the_lag_grows_while_a_query_makes_no_progress(client: WaltzClient, listener: Any) -> None:
    append(client, 0, 3)
    query = Query(listener, "balances")
    query.start()
    assert lag("transactions", "balances", 0) is None
    query.progress(offset(client, 0, -1))
    assert lag("transactions", "balances", 0) == 2
    assert lag("transactions", "balances", 1) == lag("seconds", "balances", 1) == 0
    age_s = lag("seconds", "balances", 0)
    assert age_s is not None
    assert 0 <= age_s < TEST_TIMEOUT_S
    append(client, 1, 1)
    assert lag("transactions", "balances", 1) == 1
    query.progress(offset(client, 2, 0))
    assert lag("transactions", "balances", 0) == lag("seconds", "balances", 0) == 0


def test_each_log_of_a_query_has_its_lag_and_other_sources_have_none(
    client: WaltzClient, listener: Any
) -> None:
    append(client, 0, 3)
    query = Query(listener)
    other_cluster = json.dumps(encode_offset({0: 0}, b"another cluster."))
    kafka = '{"topic": {"0": 42}}'
    query.progress(kafka, offset(client, 0, -1), None, other_cluster, offset(client, 1, -1))
    name = str(query.id)
    assert lag("transactions", name, 0) == 2
    assert lag("transactions", name, 0, source=1) is None
    assert lag("transactions", name, 0, source=2) == 1


def test_the_lag_of_a_failed_query_continues_until_it_restarts(
    client: WaltzClient, listener: Any
) -> None:
    failed, again = Query(listener, "balances"), Query(listener, "balances")
    failed.start()
    failed.progress(offset(client, -1, -1))
    failed.end(exception="a bug")
    append(client, 0, 5)
    assert lag("transactions", "balances", 0) == 5
    again.start()
    assert lag("transactions", "balances", 0) is None
    again.progress(offset(client, 4, -1))
    again.end(run=uuid.UUID(int=0), exception="the end of an earlier run")
    assert lag("transactions", "balances", 0) == 0
    again.end()
    assert lag("transactions", "balances", 0) is None


def test_a_query_that_fails_in_its_first_micro_batch_has_the_lag_of_its_earlier_run(
    client: WaltzClient, listener: Any
) -> None:
    query = Query(listener, "balances")
    query.start()
    query.progress(offset(client, -1, -1))
    append(client, 0, 2)
    for number in range(2):
        query.end(exception="a bug")
        assert lag("transactions", "balances", 0) == 2
        query.run = uuid.UUID(int=number)
        query.start()
        assert lag("transactions", "balances", 0) == 2


def no_stamp(*_: object) -> int:
    return 0


def fail(*_: object) -> int:
    raise Unreachable("no server answers")


@pytest.mark.parametrize("stamp_ms_of", [no_stamp, fail])
def test_the_lag_in_seconds_is_nan_if_the_age_of_a_transaction_is_unknown(
    client: WaltzClient,
    listener: Any,
    monkeypatch: pytest.MonkeyPatch,
    stamp_ms_of: Callable[..., int],
) -> None:
    monkeypatch.setattr(query_metrics, "stamp_ms_of", stamp_ms_of)
    append(client, 0, 1)
    query = Query(listener, "balances")
    query.progress(offset(client, -1, -1))
    age_s = lag("seconds", "balances", 0)
    assert age_s is not None
    assert math.isnan(age_s)
    assert lag("transactions", "balances", 0) == 1


def test_only_the_row_metrics_are_exported_while_the_log_is_unavailable(
    client: WaltzClient, listener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = Query(listener, "balances")
    query.progress(offset(client, -1, -1))
    monkeypatch.setattr(query_metrics, "with_client", fail)
    assert lag("transactions", "balances", 0) is None
    assert rows("committed", "balances") == 0


def test_a_scrape_does_not_wait_for_a_log_that_does_not_answer(
    client: WaltzClient, listener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_answer = threading.Event()

    def wait(connect: str, use: Callable[[WaltzClient], None]) -> None:
        assert connect == "other:2181/w" or may_answer.wait(TEST_TIMEOUT_S)
        use(client)

    query = Query(listener, "balances")
    query.progress(offset(client, -1, -1))
    monkeypatch.setattr(query_metrics, "REQUEST_S_MAX", 0.01)
    monkeypatch.setattr(query_metrics, "with_client", wait)
    for _ in range(2):
        assert lag("transactions", "balances", 0) is None
    monkeypatch.setattr(query_metrics, "REQUEST_S_MAX", 0.2)
    query_metrics._connect_strings["other:2181/w"] = None  # the other log answers
    wait_until("the other log answers", lambda: lag("transactions", "balances", 0) == 0)
    del (
        query_metrics._connect_strings["other:2181/w"],
        query_metrics._scrape._requests["other:2181/w"],
    )
    assert lag("transactions", "balances", 0) is None
    may_answer.set()
    wait_until("the log answers", lambda: lag("transactions", "balances", 0) == 0)


def test_a_commit_counts_the_rows_of_its_tasks(
    client: WaltzClient, listener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = Query(listener, "writer")
    query.start()
    properties = {"sql.streaming.queryId": str(query.id), "streaming.sql.batchId": "7"}
    context = SimpleNamespace(getLocalProperty=properties.get)
    monkeypatch.setattr(stream_write.TaskContext, "get", lambda: context)
    monkeypatch.setattr(stream_write, "task_attempt", lambda: (0, 0))
    monkeypatch.setattr(WriteJob, "write_task", lambda *_: task_of(retry_of=2))
    writer = object.__new__(WaltzStreamWriter)
    options = parse_write({"path": CONNECT, "exactlyOnce": "false", "onLockFailure": "retry"})
    writer._job = WriteJob(client.layout(), options, {}, "run", 0, None)
    message = writer.write(iter(()))
    writer.commit([message, None, message], 7)
    assert read_counts(str(query.id)) == WriteCounts(committed=4, rejected=2, retried=12)


def task_of(*, retry_of: int) -> TaskResult:
    """Return the result of a task with two committed rows and a rejected one."""
    reasons = np.array([RowOutcomeCode.COMMITTED, RowOutcomeCode.COMMITTED, RowOutcomeCode.LOCK])
    ids = np.array([4, 5, -1])
    written = TaskResult()
    written.count(FinalRows(0, None, ids, reasons.astype(np.uint8), ids, 5, retry_of + 1))
    return written


def test_the_rows_of_each_micro_batch_are_counted(listener: Any) -> None:
    query = Query(listener, "writer")
    query.start()
    assert rows("committed", "writer") == 0
    for _ in range(2):
        add_counts(str(query.id), WriteCounts(10, 2, 3))  # as the commit does
        query.progress("0")
    assert rows("committed", "writer") == 20
    assert rows("rejected", "writer") == 4
    assert rows("retried", "writer") == 6
    query.end()
    assert rows("committed", "writer") is None
    assert read_counts(str(query.id)) == NO_ROWS
    assert list(Path(tempfile.gettempdir()).glob("*/*")) == []


def test_a_commit_writes_nothing_unless_metrics_are_exported(tmp_path: Path) -> None:
    add_counts("query", WriteCounts(1, 1, 1))
    assert list(tmp_path.iterdir()) == []
    make_directory()
    add_counts("query", WriteCounts(1, 1, 1))
    assert read_counts("query") == NO_ROWS
    open_counts("query")
    add_counts("query", WriteCounts(1, 1, 1))
    open_counts("query")
    assert read_counts("query") == WriteCounts(1, 1, 1)


def test_a_directory_of_other_users_is_not_used(tmp_path: Path) -> None:
    make_directory()
    open_counts("query")
    (directory,) = tmp_path.iterdir()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    directory.chmod(0o777)
    add_counts("query", WriteCounts(1, 1, 1))
    assert read_counts("query") == NO_ROWS
    with pytest.raises(BadConfig, match="other users may write to it"):
        make_directory()
    directory.chmod(0o700)
    moved = directory.rename(tmp_path / "moved")
    directory.symlink_to(moved)
    with pytest.raises(BadConfig, match="belongs to another user"):
        make_directory()


def test_counters_start_from_zero_if_their_file_is_damaged(tmp_path: Path) -> None:
    make_directory()
    open_counts("query")
    (path,) = tmp_path.glob("*/query")
    for damaged in ("", "[1", "[1, 2, 3, 4]", '["a"]'):
        path.write_text(damaged)
        assert read_counts("query") == NO_ROWS
    add_counts("query", WriteCounts(1, 1, 1))
    assert read_counts("query") == WriteCounts(1, 1, 1)
