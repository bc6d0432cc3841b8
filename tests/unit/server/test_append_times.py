"""Measurement of the storages' append latencies."""

from waltz_core.records.record import ReplicaId
from waltz_core.server.process.append_times import WINDOW_S, AppendTime, AppendTimes

SLOW, FAST = ReplicaId("10.0.0.1:5280"), ReplicaId("10.0.0.2:5280")


def test_the_latency_of_a_storage_is_the_median_of_its_one_second_means() -> None:
    times = AppendTimes()
    for second in range(20):
        for _partition in range(2):
            times.add(SLOW, [100, 300], second * 1000)
            times.add(FAST, [1, 2], second * 1000)
    assert times.recent_append_times(19_500) == [
        AppendTime(SLOW, 20, 200_000),
        AppendTime(FAST, 20, 1_500),
    ]


def test_a_storage_that_was_frozen_once_is_not_slow() -> None:
    times = AppendTimes()
    for second in range(20):
        times.add(SLOW, [8_000] * 64 if second == 9 else [2], second * 1000)
    assert times.recent_append_times(20_000) == [AppendTime(SLOW, 20, 2_000)]


def test_times_older_than_the_window_are_forgotten() -> None:
    times = AppendTimes()
    times.add(SLOW, [500], 0)
    times.add(SLOW, [4], 30_000)
    assert times.recent_append_times(WINDOW_S * 1000) == [AppendTime(SLOW, 1, 4_000)]
    assert times.recent_append_times(2 * WINDOW_S * 1000) == []
