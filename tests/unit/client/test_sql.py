"""A callback's mark and its changes are committed in one database transaction."""

import importlib
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.client import PoisonPolicy, Transaction, TransactionBuilder
from waltz_core.client.api import sql
from waltz_core.client.api.sql import SqlCallbacks
from waltz_core.cluster.znodes.restore_sources import RestoreSources
from waltz_core.errors import BadConfig, BadRequest, ClusterKeyMismatch, DataLoss, Unreachable
from waltz_core.records.record import PartitionId, TransactionId

METADATA = sa.MetaData()
TOTALS = sa.Table(
    "totals",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("total", sa.Integer, nullable=False),
)


class NoData:
    """A source that receives no request."""

    async def data_of(self, transaction_id: TransactionId) -> bytes:
        raise AssertionError(transaction_id)

    def data_of_blocking(self, transaction_id: TransactionId) -> bytes:
        raise AssertionError(transaction_id)


def transaction(number: int, header: int = 1, partition: int = 0) -> Transaction:
    fields = (1, 1, partition, number, header)
    return Transaction(PartitionId(partition), TransactionId(number), fields, NoData())


class TotalView(SqlCallbacks):
    """Adds each transaction's header to one total."""

    after_update: Callable[[sa.Connection], object] | None = None

    def apply(self, connection: sa.Connection, transaction: Transaction) -> None:
        added = TOTALS.c.total + transaction.header
        connection.execute(TOTALS.update().where(TOTALS.c.id == 1).values(total=added))
        if self.after_update is not None:
            self.after_update(connection)

    @property
    def total(self) -> int:
        with self._engine.connect() as connection:
            return int(connection.execute(sa.select(TOTALS.c.total)).scalar_one())


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sa.Engine]:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'app.db'}")
    METADATA.create_all(engine)
    with engine.begin() as connection:
        connection.execute(TOTALS.insert().values(id=1, total=0))
    yield engine
    engine.dispose()


def test_changes_and_mark_are_committed_together(engine: sa.Engine) -> None:
    callbacks = TotalView(engine)
    assert callbacks.client_high_water_mark(0) == -1
    for number in range(5):
        callbacks.apply_transaction(transaction(number))
    assert (callbacks.total, callbacks.client_high_water_mark(0)) == (5, 4)


def test_an_error_in_apply_rolls_back_changes_and_mark(engine: sa.Engine) -> None:
    callbacks = TotalView(engine)
    callbacks.client_high_water_mark(0)
    callbacks.after_update = lambda _: 1 // 0
    with pytest.raises(ZeroDivisionError) as caught:
        callbacks.apply_transaction(transaction(0))
    assert (callbacks.total, callbacks.client_high_water_mark(0)) == (0, -1)
    assert callbacks.uncaught_exception(0, 0, caught.value) is PoisonPolicy.STOP


def test_each_application_and_partition_has_its_own_mark(engine: sa.Engine) -> None:
    one, other = TotalView(engine, application="one"), TotalView(engine, application="other")
    one.client_high_water_mark(0)
    one.client_high_water_mark(3)
    one.apply_transaction(transaction(0))
    one.apply_transaction(transaction(0, partition=3))
    one.apply_transaction(transaction(1, partition=3))
    assert [one.client_high_water_mark(each) for each in (0, 3)] == [0, 1]
    assert [other.client_high_water_mark(each) for each in (0, 3)] == [-1, -1]


