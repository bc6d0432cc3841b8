"""The planner of balance by load: single plans, and hours of virtual time with noise."""

import random
from collections import Counter, defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waltz_core.cluster.membership.assignment import assign_partitions, move_partitions
from waltz_core.cluster.membership.balance import BalanceLimits, Balancer
from waltz_core.cluster.membership.loads import LoadAverages, LoadMeter
from waltz_core.cluster.znodes.model import PartitionAssignment, ServerDescriptor

PASS_PAUSE_MS = 600_000
INTERVAL_MS, WINDOW_MS = 5_000, 30_000
MINUTE_MS = 60_000


def plan(owners, loads, *, servers=None, preferred=(), now_ms=0, limits=None):
    balancer = Balancer(limits or BalanceLimits(PASS_PAUSE_MS, 0, 2 * WINDOW_MS))
    return balancer.plan_moves(
        owners, preferred, loads, servers or sorted(set(owners.values())), now_ms
    )


def loads_by_server(owners, loads):
    counts = Counter()
    for partition, owner in owners.items():
        counts[owner] += loads[partition]
    return counts


# --- single plans


@pytest.mark.parametrize(
    ("owners", "loads", "moves"),
    [
        pytest.param(
            {0: 1, 1: 1, 2: 2, 3: 2}, [10_000, 1_000, 1_000, 1_000], {1: 2}, id="hot one stays"
        ),
        pytest.param({0: 1, 1: 2, 2: 2, 3: 2}, [10_000, 1_000, 1_000, 1_000], {}, id="alone"),
        pytest.param({0: 1, 1: 1, 2: 2, 3: 2}, [1_000, 1_100, 1_000, 1_000], {}, id="only noise"),
    ],
)
def test_other_partitions_move_away_from_the_server_of_a_hot_partition(owners, loads, moves):
    assert plan(owners, dict(enumerate(loads))) == moves


def test_two_hot_partitions_are_separated():
    owners = {0: 1, 1: 1, 2: 2}
    assert len(plan(owners, {0: 600, 1: 600, 2: 100})) == 1


def test_a_difference_within_the_noise_moves_no_partition():
    owners = {0: 1, 1: 1, 2: 2, 3: 2}
    assert plan(owners, {0: 1_000, 1: 1_100, 2: 1_000, 3: 1_000}) == {}


def test_idle_partitions_are_spread_by_count():
    owners = {0: 1, 1: 1, 2: 1, 3: 1}
    moves = plan(owners, dict.fromkeys(owners, 0.5), servers=[1, 2])
    assert len(moves) == 2
    assert set(moves.values()) == {2}


def test_servers_without_a_load_report_keep_their_partitions_and_get_no_others():
    owners = {0: 1, 1: 1, 2: 3}
    assert plan(owners, {0: 500, 1: 500}, servers=[1, 2]) in ({0: 2}, {1: 2})
    assert plan(owners, {0: 500, 1: 500, 2: 9_999}, servers=[2, 3]) == {}
    assert plan(owners, {0: 500, 1: 500}, servers=[1]) == {}


def test_a_plan_moves_a_limited_number_of_partitions_and_moves_them_again_only_after_a_pause():
    owners = dict.fromkeys(range(100), 1)
    loads = dict.fromkeys(owners, 100.0)
    balancer = Balancer(BalanceLimits(PASS_PAUSE_MS, 0, 2 * WINDOW_MS, moves_max=5))
    moves = balancer.plan_moves(owners, (), loads, [1, 2], 0)
    assert len(moves) == 5
    balancer.on_partitions_moved(moves, 0)
    hot = {**dict.fromkeys(owners, 1.0), **dict.fromkeys(moves, 10_000.0)}
    assert (
        not balancer.plan_moves({**owners, **moves}, (), hot, [1, 2], PASS_PAUSE_MS - 1).keys()
        & moves
    )
    assert balancer.plan_moves({**owners, **moves}, (), hot, [1, 2], PASS_PAUSE_MS).keys() & moves


@st.composite
def clusters(draw):
    servers = draw(st.lists(st.integers(1, 50), min_size=1, max_size=6, unique=True))
    count = draw(st.integers(1, 40))
    owners = {p: draw(st.sampled_from(servers)) for p in range(count)}
    loads = {p: draw(st.floats(0, 1e6)) for p in range(count) if draw(st.integers(0, 9)) or p == 0}
    preferred = draw(st.sets(st.integers(0, count - 1), max_size=count))
    return servers, owners, loads, preferred


