"""A server for the registry of writes over TCP, and its clients, with ZooKeeper in memory."""

import asyncio
from random import Random
from types import SimpleNamespace

from tests.time_limits import TEST_TIMEOUT_S
from tests.unit.cluster.test_coordinator import MemoryWorld
from waltz_core.client.links.connections import ServerLinks
from waltz_core.client.links.directory import Owner
from waltz_core.client.links.write_requests import WriteRequests
from waltz_core.config import ClientConfig
from waltz_core.errors import NotOwned
from waltz_core.metrics import Metrics
from waltz_core.server.process.clients import ClientConnections
from waltz_core.server.process.flow_control import FlowLimits
from waltz_core.server.process.registry_requests import RegistryRequests
from waltz_core.transport.listening import listen
from waltz_core.wire.messages import WireProtocol

LIMITS = FlowLimits(1_024, 1 << 26, 1 << 30, 1 << 20)
PARTITION_COUNT = 4
CONFIG = ClientConfig(request_timeout_ms=int(TEST_TIMEOUT_S * 1_000), retry_interval_ms_min=5)


class RegistryServer:
    """A server without partitions: it answers requests for the registry only."""

    partition_count = PARTITION_COUNT

    def __init__(self, coordinator, tasks) -> None:
        self.hosts = {}
        self.registry = RegistryRequests(
            coordinator.writes, coordinator.next_client_id, PARTITION_COUNT, tasks
        )
        self._clients = ClientConnections(self, LIMITS, tasks, Metrics("server"))
        self.listener = None

    async def start(self) -> Owner:
        """Listen; return this server as the owner of a partition."""
        self.listener = await listen(WireProtocol.CLIENT, "127.0.0.1", 0, self._clients.accept)
        return Owner(f"127.0.0.1:{self.listener.port}", 1)

    async def stop(self) -> None:
        await self.listener.close("stopped")


class Owners:
    """A directory with these servers."""

    def __init__(self, *owners) -> None:
        self.owners = dict(enumerate(owners))

    async def owner(self, partition_id, *, after_failure):
        if partition_id not in self.owners:
            raise NotOwned("none")
        return self.owners[partition_id]


CONNECT = "memory:2181/waltz/test"


def user_of(directory, *, config=CONFIG):
    """Return the part of a client that the registry needs, connected to these servers."""
    links = ServerLinks(dial_timeout_s=TEST_TIMEOUT_S, late_answers_s=0)
    return SimpleNamespace(config=config, directory=directory, links=links, random=Random(1))


def requests_of(directory, *, config=CONFIG):
    """Return the registry as a client of these servers uses it, and its connections."""
    user = user_of(directory, config=config)
    return WriteRequests(CONNECT, user), user.links


class ServedWrites:
    """The registry through a server, with the methods of `WriteRegistry`."""

    def __init__(self, requests, coordinator) -> None:
        self._requests, self._coordinator = requests, coordinator
        self.begin, self.read, self.finish = requests.begin, requests.read, requests.finish
        self.check, self.forget = requests.check, requests.forget

    async def enter(self, write, task, run, _next_client_id):
        return (await self._requests.enter(write, task, run)).state

    async def read_tasks(self, write):
        tasks = await self._coordinator.writes.read_tasks(write)
        assert (await self._requests.tasks(write)).task_numbers == tuple(tasks)
        return tasks

    async def forget_expired(self):
        return await self._coordinator.writes.forget_expired()


class ServedWorld(MemoryWorld):
    """A world in which each member sends its requests to its own server."""

    def __init__(self, tasks) -> None:
        super().__init__()
        self._tasks = tasks
        self._open = []

    async def replaced(self, coordinator):
        server = RegistryServer(coordinator, self._tasks)
        requests, links = requests_of(Owners(await server.start()))
        self._open.append((links, server))
        return SimpleNamespace(
            writes=ServedWrites(requests, coordinator), next_client_id=coordinator.next_client_id
        )

    async def close(self) -> None:
        for links, server in self._open:
            await links.close("the test is over")
            await server.stop()


def serving(scenario):
    """Run a scenario of a world with servers."""

    async def play() -> None:
        async with asyncio.TaskGroup() as tasks:
            world = ServedWorld(tasks)
            try:
                await scenario(world)
            finally:
                await world.close()

    asyncio.run(play())
