"""Four processes write 100,000 transactions through two servers while a storage is killed.

The example records every outcome that a writer gets, and then compares the outcomes with the log:

    1. Reported as committed: the log contains it once, with the reported ID and the same bytes.
    2. Reported as rejected or lost: the log does not contain it.
    3. Reported as unknown: the log contains it at most once.
    4. The log contains only transactions that were written. Transaction IDs are dense, and request
       IDs are unique.
    5. If a transaction conflicts with an earlier transaction, the author of the later one had seen
       the earlier one. To check this, the locks and the high-water mark in the bytes of each
       transaction are replayed in the order of the log.
    6. Each counter has the values 1, 2, 3, ...: no value was computed from an old value.
    7. If the outcome of a transaction was reported before another transaction was sent, the first
       transaction precedes the other in the log.

A third of the transactions are appended in batches, and a third as single appends. These writers do
not read first, so locks reject some of their transactions. The last third are contexts. A context
reads a counter from the feed, and is retried after a rejection. If any comparison fails, the
example ends with exit code 1.
"""

import argparse
import hashlib
import json
import multiprocessing
import random
import struct
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from waltz_core.client import (
    BYTES,
    BatchOutcome,
    Callbacks,
    PoisonPolicy,
    RowOutcomeCode,
    Transaction,
    TransactionBuilder,
    TransactionContext,
    WaltzClient,
    lock,
    partition_of,
)
from waltz_core.errors import LockFailed, OutcomeUnknown, WaltzError
from waltz_core.local import LocalCluster, running_cluster
from waltz_core.records.batches import encode_append

if TYPE_CHECKING:
    from concurrent.futures import Future
    from multiprocessing.sharedctypes import Synchronized

WRITER_COUNT = 4
KILLED_STORAGE = "storage-2"
KILL_SHARE, RESTART_SHARE = 0.25, 0.6  # shares of the transactions that have an outcome
ACCOUNT_COUNT, COUNTER_COUNT = 2_000, 200
BATCH_ROWS, SINGLES, CONTEXTS = 250, 50, 12
IN_FLIGHT = {"batch": 4, "single": 400, "context": 24}
PLAIN, COUNTING = 1, 2  # application headers
OK, REJECTED, LOST, UNKNOWN = "committed", "rejected", "lost", "unknown"
# The fields are: transaction ID, request ID, header, length of the data, CRC of the data. The data
# follows, and then a CRC of 4 bytes.
RECORD = struct.Struct(">q16siiI")
TRAILER_BYTES = 4


# ---------------------------------------------------------------------------------------------
# transactions


class Content(NamedTuple):
    """The data of a transaction: everything that the comparison needs."""

    key: str
    partition: int
    mark: int
    writes: list[int]
    reads: list[int]
    appends: list[int]
    counter: int = -1
    value: int = 0
    padding: str = ""

    def to_bytes(self) -> bytes:
        """Encode this content as JSON."""
        return json.dumps(self, separators=(",", ":")).encode()

    @staticmethod
    def from_bytes(data: bytes) -> "Content":
        """Decode a content from the data of a transaction."""
        return Content(*json.loads(data))


@dataclass
class RecordedOutcome:
    """A sent transaction: its times, digest and reported outcome."""

    key: str
    partition: int
    digest: str
    sent_s: float
    reported_s: float = 0.0
    outcome: str = UNKNOWN
    transaction_id: int = -1
    why: str = ""


def digest_of(data: bytes) -> str:
    """Return a digest of 12 bytes as hexadecimal text."""
    return hashlib.blake2b(data, digest_size=12).hexdigest()


# ---------------------------------------------------------------------------------------------
# a writer


class Counters(Callbacks):
    """The values of all counters, computed from the feed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[int, int] = {}

    def apply_transaction(self, transaction: Transaction) -> None:
        """Store the counter's new value; ignore transactions of other kinds."""
        if transaction.header != COUNTING:
            return
        content = Content.from_bytes(transaction.data())
        with self._lock:
            self._values[content.counter] = content.value

    def uncaught_exception(
        self, partition: int, transaction_id: int, error: Exception
    ) -> PoisonPolicy:
        """Retry, because data can be unavailable while a partition moves."""
        return PoisonPolicy.RETRY

    def value(self, counter: int) -> int:
        """Return the counter's latest value in the feed, or 0 if there is none."""
        with self._lock:
            return self._values.get(counter, 0)


