"""One of several processes that apply a log to one database; `test_sql_instances.py` starts it.

The process prints "ready" when its feeds have started, and runs until its input ends. After
SIGUSR1, the process hangs in the next transaction that it applies, or with `--together` in the next
batch of several. The process makes the changes, prints "inside", and commits nothing.
"""

import argparse
import signal
import sys
import threading
from collections.abc import Sequence

import sqlalchemy as sa

from waltz_core.client import Transaction, WaltzClient
from waltz_core.client.api.sql import SqlCallbacks

METADATA = sa.MetaData()
SUMS = sa.Table(
    "sums",
    METADATA,
    sa.Column("partition_id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("total", sa.BigInteger, nullable=False),
)
# No primary key: a row that is applied twice must be visible, not rejected.
ENTRIES = sa.Table(
    "entries",
    METADATA,
    sa.Column("partition_id", sa.Integer, nullable=False),
    sa.Column("transaction_id", sa.BigInteger, nullable=False),
    sa.Column("applied_by", sa.String(20), nullable=False),
)


def create_engine(url: str, isolation: str | None) -> sa.Engine:
    """Return an engine; connections to SQLite wait for each other for a while."""
    options: dict[str, object] = {} if isolation is None else {"isolation_level": isolation}
    if url.startswith("sqlite"):
        options["connect_args"] = {"timeout": 20}
    return sa.create_engine(url, **options)


class SumCallbacks(SqlCallbacks):
    """Sums the headers of each partition."""

    def __init__(self, engine: sa.Engine, name: str) -> None:
        super().__init__(engine)
        self._name = name
        self.should_block = False

    def apply(self, connection: sa.Connection, transaction: Transaction) -> None:
        """Add one."""
        partition = int(transaction.partition_id)
        entry = {"partition_id": partition, "transaction_id": int(transaction.transaction_id)}
        connection.execute(ENTRIES.insert().values(applied_by=self._name, **entry))
        total = connection.execute(
            sa.select(SUMS.c.total).where(SUMS.c.partition_id == partition)
        ).scalar_one()
        # The new sum is computed from a value that was read before. A concurrent writer may have
        # changed this value.
        connection.execute(
            SUMS.update()
            .where(SUMS.c.partition_id == partition)
            .values(total=total + transaction.header)
        )
        if self.should_block:
            print_word("inside")
            threading.Event().wait()


class BatchSumCallbacks(SumCallbacks):
    """Like `SumCallbacks`, but with one statement for a batch."""

    def apply_batch(self, connection: sa.Connection, transactions: Sequence[Transaction]) -> None:
        """Add all."""
        partition = int(transactions[0].partition_id)
        shared = {"partition_id": partition, "applied_by": self._name}
        entries = [
            {"transaction_id": int(transaction.transaction_id), **shared}
            for transaction in transactions
        ]
        connection.execute(ENTRIES.insert(), entries)
        is_in_partition = SUMS.c.partition_id == partition
        total = connection.execute(sa.select(SUMS.c.total).where(is_in_partition)).scalar_one()
        added = sum(transaction.header for transaction in transactions)
        connection.execute(SUMS.update().where(is_in_partition).values(total=total + added))
        if self.should_block and len(transactions) > 1:
            print_word("inside")
            threading.Event().wait()


def print_word(word: str) -> None:
    """Print a word for the process that has started this one."""
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def main() -> None:
    """Run an instance."""
    parser = argparse.ArgumentParser()
    for word in ("--connect", "--database", "--name"):
        parser.add_argument(word, required=True)
    parser.add_argument("--isolation")
    parser.add_argument("--together", action="store_true")
    options = parser.parse_args()
    kind = BatchSumCallbacks if options.together else SumCallbacks
    callbacks = kind(create_engine(options.database, options.isolation), options.name)

    def block_in_next_transaction(*_: object) -> None:
        callbacks.should_block = True

    signal.signal(signal.SIGUSR1, block_in_next_transaction)
    with WaltzClient(options.connect) as client:
        client.subscribe(callbacks)
        print_word("ready")
        sys.stdin.read()


if __name__ == "__main__":
    main()
