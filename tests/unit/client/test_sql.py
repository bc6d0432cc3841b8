"""The mark and the changes stand in the database together, or not at all."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from waltz_core.client import PoisonPolicy, Transaction, TransactionBuilder
from waltz_core.client.sql import SqlCallbacks
from waltz_core.errors import BadConfig, BadRequest, DataLoss, Unreachable
from waltz_core.record import PartitionId, TransactionId

METADATA = sa.MetaData()
TOTALS = sa.Table(
    "totals",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("total", sa.Integer, nullable=False),
)


class NoData:
    """A source that is never asked."""

    async def data_of(self, transaction_id: TransactionId) -> bytes:
        raise AssertionError(transaction_id)

    def data_of_blocking(self, transaction_id: TransactionId) -> bytes:
        raise AssertionError(transaction_id)


def transaction(number: int, header: int = 1, partition: int = 0) -> Transaction:
    words = (1, 1, partition, number, header)
    return Transaction(PartitionId(partition), TransactionId(number), words, NoData())


class Adding(SqlCallbacks):
    """Adds each transaction's header to one total."""

    then: Callable[[sa.Connection], object] | None = None

    def apply(self, connection: sa.Connection, transaction: Transaction) -> None:
        added = TOTALS.c.total + transaction.header
        connection.execute(TOTALS.update().where(TOTALS.c.id == 1).values(total=added))
        if self.then is not None:
            self.then(connection)

    @property
    def total(self) -> int:
        with self._engine.connect() as connection:
            return int(connection.execute(sa.select(TOTALS.c.total)).scalar_one())


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sa.Engine]:
    made = sa.create_engine(f"sqlite:///{tmp_path / 'app.db'}")
    METADATA.create_all(made)
    with made.begin() as connection:
        connection.execute(TOTALS.insert().values(id=1, total=0))
    yield made
    made.dispose()


def test_changes_and_mark_move_together(engine: sa.Engine) -> None:
    callbacks = Adding(engine)
    assert callbacks.client_high_water_mark(0) == -1
    for number in range(5):
        callbacks.apply_transaction(transaction(number))
    assert (callbacks.total, callbacks.client_high_water_mark(0)) == (5, 4)


def test_what_apply_raises_undoes_both(engine: sa.Engine) -> None:
    callbacks = Adding(engine)
    callbacks.client_high_water_mark(0)
    callbacks.then = lambda _: 1 // 0
    with pytest.raises(ZeroDivisionError) as caught:
        callbacks.apply_transaction(transaction(0))
    assert (callbacks.total, callbacks.client_high_water_mark(0)) == (0, -1)
    assert callbacks.uncaught_exception(0, 0, caught.value) is PoisonPolicy.STOP


def test_two_instances_apply_each_transaction_once(engine: sa.Engine) -> None:
    instances = [Adding(engine), Adding(engine)]
    for each in instances:
        each.client_high_water_mark(0)
    failed: list[Exception] = []

    def run(each: Adding) -> None:
        try:
            for number in range(40):
                each.apply_transaction(transaction(number))
        except Exception as error:  # noqa: BLE001 - told below
            failed.append(error)

    threads = [threading.Thread(target=run, args=(each,)) for each in instances]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert (instances[0].total, instances[1].client_high_water_mark(0)) == (40, 39)


def test_applications_and_partitions_have_marks_of_their_own(engine: sa.Engine) -> None:
    one, other = Adding(engine, application="one"), Adding(engine, application="other")
    one.client_high_water_mark(0)
    one.client_high_water_mark(3)
    one.apply_transaction(transaction(0))
    one.apply_transaction(transaction(0, partition=3))
    one.apply_transaction(transaction(1, partition=3))
    assert [one.client_high_water_mark(each) for each in (0, 3)] == [0, 1]
    assert [other.client_high_water_mark(each) for each in (0, 3)] == [-1, -1]


