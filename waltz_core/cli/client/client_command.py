"""`waltz-core client append | read | watch | high-water-mark`: the log from the shell."""

import argparse
import asyncio
import os
import sys
from collections.abc import Iterator

import uvloop

from waltz_core.cli.client import client_check
from waltz_core.cli.output import show, show_json, show_table
from waltz_core.client import (
    LATEST,
    AsyncCallbacks,
    AsyncTransaction,
    AsyncWaltzClient,
    PoisonPolicy,
    RangeForm,
    WaltzClient,
    lock,
)
from waltz_core.client.model.callbacks import policy_of
from waltz_core.errors import BadConfig
from waltz_core.records.record import BEFORE_FIRST


def add(command: argparse.ArgumentParser) -> None:
    """Declare the verbs."""
    verbs = command.add_subparsers(title="verbs", metavar="VERB", required=True)
    append = verbs.add_parser("append", help="append transactions, one for each line or argument")
    append.add_argument("data", nargs="*", help="the payloads; else the lines of standard input")
    append.add_argument(
        "--partition", type=int, metavar="P", help="else that of the first lock, else each in turn"
    )
    append.add_argument("--header", type=int, default=0, help="32 bits of yours (default 0)")
    append.add_argument(
        "--write-lock", action="append", default=[], metavar="NAME:KEY", help="a key is an integer"
    )
    append.add_argument(
        "--high-water-mark",
        type=int,
        metavar="ID",
        help="refuse it if a lock was written after this id; else the partition's mark now",
    )
    append.set_defaults(verb=_append)
    read = verbs.add_parser("read", help="print transactions of a partition")
    read.add_argument("--partition", type=int, default=0, metavar="P", help="default 0")
    read.add_argument("--first", type=int, default=BEFORE_FIRST + 1, metavar="ID", help="default 0")
    read.add_argument("--last", type=int, metavar="ID", help="default: the last there is")
    read.set_defaults(verb=_read)
    watched = verbs.add_parser("watch", help="print transactions as they come, until interrupted")
    watched.add_argument("--partition", type=int, default=0, metavar="P", help="default 0")
    watched.add_argument("--first", type=int, metavar="ID", help="else what comes from now on")
    watched.add_argument("--transactions", type=int, metavar="N", help="end after so many")
    watched.set_defaults(verb=_watch)
    marks = verbs.add_parser("high-water-mark", help="print the id of the last transaction")
    marks.add_argument("--partition", type=int, metavar="P", help="else of every partition")
    marks.add_argument("--linearizable", action="store_true", help="confirmed by a quorum")
    marks.set_defaults(verb=_marks)
    validate = verbs.add_parser(
        "validate", help="have clients write under one lock and check that all see the same log"
    )
    client_check.add_validate(validate)
    produce = verbs.add_parser(
        "produce", aliases=["create-producer"], help="one producer of `validate` by itself"
    )
    client_check.add_produce(produce)
    consume = verbs.add_parser(
        "consume",
        aliases=["create-consumer"],
        help="check what producers write, as `validate` does",
    )
    client_check.add_consume(consume)
    for verb in (append, read, watched, marks, validate, produce, consume):
        verb.add_argument(
            "--connect",
            default=os.environ.get("WALTZ_CONNECT"),
            required="WALTZ_CONNECT" not in os.environ,
            help="zk1:2181,zk2:2181/waltz/payments (default $WALTZ_CONNECT)",
        )
        verb.add_argument("--json", action="store_true", help="JSON on standard output")


def _append(arguments: argparse.Namespace) -> int:
    locks = [_lock(text) for text in arguments.write_lock]
    with WaltzClient(arguments.connect) as client:
        futures = [
            client.append(
                data,
                partition=arguments.partition,
                header=arguments.header,
                write_locks=locks,
                client_high_water_mark=arguments.high_water_mark,
            )
            for data in _payloads(arguments.data)
        ]
        ids = [int(future.result()) for future in futures]
    if arguments.json:
        show_json(ids)
    else:
        for transaction_id in ids:
            show(str(transaction_id))
    return 0


