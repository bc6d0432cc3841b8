"""Applies the log to an SQL database: the mark moves in the same transaction as the changes.

Why it stands alone: it is the only part of the client that needs SQLAlchemy (extra `sql`), and the
only one that knows what a database transaction is.

Rules:
    1. A transaction of the log is applied in one transaction of the database, which moves the mark
       of its partition first, from the id before it to its own. Of several instances that share a
       database one gets to move it; the others find it moved and pass on. So each is applied once.
    2. What would end that transaction early is refused: the changes and the mark would come apart.
    3. Who computes from the database reads the mark before anything else (`reading`): what it reads
       is at least as new.
    4. A conflict between transactions of the database is tried again here, a database that cannot
       be reached is waited for; neither is poison.
    5. What the application has skipped moves the mark as well, with the next transaction.
"""

import logging
import re
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any, TypeVar

from waltz_core import errors
from waltz_core.client.backoff import Backoff
from waltz_core.client.callbacks import Callbacks, PoisonPolicy
from waltz_core.client.transaction import Transaction, TransactionBuilder
from waltz_core.record import BEFORE_FIRST, TransactionId

try:
    import sqlalchemy as sa
    from sqlalchemy.exc import DBAPIError, IntegrityError, InterfaceError, OperationalError
    from sqlalchemy.exc import SQLAlchemyError as DatabaseError
except ImportError as error:
    raise ImportError(
        "waltz_core.client.sql needs SQLAlchemy 2 and the driver of your database: "
        "pip install 'waltz-spark[sql]' psycopg[binary]"
    ) from error

_log = logging.getLogger(__name__)

TRIES_MAX = 12
PAUSE_MS_MIN, PAUSE_MS_MAX = 5, 1_000
# SQLSTATE: serialization failure, deadlock, lock not available (PostgreSQL and others).
_CONFLICTS = ("40001", "40P01", "55P03")
_CONFLICT_TEXTS = ("database is locked", "database table is locked", "Deadlock found")
# What cannot hold a word that ends anything: comments and quoted texts.
_ASIDE = re.compile(r"--[^\n]*|/\*.*?\*/|'(?:[^']|'')*'|\"[^\"]*\"|\$(\w*)\$.*?\$\1\$", re.DOTALL)
# What ends or begins a transaction; ROLLBACK TO and RELEASE of a savepoint do not.
_ENDS = re.compile(
    r"(?:^|;)\s*(COMMIT|ROLLBACK(?!\s+(?:WORK\s+|TRANSACTION\s+)?TO\b)|ABORT|END|BEGIN"
    r"|START\s+TRANSACTION|PREPARE\s+TRANSACTION)\b",
    re.IGNORECASE,
)

T = TypeVar("T")


