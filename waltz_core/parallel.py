"""Runs several coroutines at the same time, and returns their results."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


async def run_parallel(calls: Iterable[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """Run coroutines in parallel; return their results in the same order.

    Raises the first error itself, not an exception group, and cancels the other coroutines.

    The TaskGroup runs in a separate task because of a bug in Python 3.11.2 and earlier: a TaskGroup
    that fails leaves a cancel request in its task. In the caller's task, this request would make
    every later `asyncio.timeout` raise CancelledError instead of TimeoutError.
    """
    try:
        return await asyncio.get_running_loop().create_task(_run_group(calls))
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None


async def _run_group(calls: Iterable[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(call) for call in calls]
    return [task.result() for task in tasks]