@pytest.mark.parametrize(
    "after_update",
    [
        lambda connection: connection.commit(),
        lambda connection: connection.rollback(),
        lambda connection: connection.close(),
        lambda connection: connection.get_transaction().commit(),
        lambda connection: connection.execute(sa.text("COMMIT")),
        lambda connection: connection.execute(sa.text("  rollback")),
        lambda connection: connection.execute(sa.text("begin immediate")),
        lambda connection: connection.execute(sa.text("/* now */ COMMIT -- all of it")),
        lambda connection: connection.execute(sa.text("UPDATE totals SET total = 1; commit")),
        lambda connection: connection.exec_driver_sql("END"),
    ],
)
def test_commits_inside_apply_are_rejected(
    engine: sa.Engine, after_update: Callable[[sa.Connection], object]
) -> None:
    callbacks = TotalView(engine)
    callbacks.client_high_water_mark(0)
    callbacks.after_update = after_update
    with pytest.raises(BadRequest, match="leave the database transaction open"):
        callbacks.apply_transaction(transaction(0))
    assert (callbacks.total, callbacks.client_high_water_mark(0)) == (0, -1)
    callbacks.after_update = None
    callbacks.apply_transaction(transaction(0))
    assert (callbacks.total, callbacks.client_high_water_mark(0)) == (1, 0)


def test_an_error_of_commit_that_the_callback_catches_is_raised_again(engine: sa.Engine) -> None:
    def catch_error(connection: sa.Connection) -> None:
        with pytest.raises(BadRequest):
            connection.commit()

    callbacks = TotalView(engine)
    callbacks.client_high_water_mark(0)
    callbacks.after_update = catch_error
    with pytest.raises(BadRequest):
        callbacks.apply_transaction(transaction(0))
    assert callbacks.total == 0


def test_a_caught_error_that_rolled_back_the_transaction_is_rejected(engine: sa.Engine) -> None:
    def insert_again(connection: sa.Connection) -> None:
        with pytest.raises(sa.exc.IntegrityError):
            connection.execute(sa.text("INSERT OR ROLLBACK INTO totals VALUES (1, 0)"))

    callbacks = TotalView(engine)
    apply_all(callbacks, range(3))
    callbacks.after_update = insert_again
    with pytest.raises(
        BadRequest, match=r"had rolled the transaction back .* caught \(UNIQUE .*begin_nested"
    ):
        apply_all(callbacks, range(3, 6))
    assert (callbacks.total, callbacks.client_high_water_mark(0)) == (3, 2)


def use_savepoints(connection: sa.Connection) -> None:
    point = connection.begin_nested()
    connection.execute(TOTALS.update().values(total=1_000))
    point.rollback()
    with connection.begin_nested():
        connection.execute(TOTALS.update().values(total=TOTALS.c.total + 10))


def catch_an_error(connection: sa.Connection) -> None:
    with pytest.raises(sa.exc.IntegrityError):
        connection.execute(sa.text("INSERT INTO totals VALUES (1, 0)"))


def execute_statement(statement: str) -> Callable[[sa.Connection], object]:
    return lambda connection: connection.exec_driver_sql(statement).all()


@pytest.mark.parametrize(
    ("after_update", "total"),
    [
        (execute_statement("SELECT 'one; COMMIT' AS said"), 1),
        (
            execute_statement(
                "SELECT CASE WHEN total = 0 THEN 'none' ELSE 'some' END FROM totals -- ; end"
            ),
            1,
        ),
        (execute_statement('SELECT total AS "; END" FROM totals'), 1),
        (use_savepoints, 11),
        (catch_an_error, 1),
    ],
)
def test_statements_that_keep_the_database_transaction_open_are_accepted(
    engine: sa.Engine, after_update: Callable[[sa.Connection], object], total: int
) -> None:
    callbacks = TotalView(engine)
    callbacks.client_high_water_mark(0)
    callbacks.after_update = after_update
    apply_all(callbacks, [0])
    assert (callbacks.total, callbacks.client_high_water_mark(0)) == (total, 0)


