"""Assignment of partitions: results that were observed with 0.13, and the four invariants."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waltz_core import errors
from waltz_core.cluster.membership.assignment import (
    assign_partitions,
    assign_replicas,
    check_replica_change,
    hand_over_partition,
    is_assignment_current,
    move_partitions,
)
from waltz_core.cluster.znodes.model import (
    PartitionAssignment,
    ReplicaAssignments,
    ServerDescriptor,
)


def live_servers(*server_ids, preferred=None):
    wanted = preferred or {}
    return {s: ServerDescriptor(s, "h", 5000 + s, tuple(wanted.get(s, ()))) for s in server_ids}


def assign(old, servers, *, partition_count=4, cversion=1, keeps_owners=False):
    return assign_partitions(
        old,
        servers,
        cversion=cversion,
        partition_count=partition_count,
        keeps_owners=keeps_owners,
    )


def test_partitions_are_assigned_as_by_waltz_0_13():
    first = assign(PartitionAssignment(), live_servers(1))
    assert first == PartitionAssignment(1, 4, {1: {0: 1, 1: 1, 2: 1, 3: 1}})
    second = assign(first, live_servers(1, 2), cversion=2)
    assert second == PartitionAssignment(2, 4, {1: {0: 1, 1: 1}, 2: {2: 2, 3: 2}})
    third = assign(second, live_servers(3), cversion=5)
    assert third == PartitionAssignment(5, 4, {3: {0: 2, 1: 2, 2: 3, 3: 3}})


def test_one_partition_is_handed_to_another_server():
    old = PartitionAssignment(7, 5, {1: {0: 3, 1: 4}, 2: {2: 1, 3: 1, 4: 9}})
    found = hand_over_partition(old, 1, 4, 1)
    assert found == PartitionAssignment(7, 5, {1: {0: 3}, 2: {1: 5, 2: 1, 3: 1, 4: 9}})
    # Another server owns the partition, its generation has changed, or there is no other server.
    assert hand_over_partition(old, 1, 4, 2) is None
    assert hand_over_partition(old, 1, 3, 1) is None
    assert hand_over_partition(PartitionAssignment(7, 1, {1: {0: 3}}), 0, 3, 1) is None


@pytest.mark.parametrize("unhealthy", [{1}, {1, 2}, {2, 3}, {1, 3, 4}])
def test_partitions_are_handed_over_to_a_healthy_server(unhealthy):
    """A server without a quorum hands over all partitions, also those that it has just received."""
    now = assign(PartitionAssignment(), live_servers(1, 2, 3, 4), partition_count=24)
    for _ in range(len(unhealthy)):
        for owner in sorted(unhealthy):
            for partition_id, generation in now.servers[owner].items():
                now = hand_over_partition(now, partition_id, generation, owner)
    assert [number for number in sorted(unhealthy) if now.servers[number]] == []
    healthy_counts = [len(now.servers[each]) for each in {1, 2, 3, 4} - unhealthy]
    assert sum(healthy_counts) == 24
    assert min(healthy_counts) >= 2  # no server gets all partitions


def test_the_servers_with_the_lowest_ids_get_the_remaining_partitions():
    assignment = assign(PartitionAssignment(), live_servers(5, 2, 9), partition_count=8)
    assert {server: len(owned) for server, owned in assignment.servers.items()} == {
        2: 3,
        5: 3,
        9: 2,
    }


def test_the_first_preferred_server_gets_the_partition_even_if_the_server_exceeds_its_share():
    servers = live_servers(1, 2, preferred={1: [3, 2, 1, 99], 2: [3, 0]})
    assignment = assign(PartitionAssignment(), servers)
    assert assignment.servers == {1: {1: 1, 2: 1, 3: 1}, 2: {0: 1}}


def test_preferring_an_owned_partition_moves_no_partition():
    old = PartitionAssignment(1, 4, {1: {0: 7, 1: 7}, 2: {2: 7, 3: 7}})
    assert assign(old, live_servers(1, 2, preferred={2: [2]})).servers == old.servers


def test_every_partition_is_assigned_if_preferences_use_up_a_share():
    # With Waltz 0.13, partition 4 has no owner in this case.
    assignment = assign(
        PartitionAssignment(), live_servers(1, 2, preferred={1: [0, 1]}), partition_count=5
    )
    assert assignment.servers == {1: {0: 1, 1: 1, 2: 1}, 2: {3: 1, 4: 1}}


def test_added_partitions_are_assigned_and_existing_ones_do_not_move():
    old = PartitionAssignment(1, 2, {1: {0: 3}, 2: {1: 4}})
    assert assign(old, live_servers(1, 2)).servers == {1: {0: 3, 2: 1}, 2: {1: 4, 3: 1}}


def test_a_lower_number_of_partitions_is_rejected():
    old = PartitionAssignment(1, 4, {1: {0: 1, 1: 1, 2: 1, 3: 1}})
    with pytest.raises(errors.BadRequest, match="cannot shrink"):
        assign(old, live_servers(1), partition_count=3)


def test_generations_above_32_bits_are_rejected():
    old = PartitionAssignment(1, 1, {1: {0: 2**31 - 2}})
    last = assign(old, live_servers(2), partition_count=1)
    assert last.servers == {2: {0: 2**31 - 1}}
    assert assign(last, live_servers(2), partition_count=1).servers == last.servers
    with pytest.raises(
        errors.BadFormat, match="partition 0 cannot get another owner: its generation"
    ):
        assign(last, live_servers(3), partition_count=1)


def test_preferred_partitions_do_not_move_and_free_ones_go_to_the_least_loaded():
    old = PartitionAssignment(1, 6, {1: {0: 5}, 2: {1: 5, 2: 5, 3: 5}, 3: {4: 5, 5: 5}})
    new = assign(old, live_servers(1, 2), partition_count=6, cversion=2, keeps_owners=True)
    assert new.servers == {1: {0: 5, 4: 6, 5: 6}, 2: {1: 5, 2: 5, 3: 5}}
    reassigned = assign(new, live_servers(1, 2), partition_count=6, cversion=3, keeps_owners=True)
    assert reassigned.servers == new.servers
    wanted = assign(
        old, live_servers(1, 2, 3, preferred={1: [5]}), partition_count=6, keeps_owners=True
    )
    assert wanted.servers == {1: {0: 5, 5: 6}, 2: old.servers[2], 3: {4: 5}}


def test_a_new_server_gets_its_share_of_partitions():
    old = PartitionAssignment(1, 4, {1: {0: 5}, 2: {1: 5, 2: 5, 3: 5}})
    new = assign(old, live_servers(1, 2, 3), cversion=2, keeps_owners=True)
    assert new == assign(old, live_servers(1, 2, 3), cversion=2)


def test_a_move_raises_the_generation_of_moved_partitions_only():
    old = PartitionAssignment(7, 4, {1: {0: 5, 1: 5}, 2: {2: 5, 3: 5}})
    new = move_partitions(old, {1: 2, 3: 1, 2: 2})
    assert new == PartitionAssignment(7, 4, {1: {0: 5, 3: 6}, 2: {1: 6, 2: 5}})
    assert is_assignment_current(new, live_servers(1, 2), cversion=7, partition_count=4)
    assert move_partitions(old, {}) == old


def test_partitions_can_move_to_a_live_server_that_the_assignment_does_not_list():
    """A 0.13 server that is the leader names only servers that own partitions."""
    old = PartitionAssignment(7, 2, {1: {0: 5, 1: 5}})
    assert move_partitions(old, {1: 2}) == PartitionAssignment(7, 2, {1: {0: 5}, 2: {1: 6}})


@given(st.data(), st.integers(0, 40), st.booleans())
def test_every_assignment_keeps_the_invariants(data, partition_count, keeps_owners):
    ids = st.lists(st.integers(1, 12), min_size=1, max_size=6, unique=True)
    old = PartitionAssignment(0, 0, {})
    for cversion in range(1, 4):
        preferred = {}
        if data.draw(st.booleans()):
            partition_lists = st.lists(st.integers(0, 45), max_size=10)
            preferred = data.draw(st.dictionaries(st.integers(1, 12), partition_lists, max_size=3))
        servers = live_servers(*data.draw(ids), preferred=preferred)
        new = assign(
            old,
            servers,
            partition_count=partition_count,
            cversion=cversion,
            keeps_owners=keeps_owners,
        )
        even = not preferred and not keeps_owners
        check_invariants(old, new, servers, partition_count, even=even)
        assert is_assignment_current(
            new, servers, cversion=cversion, partition_count=partition_count
        )
        assert PartitionAssignment.from_bytes(new.to_bytes()) == new
        old = new


def check_invariants(old, new, servers, partition_count, *, even):
    before = {p: (s, g) for s, owned in old.servers.items() for p, g in owned.items()}
    after = {p: (s, g) for s, owned in new.servers.items() for p, g in owned.items()}
    assert sorted(after) == list(range(partition_count))
    assert sum(len(owned) for owned in new.servers.values()) == partition_count
    assert list(new.servers) == sorted(servers)
    for partition, (server, generation) in after.items():
        owner, old_generation = before.get(partition, (None, 0))
        assert generation == old_generation + (server != owner)
    if even:
        counts = [len(owned) for owned in new.servers.values()]
        assert max(counts) - min(counts) <= 1
        for server, owned in new.servers.items():
            kept = [p for p in old.servers.get(server, {}) if p in owned]
            lost = [p for p in old.servers.get(server, {}) if p not in owned]
            assert not lost or len(kept) == len(owned)


def test_an_assignment_is_outdated_if_the_servers_or_the_partition_count_changed():
    servers = live_servers(1, 2)
    assignment = PartitionAssignment(7, 2, {1: {0: 1}, 2: {1: 1}})
    assert is_assignment_current(assignment, servers, cversion=7, partition_count=2)
    assert not is_assignment_current(assignment, servers, cversion=8, partition_count=2)
    assert not is_assignment_current(assignment, servers, cversion=7, partition_count=3)
    assert not is_assignment_current(assignment, live_servers(1), cversion=7, partition_count=2)
    partial = PartitionAssignment(7, 2, {1: {0: 1}, 2: {}})
    assert not is_assignment_current(partial, servers, cversion=7, partition_count=2)


def test_each_group_gets_one_replica_of_each_partition():
    groups = {"a:1": 0, "b:1": 0, "c:1": 1, "d:1": 2}
    found = assign_replicas(groups, 5)
    assert found.partitions == {
        "a:1": (0, 2, 4),
        "b:1": (1, 3),
        "c:1": (0, 1, 2, 3, 4),
        "d:1": (0, 1, 2, 3, 4),
    }
    assert found.replicas_of(3) == ("b:1", "c:1", "d:1")


def replicas(*names):
    return ReplicaAssignments(dict.fromkeys(names, (0,)))


@pytest.mark.parametrize(
    ("old", "new", "is_allowed"),
    [
        ("", "abc", True),
        ("abc", "abc", True),
        ("abc", "abd", True),
        ("abc", "ade", False),
        ("abc", "def", False),
        ("abc", "abcd", True),
        ("abc", "abcde", True),
        ("a", "ab", True),
        ("a", "b", False),
        ("abc", "ab", True),
        ("abc", "", True),
    ],
)
def test_old_and_new_quorums_intersect(old, new, is_allowed):
    if is_allowed:
        check_replica_change(replicas(*old), replicas(*new), 1)
    else:
        with pytest.raises(errors.BadRequest, match="change one replica at a time"):
            check_replica_change(replicas(*old), replicas(*new), 1)
