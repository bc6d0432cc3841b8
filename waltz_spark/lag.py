"""The lag of a stream: the marks of the log minus the position of the stream.

It is computed from Spark's progress reports in the user's process, without requests to the log.
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

from waltz_spark.offsets import StreamOffset, decode

_log = logging.getLogger("waltz")

Lags = dict[int, int]


def lag_of(progress: StreamingQueryProgress | Mapping[str, Any]) -> list[Lags]:
    """Return the number of transactions that each source has not read yet, by partition.

    It has one entry for each source that is a log, in the query's order. `progress` is
    `query.lastProgress`, or that of a listener's event.
    """
    found: list[Lags] = []
    for source in progress["sources"]:
        latest, end = (offset_of(source[name]) for name in ("latestOffset", "endOffset"))
        if latest is not None and end is not None:
            # The latest offset was requested earlier: the stream may be ahead of it.
            ends = end.marks
            found.append(
                {each: max(0, mark - ends.get(each, -1)) for each, mark in latest.marks.items()}
            )
    return found


def offset_of(offset: object) -> StreamOffset | None:
    """Return an offset in a query's progress; None for another source's."""
    try:
        parsed = json.loads(offset) if isinstance(offset, str) else offset
        if not isinstance(parsed, Mapping):
            return None
        return decode(parsed)
    except (ValueError, TypeError):
        return None


class LagListener(StreamingQueryListener):
    """Keeps the lag of every running query, and optionally reports it.

        listener = LagListener()
        spark.streams.addListener(listener)
        listener.lags  # {query ID: [{partition: transactions behind}]}

    A query that reads several logs has an entry for each, in the query's order, like `lag_of`.

    Args:
        on_lag: called at each progress with a query's ID and its logs' lags by partition.
    """

    def __init__(self, on_lag: Callable[[str, list[Lags]], None] | None = None) -> None:
        self._on_lag = on_lag
        self._lock = threading.Lock()
        self._lags: dict[str, list[Lags]] = {}

    @property
    def lags(self) -> dict[str, list[Lags]]:
        """The lags by query ID, log and partition, as of each query's last progress."""
        with self._lock:
            return {query: [dict(each) for each in lags] for query, lags in self._lags.items()}

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 - Spark's name
        """Do nothing yet."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802 - Spark's name
        """Record a query's progress."""
        query, lags = str(event.progress.id), lag_of(event.progress)
        with self._lock:
            self._lags[query] = lags
        _log.debug("spark.query_lag query=%s lags=%s", query, lags)
        if self._on_lag is not None:
            self._on_lag(query, [dict(each) for each in lags])

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802 - Spark's name
        """Do nothing: the last lag is still valid."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802 - Spark's name
        """Remove the query."""
        with self._lock:
            self._lags.pop(str(event.id), None)
