"""`waltz-core client validate | produce | consume`: check the guarantees of the log as a client.

Each producer is a client that predicts the ID of its next transaction: its high-water mark + 1. The
data of the transaction is the predicted ID. All producers use the same lock. So if another
transaction gets the predicted ID first, the server must reject the producer's transaction, and the
client computes the transaction again. Readers check that the data of every transaction is its own
ID, and that there are no gaps between IDs. They detect missing rejections, and lost, duplicate or
reordered transactions.

Rules:
    1. No other client may write to these partitions during the check: its transactions would be
       reported as errors.
    2. IDs are written as text, so that `waltz-core client read` shows each ID twice.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import click

from waltz_core.cli import shared_options as options
from waltz_core.cli.output import print_error, print_json, print_result
from waltz_core.cli.progress import ProgressLine
from waltz_core.cli.subcommands import SubcommandFunction, subcommand
from waltz_core.client import (
    AsyncCallbacks,
    AsyncTransaction,
    AsyncWaltzClient,
    PoisonPolicy,
    TransactionBuilder,
    TransactionContext,
    lock,
)
from waltz_core.client.model.callbacks import default_policy
from waltz_core.errors import BadConfig, Unavailable, WaltzError

LOCK_NAME = "client validate"
ERRORS_SHOWN_MAX = 10


class CheckOptions(NamedTuple):
    """The options of `validate`, `produce` and `consume`."""

    connect: str
    as_json: bool
    timeout_s: float
    transactions: int
    partitions: int
    clients: int = 1
    interval_ms: float = 0.0
    first: int | None = None


_interval_option = click.option(
    "--interval-ms",
    type=float,
    default=0.0,
    metavar="MS",
    help="pause in milliseconds of a client after each transaction [default: 0]",
)


def _check_options(
    transactions_text: str,
) -> Callable[[SubcommandFunction], SubcommandFunction]:
    """Declare the options that all three subcommands have; the text is for `--transactions`."""

    def decorate(function: SubcommandFunction) -> SubcommandFunction:
        for declare in (
            options.gather_options(CheckOptions),
            options.json_option,
            options.connect_option,
            options.timeout_option("seconds after which the command fails"),
            click.option(
                "--partitions",
                type=int,
                default=1,
                metavar="N",
                help="number of partitions to use, from partition 0 on [default: 1]",
            ),
            click.option(
                "--transactions",
                type=int,
                default=100,
                metavar="N",
                help=f"{transactions_text} [default: 100]",
            ),
        ):
            function = declare(function)
        return function

    return decorate


def _partitions_of(options: CheckOptions, client: AsyncWaltzClient) -> list[int]:
    """Return the chosen partitions; raises BadConfig if an option is not valid."""
    for name in ("transactions", "partitions", "clients"):
        if getattr(options, name) < 1:
            raise BadConfig(f"--{name}: expected 1 or more, found {getattr(options, name)}")
    if options.timeout_s <= 0:
        raise BadConfig(f"--timeout-s: expected more than 0, found {options.timeout_s}")
    if options.interval_ms < 0:
        raise BadConfig(f"--interval-ms: expected 0 or more, found {options.interval_ms}")
    if options.partitions > client.partition_count:
        raise BadConfig(
            f"--partitions: expected at most {client.partition_count}, the partition count of "
            f"the cluster, found {options.partitions}"
        )
    return list(range(options.partitions))


# --- writing


class NumberedContext(TransactionContext):
    """Appends one transaction, whose data is its predicted ID."""

    def __init__(self, partition: int, timeout_s: float) -> None:
        super().__init__()
        self._partition = partition
        self.timeout_ms = round(timeout_s * 1000)
        self.attempts = 0

    def partition_id(self, partition_count: int) -> int:
        """Return the partition of this transaction."""
        assert self._partition < partition_count
        return self._partition

    def execute(self, builder: TransactionBuilder) -> bool:
        """Set the data to the predicted ID, and set the lock that all producers use."""
        self.attempts += 1
        builder.data = expected_data(builder.client_high_water_mark + 1)
        builder.set_write_locks([lock(LOCK_NAME)])
        return True


def expected_data(transaction_id: int) -> bytes:
    """Return the data that the transaction with this ID must have."""
    return str(transaction_id).encode("ascii")


@dataclass(slots=True)
class WrittenTransactions:
    """The transactions that the producers have written, and the number of attempts."""

    wanted_count: int  # the number of transactions to write
    last_ids: dict[int, int] = field(default_factory=dict)  # by partition, the last ID
    written_count: int = 0
    attempt_count: int = 0

    def add(self, partition: int, transaction_id: int, attempts: int) -> None:
        """Count one transaction, and the number of its attempts."""
        self.last_ids[partition] = max(transaction_id, self.last_ids.get(partition, transaction_id))
        self.written_count += 1
        self.attempt_count += attempts

    def __str__(self) -> str:
        return f"{self.written_count} of {self.wanted_count} transactions were written"


async def _append_transactions(
    client: AsyncWaltzClient,
    options: CheckOptions,
    first: int,
    written: WrittenTransactions,
    line: ProgressLine,
) -> None:
    """Append one client's transactions, round-robin to the partitions."""
    for number_in_run in range(options.transactions):
        partition = (first + number_in_run) % options.partitions
        context = NumberedContext(partition, options.timeout_s)
        result = await (await client.submit(context))
        assert result is not None, "the context never aborts"
        written.add(partition, result, context.attempts)
        line.show(written.written_count, written.wanted_count, "written")
        if options.interval_ms:
            await asyncio.sleep(options.interval_ms / 1000)


