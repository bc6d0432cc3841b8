"""The bank's desk: what one can do there, and what is refused.

The rules stand in `bank_books.py`. Desks in any number may share a database; each has its client.
"""

import contextlib
import re
import secrets
from collections.abc import Callable

import sqlalchemy as sa
from bank_books import ACCOUNTS, ARRIVALS, ENTRIES, HEADER, SENDS, Books, Entry, account_lock

from waltz_core.client import TransactionBuilder, TransactionContext, WaltzClient, partition_of

CENTS_MAX = 10**15

Decide = Callable[[sa.Connection], Entry]


class Refused(Exception):
    """The bank does not do that; the message says why."""


class Write(TransactionContext):
    """Writes one entry, decided from the books; decided anew when somebody was faster."""

    def __init__(self, books: Books, home: int, key: str, decide: Decide) -> None:
        super().__init__()
        self._books = books
        self._home = home
        self._key = key
        self._decide = decide

    def partition_id(self, partition_count: int) -> int:
        """Return where the account lives."""
        return partition_of(account_lock(self._home), partition_count)

    def execute(self, builder: TransactionBuilder) -> bool:
        """Decide; False when an entry of this key is there already (rule 3)."""
        with self._books.reading(builder) as connection:
            its = (ENTRIES.c.partition_id == builder.partition_id) & (ENTRIES.c.key == self._key)
            if connection.execute(sa.select(ENTRIES.c.kind).where(its)).first() is not None:
                return False
            entry = self._decide(connection)
        builder.set_header(HEADER)
        builder.set_transaction_data(list(entry))
        builder.set_write_locks(entry.locks())
        return True


class Bank:
    """What one can do at the bank; amounts are cents.

    A command that was given a `key` may be given again with it, after a crash say: it is done once.
    Everything raises `Refused` for what the bank does not do, and `waltz_core.errors` for what it
    could not do.
    """

    def __init__(self, connect: str, engine: sa.Engine) -> None:
        self._books = Books(engine)
        self._client = WaltzClient(connect)
        self._client.subscribe(self._books)

    def close(self) -> None:
        """End the client; the database is the caller's."""
        self._client.close()

    # -- commands

    def open(self, account: int, *, key: str | None = None) -> None:
        """Open an account."""
        key = checked_key(key)

        def decide(connection: sa.Connection) -> Entry:
            its = ACCOUNTS.c.account == account
            if connection.execute(sa.select(ACCOUNTS).where(its)).first() is not None:
                raise Refused(f"there is an account {account} already")
            return Entry("open", key, account)

        self._write(account, key, decide)

    def deposit(self, account: int, cents: int, *, key: str | None = None) -> None:
        """Bring money in."""
        key = checked_key(key)

        def decide(connection: sa.Connection) -> Entry:
            check_takes(connection, account, cents)
            return Entry("deposit", key, account, cents)

        self._write(account, key, decide)

    def withdraw(self, account: int, cents: int, *, key: str | None = None) -> None:
        """Take money out."""
        key = checked_key(key)

        def decide(connection: sa.Connection) -> Entry:
            check_has(connection, account, cents)
            return Entry("withdraw", key, account, cents)

        self._write(account, key, decide)

    def transfer(self, source: int, target: int, cents: int, *, key: str | None = None) -> None:
        """Move money: in one entry where both accounts live in one partition, else in two."""
        if source == target:
            raise Refused("a transfer needs two accounts")
        key = checked_key(key)
        kind = "transfer" if self.home(source) == self.home(target) else "send"

        def decide(connection: sa.Connection) -> Entry:
            check_has(connection, source, cents)
            check_takes(connection, target, cents)  # of a `send` the target decides again
            return Entry(kind, key, source, cents, target)

        self._catch_up(self.home(target))
        self._write(source, key, decide)
        if kind == "send":
            self._settle(key)

    def deactivate(self, account: int, *, key: str | None = None) -> None:
        """Close an account for ever; it must be empty, and nothing of it under way."""
        key = checked_key(key)

        def decide(connection: sa.Connection) -> Entry:
            cents = active_cents(connection, account)
            if cents:
                raise Refused(f"account {account} holds {money(cents)}; it must be empty")
            if any(row.source == account for row in connection.execute(under_way())):
                raise Refused(f"a transfer from account {account} is under way; try again")
            return Entry("deactivate", key, account)

        self._write(account, key, decide)

    def settle_all(self) -> int:
        """Bring transfers to their end that somebody has left under way; return how many."""
        self.catch_up()
        with self._books.engine.connect() as connection:
            keys = [row.key for row in connection.execute(under_way())]
        for key in keys:
            with contextlib.suppress(Refused):
                self._settle(key)
        return len(keys)

    # -- questions

    def balance(self, account: int) -> int:
        """Return what an account holds."""
        self._catch_up(self.home(account))
        its = ACCOUNTS.c.account == account
        with self._books.engine.connect() as connection:
            found = connection.execute(sa.select(ACCOUNTS.c.cents).where(its)).scalar_one_or_none()
        if found is None:
            raise Refused(f"there is no account {account}")
        return int(found)

    def accounts(self) -> list[tuple[int, int, bool]]:
        """Return number, cents and activity of all accounts."""
        self.catch_up()
        with self._books.engine.connect() as connection:
            rows = connection.execute(sa.select(ACCOUNTS).order_by(ACCOUNTS.c.account)).all()
        return [(row.account, row.cents, row.is_active) for row in rows]

    def cents_under_way(self) -> int:
        """Return how much is in no balance, between two partitions."""
        with self._books.engine.connect() as connection:
            return sum(row.cents for row in connection.execute(under_way()))

    def history(self, account: int) -> list[tuple[int, int, str, int, int | None]]:
        """Return partition, transaction, kind, signed cents and other side of an account's entries.

        They are in the order of the log.
        """
        self.balance(account)  # it is there, and all of it
        e = ENTRIES.c
        query = sa.select(e.partition_id, e.transaction_id, e.kind, e.cents, e.other)
        with self._books.engine.connect() as connection:
            rows = connection.execute(
                query.where(e.account == account).order_by(e.partition_id, e.transaction_id)
            ).all()
        return [(row[0], row[1], row[2], row[3], row[4]) for row in rows]

    # -- parts

    def home(self, account: int) -> int:
        """Return the partition of an account."""
        return partition_of(account_lock(account), self._client.partition_count)

    def catch_up(self) -> None:
        """Wait until the books have everything that is in the log now."""
        for partition, mark in self._client.high_water_marks(linearizable=True).items():
            self._books.wait_for(partition, mark)

    def _catch_up(self, partition: int) -> None:
        mark = self._client.high_water_mark(partition, linearizable=True)
        self._books.wait_for(partition, mark)

    def _write(self, home: int, key: str, decide: Decide) -> None:
        self._catch_up(self.home(home))  # so that nothing is refused for what is long over
        transaction_id = self._client.submit(Write(self._books, home, key, decide)).result()
        if transaction_id is not None:
            self._books.wait_for(self.home(home), transaction_id)

    def _settle(self, key: str) -> None:
        """Bring one transfer between partitions to its end (rule 4)."""
        with self._books.engine.connect() as connection:
            sent = connection.execute(sa.select(SENDS).where(SENDS.c.key == key)).one()

        def decide(connection: sa.Connection) -> Entry:
            kind = "arrive"
            try:
                check_takes(connection, sent.target, sent.cents)
            except Refused:
                kind = "reject"
            return Entry(kind, f"{key}/end", sent.target, sent.cents, sent.source)

        self._write(sent.target, f"{key}/end", decide)
        with self._books.engine.connect() as connection:
            its = ARRIVALS.c.key == key
            is_rejected = connection.execute(
                sa.select(ARRIVALS.c.is_rejected).where(its)
            ).scalar_one()
        if is_rejected:
            back = Entry("return", f"{key}/back", sent.source, sent.cents, sent.target)
            self._write(sent.source, back.key, lambda _: back)
            raise Refused(f"account {sent.target} does not take it any more; the money is back")


