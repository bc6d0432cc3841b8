"""The appender over a modeled log that loses, rejects and accepts rows at random."""

import dataclasses
import random
from concurrent.futures import Future

import numpy as np
import pyarrow as pa
import pytest

from waltz_core.client import BatchOutcome, ReportOrder, RowOutcomeCode
from waltz_core.errors import ClientAheadOfLog, Overloaded
from waltz_core.records.batches import decode_append
from waltz_core.records.record import LOCKS_MAX
from waltz_spark.options import WriteOptions
from waltz_spark.writer import appender as appender_module
from waltz_spark.writer.appender import Appender
from waltz_spark.writer.columns import LOCK_COLUMNS, MARK_COLUMN, ConvertedRows
from waltz_spark.writer.recompute import RecomputedRows, RejectedRows

OPTIONS = WriteOptions(connect="zk:2181/waltz/x", batch_rows=7, in_flight_max=3)
LOST, REFUSED, TAKEN = (
    int(RowOutcomeCode.LOST),
    int(RowOutcomeCode.LOCK),
    int(RowOutcomeCode.COMMITTED),
)


class RandomLog:
    """Answers batches at once: a row is committed, rejected, or lost together with all later rows.

    Like the client, this log keeps a writer's order: after a loss, the log accepts no row until the
    writer has received the outcome.
    """

    def __init__(self, seed: int, *, loss: float) -> None:
        self._chance = random.Random(seed)
        self._loss = loss
        self.taken: dict[int, list[bytes]] = {}

    def append_batch(
        self,
        partition: int,
        payload: bytes,
        row_count: int,
        *,
        client_high_water_mark: int,
        order: ReportOrder,
    ) -> Future[BatchOutcome]:
        assert client_high_water_mark == -1
        rows = decode_append(payload, rows_max=row_count, bytes_max=1 << 24)
        assert rows.count == row_count
        future: Future[BatchOutcome] = Future()
        future.set_result(self.answer(partition, rows.data.to_pylist(), order))
        return future

    def answer(self, partition: int, rows: list[bytes], order: ReportOrder) -> BatchOutcome:
        found = []
        is_lost = order.reported_count != order.processed_count
        log = self.taken.setdefault(partition, [])
        for row in rows:
            if is_lost or self._chance.random() < self._loss:
                is_lost = True
                found.append(LOST)
            elif row.endswith(b"!"):
                found.append(REFUSED)
            else:
                log.append(row)
                found.append(TAKEN)
        order.reported_count += is_lost
        reasons = np.array(found, np.uint8)
        taken = reasons == TAKEN
        ids = np.full(len(rows), -1, np.int64)
        ids[taken] = np.arange(len(log) - int(taken.sum()), len(log))
        conflicts = np.where(reasons == REFUSED, 5, -1).astype(np.int64)
        return BatchOutcome(len(log) - 1, ids, reasons, conflicts)


def convert_rows(rows: list[tuple[int, bytes]]) -> ConvertedRows:
    count = len(rows)
    empty = pa.array([[]] * count, pa.list_(pa.int32()))
    append = pa.RecordBatch.from_arrays(
        [
            pa.array(np.zeros(count, np.int32)),
            pa.array([data for _, data in rows], pa.binary()),
            *[empty] * 3,
            pa.array(np.full(count, -1, np.int64)),
        ],
        ["header", "data", *LOCK_COLUMNS, MARK_COLUMN],
    )
    identity = pa.record_batch({"name": [data.decode() for _, data in rows]})
    free = np.zeros(len(rows), dtype=np.bool_)
    return ConvertedRows(np.array([p for p, _ in rows], np.int32), append, identity, free)


@pytest.fixture
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(appender_module, "_PAUSE_SECONDS_FIRST", 0.0)
    monkeypatch.setattr(appender_module, "_PAUSE_SECONDS_MAX", 0.0)


def rows_of(chance: random.Random, count: int) -> list[tuple[int, bytes]]:
    return [
        (chance.randrange(3), f"{number}{'!' if chance.random() < 0.1 else ''}".encode())
        for number in range(count)
    ]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.usefixtures("without_pauses")
def test_every_row_gets_one_outcome_in_order(seed: int) -> None:
    chance = random.Random(seed)
    rows = rows_of(chance, 200)
    log = RandomLog(seed, loss=chance.choice([0.0, 0.02, 0.2]))
    pieces = [rows[start : start + 23] for start in range(0, len(rows), 23)]
    reported_count = list(Appender(log, OPTIONS).send(convert_rows(piece) for piece in pieces))
    for partition in range(3):
        rows_of_partition = [data for p, data in rows if p == partition]
        assert log.taken.get(partition, []) == [
            data for data in rows_of_partition if not data.endswith(b"!")
        ]
        answered = [a for a in reported_count if a.partition == partition]
        names = [name for a in answered for name in a.identity.column("name").to_pylist()]
        assert sorted(names) == sorted(data.decode() for data in rows_of_partition)
        for a in answered:
            committed = a.reasons == TAKEN
            assert (a.transaction_ids[committed] >= 0).all()
            assert (a.conflicting[~committed] == 5).all()
            assert all(
                name.endswith("!") != bool(taken)
                for name, taken in zip(
                    a.identity.column("name").to_pylist(), committed, strict=True
                )
            )


