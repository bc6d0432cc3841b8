"""Calls the object store for a command, and prints a line whenever the store does not answer."""

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

from waltz_core.cli.output import print_error
from waltz_core.storage.service.writer_threads import CallThreads

# A call without progress is reported each time this number of seconds has passed.
REPORT_INTERVAL_S: Final = 10.0
ResultT = TypeVar("ResultT")


async def call_store(
    archive_url: str, call: Callable[[], ResultT], activity: Callable[[], tuple[str, int]]
) -> ResultT:
    """Run a blocking call in a thread; print a line whenever it makes no progress.

    `activity` returns a text and a number. The text describes the current operation, and is empty
    while the call does not wait for the store. The number grows with the progress. An interrupted
    command does not wait for the thread.
    """
    threads = CallThreads(1, "archive-command")
    future = asyncio.wrap_future(threads.submit(call))
    threads.shutdown()
    before, waited_s = activity(), 0.0
    while not (await asyncio.wait((future,), timeout=REPORT_INTERVAL_S))[0]:
        now = activity()
        waited_s = waited_s + REPORT_INTERVAL_S if now == before else 0.0
        before = now
        if waited_s and now[0]:
            print_error(
                f"the object store at {archive_url} has not answered for {waited_s:.0f} s: {now[0]}"
            )
    return future.result()