# --- reading


class CheckCallbacks(AsyncCallbacks):
    """Checks the transactions of feeds that begin after the given marks."""

    def __init__(self, marks: Mapping[int, int], limit: int | None = None) -> None:
        self.marks = dict(marks)
        self._limit = limit
        self.seen_count = 0
        self.errors: list[str] = []
        self.is_stopped = False
        self._progress_event = asyncio.Event()

    async def client_high_water_mark(self, partition: int) -> int:
        """Return the high-water mark after which the check continues."""
        return self.marks[partition]

    async def apply_transaction(self, transaction: AsyncTransaction) -> None:
        """Check one transaction, unless the limit is reached."""
        if self.seen_count == self._limit:
            return
        partition, data = transaction.partition_id, await transaction.data()
        last = self.marks[partition]
        self.errors += errors_in_transaction(partition, last, transaction.transaction_id, data)
        self.marks[partition] = transaction.transaction_id
        self.seen_count += 1
        self._progress_event.set()

    async def uncaught_exception(
        self, partition: int, transaction_id: int, error: Exception
    ) -> PoisonPolicy:
        """Record an error that ends the feed; if a server is unavailable, the client retries."""
        policy = default_policy(error)
        if policy is PoisonPolicy.STOP:
            self.errors.append(f"partition {partition}, transaction {transaction_id}: {error}")
            self.is_stopped = True
            self._progress_event.set()
        return policy

    async def wait_until_seen(self, count: int, on_progress: Callable[[], None]) -> None:
        """Wait until `count` transactions were checked, or a feed has ended."""
        while self.seen_count < count and not self.is_stopped:
            on_progress()
            self._progress_event.clear()
            await self._progress_event.wait()

    async def wait_until_reached(self, ends: Mapping[int, int]) -> None:
        """Wait until the transactions up to `ends` were checked, or a feed has ended."""
        while (
            any(self.marks[partition] < end for partition, end in ends.items())
            and not self.is_stopped
        ):
            self._progress_event.clear()
            await self._progress_event.wait()


def errors_in_transaction(
    partition: int, previous_id: int, transaction_id: int, data: bytes
) -> list[str]:
    """Return the errors in a transaction that follows the transaction with ID `previous_id`."""
    position = f"partition {partition}, transaction {transaction_id}"
    texts = []
    if transaction_id != previous_id + 1:
        texts.append(f"{position}: expected transaction ID {previous_id + 1} after {previous_id}")
    if data != expected_data(transaction_id):
        texts.append(
            f"{position}: expected the transaction's own ID as data, found {bytes(data)!r:.60}"
        )
    return texts


# --- the subcommands


@subcommand
@click.option("--clients", type=int, default=2, metavar="N", help="number of clients [default: 2]")
@_interval_option
@_check_options("number of transactions that each client appends")
async def validate(options: CheckOptions) -> int:
    """Append with several clients, and check that each of them receives the same correct log."""
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(AsyncWaltzClient.connect(options.connect))
        partitions, clients = _partitions_of(options, first), [first]
        for _ in range(options.clients - 1):
            next_client = AsyncWaltzClient.connect(options.connect)
            clients.append(await stack.enter_async_context(next_client))
        starts = {partition: await first.high_water_mark(partition) for partition in partitions}
        checks = [CheckCallbacks(starts) for _ in clients]
        written = WrittenTransactions(options.clients * options.transactions)

        async def run_check() -> None:
            for client, check in zip(clients, checks, strict=True):
                await client.subscribe(check, partitions)
            await _append_with_all_clients(clients, options, written)
            for check in checks:
                await check.wait_until_reached(written.last_ids)

        await _run_with_timeout(
            options, run_check(), lambda: f"{written}, and {_received_text(checks, written)}"
        )
    error_texts = list(dict.fromkeys(fault for check in checks for fault in check.errors))
    foreign_count = (
        sum(end - starts[partition] for partition, end in written.last_ids.items())
        - written.written_count
    )
    if foreign_count:
        error_texts.append(
            f"found {foreign_count} more transactions than the clients have written: "
            "duplicates, or transactions of other clients"
        )
    result = {
        "clients": len(clients),
        "written": written.written_count,
        "attempts": written.attempt_count,
        "checked": sum(check.seen_count for check in checks),
        "ids": _new_id_ranges(starts, written.last_ids),
    }
    return _print_result(options, error_texts, result)


