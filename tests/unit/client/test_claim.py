"""Task claims of a write through a server: competing attempts, and the end of a write."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from tests.unit.cluster.test_coordinator import with_cluster
from tests.unit.server.registry_world import CONNECT, Owners, RegistryServer, user_of
from tests.write_registry_contract import MARKS
from waltz_core import errors
from waltz_core.client.api import exactly_once
from waltz_core.client.api.exactly_once import (
    begin_write,
    end_write,
    forget_writes,
    summary_of_write,
    tasks_of_write,
)
from waltz_core.client.links.write_requests import WriteRequests
from waltz_core.client.stream.write_claim import SEQUENCES_PER_ATTEMPT, TaskClaim


def run(scenario, monkeypatch):
    """Run a scenario in which all claims use the same server."""

    async def run_scenario():
        async with asyncio.TaskGroup() as tasks:
            _, _, coordinator = await with_cluster()
            server = RegistryServer(coordinator, tasks)
            user = user_of(Owners(await server.start()))

            @asynccontextmanager
            async def registry(_):
                yield WriteRequests(CONNECT, user)

            async def enter_task(task, name, **options):
                claim = TaskClaim(CONNECT, "w", task, run=name, **options)
                await claim.open(user)
                return claim

            monkeypatch.setattr(exactly_once, "_open_registry", registry)
            try:
                await scenario(coordinator, enter_task)
            finally:
                await user.links.close("the test is over")
                await server.stop()

    asyncio.run(run_scenario())


def test_a_claim_lists_the_client_ids_of_earlier_runs(monkeypatch):
    async def scenario(coordinator, enter_task):
        await coordinator.writes.begin("w", MARKS, 5)
        first = [await enter_task(task, "one") for task in range(3)]
        assert [await each.other_clients() for each in first] == [set()] * 3
        # Another run of the same job with one more task.
        second_claim, new = await enter_task(1, "two"), await enter_task(3, "two")
        ids = [int(each.state.client_id) for each in first]
        assert int(second_claim.state.client_id) == ids[1]
        assert await second_claim.other_clients() == {ids[0], ids[2]}
        assert await new.other_clients() == set(ids)
        assert (second_claim.state.attempt, new.state.attempt) == (2, 1)
        assert second_claim.connection_sequence == 2 * SEQUENCES_PER_ATTEMPT
        assert (second_claim.is_done, second_claim.marks) == (False, dict(MARKS))

    run(scenario, monkeypatch)


def test_a_later_attempt_ends_the_earlier_one(monkeypatch):
    async def scenario(coordinator, enter_task):
        await coordinator.writes.begin("w", MARKS, 5)
        first = await enter_task(0, "one")
        await first.check()
        second = await enter_task(0, "one")
        with pytest.raises(errors.ConnectionSuperseded):
            await first.check()
        await second.check()

    run(scenario, monkeypatch)


def test_a_task_does_not_begin_a_write_that_was_removed(monkeypatch):
    async def scenario(coordinator, enter_task):
        first = await enter_task(0, "one", begin_arguments=(MARKS, 5))
        assert first.marks == dict(MARKS)
        # The marks of the first attempt apply.
        assert (await enter_task(1, "one", begin_arguments=({}, 5))).marks == dict(MARKS)
        await coordinator.writes.finish("w", {"rows": 1}, 9)
        finished_claim = await enter_task(2, "one")
        assert finished_claim.is_done
        await coordinator.writes.forget("w")
        with pytest.raises(errors.ConnectionSuperseded, match="the state of the write was removed"):
            await enter_task(0, "one")

    run(scenario, monkeypatch)


def test_writes_are_removed_by_name_and_at_their_expiry(monkeypatch):
    async def scenario(coordinator, _entered):
        registry = coordinator.writes
        for name, keep_ms in (("named", 50), ("old", 0), ("kept", 50)):
            assert await begin_write(CONNECT, name, MARKS, keep_ms=keep_ms) is None
        assert await summary_of_write(CONNECT, "kept") is None
        summary = {"rows": 3}
        assert await end_write(CONNECT, "kept", summary, keep_ms=60) == summary
        assert await end_write(CONNECT, "kept", {"rows": 4}, keep_ms=60) == summary
        assert await summary_of_write(CONNECT, "kept") == summary
        assert await tasks_of_write(CONNECT, "named") == []
        assert await forget_writes(CONNECT, []) == []
        assert await forget_writes(CONNECT, ["named"]) == ["named"]
        # The server removes the write after its answer.
        while await registry.read("old") is not None:  # noqa: ASYNC110 - in ZooKeeper
            await asyncio.sleep(0)
        assert await registry.read("named") is None
        assert await registry.read("kept") is not None

    run(scenario, monkeypatch)
