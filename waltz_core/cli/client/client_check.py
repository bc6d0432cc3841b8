"""`waltz-core client validate | produce | consume`: check the guarantees of the log from outside.

As data, each producer writes the ID that its transaction will have. All producers write with the
same lock. So each transaction either gets the ID of its client's high-water mark + 1, or the server
rejects it and the client computes it again. Readers check that the data of every transaction is its
own ID, and that the IDs have no gap. So every reader detects a missing rejection, and lost,
duplicate or reordered transactions.

Rules:
    1. No other client may write to these partitions meanwhile: its transactions count as errors.
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
from waltz_core.client.model.callbacks import policy_of
from waltz_core.errors import BadConfig, Unavailable, WaltzError

LOCK_NAME = "client validate"
FAULTS_SHOWN_MAX = 10


class CheckOptions(NamedTuple):
    """The options of a check; each of the three subcommands has some of them."""

    connect: str
    as_json: bool
    timeout_s: float
    transactions: int
    partitions: int
    clients: int = 1
    interval_ms: float = 0.0
    first: int | None = None


_interval_ms = click.option(
    "--interval-ms",
    type=float,
    default=0.0,
    metavar="MS",
    help="pause in milliseconds of a client after each transaction [default: 0]",
)


def _check_options(function: SubcommandFunction) -> SubcommandFunction:
    """Declare the options that all three subcommands have."""
    for declare in (
        options.gather_options(CheckOptions),
        options.as_json,
        options.connect,
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
            help="number of transactions that each client appends, or that `client consume` "
            "checks [default: 100]",
        ),
    ):
        function = declare(function)
    return function


def _partitions_of(chosen: CheckOptions, client: AsyncWaltzClient) -> list[int]:
    """Return the chosen partitions; raises BadConfig if an option is not valid."""
    for name in ("transactions", "partitions", "clients"):
        if getattr(chosen, name) < 1:
            raise BadConfig(f"--{name}: expected 1 or more, found {getattr(chosen, name)}")
    if chosen.timeout_s <= 0:
        raise BadConfig(f"--timeout-s: expected more than 0, found {chosen.timeout_s}")
    if chosen.interval_ms < 0:
        raise BadConfig(f"--interval-ms: expected 0 or more, found {chosen.interval_ms}")
    if chosen.partitions > client.partition_count:
        raise BadConfig(
            f"--partitions: expected at most {client.partition_count}, the partition count of "
            f"the cluster, found {chosen.partitions}"
        )
    return list(range(chosen.partitions))


# --- writing


class NumberedContext(TransactionContext):
    """One transaction; its data is the ID that it will have."""

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
        """Write the high-water mark + 1 as data, with the lock that all producers use."""
        self.attempts += 1
        builder.data = data_of_id(builder.client_high_water_mark + 1)
        builder.set_write_locks([lock(LOCK_NAME)])
        return True


def data_of_id(transaction_id: int) -> bytes:
    """Return the expected data of the transaction with this ID."""
    return str(transaction_id).encode("ascii")


@dataclass(slots=True)
class CheckResult:
    """The transactions that producers have written, and the number of attempts."""

    wanted: int  # the number of transactions to write
    ends: dict[int, int] = field(default_factory=dict)  # by partition, the last ID
    count: int = 0
    attempts: int = 0

    def add(self, partition: int, transaction_id: int, attempts: int) -> None:
        """Count one transaction, and the number of its attempts."""
        self.ends[partition] = max(transaction_id, self.ends.get(partition, transaction_id))
        self.count += 1
        self.attempts += attempts

    def __str__(self) -> str:
        return f"{self.count} of {self.wanted} transactions were written"


async def _write(
    client: AsyncWaltzClient,
    chosen: CheckOptions,
    first: int,
    written: CheckResult,
    line: ProgressLine,
) -> None:
    """Write one client's transactions, one after the other, round-robin to the partitions."""
    for turn in range(chosen.transactions):
        partition = (first + turn) % chosen.partitions
        context = NumberedContext(partition, chosen.timeout_s)
        result = await (await client.submit(context))
        assert result is not None, "it never aborts"
        written.add(partition, result, context.attempts)
        line.show(written.count, written.wanted, "written")
        if chosen.interval_ms:
            await asyncio.sleep(chosen.interval_ms / 1000)


# --- reading


