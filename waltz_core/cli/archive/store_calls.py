"""Calls of an object store by a command, which states what it waits for while the store hangs."""

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

from waltz_core.cli.output import print_error
from waltz_core.storage.service.writer_threads import CallThreads

# A call without progress is reported after this time, and again each time.
REPORT_S: Final = 10.0
ResultT = TypeVar("ResultT")


async def call_store(
    store_url: str, call: Callable[[], ResultT], activity: Callable[[], tuple[str, int]]
) -> ResultT:
    """Return the result of a call that blocks; print a line whenever it makes no progress.

    `activity` returns what the call does, empty if it does not wait for the store, and a number
    that grows. It runs on a thread of its own, for which an interrupted command does not wait.
    """
    threads = CallThreads(1, "archive-command")
    future = asyncio.wrap_future(threads.submit(call))
    threads.shutdown()
    before, waited_s = activity(), 0.0
    while not (await asyncio.wait((future,), timeout=REPORT_S))[0]:
        now = activity()
        waited_s = waited_s + REPORT_S if now == before else 0.0
        before = now
        if waited_s and now[0]:
            print_error(
                f"the object store at {store_url} has not answered for {waited_s:.0f} s: {now[0]}"
            )
    return future.result()