def test_a_payload_near_the_limit_is_sent_alone() -> None:
    big = b"x" * (3 * 1024 * 1024)
    log = RandomLog(1, loss=0.0)
    reported_count = list(
        Appender(log, OPTIONS).send([convert_rows([(0, big), (0, b"a"), (0, big), (0, b"b")])])
    )
    assert [len(data) for data in log.taken[0]] == [len(big), 1, len(big), 1]
    assert sum(len(a.reasons) for a in reported_count) == 4
    assert len(reported_count) == 2


def test_rows_with_many_locks_are_sent_in_smaller_batches() -> None:
    rows = convert_rows([(0, b"%d" % number) for number in range(100)])
    bounds = pa.array(np.arange(101, dtype=np.int32) * LOCKS_MAX)
    locks = pa.ListArray.from_arrays(bounds, np.tile(np.arange(LOCKS_MAX, dtype=np.int32), 100))
    index = rows.append.schema.get_field_index("append_locks")
    append = rows.append.set_column(index, "append_locks", locks)
    log = RandomLog(1, loss=0.0)
    options = dataclasses.replace(OPTIONS, batch_rows=1000)
    reported_count = list(Appender(log, options).send([dataclasses.replace(rows, append=append)]))
    assert log.taken[0] == [b"%d" % number for number in range(100)]
    # 256 KiB of locks in a row, 4 MiB in an append.
    assert max(len(each.reasons) for each in reported_count) == 15


def test_a_mark_ahead_of_the_log_ends_the_job() -> None:
    class Ahead(RandomLog):
        def answer(self, partition: int, rows: list[bytes], order: ReportOrder) -> BatchOutcome:
            del partition, order
            nothing = np.full(len(rows), -1, np.int64)
            reasons = np.full(len(rows), int(RowOutcomeCode.AHEAD), np.uint8)
            return BatchOutcome(0, nothing, reasons, nothing)

    rows = convert_rows([(2, b"a")])
    mark = rows.append.column("client_high_water_mark")[0]
    sentence = (
        "partition 2: the log ends at transaction 0, but the client_high_water_mark of a row is "
        f"{mark}: "
    )
    with pytest.raises(ClientAheadOfLog, match=sentence):
        list(Appender(Ahead(0, loss=0.0), OPTIONS).send([rows]))


@pytest.mark.usefixtures("without_pauses")
def test_rows_over_a_limit_fail_after_a_timeout_with_the_server_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Limited(RandomLog):
        def answer(self, partition: int, rows: list[bytes], order: ReportOrder) -> BatchOutcome:
            del partition, order
            return BatchOutcome.all_rejected(
                len(rows),
                RowOutcomeCode.OVERLOADED,
                high_water_mark=0,
                detail="etl is over a limit",
            )

    monkeypatch.setattr(appender_module, "RETRY_SECONDS_MAX", 0.0)
    sentence = r"\(last answer: OVERLOADED: etl is over a limit\), so 1 rows are not in the log"
    with pytest.raises(Overloaded, match=sentence):
        list(Appender(Limited(0, loss=0.0), OPTIONS).send([convert_rows([(2, b"a")])]))


class LimitedRetries:
    """Recomputes rejected rows: without a "!" they are committed; it omits every third one."""

    retries_max = 2

    def __init__(self) -> None:
        self.excluded: list[bytes] = []
        self.row_count = 0

    def pause_s(self, retries: int) -> float:
        assert retries < self.retries_max
        return 0.0

    def recompute(self, rejected_rows: RejectedRows) -> RecomputedRows:
        assert (rejected_rows.conflicting == 5).all()
        assert (rejected_rows.marks == -1).all()
        rows = []
        recomputed = []
        for row, data in enumerate(rejected_rows.source.column("data").to_pylist()):
            self.row_count += 1
            if self.row_count % 3 == 0:
                self.excluded.append(data)
            else:
                rows.append(row)
                # A row with "!!" is rejected a second time; a row with "!!!" is never committed.
                recomputed.append((rejected_rows.partition, data[:-1]))
        return RecomputedRows(with_source(recomputed), np.array(rows, np.int64))


def with_source(rows: list[tuple[int, bytes]]) -> ConvertedRows:
    converted = convert_rows(rows)
    return dataclasses.replace(converted, source=converted.append.select(["data"]))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.usefixtures("without_pauses")
def test_rejected_rows_are_computed_again(seed: int) -> None:
    chance = random.Random(seed)
    rows = [
        (chance.randrange(3), f"{number}{'!' * chance.choice([0, 0, 0, 1, 2, 3])}".encode())
        for number in range(150)
    ]
    log, rejected_rows = RandomLog(seed, loss=chance.choice([0.0, 0.1])), LimitedRetries()
    pieces = [rows[start : start + 23] for start in range(0, len(rows), 23)]
    appender = Appender(log, OPTIONS, rejected_rows)
    reported_count = list(appender.send(with_source(piece) for piece in pieces))
    ends: dict[str, bool] = {}
    for answered in reported_count:
        names = answered.identity.column("name").to_pylist()
        for name, reason in zip(names, answered.reasons.tolist(), strict=True):
            key = name.rstrip("!")
            assert key not in ends, "every row has one outcome"
            ends[key] = reason == TAKEN
            assert answered.attempt >= answered.retries + 1
    assert len(ends) == len(rows)
    in_log = {data.decode() for taken in log.taken.values() for data in taken}
    assert in_log == {key for key, is_taken in ends.items() if is_taken}
    left_out = {data.decode().rstrip("!") for data in rejected_rows.excluded}
    for _, data in rows:
        key, times = data.decode().rstrip("!"), data.count(b"!")
        assert ends[key] == (times <= rejected_rows.retries_max and key not in left_out)