@given(clusters())
def test_every_plan_of_the_balancer_keeps_the_rules(cluster):
    servers, owners, loads, preferred = cluster
    limits = BalanceLimits(PASS_PAUSE_MS, 0, 2 * WINDOW_MS)
    moves = plan(owners, loads, servers=servers, preferred=preferred, limits=limits)
    assert moves.keys() <= owners.keys() & loads.keys()  # rule 5
    assert not moves.keys() & preferred
    assert set(moves.values()) <= set(servers)
    assert len(moves) <= limits.moves_max
    assert all(owners[partition] != target for partition, target in moves.items())
    weights = {p: loads.get(p, 0.0) for p in owners}
    before, after = loads_by_server(owners, weights), loads_by_server({**owners, **moves}, weights)
    # Idle partitions have a small load, too, so the result may be worse by this amount.
    assert max(after.values()) <= max(before.values()) + 10 * len(owners)


@given(clusters())
def test_repeated_planning_reaches_a_plan_without_moves(cluster):
    servers, owners, loads, preferred = cluster
    balancer = Balancer(BalanceLimits(cooldown_ms=1, sustained_ms=0, rebalancing_ms=2 * WINDOW_MS))
    for number in range(30):
        now_ms = number * INTERVAL_MS  # The cooldown has passed, so every partition may move again.
        moves = balancer.plan_moves(owners, preferred, loads, servers, now_ms)
        if not moves:
            return
        balancer.on_partitions_moved(moves, now_ms)
        owners = {**owners, **moves}
    raise AssertionError(f"still moving: {moves}")


def test_a_short_imbalance_moves_no_partition():
    balancer = Balancer(BalanceLimits(PASS_PAUSE_MS, 15_000, 2 * WINDOW_MS))
    owners = {0: 1, 1: 1, 2: 2, 3: 2}
    even, uneven = dict.fromkeys(owners, 500), {0: 10_000, 1: 1_000, 2: 1_000, 3: 1_000}
    observations = [
        (0, uneven),
        (10_000, uneven),
        (14_000, even),
        (15_000, uneven),
        (29_000, uneven),
    ]
    for now_ms, loads in observations:
        assert balancer.plan_moves(owners, (), loads, (1, 2), now_ms) == {}
    assert balancer.plan_moves(owners, (), uneven, (1, 2), 30_000) == {1: 2}


@pytest.mark.parametrize("is_only_report", [True, False])
def test_an_imbalance_without_a_complete_history_moves_no_partition(is_only_report):
    balancer = Balancer(BalanceLimits(PASS_PAUSE_MS, 15_000, 2 * WINDOW_MS))
    owners, uneven = {0: 1, 1: 1, 2: 2, 3: 2}, {0: 10_000, 1: 1_000, 2: 1_000, 3: 1_000}
    assert balancer.plan_moves(owners, (), uneven, (1, 2), 0) == {}
    if is_only_report:  # only one of the servers reports its loads
        assert balancer.plan_moves(owners, (), uneven, (1,), 10_000) == {}
    else:  # the leader or the list of servers has changed
        balancer.reset_history()
    assert balancer.plan_moves(owners, (), uneven, (1, 2), 20_000) == {}
    assert balancer.plan_moves(owners, (), uneven, (1, 2), 35_000) == {1: 2}


def test_the_first_unconfirmed_load_report_moves_no_partition():
    """All partitions were idle; one server reports new load, the report of the other is old."""
    balancer = Balancer(BalanceLimits(PASS_PAUSE_MS, 15_000, 2 * WINDOW_MS))
    owners = {0: 1, 1: 1, 2: 2, 3: 2}
    loads = {0: 85, 1: 85, 2: 85, 3: 300}
    assert balancer.plan_moves(owners, (), loads, (1, 2), 0) == {}
    assert balancer.plan_moves(owners, (), loads, (1, 2), 15_000) == {2: 1}
    balancer.on_partitions_moved([2], 15_000)
    owners[2] = 1
    assert balancer.plan_moves(owners, (), loads, (1, 2), 30_000) == {}
    loads_with_old_report = {0: 148, 1: 140, 2: 300, 3: 67}
    assert balancer.plan_moves(owners, (), loads_with_old_report, (1, 2), 50_000) == {}
    assert balancer.plan_moves(owners, (), loads_with_old_report | {3: 1_500}, (1, 2), 55_000) == {}
    # A lasting imbalance is confirmed; the interrupted rebalancing ends first.
    assert balancer.plan_moves(owners, (), loads_with_old_report, (1, 2), 60_000) == {}
    assert balancer.plan_moves(owners, (), loads_with_old_report, (1, 2), 74_000) == {}
    assert balancer.plan_moves(owners, (), loads_with_old_report, (1, 2), 75_000) == {0: 2, 1: 2}


# --- hours


