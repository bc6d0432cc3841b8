"""The simulator: runs are repeatable, and its world injects faults as configured."""

import json
import os
import subprocess
import sys
from itertools import count, pairwise
from typing import NamedTuple

import pytest

from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.records.record import PartitionId, ReqId
from waltz_core.wire.messages import FlushRequest
from waltz_sim.faults.kinds import WEIGHTS
from waltz_sim.run import run, run_seed
from waltz_sim.schedule import Schedule, Setup, schedule_of
from waltz_sim.world.network import FAR, NEAR, Handlers, Network
from waltz_sim.world.process import Process
from waltz_sim.world.world import World

pytestmark = pytest.mark.sim

TRACES = """
import json, sys
from waltz_sim.run import run_seed
verdicts = [run_seed(int(seed), is_traced=True) for seed in sys.argv[1:]]
print(json.dumps([(each.trace, each.fingerprint, each.committed, each.rule) for each in verdicts]))
"""


def start(hash_seed, *words):
    return subprocess.Popen(
        [sys.executable, *words],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        stdout=subprocess.PIPE,
    )


def test_a_seed_has_one_trace_in_all_processes():
    setups = ((seed, schedule_of(seed, WEIGHTS).setup) for seed in count())
    # A world with messages as objects, one with messages as bytes, and one with contexts.
    seeds = [
        next(seed for seed, setup in setups if not setup.is_bytes and not setup.context_clients),
        next(seed for seed, setup in setups if setup.is_bytes),
        next(seed for seed, setup in setups if setup.context_clients),
    ]
    processes = [
        start(hash_seed, *flags, "-c", TRACES, *map(str, seeds))
        # With -O, Python skips assertions, which must not change the run.
        for hash_seed, *flags in (("1",), ("2", "-O"))
    ]
    first, other = (
        json.loads(process.communicate(timeout=TEST_TIMEOUT_S)[0]) for process in processes
    )
    assert other == first
    assert len({trace for trace, *_ in first}) == len(seeds), (
        "different seeds must give different runs"
    )
    assert all(committed for _, _, committed, _ in first)


def test_tracing_does_not_change_a_run():
    outcome, silent = run_seed(5, is_traced=True), run_seed(5)
    assert outcome.fingerprint == silent.fingerprint
    assert (outcome.steps, outcome.committed, outcome.counts) == (
        silent.steps,
        silent.committed,
        silent.counts,
    )


@pytest.mark.parametrize("replicas", [1, 3, 5])
def test_without_faults_nothing_is_ever_lost_or_closed(replicas):
    setup = Setup(replicas=replicas, checkpoint_interval_count=100_000, steps_max=6_000)
    verdict = run(Schedule(5, setup))
    assert verdict.is_good, verdict.text
    assert verdict.committed > 300
    unwanted = (
        "replica.disconnected",
        "session closed",
        "reported LOST",
        "reported unknown",
        "unacknowledged rows kept by a recovery",
    )
    assert {name: verdict.counts[name] for name in unwanted} == dict.fromkeys(unwanted, 0)
    assert verdict.counts["session opened"] >= 1


# --- the network


class Arrival(NamedTuple):
    end: str
    message: str
    at_us: int


class LinkedMachines:
    """Two machines and a link between them."""

    def __init__(self, seed=1, *, is_bytes=False):
        self.world = World(seed)
        self.network = Network(self.world, is_bytes=is_bytes)
        self.near, self.far = Process(self.world, "near"), Process(self.world, "far")
        self.answered = []
        self.failed = []
        self.link = None

    def dial(self):
        self.network.dial(
            self.near,
            self.far,
            self.handlers("near"),
            on_opened=lambda link: setattr(self, "link", link),
            on_failed=self.failed.append,
            accept=lambda link: self.handlers("far"),
        )
        self.world.run(5_000_000)

    def handlers(self, end):
        def arrive(message):
            self.answered.append(Arrival(end, message, self.world.now_us))

        return Handlers(
            lambda link, message: arrive(message.req_id.sequence),
            lambda link, reason: arrive(reason),
        )

    def send(self, end, *numbers):
        for number in numbers:
            message = FlushRequest(ReqId(1, 1, PartitionId(0), number))
            self.network.send(self.link, end, message)

    def outcome(self, end):
        return [each.message for each in self.answered if each.end == end]


