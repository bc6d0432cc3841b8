"""The watchdog: a hanging event loop loses its session; a stopped process may keep it."""

from waltz_core.cluster.zookeeper.watchdog import Watchdog

TIMEOUT_MS = 3_000


def queries_until_expiry(watchdog: Watchdog, first_ms: int, last_ms: int) -> list[int]:
    """Query the watchdog like kazoo's thread; return the times at which the session may expire."""
    times = range(first_ms, last_ms + 1, TIMEOUT_MS // 3)
    return [now_ms for now_ms in times if not watchdog.may_keep_session(now_ms)]


def test_a_running_loop_keeps_the_session():
    watchdog = Watchdog(TIMEOUT_MS, 0)
    for now_ms in range(0, 20_000, 1_000):
        watchdog.beat(now_ms)
        assert watchdog.may_keep_session(now_ms + 999)


def test_a_session_may_expire_while_the_loop_hangs_but_not_after_the_loop_has_resumed():
    watchdog = Watchdog(TIMEOUT_MS, 0)
    watchdog.beat(5_000)
    assert queries_until_expiry(watchdog, 1_000, 12_000) == [9_000, 10_000, 11_000, 12_000]
    watchdog.beat(12_500)
    assert watchdog.may_keep_session(13_000)


def test_a_stopped_process_may_keep_its_session():
    watchdog = Watchdog(TIMEOUT_MS, 0)
    assert watchdog.may_keep_session(1_000)
    # The process is stopped from 1,000 to 60,000, and kazoo's thread runs before the loop.
    assert watchdog.may_keep_session(60_000)
    watchdog.beat(60_001)
    assert watchdog.may_keep_session(61_000)


def test_a_loop_that_still_hangs_after_a_stopped_process_resumes_loses_the_session():
    watchdog = Watchdog(TIMEOUT_MS, 0)
    assert queries_until_expiry(watchdog, 60_000, 63_000) == [61_000, 62_000, 63_000]


def test_the_watchdog_uses_the_timeout_that_zookeeper_granted():
    watchdog = Watchdog(TIMEOUT_MS, 0)
    watchdog.timeout_ms = 10_000
    assert queries_until_expiry(watchdog, 1_000, 10_000) == []
    assert watchdog.silent_ms(10_000) == 10_000