class IncrementContext(TransactionContext):
    """Increments a counter, starting from its value in the feed; records every attempt."""

    timeout_ms: int | None = 120_000

    def __init__(self, key: str, counter: int, counters: Counters) -> None:
        super().__init__()
        self.attempts: list[RecordedOutcome] = []
        self._key = key
        self._counter = counter
        self._lock = lock("counter", counter)
        self._counters = counters

    def partition_id(self, partition_count: int) -> int:
        """Return the partition of the counter."""
        return partition_of(self._lock, partition_count)

    def execute(self, builder: TransactionBuilder) -> bool:
        """Write the counter's next value, and record this attempt."""
        content = Content(
            key=f"{self._key}.{len(self.attempts)}",
            partition=builder.partition_id,
            mark=builder.client_high_water_mark,
            writes=[self._lock],
            reads=[],
            appends=[],
            counter=self._counter,
            value=self._counters.value(self._counter) + 1,
        )
        data = content.to_bytes()
        now_s = time.monotonic()
        self.attempts.append(
            RecordedOutcome(content.key, content.partition, digest_of(data), now_s)
        )
        builder.set_header(COUNTING)
        builder.set_transaction_data(data, BYTES)
        builder.set_write_locks(content.writes)
        return True


class Pending(NamedTuple):
    """Transactions in flight: a future, and the records that get outcomes from its result."""

    future: "Future[Any]"
    recorded: list[RecordedOutcome]
    context: IncrementContext | None = None


class Writer:
    """One of the four writer processes."""

    def __init__(
        self, connect: str, number: int, share: int, progress: "Synchronized[int]"
    ) -> None:
        self.ledger: list[RecordedOutcome] = []
        self._client = WaltzClient(connect)
        self._number = number
        self._remaining_count = share
        self._next_number = 0
        self._progress = progress
        self._random = random.Random(number)
        self._counters = Counters()
        self._marks: dict[int, int] = {}
        self._pending: dict[str, deque[Pending]] = {kind: deque() for kind in IN_FLIGHT}
        count = self._client.partition_count
        self._accounts: list[list[int]] = [[] for _ in range(count)]
        for account in range(ACCOUNT_COUNT):
            lock_hash = lock("account", account)
            self._accounts[partition_of(lock_hash, count)].append(lock_hash)

    def run(self) -> None:
        """Write this process's share of the transactions, and wait for all outcomes."""
        with self._client:
            self._client.subscribe(self._counters)
            while self._remaining_count:
                self._append_batch(min(BATCH_ROWS, self._remaining_count))
                for _ in range(min(SINGLES * 5, self._remaining_count)):
                    self._append_one()
                for _ in range(min(CONTEXTS * 20, self._remaining_count)):
                    self._submit_increment()
            for kind in IN_FLIGHT:
                self._collect_outcomes(kind, in_flight=0)

    def _next_keys(self, count: int) -> list[str]:
        keys = [f"{self._number}.{self._next_number + place}" for place in range(count)]
        self._next_number += count
        self._remaining_count -= count
        return keys

    def _random_content(self, key: str, partition: int, mark: int) -> Content:
        """Create a random transaction with some locks, without reading the log first."""
        chosen = self._random.sample(self._accounts[partition], 3)
        kind = self._random.randrange(4)
        return Content(
            key=key,
            partition=partition,
            mark=mark,
            writes=chosen[:1] if kind in (0, 3) else [],
            reads=chosen[1:2] if kind == 3 else [],
            appends=chosen[2:] if kind in (1, 3) else [],
            padding="x" * self._random.randrange(120),
        )

    def _append_batch(self, count: int) -> None:
        self._collect_outcomes("batch", in_flight=IN_FLIGHT["batch"])
        partition = self._random.randrange(self._client.partition_count)
        mark = int(self._client.high_water_mark(partition))
        rows = [self._random_content(key, partition, mark) for key in self._next_keys(count)]
        data = [row.to_bytes() for row in rows]
        payload = encode_append(
            [PLAIN] * count,
            data,
            write_locks=[row.writes for row in rows],
            read_locks=[row.reads for row in rows],
            append_locks=[row.appends for row in rows],
        )
        now_s = time.monotonic()
        recorded = [
            RecordedOutcome(row.key, partition, digest_of(each), now_s)
            for row, each in zip(rows, data, strict=True)
        ]
        future = self._client.append_batch(partition, payload, count, client_high_water_mark=mark)
        self._add_pending("batch", Pending(future, recorded))

    def _append_one(self) -> None:
        self._collect_outcomes("single", in_flight=IN_FLIGHT["single"])
        partition = self._random.randrange(self._client.partition_count)
        # A new high-water mark costs a round trip, so most appends use a slightly old one.
        if self._next_number % SINGLES == 0 or partition not in self._marks:
            self._marks[partition] = int(self._client.high_water_mark(partition))
        (key,) = self._next_keys(1)
        row = self._random_content(key, partition, self._marks[partition])
        data = row.to_bytes()
        recorded = RecordedOutcome(key, partition, digest_of(data), time.monotonic())
        future = self._client.append(
            data,
            partition=partition,
            header=PLAIN,
            write_locks=row.writes,
            read_locks=row.reads,
            append_locks=row.appends,
            client_high_water_mark=row.mark,
        )
        self._add_pending("single", Pending(future, [recorded]))

    def _submit_increment(self) -> None:
        self._collect_outcomes("context", in_flight=IN_FLIGHT["context"])
        (key,) = self._next_keys(1)
        context = IncrementContext(key, self._random.randrange(COUNTER_COUNT), self._counters)
        future = self._client.submit(context)
        self._add_pending("context", Pending(future, context.attempts, context))

    def _add_pending(self, kind: str, pending: Pending) -> None:
        pending.future.add_done_callback(lambda _: set_report_times(pending.recorded))
        self._pending[kind].append(pending)

    def _collect_outcomes(self, kind: str, *, in_flight: int) -> None:
        """Wait until fewer than `in_flight` are pending; add the outcomes to the ledger."""
        queue = self._pending[kind]
        while queue and len(queue) >= max(1, in_flight):
            pending = queue.popleft()
            set_outcomes(pending)
            self.ledger += pending.recorded
            with self._progress.get_lock():
                self._progress.value += 1 if pending.context else len(pending.recorded)


