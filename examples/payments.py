"""A payment is made once, although the client that sent it dies before it gets the answer.

    python examples/payments.py             paid once
    python examples/payments.py --plain     the problem: paid twice

A payer sends a payment and is killed with SIGKILL before it receives the answer. After its restart,
it does not know whether the log contains the payment, so it sends the payment again. Here a payment
has a write lock on its own number. The payer first reads the log up to a high-water mark, and
aborts if the log contains the number. If the number is written after that mark, the log rejects the
second payment. This also covers a message of the killed payer that the network delivers late. A
plain log would contain both payments.
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
    """The numbers of all payments in the log."""

    def __init__(self) -> None:
        super().__init__(HEADER)
        self.made: list[str] = []

    def take(self, value: dict[str, object]) -> None:
        """Add the number of a payment."""
        self.made.append(str(value["payment"]))


class Pay(TransactionContext):
    """Makes a payment, unless the log contains it already."""

    def __init__(self, payment: str, payments: Payments, *, plain: bool) -> None:
        super().__init__()
        self._payment = payment
        self._payments = payments
        self._plain = plain

    def partition_id(self, partition_count: int) -> int:
        """Return the partition of the payment."""
        return partition_of(lock("payment", self._payment), partition_count)

    def execute(self, builder: TransactionBuilder) -> bool:
        """Write the payment; return False to abort if the log contains it already."""
        builder.set_header(HEADER)
        builder.set_transaction_data({"payment": self._payment, "cents": CENTS})
        if self._plain:
            return True
        builder.set_write_locks([lock("payment", self._payment)])
        return self._payment not in self._payments.made


def pay(connect: str, payment: str, *, plain: bool, is_to_die: bool) -> None:
    """Run the payer: make the payment, or wait to be killed after sending it if `is_to_die`."""
    payments = Payments()
    with WaltzClient(connect) as client:
        partition = partition_of(lock("payment", payment), client.partition_count)
        client.subscribe(payments, [partition])
        payments.catch_up(client, partition)
        outcome = client.submit(Pay(payment, payments, plain=plain))
        if is_to_die:
            # This process never reads the answer: its parent kills it here.
            sys.stdin.read()
            os._exit(1)
        done = outcome.result()
    print(f"payer: {'was paid already' if done is None else f'paid, transaction {done}'}")


def play(connect: str, options: argparse.Namespace) -> int:
    """Run a payer, kill it, and run it again; return how often the log contains the payment."""
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
    """Run the example; return 1 if the payment was not made exactly once."""
    parser = arguments(__doc__)
    parser.add_argument("--pay", help=argparse.SUPPRESS)  # for the payer that `play` starts
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
