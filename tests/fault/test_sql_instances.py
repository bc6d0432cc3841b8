"""Two processes that apply one log to one database are killed: each row is applied once."""

import contextlib
import itertools
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import sqlalchemy as sa

from tests import postgres
from tests.fault.child import ChildProcess
from tests.fault.load import PROJECT_ROOT, wait_until
from tests.fault.sql_instance import ENTRIES, METADATA, SUMS, create_engine
from tests.time_limits import PATIENT_CLIENT, TEST_TIMEOUT_S
from tests.unit.client.test_sql import transaction
from waltz_core import local
from waltz_core.client import PoisonPolicy, RangeForm, Transaction, WaltzClient
from waltz_core.client.api.sql import SqlCallbacks
from waltz_core.errors import BadRequest
from waltz_core.records.raw_records import HEADER_DTYPE

pytestmark = pytest.mark.fault

ROUNDS = 3
LAG_MAX = 300


class Database(NamedTuple):
    """A database, and whether instances apply batches to it."""

    url: str
    isolation: str | None


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Give the connect string of a cluster."""
    directory = tmp_path_factory.mktemp("cluster")
    with local.cluster(directory, storage_count=1, server_count=1) as connect:
        yield connect


@pytest.fixture(
    params=[
        "sqlite",
        pytest.param("READ COMMITTED", marks=pytest.mark.slow),
        pytest.param("SERIALIZABLE", marks=pytest.mark.slow),
    ]
)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    if request.param == "sqlite":
        return Database(f"sqlite:///{tmp_path / 'sums.db'}", None)
    server: postgres.PostgresServer = request.getfixturevalue("postgres")
    return Database(server.create(), request.param)


@pytest.fixture
def engine(place: Database) -> Iterator[sa.Engine]:
    new_engine = create_engine(place.url, place.isolation)
    METADATA.create_all(new_engine)
    yield new_engine
    new_engine.dispose()


class Instance(ChildProcess):
    """One of the processes."""

    def __init__(
        self, connect: str, place: Database, name: str, directory: Path, *, together: bool = False
    ) -> None:
        command = [sys.executable, str(PROJECT_ROOT / "tests" / "fault" / "sql_instance.py")]
        command += ["--connect", connect, "--database", place.url, "--name", name]
        if place.isolation is not None:
            command += ["--isolation", place.isolation]
        if together:
            command += ["--together"]
        self.name = name
        self._output = directory / f"{name}.out"
        with self._output.open("w") as output:
            self.run(command, output)
        wait_until("an instance is ready", partial(self.has_printed, "ready"))

    def has_printed(self, word: str) -> bool:
        assert self.process.poll() is None, f"{self.name} has ended"
        return word in self._output.read_text().split()

    def stop_in_next_transaction(self) -> None:
        """Stop it within a transaction."""
        self.process.send_signal(signal.SIGUSR1)


class Log:
    """The log, and a writer that continues."""

    def __init__(self, client: WaltzClient, engine: sa.Engine) -> None:
        self.client = client
        self._engine = engine
        self._random = random.Random(7)

    def write_until(self, description: str, condition: Callable[[], object]) -> None:
        """Write until a condition holds."""
        deadline = time.monotonic() + TEST_TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, f"not in time: {description}"
            if sum(self.marks().values()) - sum(read_marks(self._engine).values()) > LAG_MAX:
                time.sleep(0.02)  # other processes apply, and only the database shows it
                continue
            self.write(1)

    def write_until_applied_by(self, name: str, count: int) -> None:
        """Write until an instance has applied the given number of transactions."""
        self.write_until(
            f"{count} applied by {name}", lambda: count_of(self._engine, name) >= count
        )

    def write(self, count: int) -> None:
        futures = [
            self.client.append(b"", partition=partition, header=self._random.randrange(1_000))
            for partition in list(range(self.client.partition_count)) * count
        ]
        for future in futures:
            future.result()

    def marks(self) -> dict[int, int]:
        marks = self.client.high_water_marks(linearizable=True)
        return {partition: int(mark) for partition, mark in marks.items()}

    def sums(self) -> dict[int, int]:
        """Return the sums computed from the log."""
        found = {}
        for partition, last in self.marks().items():
            chunks = self.client.read_range(partition, 0, last, form=RangeForm.HEADERS)
            headers = [np.frombuffer(chunk.records, dtype=HEADER_DTYPE) for chunk in chunks]
            found[partition] = sum(int(header["header"].sum(dtype=np.int64)) for header in headers)
        return found


def read_marks(engine: sa.Engine) -> dict[int, int]:
    """Return the last transaction that the database has of each partition."""
    marks = sa.table(
        "waltz_high_water_marks", sa.column("partition_id"), sa.column("high_water_mark")
    )
    with engine.connect() as connection:
        rows = connection.execute(sa.select(marks.c.partition_id, marks.c.high_water_mark)).all()
    return {int(row.partition_id): int(row.high_water_mark) for row in rows}


def count_of(engine: sa.Engine, name: str) -> int:
    query = sa.select(sa.func.count()).select_from(ENTRIES).where(ENTRIES.c.applied_by == name)
    with engine.connect() as connection:
        return int(connection.execute(query).scalar_one())


def test_each_transaction_is_applied_once_though_instances_are_killed(
    cluster: str, place: Database, engine: sa.Engine, tmp_path: Path
) -> None:
    numbers = itertools.count(1)

    def start() -> Instance:
        number = next(numbers)  # every second instance applies each batch with one statement
        name = f"instance {number}"
        return Instance(cluster, place, name, tmp_path, together=number % 2 == 0)

    with WaltzClient(cluster, PATIENT_CLIENT) as client:
        with engine.begin() as connection:
            rows = [{"partition_id": each, "total": 0} for each in range(client.partition_count)]
            connection.execute(SUMS.insert(), rows)
        log = Log(client, engine)
        log.write(20)
        instances = [start(), start()]
        try:
            for number in range(ROUNDS):
                victim = instances[number % 2]
                log.write_until_applied_by(victim.name, 20)
                if number < 2:
                    victim.stop_in_next_transaction()
                    log.write_until(
                        "the instance is inside a transaction",
                        partial(victim.has_printed, "inside"),
                    )
                victim.kill()
                instances[number % 2] = start()
            for instance in instances:
                log.write_until_applied_by(instance.name, 1)
            wait_until("all transactions are applied", lambda: read_marks(engine) == log.marks())
            for instance in instances:
                instance.end()
        finally:
            for each in instances:
                each.kill()
        check(engine, log)


@pytest.mark.slow
def test_a_view_waits_for_a_database_that_has_died(cluster: str, tmp_path: Path) -> None:
    with postgres.run_postgres() as server, WaltzClient(cluster, PATIENT_CLIENT) as client:
        place = Database(server.create(), "READ COMMITTED")
        engine = create_engine(place.url, place.isolation)
        METADATA.create_all(engine)
        with engine.begin() as connection:
            rows = [
                {"partition_id": number, "total": 0} for number in range(client.partition_count)
            ]
            connection.execute(SUMS.insert(), rows)
        log = Log(client, engine)
        instance = Instance(cluster, place, "alone", tmp_path)
        try:
            for _ in range(2):
                before = count_of(engine, "alone")
                log.write_until_applied_by("alone", before + 20)
                server.stop()
                engine.dispose()
                log.write(5)
                server.start()
            wait_until("all transactions are applied", lambda: read_marks(engine) == log.marks())
            instance.end()
        finally:
            instance.kill()
        check(engine, log)
        engine.dispose()


def check(engine: sa.Engine, log: Log) -> None:
    """Compare the database with the log."""
    with engine.connect() as connection:
        entries = connection.execute(
            sa.select(ENTRIES.c.partition_id, ENTRIES.c.transaction_id)
        ).all()
        sums = dict(connection.execute(sa.select(SUMS.c.partition_id, SUMS.c.total)).all())
    everything = [
        (partition, number) for partition, mark in log.marks().items() for number in range(mark + 1)
    ]
    assert sorted(tuple(row) for row in entries) == sorted(everything)
    assert sums == log.sums()
    assert read_marks(engine) == log.marks()


class InsertsExistingKey(SqlCallbacks):
    """Inserts an existing key, and catches the error."""

    def apply(self, connection: sa.Connection, transaction: Transaction) -> None:
        """Insert it."""
        with contextlib.suppress(sa.exc.IntegrityError):
            connection.execute(SUMS.insert().values(partition_id=0, total=0))


def test_a_caught_postgresql_error_does_not_move_the_mark(
    postgres: postgres.PostgresServer,
) -> None:
    engine = create_engine(postgres.create(), "READ COMMITTED")
    METADATA.create_all(engine)
    with engine.begin() as connection:
        connection.execute(SUMS.insert().values(partition_id=0, total=0))
    callbacks = InsertsExistingKey(engine)
    alone = transaction(0)
    with pytest.raises(BadRequest, match=r"had rolled .* back .* caught \(duplicate key"):
        callbacks.apply_transaction(alone)
    assert callbacks.client_high_water_mark(0) == -1
    engine.dispose()


def test_a_view_finds_the_new_primary(postgres: postgres.PostgresServer) -> None:
    url = postgres.create()
    engine = create_engine(url, "READ COMMITTED")
    METADATA.create_all(engine)
    callbacks = InsertsExistingKey(engine)
    assert callbacks.client_high_water_mark(0) == -1
    database = sa.make_url(url).database
    admin = sa.create_engine(url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.exec_driver_sql(f"ALTER DATABASE {database} SET default_transaction_read_only=1")
    engine.dispose()
    with engine.connect():  # the pool keeps it, like that to a demoted primary
        pass
    with admin.connect() as connection:
        connection.exec_driver_sql("SET default_transaction_read_only=0")
        connection.exec_driver_sql(f"ALTER DATABASE {database} RESET default_transaction_read_only")
    admin.dispose()
    alone = transaction(0)
    with pytest.raises(sa.exc.DBAPIError, match="read-only transaction") as caught:
        callbacks.apply_transaction(alone)
    assert callbacks.uncaught_exception(0, 0, caught.value) is PoisonPolicy.RETRY
    callbacks.apply_transaction(alone)
    assert callbacks.client_high_water_mark(0) == 0
    engine.dispose()


def test_the_sql_statement_of_the_client_page_adds_amounts_to_accounts(
    postgres: postgres.PostgresServer,
) -> None:
    page = (PROJECT_ROOT / "docs/client.md").read_text(encoding="utf-8")
    (statement,) = re.findall(r"^```sql\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    metadata = sa.MetaData()
    account = sa.Column("account", sa.Integer, primary_key=True, autoincrement=False)
    totals = sa.Table("totals", metadata, account, sa.Column("amount", sa.Integer, nullable=False))
    engine = create_engine(postgres.create(), "READ COMMITTED")
    metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(totals.insert(), [{"account": each, "amount": 10} for each in (1, 2, 3)])
        connection.execute(sa.text(statement), {"accounts": [3, 1], "amounts": [5, -4]})
        found = connection.execute(sa.select(totals.c.account, totals.c.amount)).all()
    assert {(row.account, row.amount) for row in found} == {(1, 6), (2, 10), (3, 15)}
    engine.dispose()
