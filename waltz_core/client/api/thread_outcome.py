"""The future of an append for threads: its TimeoutError states what the append waits for."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

ResultT = TypeVar("ResultT")


class ThreadOutcome(Future[ResultT]):
    """A future; `waits_for` returns why there is no outcome yet, on any thread."""

    def __init__(self, waits_for: Callable[[], str]) -> None:
        super().__init__()
        self._waits_for = waits_for

    def result(self, timeout: float | None = None) -> ResultT:
        """Return the outcome; raises its error, or TimeoutError after `timeout` seconds."""
        try:
            return super().result(timeout)
        except TimeoutError:
            if self.done():
                raise
            text = f"no outcome within {timeout} s: {self._waits_for()}"
            raise TimeoutError(text) from None
