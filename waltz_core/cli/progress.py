"""One line that says how far a command has come, for people who watch it.

A line that is written over must never reach a file or another program.

Rules:
    1. Nothing is shown unless standard error is a terminal, nor before a second has passed.
    2. The line is gone when the command ends.
"""

import asyncio
import shutil
import sys
from types import TracebackType
from typing import Self

FIRST_SHOWN_S = 1.0
BAR_CHARACTERS = 20


class ProgressLine:
    """The line; usable as a context manager."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._text = ""
        self.awaited = ""  # what was waited for last, terminal or not
        self._is_shown = False
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        if self._is_terminal:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(FIRST_SHOWN_S, self._begin)
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._is_shown:
            self._write("")
            self._is_shown = False

    def show(self, done_count: int, count: int, what: str) -> None:
        """Say how much of it is done, and what happens or is waited for."""
        self.awaited = what.removeprefix("waiting for ")
        filled = BAR_CHARACTERS * done_count // max(count, 1)
        bar = "#" * filled + "." * (BAR_CHARACTERS - filled)
        self._text = f"[{bar}] {done_count} of {count}  {what}"
        if self._is_shown:
            self._write(self._text)

    def _begin(self) -> None:
        self._is_shown = True
        self._write(self._text)

    def _write(self, text: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        sys.stderr.write(f"\r\x1b[2K{text[:width]}")
        sys.stderr.flush()