class SqlCallbacks(Callbacks):
    """Callbacks whose mark lies in the application's own database.

    Subclass it and write `apply`; give it to `WaltzClient.subscribe`. Instances in any number of
    processes may share a database.

        class Accounts(SqlCallbacks):
            def apply(self, connection, transaction):
                entry = transaction.value()
                connection.execute(update(accounts).where(...).values(...))

    Partitions are applied at one time, each on a thread and a connection of its own; at SQLite they
    wait for each other.

    Args:
        engine: the database, SQLAlchemy's; over a network best with `pool_pre_ping=True`.
        application: whose marks these are, where several applications share a database.
        table: the name of the table of marks; it is made when it is not there.

    Raises:
        BadConfig: the engine commits each statement by itself, or has one connection for all.
        sqlalchemy.exc.SQLAlchemyError: the database cannot be reached, or the table not be made.
    """

    needs_all = True  # rule 1: the mark moves by one

    def __init__(
        self, engine: sa.Engine, *, application: str = "", table: str = "waltz_high_water_marks"
    ) -> None:
        self._engine = engine
        self._application = application
        self.marks = sa.Table(
            table,
            sa.MetaData(),
            sa.Column("application", sa.String(200), primary_key=True),
            sa.Column("partition_id", sa.Integer, primary_key=True, autoincrement=False),
            sa.Column("high_water_mark", sa.BigInteger, nullable=False),
        )
        # What `apply` has raised on; whether it was skipped the next transaction tells (rule 5).
        self._failed: dict[int, int] = {}
        _check_engine(engine)
        self._make_table()

    # -- for the application ---------------------------------------------------------------------

    @abstractmethod
    def apply(self, connection: sa.Connection, transaction: Transaction) -> None:
        """Bring one transaction of the log into the database, by this connection.

        It must not commit, roll back or close: that is refused with `BadRequest` (rule 2). What is
        done behind SQLAlchemy's back, with the driver's own connection, is not seen. Savepoints
        (`connection.begin_nested()`) are welcome. What it raises undoes the changes and the mark;
        then `uncaught_exception` decides. It may be called again for the same transaction, so
        whatever else it does must bear that.
        """

    @contextmanager
    def reading(self, builder: TransactionBuilder) -> Iterator[sa.Connection]:
        """Give `execute` of a context a connection to read by, and the builder its mark (rule 3).

        Nothing that is written by it stays. On SQLite and PostgreSQL all queries see the state of
        one moment.

        Raises:
            BadRequest: the partition is not applied to this database.
        """
        with self._engine.connect() as connection:
            _begin_reading(connection)
            mark = self._mark(connection, builder.partition_id)
            if mark is None:
                raise errors.BadRequest(
                    f"partition {builder.partition_id}: nothing of it is applied to this database; "
                    "subscribe to it, so that there is a high-water mark to compute from"
                )
            builder.client_high_water_mark = mark
            yield connection
            connection.rollback()

    # -- for the client --------------------------------------------------------------------------

    def client_high_water_mark(self, partition: int) -> int:
        """Return the mark that the database has; a partition begins at -1."""
        mark = self._retried("mark", lambda: self._mark_or_begin(partition))
        self._failed.pop(partition, None)
        return mark

    def apply_transaction(self, transaction: Transaction) -> None:
        """Apply a transaction unless another instance has (rule 1).

        Raises:
            DataLoss: the database's mark is older than what was applied: it was set back.
            BadRequest: `apply` has ended the database's transaction (rule 2).
        """
        partition, this = int(transaction.partition_id), int(transaction.transaction_id)
        if self._failed.get(partition) == this - 1:  # rule 5
            self._retried("skip", lambda: self._skip(partition, this - 1))
        try:
            self._retried("apply", lambda: self._apply_once(transaction))
        except Exception:
            self._failed[partition] = this
            raise
        self._failed.pop(partition, None)

    def uncaught_exception(
        self, partition: int, transaction_id: int, error: Exception
    ) -> PoisonPolicy:
        """Wait for a database that does not answer (rule 4), else as `Callbacks` does."""
        if isinstance(error, DBAPIError) and (is_outage(error) or is_conflict(error)):
            _log.warning("sql.database_away partition=%d error=%s", partition, error.orig)
            return PoisonPolicy.RETRY
        return super().uncaught_exception(partition, transaction_id, error)

    # -- the database ----------------------------------------------------------------------------

    def _retried(self, what: str, action: Callable[[], T]) -> T:
        """Try again what the database refuses because of another transaction (rule 4)."""
        random = Random()  # noqa: S311 - spreads retries, keeps no secret
        backoff = Backoff(interval_ms_min=PAUSE_MS_MIN, interval_ms_max=PAUSE_MS_MAX, random=random)
        for _ in range(TRIES_MAX - 1):
            try:
                return action()
            except DBAPIError as error:
                if not is_conflict(error):
                    raise
                pause_ms = backoff.failed()
                _log.info("sql.conflict what=%s pause_ms=%d", what, pause_ms)
                time.sleep(pause_ms / 1000)
        return action()

    def _mark_or_begin(self, partition: int) -> int:
        with self._engine.begin() as connection:
            mark = self._mark(connection, partition)
        if mark is not None:
            return mark
        row = {
            "application": self._application,
            "partition_id": partition,
            "high_water_mark": int(BEFORE_FIRST),
        }
        try:
            with self._engine.begin() as connection:
                connection.execute(self.marks.insert().values(row))
        except IntegrityError:
            with self._engine.begin() as connection:
                mark = self._mark(connection, partition)
            if mark is None:
                raise
            return mark  # another instance was faster
        return BEFORE_FIRST

    def _apply_once(self, transaction: Transaction) -> None:
        partition, this = int(transaction.partition_id), int(transaction.transaction_id)
        with self._engine.begin() as connection:
            # First of all: it takes the row's lock, so that other instances wait here.
            if self._move(connection, partition, this):
                with _guarded(connection):
                    self.apply(connection, transaction)
                return
            found = self._mark(connection, partition)
        if found is None or found < this:
            raise errors.DataLoss(
                f"partition {partition}: expected the database to have applied {this - 1}, found "
                f"{found}: it was set back while this instance ran; start it again, and it goes on "
                "from there"
            )

    def _skip(self, partition: int, transaction_id: int) -> None:
        with self._engine.begin() as connection:
            self._move(connection, partition, transaction_id)

    def _move(self, connection: sa.Connection, partition: int, to: int) -> bool:
        """Move the mark to an id from the one before; False when it does not stand there."""
        marks = self.marks
        moved = connection.execute(
            marks.update()
            .where(
                marks.c.application == self._application,
                marks.c.partition_id == partition,
                marks.c.high_water_mark == to - 1,
            )
            .values(high_water_mark=to)
        )
        return moved.rowcount == 1

    def _mark(self, connection: sa.Connection, partition: int) -> TransactionId | None:
        marks = self.marks
        query = sa.select(marks.c.high_water_mark).where(
            marks.c.application == self._application, marks.c.partition_id == partition
        )
        found = connection.execute(query).scalar_one_or_none()
        return None if found is None else TransactionId(found)

    def _make_table(self) -> None:
        try:
            self.marks.create(self._engine, checkfirst=True)
        except DatabaseError:
            # Another instance may have made it just now.
            if not sa.inspect(self._engine).has_table(self.marks.name):
                raise


