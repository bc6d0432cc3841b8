"""Begins and ends exactly-once writes, for the process that starts the tasks of the write.

Each task of the write uses a `TaskClaim` (docs/spark.md, "Exactly once").
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from waltz_core.client.api.async_client import AsyncWaltzClient
from waltz_core.client.links.write_requests import WriteRequests


@asynccontextmanager
async def _open_registry(connect: str) -> AsyncIterator[WriteRequests]:
    async with AsyncWaltzClient.connect(connect) as client:
        writes = WriteRequests(connect, client)
        try:
            yield writes
        finally:
            await writes.close()


async def begin_write(
    connect: str, write: str, marks: Mapping[int, int], *, keep_ms: int
) -> dict[str, Any] | None:
    """Begin a write, if it has not begun yet; return the summary of a finished write, else None.

    `marks` has the starting marks by partition; the write uses only these partitions. The registry
    keeps the write for `keep_ms` milliseconds (at most a year) after its beginning, and again after
    its end.

    Raises:
        PermissionDenied: the write belongs to another principal, or the principal lacks a grant.
        BadRequest: the principal has too many writes.
    """
    async with _open_registry(connect) as writes:
        state = await writes.begin(write, marks, keep_ms)
        return None if state.summary is None else dict(state.summary)


async def summary_of_write(connect: str, write: str) -> dict[str, Any] | None:
    """Return the summary of a finished write; None if the write is running or unknown."""
    async with _open_registry(connect) as writes:
        state = await writes.read(write)
        return None if state is None or state.summary is None else dict(state.summary)


async def tasks_of_write(connect: str, write: str) -> list[int]:
    """Return the numbers of all tasks that any run of a write has begun."""
    async with _open_registry(connect) as writes:
        return list((await writes.tasks(write)).task_numbers)


async def end_write(
    connect: str, write: str, summary: Mapping[str, Any], *, keep_ms: int
) -> dict[str, Any]:
    """Mark a write as done, with a summary. A write that is done keeps its first summary.

    Return the summary of the write.

    Raises:
        ConnectionSuperseded: the write was removed from the registry.
    """
    async with _open_registry(connect) as writes:
        state = await writes.finish(write, summary, keep_ms)
        assert state.summary is not None
        return dict(state.summary)


async def forget_writes(connect: str, names: Sequence[str]) -> list[str]:
    """Remove the writes with these names from the registry; return the names as a list."""
    if names:
        async with _open_registry(connect) as writes:
            for name in names:
                await writes.forget(name)
    return list(names)
