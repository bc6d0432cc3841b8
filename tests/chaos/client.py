"""The client process of chaos tests, with a journal of what it sends and receives.

    python -m tests.chaos.client CONNECT NAME DIRECTORY

The process runs on a simulated machine, and may be killed at any moment. Therefore it writes each
transaction to its journal before it sends the transaction. If the journal has no outcome of a
transaction, the outcome is unknown.

The process writes like `examples/four_writers.py`. Batches and single transactions have locks, and
do not read the log first. Contexts read a counter that is built from the feed, and are retried. The
process also requests high-water marks from time to time.

Commands arrive on standard input. After "stop", the process sends no more, and prints "settled"
when all outcomes are known. Then after "end MARKS" (JSON), it prints "fed" when the feed has
reached all marks.
"""

import json
import logging
import random
import struct
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fault.load import four_writers
from waltz_core.client import Transaction, TransactionBuilder, WaltzClient, lock, partition_of
from waltz_core.config import ClientConfig
from waltz_core.errors import WaltzError
from waltz_core.records.batches import encode_append

ACCOUNTS, COUNTERS = 300, 40
PENDING_MAX = 5  # submissions of one partition in progress
BATCH_ROWS = 12
SEND_INTERVAL_S = 0.06
MARK_REQUEST_INTERVAL_S = 0.5
REQUEST_TIMEOUT_MS = 12_000
FEED_ENTRY = struct.Struct(">iqiiii")  # partition, ID, request ID


class Journal:
    """The lines of one client."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._lock = threading.Lock()

    def write(self, *lines: Sequence[Any]) -> None:
        """Pass lines to the kernel before returning, so they survive a kill of this process."""
        text = "".join(json.dumps(line) + "\n" for line in lines)
        with self._lock:
            self._file.write(text)
            self._file.flush()

    def sent_line(self, reported: Any, mark: int, locks: list[int]) -> list[Any]:
        """Return the journal line of a transaction that is about to be sent."""
        return [
            "sent",
            reported.key,
            reported.partition,
            reported.digest,
            reported.sent_s,
            mark,
            locks,
        ]

    def reported_line(self, reported: Any) -> list[Any]:
        """Return the journal line of an outcome."""
        return [
            "reported",
            reported.key,
            reported.outcome,
            reported.transaction_id,
            reported.reported_s,
            reported.why,
        ]


class Feed(four_writers.Counters):  # type: ignore[misc, name-defined]
    """The counters and marks computed from the feed, and the feed as a file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.marks: dict[int, int] = {}
        self._file = path.open("ab")

    def apply_transaction(self, transaction: Transaction) -> None:
        """Add one transaction of the feed."""
        super().apply_transaction(transaction)
        partition, transaction_id = int(transaction.partition_id), int(transaction.transaction_id)
        self._file.write(FEED_ENTRY.pack(partition, transaction_id, *transaction.req_id))
        self.marks[partition] = transaction_id

    def flush(self) -> None:
        """Pass buffered entries of the feed to the kernel."""
        self._file.flush()


class JournaledIncrement(four_writers.IncrementContext):  # type: ignore[misc, name-defined]
    """Increments a counter; journals each attempt before it is sent."""

    timeout_ms: int | None = REQUEST_TIMEOUT_MS

    def __init__(self, key: str, counter: int, feed: Feed, journal: Journal) -> None:
        super().__init__(key, counter, feed)
        self._journal = journal

    def execute(self, builder: TransactionBuilder) -> bool:
        """Return the next value of the counter, under its lock."""
        is_submitted: bool = super().execute(builder)
        mark, reported = int(builder.client_high_water_mark), self.attempts[-1]
        self._journal.write(self._journal.sent_line(reported, mark, [self._lock]))
        return is_submitted


