"""The archive cache: limited size, one load per key, and read-ahead whose errors fail no read."""

from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event, Semaphore

import pytest

from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.archive import archive_cache
from waltz_core.archive.archive_cache import READ_AHEAD_CALLS_MAX, ArchiveCache
from waltz_core.errors import ArchiveUnavailable


@pytest.fixture
def cache():
    cache = ArchiveCache(100)
    yield cache
    cache.close()


def has_loaded(cache, key, byte_count=10):
    """Return whether `get` had to load the key."""
    calls = []
    assert cache.get(key, lambda: (calls.append(key) or f"value of {key}", byte_count)) == (
        f"value of {key}"
    )
    return bool(calls)


def test_the_least_recently_used_values_are_removed_first(cache):
    for key in range(10):
        assert has_loaded(cache, key)
    assert cache.byte_count == 100
    assert not has_loaded(cache, 0)
    assert has_loaded(cache, "large", 85)
    assert cache.byte_count == 95
    assert not has_loaded(cache, 0)
    assert has_loaded(cache, 9)


def test_a_value_above_the_limit_is_returned_and_not_kept(cache):
    assert has_loaded(cache, 1)
    assert has_loaded(cache, "huge", 101)
    assert has_loaded(cache, "huge", 101)
    assert not has_loaded(cache, 1)
    assert cache.byte_count == 10


@pytest.fixture
def waiting_callers(monkeypatch):
    """Return a semaphore that is released whenever a caller waits for another caller's load."""
    released = Semaphore(0)

    class ObservedFuture(Future):
        def result(self, timeout=None):
            released.release()
            return super().result(timeout)

    monkeypatch.setattr(archive_cache, "Future", ObservedFuture)
    return released


@pytest.mark.parametrize("fails", [False, True])
def test_concurrent_threads_share_one_load_and_its_value_or_error(cache, waiting_callers, fails):
    calls = []

    def load():
        calls.append(None)
        for _ in range(3):
            assert waiting_callers.acquire(timeout=TEST_TIMEOUT_S)
        if fails:
            raise ArchiveUnavailable("no route")
        return "value of key", 10

    with ThreadPoolExecutor(4) as threads:
        gets = [threads.submit(cache.get, "key", load) for _ in range(4)]
    outcomes = [repr(get.exception()) if fails else get.result() for get in gets]
    assert outcomes == 4 * ["ArchiveUnavailable('no route')" if fails else "value of key"]
    assert len(calls) == 1
    assert has_loaded(cache, "key") is fails


def test_a_failed_read_ahead_is_repeated_by_the_next_read(cache):
    calls = []

    def failing():
        calls.append(None)
        raise ArchiveUnavailable("no route")

    cache.read_ahead("bad", failing)
    cache.read_ahead("good", lambda: ("value of good", 10))
    cache._threads.shutdown()  # waits for both loads
    assert len(calls) == 1
    with pytest.raises(ArchiveUnavailable):
        cache.get("bad", failing)
    assert not has_loaded(cache, "good")
    cache.read_ahead("good", failing)  # the value is in the cache
    assert len(calls) == 2


def test_read_aheads_above_the_limit_are_dropped(cache):
    may_load, calls = Event(), []

    def load():
        calls.append(None)
        assert may_load.wait(TEST_TIMEOUT_S)
        return "value", 10

    for key in range(READ_AHEAD_CALLS_MAX + 3):
        cache.read_ahead(key, load)
        cache.read_ahead(key, load)
    may_load.set()
    cache._threads.shutdown()  # waits for all loads
    assert len(calls) == READ_AHEAD_CALLS_MAX
