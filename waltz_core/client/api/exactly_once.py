"""Begins and ends exactly-once writes, for the process that starts their tasks.

The tasks take part with a `TaskClaim` (docs/spark.md, "Exactly once").
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from waltz_core.client.api.async_client import AsyncWaltzClient
from waltz_core.client.links.write_requests import WriteRequests


@asynccontextmanager
async def _registry(connect: str) -> AsyncIterator[WriteRequests]:
    async with AsyncWaltzClient.connect(connect) as client:
        writes = WriteRequests(connect, client)
        try:
            yield writes
        finally:
            await writes.close()


async def begin_write(
    connect: str, write: str, marks: Mapping[int, int], *, keep_ms: int
) -> dict[str, Any] | None:
    """Begin a write unless it was begun; return its summary if it is done already, else None.

    `marks` are by partition; the write uses only these partitions. It is kept for `keep_ms`, at
    most a year, after it was begun or finished.

    Raises:
        PermissionDenied: the write belongs to another principal, or the principal lacks a grant.
        BadRequest: the principal has too many writes.
    """
    async with _registry(connect) as writes:
        state = await writes.begin(write, marks, keep_ms)
        return None if state.summary is None else dict(state.summary)


async def summary_of_write(connect: str, write: str) -> dict[str, Any] | None:
    """Return the summary of a write; None while it runs, and for an unknown one."""
    async with _registry(connect) as writes:
        state = await writes.read(write)
        return None if state is None or state.summary is None else dict(state.summary)


async def tasks_of_write(connect: str, write: str) -> list[int]:
    """Return the numbers of the tasks that any run of a write has begun."""
    async with _registry(connect) as writes:
        return list((await writes.tasks(write)).numbers)


async def end_write(
    connect: str, write: str, summary: Mapping[str, Any], *, keep_ms: int
) -> dict[str, Any]:
    """Mark a write as done; return its summary, which is that of the first caller.

    Raises:
        ConnectionSuperseded: the write was removed.
    """
    async with _registry(connect) as writes:
        state = await writes.finish(write, summary, keep_ms)
        assert state.summary is not None
        return dict(state.summary)


async def forget_writes(connect: str, names: Sequence[str]) -> list[str]:
    """Remove writes by name; return their names."""
    if names:
        async with _registry(connect) as writes:
            for name in names:
                await writes.forget(name)
    return list(names)