class Application:
    """One run of the client process."""

    def __init__(self, client: WaltzClient, name: str, directory: Path) -> None:
        self._client = client
        self._name = name
        self._random = random.Random(name)
        self._journal = Journal(directory / f"{name}.jsonl")
        self._feed = Feed(directory / f"{name}.feed")
        self._key_count = 0
        count = client.partition_count
        self._pending: dict[int, list[Any]] = {number: [] for number in range(count)}
        accounts = _by_partition("account", ACCOUNTS, count)
        self._accounts = [[lock("account", each) for each in some] for some in accounts]
        self._counters = _by_partition("counter", COUNTERS, count)

    def run(self, stopping: threading.Event) -> None:
        """Send until "stop", then wait for all outcomes."""
        self._client.subscribe(self._feed)
        mark_requester = threading.Thread(target=self._request_marks, args=(stopping,), daemon=True)
        mark_requester.start()
        while not stopping.wait(SEND_INTERVAL_S):
            for partition, pending in self._pending.items():
                self._journal_outcomes(partition)
                if len(pending) < PENDING_MAX:
                    self._send_random_append(partition)
            self._feed.flush()
        while any(self._pending.values()):
            for partition in self._pending:
                self._journal_outcomes(partition)
            time.sleep(SEND_INTERVAL_S)
        mark_requester.join(REQUEST_TIMEOUT_MS / 1000)

    def await_marks(self, marks: dict[int, int]) -> None:
        """Wait until the feed has reached the given marks."""
        while any(self._feed.marks.get(partition, -1) < mark for partition, mark in marks.items()):
            time.sleep(SEND_INTERVAL_S)
        self._feed.flush()

    def _request_marks(self, stopping: threading.Event) -> None:
        partitions = list(self._pending)
        while not stopping.wait(MARK_REQUEST_INTERVAL_S):
            partition, asked_s = self._random.choice(partitions), time.monotonic()
            try:
                mark = int(self._client.high_water_mark(partition, linearizable=True))
            except WaltzError:
                continue
            self._journal.write(["mark", partition, asked_s, mark])

    def _send_random_append(self, partition: int) -> None:
        kind = self._random.randrange(3)
        if kind == 0:
            self._send_under_locks(partition, BATCH_ROWS)
        elif kind == 1:
            self._send_under_locks(partition, 1)
        else:
            self._submit_increment(partition)

    def _next_key(self) -> str:
        self._key_count += 1
        return f"{self._name}.{self._key_count}"

    def _send_under_locks(self, partition: int, count: int) -> None:
        """Send rows under locks: one row as a transaction, several as a batch."""
        mark = self._feed.marks.get(partition, -1)
        rows = [self._random_row(partition, mark) for _ in range(count)]
        data = [row.to_bytes() for row in rows]
        now_s = time.monotonic()
        reported = [
            four_writers.RecordedOutcome(row.key, partition, four_writers.digest_of(each), now_s)
            for row, each in zip(rows, data, strict=True)
        ]
        self._journal.write(
            *(
                self._journal.sent_line(each, mark, [*row.writes, *row.reads])
                for each, row in zip(reported, rows, strict=True)
            )
        )
        if count == 1:
            (row,) = rows
            future: Any = self._client.append(
                data[0],
                partition=partition,
                header=four_writers.PLAIN,
                write_locks=row.writes,
                read_locks=row.reads,
                append_locks=row.appends,
                client_high_water_mark=mark,
            )
        else:
            payload = encode_append(
                [four_writers.PLAIN] * count,
                data,
                write_locks=[row.writes for row in rows],
                read_locks=[row.reads for row in rows],
                append_locks=[row.appends for row in rows],
            )
            future = self._client.append_batch(
                partition, payload, count, client_high_water_mark=mark
            )
        self._add_pending(partition, four_writers.Pending(future, reported))

    def _random_row(self, partition: int, mark: int) -> Any:
        kind = self._random.randrange(4)
        write, read, append = self._random.sample(self._accounts[partition], 3)
        return four_writers.Content(
            key=self._next_key(),
            partition=partition,
            mark=mark,
            writes=[write] if kind in (0, 3) else [],
            reads=[read] if kind == 3 else [],
            appends=[append] if kind in (1, 3) else [],
            padding="x" * self._random.randrange(120),
        )

    def _submit_increment(self, partition: int) -> None:
        counter = self._random.choice(self._counters[partition])
        context = JournaledIncrement(self._next_key(), counter, self._feed, self._journal)
        future = self._client.submit(context)
        self._add_pending(partition, four_writers.Pending(future, context.attempts, context))

    def _add_pending(self, partition: int, pending: Any) -> None:
        pending.future.add_done_callback(lambda _: four_writers.set_report_times(pending.recorded))
        self._pending[partition].append(pending)

    def _journal_outcomes(self, partition: int) -> None:
        """Journal the outcomes that have arrived."""
        pending = self._pending[partition]
        for each in [each for each in pending if each.future.done()]:
            pending.remove(each)
            if not each.recorded:
                continue  # a context that timed out before its first try
            four_writers.set_outcomes(each)
            self._journal.write(
                *(self._journal.reported_line(reported) for reported in each.recorded)
            )


def _by_partition(name: str, count: int, partitions: int) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(partitions)]
    for number in range(count):
        found[partition_of(lock(name, number), partitions)].append(number)
    return found


def _open_client(connect: str, stopping: threading.Event) -> WaltzClient | None:
    """Open a client, with retries; None if "stop" arrives first."""
    config = ClientConfig(request_timeout_ms=REQUEST_TIMEOUT_MS, zookeeper_session_timeout_ms=2_000)
    while not stopping.is_set():
        try:
            return WaltzClient(connect, config)
        except WaltzError as error:
            logging.getLogger("chaos").warning("not connected: %s", error)
            stopping.wait(SEND_INTERVAL_S)
    return None


def main(connect: str, name: str, directory: str) -> None:
    """Run until standard input ends."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    stopping, may_end = threading.Event(), threading.Event()
    marks: dict[int, int] = {}

    def read_commands() -> None:
        for line in sys.stdin:
            word, _, rest = line.strip().partition(" ")
            if word == "end":
                marks.update({int(partition): mark for partition, mark in json.loads(rest).items()})
                may_end.set()
            stopping.set()
        stopping.set()
        may_end.set()

    threading.Thread(target=read_commands, daemon=True).start()
    client = _open_client(connect, stopping)
    if client is None:
        _print_line("settled")
        return
    with client:
        application = Application(client, name, Path(directory))
        application.run(stopping)
        _print_line("settled")
        may_end.wait()
        application.await_marks(marks)
        _print_line("fed")


def _print_line(word: str) -> None:
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
