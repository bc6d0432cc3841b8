"""Runs a change of a cluster for a command or for the console: progress, time limit, audit entry.

Rules:
    1. The audit entry is written before the change begins. The outcome is added to the entry when
       the change has ended.
    2. At the timeout, the error states what the change was waiting for. Completed steps are kept:
       if the user starts the same change again, the change continues after these steps.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final, TypeAlias

from waltz_core.cluster.change.audit import OUTCOME_DONE, AuditEntry
from waltz_core.cluster.change.replica_steps import ReplicaPlan
from waltz_core.cluster.change.storage_changes import PlanProgress
from waltz_core.cluster.coordinator import Coordinator
from waltz_core.errors import Unavailable, WaltzError

OUTCOME_INTERRUPTED: Final = "failed: interrupted"
CONTINUE_HINT: Final = "Completed steps are kept. Run the same command again to continue"

ChangeResult: TypeAlias = Mapping[str, object] | None


class ChangeRun:
    """A running change of a cluster: the completed steps, and the reason for a wait."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.steps: list[str] = []
        self.wait_reason = ""

    def note_step(self, step: str) -> None:
        """Add a completed step."""
        self.steps.append(step)

    def report_wait(self, reason: str, done_count: int = 0, count: int = 1) -> None:
        """Record the reason for which the change waits, and its progress."""
        self.wait_reason = reason

    async def carry_out_plan(self, plan: ReplicaPlan) -> None:
        """Carry out a plan that moves replicas, and report its steps."""
        await self.coordinator.storages.execute_plan(plan, self._report_progress)

    def _report_progress(self, progress: PlanProgress) -> None:
        for step in progress.steps:
            self.note_step(str(step))
        progress_text = "; ".join(map(str, progress.steps or progress.postponed_steps))
        self.report_wait(progress_text, progress.done_count, progress.partition_count)


@asynccontextmanager
async def record_change(
    coordinator: Coordinator, entry: AuditEntry, *, may_create_cluster: bool = False
) -> AsyncIterator[None]:
    """Write an audit entry for the block (rule 1); raises BadConfig without permission.

    With `may_create_cluster`, the block may create or delete the cluster's znodes, which include
    the audit log. So the entry is written only at the end of the block, and only if a cluster
    exists at this time.
    """
    await coordinator.check_administrator()
    audit, outcome = coordinator.audit, OUTCOME_INTERRUPTED
    path = None if may_create_cluster else await audit.begin(entry)
    try:
        yield
        outcome = OUTCOME_DONE
    except WaltzError as error:
        outcome = f"failed: {error}"
        raise
    finally:
        if path is None and await _has_cluster(coordinator):
            path = await audit.begin(entry)
        if path is not None:
            await audit.end(path, entry, outcome, now_ms())


async def _has_cluster(coordinator: Coordinator) -> bool:
    try:
        await coordinator.read_cluster()
    except WaltzError:
        return False
    return True


@asynccontextmanager
async def time_limit(
    timeout_s: float, awaited_text: Callable[[], str], *, hint: str = CONTINUE_HINT
) -> AsyncIterator[None]:
    """Limit the time of a block; at the timeout, raise Unavailable with `awaited_text()`."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise Unavailable(
            f"the command did not finish within {timeout_s:g} s. It still waits for: "
            f"{awaited_text()}. {hint}"
        ) from None


def now_ms() -> int:
    """Return the wall-clock time in milliseconds since 1970 (UTC)."""
    return time.time_ns() // 1_000_000
