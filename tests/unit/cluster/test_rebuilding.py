"""Rebuilding a cluster from its storages: the choice of the log, and the written znodes."""

import asyncio
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.loops import run_on_virtual_loop
from waltz_core import errors
from waltz_core.access.client_ids import FIRST_ISSUED_ID
from waltz_core.cluster.change import rebuilding
from waltz_core.cluster.change.creation import NewCluster, NewStorage
from waltz_core.cluster.change.rebuilding import ReportedLog, choose_log
from waltz_core.cluster.membership.assignment import assign_partitions
from waltz_core.cluster.znodes import model
from waltz_core.cluster.zookeeper.zookeeper_in_memory import MemoryZooKeeper
from waltz_core.records.record import BEFORE_FIRST, NO_SESSION
from waltz_core.replication.quorum import quorum_size
from waltz_core.replication.session_recovery import HistoryOrigin, Recovery, history_origin_of

GROUPS = {"A": 0, "B": 1, "C": 2, "D": 0}


def log(session, last, *, suspect=False, damaged=False):
    return ReportedLog(session, last, suspect, damaged)


def choose(logs, *, unanswered=(), count=3):
    return choose_log(7, logs, groups=GROUPS, replica_count=count, unanswered=unanswered)


def test_a_log_of_the_newest_session_is_chosen_over_a_longer_log():
    choice = choose({"A": log(3, 900), "B": log(5, 100), "C": log(5, 90)})
    assert (choice.source, choice.log.last_synced_id) == ("B", 100)
    assert choice.first_members == ("B", "C")
    assert choice.members == ("B", "C", "A")


def test_the_chosen_members_are_in_different_groups_if_possible():
    choice = choose({"A": log(5, 10), "D": log(5, 9), "B": log(5, 8), "C": log(4, 7)})
    assert choice.members == ("A", "B", "C")
    choice = choose({"A": log(5, 10), "D": log(5, 9), "B": log(5, 8)})
    assert choice.members == ("A", "B", "D")


def test_a_log_is_chosen_only_if_fewer_replicas_than_a_quorum_are_missing():
    assert choose({"A": log(5, 10), "B": log(5, 9)}, unanswered=["C"]).source == "A"
    with pytest.raises(
        errors.BadRequest, match=r"7: cannot choose the log .* 1 of 3 replicas have .* \(A\)"
    ):
        choose({"A": log(5, 10)}, unanswered=["B", "C"])
    with pytest.raises(
        errors.BadRequest, match="fewer than 2 replicas lack a trusted log of the last session"
    ):
        choose({"A": log(5, 10)})
    with pytest.raises(errors.BadRequest, match="0 of 1 replicas have"):
        choose({}, count=1)


@pytest.mark.parametrize("defect", ["suspect", "damaged"])
def test_an_untrusted_log_counts_as_missing_and_still_proves_a_later_session(defect):
    untrusted, later = log(5, 99, **{defect: True}), log(6, 99, **{defect: True})
    assert choose({"A": untrusted, "B": log(5, 9), "C": log(5, 8)}).source == "B"
    with pytest.raises(errors.BadRequest, match="without a trusted log: A;"):
        choose({"A": untrusted, "B": log(5, 9)})
    with pytest.raises(
        errors.BadRequest,
        match=r"0 of . replicas have .* without a trusted log: A; .* in older sessions: B, C",
    ):
        choose({"A": later, "B": log(5, 9), "C": log(5, 8)})


def test_a_copy_of_an_older_session_is_ignored():
    """A and B cannot open their logs, and report none. The replica on D remains from a move."""
    with pytest.raises(errors.BadRequest, match=r"\(C\).* only in older sessions: D\."):
        choose({"C": log(5, 80), "D": log(3, 70)})
    # A lagging replica would report the same as D.
    with pytest.raises(errors.BadRequest, match="C; replicas that were only in older sessions: B"):
        choose({"A": log(5, 80), "B": log(4, 70)}, unanswered=["C"])
    assert choose({"A": log(5, 80), "C": log(5, 81), "D": log(3, 90)}).source == "C"
    assert choose({"A": log(5, 80), "C": log(5, 81), "D": log(3, 90)}, count=2).source == "C"


@given(st.integers(1, 5), st.data())
def test_the_chosen_log_has_all_acknowledged_records_if_replicas_report_no_log(count, data):
    """Any number of replicas report no log, and some storages have copies of older sessions."""
    quorum = quorum_size(count)
    other = st.sampled_from((4, 4, 3, 1))
    sessions = [4] * quorum + [data.draw(other) for _ in range(count - quorum)]
    logs = {f"r{n}": log(each, data.draw(st.integers(-1, 9))) for n, each in enumerate(sessions)}
    logs_of_last_session = {
        name: reported.last_synced_id
        for name, reported in logs.items()
        if reported.last_session == 4
    }
    acknowledged = sorted(logs_of_last_session.values(), reverse=True)[quorum - 1]
    answered_in_last_session = data.draw(
        st.sets(st.sampled_from(sorted(logs_of_last_session)), min_size=1)
    )
    hidden = (
        data.draw(st.sets(st.sampled_from(sorted(logs))))
        | set(logs_of_last_session) - answered_in_last_session
    )
    answered = {
        name: reported
        for name, reported in logs.items()
        if name not in hidden - answered_in_last_session
    }
    for number, session in enumerate(data.draw(st.lists(st.integers(0, 3), max_size=4))):
        answered[f"left{number}"] = log(session, 20)
    try:
        chosen = choose_log(0, answered, groups={}, replica_count=count, unanswered=[])
    except errors.BadRequest:
        return
    assert chosen.log.last_session == 4
    assert chosen.log.last_synced_id >= acknowledged


