"""The IDs of appends as text, for log lines: an append has the same request IDs in every process.

The text of a request ID is `client.generation.partition.sequence`. Consecutive IDs are one run,
such as `17.3.0.40..55`, which is 16 rows of one client.
"""

from itertools import pairwise
from typing import Final

import numpy as np

from waltz_core.records.raw_records import lengths_from_wire, req_ids_of
from waltz_core.wire.messages import AppendRaw, AppendResult

# Further runs are omitted: a batch may have one row of each of many clients.
RUNS_MAX: Final = 8


def request_ids_text(append: AppendRaw) -> str:
    """Return the request IDs of the records that an owner sends to a storage."""
    ids = req_ids_of(append.records, lengths_from_wire(append.lengths, len(append.records)))
    rows = [tuple(row) for row in ids.tolist()]
    starts = [
        at
        for at, (before, row) in enumerate(pairwise(rows), start=1)
        if row[:3] != before[:3] or row[3] != before[3] + 1
    ]
    bounds = [*pairwise([0, *starts, len(rows)])]
    return _joined(
        [
            ".".join(map(str, rows[first][:3])) + "." + _run(rows[first][3], rows[end - 1][3])
            for first, end in bounds[: RUNS_MAX + 1]
        ]
    )


def committed_ids_text(result: AppendResult) -> str:
    """Return the transaction IDs of the committed rows of an append; "-" if there are none."""
    ids = np.frombuffer(result.transaction_ids, dtype=">i8")
    ids = ids[ids >= 0].astype(np.int64)
    if not ids.size:
        return "-"
    parts = np.split(ids, np.flatnonzero(np.diff(ids) != 1) + 1)
    return _joined([_run(int(part[0]), int(part[-1])) for part in parts[: RUNS_MAX + 1]])


def _run(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}..{last}"


def _joined(runs: list[str]) -> str:
    return ",".join([*runs[:RUNS_MAX], "..."] if len(runs) > RUNS_MAX else runs)