def set_report_times(recorded: list[RecordedOutcome]) -> None:
    """Set the time of the report in the records that have none yet."""
    now_s = time.monotonic()
    for record in recorded:
        record.reported_s = record.reported_s or now_s


def set_outcomes(pending: Pending) -> None:
    """Set the recorded outcomes according to the future's result."""
    pending.future.exception()
    set_report_times(
        pending.recorded
    )  # This thread may continue before the future's callbacks run.
    try:
        result = pending.future.result()
    except WaltzError as error:
        for each in _records_of_last_attempt(pending):
            each.outcome, each.why = _outcome_of(error), f"{type(error).__name__}: {error}"
        return
    last_attempt = _records_of_last_attempt(pending)
    if isinstance(result, BatchOutcome):
        for each, reason, transaction_id in zip(
            last_attempt, result.reasons.tolist(), result.transaction_ids.tolist(), strict=True
        ):
            each.why = RowOutcomeCode(reason).name
            each.outcome = {RowOutcomeCode.COMMITTED: OK, RowOutcomeCode.LOCK: REJECTED}.get(
                reason, LOST
            )
            each.transaction_id = transaction_id
        return
    last_attempt[0].outcome, last_attempt[0].transaction_id = OK, int(result)


def _records_of_last_attempt(pending: Pending) -> list[RecordedOutcome]:
    """Return the records of the last attempt; mark earlier attempts of a context as rejected."""
    if pending.context is None:
        return pending.recorded
    *earlier, last = pending.recorded  # complete only now: each attempt has added a record
    for each in earlier:
        each.outcome = REJECTED
    return [last]


def _outcome_of(error: WaltzError) -> str:
    if isinstance(error, OutcomeUnknown):
        return UNKNOWN
    return REJECTED if isinstance(error, LockFailed) else LOST