def active_cents(connection: sa.Connection, account: int) -> int:
    """Return what an account holds that one can work with."""
    found = connection.execute(sa.select(ACCOUNTS).where(ACCOUNTS.c.account == account)).first()
    if found is None:
        raise Refused(f"there is no account {account}")
    if not found.is_active:
        raise Refused(f"account {account} is deactivated")
    return int(found.cents)


def check_takes(connection: sa.Connection, account: int, cents: int) -> None:
    """See that an account can take so much."""
    if not 0 < cents <= CENTS_MAX:
        raise Refused(f"an amount is more than 0 and at most {money(CENTS_MAX)}")
    if active_cents(connection, account) + cents > CENTS_MAX:
        raise Refused(f"account {account} would hold more than {money(CENTS_MAX)}")


def check_has(connection: sa.Connection, account: int, cents: int) -> None:
    """See that an account can give so much."""
    if not 0 < cents <= CENTS_MAX:
        raise Refused(f"an amount is more than 0 and at most {money(CENTS_MAX)}")
    held = active_cents(connection, account)
    if held < cents:
        raise Refused(f"account {account} holds {money(held)}, which is less than {money(cents)}")


def under_way() -> sa.Select[tuple[str, int, int, int, bool]]:
    """Return the query for what was sent, and has neither arrived nor come back."""
    both = SENDS.outerjoin(ARRIVALS, ARRIVALS.c.key == SENDS.c.key)
    has_arrived = sa.func.coalesce(ARRIVALS.c.is_rejected, sa.true()) == sa.false()
    return sa.select(SENDS).select_from(both).where(~SENDS.c.is_returned & sa.not_(has_arrived))


def checked_key(key: str | None) -> str:
    """Return the key of a command, one that no other command has where none was given."""
    if key is None:
        return secrets.token_hex(8)
    if not re.fullmatch(r"[\w.:-]{1,80}", key):
        raise Refused(f"expected an id of letters, digits and . : - _, found {key!r}")
    return key


def money(cents: int) -> str:
    """Return an amount as people write it."""
    return f"{'-' if cents < 0 else ''}{abs(cents) // 100:,}.{abs(cents) % 100:02}"
