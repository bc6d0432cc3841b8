"""Clients of 0.13 and of this version write the same counters while servers are killed."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.fault.conftest import SESSION_MS
from tests.integration.test_original_clients import Counters
from tests.loops import poll_until
from tests.original_client import OriginalClient, Req
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.client import BYTES, AsyncCallbacks, AsyncWaltzClient, lock, transactional
from waltz_core.cluster.membership.registration import ServersView
from waltz_core.cluster.zookeeper.zookeeper_session import open_session
from waltz_core.local import LocalCluster, running_cluster
from waltz_core.records.raw_records import HEADER_DTYPE, headers_of
from waltz_core.transport import net

NAMES = ("a", "b", "c")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    settings: dict[str, dict[str, object]] = {
        "server": {"zookeeper_session_timeout_ms": SESSION_MS}
    }
    with running_cluster(
        tmp_path, settings=settings, storage_count=1, partition_count=2
    ) as started:
        yield started


class CurrentClientState(AsyncCallbacks):
    """The same state, computed by a client of this version."""

    def __init__(self) -> None:
        self.counters = Counters()

    async def apply_transaction(self, transaction) -> None:
        data = await transaction.data()
        self.counters.apply(0, transaction.transaction_id, 0, Req(0, 0, 0, 0), data)


def endpoints_of(view: ServersView) -> dict[str, dict[int, int]]:
    return {
        server.address: {int(p): int(g) for p, g in view.partitions_of(server_id).items()}
        for server_id, server in view.servers.items()
    }


class Scenario:
    """Clients of 0.13 that follow the assignment of partitions, and the owner of partition 0."""

    def __init__(self) -> None:
        self.clients: list[tuple[OriginalClient, Counters]] = []
        self.endpoints: dict[str, dict[int, int]] = {}

    def follow(self, view: ServersView) -> None:
        self.endpoints = endpoints_of(view)
        for client, _ in self.clients:
            client.set_endpoints(self.endpoints)

    @property
    def owner(self) -> str | None:
        return next((each for each, owned in self.endpoints.items() if 0 in owned), None)


@contextlib.asynccontextmanager
async def originals(connect: str, count: int) -> AsyncIterator[Scenario]:
    scenario = Scenario()
    async with open_session(connect) as coordinator, contextlib.AsyncExitStack() as stack:
        for number in range(count):
            counters = Counters()
            client_id = await coordinator.next_client_id()
            versions = tuple(range(5 - number))
            client = OriginalClient(client_id, [0], counters.apply, versions=versions)
            scenario.clients.append((await stack.enter_async_context(client), counters))
        following = asyncio.ensure_future(coordinator.follow_servers(scenario.follow))  # noqa: TID251
        try:
            yield scenario
        finally:
            following.cancel()


async def count_up(is_over: asyncio.Event, client: OriginalClient, counters: Counters) -> None:
    for time in itertools.takewhile(lambda _: not is_over.is_set(), itertools.count()):
        await client.submit(0, lambda time=time: counters.count_up(NAMES[time % len(NAMES)]))


async def count_up_with_current_client(
    is_over: asyncio.Event, client: AsyncWaltzClient, counters: Counters
) -> int:
    """Increment counters until the end of the run; return how many increments were committed."""
    committed = 0
    for time in itertools.takewhile(lambda _: not is_over.is_set(), itertools.count()):
        name = NAMES[time % len(NAMES)]

        @transactional(partition=0)
        def increment(builder, name=name):
            append = counters.count_up(name)
            assert append["write"] == [lock(name)]
            builder.set_write_locks([lock(name)])
            builder.set_transaction_data(append["data"], BYTES)
            return True

        await (await client.submit(increment()))
        committed += 1
    return committed


async def log_of(client: AsyncWaltzClient) -> list[Req]:
    """Return the writer of each transaction of partition 0."""
    last = await client.high_water_mark(0, linearizable=True)
    found: list[Req] = []
    async for chunk in client.read_range(0, 0, last):
        headers = np.frombuffer(headers_of(chunk.records, chunk.lengths), HEADER_DTYPE)
        found += [Req(*map(int, each)) for each in headers["req_id"]]
    return found


def check_outcomes(scenario: Scenario, log: list[Req]) -> None:
    """Check that the log has each committed append once, and no append reported as failed."""
    assert len(set(log)) == len(log)
    committed = set(log)
    for client, _ in scenario.clients:
        for each, is_committed in client.outcomes.items():
            assert (each in committed) == is_committed, each


def test_counters_have_the_right_sum_although_owners_are_killed(cluster: LocalCluster) -> None:
    async def main() -> None:
        current_state = CurrentClientState()
        async with (
            AsyncWaltzClient.connect(cluster.connect) as client,
            originals(cluster.connect, 5) as scenario,
        ):
            await client.subscribe(current_state, [0])
            members = {
                f"{cluster.host}:{member.port}": member.name
                for member in cluster.members
                if member.kind == "server"
            }
            async with asyncio.TaskGroup() as tasks:
                is_over = asyncio.Event()
                for each in scenario.clients:
                    tasks.create_task(count_up(is_over, *each))
                current_task = tasks.create_task(
                    count_up_with_current_client(is_over, client, current_state.counters)
                )
                for round_number in (1, 2):
                    mark = len(current_state.counters.applied)
                    await poll_until(
                        lambda mark=mark: len(current_state.counters.applied) >= mark + 60
                    )
                    owner = scenario.owner
                    assert owner is not None
                    await asyncio.to_thread(cluster.kill, members[owner])
                    await poll_until(lambda owner=owner: scenario.owner not in (owner, None))
                    if round_number == 1:
                        await asyncio.to_thread(cluster.start, members[owner])
                        await poll_until(lambda: len(scenario.endpoints) == 2)
                mark = len(current_state.counters.applied)
                await poll_until(lambda: len(current_state.counters.applied) >= mark + 60)
                is_over.set()
            total = current_task.result() + sum(
                sum(each.outcomes.values()) for each, _ in scenario.clients
            )
            for counters in (current_state.counters, *(each for _, each in scenario.clients)):
                await poll_until(lambda counters=counters: sum(counters.values.values()) == total)
                assert counters.applied == current_state.counters.applied
            check_outcomes(scenario, await log_of(client))

    async def run_with_timeout() -> None:
        async with asyncio.timeout(TEST_TIMEOUT_S):
            await main()

    net.run(run_with_timeout())
