"""Applies the log to an SQL database, with the mark in the same database transaction.

Only this part of the client needs SQLAlchemy (extra `sql`).

Rules:
    1. Each transaction is applied once, even if several instances share a database. One database
       transaction applies a batch of the log's transactions. It first moves the partition's mark
       from the value that this instance knows to the batch's end. Only one instance can move the
       mark. The others find that the mark has moved, and skip the transactions up to the new mark.
    2. A statement that would end the database transaction early is rejected. Without this rule,
       changes and mark would be committed separately.
    3. A context that computes from the database reads the mark first (`reading`). So all rows that
       the context reads are at least as new as the mark.
    4. If database transactions conflict, the batch is retried. If the database is unavailable, the
       view waits. Neither of these is treated as an error of a transaction of the log.
    5. A batch that fails is rolled back and applied in halves. So each error belongs to one
       transaction, and the transactions before this one stay applied. Batches are also halved after
       an outage, because a database may reject a batch for its size or its duration.
    6. A batch holds locks in the database, so it should take about `BATCH_TARGET_S` seconds. The
       batch size doubles or halves, depending on the duration of the last batch. This duration does
       not include the commit, which costs less per row in larger batches. At the end of the log, a
       batch has the transactions that have arrived.
    7. A view belongs to one log, so the cluster key is stored with each mark. If a cluster was
       restored from a backup of the view's cluster, the view may continue with the restored
       cluster. The restored cluster must have all transactions that the view has applied. Then the
       marks of the view get the key of the restored cluster, and no instance moves these marks for
       the old cluster any more.
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
from waltz_core.client.read.feed_delivery import BATCH_TRANSACTIONS_MAX
from waltz_core.client.stream.backoff import Backoff
from waltz_core.cluster.znodes.restore_sources import NO_RESTORE_SOURCES, RestoreSources
from waltz_core.records.record import BEFORE_FIRST, TransactionId

try:
    import sqlalchemy as sa
    from sqlalchemy.exc import DBAPIError, IntegrityError, InterfaceError, OperationalError
    from sqlalchemy.exc import SQLAlchemyError as DatabaseError
except ImportError as error:
    raise ImportError(
        "waltz_core.client.api.sql needs SQLAlchemy 2 and the driver of your database. Hint: for "
        "PostgreSQL, run pip install 'waltz-spark[sql]' psycopg[binary]."
    ) from error

_log = logging.getLogger(__name__)

INITIAL_BATCH_TRANSACTIONS = 16
assert BATCH_TRANSACTIONS_MAX % INITIAL_BATCH_TRANSACTIONS == 0
BATCH_TARGET_S = 0.1
ATTEMPTS_MAX = 12
PAUSE_MS_MIN, PAUSE_MS_MAX = 5, 1_000
# SQLSTATE: serialization failure, deadlock, lock not available (PostgreSQL and others).
_CONFLICT_SQLSTATES = ("40001", "40P01", "55P03")
# SQLSTATE of a change in a read-only transaction, for example after the primary has become a
# standby.
_READ_ONLY_SQLSTATE = "25006"
_CONFLICT_TEXTS = ("database is locked", "database table is locked", "Deadlock found")
# Parts of a statement in which keywords are ignored: comments and quoted texts.
_COMMENT_OR_LITERAL_PATTERN = re.compile(
    r"--[^\n]*|/\*.*?\*/|'(?:[^']|'')*'|\"[^\"]*\"|\$(\w*)\$.*?\$\1\$", re.DOTALL
)
# Statements that end or begin a transaction. ROLLBACK TO and RELEASE of a savepoint are not such
# statements.
_TRANSACTION_END_PATTERN = re.compile(
    r"(?:^|;)\s*(COMMIT|ROLLBACK(?!\s+(?:WORK\s+|TRANSACTION\s+)?TO\b)|ABORT|END|BEGIN"
    r"|START\s+TRANSACTION|PREPARE\s+TRANSACTION)\b",
    re.IGNORECASE,
)

T = TypeVar("T")


class SqlCallbacks(BatchCallbacks):
    """Callbacks whose mark is stored in the application's own database.

    Derive a class from this one and implement `apply`, or `apply_batch` for high rates. Pass an
    instance to `WaltzClient.subscribe`. Instances in any number of processes may share a database;
    they must subscribe with the same `headers`.

        class Accounts(SqlCallbacks):
            def apply(self, connection, transaction):
                entry = transaction.value()
                connection.execute(update(accounts).where(...).values(...))

    Partitions are applied concurrently, each on its own thread and connection; on SQLite they wait
    for each other.

    Args:
        engine: the SQLAlchemy engine of the database; over a network, use `pool_pre_ping=True`.
        application: the owner of the marks, if several applications share a database.
        table: the name of the table of marks, which is created if it does not exist.

    Raises:
        BadConfig: the engine commits each statement separately, or has one connection for all
            threads; or the class has neither `apply` nor `apply_batch`.
        sqlalchemy.exc.SQLAlchemyError: the database cannot be reached, or the table cannot be
            created.
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
            # The cluster key in hexadecimal. It is null in marks from a development version, until
            # this version reads these marks.
            sa.Column("cluster_key", sa.String(32)),
        )
        self._key: str | None = None
        self._restore_sources = NO_RESTORE_SOURCES
        # By partition: the mark that this instance knows, and the size of the next batch.
        self._applied_marks: dict[int, int] = {}
        self._batch_sizes: dict[int, int] = {}
        _check_callbacks_class(type(self))
        _check_engine(engine)
        _register_statement_checks(engine)
        self._create_table()
        # SQLite permits one writer at a time; other writers poll for the lock of the database. So
        # partitions take turns with a lock of this process.
        is_sqlite = engine.dialect.name == "sqlite"
        self._apply_lock: AbstractContextManager[object] = (
            threading.Lock() if is_sqlite else nullcontext()
        )

    # -- for the application ---------------------------------------------------------------------

    def apply(self, connection: sa.Connection, transaction: Transaction) -> None:
        """Apply one transaction of the log to the database, with this connection.

        The method must not commit, roll back or close the connection; otherwise the client raises
        `BadRequest` (rule 2). The client cannot detect such calls on the driver's own connection,
        because they bypass SQLAlchemy. Savepoints (`connection.begin_nested()`) are allowed.

        If the method raises an exception, changes and mark are rolled back, and
        `uncaught_exception` decides how to continue. The method may be called again for the same
        transaction, so its other side effects must be idempotent.
        """
        raise NotImplementedError

    def apply_batch(self, connection: sa.Connection, transactions: Sequence[Transaction]) -> None:
        """Apply 1 to 4,096 transactions of one partition to the database, in order.

        By default, the method calls `apply` for each transaction. Override it to use one statement
        for many rows (`connection.execute(statement, rows)`), which takes a fraction of the time.
        The conditions of `apply` hold for this method, too.
        """
        for transaction in transactions:
            self.apply(connection, transaction)

    @contextmanager
    def reading(self, builder: TransactionBuilder) -> Iterator[sa.Connection]:
        """Open a connection for a context's `execute`, and set the builder's mark (rule 3).

        Writes on this connection are rolled back. On SQLite and PostgreSQL all queries see one
        snapshot.

        Raises:
            BadRequest: the partition is not applied to this database.
        """
        with self._engine.connect() as connection:
            _begin_snapshot(connection)
            mark_row = self._read_mark(connection, builder.partition_id)
            if mark_row is None:
                raise errors.BadRequest(
                    f"partition {builder.partition_id}: the view has not applied any of its "
                    "transactions to this database yet. Hint: subscribe the view to the "
                    "partition first."
                )
            builder.client_high_water_mark = TransactionId(mark_row[0])
            yield connection
            connection.rollback()

    # -- for the client --------------------------------------------------------------------------

    def begin(
        self, cluster_key: bytes, restore_sources: RestoreSources = NO_RESTORE_SOURCES
    ) -> None:
        """Receive the cluster key of the cluster whose log is applied (rule 7)."""
        self._key, self._restore_sources = cluster_key.hex(), restore_sources

    def client_high_water_mark(self, partition: int) -> int:
        """Return the mark that the database has for a partition; a new partition begins at -1.

        Raises:
            ClusterKeyMismatch: the mark belongs to another cluster's log (rule 7).
        """
        mark = self._retry_on_conflict("mark", lambda: self._read_or_insert_mark(partition))
        self._applied_marks[partition] = mark
        return mark

    def apply_transaction(self, transaction: Transaction) -> None:
        """Apply a transaction unless another instance has applied it; see `apply_transactions`."""
        partition, last = int(transaction.partition_id), int(transaction.transaction_id)
        self.apply_transactions(partition, [transaction], last)

    def apply_transactions(
        self, partition: int, transactions: Sequence[Transaction], last: int
    ) -> int:
        """Apply a batch of transactions, except those that another instance has applied (rule 1).

        Returns how many of the transactions, from the first on, are applied now.

        Raises:
            DataLoss: the mark in the database is below the mark that this instance has applied: the
                database was restored to an older state.
            BadRequest: `apply` has ended the database transaction (rule 2).
        """
        if partition not in self._applied_marks:
            self.client_high_water_mark(partition)
        while last > (applied_mark := self._applied_marks[partition]):
            count = bisect_right(
                transactions, applied_mark, key=lambda transaction: int(transaction.transaction_id)
            )
            if count:
                return count  # another instance has applied them
            batch = transactions[: self._batch_sizes.get(partition, INITIAL_BATCH_TRANSACTIONS)]
            end = last if len(batch) == len(transactions) else int(batch[-1].transaction_id)
            try:
                if self._retry_on_conflict(
                    "apply", partial(self._try_apply_batch, partition, batch, end)
                ):
                    return len(batch)
            except Exception as error:
                if len(batch) <= 1:
                    raise
                self._batch_sizes[partition] = len(batch) // 2  # rule 5
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
        """Return RETRY if the database is unreachable (rule 4), else the policy of `Callbacks`."""
        if is_outage(error) or is_conflict(error):
            cause = error.orig if isinstance(error, DBAPIError) else error
            _log.warning("sql.database_unavailable partition=%d error=%s", partition, cause)
            if _sqlstate(error) == _READ_ONLY_SQLSTATE:
                self._engine.dispose()  # a new connection finds the new primary
            return PoisonPolicy.RETRY
        return super().uncaught_exception(partition, transaction_id, error)

    # -- the database ----------------------------------------------------------------------------

    def _retry_on_conflict(self, action_name: str, action: Callable[[], T]) -> T:
        """Retry an action that the database rejects because of another transaction (rule 4)."""
        random = Random()  # noqa: S311 - spreads retries, keeps no secret
        backoff = Backoff(interval_ms_min=PAUSE_MS_MIN, interval_ms_max=PAUSE_MS_MAX, random=random)
        for _ in range(ATTEMPTS_MAX - 1):
            try:
                return action()
            except DBAPIError as error:
                if not is_conflict(error):
                    raise
                pause_ms = backoff.note_failure()
                _log.info("sql.conflict operation=%s pause_ms=%d", action_name, pause_ms)
                time.sleep(pause_ms / 1000)
        return action()

    def _read_or_insert_mark(self, partition: int) -> int:
        with self._engine.begin() as connection:
            mark_row = self._read_mark(connection, partition)
        if mark_row is None:
            insert_statement = self.marks.insert().values(
                application=self._application,
                partition_id=partition,
                high_water_mark=int(BEFORE_FIRST),
                cluster_key=self._key,
            )
            try:
                with self._engine.begin() as connection:
                    connection.execute(insert_statement)
            except IntegrityError:
                with self._engine.begin() as connection:
                    mark_row = self._read_mark(connection, partition)
                if mark_row is None:
                    raise
            else:
                return BEFORE_FIRST
        mark, key = mark_row
        if self._key is not None and key is None:
            key = self._set_cluster_key(partition, self.marks.c.cluster_key.is_(None))
        elif key is not None and self._restore_sources.includes(key, {partition: mark}):
            marks = self.marks.c
            is_same = sa.and_(marks.cluster_key == key, marks.high_water_mark == mark)
            key = self._set_cluster_key(partition, is_same)
        self._check_key(partition, key)
        return mark

    def _check_key(self, partition: int, key: str | None) -> None:
        if self._key not in (None, key):
            raise errors.ClusterKeyMismatch(
                f"partition {partition}: the view was built from a cluster with key {key} "
                f"(table {self.marks.name!r}, application {self._application!r}), but the "
                f"connected cluster has key {self._key}. Hint: connect to the cluster of the "
                "view. If its log was created again, build new tables under another name in "
                "`application`."
            )

    def _set_cluster_key(self, partition: int, is_same: sa.ColumnElement[bool]) -> str | None:
        """Set the cluster key of a mark if `is_same` holds; return the mark's present key (rule 7).

        `is_same` does not hold if another instance has changed the mark in the meantime.
        """
        with self._engine.begin() as connection:
            connection.execute(
                self.marks.update()
                .where(*self._own_row_conditions(partition), is_same)
                .values(cluster_key=self._key)
            )
            mark_row = self._read_mark(connection, partition)
        return None if mark_row is None else mark_row[1]

    def _try_apply_batch(self, partition: int, batch: Sequence[Transaction], end: int) -> bool:
        """Apply a batch; return False if another instance has moved the mark."""
        applied_mark, mark_row, took_s = self._applied_marks[partition], None, 0.0
        with self._apply_lock, self._engine.begin() as connection:
            # This statement comes first, because it locks the row of the mark: other instances wait
            # here.
            is_moved = self._move_mark(connection, partition, applied_mark, end)
            if not is_moved:
                mark_row = self._read_mark(connection, partition)
            elif batch:
                began_s = time.monotonic()
                with _forbid_transaction_end(connection):
                    self.apply_batch(connection, batch)
                if _commit_guard.database_error is not None:
                    self._check_mark_moved(connection, partition, end, _commit_guard.database_error)
                took_s = time.monotonic() - began_s
        if is_moved:
            self._applied_marks[partition] = end
            self._resize_batch(partition, len(batch), took_s)
            return True
        if mark_row is not None:
            self._check_key(partition, mark_row[1])
        if mark_row is None or mark_row[0] <= applied_mark:
            raise errors.DataLoss(
                f"partition {partition}: expected the applied mark {applied_mark} in the database, "
                f"found {'none' if mark_row is None else mark_row[0]}. The database was restored "
                "to an older state while this process ran. Hint: restart the process; it continues "
                "from the mark in the database."
            )
        self._applied_marks[partition] = mark_row[0]
        return False

    def _resize_batch(self, partition: int, count: int, took_s: float) -> None:
        """Choose the size of the next batch from the duration of the last one (rule 6)."""
        size = self._batch_sizes.get(partition, INITIAL_BATCH_TRANSACTIONS)
        if count == size and took_s < BATCH_TARGET_S / 2:
            size = min(2 * size, BATCH_TRANSACTIONS_MAX)
        elif took_s > BATCH_TARGET_S:
            size = max(1, size // 2)
        self._batch_sizes[partition] = size

    def _move_mark(
        self, connection: sa.Connection, partition: int, expected_mark: int, new_mark: int
    ) -> bool:
        """Move the mark to `new_mark`; return False if the mark is not `expected_mark` any more."""
        is_expected_mark = self.marks.c.high_water_mark == expected_mark
        if self._key is not None:
            is_expected_mark = sa.and_(is_expected_mark, self.marks.c.cluster_key == self._key)
        result = connection.execute(
            self.marks.update()
            .where(*self._own_row_conditions(partition), is_expected_mark)
            .values(high_water_mark=new_mark)
        )
        return result.rowcount == 1

    def _check_mark_moved(
        self, connection: sa.Connection, partition: int, expected_mark: int, error: BaseException
    ) -> None:
        """Raise BadRequest if the database rolled back on an error that `apply` caught (rule 2)."""
        try:
            mark_row = self._read_mark(connection, partition)
        except DBAPIError as failure:
            if is_outage(failure):
                raise
            mark_row = None  # PostgreSQL accepts no statement after an error
        if mark_row is None or mark_row[0] != expected_mark:
            raise _early_end_error(
                "that the database had rolled the transaction back after an error that "
                f"`apply` caught ({error})"
            ) from error

    def _read_mark(
        self, connection: sa.Connection, partition: int
    ) -> tuple[int, str | None] | None:
        """Return a partition's mark and its cluster key; None if the table has no mark for it."""
        marks = self.marks
        query = sa.select(marks.c.high_water_mark, marks.c.cluster_key)
        mark_row = connection.execute(
            query.where(*self._own_row_conditions(partition))
        ).one_or_none()
        return None if mark_row is None else (int(mark_row[0]), mark_row[1])

    def _own_row_conditions(self, partition: int) -> tuple[sa.ColumnElement[bool], ...]:
        marks = self.marks
        return marks.c.application == self._application, marks.c.partition_id == partition

    def _create_table(self) -> None:
        try:
            self.marks.create(self._engine, checkfirst=True)
            if not self._has_key_column():
                table_name = self._engine.dialect.identifier_preparer.format_table(self.marks)
                with self._engine.begin() as connection:
                    connection.execute(
                        sa.text(f"ALTER TABLE {table_name} ADD COLUMN cluster_key VARCHAR(32)")
                    )
        except DatabaseError:
            # Another instance may have created the table or the column just now.
            if (
                not sa.inspect(self._engine).has_table(self.marks.name)
                or not self._has_key_column()
            ):
                raise

    def _has_key_column(self) -> bool:
        columns = sa.inspect(self._engine).get_columns(self.marks.name)
        return any(column["name"] == "cluster_key" for column in columns)


def is_conflict(error: Exception) -> bool:
    """Whether a database rejected a transaction because of another; a retry may succeed."""
    if not isinstance(error, DBAPIError):
        return False
    state = _sqlstate(error)
    if state is not None:
        return state in _CONFLICT_SQLSTATES
    return any(text in str(error.orig) for text in _CONFLICT_TEXTS)


def _sqlstate(error: Exception) -> str | None:
    driver_error = getattr(error, "orig", None)
    return getattr(driver_error, "sqlstate", None) or getattr(driver_error, "pgcode", None)


def is_outage(error: Exception) -> bool:
    """Whether a database could not be reached, or is temporarily unable to work."""
    if not isinstance(error, DBAPIError):
        # All connections of the pool are in use, for example by callers that wait for the database.
        return isinstance(error, sa.exc.TimeoutError)
    if error.connection_invalidated or isinstance(error, InterfaceError):
        return True
    if _sqlstate(error) == _READ_ONLY_SQLSTATE:
        return True
    # SQLite raises the same class of errors for a full disk and for a missing table.
    is_mistake = getattr(error.orig, "sqlite_errorname", None) == "SQLITE_ERROR"
    return isinstance(error, OperationalError) and not is_mistake


def _begin_snapshot(connection: sa.Connection) -> None:
    """Start a transaction in which all queries see one snapshot."""
    if connection.dialect.name == "postgresql":
        # PostgreSQL may reject a reader at SERIALIZABLE, but never at REPEATABLE READ.
        connection.execution_options(isolation_level="REPEATABLE READ")
    elif connection.dialect.name == "sqlite":
        # The driver begins a transaction only before a change, not before a query.
        driver: Any = connection.connection.dbapi_connection
        if not driver.in_transaction:
            connection.exec_driver_sql("BEGIN")


def _check_callbacks_class(callbacks_class: type[SqlCallbacks]) -> None:
    base_class = SqlCallbacks
    if (
        callbacks_class.apply is base_class.apply
        and callbacks_class.apply_batch is base_class.apply_batch
    ):
        raise errors.BadConfig(
            f"class {callbacks_class.__name__}: expected a method `apply` or `apply_batch`, "
            "found neither"
        )
    if callbacks_class.apply_transaction is not base_class.apply_transaction:
        raise errors.BadConfig(
            f"class {callbacks_class.__name__} overrides `apply_transaction`, which a view never "
            "calls, because it applies transactions in batches. Hint: override `apply`, "
            "`apply_batch` or `apply_transactions`."
        )


def _check_engine(engine: sa.Engine) -> None:
    checked_engine: object = engine
    if not isinstance(checked_engine, sa.Engine):
        raise errors.BadConfig(
            f"expected an engine from sqlalchemy.create_engine, found {checked_engine!r}"
        )
    if isinstance(engine.pool, sa.pool.SingletonThreadPool | sa.pool.StaticPool):
        raise errors.BadConfig(
            f"{engine.url!r}: expected a database that several connections share, found a "
            f"connection pool of class {type(engine.pool).__name__}. With this pool, each "
            "thread has its own database, or all threads share one transaction. Hint: with "
            "SQLite, use a database file."
        )
    with engine.connect() as connection:
        driver = connection.connection.dbapi_connection
        assert driver is not None
        if engine.dialect.detect_autocommit_setting(driver):
            raise errors.BadConfig(
                f"{engine.url!r}: expected an engine with transactions, found isolation level "
                "AUTOCOMMIT, which would not commit the changes together with the high-water "
                "mark"
            )


class _CommitGuard(threading.local):
    """The guarded connection of this thread, whose transaction must stay open.

    `ending_call` is the call or the statement that would have ended the transaction, if any.
    """

    connection: sa.Connection | None = None
    ending_call: str | None = None
    database_error: BaseException | None = None  # `apply` may have caught it


_commit_guard = _CommitGuard()
# `_commit_impl` is private to SQLAlchemy. With SQLAlchemy's public event for a commit, each
# statement on a guarded connection would take 50 % longer.
assert hasattr(sa.Connection, "_commit_impl")


@contextmanager
def _forbid_transaction_end(connection: sa.Connection) -> Iterator[None]:
    """Reject calls that would end the transaction (rule 2), even if `apply` catches the error."""
    _commit_guard.connection, _commit_guard.ending_call, _commit_guard.database_error = (
        connection,
        None,
        None,
    )
    vars(connection)["_commit_impl"] = partial(_reject_call, "commit()")
    try:
        yield
    finally:
        del vars(connection)["_commit_impl"]
        _commit_guard.connection, ending_call = None, _commit_guard.ending_call
        if connection.closed:
            ending_call = "close()"
        elif ending_call is None and not connection.in_transaction():
            ending_call = "rollback()"  # after a rollback, SQLAlchemy accepts no statement
        elif ending_call is not None:
            # For SQLAlchemy, the transaction has ended now; for the driver, it is still open.
            connection.connection.rollback()
    if ending_call is not None:
        raise _early_end_error(ending_call)


def _reject_call(call_name: str) -> NoReturn:
    _commit_guard.ending_call = call_name
    raise _early_end_error(call_name)


def _check_statement(*event: Any) -> None:  # noqa: ANN401 - the arguments of an event of SQLAlchemy
    statement, context = event[1], event[-1]
    is_guarded = (
        _commit_guard.connection is not None and context.root_connection is _commit_guard.connection
    )
    if is_guarded and _ends_transaction(statement):
        _reject_call(statement.strip()[:40])


def _note_database_error(failure: sa.engine.ExceptionContext) -> None:
    if _commit_guard.connection is not None and failure.connection is _commit_guard.connection:
        _commit_guard.database_error = failure.original_exception


def _register_statement_checks(engine: sa.Engine) -> None:
    """Register the checks of statements on guarded connections, once for each engine."""
    if not sa.event.contains(engine, "handle_error", _note_database_error):
        sa.event.listen(engine, "handle_error", _note_database_error)
    for name in ("do_execute", "do_executemany", "do_execute_no_params"):
        if not sa.event.contains(engine, name, _check_statement):
            sa.event.listen(engine, name, _check_statement)


@lru_cache(1_000)
def _ends_transaction(statement: str) -> bool:
    return (
        _TRANSACTION_END_PATTERN.search(_COMMENT_OR_LITERAL_PATTERN.sub(" ", statement)) is not None
    )


def _early_end_error(call_name: str) -> errors.BadRequest:
    return errors.BadRequest(
        f"method apply must leave the database transaction open, found {call_name}. The view "
        "commits the changes together with its high-water mark after `apply` has returned. "
        "Hint: run a statement that may fail inside `with connection.begin_nested():`."
    )
