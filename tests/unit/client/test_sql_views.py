"""SQL views of a log: batches, filters, and contexts on a view that lags behind."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.time_limits import TEST_TIMEOUT_S
from waltz_core import errors, memory_waltz
from waltz_core.client import PoisonPolicy, Transaction, TransactionBuilder, lock, transactional
from waltz_core.client.api import sql
from waltz_core.client.api.sql import SqlCallbacks
from waltz_core.memory_waltz import MemoryWaltz

METADATA = sa.MetaData()
ROWS = sa.Table(
    "rows",
    METADATA,
    # No primary key: a transaction that is applied twice must be visible, not an error.
    sa.Column("transaction_id", sa.BigInteger, nullable=False),
    sa.Column("header", sa.Integer, nullable=False),
)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sa.Engine]:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'view.db'}")
    METADATA.create_all(engine)
    yield engine
    engine.dispose()


@pytest.fixture(autouse=True)
def keep_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql, "BATCH_TARGET_S", TEST_TIMEOUT_S)


class View(SqlCallbacks):
    """Has a row for each transaction; records the sizes of batches and the commits of the mark."""

    def __init__(self, engine: sa.Engine) -> None:
        super().__init__(engine)
        self._engine = engine
        self.poison: set[int] = set()
        self.failed: list[int] = []
        self.before_each: Callable[[], object] = lambda: None
        self.sizes: list[int] = []
        self.passes = 0

    def apply_batch(self, connection: sa.Connection, transactions: Sequence[Transaction]) -> None:
        self.before_each()
        self.sizes.append(len(transactions))
        ids = [int(transaction.transaction_id) for transaction in transactions]
        headers = [transaction.header for transaction in transactions]
        rows = [{"transaction_id": a, "header": b} for a, b in zip(ids, headers, strict=True)]
        connection.execute(ROWS.insert(), rows)
        if self.poison.intersection(ids):
            raise ZeroDivisionError

    def apply_transactions(
        self, partition: int, transactions: Sequence[Transaction], last: int
    ) -> int:
        self.passes += not transactions
        return super().apply_transactions(partition, transactions, last)

    def uncaught_exception(
        self, partition: int, transaction_id: int, error: Exception
    ) -> PoisonPolicy:
        if isinstance(error, ZeroDivisionError):
            self.failed.append(transaction_id)
            return PoisonPolicy.SKIP
        return super().uncaught_exception(partition, transaction_id, error)

    @property
    def ids(self) -> list[int]:
        with self._engine.connect() as connection:
            return [int(scalar) for scalar in connection.scalars(sa.select(ROWS.c.transaction_id))]

    @property
    def mark(self) -> int:
        with self._engine.connect() as connection:
            query = sa.select(self.marks.c.high_water_mark)
            return int(connection.execute(query).scalar_one())

    def wait_for_mark(self, mark: int) -> None:
        deadline = time.monotonic() + TEST_TIMEOUT_S
        while self.mark < mark:
            assert time.monotonic() < deadline, f"at {self.mark}, not at {mark}"
            time.sleep(0.005)


def fill(client: Any, headers: Sequence[int]) -> None:
    futures = [client.append(b"", partition=0, header=header) for header in headers]
    assert [future.result(TEST_TIMEOUT_S) for future in futures] == list(range(len(headers)))


def test_a_view_that_lags_applies_transactions_in_batches(
    waltz_memory: MemoryWaltz, engine: sa.Engine
) -> None:
    view = View(engine)
    with waltz_memory.client() as client:
        fill(client, [1] * 300)
        client.subscribe(view, [0])
        view.wait_for_mark(299)
    assert view.ids == list(range(300))
    assert len(view.sizes) < 20


def test_a_single_transaction_is_applied_without_waiting_for_a_batch(
    waltz_memory: MemoryWaltz, engine: sa.Engine
) -> None:
    view = View(engine)
    with waltz_memory.client() as client:
        client.subscribe(view, [0])
        for number in range(8):
            assert client.append(b"", partition=0).result(TEST_TIMEOUT_S) == number
            view.wait_for_mark(number)
    assert view.sizes == [1] * 8


def test_all_other_transactions_are_applied_if_a_transaction_is_skipped(
    waltz_memory: MemoryWaltz, engine: sa.Engine
) -> None:
    view = View(engine)
    view.poison = {40, 41, 99}
    with waltz_memory.client() as client:
        fill(client, [1] * 150)
        client.subscribe(view, [0])
        view.wait_for_mark(149)
    assert view.failed == [40, 41, 99]
    assert view.ids == [number for number in range(150) if number not in view.poison]


def test_a_filtered_view_applies_matching_transactions_and_reaches_the_mark_of_the_log(
    waltz_memory: MemoryWaltz, engine: sa.Engine
) -> None:
    view = View(engine)
    with waltz_memory.client() as client:
        fill(client, [7 if number % 10 == 0 else 1 for number in range(200)])
        client.subscribe(view, [0], headers=[7])
        view.wait_for_mark(199)
        assert view.ids == list(range(0, 200, 10))
        assert view.passes < 20


def test_filtered_transactions_share_one_write_of_the_mark(
    waltz_memory: MemoryWaltz, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("waltz_core.client.read.feed_delivery.MARK_HOLD_S", TEST_TIMEOUT_S)
    view = View(engine)
    with waltz_memory.client() as client:
        client.subscribe(view, [0], headers=[7])
        fill(client, [1] * 100)
        assert (view.passes, view.mark) == (0, -1)
        assert client.append(b"", partition=0, header=7).result(TEST_TIMEOUT_S) == 100
        view.wait_for_mark(100)
        assert (view.passes, view.ids) == (0, [100])


def test_a_context_can_write_a_lock_of_a_transaction_that_its_view_filters_out(
    waltz_memory: MemoryWaltz, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("waltz_core.client.read.feed_delivery.MARK_HOLD_S", TEST_TIMEOUT_S)
    view = View(engine)

    @transactional(partition=0)
    def add(builder: TransactionBuilder) -> bool:
        with view.reading(builder):
            builder.set_write_locks([lock("account", 1)])
            builder.set_header(7)
            builder.set_transaction_data("more")
        return True

    with waltz_memory.client() as client:
        client.subscribe(view, [0], headers=[7])
        other = client.append(b"", partition=0, header=1, append_locks=[lock("account", 1)])
        assert other.result(TEST_TIMEOUT_S) == 0
        assert client.submit(add()).result(TEST_TIMEOUT_S) == 1


def test_a_context_on_a_lagging_view_reports_how_far_the_view_has_caught_up(
    waltz_memory: MemoryWaltz, engine: sa.Engine
) -> None:
    view = View(engine)
    may_continue = threading.Event()
    started = threading.Event()
    computed: list[int] = []

    def hold() -> None:
        if len(view.sizes) == 3 and not may_continue.is_set():
            started.set()
            assert may_continue.wait(TEST_TIMEOUT_S)

    view.before_each = hold

    @transactional(partition=0, timeout_ms=2_000)
    def add(builder: TransactionBuilder) -> bool:
        with view.reading(builder):
            computed.append(int(builder.client_high_water_mark))
            builder.set_write_locks([lock("account", 1)])
            builder.set_transaction_data("more")
        return True

    with waltz_memory.client() as client:
        fill(client, [1] * 200)
        last = client.append(b"", partition=0, append_locks=[lock("account", 1)]).result(
            TEST_TIMEOUT_S
        )
        client.subscribe(view, [0])
        assert started.wait(TEST_TIMEOUT_S)
        with pytest.raises(
            errors.ViewBehind, match=r"are at transaction \d+, the log is at"
        ) as caught:
            client.submit(add()).result(TEST_TIMEOUT_S)
        assert caught.value.retriable
        assert caught.value.applied == 16 + 32 + 64 - 1
        assert caught.value.high_water_mark == last
        assert caught.value.applied == computed[-1] < last
        may_continue.set()
        view.wait_for_mark(last)
        assert client.submit(add()).result(TEST_TIMEOUT_S) == last + 1


def test_a_view_rejects_transactions_of_another_log(
    engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log was created again, and is already longer than the view's mark."""
    view = View(engine)
    with MemoryWaltz(1) as waltz, waltz.client() as client:
        fill(client, [1] * 5)
        client.subscribe(view)
        view.wait_for_mark(4)
    monkeypatch.setattr(memory_waltz, "CLUSTER_KEY", b"another cluster.")
    reopened_view = View(engine)
    with MemoryWaltz(1) as waltz, waltz.client() as client:
        fill(client, [2] * 20)
        with pytest.raises(errors.ClusterKeyMismatch, match="build new tables under another name"):
            client.subscribe(reopened_view)
        assert client.partitions == ()
    assert (reopened_view.ids, reopened_view.mark) == ([0, 1, 2, 3, 4], 4)