@pytest.fixture(params=[False, True], ids=["objects", "bytes"])
def linked(request):
    linked = LinkedMachines(is_bytes=request.param)
    linked.dial()
    assert linked.link is not None
    return linked


def test_a_link_delivers_messages_in_order(linked):
    linked.send(NEAR, *range(50))
    linked.world.run(1_000_000)
    assert linked.outcome("far") == list(range(50))
    assert linked.outcome("near") == []


def test_messages_sent_before_a_close_arrive_and_later_messages_do_not(linked):
    linked.send(NEAR, 1, 2)
    linked.network.close(linked.link, NEAR, "enough")
    linked.send(NEAR, 3)
    linked.send(FAR, 4)
    linked.world.run(1_000_000)
    assert linked.outcome("far") == [1, 2, "enough"]
    assert linked.outcome("near") == []
    assert linked.network.links == {}


def test_both_ends_are_notified_once_of_a_broken_link(linked):
    linked.network.break_link(linked.link, "cut")
    linked.network.break_link(linked.link, "cut")
    linked.world.run(10_000_000)
    assert linked.outcome("near") == ["cut"]
    assert linked.outcome("far") == ["cut"]


def test_a_link_that_is_blocked_in_one_direction_is_detected_late(linked):
    linked.network.block("near", "far")
    began_us = linked.world.now_us
    linked.send(NEAR, 1)
    linked.network.repair()
    linked.send(NEAR, 2)
    linked.world.run(10_000_000)
    assert linked.outcome("near") == linked.outcome("far") == ["no answer to pings"]
    assert min(each.at_us for each in linked.answered) - began_us >= 200_000


class TestAbandonedLinks:
    """Messages arrive after their sender has closed the link and opened another one."""

    def held(self, linked):
        late = []
        linked.network.hold(linked.link, lambda: late.append(linked.world.now_us))
        linked.send(NEAR, 1, 2)
        linked.world.run(1_000_000)
        return late

    def test_held_messages_arrive_in_order_after_the_next_link_opened(self, linked):
        late, old = self.held(linked), linked.link
        linked.network.abandon(old, "abandoned")
        assert linked.outcome("near") == ["abandoned"]
        linked.dial()
        linked.send(NEAR, 3)
        linked.world.run(1_000_000)
        assert linked.outcome("far") == [3]
        began_us = linked.world.now_us
        linked.network.release(old, "abandoned", 20_000)
        linked.world.run(1_000_000)
        assert linked.outcome("far") == [3, 1, 2, "abandoned"]
        assert linked.answered[-1].at_us > began_us + 20_000
        assert len(late) == 1
        assert began_us < late[0] < linked.answered[-1].at_us
        assert list(linked.network.links.values()) == [linked.link]

    def test_a_link_held_in_one_direction_delivers_messages_in_the_other_until_it_closes(
        self, linked
    ):
        late = self.held(linked)
        linked.send(FAR, 8)
        linked.world.run(1_000_000)
        linked.network.abandon(linked.link, "abandoned")
        linked.send(FAR, 9)
        linked.network.release(linked.link, "abandoned")
        linked.world.run(1_000_000)
        assert linked.outcome("near") == [8, "abandoned"]
        assert len(late) == 1

    def test_a_close_is_delivered_after_held_messages_of_an_abandoned_link(self, linked):
        self.held(linked)
        linked.network.close(linked.link, NEAR, "enough")
        linked.world.run(1_000_000)
        assert linked.outcome("far") == []
        linked.network.release(linked.link, "abandoned")
        linked.world.run(1_000_000)
        assert linked.outcome("far") == [1, 2, "abandoned"]
        assert linked.outcome("near") == []

    def test_a_repaired_network_delivers_held_messages_at_once(self, linked):
        late = self.held(linked)
        linked.network.repair()
        linked.network.abandon(linked.link, "later")
        linked.world.run(10_000)
        linked.network.release(linked.link, "later")
        linked.world.run(1_000_000)
        assert linked.outcome("far") == [1, 2, "abandoned"]
        assert linked.outcome("near") == ["abandoned"]
        assert len(late) == 1

    @pytest.mark.parametrize("release_with", ["release", "heal"])
    def test_messages_in_flight_arrive_after_held_messages(self, linked, release_with):
        late, network = self.held(linked), linked.network
        network.extra_delay_us = 100_000
        linked.send(NEAR, 3)
        network.extra_delay_us = 0
        network.repair() if release_with == "heal" else network.release(linked.link, "abandoned")
        linked.world.run(1_000_000)
        assert linked.outcome("far") == [1, 2, 3, "abandoned"]
        assert linked.outcome("near") == ["abandoned"]
        assert len(late) == 1

    def test_a_close_is_delivered_after_held_messages_of_a_repaired_network(self, linked):
        self.held(linked)
        linked.network.extra_delay_us = 100_000
        linked.network.close(linked.link, NEAR, "enough")
        linked.network.repair()
        linked.world.run(1_000_000)
        assert linked.outcome("far") == [1, 2, "abandoned"]

    def test_messages_to_a_closed_end_do_not_count_as_late(self, linked):
        late = self.held(linked)
        linked.network.abandon(linked.link, "abandoned")
        linked.far.die()
        linked.network.end_links(linked.far, is_silent=False)
        linked.network.release(linked.link, "abandoned")
        linked.world.run(1_000_000)
        assert linked.outcome("far") == late == []


