"""Reads a change feed in a task: moves the feed state to the start, then yields the rows.

Rules (docs/decisions/049-tables-that-follow-the-log.md, "Change feed"):
    1. The task of a batch read has a private state, and reads the log from its first available
       transaction.
    2. The task of a micro-batch uses the state file of its query, partition and rules. It moves the
       state to the start of the micro-batch. If the state is past this start, the state returns to
       its previous mark. If the previous mark is past the start, too, the task rebuilds the state.
    3. The state is private if there is no file, if another task uses the file, or if SQLite reports
       an error. The rows are the same. After an error of SQLite, the file is deleted.
    4. While the state moves to the start, it is committed every 1,000,000 transactions.
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
    create_private_state,
    discard_file,
    open_cached_state,
    state_file_path,
)
from waltz_spark.options import ReadOptions
from waltz_spark.rows import is_case_sensitive

TRANSACTIONS_PER_COMMIT = 1_000_000
# Yields transactions first..last of a partition; the arguments are first and last.
ReadLog = Callable[[int, int], Iterator[pa.RecordBatch]]


class FeedSpan(NamedTuple):
    """The part of a partition's log for which a task yields rows: `start_mark` + 1 to `end_mark`.

    `first_available` is the first available ID of the log; nothing before it is read.
    """

    first_available: int
    start_mark: int
    end_mark: int


class FeedReader:
    """Reads the rows of one task; an object can be used once.

    Args:
        feed: computes the rows.
        read: reads the columns `feed.columns` of the log.
        span: the range of the log for which to yield rows.
        file: the file that caches the state (rule 2); None: no cache.
    """

    def __init__(self, feed: ChangeFeed, read: ReadLog, span: FeedSpan, file: Path | None) -> None:
        self._feed = feed
        self._read = read
        self._span = span
        self._file = file
        self._last_yielded_id = span.start_mark  # the ID up to which rows were yielded

    def rows(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows.

        Raises:
            BadFormat: a transaction is not a change.
            Unavailable: the disk has no space for the state.
            The errors of `read`.
        """
        if self._file is not None and (state := open_cached_state(self._file)) is not None:
            try:
                yield from self._rows_from(state)
            except sqlite3.Error as error:
                state.close()
                discard_file(self._file, error)  # rule 3
            finally:
                state.close()
            if self._last_yielded_id == self._span.end_mark:
                return
        state = create_private_state()
        try:
            yield from self._rows_from(state)
        except sqlite3.Error as error:
            raise Unavailable(
                f"the feed state cannot be written to the directory for temporary files: {error}. "
                "Hint: free space there, or set TMPDIR of the executors to a larger disk."
            ) from error
        finally:
            state.close()

    def _rows_from(self, state: FeedState) -> Iterator[pa.RecordBatch]:
        self._move_state(state, self._last_yielded_id)
        begin = state.mark
        for batch in self._read(self._last_yielded_id + 1, self._span.end_mark):
            for last, rows in self._feed.rows(batch, state):
                self._last_yielded_id = last
                yield rows
        self._last_yielded_id = self._span.end_mark
        state.commit(self._last_yielded_id, previous_mark=begin)

    def _move_state(self, state: FeedState, mark: int) -> None:
        """Move the state to a mark, without yielding rows (rules 2 and 4)."""
        state.first_available = self._span.first_available
        if state.mark > mark and state.previous_mark > mark:
            state.clear()
        elif state.mark > mark:
            state.return_to_previous_mark()
        state.delete_replaced_rows()
        first = max(state.mark + 1, self._span.first_available)
        while first <= mark:
            last = min(first + TRANSACTIONS_PER_COMMIT - 1, mark)
            for batch in self._read(first, last):
                self._feed.apply_to_state(batch, state)
            state.commit(last, previous_mark=last)
            first = last + 1


def streaming_query_id() -> str | None:
    """Return the ID of the streaming query to which the task belongs; None if it has none."""
    context = TaskContext.get()
    return None if context is None else context.getLocalProperty("sql.streaming.queryId")


def feed_state_file(
    query: str | None, cluster_key: bytes, partition: int, options: ReadOptions, schema: StructType
) -> Path | None:
    """Return the file for the state of a query, named by a hash of all that determines the state.

    The result is None if the state must be private: without a query, or without a directory for it.
    """
    if query is None:
        return None
    parts = (
        query,
        cluster_key.hex(),
        options.change_feed_rules,
        options.headers,
        options.data_format,
        options.registry,
        [(part.name, str(part.type), part.nullable) for part in payload_fields(options, schema)],
        options.corrupt_payload_mode,
        options.required_columns,
        options.encryption_keys,
        options.requires_encryption,
        is_case_sensitive(),
    )
    return state_file_path(f"{partition}-{sha256(repr(parts).encode()).hexdigest()[:32]}")
