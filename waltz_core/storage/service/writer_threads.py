"""The threads for work that blocks on the disk.

An append crosses from the event loop to a thread and back. A `ThreadPoolExecutor` would create a
future with a condition and a lock for each append, and check its state twice. For an append that is
alone in flight, this is a tenth of a storage's total work. `WriterThreads` uses only a queue and a
call.

Rules:
    1. Each piece of work has one outcome, delivered on the event loop's thread: its result, or the
       exception.
    2. Pieces of work start in their order, each on the first free thread.
    3. The process does not wait for these threads when it exits: a thread that hangs on a disk may
       never return. The interpreter would wait for the threads of a `ThreadPoolExecutor`.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from itertools import count as numbers
from queue import SimpleQueue
from threading import Thread
from typing import ParamSpec, TypeAlias, TypeVar

from waltz_core.storage.service.work import Work, WorkResult

WriteOutcome: TypeAlias = WorkResult | BaseException
DoneCallback: TypeAlias = Callable[[Work, WriteOutcome], None]
ParametersT = ParamSpec("ParametersT")
ResultT = TypeVar("ResultT")


class WriterThreads:
    """Runs pieces of work on threads. Create and call it on the thread of the event loop.

    Args:
        count: the number of threads.
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
        """Stop each thread when it becomes free (rule 3)."""
        for _ in self._threads:
            self._queue.put(None)

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            self._deliver_outcome(work, _run_work(work))
            del work  # The work holds megabytes, which must be freed while this thread waits.

    def _deliver_outcome(self, work: Work, outcome: WriteOutcome) -> None:
        try:
            self._loop.call_soon_threadsafe(self._done, work, outcome)
        except RuntimeError:
            if not self._loop.is_closed():  # Otherwise the process is exiting.
                raise


def _run_work(work: Work) -> WriteOutcome:
    try:
        return work.run(time.perf_counter)
    except BaseException as error:  # noqa: BLE001 - rule 1: the caller must receive it
        return error


class CallThreads(Executor):
    """Threads for rare calls of any kind (rule 3); each call has a future."""

    def __init__(self, count: int, name: str) -> None:
        assert count > 0
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._numbers = numbers()
        self._calls: dict[int, None] = {}  # calls that have no outcome yet
        self._threads = [
            Thread(target=self._serve, name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether a call is running or waits, even if its caller was cancelled."""
        return bool(self._calls)

    def submit(
        self,
        fn: Callable[ParametersT, ResultT],
        /,
        *args: ParametersT.args,
        **kwargs: ParametersT.kwargs,
    ) -> "Future[ResultT]":
        """Queue a call, and return its future."""
        future: Future[ResultT] = Future()
        number = next(self._numbers)
        self._calls[number] = None
        self._queue.put(partial(self._call, number, future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002 - as in the base class
        """Stop each thread when it becomes free; never wait (rule 3)."""
        del wait, cancel_futures
        for _ in self._threads:
            self._queue.put(None)

    def _serve(self) -> None:
        while (call := self._queue.get()) is not None:
            call()
            del call

    def _call(self, number: int, future: "Future[ResultT]", call: Callable[[], ResultT]) -> None:
        if not future.set_running_or_notify_cancel():
            del self._calls[number]
            return
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - rule 1: the caller must receive it
            del self._calls[number]
            future.set_exception(error)
            return
        del self._calls[number]
        future.set_result(result)
