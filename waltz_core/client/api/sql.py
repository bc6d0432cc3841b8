"""Applies the log to an SQL database: the mark moves in the same transaction as the changes.

It is the only part of the client that needs SQLAlchemy (extra `sql`), and the only one that knows
what a database transaction is.

Rules:
    1. A batch of the log's transactions is applied in one transaction of the database. It moves the
       mark of the partition first, from where this instance knows it to be to the batch's end. Of
       several instances that share a database one moves the mark; the others find it moved, and
       leave out what it covers. So each transaction is applied once.
    2. What would end that transaction early is refused: the changes and the mark would come apart.
    3. Who computes from the database reads the mark before anything else (`reading`): what it reads
       is at least as new.
    4. A conflict between transactions of the database is tried again here, a database that cannot
       be reached is waited for; neither is poison.
    5. A batch that fails is undone and applied in halves, so that an error is always that of one
       transaction, and those before it stay applied. After an outage too: a database may refuse a
       batch for its size, or for the time that it takes.
    6. Applying a batch takes about `BATCH_S`, because it holds locks: the size doubles or halves by
       how long the last one took. The commit is not counted; larger batches make it cheaper. While
       the feed is live a batch is what has arrived.
    7. A view is of one log: the cluster's key is stored with each mark.
"""

import logging
import re
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, partial
from random import Random
from typing import Any, NoReturn, TypeVar

from waltz_core import errors
from waltz_core.client.model.callbacks import BatchCallbacks, PoisonPolicy
from waltz_core.client.model.transaction import Transaction, TransactionBuilder
from waltz_core.client.read.feed_delivery import BATCH_MAX
from waltz_core.client.stream.backoff import Backoff
from waltz_core.records.record import BEFORE_FIRST, TransactionId

try:
    import sqlalchemy as sa
    from sqlalchemy.exc import DBAPIError, IntegrityError, InterfaceError, OperationalError
    from sqlalchemy.exc import SQLAlchemyError as DatabaseError
except ImportError as error:
    raise ImportError(
        "waltz_core.client.api.sql needs SQLAlchemy 2 and the driver of your database: "
        "pip install 'waltz-spark[sql]' psycopg[binary]"
    ) from error

_log = logging.getLogger(__name__)

BATCH_MIN = 16
assert BATCH_MAX % BATCH_MIN == 0
BATCH_S = 0.1
TRIES_MAX = 12
PAUSE_MS_MIN, PAUSE_MS_MAX = 5, 1_000
# SQLSTATE: serialization failure, deadlock, lock not available (PostgreSQL and others).
_CONFLICTS = ("40001", "40P01", "55P03")
# SQLSTATE of a change in a read-only transaction: the primary has become a standby, for example.
_READ_ONLY = "25006"
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


