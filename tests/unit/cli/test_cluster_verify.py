"""What `cluster verify`, `check-connectivity` and `server list` make of what they are told."""

from waltz_core.cli.cluster_reach import HERE, reached_by
from waltz_core.cli.cluster_verify import (
    CHECKS,
    Finding,
    failed_checks,
    of_assignment,
    of_held,
    of_replicas,
)
from waltz_core.cli.server import ranges_of
from waltz_core.cluster.changes import Replicas
from waltz_core.cluster.membership import Ownership, ServersView
from waltz_core.cluster.model import (
    UNRESOLVED,
    PartitionMetadata,
    ReplicaState,
    ServerDescriptor,
)

A, B, C = "a:1", "b:1", "c:1"


def opened(*engaged, behind=()):
    """Return metadata of session 3 with these replicas."""
    states = {each: ReplicaState(3, UNRESOLVED) for each in engaged}
    states |= {each: ReplicaState(3, 17) for each in behind}
    return PartitionMetadata(1, 3, states)


def checks(findings):
    return [each.check for each in findings]


def test_every_finding_belongs_to_a_check_and_to_its_partitions_only():
    found = [
        Finding("quorum", "x", (1,)),
        Finding("storage", "y", (1, 2)),
        Finding("server", "z", ()),
    ]
    assert [failed_checks(found, each) for each in range(4)] == [
        *(set(), {"quorum", "storage"}, {"storage"}, set())
    ]


def test_a_cluster_without_servers_or_with_a_partition_that_nobody_owns():
    none = ServersView({}, {}, is_settled=False)
    assert [each.partitions for each in of_assignment(none, (0, 1))] == [(0, 1), (0, 1)]
    one = ServersView({1: ServerDescriptor(1, "s", 1)}, {0: Ownership(1, 0)}, is_settled=True)
    assert of_assignment(one, (0,)) == []
    (found,) = of_assignment(one, (0, 1))
    assert found == Finding("assignment", "partition 1 has no server", (1,))


def test_a_storage_that_lacks_a_partition_or_has_it_offline():
    assert of_held(A, (0, 1), {0: True, 1: True, 9: True}) == []
    lacking, offline = of_held(A, (0, 1, 2), {0: True, 2: False})
    assert (lacking.check, lacking.partitions) == ("storage", (1,))
    assert lacking.text.endswith("`waltz-core storage sync-partitions`")
    assert offline.partitions == (2,)
    mend = f"`waltz-core storage availability --storage {A} --partition 2 --online true`"
    assert offline.text.endswith(mend)


def test_replicas_that_are_behind_or_too_few():
    well = Replicas((A, B, C), opened(A, B, C))
    one_behind = Replicas((A, B, C), opened(A, B, behind=[C]))
    two_behind = Replicas((A, B, C), opened(A, behind=[B, C]))
    other = Replicas((A, B), opened(A, B, C))
    found = of_replicas({0: well, 1: one_behind, 2: two_behind, 3: other, 4: Replicas((), None)})
    assert [(each.partitions, each.check) for each in found] == [
        ((1,), "recovery"),
        ((2,), "quorum"),
        ((3,), "recovery"),
        ((4,), "assignment"),
    ]
    assert found[0].text == f"partition 1: {C} is not engaged"
    assert checks(of_replicas({0: Replicas((A,), None)})) == ["recovery"]
    assert set(checks(found)) <= set(CHECKS)


def test_a_server_that_has_not_heard_of_a_storage_does_not_reach_it():
    found = reached_by("s:1", [A, B], {A: True, C: False})
    assert [(each.origin, each.target, each.is_reached) for each in found] == [
        (HERE, "server s:1", True),
        ("server s:1", f"storage {A}", True),
        ("server s:1", f"storage {B}", False),
        ("server s:1", f"storage {C}", False),
    ]
    assert found[2].why_not == "it does not know this storage (yet)"


def test_numbers_are_told_as_commands_take_them():
    assert ranges_of([]) == "-"
    assert ranges_of([3]) == "3"
    assert ranges_of([9, 0, 1, 2, 4, 5]) == "0-2,4-5,9"
