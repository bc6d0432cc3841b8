"""Compares what applications received under chaos with the log at the end.

What the applications sent and received is recorded in files, the *history*. The comparison needs
only the history and the log, but no cluster and no clock. Therefore a history can be checked again
later, and the tests of these checkers can check a falsified history.

The checks include those of `examples/four_writers.py`. No transaction reported as committed is
lost, moved, changed or duplicated. The log has no transaction that was reported as failed. IDs are
dense, the log has no conflict, and counters have the right values. The order in the log is the
order of the reports. In addition:

    1. A rejection has a cause: another client wrote one of the locks above the mark of the rejected
       transaction. That client had sent its write before the rejection was reported. There is one
       exception: if appends were in flight when a new store session opened, the session may reject
       them without a cause. These rejections may not outnumber the appends in flight.
    2. After each start a client receives the feed from the beginning of the log, each transaction
       once, in order. A client that runs until the end receives the whole log.
    3. A requested mark is not below a transaction that was reported as committed before the
       request.
"""

import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.chaos.client import BATCH_ROWS, FEED_ENTRY, PENDING_MAX
from tests.fault.load import four_writers
from waltz_core.client import WaltzClient

ERRORS_PER_RUN_MAX = 40


class Sent(NamedTuple):
    """One transaction that a client has sent: its outcome, and the reason if it was rejected."""

    recorded: Any  # four_writers.RecordedOutcome
    mark: int
    locks: list[int]


class MarkRequest(NamedTuple):
    """A request for the high-water mark, and its answer."""

    partition: int
    requested_s: float
    mark: int


