"""Preferred partitions of a server, while it is healthy and while it is not."""

from waltz_core.cluster.znodes.model import ReplicaAssignments
from waltz_core.server.process.preferences import Preferences, reachable_partitions


def new_preferences(*partitions):
    found = Preferences(60.0)
    found.change(partitions, ())
    return found


def test_preferences_are_kept_in_order():
    found = new_preferences(2, 0)
    assert found.active_preferences_after((1, 0), (2,)) == (0, 1)
    assert found.wanted == (2, 0)
    found.change((1, 0), (2,))
    assert found.wanted == found.active_preferences_after((), ()) == (0, 1)


def test_a_handed_over_partition_pauses_for_a_while():
    found = new_preferences(0, 1)
    assert found.suspend(1, 100.0)
    assert not found.suspend(7, 100.0)  # no command prefers this partition
    assert (found.wanted, found.suspended) == ((0, 1), [1])
    assert found.active_preferences_after((3,), ()) == (0, 3)
    assert found.resumable_partitions(159.0) == []
    assert found.resumable_partitions(160.0) == [1]
    found.change((1,), ())
    assert (found.suspended, found.active_preferences_after((), ())) == ([], (0, 1))


def test_a_changed_preference_ends_the_pause():
    found = new_preferences(0, 1)
    found.suspend(0, 5.0)
    found.suspend(1, 5.0)
    assert found.active_preferences_after((0,), (1,)) == (0,)
    assert found.suspended == [0, 1]
    found.change((0,), (1,))
    assert (found.wanted, found.suspended) == ((0,), [])


def test_a_partition_is_reachable_if_a_quorum_of_storages_answers():
    assigned = ReplicaAssignments({"a": (0, 1), "b": (0, 1), "c": (0,), "d": (1,)})
    reached = {"a": True, "b": False, "c": True, "d": False}
    assert reachable_partitions((0, 1, 2), assigned.replicas_of, reached) == [0]
