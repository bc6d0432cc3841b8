"""Reads a change feed in a task: moves a feed state to the start of the rows, then yields them.

Rules (docs/decisions/049-tables-that-follow-the-log.md, "Change feed"):
    1. A batch has a private state, and reads the log from its first available transaction.
    2. A micro-batch uses the file of its query, partition and rules, and moves the state in it to
       its start. A state at a later mark returns to the mark before; if that is later, too, it is
       built again.
    3. Without a file, and if the file is in use or fails, the state is private. The rows are the
       same ones. A file that fails is deleted.
    4. A state on the way to the start is committed every 1,000,000 transactions.
"""

import sqlite3
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.types import StructType

from waltz_core.errors import Unavailable
from waltz_spark.datasource.change_feed import ChangeFeed, payload_fields
from waltz_spark.datasource.feed_state import (
    FeedState,
    cached_state,
    discard,
    private_state,
    state_file,
)
from waltz_spark.options import ReadOptions
from waltz_spark.rows import is_case_sensitive

COMMIT_TRANSACTIONS = 1_000_000
# Yields the transactions first..last of a partition.
ReadLog = Callable[[int, int], Iterator[pa.RecordBatch]]


class FeedSpan(NamedTuple):
    """The part of a partition's log whose rows a task yields: the transactions after `begin`.

    `first_available` is the first transaction that the log has; nothing before it is read.
    """

    first_available: int
    begin: int
    end: int


class FeedReader:
    """Reads the rows of one task; once.

    Args:
        feed: makes the rows.
        read: reads the columns `feed.columns` of the log.
        span: what to yield.
        file: where to cache the state (rule 2); None: nowhere.
    """

    def __init__(self, feed: ChangeFeed, read: ReadLog, span: FeedSpan, file: Path | None) -> None:
        self._feed = feed
        self._read = read
        self._span = span
        self._file = file
        self._done = span.begin  # rows were yielded up to here

    def rows(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows.

        Raises:
            BadFormat: a transaction is not a change.
            Unavailable: there is no space for the state.
            The errors of `read`.
        """
        if self._file is not None and (state := cached_state(self._file)) is not None:
            try:
                yield from self._rows(state)
            except sqlite3.Error as error:
                state.close()
                discard(self._file, error)  # rule 3
            finally:
                state.close()
            if self._done == self._span.end:
                return
        state = private_state()
        try:
            yield from self._rows(state)
        except sqlite3.Error as error:
            raise Unavailable(
                f"the feed state cannot be written to the directory for temporary files: {error}. "
                "Hint: free space there, or set TMPDIR of the executors to a larger disk."
            ) from error
        finally:
            state.close()

    def _rows(self, state: FeedState) -> Iterator[pa.RecordBatch]:
        self._move(state, self._done)
        begin = state.mark
        for batch in self._read(self._done + 1, self._span.end):
            for last, rows in self._feed.rows(batch, state):
                self._done = last
                yield rows
        self._done = self._span.end
        state.commit(self._done, previous=begin)

    def _move(self, state: FeedState, mark: int) -> None:
        """Move a state to a mark, without rows (rules 2 and 4)."""
        state.first_available = self._span.first_available
        if state.mark > mark and state.previous > mark:
            state.clear()
        elif state.mark > mark:
            state.restore()
        state.begin()
        first = max(state.mark + 1, self._span.first_available)
        while first <= mark:
            last = min(first + COMMIT_TRANSACTIONS - 1, mark)
            for batch in self._read(first, last):
                self._feed.skip(batch, state)
            state.commit(last, previous=last)
            first = last + 1


def query_of_task() -> str | None:
    """Return the ID of the streaming query to which the task belongs; None if it has none."""
    context = TaskContext.get()
    return None if context is None else context.getLocalProperty("sql.streaming.queryId")


def feed_state_file(
    query: str | None, cluster_key: bytes, partition: int, options: ReadOptions, schema: StructType
) -> Path | None:
    """Return the file for the state of a query; its name depends on what the state depends on.

    None if the state is private: there is no query, or no directory for it.
    """
    if query is None:
        return None
    parts = (
        query,
        cluster_key.hex(),
        options.feed,
        options.headers,
        options.data_format,
        options.registry,
        [(part.name, str(part.type), part.nullable) for part in payload_fields(options, schema)],
        options.on_corrupt,
        options.required_columns,
        options.encryption_keys,
        options.encryption_required,
        is_case_sensitive(),
    )
    return state_file(f"{partition}-{sha256(repr(parts).encode()).hexdigest()[:32]}")
