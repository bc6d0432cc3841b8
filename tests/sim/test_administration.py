"""An operator takes replicas offline, marks them suspect, re-seeds and removes them under faults.

No command that a storage accepts loses acknowledged data. The checkers of the simulator verify
this. At the end, all replicas are complete. `WALTZ_ADMIN_SEEDS` adds more seeds.
"""

import os
from random import Random

import pytest

from waltz_core.records.record import SessionId
from waltz_core.storage.service.admin_tasks import ZooKeeperState
from waltz_core.wire.admin_messages import (
    AdminRejected,
    Done,
    MarkSuspect,
    RemovePartition,
    ReSeed,
    SetAvailable,
)
from waltz_sim.cluster.administration import Operator
from waltz_sim.cluster.simulated_cluster import US_PER_MS, SimCluster
from waltz_sim.faults import kinds as faults
from waltz_sim.faults.zookeeper_faults import change_replicas
from waltz_sim.guarantees.history import Violation
from waltz_sim.schedule import schedule_of

pytestmark = pytest.mark.sim
SEEDS = 30 + int(os.environ.get("WALTZ_ADMIN_SEEDS", "0"))
PAUSE_MS = (50, 600)


class OperatorRequests:
    """The operator, which repeats its commands until it is stopped."""

    def __init__(self, cluster, rng):
        self.cluster = cluster
        self.rng = rng
        self.outcome = []
        self.asked_count = 0
        self.is_over = False
        self.again()

    def again(self):
        self.cluster.world.call_after_us(self.rng.randrange(*PAUSE_MS) * US_PER_MS, self.act)

    def act(self):
        if self.is_over:
            return
        if self.rng.random() < 0.15:
            change_replicas(self.cluster, self.rng)  # so that there are replicas to remove
        storages = list(self.cluster.storages.values())
        idle = [each for each in storages if each.replica not in self.cluster.replicas]
        storage = self.rng.choice(storages + 2 * idle)
        if storage.is_up and storage.service is not None and storage._exclusive_call is None:
            self.request(storage, self.command())
        self.again()

    def command(self):
        return self.rng.choice(
            (
                SetAvailable(1, (0,), False),
                SetAvailable(1, (0,), True),
                SetAvailable(1, (0,), True),
                MarkSuspect(1, 0, False),
                ReSeed(1, 0, False),
                ReSeed(1, 0, False),
                RemovePartition(1, 0, self.rng.random() < 0.7, False),
            )
        )

    def request(self, storage, command):
        def outcome(answer):
            self.outcome.append((command, answer))

        if not isinstance(command, MarkSuspect) or self.cluster.budget.may_lose_data(storage):
            # If a replica is marked suspect while others have lost data, there may be no trusted
            # replica left.
            self.asked_count += 1
            Operator(self.cluster, storage, outcome).request(command)

    def put_back(self):
        """Bring all replicas online again, because no other process does so."""
        self.is_over = True
        for storage in self.cluster.storages.values():
            if storage.engine is None:
                continue
            if not storage.engine.is_available(0) and storage._exclusive_call is None:
                self.request(storage, SetAvailable(1, (0,), True))


def run(seed):
    schedule = schedule_of(seed, faults.WEIGHTS)
    cluster = SimCluster(schedule)
    try:
        return admin_connection(cluster, schedule)
    finally:
        cluster.close()


def admin_connection(cluster, schedule):
    faults.plan_faults(cluster, schedule)
    cluster.start_clients()
    hands = OperatorRequests(cluster, Random(schedule.seed))
    setup = schedule.setup
    cluster.world.run(setup.duration_ms * US_PER_MS, steps_max=setup.steps_max)
    cluster.end_faults()
    hands.is_over = True
    for _ in range(100):  # supervisors restart the storages that are down
        hands.put_back()
        cluster.world.run(100 * US_PER_MS)
        up = [storage.engine for storage in cluster.storages.values()]
        are_up = all(engine is not None and engine.is_available(0) for engine in up)
        if are_up and len(hands.outcome) == hands.asked_count:
            break  # Otherwise requests may still wait for a disk that hung.
    cluster.run_until_recovered()
    return hands


def kinds(hands, answer):
    return {
        type(command)
        for command, outcome_of_command in hands.outcome
        if isinstance(outcome_of_command, answer)
    }


def test_administrative_requests_that_a_storage_accepts_lose_no_data():
    done_kinds, rejected_kinds, answers = set(), set(), 0
    for seed in range(SEEDS):
        try:
            hands = run(seed)
        except Violation as violation:
            pytest.fail(f"seed {seed}: {violation}")
        done_kinds |= kinds(hands, Done)
        rejected_kinds |= kinds(hands, AdminRejected)
        answers += len(hands.outcome)
    assert done_kinds == {SetAvailable, MarkSuspect, ReSeed, RemovePartition}
    assert rejected_kinds >= {ReSeed, RemovePartition}
    assert answers > 2 * SEEDS


def test_data_is_lost_if_the_operator_does_not_query_zookeeper(monkeypatch):
    """Test the test: if every command is accepted, an operator empties too many replicas."""

    def without_zookeeper_state(self):
        return ZooKeeperState(False, False, SessionId(0), (), 3)

    monkeypatch.setattr(Operator, "_zookeeper_state", without_zookeeper_state)
    for seed in range(SEEDS):
        try:
            run(seed)
        except Violation:
            return
    pytest.fail("an operator without safety checks must cause a violation")
