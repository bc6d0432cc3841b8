"""The bank's books: the entries in the log, and the database computed from the entries.

`bank_desk.py` decides which entries to write. `bank.py` is the terminal.

Rules:
    1. The log is the source of truth. If the log contains an entry, then the entry has happened.
       The database is computed from the log.
    2. An account belongs to the partition that its lock hashes to. Each entry of an account has the
       write lock of the account. The entry is computed from a state that is at least as new as the
       entry's high-water mark. So no balance is ever below zero, and a deactivated account gets no
       new entries. The database has the same constraints, and these constraints never fail.
    3. An entry has a key, and a write lock on this key. If the entry is sent again, the partition
       still contains the entry only once.
    4. Locks apply within one partition. A transfer between two accounts of one partition is one
       entry. A transfer between partitions is several entries. First, `send` takes the money from
       the source account. Then the partition of the target account decides, once: `arrive` or
       `reject`. After `reject`, `return` puts the money back. Meanwhile the money is in transit,
       and belongs to no balance. If a process terminates before it completes a transfer, another
       process completes it (`settle_all`).
    5. Each row of the database is written only by the entries of one partition.
"""

import contextlib
import threading
from collections.abc import Sequence
from typing import NamedTuple

import sqlalchemy as sa

from waltz_core.client import PoisonPolicy, Transaction, lock
from waltz_core.client.api.sql import SqlCallbacks
from waltz_core.errors import Unavailable

HEADER = 0x42414E4B  # "BANK"
WAIT_S_MAX = 60.0
ATTEMPTS_MAX = 5

