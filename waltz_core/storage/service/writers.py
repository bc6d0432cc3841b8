"""The threads for work that blocks on the disk.

A lone append crosses from the loop to a thread and back. An executor creates a future for that,
with a condition and a lock of its own, and checks its state twice. This costs a tenth of a
storage's total work for such an append. This class has only a queue and a call.

Rules:
    1. Each piece of work has one outcome, delivered on the loop's thread: its result, or the
       exception.
    2. Pieces start in their order, each on the first thread that is free.
    3. Nothing waits for these threads to end: a thread that hangs on a disk may never return.
"""

import asyncio
import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import TypeAlias

from waltz_core.storage.service.work import Work, WorkResult

WriteOutcome: TypeAlias = WorkResult | BaseException
DoneCallback: TypeAlias = Callable[[Work, WriteOutcome], None]


class Writers:
    """See the module's rules. Create and call it on the loop's thread.

    Args:
        count: how many threads.
        done: called with each outcome (rule 1).
    """

    def __init__(self, count: int, done: DoneCallback) -> None:
        assert count > 0
        self._done = done
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._threads = [
            Thread(target=self._serve, name=f"storage-writer-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, work: Work) -> None:
        """Queue a piece of work."""
        self._queue.put(work)

    def end(self) -> None:
        """Make each thread end when it becomes free (rule 3)."""
        for _ in self._threads:
            self._queue.put(None)

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            self._report(work, _outcome_of(work))
            del work  # It holds megabytes, which must not stay while this waits for the next one.

    def _report(self, work: Work, outcome: WriteOutcome) -> None:
        try:
            self._loop.call_soon_threadsafe(self._done, work, outcome)
        except RuntimeError:
            if not self._loop.is_closed():  # Otherwise the process is ending.
                raise


def _outcome_of(work: Work) -> WriteOutcome:
    try:
        return work.run(time.perf_counter)
    except BaseException as error:  # noqa: BLE001 - rule 1: the waiting caller must get it
        return error