@given(
    st.integers(1, 5).flatmap(
        lambda n: st.tuples(st.just(n), st.lists(st.integers(-1, 9), min_size=n, max_size=n))
    ),
    st.data(),
)
def test_the_chosen_log_has_all_acknowledged_records_if_replicas_are_lost(cluster, data):
    """Fewer than a quorum of the replicas are lost, and a replica remains from a move."""
    count, last_ids = cluster
    quorum = quorum_size(count)
    acknowledged = sorted(last_ids, reverse=True)[quorum - 1]
    lost = data.draw(st.sets(st.integers(0, count - 1), max_size=quorum - 1))
    logs = {f"r{n}": log(4, last) for n, last in enumerate(last_ids) if n not in lost}
    logs["leftover"] = log(data.draw(st.integers(0, 4)), data.draw(st.integers(-1, acknowledged)))
    chosen = choose_log(
        0, logs, groups={}, replica_count=count, unanswered=[f"r{number}" for number in lost]
    )
    assert chosen.log.last_synced_id >= acknowledged


def test_the_rebuilt_metadata_names_one_replica():
    choice = choose({"A": log(3, 900), "B": log(5, 100), "C": log(5, 90)})
    metadata = choice.metadata(4, 8)
    assert metadata == model.PartitionMetadata(4, 8, {"B": model.ReplicaState(5, model.UNRESOLVED)})
    recovery = Recovery(HistoryOrigin.RECORDED, metadata.states)
    assert (recovery.engaged, recovery.previous_quorum_size) == (["B"], 1)


def test_other_logs_with_more_or_later_data_are_reported():
    logs = {"A": log(5, 10), "B": log(5, 12), "C": log(6, 9)}
    assert rebuilding.describe_missing_in_chosen(logs["B"], logs) == [
        "the last store session of replica C is 6, but that of the chosen log is 5"
    ]
    reason = "replica B has transactions 11..12, which the chosen log does not have"
    assert rebuilding.describe_missing_in_chosen(logs["A"], logs)[0] == reason


def test_after_a_loss_of_zookeeper_new_ids_are_derived_from_the_clock():
    year = 365 * 86_400
    assert rebuilding.first_id_after_loss(rebuilding.IDS_EPOCH_S + 5 * year) == 5 * year
    assert rebuilding.first_id_after_loss(0) == 1
    assert rebuilding.first_id_after_loss(1 << 40) < model.INT32_MAX


@run_on_virtual_loop
async def test_partitions_of_a_rebuilt_cluster_cannot_be_opened_before_their_logs_are_chosen():
    storages = tuple(NewStorage(f"h:{port}", port + 1, port % 3) for port in (10, 20, 30))
    new = NewCluster("w", 300, UUID(int=5), storages)
    zookeeper = MemoryZooKeeper(asyncio.Event)
    coordinator = zookeeper.coordinator("/a/w")
    await coordinator.create_rebuilt_cluster(new, 77)
    assert (await coordinator.read_cluster()).store.cluster_key == UUID(int=5)
    assert await coordinator.next_client_id() == 78
    assert await coordinator.issued_ids.allocate_id() == FIRST_ISSUED_ID + 77
    assignment = await coordinator.read_replica_assignment()
    assert assignment.partitions == {"h:10": (), "h:20": (), "h:30": ()}
    assert list((await coordinator.read_groups()).groups) == list(assignment.partitions)
    for number in (0, 299):
        view = await coordinator.read_partition(number)
        assert set(view.metadata.states) == set(assignment.partitions)
        assert rebuilding.is_undecided(view.metadata, view.marker)
        assert history_origin_of(view.metadata, view.marker) is HistoryOrigin.RECORDED
        recovery = Recovery(HistoryOrigin.RECORDED, view.metadata.states)
        assert recovery.decide_mark() is None
        assert view.metadata.generation == 77
    before = model.PartitionAssignment.from_bytes(zookeeper.dump()["/a/w/serverDescriptors"])
    server = model.ServerDescriptor(1, "h", 1)
    after = assign_partitions(before, {1: server}, cversion=1, partition_count=300)
    assert set(after.servers[1].values()) == {78}


def test_only_a_rebuilt_partition_without_an_open_session_is_undecided():
    closed = model.ReplicaState(NO_SESSION, BEFORE_FIRST)
    waiting = model.PartitionMetadata(states={"A": closed})
    opened = model.PartitionMarker(model.MarkerState.OPEN)
    assert rebuilding.is_undecided(waiting, opened)
    assert not rebuilding.is_undecided(waiting, model.PartitionMarker(model.MarkerState.NEW))
    assert not rebuilding.is_undecided(None, opened)
    assert not rebuilding.is_undecided(model.PartitionMetadata(), opened)
    engaged = {"A": closed, "B": model.ReplicaState(1, model.UNRESOLVED)}
    assert not rebuilding.is_undecided(model.PartitionMetadata(states=engaged), opened)
