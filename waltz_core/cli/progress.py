"""The progress bar that a command shows on a terminal.

Rules:
    1. The bar is shown only if standard error is a terminal, and only after one second. Without an
       event loop, the bar appears with the first report after this second.
    2. The bar is removed when the command ends.
    3. The bar is drawn only when progress is reported; there is no drawing thread.
"""

import asyncio
import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress

SHOW_AFTER_S = 1.0
BAR_CHARACTERS = 20


class ProgressLine:
    """A line with a progress bar, as a context manager that removes it at the end."""

    def __init__(self) -> None:
        self.wait_reason = ""  # why the command waits; recorded even without a terminal
        self._progress: tuple[int, int, str] = (0, 1, "")
        self._bar: Progress | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._show_at_s: float | None = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._show_at_s = time.monotonic() + SHOW_AFTER_S
            with suppress(RuntimeError):  # a subcommand without an event loop
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(SHOW_AFTER_S, self._show_bar)
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._show_at_s = None
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def show(self, done_count: int, count: int, description: str) -> None:
        """Report the progress; `description` states the current work, or the reason for a wait."""
        self.wait_reason = description.removeprefix("waiting for ")
        self._progress = (done_count, count, description)
        if self._show_at_s is not None and time.monotonic() >= self._show_at_s:
            self._show_bar()
        self._draw()

    def _show_bar(self) -> None:
        self._show_at_s = None
        if self._bar is not None:
            return
        from rich.console import Console  # noqa: PLC0415 - for terminals only
        from rich.progress import BarColumn, Progress, TextColumn  # noqa: PLC0415 - as above
        from rich.table import Column  # noqa: PLC0415 - as above

        self._bar = Progress(
            BarColumn(BAR_CHARACTERS),
            TextColumn("{task.completed:g} of {task.total:g}"),
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
            console=Console(stderr=True),
            transient=True,
            auto_refresh=False,
            redirect_stdout=sys.stdout.isatty(),  # otherwise results would go to standard error
        )
        self._bar.add_task("")
        self._bar.start()
        self._draw()

    def _draw(self) -> None:
        if self._bar is not None:
            done_count, count, description = self._progress
            for task in self._bar.task_ids:
                self._bar.update(task, description=description, completed=done_count, total=count)
            self._bar.refresh()
