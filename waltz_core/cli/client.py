"""`waltz-core client append | read | high-water-mark`: the log from the shell."""

import argparse
import os
import sys
from collections.abc import Iterator

import numpy as np

from waltz_core import raw_records
from waltz_core.cli.output import show, show_json, show_table
from waltz_core.client import RangeForm, WaltzClient, lock
from waltz_core.errors import BadConfig
from waltz_core.record import BEFORE_FIRST


def add(command: argparse.ArgumentParser) -> None:
    """Declare the verbs."""
    verbs = command.add_subparsers(title="verbs", metavar="VERB", required=True)
    append = verbs.add_parser("append", help="append transactions, one for each line or argument")
    append.add_argument("data", nargs="*", help="the payloads; else the lines of standard input")
    append.add_argument("--partition", type=int, help="else by the first lock, else in turn")
    append.add_argument("--header", type=int, default=0)
    append.add_argument(
        "--write-lock", action="append", default=[], metavar="NAME:KEY", help="a key is an integer"
    )
    append.add_argument("--high-water-mark", type=int, help="else the partition's mark now")
    append.set_defaults(verb=_append)
    read = verbs.add_parser("read", help="print transactions of a partition")
    read.add_argument("--partition", type=int, default=0)
    read.add_argument("--first", type=int, default=BEFORE_FIRST + 1)
    read.add_argument("--last", type=int, help="else the partition's mark")
    read.set_defaults(verb=_read)
    marks = verbs.add_parser("high-water-mark", help="print the mark of every partition")
    marks.add_argument("--linearizable", action="store_true", help="confirmed by a quorum")
    marks.set_defaults(verb=_marks)
    for verb in (append, read, marks):
        verb.add_argument(
            "--connect",
            default=os.environ.get("WALTZ_CONNECT"),
            required="WALTZ_CONNECT" not in os.environ,
            help="zk1:2181,zk2:2181/waltz/payments (default $WALTZ_CONNECT)",
        )
        verb.add_argument("--json", action="store_true")


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
        for chunk in client.read_range(
            arguments.partition, arguments.first, last, form=RangeForm.WHOLE
        ):
            ids = raw_records.ids_of(chunk.records, chunk.lengths)
            headers = raw_records.application_headers_of(chunk.records, chunk.lengths)
            ends = np.cumsum(chunk.lengths)
            whole = memoryview(chunk.records)
            for number, end in enumerate(ends.tolist()):
                start = end - int(chunk.lengths[number])
                data = bytes(whole[start + 36 : end - 4]).decode("utf-8", "backslashreplace")
                row = (int(ids[number]), int(headers[number]), data)
                if arguments.json:
                    show_json(dict(zip(("transaction_id", "header", "data"), row, strict=True)))
                else:
                    show("\t".join(map(str, row)))
    return 0


def _marks(arguments: argparse.Namespace) -> int:
    with WaltzClient(arguments.connect) as client:
        marks = client.high_water_marks(linearizable=arguments.linearizable)
    rows = [(int(partition), int(mark)) for partition, mark in sorted(marks.items())]
    if arguments.json:
        show_json(dict(rows))
    else:
        show_table(("partition", "high-water mark"), rows)
    return 0