def test_dead_and_paused_machines_do_not_answer():
    linked = LinkedMachines()
    linked.far.die()
    linked.dial()
    assert linked.failed == ["connection refused"]
    linked.far.start()
    linked.far.pause()
    linked.dial()
    assert linked.failed[1:] == ["timed out"]


def test_a_reset_is_reported_and_a_silent_death_is_not(linked):
    began_us = linked.world.now_us
    linked.far.die()
    linked.network.end_links(linked.far, is_silent=True)
    linked.world.run(10_000_000)
    assert linked.outcome("near") == ["no answer to pings"]
    assert linked.answered[0].at_us - began_us >= 200_000
    other = LinkedMachines()
    other.dial()
    other.far.die()
    other.network.end_links(other.far, is_silent=False)
    other.world.run(1_000_000)
    assert other.outcome("near") == ["reset"]


# --- processes


def test_a_paused_process_loses_no_messages(linked):
    linked.far.pause()
    linked.send(NEAR, 1, 2, 3)
    linked.world.run(1_000_000)
    assert linked.outcome("far") == []
    linked.far.resume()
    assert linked.outcome("far") == [1, 2, 3]


def test_a_restarted_process_receives_no_message_of_its_previous_run(linked):
    linked.send(NEAR, 1)
    linked.far.call_after_us(10, lambda: linked.answered.append(Arrival("far", "planned", 0)))
    linked.far.die()
    linked.far.start()
    linked.world.run(1_000_000)
    assert linked.outcome("far") == []


def test_a_slow_process_handles_one_event_at_a_time():
    world = World(1)
    process = Process(world, "slow")
    process.slow_us = 1_000
    handled = []
    for number in range(4):
        process.call_after_us(10, lambda number=number: handled.append((number, world.now_us)))
    world.run(100_000)
    assert [number for number, _ in handled] == [0, 1, 2, 3]
    times = [at_us for _, at_us in handled]
    assert all(after - before >= 1_000 for before, after in pairwise(times))


def test_a_cancelled_action_does_not_run():
    world = World(1)
    ran_actions = []
    world.call_after_us(20, lambda: ran_actions.append("late"))
    world.call_after_us(10, lambda: ran_actions.append("early"))
    world.call_after_us(15, lambda: ran_actions.append("never")).cancel()
    assert not world.run(100, until=lambda: len(ran_actions) == 3)
    assert ran_actions == ["early", "late"]
    assert world.now_us == 100


def test_random_streams_differ_by_name_and_by_seed():
    first, second = World(1), World(2)
    draws = {
        (world.seed, name): world.stream(name).random()
        for world in (first, second)
        for name in ("a", "b")
    }
    assert len(set(draws.values())) == 4
    assert World(1).stream("a").random() == draws[1, "a"]
