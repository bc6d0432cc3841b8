"""Two services increment one counter: each reads it, adds one, and writes the new value.

    python examples/counter.py             every increment counts
    python examples/counter.py --plain     the problem: increments get lost

In each round, both services read before either of them writes. On a plain log, both write the same
new value. In this example, each write has a write lock on the counter, and the high-water mark up
to which its author has read. So the log rejects the second write. The client then executes the
context of this write again, with the value that the first write has stored.
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

HEADER = 101
ROUNDS = 5


class Counter(LogState):
    """The value of one counter, computed from the log."""

    def __init__(self, name: str) -> None:
        super().__init__(HEADER)
        self.name = name
        self.value = 0

    def apply_value(self, value: dict[str, object]) -> None:
        """Replace the value if the transaction belongs to this counter."""
        if value["counter"] == self.name:
            self.value = int(str(value["value"]))


class Increment(TransactionContext):
    """Reads the counter, and writes the value plus one."""

    def __init__(self, counter: Counter, both_have_read: threading.Barrier, *, plain: bool) -> None:
        super().__init__()
        self._counter = counter
        self._both_have_read = both_have_read
        self._plain = plain
        self.tries = 0

    def partition_id(self, partition_count: int) -> int:
        """Return the partition of the counter."""
        return partition_of(lock("counter", self._counter.name), partition_count)

    def execute(self, builder: TransactionBuilder) -> bool:
        """Write the next value; the client calls this again after each rejection."""
        value = self._counter.value
        self.tries += 1
        if self.tries == 1:
            self._both_have_read.wait()  # before either writes: a certain conflict
        builder.set_header(HEADER)
        builder.set_transaction_data({"counter": self._counter.name, "value": value + 1})
        if not self._plain:
            builder.set_write_locks([lock("counter", self._counter.name)])
        return True


class Service:
    """One of the two services: its client, and its view of the counter."""

    def __init__(self, connect: str, counter: str) -> None:
        self.counter = Counter(counter)
        self.client = WaltzClient(connect)
        self.partition = partition_of(lock("counter", counter), self.client.partition_count)
        self.client.subscribe(self.counter, [self.partition])

    def increment(self, both_have_read: threading.Barrier, *, plain: bool) -> None:
        """Increment the counter once, and wait until this service's view includes the increment."""
        self.counter.catch_up(self.client, self.partition)
        context = Increment(self.counter, both_have_read, plain=plain)
        transaction_id = self.client.submit(context).result()
        assert transaction_id is not None
        self.counter.wait_for(transaction_id)


def run_example(connect: str, *, plain: bool) -> int:
    """Let two services increment a counter concurrently in each round; return its final value."""
    name = random_name()
    services = [Service(connect, name), Service(connect, name)]
    for number in range(1, ROUNDS + 1):
        both_have_read = threading.Barrier(2, timeout=60)
        threads = [
            threading.Thread(
                target=service.increment, args=(both_have_read,), kwargs={"plain": plain}
            )
            for service in services
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        services[0].counter.catch_up(services[0].client, services[0].partition)
        print(f"after {2 * number} increments the counter is {services[0].counter.value}")
    for service in services:
        service.client.close()
    return services[0].counter.value


def main() -> int:
    """Run the example; return 1 if an increment was lost."""
    options = options_parser(__doc__).parse_args()
    with cluster(options.connect) as connect:
        value = run_example(connect, plain=options.plain)
    expected = 2 * ROUNDS
    if value != expected:
        print(f"LOST: {expected - value} of {expected} increments")
        return 1
    print("counter: OK, every increment counts")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
