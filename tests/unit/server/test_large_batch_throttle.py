"""Large batches start at once, or one at a time with pauses for small requests."""

import pytest

from waltz_core.server.append.large_batch_throttle import (
    BASELINE_KEPT_MS,
    PAUSE_FACTOR_FIRST,
    PAUSE_FACTOR_MAX,
    PAUSE_FACTOR_MIN,
    PAUSE_MS_MAX,
    PIECE_BYTES,
    PIECE_WAIT_MS_MAX,
    SHARED_PERIOD_MS,
    LargeBatchThrottle,
)
from waltz_core.server.partition_events import ConnectionId

FLOOD, MODEST = ConnectionId(1), ConnectionId(2)


def shared_throttle(now_ms: int = 0) -> LargeBatchThrottle:
    """A throttle that has seen a small request during another client's large one."""
    throttle = LargeBatchThrottle()
    throttle.on_large_batch_started(FLOOD, now_ms)
    throttle.on_large_batch_finished(now_ms, now_ms)
    throttle.on_small_request_started(MODEST, now_ms)
    return throttle


@pytest.mark.parametrize(
    ("flood_ms", "finished_ms", "small"),
    [
        ([0, 1, 2], None, None),
        ([], None, (MODEST, 2)),
        ([0], None, (FLOOD, 1)),
        ([0], 5, (MODEST, SHARED_PERIOD_MS)),
    ],
    ids=["large ones alone", "small ones alone", "of one client", "large ones of long ago"],
)
def test_large_requests_are_delayed_only_if_other_connections_send_small_requests(
    flood_ms: list[int], finished_ms: int | None, small: tuple[ConnectionId, int] | None
) -> None:
    throttle = LargeBatchThrottle()
    for now_ms in flood_ms:
        throttle.on_large_batch_started(FLOOD, now_ms)
    if finished_ms is not None:
        throttle.on_large_batch_finished(flood_ms[0], finished_ms)
    if small is not None:
        throttle.on_small_request_started(*small)
    now_ms = small[1] if small else 3
    assert throttle.large_allowed_at_ms(now_ms) == now_ms
    assert throttle.piece_bytes(now_ms) is None


def test_a_disabled_throttle_delays_no_request() -> None:
    throttle = LargeBatchThrottle(is_enabled=False)
    throttle.on_large_batch_started(FLOOD, 0)
    throttle.on_small_request_started(MODEST, 0)
    assert throttle.large_allowed_at_ms(0) == 0
    assert throttle.piece_bytes(0) is None


def test_a_shared_server_runs_large_requests_in_pieces_one_at_a_time() -> None:
    throttle = shared_throttle()
    assert throttle.piece_bytes(100) == PIECE_BYTES
    throttle.on_large_batch_started(FLOOD, 100)
    asked_ms = 100
    for _ in range(3):
        next_ms = throttle.large_allowed_at_ms(asked_ms)
        assert next_ms > asked_ms
        asked_ms = next_ms


@pytest.mark.parametrize("took_ms", [0, 1, 7, 900])
def test_the_pause_after_a_piece_is_proportional_and_limited(took_ms: int) -> None:
    throttle = shared_throttle()
    throttle.on_small_request_started(MODEST, 100)
    throttle.on_large_batch_started(FLOOD, 100)
    finished_ms = 100 + took_ms
    throttle.on_large_batch_finished(100, finished_ms)
    throttle.on_small_request_started(MODEST, finished_ms)
    pause_ms = throttle.large_allowed_at_ms(finished_ms) - finished_ms
    assert pause_ms == min(PAUSE_FACTOR_FIRST * max(took_ms, 1), PAUSE_MS_MAX)
    assert throttle.large_allowed_at_ms(finished_ms + pause_ms) == finished_ms + pause_ms


def test_a_forgotten_piece_delays_no_request() -> None:
    throttle = shared_throttle()
    throttle.on_large_batch_started(FLOOD, 100)
    throttle.on_large_batches_forgotten()
    assert throttle.large_allowed_at_ms(100) == 100
    with pytest.raises(AssertionError):
        throttle.on_large_batches_forgotten()


def test_the_wait_for_a_hanging_piece_is_limited() -> None:
    throttle = shared_throttle()
    throttle.on_large_batch_started(FLOOD, 100)
    throttle.on_small_request_started(MODEST, 900)
    assert throttle.large_allowed_at_ms(100 + PIECE_WAIT_MS_MAX - 1) > 100 + PIECE_WAIT_MS_MAX - 1
    assert throttle.large_allowed_at_ms(100 + PIECE_WAIT_MS_MAX) == 100 + PIECE_WAIT_MS_MAX


