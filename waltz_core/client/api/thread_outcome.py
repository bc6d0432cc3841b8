"""The future of an append for threads: its TimeoutError states what the append waits for."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

ResultT = TypeVar("ResultT")


class ThreadOutcome(Future[ResultT]):
    """A future of an append; `pending_reason`, called on any thread, explains a missing outcome."""

    def __init__(self, pending_reason: Callable[[], str]) -> None:
        super().__init__()
        self._pending_reason = pending_reason

    def result(self, timeout: float | None = None) -> ResultT:
        """Return the outcome; raises its error, or TimeoutError after `timeout` seconds."""
        try:
            return super().result(timeout)
        except TimeoutError:
            if self.done():
                raise
            text = f"no outcome within {timeout} s: {self._pending_reason()}"
            raise TimeoutError(text) from None
