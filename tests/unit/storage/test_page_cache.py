"""Which part of a file is old."""

from hypothesis import given
from hypothesis import strategies as st

from waltz_core.storage.disk.page_cache import FOLIO_BYTES_MAX, STEP_BYTES, Tail, blocks_begun

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
    dropped = given_back(Tail(KEPT), KEPT + 5 * STEP_BYTES)
    assert [start + size for start, size in dropped] == [n * STEP_BYTES for n in range(1, 6)]
    # Each begins earlier than the last one ended: that may have ended within a folio.
    assert [start for start, _ in dropped] == [max(0, n * STEP_BYTES - FOLIO) for n in range(5)]


def test_many_small_appends_are_given_back_together():
    assert len(given_back(Tail(KEPT), KEPT + 2 * STEP_BYTES, step=4096)) == 2


def test_a_large_append_is_given_back_at_once_and_only_once():
    tail = Tail(0)
    tail.wrote(100, 9 * MIB)
    assert tail.take_old() == (100, 9 * MIB)
    assert tail.take_old() is None


def test_earlier_pages_are_left_alone():
    dropped = given_back(Tail(0), 4 * MIB, start=100 * MIB)
    assert min(start for start, _ in dropped) == 100 * MIB


def test_pages_that_were_not_written_here_are_left_alone():
    assert Tail(0).take_old() is None


def test_overwriting_does_not_move_the_end():
    tail = Tail(KEPT)
    assert given_back(tail, KEPT) == []
    tail.wrote(0, MIB)
    assert tail.take_old() is None


def test_truncated_pages_do_not_count():
    tail = Tail(KEPT)
    assert given_back(tail, 32 * MIB)
    tail.cut(2 * MIB)
    assert given_back(tail, KEPT + MIB, start=2 * MIB) == [(0, 3 * MIB)]


def test_pages_between_a_repair_and_the_end_do_not_count():
    tail = Tail(0)
    tail.wrote(5 * MIB, 100)
    tail.wrote(90 * MIB, 2 * MIB)
    assert tail.take_old() == (90 * MIB, 2 * MIB)


@given(st.lists(st.integers(1, 3 * FOLIO_BYTES_MAX), min_size=1), st.integers(0, 200))
def test_pieces_in_a_row_begin_each_block_once_and_none_is_entered_before(sizes, header):
    done, at = 0, 0
    for size in [header + sizes[0], *sizes[1:]]:
        start, begun = blocks_begun(at, size)
        at += size
        if begun:
            assert start == done
            done += begun
        assert done >= at
        assert done % FOLIO_BYTES_MAX == 0
    assert done < at + FOLIO_BYTES_MAX