def test_without_recent_small_requests_large_batches_are_not_split() -> None:
    throttle = shared_throttle(50)
    assert throttle.piece_bytes(50 + SHARED_PERIOD_MS - 1) == PIECE_BYTES
    throttle.on_large_batch_started(FLOOD, 50 + SHARED_PERIOD_MS)
    assert throttle.large_allowed_at_ms(50 + SHARED_PERIOD_MS) == 50 + SHARED_PERIOD_MS
    assert throttle.piece_bytes(50 + SHARED_PERIOD_MS) is None


def throttle_with_latencies(took_ms: list[int]) -> LargeBatchThrottle:
    """A throttle whose small requests took 5 ms at first, then a given time during a piece."""
    throttle = shared_throttle()
    for start_ms in range(100, 60_100, 10):
        throttle.on_small_request_finished(start_ms, start_ms + 5)
    throttle.on_large_batch_started(FLOOD, 60_100)
    for each_ms in took_ms:
        throttle.on_small_request_finished(60_100, 60_100 + each_ms)
    return throttle


def test_slow_small_requests_lengthen_the_pauses_for_a_while() -> None:
    assert throttle_with_latencies([9]).pause_factor > PAUSE_FACTOR_FIRST
    assert throttle_with_latencies([500] * 100).pause_factor == PAUSE_FACTOR_MAX


def test_fast_small_requests_shorten_the_pauses() -> None:
    assert throttle_with_latencies([6]).pause_factor < PAUSE_FACTOR_FIRST
    assert throttle_with_latencies([6] * 5_000).pause_factor == PAUSE_FACTOR_MIN


def test_one_slow_request_in_two_hundred_does_not_change_the_pauses() -> None:
    assert throttle_with_latencies(([6] * 199 + [30]) * 3).pause_factor == pytest.approx(
        PAUSE_FACTOR_FIRST
    )


def test_the_baseline_is_the_99th_percentile_of_the_latency() -> None:
    throttle = shared_throttle()
    for start_ms in range(100, 200_100, 10):
        slow = 20 if start_ms % 500 == 0 else 5  # one in fifty
        throttle.on_small_request_finished(start_ms, start_ms + slow)
    throttle.on_large_batch_started(FLOOD, 200_100)
    throttle.on_small_request_finished(200_100, 200_123)
    assert throttle.pause_factor < PAUSE_FACTOR_FIRST  # less than a fifth above 20 ms
    throttle.on_small_request_finished(200_100, 200_140)
    assert throttle.pause_factor > PAUSE_FACTOR_FIRST


def test_latencies_during_a_piece_do_not_count_for_the_baseline() -> None:
    throttle = shared_throttle()
    throttle.on_large_batch_started(FLOOD, 100)
    throttle.on_small_request_finished(100, 200)
    throttle.on_large_batch_finished(100, 200)
    throttle.on_small_request_finished(190, 250)  # a piece was in flight when it came
    assert throttle.pause_factor < PAUSE_FACTOR_FIRST  # the baseline is not known yet
    throttle.on_small_request_finished(201, 206)
    throttle.on_small_request_finished(190, 250)
    assert throttle.pause_factor > PAUSE_FACTOR_FIRST


def throttle_after_flood(for_ms: int) -> LargeBatchThrottle:
    """A throttle whose small requests took 5 ms at first, and 9 ms during a flood."""
    throttle = throttle_with_latencies([])
    throttle.on_large_batch_finished(60_100, 60_105)
    for start_ms in range(60_110, 60_110 + for_ms, 10):
        if start_ms % 500 == 0:
            throttle.on_large_batch_started(FLOOD, start_ms)
            throttle.on_large_batch_finished(start_ms, start_ms)
        throttle.on_small_request_started(MODEST, start_ms)
        throttle.on_small_request_finished(start_ms + 1, start_ms + 10)  # no piece was in flight
    throttle.on_large_batch_started(FLOOD, 60_110 + for_ms)
    return throttle


def test_during_a_flood_the_baseline_is_kept_for_a_while() -> None:
    throttle = throttle_after_flood(BASELINE_KEPT_MS - 2 * SHARED_PERIOD_MS)
    factor = throttle.pause_factor
    throttle.on_small_request_finished(200_000, 200_009)
    assert throttle.pause_factor > factor


def test_an_outdated_baseline_is_not_used() -> None:
    throttle = throttle_after_flood(BASELINE_KEPT_MS + 20_000)
    factor = throttle.pause_factor
    throttle.on_small_request_finished(200_000, 200_009)
    assert throttle.pause_factor < factor
