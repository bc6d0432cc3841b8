"""When large batches may start: at once, or one at a time with pauses for small ones."""

import pytest

from waltz_core.server.append.large_batch_throttle import (
    BASELINE_KEPT_MS,
    FACTOR_FIRST,
    FACTOR_MAX,
    FACTOR_MIN,
    PAUSE_MS_MAX,
    PIECE_BYTES,
    SHARED_MS,
    STALLED_MS,
    LargeBatchThrottle,
)
from waltz_core.server.partition_events import ConnectionId

FLOOD, MODEST = ConnectionId(1), ConnectionId(2)


def shared(now_ms: int = 0) -> LargeBatchThrottle:
    """A pace that has seen a small request during another client's large one."""
    pace = LargeBatchThrottle()
    pace.started(FLOOD, now_ms)
    pace.finished(now_ms, now_ms)
    pace.small(MODEST, now_ms)
    return pace


@pytest.mark.parametrize(
    ("flood_ms", "finished_ms", "small"),
    [
        ([0, 1, 2], None, None),
        ([], None, (MODEST, 2)),
        ([0], None, (FLOOD, 1)),
        ([0], 5, (MODEST, SHARED_MS)),
    ],
    ids=["large ones alone", "small ones alone", "of one client", "large ones of long ago"],
)
def test_large_requests_are_not_delayed_without_small_ones_of_others(
    flood_ms: list[int], finished_ms: int | None, small: tuple[ConnectionId, int] | None
) -> None:
    pace = LargeBatchThrottle()
    for now_ms in flood_ms:
        pace.started(FLOOD, now_ms)
    if finished_ms is not None:
        pace.finished(flood_ms[0], finished_ms)
    if small is not None:
        pace.small(*small)
    now_ms = small[1] if small else 3
    assert pace.large_at_ms(now_ms) == now_ms
    assert pace.piece_bytes(now_ms) is None


def test_without_sharing_no_request_is_delayed() -> None:
    pace = LargeBatchThrottle(is_on=False)
    pace.started(FLOOD, 0)
    pace.small(MODEST, 0)
    assert pace.large_at_ms(0) == 0
    assert pace.piece_bytes(0) is None


def test_large_requests_on_a_shared_server_go_in_pieces_one_at_a_time() -> None:
    pace = shared()
    assert pace.piece_bytes(100) == PIECE_BYTES
    pace.started(FLOOD, 100)
    asked_ms = 100
    for _ in range(3):
        next_ms = pace.large_at_ms(asked_ms)
        assert next_ms > asked_ms
        asked_ms = next_ms


@pytest.mark.parametrize("took_ms", [0, 1, 7, 900])
def test_after_each_piece_there_is_a_limited_pause_in_proportion(took_ms: int) -> None:
    pace = shared()
    pace.small(MODEST, 100)
    pace.started(FLOOD, 100)
    finished_ms = 100 + took_ms
    pace.finished(100, finished_ms)
    pace.small(MODEST, finished_ms)
    pause_ms = pace.large_at_ms(finished_ms) - finished_ms
    assert pause_ms == min(FACTOR_FIRST * max(took_ms, 1), PAUSE_MS_MAX)
    assert pace.large_at_ms(finished_ms + pause_ms) == finished_ms + pause_ms


def test_a_forgotten_piece_delays_no_request() -> None:
    pace = shared()
    pace.started(FLOOD, 100)
    pace.forgotten()
    assert pace.large_at_ms(100) == 100
    with pytest.raises(AssertionError):
        pace.forgotten()


def test_the_wait_for_a_hanging_piece_is_limited() -> None:
    pace = shared()
    pace.started(FLOOD, 100)
    pace.small(MODEST, 900)
    assert pace.large_at_ms(100 + STALLED_MS - 1) > 100 + STALLED_MS - 1
    assert pace.large_at_ms(100 + STALLED_MS) == 100 + STALLED_MS


def test_sharing_ends_without_small_requests() -> None:
    pace = shared(50)
    assert pace.piece_bytes(50 + SHARED_MS - 1) == PIECE_BYTES
    pace.started(FLOOD, 50 + SHARED_MS)
    assert pace.large_at_ms(50 + SHARED_MS) == 50 + SHARED_MS
    assert pace.piece_bytes(50 + SHARED_MS) is None


def steered(took_ms: list[int]) -> LargeBatchThrottle:
    """A pace whose small requests took 5 ms while calm, and then a given time during a piece."""
    pace = shared()
    for start_ms in range(100, 60_100, 10):
        pace.small_finished(start_ms, start_ms + 5)
    pace.started(FLOOD, 60_100)
    for each_ms in took_ms:
        pace.small_finished(60_100, 60_100 + each_ms)
    return pace


def test_slow_small_requests_lengthen_the_pauses_for_a_while() -> None:
    assert steered([9]).factor > FACTOR_FIRST
    assert steered([500] * 100).factor == FACTOR_MAX


def test_fast_small_requests_shorten_the_pauses() -> None:
    assert steered([6]).factor < FACTOR_FIRST
    assert steered([6] * 5_000).factor == FACTOR_MIN


def test_one_slow_request_in_two_hundred_does_not_change_the_pauses() -> None:
    assert steered(([6] * 199 + [30]) * 3).factor == pytest.approx(FACTOR_FIRST)


def test_the_calm_time_is_the_99th_percentile_of_the_latency() -> None:
    pace = shared()
    for start_ms in range(100, 200_100, 10):
        slow = 20 if start_ms % 500 == 0 else 5  # one in fifty
        pace.small_finished(start_ms, start_ms + slow)
    pace.started(FLOOD, 200_100)
    pace.small_finished(200_100, 200_123)
    assert pace.factor < FACTOR_FIRST  # not a fifth more than 20 ms
    pace.small_finished(200_100, 200_140)
    assert pace.factor > FACTOR_FIRST


def test_times_during_a_piece_do_not_count_as_calm() -> None:
    pace = shared()
    pace.started(FLOOD, 100)
    pace.small_finished(100, 200)
    pace.finished(100, 200)
    pace.small_finished(190, 250)  # a piece was in flight when it came
    assert pace.factor < FACTOR_FIRST  # nothing is known yet of what is calm
    pace.small_finished(201, 206)
    pace.small_finished(190, 250)
    assert pace.factor > FACTOR_FIRST


def after_a_long_flood(for_ms: int) -> LargeBatchThrottle:
    """A pace whose small requests took 5 ms while calm, and 9 ms during a flood of a given time."""
    pace = steered([])
    pace.finished(60_100, 60_105)
    for start_ms in range(60_110, 60_110 + for_ms, 10):
        if start_ms % 500 == 0:
            pace.started(FLOOD, start_ms)
            pace.finished(start_ms, start_ms)
        pace.small(MODEST, start_ms)
        pace.small_finished(start_ms + 1, start_ms + 10)  # it met no piece
    pace.started(FLOOD, 60_110 + for_ms)
    return pace


def test_during_a_flood_the_calm_time_is_kept_for_a_while() -> None:
    pace = after_a_long_flood(BASELINE_KEPT_MS - 2 * SHARED_MS)
    factor = pace.factor
    pace.small_finished(200_000, 200_009)
    assert pace.factor > factor


def test_a_calm_time_of_long_ago_is_not_trusted() -> None:
    pace = after_a_long_flood(BASELINE_KEPT_MS + 20_000)
    factor = pace.factor
    pace.small_finished(200_000, 200_009)
    assert pace.factor < factor
