"""Counts the function calls of a code block, with garbage collection off."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def record_calls() -> Iterator[list[str]]:
    """Record the caller's name of each call, also of functions in C.

    During the block, garbage collection is off. If it were on, the finalizers of other tests'
    objects would be counted.
    """
    calls: list[str] = []

    def record_call(frame: FrameType, event: str, _argument: object) -> None:
        if event in {"call", "c_call"}:
            calls.append(frame.f_code.co_name)

    previous, was_enabled = sys.getprofile(), gc.isenabled()
    gc.disable()
    sys.setprofile(record_call)
    try:
        yield calls
    finally:
        sys.setprofile(previous)
        if was_enabled:
            gc.enable()
