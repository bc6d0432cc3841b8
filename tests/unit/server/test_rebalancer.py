"""The driver of balance by load, over a ZooKeeper in memory."""

import asyncio
from types import SimpleNamespace

import pytest

from tests.cluster_contract import CLUSTER_KEY, CallbackRecorder, run_meanwhile, server_descriptor
from tests.loops import run_in_virtual_time
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.cluster.change.creation import NewCluster
from waltz_core.cluster.membership.balance import Balancer
from waltz_core.cluster.zookeeper.zookeeper_in_memory import MemoryZooKeeper
from waltz_core.server.locking.pending_appends import AppendCounters
from waltz_core.server.process.partition_cost import cost_of
from waltz_core.server.process.rebalancer import BalanceTimes, Rebalancer

ROOT = "/w"
RATES = {0: 10_000.0, 1: 1_000.0, 2: 1_000.0, 3: 1_000.0}
PACE = BalanceTimes(interval_ms=5, window_ms=100, cooldown_ms=3_600_000)


async def run_balancers(zookeeper, *, servers, reporting, unavailable=None):
    """Return views and rounds of a cluster in which the servers in `reporting` balance the load.

    The partitions of a server in `unavailable` do not open, so they cause no load.
    """
    unavailable_servers = set() if unavailable is None else unavailable
    await zookeeper.coordinator(ROOT).create_cluster(NewCluster("w", len(RATES), CLUSTER_KEY))
    inbox, rounds, balancers, by_server = CallbackRecorder(), CallbackRecorder(), [], {}
    for server_id in servers:
        coordinator = zookeeper.coordinator(ROOT)
        coordinator.keep_owners()
        await coordinator.register_server(server_descriptor(server_id))
        balancers.append(coordinator.follow_servers(inbox))
        by_server[server_id] = coordinator

    def loads_of(server_id):
        rounds(len(rounds.values))
        now = asyncio.get_running_loop().time()
        partitions = inbox.values[-1].partitions_of(server_id) if inbox.values else {}
        rate = 0.0 if server_id in unavailable_servers else 1.0
        return {partition: RATES[partition] * now * rate for partition in partitions}

    for server_id in reporting:
        balancing = Rebalancer(
            server_id,
            by_server[server_id],
            lambda each=server_id: loads_of(each),
            PACE,
            lambda each=server_id: each not in unavailable_servers,
        )
        balancers.append(balancing.run())
    return inbox, rounds, balancers


