"""Links between real daemons are cut or slowed down, in network namespaces.

The row numbers are those of the scenario table (docs/design/correctness.md). Each test checks the
expected behavior, and that all reported outcomes were right.
"""

import time

import pytest

from tests.chaos.cluster import QUORUM_TIMEOUT_MS, SESSION_MS
from tests.chaos.conftest import CLIENT, WORLD, NetworkScenario
from tests.chaos.lag import LinkSettings
from tests.chaos.network import both_ways
from tests.time_limits import machine_slowdown

pytestmark = pytest.mark.fault
ALL = range(WORLD.partitions)
STORAGES, ZOOKEEPERS = WORLD.names("storage"), WORLD.names("zookeeper")
SESSION_S = SESSION_MS / 1000
# The time that a test may take in addition to the guaranteed limit, on an idle machine.
MARGIN_S = 4.0


# The server notices both cuts in the same way: no answer arrives.
@pytest.mark.parametrize(
    "cut_directions", [pytest.param("both", marks=pytest.mark.slow), "to the server"]
)
def test_a_server_without_a_quorum_of_storages_releases_its_partitions(
    scenario: NetworkScenario, cut_directions: str
):
    """Rows 18 and 20: ZooKeeper is available, so no other process detects the cut.

    If `cut_directions` is "to the server", storages receive requests, and only answers are lost.
    """
    links = [(storage, "server-1") for storage in STORAGES[:2]]
    if cut_directions == "both":
        links = both_ways(["server-1"], STORAGES[:2])
    lost = scenario.owned_by("server-1")
    with scenario.network.cut_during(links):
        cut_s = time.monotonic()
        scenario.await_commits(lost, since_s=cut_s, seconds=QUORUM_TIMEOUT_MS / 1000 + 3 * MARGIN_S)
        assert set(scenario.cluster.owners().values()) == {"server-2"}
    scenario.await_commits(ALL, since_s=time.monotonic())
    scenario.check()


def test_a_server_cut_off_from_zookeeper_is_replaced_by_another_server(scenario: NetworkScenario):
    """Row 19: the server serves until another server owns its partitions; then it is fenced."""
    lost = scenario.owned_by("server-1")
    with scenario.network.cut_during(both_ways(["server-1"], ZOOKEEPERS)):
        cut_s = time.monotonic()
        scenario.wait(
            "server-2 owns all partitions",
            lambda: set(scenario.cluster.owners().values()) == {"server-2"},
        )
        scenario.await_commits(lost, since_s=time.monotonic())
        assert scenario.gap_s(lost, since_s=cut_s) < (SESSION_S + MARGIN_S) * machine_slowdown()
    scenario.await_commits(ALL, since_s=time.monotonic())
    scenario.check()


def test_one_slow_storage_does_not_slow_appends(scenario: NetworkScenario):
    """Row 35: two of three replicas are a quorum."""
    lag = LinkSettings(800)
    links = both_ways(["storage-3"], WORLD.names("server"))
    scenario.network.delay(links, lag)
    slow_s = time.monotonic()
    scenario.wait("500 commits", lambda: len(scenario.latencies_s(since_s=slow_s)) >= 500)
    waits = scenario.latencies_s(since_s=slow_s)
    scenario.network.remove_delays(links)
    # An append that waits for the third replica takes at least one round trip on the slow link. On
    # a busy machine, other appends may take as long.
    quick = sum(wait < lag.delay_ms / 1000 for wait in waits)
    assert quick > 0.5 * len(waits), f"{quick} of {len(waits)} quick, longest {waits[-1]:.2f} s"
    scenario.check()


def test_a_lost_host_is_replaced_and_cannot_write_when_it_returns(scenario: NetworkScenario):
    """Row 16: a takeover takes at most the session timeout plus half a second."""
    lost = scenario.owned_by("server-1")
    everything = [*WORLD.members, CLIENT, "operator"]
    gone_s = time.monotonic()
    scenario.network.cut(both_ways(["server-1"], everything))
    scenario.wait(
        "server-2 owns all partitions",
        lambda: set(scenario.cluster.owners().values()) == {"server-2"},
    )
    scenario.await_commits(lost, since_s=gone_s)
    assert scenario.gap_s(lost, since_s=gone_s) < (SESSION_S + 0.5 + MARGIN_S) * machine_slowdown()
    with scenario.cluster.client() as client:
        replicas_before = {each: client.replicas(each, linearizable=True) for each in lost}
    scenario.network.restore(both_ways(["server-1"], everything))
    scenario.wait(
        "server-1 owns partitions again", lambda: len(set(scenario.cluster.owners().values())) == 2
    )
    scenario.await_commits(ALL, since_s=time.monotonic())
    with scenario.cluster.client() as client:
        for each in lost:
            first = replicas_before[each].high_water_mark + 1
            last = client.high_water_mark(each, linearizable=True)
            assert last >= first
            for chunk in client.read_range(each, first, last):
                assert all(
                    entry.session_id >= replicas_before[each].session_id for entry in chunk.lineage
                )
    scenario.check()


def test_a_client_that_cannot_reach_one_server_continues_with_the_other(scenario: NetworkScenario):
    cut_off, others = scenario.owned_by("server-1"), scenario.owned_by("server-2")
    with scenario.network.cut_during(both_ways([CLIENT], ["server-1"])):
        # The outcome of an append in flight may still be reported after the link has broken.
        cut_s = time.monotonic()
        scenario.await_commits(others, since_s=cut_s)
        scenario.await_commits(others, since_s=time.monotonic())
        assert all(scenario.current_run.first_commit_s(each, cut_s) is None for each in cut_off)
    scenario.await_commits(ALL, since_s=time.monotonic())
    scenario.check()