METADATA = sa.MetaData()
ACCOUNTS = sa.Table(
    "bank_accounts",
    METADATA,
    sa.Column("account", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("cents", sa.BigInteger, nullable=False),
    sa.Column("is_active", sa.Boolean, nullable=False),
    sa.CheckConstraint("cents >= 0", name="bank_never_negative"),
)
ENTRIES = sa.Table(
    "bank_entries",
    METADATA,
    sa.Column("partition_id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("transaction_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("account", sa.BigInteger, primary_key=True, autoincrement=False, index=True),
    sa.Column("kind", sa.String(12), nullable=False),
    sa.Column("cents", sa.BigInteger, nullable=False),
    sa.Column("other", sa.BigInteger),
    sa.Column("key", sa.String(100), nullable=False, index=True),
)
SENDS = sa.Table(  # written by the entries of the source's partition
    "bank_sends",
    METADATA,
    sa.Column("key", sa.String(100), primary_key=True),
    sa.Column("source", sa.BigInteger, nullable=False),
    sa.Column("target", sa.BigInteger, nullable=False),
    sa.Column("cents", sa.BigInteger, nullable=False),
    sa.Column("is_returned", sa.Boolean, nullable=False),
)
ARRIVALS = sa.Table(  # written by the entries of the target's partition
    "bank_arrivals",
    METADATA,
    sa.Column("key", sa.String(100), primary_key=True),
    sa.Column("is_rejected", sa.Boolean, nullable=False),
)


class Entry(NamedTuple):
    """An entry of the books: the data of one transaction."""

    kind: str
    key: str
    account: int
    cents: int = 0
    other: int | None = None

    def effects(self) -> list[tuple[int, int, int | None]]:
        """Return (account, signed cents, counterparty) for each account that this entry changes."""
        match self.kind:
            case "withdraw" | "send":
                return [(self.account, -self.cents, self.other)]
            case "transfer":
                assert self.other is not None
                return [
                    (self.account, -self.cents, self.other),
                    (self.other, self.cents, self.account),
                ]
            case "reject":
                return [(self.account, 0, self.other)]
            case _:
                return [(self.account, self.cents, self.other)]

    def locks(self) -> list[int]:
        """Return this entry's write locks, on its accounts and on its key (rules 2, 3)."""
        accounts = [account_lock(account) for account, _, _ in self.effects()]
        return [*accounts, lock("bank-entry", self.key)]


def account_lock(account: int) -> int:
    """Return the lock of an account; the lock also determines the account's partition."""
    return lock("bank-account", account)


class Books(SqlCallbacks):
    """Applies the bank's entries to its database, and lets callers wait for an entry."""

    def __init__(self, engine: sa.Engine) -> None:
        super().__init__(engine, application="bank")
        self.engine = engine
        self._applied: dict[int, int] = {}
        self._errors: dict[int, Exception] = {}
        self._progress_condition = threading.Condition()
        for _ in range(ATTEMPTS_MAX - 1):
            # Another instance may be creating the same tables.
            with contextlib.suppress(sa.exc.DBAPIError):
                METADATA.create_all(engine)
                return
        METADATA.create_all(engine)

    def apply(self, connection: sa.Connection, transaction: Transaction) -> None:
        """Apply one entry; ignore transactions of other applications."""
        if transaction.header != HEADER:
            return
        entry = Entry(*transaction.value())
        where = {
            "partition_id": int(transaction.partition_id),
            "transaction_id": int(transaction.transaction_id),
        }
        match entry.kind:
            case "open":
                row = {"account": entry.account, "cents": 0, "is_active": True}
                connection.execute(ACCOUNTS.insert().values(row))
            case "deactivate":
                is_account = ACCOUNTS.c.account == entry.account
                connection.execute(ACCOUNTS.update().where(is_account).values(is_active=False))
            case "send":
                row = {"key": entry.key, "cents": entry.cents, "is_returned": False}
                row |= {"source": entry.account, "target": entry.other}
                connection.execute(SENDS.insert().values(row))
            case "arrive" | "reject":
                row = {"key": send_key_of(entry.key), "is_rejected": entry.kind == "reject"}
                connection.execute(ARRIVALS.insert().values(row))
            case "return":
                is_send = SENDS.c.key == send_key_of(entry.key)
                connection.execute(SENDS.update().where(is_send).values(is_returned=True))
        for account, cents, other in entry.effects():
            changed = connection.execute(
                ACCOUNTS.update()
                .where(ACCOUNTS.c.account == account)
                .values(cents=ACCOUNTS.c.cents + cents)
            )
            assert changed.rowcount == 1, f"{entry} changes an account that is not there"
            row = {"account": account, "kind": entry.kind, "cents": cents, "other": other}
            connection.execute(ENTRIES.insert().values(key=entry.key, **where, **row))

    # -- progress

    def client_high_water_mark(self, partition: int) -> int:
        """Return the partition's high-water mark that the database stores."""
        mark = super().client_high_water_mark(partition)
        self._record_applied(partition, mark)
        return mark

    def apply_transactions(
        self, partition: int, transactions: Sequence[Transaction], last: int
    ) -> int:
        """Apply a prefix of the transactions; return how many of them the database now includes.

        Another instance may have applied them to the same database.
        """
        count = super().apply_transactions(partition, transactions, last)
        if count:
            self._record_applied(partition, transactions[count - 1].transaction_id)
        return count

    def uncaught_exception(
        self, partition: int, transaction_id: int, error: Exception
    ) -> PoisonPolicy:
        """Wake the callers of `wait_for` if this error stops the feed of the partition."""
        policy = super().uncaught_exception(partition, transaction_id, error)
        if policy is PoisonPolicy.STOP:
            with self._progress_condition:
                self._errors[partition] = error
                self._progress_condition.notify_all()
        return policy

    def wait_for(self, partition: int, transaction_id: int) -> None:
        """Wait until the database includes a transaction of a partition.

        Raises:
            Unavailable: the feed of the partition has stopped, or `WAIT_S_MAX` has passed.
        """

        def has_ended() -> bool:
            is_applied = self._applied.get(partition, -1) >= transaction_id
            return is_applied or partition in self._errors

        with self._progress_condition:
            if has_ended() or self._progress_condition.wait_for(has_ended, WAIT_S_MAX):
                if partition not in self._errors:
                    return
                raise Unavailable(f"the books cannot continue: {self._errors[partition]}")
        raise Unavailable(
            f"the books have not caught up with the log within {WAIT_S_MAX:.0f} s. Hint: try again."
        )

    def _record_applied(self, partition: int, mark: int) -> None:
        with self._progress_condition:
            self._applied[int(partition)] = int(mark)
            self._progress_condition.notify_all()


def send_key_of(key: str) -> str:
    """Return the key of the `send` entry that an `arrive`, `reject` or `return` belongs to."""
    return key.rpartition("/")[0]


def engine_of(url: str) -> sa.Engine:
    """Return an engine for a URL; with SQLite, a connection waits up to 30 s for a locked file."""
    if url.startswith("sqlite"):
        return sa.create_engine(url, connect_args={"timeout": 30})
    return sa.create_engine(url, pool_pre_ping=True)
