"""Ranges of damaged IDs: added and removed IDs, with a limited number of ranges."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from waltz_core.storage.files.format import DAMAGED_RANGES_MAX, IdRange, Slot
from waltz_core.storage.files.id_ranges import (
    add_damage,
    count_ids,
    damage_up_to,
    format_ranges,
    remove_damage,
)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 6), st.booleans()), max_size=20))
def test_damaged_ranges_contain_the_added_ids_without_the_removed_ones(steps):
    ranges = ()
    model = set()
    for first, more, add in steps:
        one = IdRange(first, first + more)
        ids = set(range(first, first + more + 1))
        ranges = (add_damage if add else remove_damage)(ranges, one)
        model = model | ids if add else model - ids
        assert {i for a, b in ranges for i in range(a, b + 1)} == model
        assert all(a.last + 1 < b.first for a, b in pairwise(ranges))


def test_too_many_damaged_ranges_are_merged_without_losing_an_id():
    ranges = ()
    for position in range(2 * DAMAGED_RANGES_MAX):
        ranges = add_damage(ranges, IdRange(10 * position, 10 * position + 1))
    assert len(ranges) == DAMAGED_RANGES_MAX
    covered = {i for a, b in ranges for i in range(a, b + 1)}
    assert all(
        {10 * position, 10 * position + 1} <= covered for position in range(2 * DAMAGED_RANGES_MAX)
    )
    slot = Slot(0, damaged=ranges)
    assert Slot.decode(slot.encode()) == slot


def test_ranges_are_counted_and_reported():
    ranges = (IdRange(3, 3), IdRange(7, 11))
    assert (count_ids(ranges), count_ids(())) == (6, 0)
    assert (format_ranges(ranges), format_ranges(())) == ("3..3,7..11", "")


def test_a_shorter_log_has_no_damage_after_its_end():
    ranges = (IdRange(3, 3), IdRange(7, 11))
    assert damage_up_to(ranges, 8) == (IdRange(3, 3), IdRange(7, 8))
    assert damage_up_to(ranges, 6) == (IdRange(3, 3),)
    assert damage_up_to(ranges, 2) == ()
