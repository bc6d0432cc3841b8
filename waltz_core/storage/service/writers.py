"""The threads that do what blocks on the disk: pieces of work in, what came of them out.

A lone append crosses from the loop to a thread and back. An executor makes a future for that, with
a condition and a lock of its own, and asks it twice what has become of it, which is a tenth of all
that a storage does for such an append. Here is a queue and a call.

Rules:
    1. Whatever becomes of a piece of work is told once, on the loop's thread: its result, or what
       it has raised.
    2. Pieces are begun in their order, each by the first thread that is free.
    3. Nobody waits for these threads to end: the one that a disk holds may never come back.
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
    """See the module's rules. To be made, and called, on the loop's thread.

    Args:
        count: how many threads.
        done: is told each outcome (rule 1).
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
        """Have a piece of work done."""
        self._queue.put(work)

    def end(self) -> None:
        """Let the threads end as they become free (rule 3)."""
        for _ in self._threads:
            self._queue.put(None)

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            self._tell(work, _outcome_of(work))
            del work  # With it go megabytes, which nobody needs while this waits for the next one.

    def _tell(self, work: Work, outcome: WriteOutcome) -> None:
        try:
            self._loop.call_soon_threadsafe(self._done, work, outcome)
        except RuntimeError:
            if not self._loop.is_closed():  # Else the process is at its end; nobody waits.
                raise


def _outcome_of(work: Work) -> WriteOutcome:
    try:
        return work.run(time.perf_counter)
    except BaseException as error:  # noqa: BLE001 - rule 1: whoever waits must know
        return error