async def wait_for_rounds(rounds):
    """Wait for enough rounds for a partition to move."""
    look_count = len(rounds.values)
    await rounds.wait_for(lambda count: count > look_count + 5 * PACE.window_ms // PACE.interval_ms)


def owners(view):
    return {partition: owner.server_id for partition, owner in view.owners.items()}


def test_the_leader_moves_other_partitions_off_the_server_of_a_hot_partition():
    async def scenario():
        inbox, rounds, balancers = await run_balancers(
            MemoryZooKeeper(asyncio.Event), servers=(1, 2), reporting=(1, 2)
        )
        async with asyncio.timeout(TEST_TIMEOUT_S), run_meanwhile(*balancers):
            await inbox.wait_for(lambda view: owners(view) == {0: 1, 1: 1, 2: 2, 3: 2})
            await inbox.wait_for(lambda view: owners(view) == {0: 1, 1: 2, 2: 2, 3: 2})
            await wait_for_rounds(rounds)
            assert owners(inbox.values[-1]) == {0: 1, 1: 2, 2: 2, 3: 2}
            assert [owner.generation for owner in inbox.values[-1].owners.values()] == [1, 2, 1, 1]

    run_in_virtual_time(scenario())


def test_no_partition_moves_to_a_server_without_load_reports():
    async def scenario():
        zookeeper = MemoryZooKeeper(asyncio.Event)
        inbox, rounds, balancers = await run_balancers(zookeeper, servers=(1, 2), reporting=(1,))
        async with asyncio.timeout(TEST_TIMEOUT_S), run_meanwhile(*balancers):
            await inbox.wait_for(lambda view: owners(view) == {0: 1, 1: 1, 2: 2, 3: 2})
            await wait_for_rounds(rounds)
            assert owners(inbox.values[-1]) == {0: 1, 1: 1, 2: 2, 3: 2}
            assert f"{ROOT}/x/load/1" in zookeeper.dump()

    run_in_virtual_time(scenario())


def test_unreadable_loads_of_a_server_are_ignored_and_logged(caplog):
    caplog.set_level("INFO")

    async def scenario():
        zookeeper = MemoryZooKeeper(asyncio.Event)
        inbox, rounds, balancers = await run_balancers(zookeeper, servers=(1, 2), reporting=(1,))
        nodes = zookeeper.coordinator(ROOT).loads._nodes
        damaged = b'{"format":1,"loads":{"2":[%d,1]}}' % 10**400
        await nodes.put_ephemeral(nodes.paths.load(2), damaged, nodes.paths.loads)
        async with asyncio.timeout(TEST_TIMEOUT_S), run_meanwhile(*balancers):
            await inbox.wait_for(lambda view: owners(view) == {0: 1, 1: 1, 2: 2, 3: 2})
            await wait_for_rounds(rounds)
        assert (
            f"balance.load_unreadable error={nodes.paths.load(2)}: published loads" in caplog.text
        )

    run_in_virtual_time(scenario())


def test_no_partition_moves_to_a_server_that_cannot_serve():
    async def scenario():
        unavailable = {2}
        zookeeper = MemoryZooKeeper(asyncio.Event)
        inbox, rounds, balancers = await run_balancers(
            zookeeper, servers=(1, 2), reporting=(1, 2), unavailable=unavailable
        )
        async with asyncio.timeout(TEST_TIMEOUT_S), run_meanwhile(*balancers):
            await inbox.wait_for(lambda view: owners(view) == {0: 1, 1: 1, 2: 2, 3: 2})
            await wait_for_rounds(rounds)
            assert owners(inbox.values[-1]) == {0: 1, 1: 1, 2: 2, 3: 2}
            assert f"{ROOT}/x/load/2" not in zookeeper.dump()
            unavailable.clear()
            await rounds.wait_for(lambda _: f"{ROOT}/x/load/2" in zookeeper.dump())
            unavailable.add(2)
            await rounds.wait_for(lambda _: f"{ROOT}/x/load/2" not in zookeeper.dump())

    run_in_virtual_time(scenario())


def test_the_load_includes_bytes_rows_and_answers():
    figures = AppendCounters()
    assert cost_of(figures, answers=0, answer_bytes=0) == 0
    assert cost_of(figures, answers=0, answer_bytes=2048) == 2
    figures.committed_bytes = 10 * 1024
    assert cost_of(figures, answers=0, answer_bytes=0) == 10
    figures.committed = 8
    assert cost_of(figures, answers=1, answer_bytes=0) == 27


class ScriptedCoordinator:
    """A coordinator that returns the given views, and equal loads for all servers."""

    def __init__(self, views):
        self.views = list(views)
        self.loads = self

    async def read_servers(self):
        return self.views.pop(0)

    async def publish(self, server_id, loads):
        pass

    async def read(self, server_ids, _on_ignored):
        return {server_id: {} for server_id in server_ids}


def servers_view(*servers, is_settled=True):
    described = {server: SimpleNamespace(preferred=()) for server in servers}
    return SimpleNamespace(is_settled=is_settled, servers=described, owners={}, excluded=())


@pytest.mark.parametrize(
    "between", [servers_view(1, 2, is_settled=False), servers_view(0, 1, 2), servers_view(1, 2, 3)]
)
def test_a_change_of_servers_or_leader_restarts_the_observation(monkeypatch, between):
    called, now_ms = [], 0
    monkeypatch.setattr("waltz_core.server.process.rebalancer.loop_clock_ms", lambda: now_ms)
    monkeypatch.setattr(Balancer, "reset_history", lambda _: called.append("away"))
    monkeypatch.setattr(Balancer, "plan_moves", lambda *_: called.append("plan") or {})

    async def scenario():
        nonlocal now_ms
        views = [servers_view(1, 2), servers_view(1, 2), between]
        balancing = Rebalancer(1, ScriptedCoordinator(views), dict, PACE)
        for _ in views[:3]:
            await balancing._measure_and_balance()
            now_ms += PACE.window_ms

    run_in_virtual_time(scenario())
    assert called == ["away", "plan", "away"]
