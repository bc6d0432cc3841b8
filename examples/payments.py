"""A payment is made once, although the client that sent it dies before it gets the answer.

    python examples/payments.py             paid once
    python examples/payments.py --plain     the problem: paid twice

A payer sends a payment and is killed with -9 before the answer reaches it. After a restart it does
not know whether the payment is in the log, so it sends it again. Here a payment has a write lock on
its own number: the payer first reads the log up to a mark, aborts if the number exists, and is
rejected if it was written in between. That also covers a message of the dead payer that the network
delivers late. A plain log would contain both messages.
"""

import argparse
import os
import subprocess
import sys

from from_log import FromLog, arguments, cluster, fresh_name

from waltz_core.client import (
    TransactionBuilder,
    TransactionContext,
    WaltzClient,
    lock,
    partition_of,
)

HEADER = 103
CENTS = 4_999


class Payments(FromLog):
    """The payments in the log."""

    def __init__(self) -> None:
        super().__init__(HEADER)
        self.made: list[str] = []

    def take(self, value: dict[str, object]) -> None:
        """Apply a payment."""
        self.made.append(str(value["payment"]))


class Pay(TransactionContext):
    """Makes a payment unless it exists."""

    def __init__(self, payment: str, payments: Payments, *, plain: bool) -> None:
        super().__init__()
        self._payment = payment
        self._payments = payments
        self._plain = plain

    def partition_id(self, partition_count: int) -> int:
        """Return the payment's partition."""
        return partition_of(lock("payment", self._payment), partition_count)

    def execute(self, builder: TransactionBuilder) -> bool:
        """Write the payment; return False if it is in the log already."""
        builder.set_header(HEADER)
        builder.set_transaction_data({"payment": self._payment, "cents": CENTS})
        if self._plain:
            return True
        builder.set_write_locks([lock("payment", self._payment)])
        return self._payment not in self._payments.made


def pay(connect: str, payment: str, *, plain: bool, is_to_die: bool) -> None:
    """Run the payer."""
    payments = Payments()
    with WaltzClient(connect) as client:
        partition = partition_of(lock("payment", payment), client.partition_count)
        client.subscribe(payments, [partition])
        payments.catch_up(client, partition)
        outcome = client.submit(Pay(payment, payments, plain=plain))
        if is_to_die:
            # It never reads the answer: its parent kills it here.
            sys.stdin.read()
            os._exit(1)
        done = outcome.result()
    print(f"payer: {'was paid already' if done is None else f'paid, transaction {done}'}")


def play(connect: str, options: argparse.Namespace) -> int:
    """Start a payer, kill it, start it again; return the number of payments."""
    payment = fresh_name()
    command = [sys.executable, __file__, "--connect", connect, "--pay", payment]
    command += ["--plain"] if options.plain else []
    payments = Payments()
    with WaltzClient(connect) as client:
        partition = partition_of(lock("payment", payment), client.partition_count)
        seen = int(client.high_water_mark(partition, linearizable=True))
        client.subscribe(payments, [partition])
        payments.wait_for(seen)
        payer = subprocess.Popen([*command, "--to-die"], stdin=subprocess.PIPE)
        try:
            while payment not in payments.made:
                seen += 1
                payments.wait_for(seen)
        finally:
            payer.kill()
            payer.communicate()
        print("the payment is in the log, and the payer was killed before it knew", flush=True)
        subprocess.run(command, check=True)
        payments.catch_up(client, partition)
        return payments.made.count(payment)


def main() -> int:
    """Run it; return 1 when the payment was not made exactly once."""
    parser = arguments(__doc__)
    parser.add_argument("--pay", help=argparse.SUPPRESS)  # the payer, which `play` starts
    parser.add_argument("--to-die", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.pay is not None:
        pay(options.connect, options.pay, plain=options.plain, is_to_die=options.to_die)
        return 0
    with cluster(options.connect) as connect:
        times = play(connect, options)
    if times != 1:
        print(f"WRONG: paid {times} times")
        return 1
    print("payments: OK, paid once")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
