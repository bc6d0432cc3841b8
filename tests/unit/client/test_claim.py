"""Task claims of a write: competing attempts, and the end of a write; in memory."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from tests.cluster_contract import created
from tests.unit.cluster.test_coordinator import MemoryWorld
from tests.writes_contract import MARKS
from waltz_core import errors
from waltz_core.client.stream import write_claim
from waltz_core.client.stream.write_claim import (
    SEQUENCES_OF_ATTEMPT,
    TaskClaim,
    begin_write,
    end_write,
    forget_writes,
    summary_of_write,
)
from waltz_core.cluster.coordinator import Coordinator
from waltz_core.config import ClientConfig

ROOT = "/waltz/claims"


def run(scenario, monkeypatch):
    """Play a scenario with a coordinator over memory that every claim is given."""

    async def play():
        world = MemoryWorld()
        await created(world, ROOT)
        coordinator = Coordinator(await world.znodes(), ROOT)

        async def connect(*_, **__):
            return coordinator

        @asynccontextmanager
        async def connected(_):
            yield coordinator

        monkeypatch.setattr(write_claim.zookeeper_session, "connect", connect)
        monkeypatch.setattr(write_claim.zookeeper_session, "connected", connected)
        await scenario(coordinator)

    asyncio.run(play())


async def entered(task, name, **options):
    found = TaskClaim("memory", "w", task, run=name, **options)
    await found.open(ClientConfig())
    return found


def test_other_clients_are_those_of_earlier_runs(monkeypatch):
    async def scenario(coordinator):
        await coordinator.writes.begin("w", MARKS, 5)
        first = [await entered(task, "one") for task in range(3)]
        assert [await each.other_clients() for each in first] == [set()] * 3
        # Another run of the same job, cut into other tasks: one of them is new.
        again, new = await entered(1, "two"), await entered(3, "two")
        ids = [int(each.state.client_id) for each in first]
        assert int(again.state.client_id) == ids[1]
        assert await again.other_clients() == {ids[0], ids[2]}
        assert await new.other_clients() == set(ids)
        assert (again.state.attempt, new.state.attempt) == (2, 1)
        assert again.connection_sequence == 2 * SEQUENCES_OF_ATTEMPT
        assert (again.is_done, again.marks) == (False, dict(MARKS))

    run(scenario, monkeypatch)


def test_a_later_attempt_ends_the_earlier_one(monkeypatch):
    async def scenario(coordinator):
        await coordinator.writes.begin("w", MARKS, 5)
        first = await entered(0, "one")
        await first.check()
        second = await entered(0, "one")
        with pytest.raises(errors.ConnectionSuperseded):
            await first.check()
        await second.check()

    run(scenario, monkeypatch)


def test_only_a_task_of_a_series_begins_a_write(monkeypatch):
    async def scenario(coordinator):
        first = await entered(0, "one", series=(MARKS, 5))
        assert first.marks == dict(MARKS)
        # The marks of the first attempt hold.
        assert (await entered(1, "one", series=({}, 5))).marks == dict(MARKS)
        await coordinator.writes.finish("w", {"rows": 1}, 9)
        done = await entered(2, "one")
        assert done.is_done
        await coordinator.writes.forget("w")
        with pytest.raises(errors.ConnectionSuperseded, match="and then removed"):
            await entered(0, "one")

    run(scenario, monkeypatch)


def test_writes_are_forgotten_by_name_and_at_their_expiry(monkeypatch):
    async def scenario(coordinator):
        writes = coordinator.writes
        for name, keep_ms in (("named", 50), ("old", 0), ("kept", 50)):
            assert await begin_write("memory", name, MARKS, keep_ms=keep_ms) is None
        assert await summary_of_write("memory", "kept") is None
        summary = {"rows": 3}
        assert await end_write("memory", "kept", summary, keep_ms=60) == summary
        assert await end_write("memory", "kept", {"rows": 4}, keep_ms=60) == summary
        assert await summary_of_write("memory", "kept") == summary
        assert await forget_writes("memory", ["named"]) == ["named", "old"]
        found = [await writes.read(name) for name in ("named", "old", "kept")]
        assert [each is None for each in found] == [True, True, False]

    run(scenario, monkeypatch)
