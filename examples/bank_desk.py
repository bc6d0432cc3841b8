"""The bank's desk: the operations of the bank, and their checks.

`bank_books.py` has the rules. Any number of desks may share a database; each desk has its own
client.
"""

import contextlib
import re
import secrets
from collections.abc import Callable

import sqlalchemy as sa
from bank_books import ACCOUNTS, ARRIVALS, ENTRIES, HEADER, SENDS, Books, Entry, account_lock

from waltz_core.client import TransactionBuilder, TransactionContext, WaltzClient, partition_of

CENTS_MAX = 10**15

ComputeEntry = Callable[[sa.Connection], Entry]


class BankError(Exception):
    """The bank rejects the operation; the message states the reason."""


class WriteEntry(TransactionContext):
    """Writes one entry; calls `compute_entry` again after each lock conflict."""

    def __init__(self, books: Books, account: int, key: str, compute_entry: ComputeEntry) -> None:
        super().__init__()
        self._books = books
        self._account = account
        self._key = key
        self._compute_entry = compute_entry

    def partition_id(self, partition_count: int) -> int:
        """Return the partition of the account that the entry belongs to."""
        return partition_of(account_lock(self._account), partition_count)

    def execute(self, builder: TransactionBuilder) -> bool:
        """Fill in the entry; return False if the partition has an entry with this key (rule 3)."""
        with self._books.reading(builder) as connection:
            is_known_key = (ENTRIES.c.partition_id == builder.partition_id) & (
                ENTRIES.c.key == self._key
            )
            if (
                connection.execute(sa.select(ENTRIES.c.kind).where(is_known_key)).first()
                is not None
            ):
                return False
            entry = self._compute_entry(connection)
        builder.set_header(HEADER)
        builder.set_transaction_data(list(entry))
        builder.set_write_locks(entry.locks())
        return True


class Bank:
    """The operations of the bank. All amounts are in cents.

    An operation with a `key` may be repeated, for example after a crash, and is done only once. An
    operation raises `BankError` if the bank rejects it, and an error of `waltz_core.errors` if it
    fails.
    """

    def __init__(self, connect: str, engine: sa.Engine) -> None:
        self._books = Books(engine)
        self._client = WaltzClient(connect)
        self._client.subscribe(self._books)

    def close(self) -> None:
        """Close the client. The caller closes the database engine."""
        self._client.close()

    # -- commands

    def open(self, account: int, *, key: str | None = None) -> None:
        """Open an account; reject a number that is in use."""
        key = valid_key(key)

        def compute_entry(connection: sa.Connection) -> Entry:
            is_account = ACCOUNTS.c.account == account
            if connection.execute(sa.select(ACCOUNTS).where(is_account)).first() is not None:
                raise BankError(f"account {account} exists already")
            return Entry("open", key, account)

        self._write_entry(account, key, compute_entry)

    def deposit(self, account: int, cents: int, *, key: str | None = None) -> None:
        """Deposit an amount in cents into an account."""
        key = valid_key(key)

        def compute_entry(connection: sa.Connection) -> Entry:
            check_can_receive(connection, account, cents)
            return Entry("deposit", key, account, cents)

        self._write_entry(account, key, compute_entry)

    def withdraw(self, account: int, cents: int, *, key: str | None = None) -> None:
        """Withdraw an amount in cents; reject an amount above the balance."""
        key = valid_key(key)

        def compute_entry(connection: sa.Connection) -> Entry:
            check_can_pay(connection, account, cents)
            return Entry("withdraw", key, account, cents)

        self._write_entry(account, key, compute_entry)

    def transfer(self, source: int, target: int, cents: int, *, key: str | None = None) -> None:
        """Transfer an amount in cents, within a partition or between two (rule 4)."""
        if source == target:
            raise BankError("a transfer needs two accounts")
        key = valid_key(key)
        target_partition = self.partition_of_account(target)
        kind = "transfer" if self.partition_of_account(source) == target_partition else "send"

        def compute_entry(connection: sa.Connection) -> Entry:
            check_can_pay(connection, source, cents)
            # For a `send`, the target's partition decides again.
            check_can_receive(connection, target, cents)
            return Entry(kind, key, source, cents, target)

        self._catch_up(target_partition)
        self._write_entry(source, key, compute_entry)
        if kind == "send":
            self._complete_transfer(key)

    def deactivate(self, account: int, *, key: str | None = None) -> None:
        """Close an account permanently.

        Its balance must be 0, and no transfer from it may be in transit.
        """
        key = valid_key(key)

        def compute_entry(connection: sa.Connection) -> Entry:
            cents = balance_of_active_account(connection, account)
            if cents:
                raise BankError(f"account {account} holds {money(cents)}; it must be empty")
            if any(row.source == account for row in connection.execute(transfers_in_transit())):
                raise BankError(f"a transfer from account {account} is in transit; try again")
            return Entry("deactivate", key, account)

        self._write_entry(account, key, compute_entry)

    def settle_all(self) -> int:
        """Complete all transfers in transit; return their number."""
        self.catch_up()
        with self._books.engine.connect() as connection:
            keys = [row.key for row in connection.execute(transfers_in_transit())]
        for key in keys:
            with contextlib.suppress(BankError):
                self._complete_transfer(key)
        return len(keys)

    # -- queries

    def balance(self, account: int) -> int:
        """Return an account's balance in cents, including all entries committed before the call."""
        self._catch_up(self.partition_of_account(account))
        is_account = ACCOUNTS.c.account == account
        with self._books.engine.connect() as connection:
            found = connection.execute(
                sa.select(ACCOUNTS.c.cents).where(is_account)
            ).scalar_one_or_none()
        if found is None:
            raise BankError(f"there is no account {account}")
        return int(found)

    def accounts(self) -> list[tuple[int, int, bool]]:
        """Return (number, balance in cents, is active) for each account, sorted by number."""
        self.catch_up()
        with self._books.engine.connect() as connection:
            rows = connection.execute(sa.select(ACCOUNTS).order_by(ACCOUNTS.c.account)).all()
        return [(row.account, row.cents, row.is_active) for row in rows]

    def cents_in_transit(self) -> int:
        """Return the total in cents of the transfers in transit between partitions."""
        with self._books.engine.connect() as connection:
            return sum(row.cents for row in connection.execute(transfers_in_transit()))

    def history(self, account: int) -> list[tuple[int, int, str, int, int | None]]:
        """Return the entries of an account, in the order of the log.

        Each is (partition, transaction ID, kind, signed cents, counterparty).
        """
        self.balance(account)  # checks that it exists, and catches up
        e = ENTRIES.c
        query = sa.select(e.partition_id, e.transaction_id, e.kind, e.cents, e.other)
        with self._books.engine.connect() as connection:
            rows = connection.execute(
                query.where(e.account == account).order_by(e.partition_id, e.transaction_id)
            ).all()
        return [(row[0], row[1], row[2], row[3], row[4]) for row in rows]

    # -- parts

    def partition_of_account(self, account: int) -> int:
        """Return the partition that an account belongs to."""
        return partition_of(account_lock(account), self._client.partition_count)

    def catch_up(self) -> None:
        """Wait until the database includes all transactions that are committed now."""
        for partition, mark in self._client.high_water_marks(linearizable=True).items():
            self._books.wait_for(partition, mark)

    def _catch_up(self, partition: int) -> None:
        mark = self._client.high_water_mark(partition, linearizable=True)
        self._books.wait_for(partition, mark)

    def _write_entry(self, account: int, key: str, compute_entry: ComputeEntry) -> None:
        partition = self.partition_of_account(account)
        self._catch_up(partition)  # so that no operation is rejected because of a stale state
        transaction_id = self._client.submit(
            WriteEntry(self._books, account, key, compute_entry)
        ).result()
        if transaction_id is not None:
            self._books.wait_for(partition, transaction_id)

    def _complete_transfer(self, key: str) -> None:
        """Complete one transfer between partitions (rule 4).

        Raises:
            BankError: the target's partition has rejected the transfer, and the money was returned.
        """
        with self._books.engine.connect() as connection:
            send = connection.execute(sa.select(SENDS).where(SENDS.c.key == key)).one()

        def compute_entry(connection: sa.Connection) -> Entry:
            kind = "arrive"
            try:
                check_can_receive(connection, send.target, send.cents)
            except BankError:
                kind = "reject"
            return Entry(kind, f"{key}/end", send.target, send.cents, send.source)

        self._write_entry(send.target, f"{key}/end", compute_entry)
        with self._books.engine.connect() as connection:
            is_arrival = ARRIVALS.c.key == key
            is_rejected = connection.execute(
                sa.select(ARRIVALS.c.is_rejected).where(is_arrival)
            ).scalar_one()
        if is_rejected:
            return_entry = Entry("return", f"{key}/back", send.source, send.cents, send.target)
            self._write_entry(send.source, return_entry.key, lambda _: return_entry)
            raise BankError(
                f"account {send.target} no longer accepts the transfer; the amount was returned"
            )


