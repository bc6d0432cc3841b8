"""A balance that must never be negative, and two services that withdraw concurrently.

    python examples/constraint.py             the second withdrawal is rejected: not enough is left
    python examples/constraint.py --plain     the problem: the balance ends below zero

The log contains differences (+100, -80), so no value is overwritten. But before a service writes
-80, it checks that the balance is at least 80. On a plain log, both services read the same balance
of 100, and both withdraw. With the lock, the log rejects the second withdrawal. The second service
then reads the new balance, and aborts.
"""

import threading

from from_log import LogState, cluster, options_parser, random_name

from waltz_core.client import (
    TransactionBuilder,
    TransactionContext,
    WaltzClient,
    lock,
    partition_of,
)

HEADER = 102
DEPOSIT, WITHDRAWAL = 100, 80


class Balance(LogState):
    """The balance of one account: the sum of its differences in the log."""

    def __init__(self, account: str) -> None:
        super().__init__(HEADER)
        self.account = account
        self.amount = 0

    def apply_value(self, value: dict[str, object]) -> None:
        """Add a difference to the balance if it belongs to this account."""
        if value["account"] == self.account:
            self.amount += int(str(value["difference"]))


class ChangeBalance(TransactionContext):
    """Adds a difference to the balance, unless the balance would fall below zero."""

    def __init__(
        self, balance: Balance, difference: int, both_have_read: threading.Barrier, *, plain: bool
    ) -> None:
        super().__init__()
        self._balance = balance
        self._difference = difference
        self._both_have_read = both_have_read
        self._plain = plain
        self._is_first = True

    def partition_id(self, partition_count: int) -> int:
        """Return the partition of the account."""
        return partition_of(lock("account", self._balance.account), partition_count)

    def execute(self, builder: TransactionBuilder) -> bool:
        """Write the difference; return False to abort if the balance would fall below zero."""
        amount = self._balance.amount
        if self._is_first:
            self._both_have_read.wait()  # both services read before either writes
            self._is_first = False
        if amount + self._difference < 0:
            return False
        entry = {"account": self._balance.account, "difference": self._difference}
        builder.set_header(HEADER)
        builder.set_transaction_data(entry)
        if not self._plain:
            builder.set_write_locks([lock("account", self._balance.account)])
        return True


class Service:
    """One of the two services: its client, and its view of the balance."""

    def __init__(self, name: str, connect: str, account: str) -> None:
        self.name = name
        self.balance = Balance(account)
        self.client = WaltzClient(connect)
        self.partition = partition_of(lock("account", account), self.client.partition_count)
        self.client.subscribe(self.balance, [self.partition])

    def change(self, difference: int, both_have_read: threading.Barrier, *, plain: bool) -> None:
        """Make one change, and print if the log accepted it."""
        self.balance.catch_up(self.client, self.partition)
        context = ChangeBalance(self.balance, difference, both_have_read, plain=plain)
        transaction_id = self.client.submit(context).result()
        outcome = (
            "refused: not enough is left"
            if transaction_id is None
            else f"in the log as {transaction_id}"
        )
        print(f"{self.name}: {difference:+} {outcome}", flush=True)


def run_example(connect: str, *, plain: bool) -> int:
    """Deposit once, then withdraw twice concurrently; return the final balance."""
    account = random_name()
    services = [Service(name, connect, account) for name in ("Anna", "Boris")]
    services[0].change(DEPOSIT, threading.Barrier(1), plain=plain)
    both_have_read = threading.Barrier(2, timeout=60)
    threads = [
        threading.Thread(
            target=service.change, args=(-WITHDRAWAL, both_have_read), kwargs={"plain": plain}
        )
        for service in services
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    services[0].balance.catch_up(services[0].client, services[0].partition)
    for service in services:
        service.client.close()
    return services[0].balance.amount


def main() -> int:
    """Run the example; return 1 if the balance is negative."""
    options = options_parser(__doc__).parse_args()
    with cluster(options.connect) as connect:
        amount = run_example(connect, plain=options.plain)
    print(f"the balance is {amount}")
    if amount < 0:
        print("BROKEN: a balance must never be negative")
        return 1
    print("constraint: OK, never below zero")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
