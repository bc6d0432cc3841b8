"""Parts of a file are dropped from the page cache."""

from hypothesis import given
from hypothesis import strategies as st

from waltz_core.storage.disk.page_cache import (
    DROP_STEP_BYTES,
    FOLIO_BYTES_MAX,
    RecentPages,
    blocks_beginning_in,
)

MIB = 1024 * 1024
PAGE_CACHE_BYTES_MAX = 4 * MIB


def released_ranges(tail, *writes):
    """Write the given sizes at positions; return the released ranges: (start, size) of each."""
    found = []
    for at, size in writes:
        tail.note_write(at, size)
        found.append(tail.take_droppable())
    assert tail.take_droppable() is None, "each range is returned once"
    return [each for each in found if each is not None]


def pieces(size, *, start=0, step=MIB):
    return [(offset, step) for offset in range(start, start + size, step)]


def test_old_pages_are_released_in_steps_and_the_newest_are_kept():
    tail = RecentPages(PAGE_CACHE_BYTES_MAX)
    assert tail.take_droppable() is None
    newest = PAGE_CACHE_BYTES_MAX + DROP_STEP_BYTES - MIB
    assert released_ranges(tail, *pieces(newest)) == []
    assert released_ranges(tail, (0, MIB)) == [], "overwriting does not move the end"
    dropped = released_ranges(tail, *pieces(5 * DROP_STEP_BYTES, start=newest))
    assert [start + size for start, size in dropped] == [n * DROP_STEP_BYTES for n in range(1, 6)]
    # Each range begins before the end of the previous range, which may be within a folio.
    expected = [max(0, n * DROP_STEP_BYTES - FOLIO_BYTES_MAX) for n in range(5)]
    assert [start for start, _ in dropped] == expected
    tail.truncate(2 * MIB)
    assert released_ranges(tail, *pieces(PAGE_CACHE_BYTES_MAX + MIB, start=2 * MIB)) == [
        (0, 3 * MIB)
    ]
    assert (
        len(
            released_ranges(
                RecentPages(PAGE_CACHE_BYTES_MAX),
                *pieces(PAGE_CACHE_BYTES_MAX + 2 * DROP_STEP_BYTES, step=4096),
            )
        )
        == 2
    )


def test_only_sequentially_written_pages_are_released():
    assert released_ranges(RecentPages(0), (100, 9 * MIB)) == [(100, 9 * MIB)]
    dropped = released_ranges(RecentPages(0), *pieces(4 * MIB, start=100 * MIB))
    assert min(start for start, _ in dropped) == 100 * MIB
    # A repair, and then an append at the end.
    assert released_ranges(RecentPages(0), (5 * MIB, 100), (90 * MIB, 2 * MIB)) == [
        (90 * MIB, 2 * MIB)
    ]


@given(st.lists(st.integers(1, 3 * FOLIO_BYTES_MAX), min_size=1), st.integers(0, 200))
def test_the_blocks_of_consecutive_pieces_have_no_gap_and_no_overlap(sizes, header):
    done, at = 0, 0
    for size in [header + sizes[0], *sizes[1:]]:
        start, block_bytes = blocks_beginning_in(at, size)
        at += size
        if block_bytes:
            assert start == done
            done += block_bytes
        assert done >= at
        assert done % FOLIO_BYTES_MAX == 0
    assert done < at + FOLIO_BYTES_MAX