def balance_of_active_account(connection: sa.Connection, account: int) -> int:
    """Return the balance in cents of an account; raise BankError unless it exists and is active."""
    found = connection.execute(sa.select(ACCOUNTS).where(ACCOUNTS.c.account == account)).first()
    if found is None:
        raise BankError(f"there is no account {account}")
    if not found.is_active:
        raise BankError(f"account {account} is deactivated")
    return int(found.cents)


def check_can_receive(connection: sa.Connection, account: int, cents: int) -> None:
    """Raise BankError if an account cannot receive an amount in cents."""
    if not 0 < cents <= CENTS_MAX:
        raise BankError(
            f"expected an amount above 0 and up to {money(CENTS_MAX)}, found {money(cents)}"
        )
    if balance_of_active_account(connection, account) + cents > CENTS_MAX:
        raise BankError(f"account {account} would hold more than {money(CENTS_MAX)}")


def check_can_pay(connection: sa.Connection, account: int, cents: int) -> None:
    """Raise BankError if an account cannot pay an amount in cents."""
    if not 0 < cents <= CENTS_MAX:
        raise BankError(
            f"expected an amount above 0 and up to {money(CENTS_MAX)}, found {money(cents)}"
        )
    held = balance_of_active_account(connection, account)
    if held < cents:
        raise BankError(f"account {account} holds {money(held)}, which is less than {money(cents)}")


def transfers_in_transit() -> sa.Select[tuple[str, int, int, int, bool]]:
    """Return a query for the `send` entries in transit: neither arrived nor returned."""
    both = SENDS.outerjoin(ARRIVALS, ARRIVALS.c.key == SENDS.c.key)
    has_arrived = sa.func.coalesce(ARRIVALS.c.is_rejected, sa.true()) == sa.false()
    return sa.select(SENDS).select_from(both).where(~SENDS.c.is_returned & sa.not_(has_arrived))


def valid_key(key: str | None) -> str:
    """Return the valid key of a command; for None, generate a unique key."""
    if key is None:
        return secrets.token_hex(8)
    if not re.fullmatch(r"[\w.:-]{1,80}", key):
        raise BankError(f"expected an ID of letters, digits and . : - _, found {key!r}")
    return key


def money(cents: int) -> str:
    """Format an amount in cents, for example 1,234.50."""
    return f"{'-' if cents < 0 else ''}{abs(cents) // 100:,}.{abs(cents) % 100:02}"
