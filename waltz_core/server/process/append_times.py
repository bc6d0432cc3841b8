"""Measures the append latency of each storage over the last minute.

Rules:
    1. The latency of a storage covers all partitions of this server, because they share the
       storage's disk.
    2. For each second in which a storage answered, its mean latency is computed. The latency of the
       storage is the median of these mean latencies. So a storage that was frozen once, and then
       answered all queued appends, does not count as slow.
    3. Memory is bounded: 60 numbers for each storage of the cluster.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from statistics import median
from typing import Final, NamedTuple

from waltz_core.records.record import ReplicaId

WINDOW_S: Final = 60


class AppendTime(NamedTuple):
    """The latency of one storage: its median, and the number of seconds in which it answered."""

    replica: ReplicaId
    second_count: int
    median_us: int


@dataclass(slots=True)
class _Second:
    """The appends of one storage in one second."""

    number: int
    count: int = 0
    total_ms: int = 0


class AppendTimes:
    """The append latencies of all storages, by the module's rules."""

    def __init__(self) -> None:
        self._seconds: dict[ReplicaId, deque[_Second]] = {}

    def add(self, replica: ReplicaId, took_ms: Collection[int], now_ms: int) -> None:
        """Add the latencies of appends that a storage has answered."""
        second_number = now_ms // 1000
        seconds = self._seconds.setdefault(replica, deque(maxlen=WINDOW_S))
        if not seconds or seconds[-1].number != second_number:
            seconds.append(_Second(second_number))
        seconds[-1].count += len(took_ms)
        seconds[-1].total_ms += sum(took_ms)

    def recent_append_times(self, now_ms: int) -> list[AppendTime]:
        """Return the latencies of storages that answered in the last minute, sorted by name."""
        append_times = []
        for replica, seconds in sorted(self._seconds.items()):
            means_ms = [
                second.total_ms / second.count
                for second in seconds
                if second.count and second.number > now_ms // 1000 - WINDOW_S
            ]
            if means_ms:
                median_us = round(median(means_ms) * 1000)
                append_times.append(AppendTime(replica, len(means_ms), median_us))
        return append_times
