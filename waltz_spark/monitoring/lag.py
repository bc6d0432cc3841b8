"""The lag of a stream: the high-water marks of the log minus the position of the stream.

The lag is computed in the user's process from Spark's progress reports, without requests to the
log.
"""

import json
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
    StreamingQueryProgress,
)

from waltz_spark.offsets import StreamOffset, decode_offset

_log = logging.getLogger("waltz")

LagByPartition = dict[int, int]  # the number of transactions that were not read yet, by partition


def lag_of(progress: StreamingQueryProgress | Mapping[str, Any]) -> list[LagByPartition]:
    """Return the number of unread transactions of each source, by partition.

    The list has one entry for each source that is a log, in the order of the query. `progress` is
    `query.lastProgress`, or the progress in an event of a listener.
    """
    lags: list[LagByPartition] = []
    for source in progress["sources"]:
        latest, end = (
            parse_progress_offset(source[name]) for name in ("latestOffset", "endOffset")
        )
        if latest is not None and end is not None:
            # Spark requested the latest offset earlier: the stream may be past it by now.
            ends = end.marks
            lags.append(
                {
                    partition: max(0, mark - ends.get(partition, -1))
                    for partition, mark in latest.marks.items()
                }
            )
    return lags


def parse_progress_offset(offset: object) -> StreamOffset | None:
    """Return an offset in a query's progress; None if the offset is not from Waltz."""
    try:
        parsed_offset = json.loads(offset) if isinstance(offset, str) else offset
        if not isinstance(parsed_offset, Mapping):
            return None
        return decode_offset(parsed_offset)
    except (ValueError, TypeError):
        return None


class LagListener(StreamingQueryListener):
    """Records the lag of every running query, and optionally passes it to a callback.

        listener = LagListener()
        spark.streams.addListener(listener)
        listener.lags  # {query ID: [{partition: transactions behind}]}

    If a query reads several logs, its list has an entry for each, as in the result of `lag_of`.

    Args:
        on_lag: called at each progress report, with the query's ID and the lags of its logs.
    """

    def __init__(self, on_lag: Callable[[str, list[LagByPartition]], None] | None = None) -> None:
        self._on_lag = on_lag
        self._lock = threading.Lock()
        self._lags: dict[str, list[LagByPartition]] = {}

    @property
    def lags(self) -> dict[str, list[LagByPartition]]:
        """The lags by query ID, log and partition, as of the last progress report of each query."""
        with self._lock:
            return {query: [dict(lag) for lag in lags] for query, lags in self._lags.items()}

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 - Spark's name
        """Do nothing: a query has no lag before its first progress report."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802 - Spark's name
        """Record the lag in a progress report, and pass it to the callback."""
        query, lags = str(event.progress.id), lag_of(event.progress)
        with self._lock:
            self._lags[query] = lags
        _log.debug("spark.query_lag query=%s lags=%s", query, lags)
        if self._on_lag is not None:
            self._on_lag(query, [dict(lag) for lag in lags])

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802 - Spark's name
        """Do nothing: the last recorded lag is still valid."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802 - Spark's name
        """Remove the lag of a query that has ended."""
        with self._lock:
            self._lags.pop(str(event.id), None)
