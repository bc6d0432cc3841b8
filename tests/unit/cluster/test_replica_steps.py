"""Steps of replica changes: single cases, and every plan against a modeled owner."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from waltz_core import errors
from waltz_core.cluster.change import replica_steps
from waltz_core.cluster.change.replica_steps import (
    PartitionReplicas,
    PostponedStep,
    ReplicaPlan,
    ReplicaStep,
)
from waltz_core.cluster.membership.assignment import check_replica_change
from waltz_core.cluster.znodes.model import (
    NO_GENERATION,
    UNRESOLVED,
    PartitionMetadata,
    ReplicaAssignments,
    ReplicaState,
)

NAMES = "ABCDEFG"


def partition_state(assigned, in_sync=None, *, known=None, session=3, opened=3):
    """Return the state of a partition; only the replicas in `in_sync` are engaged."""
    in_sync = assigned if in_sync is None else in_sync
    states = {
        each: ReplicaState(opened, UNRESOLVED if each in in_sync else 10)
        for each in (assigned if known is None else known)
    }
    return PartitionReplicas(tuple(assigned), PartitionMetadata(NO_GENERATION, session, states))


def plan(wanted, joining=""):
    return ReplicaPlan({0: tuple(wanted)}, {0: tuple(joining)})


def step(now, wanted, joining=""):
    """Return the replicas after the next step, why it waits, or None."""
    next_replicas = replica_steps.next_step(0, now, plan(wanted, joining))
    if isinstance(next_replicas, ReplicaStep):
        assert set(next_replicas.before) == set(now.assigned)
        return "".join(sorted(next_replicas.after))
    return next_replicas.reason if isinstance(next_replicas, PostponedStep) else None


# --- single steps


def test_each_added_replica_must_be_in_sync_before_the_next_one():
    assert step(partition_state("ABC"), "ABCDE", "DE") == "ABCD"
    assert step(partition_state("ABCD", known="ABC"), "ABCDE", "DE") == (
        "the server of the partition must open a store session with the replicas A, B, C, D"
    )
    assert step(partition_state("ABCD", "ABC"), "ABCDE", "DE") == "the log is being copied to D"
    assert step(partition_state("ABCD"), "ABCDE", "DE") == "ABCDE"
    assert step(partition_state("ABCDE"), "ABCDE", "DE") is None


def test_a_step_waits_for_an_open_session():
    reason = step(partition_state("ABC", session=4), "ABCD", "D")
    assert reason.startswith(
        "the server of the partition must open a store session; the last one was "
        "with the replicas A, B, C"
    )


def test_an_absent_storage_is_replaced_in_one_step_and_removed_before_other_storages():
    """With four replicas, three would have to be in sync, and appends would wait for the copy."""
    assert step(partition_state("ABC", "AB"), "ABD", "D") == "ABD"
    assert step(partition_state("ABCDE", "ABCD"), "ABC") == "ABCD"


def test_a_step_is_postponed_if_appends_would_wait_for_a_copy():
    reason = step(partition_state("ABC", "AB"), "ABCD", "D")
    assert reason == (
        "not in sync: C. After the change, an append would need 3 acknowledgements of the "
        "replicas A, B, C, D, of which only 2 would be in sync. Hint: start each storage that is "
        "not in sync, or replace it."
    )
    assert step(partition_state("ABC", "AB"), "BC").startswith(
        "not in sync: C. After the change, an append would need 2 acknowledgements of the "
    )


def test_a_partition_with_a_single_replica_gets_a_second_replica_first():
    assert step(partition_state("A"), "AB", "B") == "AB"
    assert step(partition_state("A"), "B", "B") == "AB"


def test_without_metadata_the_next_step_waits_for_no_replica():
    assert step(PartitionReplicas(("A", "B", "C"), None), "ABD", "D") == "ABCD"
    assert step(PartitionReplicas(("A", "B", "C", "D"), None), "ABD", "D") == "ABD"
    assert step(PartitionReplicas((), None), "ABD", "ABD") == "ABD"
    assert step(PartitionReplicas(("A",), PartitionMetadata()), "A") is None


def test_a_partition_without_any_replica_is_rejected():
    with pytest.raises(
        errors.BadRequest, match="partition 0 is not changed, because it would have no replica"
    ):
        replica_steps.next_step(0, partition_state("A"), plan(""))


def test_a_step_is_not_applied_if_the_replicas_have_changed_meanwhile():
    assigned = ReplicaAssignments({"A": (0,), "B": (0, 1), "C": (1,)})
    moved = replica_steps.apply_steps([ReplicaStep(0, ("A", "B"), ("B", "C"))], assigned)
    assert moved == ReplicaAssignments({"A": (), "B": (0, 1), "C": (0, 1)})
    with pytest.raises(
        errors.CoordinatorConflict, match="has changed partition 0 meanwhile: expected the replicas"
    ):
        replica_steps.apply_steps([ReplicaStep(0, ("A",), ("A", "C"))], assigned)
    with pytest.raises(errors.BadRequest, match="D is not a storage of this cluster"):
        replica_steps.apply_steps([ReplicaStep(0, ("A", "B"), ("A", "D"))], assigned)


def test_a_plan_names_the_joining_storages():
    assigned = ReplicaAssignments({"A": (0,), "B": (0, 1), "C": (1,)})
    plan = ReplicaPlan.for_placement({0: ("B", "C"), 1: ("B", "C")}, assigned)
    assert plan.added_replicas == {0: ("C",), 1: ()}
    assert str(ReplicaStep(0, ("A", "B"), ("B", "C"))) == "partition 0: +C -A"


class Owner:
    """A server that opens store sessions by the rules of the protocol."""

    def __init__(self, assigned):
        self.assigned = tuple(assigned)
        self.states = set(assigned)
        self.engaged = set(assigned)
        self.session = self.opened = 0

    @property
    def in_sync(self):
        return self.engaged if self.session == self.opened else set()

    def now(self):
        return partition_state(
            self.assigned,
            self.engaged,
            known=self.states,
            session=self.session,
            opened=self.opened,
        )

    def restarts(self, alive):
        """Add a late replica to the session, or lose the session and open the next one."""
        if self.session == self.opened:
            if self.engaged <= alive and self.states == set(self.assigned):
                late_replicas = sorted((self.states & alive) - self.engaged)
                self.engaged |= set(late_replicas[:1])
                return
            self.session += 1
        new, old = set(self.assigned), self.states
        is_decided = len(self.engaged - alive) < len(old) // 2 + 1
        old_quorum = len(old & alive) >= len(old) // 2 + 1
        if is_decided and old_quorum and len(new & alive) >= len(new) // 2 + 1:
            ready = old & new & alive
            for each in sorted(new & alive - old):
                if len(ready) < len(new) // 2 + 1:
                    ready.add(each)  # this replica must copy the log first
            self.states, self.engaged, self.opened = new, ready, self.session


@st.composite
def plan_cases(draw):
    before = draw(st.sets(st.sampled_from(NAMES), min_size=1, max_size=5))
    wanted = draw(st.sets(st.sampled_from(NAMES), min_size=1, max_size=5))
    # One storage at a time is unavailable, and returns.
    unavailable = draw(st.lists(st.sampled_from([*NAMES, ""]), max_size=12))
    return sorted(before), sorted(wanted), unavailable


@given(plan_cases())
@example((["A", "B", "E", "F"], ["A", "B", "C", "D", "F"], ["A", "A", "E", "F"]))
def test_every_plan_ends_and_each_step_keeps_the_rules(plan_case):
    before, wanted, unavailable = plan_case
    placement = {name: ((0,) if name in before else ()) for name in NAMES}
    assigned = ReplicaAssignments(placement)
    plan = ReplicaPlan.for_placement({0: tuple(wanted)}, assigned)
    owner, steps = Owner(before), 0
    for absent in [*unavailable, *[""] * 60]:
        alive = set(NAMES) - {absent}
        owner.restarts(alive)
        next_replicas = replica_steps.next_step(0, owner.now(), plan)
        if next_replicas is None and not absent:
            break
        if not isinstance(next_replicas, ReplicaStep):
            continue
        steps += 1
        added = [each for each in next_replicas.after if each not in next_replicas.before]
        removed = [each for each in next_replicas.before if each not in next_replicas.after]
        assert len(added) <= 1 >= len(removed)
        after = replica_steps.apply_steps([next_replicas], assigned)
        check_replica_change(assigned, after, 1)
        in_sync = owner.in_sync & set(next_replicas.after)
        if len(next_replicas.before) > 1 or removed:
            assert len(in_sync) >= len(next_replicas.after) // 2 + 1
        if removed and not added:
            assert set(plan.added_replicas[0]) <= owner.in_sync
        assigned, owner.assigned = after, next_replicas.after
    assert set(owner.assigned) == set(wanted)
    for _ in NAMES:  # A former replica may have been unavailable until now.
        owner.restarts(set(NAMES))
    assert owner.states == set(wanted) == owner.in_sync
    assert steps <= len(set(before) ^ set(wanted))


# --- requested changes


GROUPS = {"A": 0, "B": 1, "C": 2, "D": 0, "E": 1}


def test_the_replicas_of_a_removed_storage_move_to_groups_without_a_replica():
    now = {0: ("A", "B", "C"), 1: ("A", "B", "C")}
    assert replica_steps.placement_without_storage(now, GROUPS, "A") == {
        0: ("B", "C", "D"),
        1: ("B", "C", "D"),
    }
    with pytest.raises(errors.BadRequest, match=r"every other storage .* partition 0. Hint: add a"):
        replica_steps.placement_without_storage(now, {"A": 0, "B": 1, "C": 2}, "A")


def test_an_interrupted_removal_of_a_storage_continues():
    now = {0: ("A", "B", "C", "D"), 1: ("B", "C", "D"), 2: ("A", "B", "C")}
    placement = replica_steps.placement_without_storage(now, GROUPS, "A")
    assert placement == {0: ("B", "C", "D"), 2: ("B", "C", "D")}


def test_a_storage_takes_over_the_replicas_of_another_storage():
    now = {0: ("A", "B"), 1: ("B", "C"), 2: ("A", "B")}
    assert replica_steps.placement_with_replacement(now, "A", "D", now) == {
        0: ("D", "B"),
        2: ("D", "B"),
    }
    assert replica_steps.placement_with_replacement(now, "A", "D", [1, 2]) == {2: ("D", "B")}
    # The remaining step of an interrupted move removes only the old replica.
    interrupted = now | {0: ("A", "B", "D")}
    assert replica_steps.placement_with_replacement(interrupted, "A", "D", now) == {
        0: ("D", "B"),
        2: ("D", "B"),
    }


def test_a_move_to_a_storage_with_a_replica_removes_no_replica():
    now = {0: ("A", "B", "D"), 1: ("A", "B", "C"), 2: ("A",)}
    with pytest.raises(
        errors.BadRequest,
        match=r"storage D already has a replica of partition 0.* left "
        r"with 2 replicas instead of the usual 3",
    ):
        replica_steps.placement_with_replacement(now, "A", "D", now)
    assert replica_steps.placement_with_replacement(now, "A", "D", [1]) == {1: ("D", "B", "C")}


def test_a_restored_storage_is_added_where_replicas_are_missing():
    now = {0: ("A", "B"), 1: ("A", "B", "C"), 2: ("B", "A"), 3: ("A", "B", "D")}
    assert replica_steps.placement_with_missing_replicas(now, "C") == {
        0: ("A", "B", "C"),
        2: ("B", "A", "C"),
    }
    assert replica_steps.placement_with_missing_replicas({0: ("A", "B")}, "C") == {}


@st.composite
def placements(draw):
    storages = draw(st.integers(1, 6))
    groups = {NAMES[number]: draw(st.integers(0, 3)) for number in range(storages)}
    replicas = st.lists(st.sampled_from(sorted(groups)), unique=True, max_size=storages)
    placement = draw(st.lists(replicas, min_size=1, max_size=12))
    return groups, {number: tuple(names) for number, names in enumerate(placement)}


@given(placements(), st.none() | st.integers(1, 6))
def test_replicas_are_spread_evenly_and_over_groups(placed, count):
    groups, now = placed
    if count is not None and count > len(groups):
        with pytest.raises(errors.BadRequest, match="the number of storages, found"):
            replica_steps.spread_replicas(now, groups, count)
        return
    wanted = replica_steps.spread_replicas(now, groups, count)
    copies = count or len(set(groups.values()))
    for number, replicas in wanted.items():
        assert len(set(replicas)) == len(replicas) == (count or len(now[number]) or copies)
        assert set(replicas) <= set(groups)
    assert replica_steps.partitions_in_too_few_groups(wanted, groups) == []
    assert replica_steps.spread_replicas(wanted, groups, count) == wanted, (
        "an even placement is not changed"
    )


@given(st.integers(1, 5), st.integers(1, 30))
def test_storages_of_a_group_differ_by_one_partition_at_most(members, partition_count):
    groups = {f"{name}{number}": name for name in "XYZ" for number in range(members)}
    now = dict.fromkeys(range(partition_count), ("X0", "Y0", "Z0"))
    wanted = replica_steps.spread_replicas(now, groups)
    loads = [sum(group in names for names in wanted.values()) for group in groups]
    assert max(loads) - min(loads) <= 1
    assert replica_steps.partitions_in_too_few_groups(wanted, groups) == []


def test_partitions_with_replicas_in_one_group_are_listed():
    now = {0: ("A", "B", "C"), 1: ("A", "D", "B"), 2: ("A", "D")}
    assert replica_steps.partitions_in_too_few_groups(now, GROUPS) == [1, 2]


def test_missing_replicas_are_added_and_existing_ones_do_not_move():
    now = {0: ("A", "D"), 1: ("A", "B", "C")}
    assert replica_steps.fill_up_replicas(now, GROUPS, 3) == {
        0: ("A", "D", "E"),
        1: ("A", "B", "C"),
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [("3", (3,)), ("0-2,7,9-10", (0, 1, 2, 7, 9, 10)), ("all", tuple(range(12))), ("5,5", (5,))],
)
def test_partitions_are_formatted_as_ranges(text, expected):
    assert replica_steps.parse_partitions(text, 12) == expected


@pytest.mark.parametrize("text", ["", "x", "1-", "-1", "3-1", "12", "0-12", "1,,2", "1.5", "٣-x"])
def test_invalid_partition_ranges_are_rejected(text):
    with pytest.raises(
        errors.BadConfig, match=r"expected numbers and ranges such as 0-3,7 in 0\.\.11"
    ):
        replica_steps.parse_partitions(text, 12)


@pytest.mark.parametrize(("text", "position"), [("12", "'12'"), ("0,9-7", "'9-7' in '0,9-7'")])
def test_the_error_for_a_list_of_partitions_names_the_wrong_part(text, position):
    with pytest.raises(errors.BadConfig, match=f"found {position}$"):
        replica_steps.parse_partitions(text, 12)
