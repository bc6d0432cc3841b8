"""Balance by load: a server measures and publishes its loads; the leader also moves partitions.

Periodically this module runs the planner with the loads from ZooKeeper.
`cluster/membership/balance.py` decides which moves are useful.

Rules:
    1. Only the leader moves partitions, and only with a compare-and-set on the version of the
       assignment that it has read. After a concurrent change it tries again in the next interval.
    2. No other code depends on this module. Failures are retried in the next interval.
    3. After the set of servers has changed, no partition moves until the loads of a whole averaging
       window are known.
    4. A server that cannot open its partitions seems idle. So such a server publishes no load, and
       no partition moves to it or from it.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from waltz_core.cluster.coordinator import Coordinator
from waltz_core.cluster.membership.balance import BalanceLimits, Balancer
from waltz_core.cluster.membership.loads import LoadAverages, LoadMeter
from waltz_core.cluster.membership.registration import ServersView
from waltz_core.driver import loop_clock_ms
from waltz_core.errors import WaltzError
from waltz_core.records.record import PartitionId, ServerId

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BalanceTimes:
    """The check interval, the averaging window, and how long a moved partition stays, in ms."""

    interval_ms: int
    window_ms: int
    cooldown_ms: int


class Rebalancer:
    """Balances partitions by load, by the module's rules.

    Args:
        server_id: the ID of this server.
        coordinator: publishes loads and writes moves.
        costs: returns the total cost of each partition that this server serves.
        times: the interval, the window and the cooldown.
        can_serve_partitions: returns whether this server can serve the partitions assigned to it
            (rule 4).
    """

    def __init__(
        self,
        server_id: ServerId,
        coordinator: Coordinator,
        costs: Callable[[], Mapping[PartitionId, float]],
        times: BalanceTimes,
        can_serve_partitions: Callable[[], bool] = lambda: True,
    ) -> None:
        self._server_id = server_id
        self._coordinator = coordinator
        self._costs = costs
        self._times = times
        self._can_serve_partitions = can_serve_partitions
        self._meter = LoadMeter(times.window_ms)
        self._averages = LoadAverages(times.window_ms)
        window_ms = times.window_ms
        limits = BalanceLimits(
            times.cooldown_ms, sustained_ms=window_ms // 2, rebalancing_ms=2 * window_ms
        )
        self._balancer = Balancer(limits)
        self._servers: frozenset[ServerId] = frozenset()
        self._paused_until_ms = 0

    async def run(self) -> None:
        """Measure and balance periodically, until cancelled."""
        while True:
            await asyncio.sleep(self._times.interval_ms / 1000)
            try:
                await self._measure_and_balance()
            except WaltzError as error:
                _log.info("balance.check_failed reason=%s", error)  # rule 2

    async def _measure_and_balance(self) -> None:
        loads = self._meter.update(self._costs(), loop_clock_ms())
        if self._can_serve_partitions():
            await self._coordinator.loads.publish(self._server_id, loads)
        else:
            await self._coordinator.loads.withdraw(self._server_id)
        view = await self._coordinator.read_servers()
        if not view.is_settled or self._server_id != min(view.servers):
            self._servers = frozenset()
            self._balancer.reset_history()
            return
        await self._plan_and_write_moves(view)

    async def _plan_and_write_moves(self, view: ServersView) -> None:
        """Plan and write moves, as the leader."""
        now_ms = loop_clock_ms()
        if view.servers.keys() != self._servers:
            self._servers = frozenset(view.servers)
            self._paused_until_ms = now_ms + self._times.window_ms
        published_loads = await self._coordinator.loads.read(
            view.servers.keys() - view.excluded,
            lambda error: _log.info("balance.load_unreadable error=%s", error),
        )
        owners = {partition_id: owner.server_id for partition_id, owner in view.owners.items()}
        loads = self._averages.update(published_loads, owners)
        if now_ms < self._paused_until_ms:
            self._balancer.reset_history()
            return  # rule 3
        preferred = {
            partition for descriptor in view.servers.values() for partition in descriptor.preferred
        }
        moves = self._balancer.plan_moves(owners, preferred, loads, published_loads.keys(), now_ms)
        if moves and await self._coordinator.move_partitions(view, moves):
            self._balancer.on_partitions_moved(moves, now_ms)
            for partition_id, target in moves.items():
                _log.info(
                    "balance.partition_moved partition=%s load=%.0f from=%s to=%s",
                    partition_id,
                    loads[partition_id],
                    owners[partition_id],
                    target,
                )