@pytest.mark.parametrize(
    ("url", "options", "found"),
    [
        ("sqlite://", {}, "SingletonThreadPool"),
        ("sqlite://", {"poolclass": sa.pool.StaticPool}, "StaticPool"),
        ("sqlite:///{}/app.db", {"isolation_level": "AUTOCOMMIT"}, "AUTOCOMMIT"),
    ],
)
def test_an_engine_that_cannot_commit_changes_and_mark_together_is_rejected(
    tmp_path: Path, url: str, options: dict[str, Any], found: str
) -> None:
    engine = sa.create_engine(url.format(tmp_path), **options)
    with pytest.raises(BadConfig, match=found):
        TotalView(engine)
    with pytest.raises(BadConfig, match="create_engine, found 'sqlite://"):
        TotalView(url)  # type: ignore[arg-type]
    engine.dispose()


def test_without_sqlalchemy_the_import_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    monkeypatch.delitem(sys.modules, sql.__name__)
    with pytest.raises(ImportError, match=r"pip install 'waltz-spark\[sql\]'"):
        importlib.import_module(sql.__name__)


def test_a_database_restored_to_an_older_state_is_reported(engine: sa.Engine) -> None:
    callbacks = TotalView(engine)
    callbacks.client_high_water_mark(0)
    for number in range(5):
        callbacks.apply_transaction(transaction(number))
    with engine.begin() as connection:
        connection.execute(callbacks.marks.update().values(high_water_mark=0))
    with pytest.raises(
        DataLoss,
        match=r"expected the applied mark 4 in the database, found 0. The database was restored to",
    ):
        callbacks.apply_transaction(transaction(5))
    assert callbacks.total == 5


def test_a_context_that_reads_a_view_uses_the_mark_in_the_database(engine: sa.Engine) -> None:
    callbacks = TotalView(engine)
    builder = TransactionBuilder(PartitionId(0), TransactionId(77))
    with pytest.raises(BadRequest, match="Hint: subscribe the view to"), callbacks.reading(builder):
        pass
    callbacks.client_high_water_mark(0)
    callbacks.apply_transaction(transaction(0))
    with callbacks.reading(builder) as connection:
        assert connection.execute(sa.select(TOTALS.c.total)).scalar_one() == 1
        connection.execute(TOTALS.update().values(total=99))
    assert builder.client_high_water_mark == 0
    assert callbacks.total == 1  # the writes of a reader are rolled back


def test_a_context_reads_one_snapshot_of_the_database(engine: sa.Engine) -> None:
    callbacks = TotalView(engine)
    callbacks.client_high_water_mark(0)
    writer = sa.create_engine(engine.url, connect_args={"timeout": 0})
    builder = TransactionBuilder(PartitionId(0), TransactionId(77))
    with callbacks.reading(builder) as connection:
        query = sa.select(TOTALS.c.total)
        assert connection.execute(query).scalar_one() == 0
        with pytest.raises(sa.exc.OperationalError, match="locked"), writer.begin() as other:
            other.execute(TOTALS.update().values(total=5))
        assert connection.execute(query).scalar_one() == 0
    with writer.begin() as other:
        other.execute(TOTALS.update().values(total=5))
    assert callbacks.total == 5
    writer.dispose()


def test_a_view_waits_for_a_locked_database(tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'app.db'}", connect_args={"timeout": 0})
    METADATA.create_all(engine)
    with engine.begin() as connection:
        connection.execute(TOTALS.insert().values(id=1, total=0))
    callbacks = TotalView(engine)
    callbacks.client_high_water_mark(0)
    holding, has_tried = threading.Event(), threading.Event()

    def hold() -> None:
        with engine.begin() as connection:
            connection.execute(TOTALS.update().values(total=TOTALS.c.total + 100))
            holding.set()
            assert has_tried.wait(TEST_TIMEOUT_S)

    def count_tries(*_: object) -> None:
        has_tried.set()

    holder = threading.Thread(target=hold)
    holder.start()
    assert holding.wait(TEST_TIMEOUT_S)
    sa.event.listen(engine, "handle_error", count_tries)
    callbacks.apply_transaction(transaction(0))
    holder.join()
    assert (callbacks.total, callbacks.client_high_water_mark(0)) == (101, 0)
    engine.dispose()


