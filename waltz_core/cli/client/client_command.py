"""`waltz-core client append | read | watch | high-water-mark`: use the log from a shell."""

import asyncio
import itertools
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import click

from waltz_core.cli import shared_options as options
from waltz_core.cli.client import client_check
from waltz_core.cli.output import print_error, print_json, print_result, print_table, to_one_line
from waltz_core.cli.subcommands import subcommand
from waltz_core.client import (
    LATEST,
    AsyncCallbacks,
    AsyncTransaction,
    AsyncWaltzClient,
    PoisonPolicy,
    RangeChunk,
    RangeForm,
    WaltzClient,
    lock,
)
from waltz_core.client.model.callbacks import default_policy
from waltz_core.cluster.change.replica_steps import parse_partitions
from waltz_core.errors import BadConfig, BeforeLogStart, WaltzError
from waltz_core.records.record import TransactionId


@subcommand
@options.argument(
    "data",
    "[DATA]...",
    "the payloads, one for each transaction [default: the lines of standard input]",
    nargs=-1,
)
@click.option(
    "--partition",
    "--partitions",
    "partitions",
    metavar="PARTITIONS",
    help="the partitions to append to, round-robin, for example 3 or 0-3,7; only one partition "
    "with --write-lock [default: all partitions; with --write-lock, the partition of the first "
    "lock]",
)
@click.option(
    "--header",
    type=int,
    default=0,
    help="the header of the transactions, a 32-bit integer [default: 0]",
)
@click.option(
    "--write-lock",
    multiple=True,
    metavar="NAME:KEY",
    help="a write lock of the transactions; KEY is an integer",
)
@click.option(
    "--high-water-mark",
    type=int,
    metavar="ID",
    help="fail if another transaction has written the lock after this transaction ID "
    "[default: the partition's high-water mark]",
)
@options.connect_option
@options.json_option
def append(  # noqa: PLR0913 - one for each option
    *,
    data: tuple[str, ...],
    partitions: str | None,
    header: int,
    write_lock: tuple[str, ...],
    high_water_mark: int | None,
    connect: str,
    as_json: bool,
) -> int:
    """Append one transaction for each argument or line of input; print their IDs."""
    locks = [_parse_lock(text) for text in write_lock]
    with WaltzClient(connect) as client:
        row_partitions = _partitions_in_turn(
            partitions, client.partition_count, has_locks=bool(locks)
        )
        futures = [
            client.append(
                payload,
                partition=partition,
                header=header,
                write_locks=locks,
                client_high_water_mark=high_water_mark,
            )
            for payload, partition in zip(_read_payloads(data), row_partitions, strict=False)
        ]
        ids, failures = _wait_for_outcomes(futures)
    if as_json:
        print_json(ids)
    else:
        for transaction_id in ids:
            print_result(str(transaction_id))
    if failures:
        # Without this hint, a user may repeat the command and append the committed transactions
        # again.
        ids_hint = "; their IDs are printed above" if ids else ""
        print_error(f"{len(ids)} of {len(futures)} transactions were appended{ids_hint}")
        raise failures[0]
    return 0


def _partitions_in_turn(text: str | None, count: int, *, has_locks: bool) -> Iterator[int | None]:
    """Yield the partition of each row, endlessly; None: the client chooses it."""
    if text is None:
        return itertools.repeat(None)
    partition_ids = parse_partitions(text, count)
    if has_locks and len(partition_ids) > 1:  # a lock applies to one partition only
        raise BadConfig(f"--partition: expected one partition with --write-lock, found {text!r}")
    return itertools.cycle(partition_ids)


def _wait_for_outcomes(
    futures: Sequence[Future[TransactionId]],
) -> tuple[list[int], list[WaltzError]]:
    """Wait for all appends; return the IDs of committed transactions, and the errors."""
    ids, failures = [], []
    for future in futures:
        try:
            ids.append(int(future.result()))
        except WaltzError as error:
            failures.append(error)
    return ids, failures


def _read_payloads(arguments: tuple[str, ...]) -> Iterator[bytes]:
    """Yield the payloads: the arguments, otherwise the lines of standard input."""
    if arguments:
        yield from (word.encode() for word in arguments)
    else:
        yield from (line.rstrip(b"\n") for line in sys.stdin.buffer)


def _parse_lock(text: str) -> int:
    name, colon, key = text.rpartition(":")
    if not colon or not key.lstrip("-").isdigit():
        raise BadConfig(f"--write-lock: expected NAME:KEY with an integer as key, found {text!r}")
    return lock(name, int(key))


def _read_chunks(
    client: WaltzClient, partition: int, first: int | None, last: int
) -> Iterator[RangeChunk]:
    """Read a range of transactions; without `first`, begin at the first available ID."""
    chunks = client.read_range(partition, first or 0, last, form=RangeForm.WHOLE)
    try:
        head = next(chunks, None)
    except BeforeLogStart as error:
        if first is not None:
            raise
        chunks = client.read_range(partition, error.first_available, last, form=RangeForm.WHOLE)
        head = next(chunks, None)
    if head is not None:
        yield head
        yield from chunks


