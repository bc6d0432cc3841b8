"""A schedule depends on its seed only, and slow links keep the order of packets."""

import random
from collections import Counter

from tests.chaos.lag import QUEUE_S_MAX, LinkSettings, SlowLink
from tests.chaos.schedule import KINDS, draw_schedule


def test_a_seed_determines_the_schedule():
    assert draw_schedule(17, 60.0) == draw_schedule(17, 60.0)
    assert draw_schedule(17, 60.0) != draw_schedule(18, 60.0)


def test_schedules_contain_every_kind_of_fault_and_target_only_existing_members():
    kinds: Counter[str] = Counter()
    for seed in range(60):
        schedule = draw_schedule(seed, 60.0)
        cluster_size = schedule.cluster_size
        known = {*cluster_size.members, *cluster_size.names("client"), "operator"}
        assert schedule.faults
        moments = [fault.at_s for fault in schedule.faults]
        assert moments == sorted(moments)
        for fault in schedule.faults:
            kinds[fault.kind] += 1
            assert fault.targets or fault.links
            assert {*fault.targets, *(name for link in fault.links for name in link)} <= known
            assert fault.for_s > 0
    assert set(kinds) == {"kill", "stop", "freeze", "full", "cut", "slow"}
    assert len(KINDS) == 10


def test_odd_seeds_have_an_object_store_and_schedules_kill_members_of_each_kind():
    for seed in range(20):
        assert draw_schedule(seed, 60.0).cluster_size.stores == seed % 2
        killed = Counter(
            name.partition("-")[0]
            for fault in draw_schedule(seed, 300.0, archives=True).faults
            for name in fault.targets
            if fault.kind == "kill"
        )
        assert min(killed[each] for each in ("storage", "server", "store")) > 10


def test_packets_of_a_slow_link_stay_in_order():
    line = SlowLink(LinkSettings(10, 50), random.Random(1))
    leaves = [line.departure_s(1000, number / 1000) for number in range(100)]
    assert leaves == sorted(leaves)
    assert leaves[0] is not None
    assert leaves[0] >= 0.01


def test_a_link_with_a_rate_limit_has_a_bounded_queue():
    line = SlowLink(LinkSettings(bytes_per_s=1000), random.Random(1))
    leaves = [line.departure_s(500, 0.0) for _ in range(10)]
    assert leaves[:3] == [0.5, 1.0, 1.5]
    departures = [departure_s for departure_s in leaves if departure_s is not None]
    assert departures[-1] == QUEUE_S_MAX + 0.5
    assert leaves[len(departures) :] == [None] * (10 - len(departures))


def test_a_lossy_link_loses_about_the_configured_share_of_packets():
    line = SlowLink(LinkSettings(loss=0.3), random.Random(1))
    lost = sum(line.departure_s(1, float(number)) is None for number in range(1000))
    assert 200 < lost < 400