def test_outages_are_retried_and_application_errors_stop_the_view(engine: sa.Engine) -> None:
    callbacks = TotalView(engine)
    connection_lost = sa.exc.OperationalError(
        "SELECT 1", {}, Exception("server closed the connection")
    )
    assert callbacks.uncaught_exception(0, 7, connection_lost) is PoisonPolicy.RETRY
    assert callbacks.uncaught_exception(0, 7, Unreachable("the log")) is PoisonPolicy.RETRY
    with pytest.raises(sa.exc.OperationalError) as caught, engine.begin() as connection:
        connection.execute(sa.text("UPDATE no_such_table SET a = 1"))
    assert callbacks.uncaught_exception(0, 7, caught.value) is PoisonPolicy.STOP
    wrong = sa.exc.IntegrityError("INSERT", {}, Exception("UNIQUE constraint failed"))
    assert callbacks.uncaught_exception(0, 7, wrong) is PoisonPolicy.STOP


def test_a_pool_without_a_free_connection_is_an_outage(tmp_path: Path) -> None:
    engine = sa.create_engine(
        f"sqlite:///{tmp_path / 'app.db'}",
        poolclass=sa.pool.QueuePool,
        pool_size=1,
        max_overflow=0,
        pool_timeout=0.01,
    )
    METADATA.create_all(engine)
    callbacks = TotalView(engine)
    callbacks.client_high_water_mark(0)
    with engine.connect(), pytest.raises(sa.exc.TimeoutError) as caught:
        apply_all(callbacks, range(10))
    assert callbacks.uncaught_exception(0, 0, caught.value) is PoisonPolicy.RETRY
    apply_all(callbacks, range(10))
    assert callbacks.client_high_water_mark(0) == 9
    engine.dispose()


class BatchTotalView(TotalView):
    """Adds a batch's headers with one statement; records the batches."""

    def __init__(self, engine: sa.Engine, **named: Any) -> None:
        super().__init__(engine, **named)
        self.batches: list[list[int]] = []
        self.poison: set[int] = set()
        self.meanwhile: Callable[[], object] = lambda: None

    def apply_batch(self, connection: sa.Connection, transactions: Sequence[Transaction]) -> None:
        self.batches.append([int(transaction.transaction_id) for transaction in transactions])
        self.meanwhile()
        added = TOTALS.c.total + sum(transaction.header for transaction in transactions)
        connection.execute(TOTALS.update().values(total=added))
        if bad := self.poison.intersection(self.batches[-1]):
            raise ZeroDivisionError(min(bad))


def transactions_with_ids(numbers: Iterable[int]) -> list[Transaction]:
    return [transaction(number) for number in numbers]


def apply_all(callbacks: SqlCallbacks, numbers: Iterable[int], last: int | None = None) -> None:
    """Apply like the client: repeat with the remaining transactions, until none is left."""
    remaining = transactions_with_ids(numbers)
    end = int(remaining[-1].transaction_id) if last is None else last
    while remaining:
        remaining = remaining[callbacks.apply_transactions(0, remaining, end) :]


def test_a_batch_is_one_transaction_of_the_database(engine: sa.Engine) -> None:
    callbacks = TotalView(engine)
    callbacks.client_high_water_mark(0)
    commits: list[sa.Connection] = []
    sa.event.listen(engine, "commit", commits.append)
    assert callbacks.apply_transactions(0, transactions_with_ids(range(10)), 9) == 10
    assert len(commits) == 1
    assert (callbacks.total, callbacks.client_high_water_mark(0)) == (10, 9)


