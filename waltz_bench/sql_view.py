"""The workload `sql-view`: catch up with a log, first into memory and then into a database.

It needs SQLAlchemy (extra `sql`).

Rules:
    1. The same log is applied three times, each time to new tables:
       - by `Callbacks`, to a dictionary,
       - by `SqlCallbacks.apply`, with one statement for each transaction,
       - by `apply_batch`, with one statement for all accounts that the batch changes. This
         statement has one row for each account, or arrays on PostgreSQL.

       The rate of the workload is the rate of `apply_batch`; the other two rates are in `extra`.
    2. All three unpack each payload. The resulting balances are compared with the appended rows.
    3. An account belongs to one partition, as if a lock protected it.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections import Counter, deque
from pathlib import Path
from typing import TYPE_CHECKING, cast

from waltz_bench.measuring import BenchLoad, Meter, WorkloadResult
from waltz_core.client import MSGPACK, Callbacks, WaltzClient
from waltz_core.errors import BadConfig
from waltz_core.records.batches import encode_append

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    import sqlalchemy as sa

    from waltz_core.client import BatchOutcome, Transaction

ACCOUNTS = 1_000  # the number of accounts in each partition
WAIT_S_MAX = 600.0
ADD_ARRAYS = (
    "UPDATE waltz_bench_accounts SET balance = balance + added.amount FROM "
    "(SELECT unnest(CAST(:accounts AS int[])) AS id, unnest(CAST(:amounts AS int[])) AS amount) "
    "AS added WHERE waltz_bench_accounts.id = added.id"
)


class _AppliedCount:
    """Counts the applied rows, and wakes the waiting caller when all are applied."""

    def __init__(self, count: int) -> None:
        self._remaining_count = count
        self._lock = threading.Lock()
        self._is_finished = threading.Event()

    def add(self, count: int) -> None:
        with self._lock:
            self._remaining_count -= count
            if self._remaining_count <= 0:
                self._is_finished.set()

    def wait(self) -> None:
        if not self._is_finished.wait(WAIT_S_MAX):
            raise BadConfig(
                f"the view has not applied {self._remaining_count} rows within {WAIT_S_MAX:.0f} s"
            )


class _InMemoryView(Callbacks):
    """The baseline without a database: sums the amounts in a dictionary."""

    def __init__(self, applied_count: _AppliedCount) -> None:
        self._applied_count = applied_count
        self.balances: Counter[int] = Counter()
        self._lock = threading.Lock()

    def apply_transaction(self, transaction: Transaction) -> None:
        """Add the amount of a transaction to its account."""
        account, amount = _unpack_entry(transaction)
        with self._lock:
            self.balances[account] += amount
        self._applied_count.add(1)


def _unpack_entry(transaction: Transaction) -> tuple[int, int]:
    account, amount = cast("tuple[int, int]", transaction.value())
    return account, amount


def sql_view(load: BenchLoad, meter: Meter) -> WorkloadResult:
    """Catch up with a log of `--rows` small transactions: into memory, then an SQL database."""

    with WaltzClient(load.connect) as client:
        if any(mark >= 0 for mark in client.high_water_marks().values()):
            raise BadConfig("sql-view needs an empty log, but the log has transactions")
        expected = _append_rows(client, load)
    rows = sum(expected.values())
    seconds: dict[str, float] = {}
    cpu: dict[str, float] = {}
    result: Counter[int] = Counter()
    with _open_database(load) as url:
        for name in ("callbacks", "apply", "apply_batch"):
            applied_count = _AppliedCount(rows)
            callbacks, balances = _create_view(name, url, sorted(expected), applied_count)
            with WaltzClient(load.connect) as client:
                meter.start()
                start_s, began_cpu = time.perf_counter(), time.process_time()
                client.subscribe(callbacks)
                applied_count.wait()
                seconds[name] = time.perf_counter() - start_s
                cpu[name] = time.process_time() - began_cpu
                meter.stop()
            result = balances()
            if result != expected:
                break
    extra: dict[str, object] = {
        f"{name}_per_s": round(rows / elapsed_s) for name, elapsed_s in seconds.items()
    }
    extra |= {f"{name}_client_cpu_us": round(cpu_s * 1e6 / rows, 1) for name, cpu_s in cpu.items()}
    return WorkloadResult(
        rows=rows,
        seconds=seconds[name],
        bytes=0,
        acknowledged=rows,
        lost=sum((expected - result).values()),
        duplicated=sum((result - expected).values()),
        extra=extra | {"last": name, "database": url.partition(":")[0]},
    )


def _append_rows(client: WaltzClient, load: BenchLoad) -> Counter[int]:
    """Append the rows to all partitions round-robin; return the resulting balances by account."""
    count = load.batch_rows
    none: list[list[int]] = [[] for _ in range(count)]
    balances: Counter[int] = Counter()
    waiting: deque[Future[BatchOutcome]] = deque()
    for number in range(-(-load.rows // count)):
        partition = number % client.partition_count
        accounts = [partition * ACCOUNTS + each % ACCOUNTS for each in range(count)]
        payload = encode_append(
            [0] * count,
            [MSGPACK.serialize([account, 1]) for account in accounts],
            write_locks=none,
            read_locks=none,
            append_locks=none,
        )
        balances.update(accounts)
        if len(waiting) >= load.in_flight * client.partition_count:
            waiting.popleft().result()
        waiting.append(client.append_batch(partition, payload, count, client_high_water_mark=-1))
    for waiter in waiting:
        waiter.result()
    return balances


@contextlib.contextmanager
def _open_database(load: BenchLoad) -> Iterator[str]:
    """Yield the URL of the database in `--database`, or of a new SQLite file."""
    if load.database is not None:
        yield load.database
        return
    with tempfile.TemporaryDirectory(prefix="waltz-bench-", dir=load.directory or ".") as directory:
        yield f"sqlite:///{Path(directory) / 'view.db'}"


def _create_view(
    name: str, url: str, numbers: Sequence[int], applied_count: _AppliedCount
) -> tuple[Callbacks, Callable[[], Counter[int]]]:
    """Create new tables; return callbacks that fill the tables, and a function for the balances."""
    import sqlalchemy as sa  # noqa: PLC0415 - only this workload needs it

    from waltz_core.client.api.sql import SqlCallbacks  # noqa: PLC0415 - needs SQLAlchemy as well

    if name == "callbacks":
        in_memory = _InMemoryView(applied_count)
        return in_memory, lambda: in_memory.balances
    metadata = sa.MetaData()
    accounts = sa.Table(
        "waltz_bench_accounts",
        metadata,
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("balance", sa.BigInteger, nullable=False),
    )
    total = accounts.c.balance + sa.bindparam("amount")
    add = accounts.update().where(accounts.c.id == sa.bindparam("account")).values(balance=total)

    class OneStatementPerTransaction(SqlCallbacks):
        def apply(self, connection: sa.Connection, transaction: Transaction) -> None:
            account, amount = _unpack_entry(transaction)
            connection.execute(add, {"account": account, "amount": amount})

        def apply_transactions(
            self, partition: int, batch: Sequence[Transaction], last: int
        ) -> int:
            count = super().apply_transactions(partition, batch, last)
            applied_count.add(count)
            return count

    class OneStatementPerBatch(OneStatementPerTransaction):
        def apply_batch(self, connection: sa.Connection, batch: Sequence[Transaction]) -> None:
            amounts: Counter[int] = Counter()
            for account, amount in map(_unpack_entry, batch):
                amounts[account] += amount
            if connection.dialect.name == "postgresql":
                rows = {"accounts": list(amounts), "amounts": list(amounts.values())}
                connection.execute(sa.text(ADD_ARRAYS), rows)
                return
            connection.execute(add, [{"account": a, "amount": b} for a, b in amounts.items()])

    engine = sa.create_engine(url)
    kind = OneStatementPerTransaction if name == "apply" else OneStatementPerBatch
    callbacks = kind(engine, table="waltz_bench_marks")
    callbacks.marks.drop(engine)
    callbacks.marks.create(engine)
    metadata.drop_all(engine)
    metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(accounts.insert(), [{"id": n, "balance": 0} for n in numbers])

    def balances() -> Counter[int]:
        with engine.connect() as connection:
            rows = connection.execute(sa.select(accounts.c.id, accounts.c.balance)).all()
        engine.dispose()
        return Counter({int(row.id): int(row.balance) for row in rows if row.balance})

    return callbacks, balances
