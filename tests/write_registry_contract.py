"""The contract of the registry of writes, in the form of `cluster_contract.py`."""

from typing import Any

import pytest

from tests import cluster_contract
from tests.cluster_contract import ZooKeeperUnderTest
from waltz_core import errors
from waltz_core.cluster.coordinator import Coordinator
from waltz_core.cluster.write_registry import TASK_REMOVALS_MAX, TaskAttempt

MARKS = {0: 41, 3: -1}
RETENTION_MS = 1 << 34


async def create_cluster(world: ZooKeeperUnderTest, root: str) -> Any:
    """Create a cluster; return a member, whose `writes` is the registry to test."""
    return await _wrap_coordinator(world, await cluster_contract.create_cluster(world, root))


async def open_coordinator(world: ZooKeeperUnderTest, root: str) -> Any:
    return await _wrap_coordinator(world, await cluster_contract.open_coordinator(world, root))


async def _wrap_coordinator(world: ZooKeeperUnderTest, coordinator: Coordinator) -> Any:
    """Return the coordinator, or the replacement for it in this kind of world."""
    replaced = getattr(world, "replaced", None)
    return coordinator if replaced is None else await replaced(coordinator)


async def a_task_has_one_last_attempt(world: ZooKeeperUnderTest, root: str) -> None:
    first, second = await create_cluster(world, root), await open_coordinator(world, root)
    write = await first.writes.begin("w-1", MARKS, 1_000)
    assert (dict(write.marks), write.keep_ms, write.is_done) == (MARKS, 1_000, False)
    assert await second.writes.begin("w-1", {0: 99}, 2_000) == write
    one = await first.writes.enter("w-1", 5, "run-a", first.next_client_id)
    assert (one.client_id, one.attempt, one.runs) == (1, 1, ("run-a",))
    await first.writes.check("w-1", 5, 1)
    two = await second.writes.enter("w-1", 5, "run-a", second.next_client_id)
    assert (two.client_id, two.attempt, two.runs) == (1, 2, ("run-a",))
    three = await second.writes.enter("w-1", 5, "run-b", second.next_client_id)
    assert (three.client_id, three.attempt, three.runs) == (1, 3, ("run-a", "run-b"))
    for attempt in (1, 2):
        with pytest.raises(
            errors.ConnectionSuperseded, match=f"3 of the task has taken over from .* {attempt}"
        ):
            await first.writes.check("w-1", 5, attempt)
    await second.writes.check("w-1", 5, 3)
    other = await first.writes.enter("w-1", 6, "run-b", first.next_client_id)
    assert other.client_id == 2
    assert await second.writes.read_tasks("w-1") == {5: three, 6: other}


async def a_write_that_has_ended_ends_for_all_its_tasks(
    world: ZooKeeperUnderTest, root: str
) -> None:
    first, second = await create_cluster(world, root), await open_coordinator(world, root)
    await first.writes.begin("w", MARKS, 1_000)
    await first.writes.enter("w", 0, "run", first.next_client_id)
    summary = await second.writes.finish("w", {"committed": 7}, 2_000)
    assert (summary.is_done, summary.keep_ms) == (True, 2_000)
    assert await first.writes.finish("w", {"committed": 8}, 9_000) == summary
    assert (await first.writes.begin("w", {}, 5_000)).summary == {"committed": 7}
    for over in (
        first.writes.check("w", 0, 1),
        first.writes.enter("w", 0, "run", first.next_client_id),
        first.writes.enter("w", 1, "run", first.next_client_id),
    ):
        with pytest.raises(
            errors.ConnectionSuperseded, match=r"write w, task [01]: the write has already finished"
        ):
            await over
    await second.writes.forget("w")
    await second.writes.forget("w")
    assert await first.writes.read("w") is None
    assert await first.writes.read_tasks("w") == {}
    for over in (
        first.writes.check("w", 0, 1),
        first.writes.enter("w", 0, "run", first.next_client_id),
        first.writes.finish("w", {}, 0),
    ):
        with pytest.raises(errors.ConnectionSuperseded, match="the state of the write was removed"):
            await over


async def only_the_latest_attempt_of_a_task_finishes_a_write(
    world: ZooKeeperUnderTest, root: str
) -> None:
    first, second = await create_cluster(world, root), await open_coordinator(world, root)
    await first.writes.begin("w", MARKS, 1_000)
    await first.writes.enter("w", 0, "run", first.next_client_id)
    await second.writes.enter("w", 0, "run", second.next_client_id)
    for task_attempt in (TaskAttempt(0, 1), TaskAttempt(1, 1)):
        with pytest.raises(errors.ConnectionSuperseded, match="has taken over from attempt 1"):
            await first.writes.finish("w", {"committed": 7}, 2_000, task_attempt=task_attempt)
    summary = await second.writes.finish(
        "w", {"committed": 8}, 2_000, task_attempt=TaskAttempt(0, 2)
    )
    assert summary.summary == {"committed": 8}
    again = await first.writes.finish("w", {"committed": 7}, 2_000, task_attempt=TaskAttempt(0, 1))
    assert again == summary


async def the_retention_of_a_write_begins_with_its_last_change(
    world: ZooKeeperUnderTest, root: str
) -> None:
    one = await create_cluster(world, root)
    for name, keep_ms in (("begun", RETENTION_MS), ("done", RETENTION_MS), ("over", 0)):
        await one.writes.begin(name, MARKS, keep_ms)
    assert await one.writes.forget_expired() == ["over"]
    await one.writes.begin("used", MARKS, 0)
    await one.writes.finish("done", {"rows": 1}, 0)
    await one.writes.finish("used", {"rows": 1}, RETENTION_MS)
    assert await one.writes.forget_expired() == ["done"]


async def no_write_of_a_series_begins_after_a_later_one(
    world: ZooKeeperUnderTest, root: str
) -> None:
    one = await create_cluster(world, root)
    for name in ("s-9", "s-10", "other-77", "s-x"):
        await one.writes.begin(name, MARKS, 1_000, in_series=name != "s-x")
    await one.writes.forget("s-9")
    with pytest.raises(errors.ConnectionSuperseded, match="s-10, has started"):
        await one.writes.begin("s-9", MARKS, 1_000, in_series=True)
    assert (await one.writes.begin("s-10", {}, 1, in_series=True)).marks == MARKS
    assert (await one.writes.begin("s-11", {}, 1, in_series=True)).marks == {}


async def a_write_with_many_tasks_is_removed_completely(
    world: ZooKeeperUnderTest, root: str
) -> None:
    one = await create_cluster(world, root)
    await one.writes.begin("w", MARKS, 1_000)
    client_id = await one.next_client_id()

    async def the_one() -> int:
        return client_id

    for task in range(TASK_REMOVALS_MAX + 10):
        await one.writes.enter("w", task, "run", the_one)
    await one.writes.forget("w")
    assert await one.writes.read("w") is None


SCENARIOS = [
    a_task_has_one_last_attempt,
    a_write_that_has_ended_ends_for_all_its_tasks,
    only_the_latest_attempt_of_a_task_finishes_a_write,
    the_retention_of_a_write_begins_with_its_last_change,
    no_write_of_a_series_begins_after_a_later_one,
    a_write_with_many_tasks_is_removed_completely,
]