class SqlCallbacks(BatchCallbacks):
    """Callbacks whose mark lies in the application's own database.

    Subclass it and write `apply`, or `apply_batch` where the rate matters; give it to
    `WaltzClient.subscribe`. Instances in any number of processes may share a database; they must
    subscribe with the same `headers`.

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
        BadConfig: the engine commits each statement by itself, or has one connection for all; or
            the class has neither `apply` nor `apply_batch`.
        sqlalchemy.exc.SQLAlchemyError: the database cannot be reached, or the table not be made.
    """

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
            # In hexadecimal; null in marks of development versions, until they are read.
            sa.Column("cluster_key", sa.String(32)),
        )
        self._key: str | None = None
        # By partition: the mark as this instance knows it, and the size of the next batch.
        self._known: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        _check_class(type(self))
        _check_engine(engine)
        _check_statements(engine)
        self._make_table()
        # SQLite has one writer, and the others poll for its lock: here partitions take turns.
        is_sqlite = engine.dialect.name == "sqlite"
        self._turn: AbstractContextManager[object] = (
            threading.Lock() if is_sqlite else nullcontext()
        )

    # -- for the application ---------------------------------------------------------------------

    def apply(self, connection: sa.Connection, transaction: Transaction) -> None:
        """Bring one transaction of the log into the database, by this connection.

        It must not commit, roll back or close: that is refused with `BadRequest` (rule 2). What is
        done behind SQLAlchemy's back, with the driver's own connection, is not seen. Savepoints
        (`connection.begin_nested()`) are welcome. What it raises undoes the changes and the mark;
        then `uncaught_exception` decides. It may be called again for the same transaction, so
        whatever else it does must bear that.
        """
        raise NotImplementedError

    def apply_batch(self, connection: sa.Connection, transactions: Sequence[Transaction]) -> None:
        """Bring 1 to 4,096 transactions of one partition into the database, in their order.

        Calls `apply` for each, unless overridden: with one statement for many rows
        (`connection.execute(statement, rows)`) a batch takes a fraction of the time. All that is
        true of `apply` is true of it.
        """
        for each in transactions:
            self.apply(connection, each)

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
            found = self._row(connection, builder.partition_id)
            if found is None:
                raise errors.BadRequest(
                    f"partition {builder.partition_id}: nothing of it is applied to this database; "
                    "subscribe to it, so that there is a high-water mark to compute from"
                )
            builder.client_high_water_mark = TransactionId(found[0])
            yield connection
            connection.rollback()

    # -- for the client --------------------------------------------------------------------------

    def begin(self, cluster_key: bytes) -> None:
        """Take the key of the cluster whose log is applied (rule 7)."""
        self._key = cluster_key.hex()

    def client_high_water_mark(self, partition: int) -> int:
        """Return the mark that the database has; a partition begins at -1.

        Raises:
            ClusterKeyMismatch: the mark is that of another cluster's log (rule 7).
        """
        mark = self._retried("mark", lambda: self._mark_or_begin(partition))
        self._known[partition] = mark
        return mark

    def apply_transaction(self, transaction: Transaction) -> None:
        """Apply a transaction unless another instance has; see `apply_some`."""
        partition, last = int(transaction.partition_id), int(transaction.transaction_id)
        self.apply_some(partition, [transaction], last)

    def apply_some(self, partition: int, transactions: Sequence[Transaction], last: int) -> int:
        """Apply a batch of transactions, leaving out what another instance has applied (rule 1).

        Raises:
            DataLoss: the database's mark is older than what was applied: it was set back.
            BadRequest: `apply` has ended the database's transaction (rule 2).
        """
        if partition not in self._known:
            self.client_high_water_mark(partition)
        while last > (known := self._known[partition]):
            count = bisect_right(transactions, known, key=lambda each: int(each.transaction_id))
            if count:
                return count  # another instance has applied them
            batch = transactions[: self._sizes.get(partition, BATCH_MIN)]
            end = last if len(batch) == len(transactions) else int(batch[-1].transaction_id)
            try:
                if self._retried("apply", partial(self._apply_once, partition, batch, end)):
                    return len(batch)
            except Exception as error:
                if len(batch) <= 1:
                    raise
                self._sizes[partition] = len(batch) // 2  # rule 5
                if is_outage(error):
                    raise
                _log.warning(
                    "sql.batch_halved partition=%d first=%d count=%d error=%r",
                    partition,
                    batch[0].transaction_id,
                    len(batch),
                    error,
                )
                return 0
        return len(transactions)

    def uncaught_exception(
        self, partition: int, transaction_id: int, error: Exception
    ) -> PoisonPolicy:
        """Wait for a database that does not answer (rule 4), else as `Callbacks` does."""
        if is_outage(error) or is_conflict(error):
            cause = error.orig if isinstance(error, DBAPIError) else error
            _log.warning("sql.database_away partition=%d error=%s", partition, cause)
            if _sqlstate(error) == _READ_ONLY:
                self._engine.dispose()  # a new connection finds the new primary
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
            found = self._row(connection, partition)
        if found is None:
            beginning = self.marks.insert().values(
                application=self._application,
                partition_id=partition,
                high_water_mark=int(BEFORE_FIRST),
                cluster_key=self._key,
            )
            try:
                with self._engine.begin() as connection:
                    connection.execute(beginning)
            except IntegrityError:
                with self._engine.begin() as connection:
                    found = self._row(connection, partition)
                if found is None:
                    raise
            else:
                return BEFORE_FIRST
        mark, key = found
        if self._key is not None and key is None:
            key = self._claimed(partition)
        if self._key not in (None, key):
            raise errors.ClusterKeyMismatch(
                f"partition {partition}: expected a view of cluster {self._key}, found one of "
                f"cluster {key} (table {self.marks.name!r}, application {self._application!r}): "
                "the log was created again, or the view belongs to another one. Hint: apply this "
                "log to tables of its own, under another `application`, or connect to that cluster."
            )
        return mark

    def _claimed(self, partition: int) -> str | None:
        """Give a mark that has no key this cluster's, unless it has one by now (rule 7)."""
        with self._engine.begin() as connection:
            connection.execute(
                self.marks.update()
                .where(*self._its(partition), self.marks.c.cluster_key.is_(None))
                .values(cluster_key=self._key)
            )
            found = self._row(connection, partition)
        return None if found is None else found[1]

    def _apply_once(self, partition: int, batch: Sequence[Transaction], end: int) -> bool:
        """Apply a batch; False when another instance has moved the mark."""
        known, found, took_s = self._known[partition], None, 0.0
        with self._turn, self._engine.begin() as connection:
            # First of all: it takes the row's lock, so that other instances wait here.
            is_moved = self._move(connection, partition, known, end)
            if not is_moved:
                found = self._row(connection, partition)
            elif batch:
                began_s = time.monotonic()
                with _guarded(connection):
                    self.apply_batch(connection, batch)
                if _guard.error is not None:
                    self._check_moved(connection, partition, end, _guard.error)
                took_s = time.monotonic() - began_s
        if is_moved:
            self._known[partition] = end
            self._resize(partition, len(batch), took_s)
            return True
        if found is None or found[0] <= known:
            raise errors.DataLoss(
                f"partition {partition}: expected the database to have applied {known}, found "
                f"{'nothing' if found is None else found[0]}: it was set back while this instance "
                "ran; start it again, and it goes on from there"
            )
        self._known[partition] = found[0]
        return False

    def _resize(self, partition: int, count: int, took_s: float) -> None:
        """Choose the size of the next batch by how long one was applied (rule 6)."""
        size = self._sizes.get(partition, BATCH_MIN)
        if count == size and took_s < BATCH_S / 2:
            size = min(2 * size, BATCH_MAX)
        elif took_s > BATCH_S:
            size = max(1, size // 2)
        self._sizes[partition] = size

    def _move(self, connection: sa.Connection, partition: int, known: int, to: int) -> bool:
        """Move the mark from where it is known to be; False when it is not there."""
        moved = connection.execute(
            self.marks.update()
            .where(*self._its(partition), self.marks.c.high_water_mark == known)
            .values(high_water_mark=to)
        )
        return moved.rowcount == 1

    def _check_moved(
        self, connection: sa.Connection, partition: int, to: int, error: BaseException
    ) -> None:
        """Refuse to go on after an error that `apply` caught and that undid all (rule 2)."""
        try:
            found = self._row(connection, partition)
        except DBAPIError as refused:
            if is_outage(refused):
                raise
            found = None  # PostgreSQL takes no statement after an error
        if found is None or found[0] != to:
            raise _early_end(
                f"that the database had undone it because of an error that was caught ({error})"
            ) from error

    def _row(self, connection: sa.Connection, partition: int) -> tuple[int, str | None] | None:
        """Return a partition's mark and the key of its cluster."""
        marks = self.marks
        query = sa.select(marks.c.high_water_mark, marks.c.cluster_key)
        found = connection.execute(query.where(*self._its(partition))).one_or_none()
        return None if found is None else (int(found[0]), found[1])

    def _its(self, partition: int) -> tuple[sa.ColumnElement[bool], ...]:
        marks = self.marks
        return marks.c.application == self._application, marks.c.partition_id == partition

    def _make_table(self) -> None:
        try:
            self.marks.create(self._engine, checkfirst=True)
            if not self._has_key():
                place = self._engine.dialect.identifier_preparer.format_table(self.marks)
                with self._engine.begin() as connection:
                    connection.execute(
                        sa.text(f"ALTER TABLE {place} ADD COLUMN cluster_key VARCHAR(32)")
                    )
        except DatabaseError:
            # Another instance may have made it just now.
            if not sa.inspect(self._engine).has_table(self.marks.name) or not self._has_key():
                raise

    def _has_key(self) -> bool:
        columns = sa.inspect(self._engine).get_columns(self.marks.name)
        return any(each["name"] == "cluster_key" for each in columns)


def is_conflict(error: Exception) -> bool:
    """Whether a database refused a transaction because of another one, and will take it later."""
    if not isinstance(error, DBAPIError):
        return False
    state = _sqlstate(error)
    if state is not None:
        return state in _CONFLICTS
    return any(text in str(error.orig) for text in _CONFLICT_TEXTS)


def _sqlstate(error: Exception) -> str | None:
    orig = getattr(error, "orig", None)
    return getattr(orig, "sqlstate", None) or getattr(orig, "pgcode", None)


def is_outage(error: Exception) -> bool:
    """Whether a database could not be reached, or could not do its work for the moment."""
    if not isinstance(error, DBAPIError):
        # All connections of the pool are in use, for example by callers that wait for the database.
        return isinstance(error, sa.exc.TimeoutError)
    if error.connection_invalidated or isinstance(error, InterfaceError):
        return True
    if _sqlstate(error) == _READ_ONLY:
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


def _check_class(given: type[SqlCallbacks]) -> None:
    plain = SqlCallbacks
    if given.apply is plain.apply and given.apply_batch is plain.apply_batch:
        raise errors.BadConfig(
            f"{given.__name__}: expected `apply` or `apply_batch`, found neither"
        )
    if given.apply_transaction is not plain.apply_transaction:
        raise errors.BadConfig(
            f"{given.__name__}: expected `apply`, `apply_batch` or `apply_some` to be overridden, "
            "found `apply_transaction`, which is not called: transactions are applied in batches"
        )


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


class _Guard(threading.local):
    """The connection whose transaction must not end, on this thread, and what tried to end it."""

    connection: sa.Connection | None = None
    broken: str | None = None
    error: BaseException | None = None  # of the database; `apply` may have caught it


_guard = _Guard()
# Private to SQLAlchemy. Its event for a commit is public, and makes every statement of a guarded
# connection a half slower.
assert hasattr(sa.Connection, "_commit_impl")


@contextmanager
def _guarded(connection: sa.Connection) -> Iterator[None]:
    """Refuse what would end the connection's transaction (rule 2), also where it is swallowed."""
    _guard.connection, _guard.broken, _guard.error = connection, None, None
    vars(connection)["_commit_impl"] = partial(_refuse, "commit()")
    try:
        yield
    finally:
        del vars(connection)["_commit_impl"]
        _guard.connection, broken = None, _guard.broken
        if connection.closed:
            broken = "close()"
        elif broken is None and not connection.in_transaction():
            broken = "rollback()"  # SQLAlchemy takes no statement after it
        elif broken is not None:
            # SQLAlchemy takes the transaction for ended now; the driver does not.
            connection.connection.rollback()
    if broken is not None:
        raise _early_end(broken)


def _refuse(what: str) -> NoReturn:
    _guard.broken = what
    raise _early_end(what)


def _check_statement(*told: Any) -> None:  # noqa: ANN401 - SQLAlchemy's own
    statement, context = told[1], told[-1]
    is_guarded = _guard.connection is not None and context.root_connection is _guard.connection
    if is_guarded and _ends_transaction(statement):
        _refuse(statement.strip()[:40])


def _note_error(failure: sa.engine.ExceptionContext) -> None:
    if _guard.connection is not None and failure.connection is _guard.connection:
        _guard.error = failure.original_exception


def _check_statements(engine: sa.Engine) -> None:
    """Have the statements of guarded connections checked, once for each engine."""
    if not sa.event.contains(engine, "handle_error", _note_error):
        sa.event.listen(engine, "handle_error", _note_error)
    for name in ("do_execute", "do_executemany", "do_execute_no_params"):
        if not sa.event.contains(engine, name, _check_statement):
            sa.event.listen(engine, name, _check_statement)


@lru_cache(1_000)
def _ends_transaction(statement: str) -> bool:
    return _ENDS.search(_ASIDE.sub(" ", statement)) is not None


def _early_end(what: str) -> errors.BadRequest:
    return errors.BadRequest(
        f"apply: expected to leave the database's transaction open, found {what}: the changes and "
        "the high-water mark are committed together, after it has returned. Hint: run a statement "
        "that may fail inside `with connection.begin_nested():`."
    )