def is_conflict(error: DBAPIError) -> bool:
    """Whether a database refused a transaction because of another one, and will take it later."""
    state = getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None)
    if state is not None:
        return state in _CONFLICTS
    return any(text in str(error.orig) for text in _CONFLICT_TEXTS)


def is_outage(error: DBAPIError) -> bool:
    """Whether a database could not be reached, or could not do its work for the moment."""
    if error.connection_invalidated or isinstance(error, InterfaceError):
        return True
    # SQLite has one class for a full disk and for a table that is not there.
    is_mistake = getattr(error.orig, "sqlite_errorname", None) == "SQLITE_ERROR"
    return isinstance(error, OperationalError) and not is_mistake


def _begin_reading(connection: sa.Connection) -> None:
    """Have all queries see one state, by what each database has for that."""
    if connection.dialect.name == "postgresql":
        # At SERIALIZABLE a reader would be refused now and then; with a snapshot it never is.
        connection.execution_options(isolation_level="REPEATABLE READ")
    elif connection.dialect.name == "sqlite":
        # The driver begins a transaction only before a change.
        driver: Any = connection.connection.dbapi_connection
        if not driver.in_transaction:
            connection.exec_driver_sql("BEGIN")


def _check_engine(engine: sa.Engine) -> None:
    given: object = engine
    if not isinstance(given, sa.Engine):
        raise errors.BadConfig(
            f"expected an engine as sqlalchemy.create_engine makes it, found {given!r}"
        )
    if isinstance(engine.pool, sa.pool.SingletonThreadPool | sa.pool.StaticPool):
        raise errors.BadConfig(
            f"{engine.url!r}: expected a database that several connections share, found a pool of "
            f"class {type(engine.pool).__name__}: each thread would have its own database, or all "
            "of them one transaction; with SQLite give a file"
        )
    with engine.connect() as connection:
        driver = connection.connection.dbapi_connection
        assert driver is not None
        if engine.dialect.detect_autocommit_setting(driver):
            raise errors.BadConfig(
                f"{engine.url!r}: expected transactions, found isolation level AUTOCOMMIT: the "
                "changes and the high-water mark would be committed one by one"
            )


@contextmanager
def _guarded(connection: sa.Connection) -> Iterator[None]:
    """Refuse what would end the connection's transaction (rule 2), also where it is swallowed."""
    broken: list[str] = []

    def refuse(what: str) -> None:
        broken.append(what)
        raise _early_end(what)

    def ends(_connection: sa.Connection) -> None:
        refuse("commit() or rollback()")

    def executes(*told: Any) -> None:  # noqa: ANN401 - SQLAlchemy's own
        statement = told[2]
        if _ENDS.search(_ASIDE.sub(" ", statement)):
            refuse(statement.strip()[:40])

    listeners = (("commit", ends), ("rollback", ends), ("before_cursor_execute", executes))
    for name, listener in listeners:
        sa.event.listen(connection, name, listener)
    try:
        yield
    finally:
        for name, listener in listeners:
            sa.event.remove(connection, name, listener)
        if broken and not connection.closed:
            # SQLAlchemy takes the transaction for ended now; the driver does not.
            connection.connection.rollback()
    if broken or connection.closed or not connection.in_transaction():
        raise _early_end(broken[0] if broken else "close()")


def _early_end(what: str) -> errors.BadRequest:
    return errors.BadRequest(
        f"apply: expected to leave the database's transaction open, found {what}: the changes and "
        "the high-water mark are committed together, after it has returned"
    )