class CheckCallbacks(AsyncCallbacks):
    """Checks the transactions of feeds after the given marks, at most `limit` of them."""

    def __init__(self, marks: Mapping[int, int], limit: int | None = None) -> None:
        self.marks = dict(marks)
        self._limit = limit
        self.seen_count = 0
        self.wrong: list[str] = []
        self.is_stopped = False
        self._changed = asyncio.Event()

    async def client_high_water_mark(self, partition: int) -> int:
        """Return the high-water mark after which the check continues."""
        return self.marks[partition]

    async def apply_transaction(self, transaction: AsyncTransaction) -> None:
        """Check one transaction, unless the limit is reached."""
        if self.seen_count == self._limit:
            return
        partition, data = transaction.partition_id, await transaction.data()
        last = self.marks[partition]
        self.wrong += errors_in_transaction(partition, last, transaction.transaction_id, data)
        self.marks[partition] = transaction.transaction_id
        self.seen_count += 1
        self._changed.set()

    async def uncaught_exception(
        self, partition: int, transaction_id: int, error: Exception
    ) -> PoisonPolicy:
        """Record an error that ends the feed; if a server is unavailable, the client retries."""
        policy = policy_of(error)
        if policy is PoisonPolicy.STOP:
            self.wrong.append(f"partition {partition}, transaction {transaction_id}: {error}")
            self.is_stopped = True
            self._changed.set()
        return policy

    async def has_seen(self, count: int, on_seen: Callable[[], None]) -> None:
        """Wait until `count` transactions were checked, or a feed has ended; report progress."""
        while self.seen_count < count and not self.is_stopped:
            on_seen()
            self._changed.clear()
            await self._changed.wait()

    async def has_reached(self, ends: Mapping[int, int]) -> None:
        """Wait until the transactions up to `ends` were checked, or a feed has ended."""
        while any(self.marks[each] < end for each, end in ends.items()) and not self.is_stopped:
            self._changed.clear()
            await self._changed.wait()


def errors_in_transaction(partition: int, last: int, transaction_id: int, data: bytes) -> list[str]:
    """Return the errors in a transaction that follows the transaction with ID `last`."""
    where = f"partition {partition}, transaction {transaction_id}"
    found = []
    if transaction_id != last + 1:
        found.append(f"{where}: expected transaction ID {last + 1} after {last}")
    if data != data_of_id(transaction_id):
        found.append(
            f"{where}: expected the transaction's own ID as data, found {bytes(data)!r:.60}"
        )
    return found


# --- the subcommands


@subcommand
@click.option("--clients", type=int, default=2, metavar="N", help="number of clients [default: 2]")
@_interval_ms
@_check_options
async def validate(chosen: CheckOptions) -> int:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(AsyncWaltzClient.connect(chosen.connect))
        partitions, clients = _partitions_of(chosen, first), [first]
        for _ in range(chosen.clients - 1):
            other = AsyncWaltzClient.connect(chosen.connect)
            clients.append(await stack.enter_async_context(other))
        starts = {each: await first.high_water_mark(each) for each in partitions}
        checks = [CheckCallbacks(starts) for _ in clients]
        written = CheckResult(chosen.clients * chosen.transactions)

        async def work() -> None:
            for client, check in zip(clients, checks, strict=True):
                await client.subscribe(check, partitions)
            await _write_all(clients, chosen, written)
            for check in checks:
                await check.has_reached(written.ends)

        await _with_timeout(
            chosen, work(), lambda: f"{written}, and {_unread_text(checks, written)}"
        )
    wrong = list(dict.fromkeys(fault for check in checks for fault in check.wrong))
    foreign_count = sum(end - starts[each] for each, end in written.ends.items()) - written.count
    if foreign_count:
        wrong.append(
            f"found {foreign_count} more transactions than the clients have written: "
            "duplicates, or transactions of other clients"
        )
    result = {
        "clients": len(clients),
        "written": written.count,
        "attempts": written.attempts,
        "checked": sum(check.seen_count for check in checks),
        "ids": _spans(starts, written.ends),
    }
    return _print_result(chosen, wrong, result)


