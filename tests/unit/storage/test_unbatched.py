"""The word that says that records have no batches."""

from dataclasses import replace
from types import SimpleNamespace

from waltz_core.record import GENESIS_CHAIN, LineageEntry
from waltz_core.storage.format import Marker, Slot
from waltz_core.storage.unbatched import UNBATCHED, is_unbatched, marker, marker_at_roll

CHAIN = b"c" * 16
OURS = Slot(0, acked=Marker(4, CHAIN))
ORIGINALS = replace(OURS, acked=Marker(4, UNBATCHED))


def segments(last, end):
    return SimpleNamespace(last=last, lineage_end=lambda: end)


def test_only_the_word_says_so_and_it_outlives_a_slot_on_disk():
    assert not is_unbatched(Slot(0))
    assert not is_unbatched(OURS)
    assert is_unbatched(ORIGINALS)
    assert is_unbatched(Slot.decode(ORIGINALS.encode()))
    assert UNBATCHED != GENESIS_CHAIN


def test_a_marker_has_the_chain_or_the_word():
    assert marker(OURS, 7, b"d" * 16) == Marker(7, b"d" * 16)
    assert marker(ORIGINALS, 7, b"d" * 16) == Marker(7, UNBATCHED)


def test_at_a_roll_all_records_are_vouched_for_or_all_batches():
    end = LineageEntry(0, 5, 1, 1, CHAIN)
    assert marker_at_roll(OURS, segments(8, end)) == Marker(5, CHAIN)
    assert marker_at_roll(OURS, segments(8, None)) is None
    assert marker_at_roll(ORIGINALS, segments(8, end)) == Marker(8, UNBATCHED)