def write(
    connect: str, number: int, share: int, ledger: Path, progress: "Synchronized[int]"
) -> None:
    """Run one of the four processes, and write its ledger to a file as lines of JSON."""
    writer = Writer(connect, number, share, progress)
    writer.run()
    with ledger.open("w", encoding="utf-8") as lines:
        for recorded in writer.ledger:
            lines.write(json.dumps(recorded.__dict__) + "\n")


# ---------------------------------------------------------------------------------------------
# the log


class Entry(NamedTuple):
    """One committed transaction, as read from the log."""

    partition: int
    transaction_id: int
    request_id: bytes
    data: bytes


def read_log(connect: str) -> list[Entry]:
    """Read the whole log, sorted by partition and transaction ID."""
    found: list[Entry] = []
    with WaltzClient(connect) as client:
        for partition, last in sorted(client.high_water_marks(linearizable=True).items()):
            for chunk in client.read_range(partition, 0, last):
                found += _entries(partition, bytes(chunk.records))
    return found


def _entries(partition: int, records: bytes) -> Iterator[Entry]:
    offset = 0
    while offset < len(records):
        transaction_id, request_id, _, length, _ = RECORD.unpack_from(records, offset)
        start = offset + RECORD.size
        yield Entry(partition, transaction_id, request_id, records[start : start + length])
        offset = start + length + TRAILER_BYTES


@dataclass
class Verdict:
    """The result of the comparison: the problems found, and the number of each outcome."""

    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def check(self, ok: object, what: str) -> None:
        """Add a problem if the condition `ok` is false."""
        if not ok:
            self.wrong.append(what)


def compare(ledger: list[RecordedOutcome], log: list[Entry]) -> Verdict:
    """Compare the outcomes with the log, by the rules in the module's docstring."""
    verdict = Verdict()
    _check_order(log, verdict)
    outcomes = {recorded.key: recorded for recorded in ledger}
    verdict.check(len(outcomes) == len(ledger), "a writer has recorded a key twice")
    seen: Counter[str] = Counter()
    for entry in log:
        content = Content.from_bytes(entry.data)
        where = f"{content.key} at {entry.partition}/{entry.transaction_id}"
        seen[content.key] += 1
        recorded = outcomes.get(content.key)
        if recorded is None:
            verdict.wrong.append(f"{where}: no process has written this key")
            continue
        is_equal = recorded.partition == entry.partition and recorded.digest == digest_of(
            entry.data
        )
        verdict.check(is_equal, f"{where}: the log has other bytes than the writer has sent")
        verdict.check(
            recorded.outcome in (OK, UNKNOWN),
            f"{where} is in the log, but was reported as {recorded.outcome} {recorded.why}",
        )
        if recorded.outcome == OK:
            verdict.check(
                recorded.transaction_id == entry.transaction_id,
                f"{where} was reported as transaction {recorded.transaction_id}",
            )
    for key, times in seen.items():
        verdict.check(times == 1, f"{key} is in the log {times} times")
    for recorded in ledger:
        verdict.counts[recorded.outcome] += 1
        if recorded.outcome == OK:
            verdict.check(
                recorded.key in seen,
                f"{recorded.key} was reported as committed, but is not in the log",
            )
    _check_locks(log, verdict)
    _check_times(log, outcomes, verdict)
    return verdict


def _check_order(log: list[Entry], verdict: Verdict) -> None:
    following: Counter[int] = Counter()
    for entry in log:
        expected = following[entry.partition]
        verdict.check(
            entry.transaction_id == expected,
            f"partition {entry.partition}: expected transaction ID {expected}, "
            f"found {entry.transaction_id}",
        )
        following[entry.partition] += 1
    for request_id, times in Counter(entry.request_id for entry in log).items():
        verdict.check(times == 1, f"request ID {request_id.hex()} is in the log {times} times")


def _check_locks(log: list[Entry], verdict: Verdict) -> None:
    """Replay the locks and counters in the order of the log (rules 5 and 6)."""
    writers: dict[tuple[int, int], int] = {}
    counters: Counter[int] = Counter()
    for entry in log:
        content = Content.from_bytes(entry.data)
        for lock_hash in (*content.writes, *content.reads):
            writer = writers.get((entry.partition, lock_hash), -1)
            verdict.check(
                writer <= content.mark,
                f"{content.key} at {entry.partition}/{entry.transaction_id} has high-water mark "
                f"{content.mark}, and conflicts with transaction {writer}",
            )
        for lock_hash in (*content.writes, *content.appends):
            writers[entry.partition, lock_hash] = entry.transaction_id
        if content.counter >= 0:
            counters[content.counter] += 1
            verdict.check(
                content.value == counters[content.counter],
                f"counter {content.counter}: expected {counters[content.counter]}, "
                f"found {content.value} at {entry.partition}/{entry.transaction_id}",
            )