class Cluster:
    """Servers with load meters, partitions with loads, and the leader's planner; virtual time."""

    def __init__(self, rates, server_count, seed, noise):
        self.now_ms = 0
        self.rates = dict(rates)
        self.moves = []  # (when, partition)
        self._random = random.Random(seed)
        self._noise = noise
        self._totals = Counter()
        servers = {n: ServerDescriptor(n, "h", n) for n in range(1, server_count + 1)}
        self.servers = servers
        self.assignment = assign_partitions(
            PartitionAssignment(), servers, cversion=1, partition_count=len(self.rates)
        )
        self._meters = {server: LoadMeter(WINDOW_MS) for server in servers}
        self._averages = LoadAverages(WINDOW_MS)
        self._balancer = Balancer(BalanceLimits(PASS_PAUSE_MS, WINDOW_MS // 2, 2 * WINDOW_MS))

    @property
    def owners(self):
        return {p: s for s, owned in self.assignment.servers.items() for p in owned}

    def run(self, ms):
        until_ms = self.now_ms + ms
        while self.now_ms < until_ms:
            self.now_ms += INTERVAL_MS
            self._report_and_balance()

    def _report_and_balance(self):
        for partition, rate in self.rates.items():
            factor = self._random.uniform(1 - self._noise, 1 + self._noise)
            self._totals[partition] += rate * factor * INTERVAL_MS / 1000
        # A new owner measures from the time of its takeover.
        reports = {
            server: self._meters[server].update(
                {p: self._totals[p] for p in self.assignment.servers[server]}, self.now_ms
            )
            for server in self.servers
        }
        loads = self._averages.update(reports, self.owners)
        moves = self._balancer.plan_moves(self.owners, (), loads, self.servers, self.now_ms)
        if moves:
            generations = {
                p: g for owned in self.assignment.servers.values() for p, g in owned.items()
            }
            self.assignment = move_partitions(self.assignment, moves)
            self._balancer.on_partitions_moved(moves, self.now_ms)
            for owned in self.assignment.servers.values():
                for p, generation in owned.items():
                    assert generation == generations[p] + (p in moves)
            self.moves += [(self.now_ms, p) for p in moves]
        assert sorted(self.owners) == sorted(self.rates)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("noise", [0.0, 0.2, 0.5])
@pytest.mark.parametrize(("partition_count", "server_count"), [(4, 2), (9, 3)])
def test_a_hot_partition_has_a_server_to_itself_within_a_minute(
    partition_count, server_count, noise, seed
):
    cluster = Cluster(dict.fromkeys(range(partition_count), 100.0), server_count, seed, noise)
    cluster.run(5 * MINUTE_MS)
    assert not cluster.moves
    hot = seed % partition_count
    cluster.rates[hot] = 1_000.0
    cluster.run(MINUTE_MS)
    owners = cluster.owners
    assert [p for p, owner in owners.items() if owner == owners[hot]] == [hot]
    cluster.run(MINUTE_MS)  # the current rebalancing ends
    move_count = len(cluster.moves)
    assert move_count <= partition_count
    assert hot not in {partition for _, partition in cluster.moves}
    cluster.run(60 * MINUTE_MS)
    assert len(cluster.moves) == move_count


@pytest.mark.parametrize("seed", range(2))
def test_an_hour_of_noise_moves_few_partitions(seed):
    rng = random.Random(seed)
    rates = {p: rng.choice([0.0, 1.0, 50.0, 200.0, 1_000.0]) for p in range(24)}
    cluster = Cluster(rates, 3, seed, 0.5)
    cluster.run(20 * MINUTE_MS)
    move_count = len(cluster.moves)
    assert move_count <= len(rates)
    cluster.run(60 * MINUTE_MS)
    assert len(cluster.moves) - move_count <= 8
    move_times = defaultdict(list)
    for at_ms, partition in cluster.moves:
        move_times[partition].append(at_ms)
    for times in move_times.values():
        assert all(b - a >= PASS_PAUSE_MS for a, b in pairwise(times))


def test_an_imbalance_that_no_move_improves_moves_no_partition():
    cluster = Cluster(dict.fromkeys(range(3), 600.0), 2, 1, 0.2)
    cluster.run(120 * MINUTE_MS)
    assert not cluster.moves


def test_a_load_that_varies_does_not_move_partitions_each_time():
    cluster = Cluster(dict.fromkeys(range(8), 100.0), 2, 1, 0.2)
    for minute in range(60):
        cluster.rates[3] = 1_000.0 if minute % 2 else 100.0
        cluster.run(MINUTE_MS)
    assert max(Counter(p for _, p in cluster.moves).values()) <= 60 * MINUTE_MS // PASS_PAUSE_MS
    assert len(cluster.moves) <= 8 * 60 * MINUTE_MS // PASS_PAUSE_MS


def test_many_partitions_are_balanced():
    rng = random.Random(1)
    rates = {p: 100_000.0 / (1 + p) * rng.uniform(0.5, 1.5) for p in range(200)}
    cluster = Cluster(rates, 3, 1, 0.3)
    cluster.run(10 * MINUTE_MS)
    totals = loads_by_server(cluster.owners, rates)
    assert max(totals.values()) < 1.3 * sum(totals.values()) / 3
    move_count = len(cluster.moves)
    cluster.run(20 * MINUTE_MS)
    assert len(cluster.moves) - move_count <= 3
