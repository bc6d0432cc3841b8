"""Stops all threads of a process except the first, like a disk that does not respond.

The module uses ptrace, because a signal would stop the whole process. All calls must come from one
thread. This thread also stops threads that the process starts later.

A thread that waits for a disk holds no lock that another thread needs. But a thread that is stopped
at another point may hold the lock of the interpreter. Or the stopped thread has not reported its
start yet, and the first thread waits for this report. So after each stop, the process must answer.
If it does not answer, the thread continues, and is stopped later. A stopped thread may also hold a
lock that the first thread needs only later, for example the lock of a queue. So if the process no
longer answers, all threads continue for a moment, and are stopped again.
"""

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

_DETACH, _SEIZE, _INTERRUPT, _WAIT_ALL = 17, 0x4206, 0x4207, 0x40000000
_CHECK_INTERVAL_S = 0.02
_ANSWER_INTERVAL_S = 1
_ANSWER_ATTEMPTS = 5  # on a busy machine, a process may answer late


class _ThreadStopper:
    """Stops the threads of a process until it is ended."""

    def __init__(self, pid: int, is_answering: Callable[[], bool]) -> None:
        self.error = ""
        self._pid = pid
        self._is_answering = is_answering
        self._stopped: set[int] = set()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.ptrace.argtypes = [
            ctypes.c_long,
            ctypes.c_long,
            ctypes.c_void_p,
            ctypes.c_void_p,
        ]
        self._ended, self._has_begun = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._stop_new_threads, daemon=True)
        self._thread.start()
        self._has_begun.wait()

    def end(self) -> None:
        """Let the threads continue; before that no other process can reap the process."""
        self._ended.set()
        self._thread.join()

    def _stop_new_threads(self) -> None:
        next_check_s = time.monotonic() + _ANSWER_INTERVAL_S
        while not self._ended.is_set() and not self.error:
            with contextlib.suppress(FileNotFoundError):  # the thread has ended
                for each in os.listdir(f"/proc/{self._pid}/task"):
                    self._stop(int(each))
            self._has_begun.set()
            if time.monotonic() >= next_check_s:
                if not any(self._is_answering() for _ in range(_ANSWER_ATTEMPTS)):
                    self._resume()
                next_check_s = time.monotonic() + _ANSWER_INTERVAL_S
            self._ended.wait(_CHECK_INTERVAL_S)
        self._resume()

    def _resume(self) -> None:
        for thread in self._stopped:
            self._detach(thread)
        self._stopped.clear()

    def _stop(self, thread: int) -> None:
        if thread == self._pid or thread in self._stopped:
            return
        if self._libc.ptrace(_SEIZE, thread, None, None) != 0:
            if Path(f"/proc/{self._pid}/task/{thread}").exists():
                self.error = os.strerror(ctypes.get_errno())
            return
        if self._libc.ptrace(_INTERRUPT, thread, None, None) == 0:
            os.waitpid(thread, _WAIT_ALL)
        if self._is_answering():
            self._stopped.add(thread)
        else:
            self._detach(thread)

    def _detach(self, thread: int) -> None:
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(thread, _WAIT_ALL | os.WNOHANG) == (0, 0):
                self._libc.ptrace(_DETACH, thread, None, None)


_stoppers: list[_ThreadStopper] = []


def stop_threads(pid: int, is_answering: Callable[[], bool]) -> None:
    """Stop the threads until the process is killed; skips if that is not allowed.

    `is_answering` requests an answer that the first thread can give without other threads.
    """
    if not Path(f"/proc/{pid}/task").is_dir():
        pytest.skip("only Linux stops single threads")
    watch = _ThreadStopper(pid, is_answering)
    _stoppers.append(watch)
    if watch.error:
        resume_threads()
        pytest.skip(f"no thread can be stopped: {watch.error}")


def resume_threads() -> None:
    """Let the threads continue. Before this, no other process can reap the process."""
    while _stoppers:
        _stoppers.pop().end()
