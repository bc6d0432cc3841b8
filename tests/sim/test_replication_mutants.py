"""The tests of the tests: each rule of the protocol, switched off alone, must be found out."""

from unittest import mock

import pytest

from tests.sim import replication_world
from tests.sim.replication_world import Violation, run_seed
from waltz_core.replication import (
    partition_store,
    recovery,
    replica_session,
    store_session,
)
from waltz_core.replication.events import Committed
from waltz_core.replication.partition_store import PartitionStore, _Waiting
from waltz_core.replication.quorum import quorum_mark
from waltz_core.replication.recovery import Recovery
from waltz_core.replication.replica_session import NO_TICKET, ReplicaSession, Stage
from waltz_core.replication.settling import Settling
from waltz_core.replication.store_session import StoreSession

pytestmark = pytest.mark.sim
SEEDS = 120


def nothing(*args, **kwargs):
    return None


def silence_is_no():
    """The seeds' vote: a replica that is older than it should be counts as one that has nothing."""
    original = Recovery.heard

    def heard(self, replica, answer, registered_id):
        original(self, replica, answer, registered_id)
        if replica in self.engaged and self._max[replica] is None:
            self._max[replica] = -1

    return [mock.patch.object(Recovery, "heard", heard)]


def absence_is_no():
    def decide(maxes, *, unknown_count, quorum):
        return quorum_mark([*maxes, *[-1] * unknown_count], quorum)

    return [mock.patch.object(recovery, "decide", decide)]


def suspects_are_believed():
    def is_credible(answer, state, registered_id):
        return answer.last_session >= state.session_id

    return [mock.patch.object(recovery, "is_credible", is_credible)]


def one_vote_less():
    def quorum_size(count):
        return max(1, count // 2)

    return [mock.patch.object(store_session, "quorum_size", quorum_size)]


def lowest_mark():
    def lowest(marks, quorum):
        return min(marks) if len(marks) >= quorum else None

    return [mock.patch.object(recovery, "quorum_mark", lowest)]


def open_before_it_is_written():
    original = PartitionStore._write

    def write(self, view, waiting):
        original(self, view, waiting)
        if waiting is _Waiting.STATES and self._session.window is None:
            self._waiting = _Waiting.NOTHING
            versions = {name: getattr(view, name) + 1 for name in view._fields if "version" in name}
            self._wrote(view._replace(**versions))

    return [mock.patch.object(PartitionStore, "_write", write)]


def unknown_is_done():
    original = PartitionStore._coordinator_away

    def away(self, waiting, reason):
        if waiting is not _Waiting.STATES:
            original(self, waiting, reason)
            return
        view = self._writing
        versions = {name: getattr(view, name) + 1 for name in view._fields if "version" in name}
        self._wrote(view._replace(**versions))

    return [mock.patch.object(PartitionStore, "_coordinator_away", away)]


def late_replicas_count_at_once():
    """Whoever is marked gets appends and counts, whether ZooKeeper knows it or not."""
    original = StoreSession._feed

    def feed(self, each, now_ms):
        stage, each.stage = each.stage, Stage.ENGAGED
        original(self, each, now_ms)
        each.stage = stage

    def commit(self, now_ms):
        marked = (Stage.ENGAGED, Stage.READY)
        marks = [each.synced_last for each in self.replicas.values() if each.stage in marked]
        if self.window.commit(min(quorum_mark(marks, self.quorum), self.window.last)):
            self._progress_ms = now_ms
            chain = self.window.committed_chain
            self._outbox.append(Committed(self.claim.session_id, self.window.committed, chain))

    return [
        mock.patch.object(StoreSession, "_feed", feed),
        mock.patch.object(StoreSession, "_commit", commit),
        mock.patch.object(StoreSession, "_joined_states", nothing),
        mock.patch.object(replication_world, "check", nothing),
    ]


def settle_by_id():
    original = Settling._settle

    def settle(self, committed_last):
        doubt = self._claim.in_doubt
        original(self, committed_last if doubt is None else min(doubt.last, self._mark))

    return [mock.patch.object(Settling, "_settle", settle)]


def lost_replicas_come_back():
    original = StoreSession._drop

    def drop(self, each, reason, now_ms, **why):
        if each.stage is not Stage.ENGAGED or len(self.engaged) <= self.quorum:
            original(self, each, reason, now_ms, **why)
            return
        self.repairs.lost(each)
        each.close()
        each.lost(now_ms, self._rng)
        each.is_tainted = False

    return [
        mock.patch.object(StoreSession, "_drop", drop),
        mock.patch.object(replication_world, "check", nothing),
    ]


def connections_are_replaced():
    def forget(self):
        self.stage, self.repair, self.ticket = Stage.ABSENT, None, NO_TICKET
        self.unanswered_bytes = 0
        self._requests.clear()

    return [
        mock.patch.object(ReplicaSession, "_forget", forget),
        mock.patch.object(replication_world, "check", nothing),
    ]


MUTANTS = [
    silence_is_no,
    absence_is_no,
    suspects_are_believed,
    one_vote_less,
    lowest_mark,
    open_before_it_is_written,
    unknown_is_done,
    late_replicas_count_at_once,
    settle_by_id,
    lost_replicas_come_back,
    connections_are_replaced,
]
assert partition_store
assert replica_session


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_rule_switched_off_is_found_out(mutant):
    patches = mutant()
    for patch in patches:
        patch.start()
    try:
        for seed in range(SEEDS):
            try:
                run_seed(seed)
            except Violation:
                return
    finally:
        for patch in patches:
            patch.stop()
    pytest.fail(f"{mutant.__name__} was not found out in {SEEDS} seeds")