def _check_times(log: list[Entry], outcomes: dict[str, RecordedOutcome], verdict: Verdict) -> None:
    latest_sent: dict[int, float] = {}
    for entry in log:
        recorded = outcomes.get(Content.from_bytes(entry.data).key)
        if recorded is None or recorded.outcome != OK:
            continue
        latest = max(latest_sent.get(entry.partition, 0.0), recorded.sent_s)
        latest_sent[entry.partition] = latest
        verdict.check(
            latest <= recorded.reported_s,
            f"{recorded.key} at {entry.partition}/{entry.transaction_id} was reported as committed "
            "before an earlier transaction of the same partition was sent",
        )


# ---------------------------------------------------------------------------------------------
# the run


def run_writers(cluster: LocalCluster, transactions: int, directory: Path) -> Verdict:
    """Run four writers, kill and restart a storage meanwhile, and compare outcomes with the log."""
    started = multiprocessing.get_context("spawn")
    progress = started.Value("q", 0)
    shares = [transactions // WRITER_COUNT] * WRITER_COUNT
    shares[0] += transactions - sum(shares)
    ledgers = [directory / f"writer-{number}.jsonl" for number in range(WRITER_COUNT)]
    writers = [
        started.Process(
            target=write, args=(cluster.connect, number, shares[number], ledgers[number], progress)
        )
        for number in range(WRITER_COUNT)
    ]
    for writer in writers:
        writer.start()

    def wait_for_share(share: float) -> None:
        while progress.value < share * transactions and any(w.is_alive() for w in writers):
            time.sleep(0.02)
        show_line(f"   {progress.value:,} of {transactions:,} transactions have an outcome")

    wait_for_share(KILL_SHARE)
    cluster.kill(KILLED_STORAGE)
    show_line(f"   {KILLED_STORAGE} was killed")
    wait_for_share(RESTART_SHARE)
    cluster.start(KILLED_STORAGE)
    show_line(f"   {KILLED_STORAGE} was restarted")
    for writer in writers:
        writer.join()
    failed = [number for number, writer in enumerate(writers) if writer.exitcode != 0]
    if failed:
        return Verdict(wrong=[f"writers {failed} ended with an error"])
    ledger = [
        RecordedOutcome(**json.loads(line))
        for path in ledgers
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    show_line("reading the log back")
    log = read_log(cluster.connect)
    verdict = compare(ledger, log)
    verdict.counts["in the log"] = len(log)
    return verdict


def show_line(text: str) -> None:
    """Print a line to standard output, and flush it."""
    print(text, flush=True)


def main() -> int:
    """Run the example; return the exit code: 1 if a comparison failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--transactions",
        type=int,
        default=100_000,
        help="number of transactions [default: 100,000]",
    )
    parser.add_argument(
        "--directory", type=Path, help="directory, kept afterwards [default: a temporary one]"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="waltz-writers-") as temporary:
        directory = arguments.directory or Path(temporary)
        with running_cluster(directory / "cluster") as cluster:
            show_line(f"{arguments.transactions:,} transactions from {WRITER_COUNT} processes")
            began = time.monotonic()
            verdict = run_writers(cluster, arguments.transactions, directory)
            took = time.monotonic() - began
    for what in (OK, REJECTED, LOST, UNKNOWN, "in the log"):
        show_line(f"{what:>12}: {verdict.counts[what]:,}")
    show_line(f"{'seconds':>12}: {took:.1f}")
    for wrong in verdict.wrong[:20]:
        show_line(f"WRONG: {wrong}")
    if not verdict.wrong and not all(verdict.counts[what] for what in (OK, REJECTED)):
        verdict.wrong.append(
            "expected committed and rejected transactions, found only one kind or none"
        )
    show_line(f"four writers: {len(verdict.wrong)} errors" if verdict.wrong else "four writers: OK")
    return 1 if verdict.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
