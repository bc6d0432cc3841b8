"""Under random faults the membership converges, and every view of it is consistent."""

import asyncio
from collections.abc import Sequence
from random import Random

import pytest

from tests.cluster_contract import CLUSTER_KEY, CallbackRecorder, run_meanwhile, server_descriptor
from waltz_core import errors
from waltz_core.cluster.change.creation import NewCluster
from waltz_core.cluster.coordinator import Coordinator
from waltz_core.cluster.znodes.interface import Children, Node, Operation, SessionState, Signal
from waltz_core.cluster.zookeeper.zookeeper_in_memory import (
    MemorySession,
    MemoryZooKeeper,
    WriteFault,
)

ROOT = "/w"
PARTITION_COUNT = 7
SERVER_COUNT = 4
STEP_COUNT = 120


class SlowSession(MemorySession):
    """A session with slow requests, so that requests of other sessions come in between."""

    random: Random

    async def get(self, path: str, signal: Signal | None = None) -> Node | None:
        await self._pass_time()
        return await super().get(path, signal)

    async def children(self, path: str, signal: Signal | None = None) -> Children | None:
        await self._pass_time()
        return await super().children(path, signal)

    async def write(self, operations: Sequence[Operation]) -> list[int]:
        await self._pass_time()
        versions = await super().write(operations)
        await self._pass_time()
        return versions

    async def _pass_time(self) -> None:
        for _ in range(self.random.randrange(3)):
            await asyncio.sleep(0)


class SlowZooKeeper(MemoryZooKeeper):
    def __init__(self, random: Random) -> None:
        super().__init__(asyncio.Event)
        self.random = random

    def session(self) -> SlowSession:
        session = SlowSession(self)
        session.random = self.random
        self._sessions.append(session)
        return session


def disturb(session: SlowSession, random: Random) -> None:
    roll = random.random()
    if session.state is not SessionState.CONNECTED:
        if roll < 0.5:
            session.resume()
    elif roll < 0.15:
        session.suspend()
    elif roll < 0.25:
        session.expire()
    elif roll < 0.4:
        session.faults.append(random.choice(list(WriteFault)))


async def try_to_change(server: Coordinator, server_id: int, random: Random) -> None:
    try:
        if random.random() < 0.6:
            preferred = random.sample(range(PARTITION_COUNT), random.randrange(3))
            await server.register_server(server_descriptor(server_id, preferred))
        else:
            await server.unregister_server()
    except (errors.Unavailable, errors.Superseded):
        return


def check_history(views: list) -> None:
    last = {}
    for view in views:
        if not view.servers:
            assert view.owners == {}
            continue
        assert view.is_settled
        assert sorted(view.owners) == list(range(PARTITION_COUNT))
        for partition, owner in view.owners.items():
            assert owner.server_id in view.servers
            server_id, generation = last.get(partition, (None, 0))
            if owner.server_id == server_id:
                assert owner.generation >= generation
            else:
                assert owner.generation > generation
            last[partition] = owner


@pytest.mark.parametrize("seed", range(40))
def test_all_members_agree_on_the_registered_servers_after_any_faults(seed):
    async def run():
        random = Random(seed)
        zookeeper = SlowZooKeeper(random)
        sessions = [zookeeper.session() for _ in range(SERVER_COUNT + 1)]
        client, *servers = [Coordinator(session, ROOT) for session in sessions]
        await client.create_cluster(NewCluster("w", PARTITION_COUNT, CLUSTER_KEY))
        inboxes = [CallbackRecorder() for _ in sessions]
        members = [client, *servers]
        following = [m.follow_servers(i) for m, i in zip(members, inboxes, strict=True)]
        async with run_meanwhile(*following):
            for _ in range(STEP_COUNT):
                number = random.randrange(SERVER_COUNT)
                if random.random() < 0.3:
                    await try_to_change(servers[number], number + 1, random)
                disturb(sessions[random.randrange(len(sessions))], random)
                for _ in range(random.randrange(8)):
                    await asyncio.sleep(0)
            for session in sessions:
                session.faults.clear()
                if session.state is not SessionState.CONNECTED:
                    session.resume()
            for number, server in enumerate(servers, start=1):
                await server.register_server(server_descriptor(number))
            for inbox in inboxes:
                await inbox.wait_for(
                    lambda view: (
                        list(view.servers) == [1, 2, 3, 4]
                        and all(each.preferred == () for each in view.servers.values())
                    )
                )
        names = zookeeper.child_names(f"{ROOT}/serverDescriptors")
        assert len(names) == SERVER_COUNT
        assert len({str(inbox.values[-1]) for inbox in inboxes}) == 1
        for inbox in inboxes:
            check_history(inbox.values)

    asyncio.run(run())