def test_batches_grow_while_they_are_fast_and_shrink_when_they_are_slow(
    engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr(sql.time, "monotonic", lambda: now_s)
    callbacks = BatchTotalView(engine)
    apply_all(callbacks, range(12_272))
    sizes = [len(batch) for batch in callbacks.batches]
    assert sizes[:5] == [16, 32, 64, 128, 256]
    assert max(sizes) == 4_096

    def sleep_long() -> None:
        nonlocal now_s
        now_s += 1

    callbacks.batches.clear()
    callbacks.meanwhile = sleep_long
    apply_all(callbacks, range(12_272, 19_952))
    assert [len(batch) for batch in callbacks.batches][:4] == [4_096, 2_048, 1_024, 512]
    assert callbacks.total == 19_952


def test_a_failing_transaction_is_found_and_earlier_ones_are_committed(engine: sa.Engine) -> None:
    callbacks = BatchTotalView(engine)
    callbacks.poison = {37}
    with pytest.raises(ZeroDivisionError, match="37"):
        apply_all(callbacks, range(100))
    assert callbacks.batches[-1] == [37]
    assert (callbacks.total, callbacks.client_high_water_mark(0)) == (37, 36)
    apply_all(callbacks, range(38, 100))  # the callback has skipped this transaction
    assert (callbacks.total, callbacks.client_high_water_mark(0)) == (99, 99)


def test_a_batch_that_lasts_longer_than_the_database_allows_is_made_smaller(
    engine: sa.Engine,
) -> None:
    def time_out() -> None:
        if len(callbacks.batches[-1]) > 3:
            text = "canceling statement due to statement timeout"
            raise sa.exc.OperationalError("UPDATE totals", {}, Exception(text))

    callbacks = BatchTotalView(engine)
    callbacks.meanwhile = time_out
    for _ in range(3):  # like the client, which retries the rest after a pause
        with pytest.raises(sa.exc.OperationalError):
            apply_all(callbacks, range(16))
    assert [len(batch) for batch in callbacks.batches] == [16, 8, 4]
    callbacks.batches.clear()
    callbacks.apply_transactions(0, transactions_with_ids(range(16)), 15)
    assert callbacks.batches == [[0, 1]]
    assert (callbacks.total, callbacks.client_high_water_mark(0)) == (2, 1)


def test_a_commit_of_unknown_outcome_is_not_applied_again(
    engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    callbacks = TotalView(engine)
    callbacks.client_high_water_mark(0)
    commit = engine.dialect.do_commit

    def commit_and_break(connection: Any) -> None:
        commit(connection)
        monkeypatch.setattr(engine.dialect, "do_commit", commit)
        raise sqlite3.OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr(engine.dialect, "do_commit", commit_and_break)
    with pytest.raises(sa.exc.OperationalError) as lost:
        apply_all(callbacks, range(10))
    assert callbacks.uncaught_exception(0, 0, lost.value) is PoisonPolicy.RETRY
    apply_all(callbacks, range(12))
    assert (callbacks.total, callbacks.client_high_water_mark(0)) == (12, 11)


def test_transactions_that_another_instance_has_applied_are_left_out_of_a_batch(
    engine: sa.Engine,
) -> None:
    one, other = BatchTotalView(engine), BatchTotalView(engine)
    for each in (one, other):
        each.client_high_water_mark(0)
    apply_all(other, range(7))
    apply_all(one, range(12))
    assert one.batches == [[7, 8, 9, 10, 11]]
    assert other.apply_transactions(0, [], 11) == 0
    apply_all(other, range(7, 13))
    assert (one.total, other.client_high_water_mark(0)) == (13, 12)


def test_a_filter_moves_the_mark_past_filtered_transactions(engine: sa.Engine) -> None:
    callbacks = BatchTotalView(engine)
    apply_all(callbacks, [3, 8], last=20)
    assert (callbacks.total, callbacks.client_high_water_mark(0)) == (2, 20)
    assert callbacks.apply_transactions(0, [], 90) == 0
    assert callbacks.client_high_water_mark(0) == 90
    apply_all(callbacks, [91])
    assert callbacks.batches == [[3, 8], [91]]


KEY_1, KEY_2 = bytes([1]) * 16, bytes([2]) * 16


def test_a_view_of_another_cluster_is_rejected(engine: sa.Engine) -> None:
    callbacks = TotalView(engine)
    callbacks.begin(KEY_1)
    callbacks.client_high_water_mark(0)
    apply_all(callbacks, range(3))
    reopened_view = TotalView(engine)
    reopened_view.begin(KEY_1)
    assert reopened_view.client_high_water_mark(0) == 2
    other = TotalView(engine)
    other.begin(KEY_2)
    with pytest.raises(
        ClusterKeyMismatch,
        match=f"cluster with key 01.*connected cluster has key {KEY_2.hex()}",
    ):
        other.client_high_water_mark(0)
    assert other.client_high_water_mark(1) == -1  # the view has no transaction of that partition
    view_of_new_log = TotalView(engine, application="of the new log")
    view_of_new_log.begin(KEY_2)
    assert view_of_new_log.client_high_water_mark(0) == -1


def test_a_view_continues_in_a_cluster_that_was_restored_from_its_old_cluster(
    engine: sa.Engine,
) -> None:
    old = TotalView(engine)
    old.begin(KEY_1)
    old.client_high_water_mark(0)
    apply_all(old, range(3))
    restored = TotalView(engine)
    restored.begin(KEY_2, RestoreSources({KEY_1.hex(): {0: 2}}))
    assert restored.client_high_water_mark(0) == 2
    # An instance that still applies the old log can no longer move the mark.
    with pytest.raises(
        ClusterKeyMismatch, match=f"cluster with key 02.*connected cluster has key {KEY_1.hex()}"
    ):
        apply_all(old, [3])
    apply_all(restored, [3, 4])
    reopened_view = TotalView(engine)
    reopened_view.begin(KEY_2)
    assert reopened_view.client_high_water_mark(0) == 4


def test_a_view_ahead_of_a_restored_log_is_rejected(engine: sa.Engine) -> None:
    old = TotalView(engine)
    old.begin(KEY_1)
    old.client_high_water_mark(0)
    apply_all(old, range(3))
    restored = TotalView(engine)
    restored.begin(KEY_2, RestoreSources({KEY_1.hex(): {0: 1}}))
    with pytest.raises(ClusterKeyMismatch, match=r"cluster with key 0101"):
        restored.client_high_water_mark(0)
    apply_all(old, [3])


def test_a_mark_without_a_cluster_key_gets_the_key_of_the_connected_cluster(
    engine: sa.Engine,
) -> None:
    with engine.begin() as connection:
        connection.execute(
            sa.text(
                "CREATE TABLE waltz_high_water_marks (application VARCHAR(200) NOT NULL, "
                "partition_id INTEGER NOT NULL, high_water_mark BIGINT NOT NULL, "
                "PRIMARY KEY (application, partition_id))"
            )
        )
        connection.execute(sa.text("INSERT INTO waltz_high_water_marks VALUES ('', 0, 41)"))
    callbacks = TotalView(engine)
    callbacks.begin(KEY_1)
    assert callbacks.client_high_water_mark(0) == 41
    apply_all(callbacks, [42])
    other = TotalView(engine)
    other.begin(KEY_2)
    with pytest.raises(ClusterKeyMismatch, match="connected cluster has key 0202"):
        other.client_high_water_mark(0)


def test_callbacks_without_an_apply_method_are_rejected(engine: sa.Engine) -> None:
    class WithoutApply(SqlCallbacks):
        pass

    class WithOldMethod(TotalView):
        def apply_transaction(self, transaction: Transaction) -> None:
            raise AssertionError(transaction)

    with pytest.raises(BadConfig, match="WithoutApply: expected a method `apply` or `apply_batch`"):
        WithoutApply(engine)
    with pytest.raises(
        BadConfig, match=r"WithOldMethod overrides `apply_transaction`, which a view never calls"
    ):
        WithOldMethod(engine)
