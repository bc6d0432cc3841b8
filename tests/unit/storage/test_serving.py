"""When a storage looks at its partitions again though ZooKeeper has told of no change."""

import pytest

from waltz_core.storage.serving import OPEN_AGAIN_S_MAX, OPEN_AGAIN_S_MIN, look_again_s


def after(*, served, wanted, lying_here):
    return look_again_s(OPEN_AGAIN_S_MIN, served=served, wanted=wanted, lying_here=lying_here)


@pytest.mark.parametrize("partitions", [(), (0,), (0, 2)])
def test_who_serves_what_it_should_and_has_nothing_else_waits_for_a_change(partitions):
    assert after(served=partitions, wanted=partitions, lying_here=partitions) is None


@pytest.mark.parametrize(
    ("served", "wanted"),
    [
        ((0,), (0, 1)),  # one could not be opened
        ((0, 1), (0,)),  # one was taken away, and its owner still counts on it
        ((0, 1), (0, 2)),
    ],
)
def test_what_is_not_as_it_should_be_is_looked_at_after_a_pause_that_grows(served, wanted):
    assert after(served=served, wanted=wanted, lying_here=(0, 1, 2)) == OPEN_AGAIN_S_MIN


def test_what_lies_here_unserved_is_looked_at_seldom_but_for_ever():
    assert OPEN_AGAIN_S_MIN < OPEN_AGAIN_S_MAX
    assert after(served=(0,), wanted=(0,), lying_here=(0, 1)) == OPEN_AGAIN_S_MAX
    assert after(served=(), wanted=(), lying_here=(1,)) == OPEN_AGAIN_S_MAX