@subcommand
@options.partition_option
@click.option(
    "--first",
    type=int,
    metavar="ID",
    help="the first transaction to read, by its ID [default: the first available one]",
)
@click.option(
    "--last",
    type=int,
    metavar="ID",
    help="the last transaction to read, by its ID [default: the high-water mark]",
)
@options.connect_option
@options.json_option
def read(
    *, partition: int, first: int | None, last: int | None, connect: str, as_json: bool
) -> int:
    """Print a range of transactions."""
    with WaltzClient(connect) as client:
        if last is None:
            last = client.high_water_mark(partition)
            if first is not None and first > last + 1:
                raise BadConfig(
                    f"--first: expected at most {last}, the last transaction of partition "
                    f"{partition}, found {first}"
                )
        for chunk in _read_chunks(client, partition, first, last):
            for row in chunk.rows():
                _print_transaction(int(row.transaction_id), row.header, row.data, as_json=as_json)
    return 0


@subcommand
@options.partition_option
@click.option(
    "--first",
    type=int,
    metavar="ID",
    help="the first transaction to read, by its ID [default: only new transactions]",
)
@click.option(
    "--transactions",
    type=int,
    metavar="N",
    help="number of transactions after which to end [default: no limit]",
)
@options.connect_option
@options.json_option
async def watch(
    *, partition: int, first: int | None, transactions: int | None, connect: str, as_json: bool
) -> int:
    """Print transactions as they are committed."""
    if transactions is not None and transactions < 1:
        raise BadConfig(f"--transactions: expected 1 or more, found {transactions}")
    async with AsyncWaltzClient.connect(connect) as client:
        mark = LATEST if first is None else client_check.high_water_mark_before(first)
        callbacks = _PrintCallbacks(mark, transactions, as_json=as_json)
        await client.subscribe(callbacks, [partition])
        await callbacks.finished.wait()
    if callbacks.error is not None:
        raise callbacks.error
    return 0


class _PrintCallbacks(AsyncCallbacks):
    """Prints the transactions of a feed, in the format of `read`."""

    def __init__(self, mark: int, count: int | None, *, as_json: bool) -> None:
        self._mark = mark
        self._remaining_count = count
        self._as_json = as_json
        self.error: Exception | None = None
        self.finished = asyncio.Event()

    async def client_high_water_mark(self, partition: int) -> int:
        """Return the high-water mark after which the feed begins."""
        return self._mark

    async def apply_transaction(self, transaction: AsyncTransaction) -> None:
        """Print one transaction, unless the limit is reached."""
        if self._remaining_count == 0:
            return
        data = await transaction.data()
        number, header = int(transaction.transaction_id), transaction.header
        _print_transaction(number, header, data, as_json=self._as_json)
        if self._remaining_count is not None:
            self._remaining_count -= 1
            if self._remaining_count == 0:
                self.finished.set()

    async def uncaught_exception(
        self, partition: int, transaction_id: int, error: Exception
    ) -> PoisonPolicy:
        """Record the error that ends the feed."""
        policy = default_policy(error)
        if policy is PoisonPolicy.STOP:
            self.error = error
            self.finished.set()
        return policy


def _print_transaction(transaction_id: int, header: int, data: bytes, *, as_json: bool) -> None:
    """Print a transaction; JSON contains its whole text, with control characters escaped."""
    if as_json:
        text = data.decode("utf-8", "backslashreplace")
        print_json({"transaction_id": transaction_id, "header": header, "data": text})
    else:
        print_result(f"{transaction_id}\t{header}\t{to_one_line(data)}")


_OUTPUT_FORMAT_HELP = (
    "Each line has the transaction ID, the header and the data, separated by tabs. In the "
    "data, control characters and bytes that are not UTF-8 are escaped with a backslash."
)
read.help_details = watch.help_details = _OUTPUT_FORMAT_HELP


@subcommand
@click.option("--partition", type=int, metavar="P", help="the partition [default: all]")
@click.option(
    "--linearizable",
    is_flag=True,
    help="let each server confirm its high-water marks with a quorum of replicas",
)
@options.connect_option
@options.json_option
def high_water_mark(
    *, partition: int | None, linearizable: bool, connect: str, as_json: bool
) -> int:
    """Print the high-water marks of partitions."""
    with WaltzClient(connect) as client:
        if partition is None:
            marks = client.high_water_marks(linearizable=linearizable)
        else:
            marks = {partition: client.high_water_mark(partition, linearizable=linearizable)}
    rows = [(int(number), int(mark)) for number, mark in sorted(marks.items())]
    if as_json:
        print_json(dict(rows))
    else:
        print_table(("partition", "high-water mark"), rows)
    return 0
