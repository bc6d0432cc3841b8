"""The rows of a change feed equal a replay of the log, wherever reads start and tasks end.

The logs are random, with upserts, deletes and payloads that do not match the schema, in random
Arrow batches. A stream has random micro-batches. Its tasks run on two machines, end before their
last row, run again, and find files that were deleted or damaged. Batches begin at any ID.
"""

import tempfile
from itertools import islice
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import msgpack
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.spark.feeds import (
    DELETE_HEADER,
    Log,
    Transaction,
    expected_rows,
    reader,
    rows_between,
    rows_of,
)
from waltz_spark.datasource import change_feed, feed_read

MODE = {"mode": "DROPMALFORMED"}
PAYLOADS = st.fixed_dictionaries(
    {"id": st.sampled_from((0, 1, 2, 3, None))},
    optional={
        "op": st.sampled_from(("I", "U", "D", None)),
        "amount": st.one_of(st.integers(0, 9), st.just("x" * 9)),
    },
)
TRANSACTIONS = st.builds(
    Transaction,
    st.sampled_from((0, 0, 0, 0, DELETE_HEADER)),
    st.one_of(*[PAYLOADS.map(msgpack.packb)] * 5, st.sampled_from((b"\xc1", b"\x01"))),
)
LOGS = st.lists(TRANSACTIONS, min_size=10, max_size=40)


class Turn(NamedTuple):
    """A task of a micro-batch, and the fault of its machine's file before the task."""

    machine: int
    count: int  # the transactions of the micro-batch
    batches_read: int | None  # the task ends after this number; None: it succeeds
    is_accepted: bool  # False: the micro-batch runs again, although the task has succeeded
    fault: str


TURNS = st.lists(
    st.builds(
        Turn,
        st.sampled_from((0, 0, 1)),
        st.integers(1, 15),
        st.sampled_from((None, None, None, 0, 1, 3)),
        st.booleans(),
        st.sampled_from(("", "", "", "", "deleted", "cut", "zeroed")),
    ),
    min_size=5,
    max_size=12,
)


def spoil(file: Path, fault: str) -> None:
    if not fault or not file.exists():
        return
    content = file.read_bytes()
    if fault == "deleted":
        file.unlink()
    elif fault == "cut":
        file.write_bytes(content[: len(content) // 2])
    else:
        file.write_bytes(content[:4096] + bytes(len(content[4096:])))


@given(
    LOGS,
    st.integers(-1, 9),
    TURNS,
    st.integers(1, 12),
    st.integers(1, 9),
    st.sampled_from((1, 30, 10**6)),
)
def test_streamed_and_batch_change_feeds_have_the_rows_of_a_replay(
    transactions: list[Transaction],
    start: int,
    turns: list[Turn],
    batch_rows: int,
    commit_transactions: int,
    previous_bytes_max: int,
) -> None:
    log = Log(transactions, batch_rows)
    expected = expected_rows(transactions)
    begin = min(start, log.mark)
    with (
        tempfile.TemporaryDirectory() as directory,
        patch.object(feed_read, "TRANSACTIONS_PER_COMMIT", commit_transactions),
        patch.object(change_feed, "PREVIOUS_BYTES_MAX", previous_bytes_max),
    ):
        batch = rows_of(reader(log, begin, log.mark, **MODE).rows())
        assert batch == rows_between(expected, begin, log.mark)
        for turn in turns:
            file = Path(directory, f"{turn.machine}.sqlite")
            spoil(file, turn.fault)
            end = min(begin + turn.count, log.mark)
            rows = reader(log, begin, end, file, **MODE).rows()
            if turn.batches_read is not None:
                rows_of(islice(rows, turn.batches_read))
                rows.close()  # type: ignore[attr-defined]
                continue
            assert rows_of(rows) == rows_between(expected, begin, end)
            if turn.is_accepted:
                begin = end
