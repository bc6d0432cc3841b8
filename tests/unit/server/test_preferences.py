"""Preferred partitions of a server, while it is healthy and while it is not."""

from waltz_core.cluster.znodes.model import ReplicaAssignments
from waltz_core.server.process.preferences import Preferences, reachable_partitions


def new_preferences(*partitions):
    preferences = Preferences(60.0)
    preferences.change(partitions, ())
    return preferences


def test_preferences_are_kept_in_order():
    preferences = new_preferences(2, 0)
    assert preferences.active_preferences_after((1, 0), (2,)) == (0, 1)
    assert preferences.preferred == (2, 0)
    preferences.change((1, 0), (2,))
    assert preferences.preferred == preferences.active_preferences_after((), ()) == (0, 1)


def test_the_preference_for_a_handed_over_partition_is_suspended_for_a_while():
    preferences = new_preferences(0, 1)
    assert preferences.suspend(1, 100.0)
    assert not preferences.suspend(7, 100.0)  # no command prefers this partition
    assert (preferences.preferred, preferences.suspended_partitions) == ((0, 1), [1])
    assert preferences.active_preferences_after((3,), ()) == (0, 3)
    assert preferences.resumable_partitions(159.0) == []
    assert preferences.resumable_partitions(160.0) == [1]
    preferences.change((1,), ())
    assert (preferences.suspended_partitions, preferences.active_preferences_after((), ())) == (
        [],
        (0, 1),
    )


def test_a_changed_preference_ends_the_suspension():
    preferences = new_preferences(0, 1)
    preferences.suspend(0, 5.0)
    preferences.suspend(1, 5.0)
    assert preferences.active_preferences_after((0,), (1,)) == (0,)
    assert preferences.suspended_partitions == [0, 1]
    preferences.change((0,), (1,))
    assert (preferences.preferred, preferences.suspended_partitions) == ((0,), [])


def test_a_partition_is_reachable_if_a_quorum_of_storages_answers():
    assigned = ReplicaAssignments({"a": (0, 1), "b": (0, 1), "c": (0,), "d": (1,)})
    reached = {"a": True, "b": False, "c": True, "d": False}
    assert reachable_partitions((0, 1, 2), assigned.replicas_of, reached) == [0]
