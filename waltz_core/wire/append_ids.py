"""The IDs of appends as text, so that an append can be found in the logs of all processes.

The text of a request ID is `client.generation.partition.sequence`. Consecutive IDs are joined into
a run: `17.3.0.40..55` stands for 16 rows of one client.
"""

from itertools import pairwise
from typing import Final

import numpy as np

from waltz_core.records.raw_records import lengths_from_wire, req_ids_of
from waltz_core.wire.messages import AppendRaw, AppendResult

# The maximum number of runs in a text: a batch may have one row of each of many clients.
RUNS_MAX: Final = 8
RUNS_IN_LINE_MAX: Final = 100


class SlowAppends:
    """The slow appends of one replica that the next log line reports."""

    def __init__(self) -> None:
        self.count = 0
        self._took_ms = 0
        self._first, self._last = 0, 0
        self._runs: list[str] = []

    def add(self, append: AppendRaw, took_ms: int) -> None:
        """Add an append that the replica has acknowledged late."""
        last = append.lineage[-1].last
        self._first = min(self._first, append.first) if self.count else append.first
        self._last = max(self._last, last) if self.count else last
        self._took_ms = max(self._took_ms, took_ms)
        self.count += 1
        if len(self._runs) <= RUNS_IN_LINE_MAX:
            self._runs += _runs_of_requests(append, RUNS_IN_LINE_MAX + 1)

    def fields(self) -> tuple[tuple[str, object], ...]:
        """Return the fields of the log line."""
        return (
            ("took_ms", self._took_ms),
            ("count", self.count),
            ("first", self._first),
            ("last", self._last),
            ("requests", _join_runs(self._runs, RUNS_IN_LINE_MAX)),
        )


def request_ids_text(append: AppendRaw) -> str:
    """Return the request IDs of the records that an owner sends to a storage."""
    return _join_runs(_runs_of_requests(append, RUNS_MAX + 1), RUNS_MAX)


def _runs_of_requests(append: AppendRaw, count_max: int) -> list[str]:
    ids = req_ids_of(append.records, lengths_from_wire(append.lengths, len(append.records)))
    rows = [tuple(row) for row in ids.tolist()]
    starts = [
        index
        for index, (before, row) in enumerate(pairwise(rows), start=1)
        if row[:3] != before[:3] or row[3] != before[3] + 1
    ]
    run_bounds = [*pairwise([0, *starts, len(rows)])]
    return [
        ".".join(map(str, rows[first][:3])) + "." + _run(rows[first][3], rows[end - 1][3])
        for first, end in run_bounds[:count_max]
    ]


def committed_ids_text(result: AppendResult) -> str:
    """Return the transaction IDs of the committed rows of an append; "-" if there are none."""
    ids = np.frombuffer(result.transaction_ids, dtype=">i8")
    ids = ids[ids >= 0].astype(np.int64)
    if not ids.size:
        return "-"
    parts = np.split(ids, np.flatnonzero(np.diff(ids) != 1) + 1)
    runs = [_run(int(part[0]), int(part[-1])) for part in parts[: RUNS_MAX + 1]]
    return _join_runs(runs, RUNS_MAX)


def _run(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}..{last}"


def _join_runs(runs: list[str], count_max: int) -> str:
    return ",".join([*runs[:count_max], "..."] if len(runs) > count_max else runs)