def _payloads(words: list[str]) -> Iterator[bytes]:
    if words:
        yield from (word.encode() for word in words)
    else:
        yield from (line.rstrip(b"\n") for line in sys.stdin.buffer)


def _lock(text: str) -> int:
    name, colon, key = text.rpartition(":")
    if not colon or not key.lstrip("-").isdigit():
        raise BadConfig(f"a lock is NAME:KEY with a whole number as key; found {text!r}")
    return lock(name, int(key))


def _read(arguments: argparse.Namespace) -> int:
    with WaltzClient(arguments.connect) as client:
        last = arguments.last
        if last is None:
            last = client.high_water_mark(arguments.partition)
            if arguments.first > last + 1:
                raise BadConfig(
                    f"--first: the last transaction of partition {arguments.partition} is {last}, "
                    f"found {arguments.first}"
                )
        for chunk in client.read_range(
            arguments.partition, arguments.first, last, form=RangeForm.WHOLE
        ):
            for each in chunk.rows():
                data = each.data.decode("utf-8", "backslashreplace")
                _print((int(each.transaction_id), each.header, data), as_json=arguments.json)
    return 0


def _watch(arguments: argparse.Namespace) -> int:
    return uvloop.run(_watch_one(arguments))


async def _watch_one(arguments: argparse.Namespace) -> int:
    if arguments.transactions is not None and arguments.transactions < 1:
        raise BadConfig(f"--transactions: expected 1 or more, found {arguments.transactions}")
    async with AsyncWaltzClient.connect(arguments.connect) as client:
        first = arguments.first
        mark = LATEST if first is None else client_check.mark_before(first)
        printing = _Printing(mark, arguments.transactions, as_json=arguments.json)
        await client.subscribe(printing, [arguments.partition])
        await printing.is_over.wait()
    if printing.error is not None:
        raise printing.error
    return 0


class _Printing(AsyncCallbacks):
    """Prints a feed, as `read` does a range."""

    def __init__(self, mark: int, wanted: int | None, *, as_json: bool) -> None:
        self._mark = mark
        self._wanted = wanted
        self._as_json = as_json
        self.error: Exception | None = None
        self.is_over = asyncio.Event()

    async def client_high_water_mark(self, partition: int) -> int:
        """Return where to begin, whatever the `partition`."""
        return self._mark

    async def apply_transaction(self, transaction: AsyncTransaction) -> None:
        """Print one, unless enough were."""
        if self._wanted == 0:
            return
        data = (await transaction.data()).decode("utf-8", "backslashreplace")
        _print((int(transaction.transaction_id), transaction.header, data), as_json=self._as_json)
        if self._wanted is not None:
            self._wanted -= 1
            if self._wanted == 0:
                self.is_over.set()

    async def uncaught_exception(
        self, partition: int, transaction_id: int, error: Exception
    ) -> PoisonPolicy:
        """End with what ends the feed."""
        policy = policy_of(error)
        if policy is PoisonPolicy.STOP:
            self.error = error
            self.is_over.set()
        return policy


def _print(row: tuple[int, int, str], *, as_json: bool) -> None:
    if as_json:
        show_json(dict(zip(("transaction_id", "header", "data"), row, strict=True)))
    else:
        show("\t".join(map(str, row)))


def _marks(arguments: argparse.Namespace) -> int:
    with WaltzClient(arguments.connect) as client:
        if arguments.partition is None:
            marks = client.high_water_marks(linearizable=arguments.linearizable)
        else:
            chosen, is_linear = arguments.partition, arguments.linearizable
            marks = {chosen: client.high_water_mark(chosen, linearizable=is_linear)}
    rows = [(int(partition), int(mark)) for partition, mark in sorted(marks.items())]
    if arguments.json:
        show_json(dict(rows))
    else:
        show_table(("partition", "high-water mark"), rows)
    return 0
