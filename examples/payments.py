"""A payment is made once, even if the client dies before it receives the answer.

    python examples/payments.py             paid once
    python examples/payments.py --plain     the problem: paid twice

A payer sends a payment and is killed with SIGKILL before it receives the answer. After its restart,
it does not know whether the log contains the payment, so it sends the payment again. In this
example, a payment has a write lock on its own number. The payer first reads the log up to a
high-water mark, and aborts if the log contains the number. If the number is written after that
mark, the log rejects the second payment. The log rejects one of the two payments even if the
network delivers the killed payer's message late. A plain log would contain both payments.
"""

import argparse
import os
import subprocess
import sys

from from_log import LogState, cluster, options_parser, random_name

from waltz_core.client import (
    TransactionBuilder,
    TransactionContext,
    WaltzClient,
    lock,
    partition_of,
)

HEADER = 103
CENTS = 4_999


class Payments(LogState):
    """The numbers of all payments in the log."""

    def __init__(self) -> None:
        super().__init__(HEADER)
        self.numbers: list[str] = []

    def apply_value(self, value: dict[str, object]) -> None:
        """Add the number of a payment."""
        self.numbers.append(str(value["payment"]))


class MakePayment(TransactionContext):
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
        return self._payment not in self._payments.numbers


def pay(connect: str, payment: str, *, plain: bool, waits_for_kill: bool) -> None:
    """Run the payer: make the payment. If `waits_for_kill`, wait after sending it."""
    payments = Payments()
    with WaltzClient(connect) as client:
        partition = partition_of(lock("payment", payment), client.partition_count)
        client.subscribe(payments, [partition])
        payments.catch_up(client, partition)
        outcome = client.submit(MakePayment(payment, payments, plain=plain))
        if waits_for_kill:
            # This process never reads the answer: its parent kills it here.
            sys.stdin.read()
            os._exit(1)
        transaction_id = outcome.result()
    if transaction_id is None:
        print("payer: the payment was made already")
    else:
        print(f"payer: paid, transaction {transaction_id}")


def run_example(connect: str, options: argparse.Namespace) -> int:
    """Run a payer, kill it, and run it again; return how often the log contains the payment."""
    payment = random_name()
    command = [sys.executable, __file__, "--connect", connect, "--pay", payment]
    command += ["--plain"] if options.plain else []
    payments = Payments()
    with WaltzClient(connect) as client:
        partition = partition_of(lock("payment", payment), client.partition_count)
        last_id = int(client.high_water_mark(partition, linearizable=True))
        client.subscribe(payments, [partition])
        payments.wait_for(last_id)
        payer = subprocess.Popen([*command, "--wait-for-kill"], stdin=subprocess.PIPE)
        try:
            while payment not in payments.numbers:
                last_id += 1
                payments.wait_for(last_id)
        finally:
            payer.kill()
            payer.communicate()
        print(
            "the payment is in the log, and the payer was killed before it received the outcome",
            flush=True,
        )
        subprocess.run(command, check=True)
        payments.catch_up(client, partition)
        return payments.numbers.count(payment)


def main() -> int:
    """Run the example; return 1 if the payment was not made exactly once."""
    parser = options_parser(__doc__)
    parser.add_argument("--pay", help=argparse.SUPPRESS)  # for the payer that `run_example` starts
    parser.add_argument("--wait-for-kill", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.pay is not None:
        pay(options.connect, options.pay, plain=options.plain, waits_for_kill=options.wait_for_kill)
        return 0
    with cluster(options.connect) as connect:
        payment_count = run_example(connect, options)
    if payment_count != 1:
        print(f"WRONG: paid {payment_count} times")
        return 1
    print("payments: OK, paid once")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
