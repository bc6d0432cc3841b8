"""An asyncio event loop in virtual time, for production code with coroutines.

Machines need no loop. The drivers of the client and of the operator need a loop, and faults of
these drivers occur between two awaits.

Rules:
    1. Callbacks run in the order in which they became ready. A timer is an action planned in the
       world, and ends with its process.
    2. The loop runs when its process receives a message or a timer fires. It runs until no callback
       is ready.
    3. Production code catches errors, and could hide the violation that a checker raises. So
       `keep_error` keeps the violation, and the loop raises it when no callback is ready.
    4. A loop is closed with its process. Its tasks are cancelled and run to their end, so that the
       garbage collector does not end them at a random time.
"""

import asyncio
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from waltz_sim.world.process import Process
    from waltz_sim.world.world import PlannedAction

CLOSING_ROUNDS_MAX: Final = 100


class _Timer(asyncio.TimerHandle):
    """A timer that is removed from the world when it is cancelled."""

    __slots__ = ("planned",)
    planned: "PlannedAction"

    def cancel(self) -> None:
        """See `asyncio.TimerHandle`."""
        if not self.cancelled():
            self.planned.cancel()
            asyncio.Handle.cancel(self)


class SimLoop(asyncio.AbstractEventLoop):
    """The event loop of one process. Methods that production code does not use are missing."""

    def __init__(self, process: "Process") -> None:
        self._process = process
        self._ready: deque[asyncio.Handle] = deque()
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._is_running = self._is_planned = self._is_closed = False
        self._failure: Exception | None = None

    # ---- the interface of asyncio

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._process.world.now_us / 1_000_000

    def call_soon(
        self, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.Handle:
        """See `asyncio`."""
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        if not (self._is_running or self._is_planned or self._is_closed):
            self._is_planned = True
            self._process.call_after_us(0, self._run_planned)
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: object,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """See `asyncio`."""
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: object,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """See `asyncio`."""
        timer = _Timer(when, callback, args, self, context)
        # Plus one, because the delay is rounded down and the timer would fire too early.
        delay_us = max(0, int((when - self.time()) * 1_000_000) + 1)
        timer.planned = self._process.call_after_us(delay_us, lambda: self._run_timer(timer))
        return timer

    def create_future(self) -> "asyncio.Future[Any]":
        """See `asyncio`."""
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self,
        coro: Coroutine[Any, Any, Any],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> "asyncio.Task[Any]":
        """See `asyncio`."""
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep the unhandled error of a callback or a task, as in `keep_error`."""
        error = context.get("exception")
        if isinstance(error, Exception):
            self.keep_error(error)

    def get_debug(self) -> bool:
        """See `asyncio`."""
        return False

    def is_running(self) -> bool:
        """See `asyncio`."""
        return self._is_running

    def is_closed(self) -> bool:
        """See `asyncio`."""
        return self._is_closed

    # ---- the interface of the world

    def run_inside(self, call: Callable[[], object]) -> None:
        """Call a function in the loop, and run all ready callbacks (rule 2); raise as in rule 3."""
        if self._is_running:
            call()
            return
        before = events._get_running_loop()
        events._set_running_loop(self)
        self._is_running = True
        try:
            call()
            while self._ready:
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            self._is_running = False
            events._set_running_loop(before)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def keep_error(self, error: Exception) -> None:
        """Keep an error until the loop is left; only the first error counts."""
        if self._failure is None and not self._is_closed:
            self._failure = error

    def close(self) -> None:
        """Cancel all tasks and run them to their end (rule 4)."""
        self._is_closed = True
        for _ in range(CLOSING_ROUNDS_MAX):
            if not self._tasks:
                return
            for task in list(self._tasks):
                task.cancel()
            self.run_inside(lambda: None)
        raise AssertionError(f"tasks that cannot be cancelled: {list(self._tasks)}")

    def _run_planned(self) -> None:
        self._is_planned = False
        self.run_inside(lambda: None)

    def _run_timer(self, timer: asyncio.TimerHandle) -> None:
        if not (timer.cancelled() or self._is_closed):
            self.run_inside(timer._run)


def create_loop(process: "Process") -> SimLoop:
    """Return a new event loop for a process."""
    # The other methods, for sockets, threads and signals, raise NotImplementedError.
    return SimLoop(process)  # type: ignore[abstract]