@subcommand
@_interval_ms
@_check_options
async def produce(chosen: CheckOptions) -> int:
    async with AsyncWaltzClient.connect(chosen.connect) as client:
        partitions = _partitions_of(chosen, client)
        starts = {each: await client.high_water_mark(each) for each in partitions}
        written = CheckResult(chosen.transactions)
        await _with_timeout(chosen, _write_all([client], chosen, written), lambda: str(written))
    result = {
        "written": written.count,
        "attempts": written.attempts,
        "ids": _spans(starts, written.ends),
    }
    return _print_result(chosen, None, result)


@subcommand
@click.option(
    "--first",
    type=int,
    metavar="ID",
    help="the first transaction to read, by its ID [default: only new transactions]",
)
@_check_options
async def consume(chosen: CheckOptions) -> int:
    async with AsyncWaltzClient.connect(chosen.connect) as client:
        partitions = _partitions_of(chosen, client)
        first: int | None = chosen.first
        starts = {
            each: await client.high_water_mark(each) if first is None else mark_before(first)
            for each in partitions
        }
        wanted: int = chosen.transactions
        check = CheckCallbacks(starts, wanted)
        if not chosen.as_json:
            begins = ", ".join(
                f"{each} from transaction {mark + 1}" for each, mark in starts.items()
            )
            print_error(f"checking {wanted} transactions of partitions {begins}")

        async def work() -> None:
            await client.subscribe(check, partitions)
            with ProgressLine() as line:
                await check.has_seen(wanted, lambda: line.show(check.seen_count, wanted, "checked"))

        await _with_timeout(
            chosen, work(), lambda: f"{check.seen_count} of {wanted} transactions were checked"
        )
    result = {"checked": check.seen_count, "ids": _spans(starts, check.marks)}
    return _print_result(chosen, check.wrong, result)


def mark_before(first: int) -> int:
    """Return the high-water mark before the ID of `--first`; raises BadConfig if it is negative."""
    if first < 0:
        raise BadConfig(f"--first: expected a transaction ID, 0 or more, found {first}")
    return first - 1


async def _write_all(
    clients: list[AsyncWaltzClient], chosen: CheckOptions, written: CheckResult
) -> None:
    """Let all clients write concurrently; after all have finished, raise the first error."""
    failures: list[WaltzError] = []

    async def write(number: int, client: AsyncWaltzClient, line: ProgressLine) -> None:
        try:
            await _write(client, chosen, number, written, line)
        except WaltzError as error:
            failures.append(error)

    with ProgressLine() as line:
        async with asyncio.TaskGroup() as tasks:
            for number, client in enumerate(clients):
                tasks.create_task(write(number, client, line))
    if failures:
        raise failures[0]


async def _with_timeout(
    chosen: CheckOptions, work: Coroutine[Any, Any, None], progress: Callable[[], str]
) -> None:
    try:
        async with asyncio.timeout(chosen.timeout_s):
            await work
    except TimeoutError:
        raise Unavailable(
            f"the command did not finish within {chosen.timeout_s:.0f} s: {progress()}"
        ) from None


def _unread_text(checks: list[CheckCallbacks], written: CheckResult) -> str:
    reached = [
        all(check.marks[each] >= end for each, end in written.ends.items()) for check in checks
    ]
    return f"{sum(reached)} of {len(checks)} clients have received all transactions"


def _spans(starts: Mapping[int, int], ends: Mapping[int, int]) -> dict[int, list[int]]:
    """Return the first and the last new ID of each partition that has new IDs."""
    return {each: [starts[each] + 1, end] for each, end in ends.items() if end > starts[each]}


def _print_result(
    chosen: CheckOptions, wrong: Sequence[str] | None, result: Mapping[str, object]
) -> int:
    if chosen.as_json:
        verdict = (
            {} if wrong is None else {"is_valid": not wrong, "wrong": wrong[:FAULTS_SHOWN_MAX]}
        )
        print_json({**verdict, **result})
        return 1 if wrong else 0
    for name, value in result.items():
        text = value
        if isinstance(value, dict):
            text = ", ".join(
                f"transactions {first}..{last} of partition {p}"
                for p, (first, last) in value.items()
            )
        print_result(f"{name}: {text}")
    if wrong is None:
        return 0
    for fault in wrong[:FAULTS_SHOWN_MAX]:
        print_result(fault)
    if len(wrong) > FAULTS_SHOWN_MAX:
        print_result(f"and {len(wrong) - FAULTS_SHOWN_MAX} more errors")
    print_result("failed" if wrong else "passed")
    return 1 if wrong else 0
