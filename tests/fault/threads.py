"""Stops the threads of a process but for its first one, as a disk does that does not answer.

By ptrace: a signal would stop the process whole. All of it has to come from one thread of ours.
"""

import contextlib
import ctypes
import os
from pathlib import Path

import pytest

_DETACH, _SEIZE, _INTERRUPT, _WALL = 17, 0x4206, 0x4207, 0x40000000
_stopped: list[int] = []


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    return libc


def stop_threads(pid: int) -> None:
    """Stop them until the process is killed; skips where that is not allowed."""
    if not Path(f"/proc/{pid}/task").is_dir():
        pytest.skip("only Linux stops single threads")
    libc = _libc()
    for each in os.listdir(f"/proc/{pid}/task"):
        thread = int(each)
        if thread == pid or thread in _stopped:
            continue
        if libc.ptrace(_SEIZE, thread, None, None) != 0:
            pytest.skip(f"no thread can be stopped: {os.strerror(ctypes.get_errno())}")
        assert libc.ptrace(_INTERRUPT, thread, None, None) == 0
        os.waitpid(thread, _WALL)
        _stopped.append(thread)


def let_threads_go() -> None:
    """End the watch over them; nobody else can reap a process before."""
    libc = _libc()
    while _stopped:
        thread = _stopped.pop()
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(thread, _WALL | os.WNOHANG) == (0, 0):
                libc.ptrace(_DETACH, thread, None, None)