@subcommand
@_interval_option
@_check_options("number of transactions to append")
async def produce(options: CheckOptions) -> int:
    """Append the transactions of one client, for `consume` to check."""
    async with AsyncWaltzClient.connect(options.connect) as client:
        partitions = _partitions_of(options, client)
        starts = {partition: await client.high_water_mark(partition) for partition in partitions}
        written = WrittenTransactions(options.transactions)
        await _run_with_timeout(
            options, _append_with_all_clients([client], options, written), lambda: str(written)
        )
    result = {
        "written": written.written_count,
        "attempts": written.attempt_count,
        "ids": _new_id_ranges(starts, written.last_ids),
    }
    return _print_result(options, None, result)


@subcommand
@click.option(
    "--first",
    type=int,
    metavar="ID",
    help="the first transaction to read, by its ID [default: only new transactions]",
)
@_check_options("number of transactions to check")
async def consume(options: CheckOptions) -> int:
    """Read and check transactions that `produce` or `validate` has appended."""
    async with AsyncWaltzClient.connect(options.connect) as client:
        partitions = _partitions_of(options, client)
        first: int | None = options.first
        starts = {
            partition: await client.high_water_mark(partition)
            if first is None
            else high_water_mark_before(first)
            for partition in partitions
        }
        expected_count: int = options.transactions
        check = CheckCallbacks(starts, expected_count)
        if not options.as_json:
            starts_text = ", ".join(
                f"partition {partition} from transaction {mark + 1}"
                for partition, mark in starts.items()
            )
            print_error(f"checking {expected_count} transactions: {starts_text}")

        async def run_check() -> None:
            await client.subscribe(check, partitions)
            with ProgressLine() as line:
                await check.wait_until_seen(
                    expected_count, lambda: line.show(check.seen_count, expected_count, "checked")
                )

        await _run_with_timeout(
            options,
            run_check(),
            lambda: f"{check.seen_count} of {expected_count} transactions were checked",
        )
    result = {"checked": check.seen_count, "ids": _new_id_ranges(starts, check.marks)}
    return _print_result(options, check.errors, result)


def high_water_mark_before(first: int) -> int:
    """Return the high-water mark before the ID of `--first`; raises BadConfig if negative."""
    if first < 0:
        raise BadConfig(f"--first: expected a transaction ID, 0 or more, found {first}")
    return first - 1


async def _append_with_all_clients(
    clients: list[AsyncWaltzClient], options: CheckOptions, written: WrittenTransactions
) -> None:
    """Append with all clients concurrently; afterwards, raise the first error."""
    failures: list[WaltzError] = []

    async def write(number: int, client: AsyncWaltzClient, line: ProgressLine) -> None:
        try:
            await _append_transactions(client, options, number, written, line)
        except WaltzError as error:
            failures.append(error)

    with ProgressLine() as line:
        async with asyncio.TaskGroup() as tasks:
            for number, client in enumerate(clients):
                tasks.create_task(write(number, client, line))
    if failures:
        raise failures[0]


async def _run_with_timeout(
    options: CheckOptions, coroutine: Coroutine[Any, Any, None], progress: Callable[[], str]
) -> None:
    """Run the work of a check; at the timeout, raise Unavailable with `progress()`."""
    try:
        async with asyncio.timeout(options.timeout_s):
            await coroutine
    except TimeoutError:
        raise Unavailable(
            f"the command did not finish within {options.timeout_s:.0f} s: {progress()}"
        ) from None


def _received_text(checks: list[CheckCallbacks], written: WrittenTransactions) -> str:
    """Return a text with the number of clients that have received all transactions."""
    has_received = [
        all(check.marks[partition] >= end for partition, end in written.last_ids.items())
        for check in checks
    ]
    return f"{sum(has_received)} of {len(checks)} clients have received all transactions"


def _new_id_ranges(starts: Mapping[int, int], ends: Mapping[int, int]) -> dict[int, list[int]]:
    """Return the first and the last new ID of each partition that has new IDs."""
    return {
        partition: [starts[partition] + 1, end]
        for partition, end in ends.items()
        if end > starts[partition]
    }


def _print_result(
    options: CheckOptions, error_texts: Sequence[str] | None, result: Mapping[str, object]
) -> int:
    if options.as_json:
        validity = (
            {}
            if error_texts is None
            else {"is_valid": not error_texts, "wrong": error_texts[:ERRORS_SHOWN_MAX]}
        )
        print_json({**validity, **result})
        return 1 if error_texts else 0
    for name, value in result.items():
        text = value
        if isinstance(value, dict):
            text = ", ".join(
                f"transactions {first}..{last} of partition {partition}"
                for partition, (first, last) in value.items()
            )
        print_result(f"{name}: {text}")
    if error_texts is None:
        return 0
    for fault in error_texts[:ERRORS_SHOWN_MAX]:
        print_result(fault)
    if len(error_texts) > ERRORS_SHOWN_MAX:
        print_result(f"and {len(error_texts) - ERRORS_SHOWN_MAX} more errors")
    print_result("failed" if error_texts else "passed")
    return 1 if error_texts else 0
