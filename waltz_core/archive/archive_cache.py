"""A cache in memory for parts of archives; all partitions of a process share it.

Rules:
    1. The values have at most `bytes_max` bytes in total; the least recently used values are
       removed first. A value larger than `bytes_max` is returned, but not cached.
    2. One thread at a time loads the value of a key. Other callers that need this value wait for
       the load, and receive its value or its error.
    3. A read-ahead only saves time. So the cache drops its errors: the read that needs the value
       loads it again, and receives any error. While `READ_AHEAD_CALLS_MAX` read-ahead calls wait or
       run, further calls are dropped.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Final, NamedTuple, TypeVar, cast

READ_AHEAD_THREADS: Final = 2
READ_AHEAD_CALLS_MAX: Final = 4

_Value = TypeVar("_Value")


class _CacheEntry(NamedTuple):
    value: object
    byte_count: int


class ArchiveCache:
    """A cache of values that are loaded on demand; all threads may use it."""

    def __init__(self, bytes_max: int, threads: Executor | None = None) -> None:
        """If `threads` is None, the cache creates `READ_AHEAD_THREADS` threads for read-ahead."""
        self.bytes_max = bytes_max
        self.byte_count = 0
        self._lock = threading.Lock()
        # The least recently used entry is the first.
        self._entries: OrderedDict[Hashable, _CacheEntry] = OrderedDict()
        self._loads: dict[Hashable, Future[object]] = {}
        self._read_aheads: set[Hashable] = set()
        self._threads = threads or ThreadPoolExecutor(READ_AHEAD_THREADS, "archive-read-ahead")

    def get(self, key: Hashable, load: Callable[[], tuple[_Value, int]]) -> _Value:
        """Return the value of a key.

        If it is not cached, call `load`, which returns value and bytes.

        Raises:
            WaltzError: the error of `load`.
        """
        own_load: Future[object] = Future()
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
                return cast("_Value", entry.value)
            current = self._loads.setdefault(key, own_load)
        if current is own_load:
            return self._load(key, load, own_load)
        return cast("_Value", current.result())  # rule 2

    def read_ahead(self, key: Hashable, load: Callable[[], tuple[object, int]]) -> None:
        """Load a value on another thread, unless it is cached or being loaded (rule 3)."""
        with self._lock:
            is_known = key in self._entries or key in self._loads or key in self._read_aheads
            if is_known or len(self._read_aheads) >= READ_AHEAD_CALLS_MAX:
                return
            self._read_aheads.add(key)
        self._threads.submit(self._run_read_ahead, key, load)  # its outcome is dropped

    def close(self) -> None:
        """Stop the threads after their current read-ahead; call this after the last read."""
        self._threads.shutdown(cancel_futures=True)

    def _run_read_ahead(self, key: Hashable, load: Callable[[], tuple[object, int]]) -> None:
        try:
            self.get(key, load)
        finally:
            with self._lock:
                self._read_aheads.discard(key)

    def _load(
        self, key: Hashable, load: Callable[[], tuple[_Value, int]], outcome: Future[object]
    ) -> _Value:
        try:
            value, byte_count = load()
        except BaseException as error:
            with self._lock:
                del self._loads[key]
            outcome.set_exception(error)
            raise
        with self._lock:
            del self._loads[key]
            self._add_entry(key, _CacheEntry(value, byte_count))
        outcome.set_result(value)
        return value

    def _add_entry(self, key: Hashable, entry: _CacheEntry) -> None:
        if entry.byte_count > self.bytes_max:
            return
        self._entries[key] = entry
        self.byte_count += entry.byte_count
        while self.byte_count > self.bytes_max:
            _, oldest = self._entries.popitem(last=False)
            self.byte_count -= oldest.byte_count