class ClientRun:
    """The journal of one run of a client; `poll` reads the lines added since the last call."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.sent: dict[str, Sent] = {}
        self.mark_requests: list[MarkRequest] = []
        self.has_ended = False
        self._journal_path = directory / f"{name}.jsonl"
        self._feed_path = directory / f"{name}.feed"
        self._offset = 0

    def poll(self) -> None:
        """Read the lines added since the last call; an incomplete last line is left for later."""
        if not self._journal_path.exists():
            return
        with self._journal_path.open("rb") as lines:
            lines.seek(self._offset)
            text = lines.read()
        complete_lines = text[: text.rfind(b"\n") + 1]
        self._offset += len(complete_lines)
        for line in complete_lines.splitlines():
            self._add_line(*json.loads(line))

    def _add_line(self, kind: str, *words: Any) -> None:
        if kind == "mark":
            self.mark_requests.append(MarkRequest(*words))
        elif kind == "sent":
            key, partition, digest, sent_s, mark, locks = words
            recorded = four_writers.RecordedOutcome(key, partition, digest, sent_s)
            self.sent[key] = Sent(recorded, mark, locks)
        else:
            key, outcome, transaction_id, reported_s, why = words
            recorded = self.sent[key].recorded
            recorded.outcome, recorded.transaction_id = outcome, transaction_id
            recorded.reported_s, recorded.why = reported_s, why

    def feed_rows(self) -> list[tuple[int, int, bytes]]:
        """Return the partition, ID and request ID of each transaction of the feed, in order."""
        data = self._feed_path.read_bytes() if self._feed_path.exists() else b""
        complete_lines = data[: len(data) - len(data) % FEED_ENTRY.size]
        return [
            (partition, transaction_id, bytes(complete_lines[at + 12 : at + FEED_ENTRY.size]))
            for at, (partition, transaction_id, *_) in zip(
                range(0, len(complete_lines), FEED_ENTRY.size),
                FEED_ENTRY.iter_unpack(complete_lines),
                strict=True,
            )
        ]

    def first_commit_s(self, partition: int, since_s: float) -> float | None:
        """Return the time of the first reported commit of a row sent since `since_s`, or None."""
        return min(
            (
                message.recorded.reported_s
                for message in self.sent.values()
                if message.recorded.partition == partition
                and message.recorded.sent_s >= since_s
                and message.recorded.outcome == four_writers.OK
            ),
            default=None,
        )


@dataclass
class Log:
    """The transactions of the log, and the first IDs of its store sessions."""

    entries: list[Any] = field(default_factory=list)  # four_writers.Entry
    sessions: dict[int, list[int]] = field(default_factory=dict)  # partition -> first IDs
    records: dict[int, bytearray] = field(default_factory=dict)  # partition -> all, from ID 0 on
    # partition -> the offset at which each record begins, then the end of the last record
    offsets: dict[int, list[int]] = field(default_factory=dict)

    def last(self, partition: int) -> int:
        """Return the last ID of a partition."""
        return max((e.transaction_id for e in self.entries if e.partition == partition), default=-1)


def read_log(client: WaltzClient) -> Log:
    """Read the whole log in order."""
    log = Log()
    for partition, last in sorted(client.high_water_marks(linearizable=True).items()):
        firsts = log.sessions.setdefault(int(partition), [])
        records = log.records.setdefault(int(partition), bytearray())
        offsets = log.offsets.setdefault(int(partition), [0])
        session = None
        for chunk in client.read_range(partition, 0, last):
            log.entries += four_writers._entries(partition, bytes(chunk.records))
            records += chunk.records
            offsets += (offsets[-1] + np.cumsum(chunk.lengths)).tolist()
            for entry in chunk.lineage:
                if entry.session_id != session:
                    session = entry.session_id
                    firsts.append(int(entry.first))
    return log


def check_history(client_runs: Iterable[ClientRun], log: Log) -> Any:
    """Return the verdict on a whole history: its errors, and the counts."""
    client_runs = list(client_runs)
    sent = {key: message for client_run in client_runs for key, message in client_run.sent.items()}
    verdict = four_writers.compare([message.recorded for message in sent.values()], log.entries)
    _check_rejections(sent, log, verdict, client_runs=len(client_runs))
    _check_feeds(client_runs, log, verdict)
    _check_marks(client_runs, sent, log, verdict)
    verdict.counts["in the log"] = len(log.entries)
    verdict.counts["store sessions"] = sum(map(len, log.sessions.values()))
    return verdict


def _check_rejections(sent: dict[str, Sent], log: Log, verdict: Any, *, client_runs: int) -> None:
    """Check that each rejection has a conflict or a new store session (rule 1)."""
    writers: dict[tuple[int, int], list[tuple[int, float]]] = defaultdict(list)
    for entry in log.entries:
        content = four_writers.Content.from_bytes(entry.data)
        known = sent.get(content.key)
        sent_s = known.recorded.sent_s if known else 0.0
        for hashed in (*content.writes, *content.appends):
            writers[entry.partition, hashed].append((entry.transaction_id, sent_s))
    rejections_without_conflict: Counter[int] = Counter()
    for message in sent.values():
        recorded = message.recorded
        if recorded.outcome != four_writers.REJECTED:
            continue
        if any(
            transaction_id > message.mark and sent_s <= recorded.reported_s
            for hashed in message.locks
            for transaction_id, sent_s in writers.get((recorded.partition, hashed), ())
        ):
            continue
        if any(first - 1 > message.mark for first in log.sessions.get(recorded.partition, ())):
            rejections_without_conflict[recorded.partition] += 1
        else:
            verdict.wrong.append(
                f"{recorded.key} at mark {message.mark} of partition {recorded.partition} was "
                "rejected, although no client had written its locks"
            )
    for partition, count in rejections_without_conflict.items():
        sessions = len(log.sessions[partition])
        in_flight_max = sessions * client_runs * PENDING_MAX * BATCH_ROWS
        verdict.check(
            count <= in_flight_max,
            f"partition {partition}: expected at most {in_flight_max} rejections without a "
            f"conflict for {sessions} store sessions, found {count}",
        )
    verdict.counts["rejected by a new session"] = rejections_without_conflict.total()


def _check_feeds(client_runs: list[ClientRun], log: Log, verdict: Any) -> None:
    """Check that each feed is a prefix of the log (rule 2)."""
    known = {(entry.partition, entry.transaction_id): entry.request_id for entry in log.entries}
    ends = {partition: log.last(partition) for partition in log.sessions}
    for client_run in client_runs:
        following: Counter[int] = Counter()
        wrong = []
        for partition, transaction_id, request_id in client_run.feed_rows():
            if transaction_id != following[partition]:
                wrong.append(
                    f"{client_run.name} was fed {partition}/{transaction_id}, expected "
                    f"{following[partition]}"
                )
            if known.get((partition, transaction_id)) != request_id:
                wrong.append(
                    f"{client_run.name} was fed another transaction at {partition}/{transaction_id}"
                )
            following[partition] = transaction_id + 1
        verdict.counts["fed"] += following.total()
        if not client_run.has_ended:
            wrong += [
                f"{client_run.name} was fed partition {partition} up to "
                f"{following[partition] - 1}, its end is {end}"
                for partition, end in ends.items()
                if following[partition] != end + 1
            ]
        verdict.wrong += wrong[:ERRORS_PER_RUN_MAX]


def _check_marks(
    client_runs: list[ClientRun], sent: dict[str, Sent], log: Log, verdict: Any
) -> None:
    """Check that each high-water mark covers all earlier commits (rule 3)."""
    recorded: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for message in sent.values():
        if message.recorded.outcome == four_writers.OK:
            recorded[message.recorded.partition].append(
                (message.recorded.reported_s, message.recorded.transaction_id)
            )
    times, highest = {}, {}
    for partition, commits in recorded.items():
        commits.sort()
        times[partition] = [reported_s for reported_s, _ in commits]
        top, tops = -1, []
        for _, transaction_id in commits:
            top = max(top, transaction_id)
            tops.append(top)
        highest[partition] = tops
    for client_run in client_runs:
        for request in client_run.mark_requests:
            verdict.counts["requested marks"] += 1
            before = bisect_right(times.get(request.partition, []), request.requested_s)
            lowest_allowed = highest[request.partition][before - 1] if before else -1
            verdict.check(
                lowest_allowed <= request.mark <= log.last(request.partition),
                f"{client_run.name} received mark {request.mark} of partition {request.partition}, "
                f"expected {lowest_allowed} or more, up to {log.last(request.partition)}",
            )


def longest_gap_s(
    client_runs: Iterable[ClientRun], partition: int, *, since_s: float, until_s: float
) -> float:
    """Return the longest time in which no client received a commit in a partition."""
    recorded = sorted(
        message.recorded.reported_s
        for client_run in client_runs
        for message in client_run.sent.values()
        if message.recorded.outcome == four_writers.OK
        and message.recorded.partition == partition
        and since_s <= message.recorded.reported_s <= until_s
    )
    moments = [since_s, *recorded, until_s]
    return max(later - earlier for earlier, later in pairwise(moments))