@pytest.mark.parametrize(
    "then",
    [
        lambda connection: connection.commit(),
        lambda connection: connection.rollback(),
        lambda connection: connection.close(),
        lambda connection: connection.execute(sa.text("COMMIT")),
        lambda connection: connection.execute(sa.text("  rollback")),
        lambda connection: connection.execute(sa.text("begin immediate")),
        lambda connection: connection.execute(sa.text("/* now */ COMMIT -- all of it")),
        lambda connection: connection.execute(sa.text("UPDATE totals SET total = 1; commit")),
        lambda connection: connection.exec_driver_sql("END"),
    ],
)
def test_what_would_part_them_is_refused(
    engine: sa.Engine, then: Callable[[sa.Connection], object]
) -> None:
    callbacks = Adding(engine)
    callbacks.client_high_water_mark(0)
    callbacks.then = then
    with pytest.raises(BadRequest, match="leave the database's transaction open"):
        callbacks.apply_transaction(transaction(0))
    assert (callbacks.total, callbacks.client_high_water_mark(0)) == (0, -1)
    callbacks.then = None
    callbacks.apply_transaction(transaction(0))
    assert (callbacks.total, callbacks.client_high_water_mark(0)) == (1, 0)


def test_a_refusal_that_is_swallowed_counts_too(engine: sa.Engine) -> None:
    def swallow(connection: sa.Connection) -> None:
        with pytest.raises(BadRequest):
            connection.commit()

    callbacks = Adding(engine)
    callbacks.client_high_water_mark(0)
    callbacks.then = swallow
    with pytest.raises(BadRequest):
        callbacks.apply_transaction(transaction(0))
    assert callbacks.total == 0


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT 'one; COMMIT' AS said",
        "SELECT CASE WHEN total = 0 THEN 'none' ELSE 'some' END FROM totals -- ; rollback",
        'SELECT total AS "; END" FROM totals',
    ],
)
def test_words_that_end_nothing_are_no_matter(engine: sa.Engine, statement: str) -> None:
    callbacks = Adding(engine)
    callbacks.client_high_water_mark(0)
    callbacks.then = lambda connection: connection.exec_driver_sql(statement).all()
    callbacks.apply_transaction(transaction(0))
    assert (callbacks.total, callbacks.client_high_water_mark(0)) == (1, 0)


def test_what_was_skipped_moves_the_mark_with_the_next(engine: sa.Engine) -> None:
    callbacks = Adding(engine)
    callbacks.client_high_water_mark(0)
    callbacks.then = lambda _: 1 // 0
    for number in (0, 1):
        with pytest.raises(ZeroDivisionError):
            callbacks.apply_transaction(transaction(number))
    callbacks.then = None
    callbacks.apply_transaction(transaction(2))
    assert (callbacks.total, callbacks.client_high_water_mark(0)) == (1, 2)
    with pytest.raises(DataLoss):  # nobody has failed on 3
        callbacks.apply_transaction(transaction(4))


@pytest.mark.parametrize(
    ("url", "options", "found"),
    [
        ("sqlite://", {}, "SingletonThreadPool"),
        ("sqlite://", {"poolclass": sa.pool.StaticPool}, "StaticPool"),
        ("sqlite:///{}/app.db", {"isolation_level": "AUTOCOMMIT"}, "AUTOCOMMIT"),
    ],
)
def test_an_engine_that_cannot_keep_them_together_is_refused(
    tmp_path: Path, url: str, options: dict[str, Any], found: str
) -> None:
    engine = sa.create_engine(url.format(tmp_path), **options)
    with pytest.raises(BadConfig, match=found):
        Adding(engine)
    engine.dispose()


def test_an_url_is_no_engine() -> None:
    with pytest.raises(BadConfig, match="create_engine makes it, found 'sqlite://"):
        Adding("sqlite:///accounts.db")  # type: ignore[arg-type]


