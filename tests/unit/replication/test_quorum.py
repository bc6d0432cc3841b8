"""Unit and property tests of `waltz_core.replication.quorum`."""

from hypothesis import given
from hypothesis import strategies as st

from waltz_core.records.record import ReplicaId, TransactionId
from waltz_core.replication.quorum import Tally, VoteResult, quorum_mark, quorum_size

REPLICAS = [ReplicaId(f"storage-{n}:1") for n in range(5)]


def test_a_vote_counts_after_its_connection_is_lost() -> None:
    tally = Tally(REPLICAS[:3])
    tally.count_vote(REPLICAS[0])
    tally.count_lost(REPLICAS[0])
    tally.count_lost(REPLICAS[1])
    assert tally.result is VoteResult.OPEN
    tally.count_lost(REPLICAS[2])
    assert tally.result is VoteResult.LOST


@given(count=st.integers(1, 5), steps=st.lists(st.tuples(st.booleans(), st.integers(0, 4))))
def test_a_final_vote_result_never_changes(count: int, steps: list[tuple[bool, int]]) -> None:
    """In any order of votes and losses, the first result other than OPEN is final."""
    tally, lost, first = Tally(REPLICAS[:count]), set[int](), VoteResult.OPEN
    for is_vote, number in steps:
        index = number % count
        if is_vote and index not in lost:
            tally.count_vote(REPLICAS[index])
        elif not is_vote:
            tally.count_lost(REPLICAS[index])
            lost.add(index)
        if first is VoteResult.OPEN:
            first = tally.result
        assert tally.result is first


@given(st.integers(1, 99))
def test_two_disjoint_sets_of_replicas_are_never_both_quorums(count: int) -> None:
    assert 2 * quorum_size(count) > count


@given(st.lists(st.integers(-1, 9), min_size=1, max_size=5), st.integers(1, 6))
def test_a_mark_is_the_id_that_a_quorum_has_reached(marks: list[int], quorum: int) -> None:
    reached = quorum_mark([TransactionId(mark) for mark in marks], quorum)
    if quorum > len(marks):
        assert reached is None
    else:
        assert reached is not None
        assert sum(mark >= reached for mark in marks) >= quorum
        assert sum(mark >= reached + 1 for mark in marks) < quorum
