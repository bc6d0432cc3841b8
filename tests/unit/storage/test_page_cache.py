"""Which part of a file is old."""

from waltz_core.storage.page_cache import STEP_BYTES, Tail

MIB = 1024 * 1024
KEPT = 4 * MIB
FOLIO = 2 * MIB


def given_back(tail, size, *, start=0, step=MIB):
    """Append so much; return what is to be given back: (start, size) of each."""
    old = []
    for offset in range(start, start + size, step):
        tail.wrote(offset, step)
        old.append(tail.take_old())
    return [each for each in old if each is not None]


def test_the_newest_part_stays():
    assert given_back(Tail(KEPT), KEPT + STEP_BYTES - MIB) == []


def test_older_parts_are_given_back_step_by_step():
    told = given_back(Tail(KEPT), KEPT + 5 * STEP_BYTES)
    assert [start + size for start, size in told] == [n * STEP_BYTES for n in range(1, 6)]
    # Each begins earlier than the last one ended: that may have ended within a folio.
    assert [start for start, _ in told] == [max(0, n * STEP_BYTES - FOLIO) for n in range(5)]


def test_many_small_appends_are_given_back_together():
    assert len(given_back(Tail(KEPT), KEPT + 2 * STEP_BYTES, step=4096)) == 2


def test_a_large_append_is_given_back_at_once_and_only_once():
    tail = Tail(0)
    tail.wrote(100, 9 * MIB)
    assert tail.take_old() == (100, 9 * MIB)
    assert tail.take_old() is None


def test_what_was_there_before_is_left_alone():
    told = given_back(Tail(0), 4 * MIB, start=100 * MIB)
    assert min(start for start, _ in told) == 100 * MIB


def test_what_was_not_written_here_is_not_touched():
    assert Tail(0).take_old() is None


def test_what_is_written_over_does_not_move_the_end():
    tail = Tail(KEPT)
    assert given_back(tail, KEPT) == []
    tail.wrote(0, MIB)
    assert tail.take_old() is None