def test_without_sqlalchemy_the_import_says_what_to_install() -> None:
    code = "import sys; sys.modules['sqlalchemy'] = None; import waltz_core.client.sql"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100
    )
    assert "pip install 'waltz-spark[sql]'" in done.stderr.splitlines()[-1]


def test_savepoints_are_welcome(engine: sa.Engine) -> None:
    def half(connection: sa.Connection) -> None:
        point = connection.begin_nested()
        connection.execute(TOTALS.update().values(total=1_000))
        point.rollback()
        with connection.begin_nested():
            connection.execute(TOTALS.update().values(total=TOTALS.c.total + 10))

    callbacks = Adding(engine)
    callbacks.client_high_water_mark(0)
    callbacks.then = half
    callbacks.apply_transaction(transaction(0))
    assert (callbacks.total, callbacks.client_high_water_mark(0)) == (11, 0)


def test_a_database_that_was_set_back_is_told(engine: sa.Engine) -> None:
    callbacks = Adding(engine)
    callbacks.client_high_water_mark(0)
    callbacks.apply_transaction(transaction(0))
    with pytest.raises(DataLoss, match="expected the database to have applied 4, found 0"):
        callbacks.apply_transaction(transaction(5))


def test_a_context_reads_under_the_databases_mark(engine: sa.Engine) -> None:
    callbacks = Adding(engine)
    builder = TransactionBuilder(PartitionId(0), TransactionId(77))
    with pytest.raises(BadRequest, match="subscribe to it"), callbacks.reading(builder):
        pass
    callbacks.client_high_water_mark(0)
    callbacks.apply_transaction(transaction(0))
    with callbacks.reading(builder) as connection:
        assert connection.execute(sa.select(TOTALS.c.total)).scalar_one() == 1
        connection.execute(TOTALS.update().values(total=99))
    assert builder.client_high_water_mark == 0
    assert callbacks.total == 1  # nothing that a reader writes stays


def test_a_context_reads_the_state_of_one_moment(engine: sa.Engine) -> None:
    callbacks = Adding(engine)
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


def test_a_locked_database_is_waited_for(tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'app.db'}", connect_args={"timeout": 0})
    METADATA.create_all(engine)
    with engine.begin() as connection:
        connection.execute(TOTALS.insert().values(id=1, total=0))
    callbacks = Adding(engine)
    callbacks.client_high_water_mark(0)
    holding, tried = threading.Event(), threading.Event()

    def hold() -> None:
        with engine.begin() as connection:
            connection.execute(TOTALS.update().values(total=TOTALS.c.total + 100))
            holding.set()
            assert tried.wait(10)

    def count_tries(*_: object) -> None:
        tried.set()

    holder = threading.Thread(target=hold)
    holder.start()
    assert holding.wait(10)
    sa.event.listen(engine, "handle_error", count_tries)
    callbacks.apply_transaction(transaction(0))
    holder.join()
    assert (callbacks.total, callbacks.client_high_water_mark(0)) == (101, 0)
    engine.dispose()


def test_an_outage_is_no_poison(engine: sa.Engine) -> None:
    callbacks = Adding(engine)
    gone = sa.exc.OperationalError("SELECT 1", {}, Exception("server closed the connection"))
    assert callbacks.uncaught_exception(0, 7, gone) is PoisonPolicy.RETRY
    assert callbacks.uncaught_exception(0, 7, Unreachable("the log")) is PoisonPolicy.RETRY
    with pytest.raises(sa.exc.OperationalError) as mistake, engine.begin() as connection:
        connection.execute(sa.text("UPDATE no_such_table SET a = 1"))
    assert callbacks.uncaught_exception(0, 7, mistake.value) is PoisonPolicy.STOP
    wrong = sa.exc.IntegrityError("INSERT", {}, Exception("UNIQUE constraint failed"))
    assert callbacks.uncaught_exception(0, 7, wrong) is PoisonPolicy.STOP
