"""Structures on disk: any bytes decode or are refused, and no flipped bit passes."""

import struct
from contextlib import suppress
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from waltz_core.checksum import crc32
from waltz_core.errors import BadFormat, ChecksumMismatch
from waltz_core.record import LineageEntry
from waltz_core.storage import format as disk_format
from waltz_core.storage.format import (
    DAMAGED_MAX,
    ControlHeader,
    IdRange,
    LineageHeader,
    Mark,
    PartitionInfo,
    SegmentHeader,
    Slot,
    TruncateIntent,
    count_of,
    in_words,
    with_crc,
    with_damage,
    without_damage,
)
from waltz_core.storage.removal import Wipe

KEY = bytes(range(16))
ENTRY = LineageEntry(3, 9, 7, 11, KEY)
BOUND = {"segment_crc": 77, "place": 5}
SLOT = Slot(
    2,
    provisional=Mark(1, 5),
    truncate=TruncateIntent(4, ENTRY),
    damaged=(IdRange(0, 3),),
    dirty=True,
)
STRUCTURES = {
    "control": (ControlHeader(5, KEY, 4).encode(), ControlHeader.decode),
    "info": (PartitionInfo(1, 2, 2, 5, 9).encode(), PartitionInfo.decode),
    "segment": (SegmentHeader(5, KEY, 1, 7).encode(), SegmentHeader.decode),
    "lineage": (LineageHeader(SegmentHeader(5, KEY, 1, 7), KEY).encode(), LineageHeader.decode),
    "entry": (
        disk_format.encode_entry(ENTRY, -1, **BOUND),
        partial(disk_format.decode_entry, **BOUND),
    ),
    "id": (disk_format.encode_storage_id(KEY), disk_format.decode_storage_id),
    "slot": (SLOT.encode(), Slot.decode),
    "wipe": (Wipe(2, True, 7, KEY).encode(), Wipe.decode),
}
CHECKED = ("info", "lineage", "entry", "id", "slot", "wipe")


@pytest.mark.parametrize("name", STRUCTURES)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_bytes_decode_or_are_refused(name, data):
    good, decode = STRUCTURES[name]
    raw = bytearray(
        good[: data.draw(st.integers(0, len(good)))] if data.draw(st.booleans()) else good
    )
    for place in data.draw(st.lists(st.integers(0, max(0, len(raw) - 1)), max_size=8)):
        if raw:
            raw[place] = data.draw(st.integers(0, 255))
    if name in CHECKED and len(raw) >= 4 and data.draw(st.booleans()):
        before = crc32(struct.pack(">q", BOUND["place"]), BOUND["segment_crc"])
        raw = bytearray(with_crc(bytes(raw[:-4]), before if name == "entry" else 0))
    with suppress(BadFormat, ChecksumMismatch):
        decode(bytes(raw))


@pytest.mark.parametrize("name", CHECKED)
def test_every_flipped_bit_is_seen(name):
    good, decode = STRUCTURES[name]
    for place in range(len(good)):
        for bit in range(8):
            raw = bytearray(good)
            raw[place] ^= 1 << bit
            with pytest.raises(ChecksumMismatch):
                decode(bytes(raw))


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 6), st.booleans()), max_size=20))
def test_damaged_ranges_hold_what_was_added_and_not_removed(steps):
    ranges = ()
    model = set()
    for first, more, add in steps:
        one = IdRange(first, first + more)
        ids = set(range(first, first + more + 1))
        ranges = (with_damage if add else without_damage)(ranges, one)
        model = model | ids if add else model - ids
        assert {i for a, b in ranges for i in range(a, b + 1)} == model
        assert all(a.last + 1 < b.first for a, b in pairwise(ranges))


def test_too_many_damaged_ranges_grow_together_and_lose_none():
    ranges = ()
    for place in range(2 * DAMAGED_MAX):
        ranges = with_damage(ranges, IdRange(10 * place, 10 * place + 1))
    assert len(ranges) == DAMAGED_MAX
    covered = {i for a, b in ranges for i in range(a, b + 1)}
    assert all({10 * place, 10 * place + 1} <= covered for place in range(2 * DAMAGED_MAX))
    slot = Slot(0, damaged=ranges)
    assert Slot.decode(slot.encode()) == slot


def test_ranges_are_counted_and_told():
    ranges = (IdRange(3, 3), IdRange(7, 11))
    assert (count_of(ranges), count_of(())) == (6, 0)
    assert (in_words(ranges), in_words(())) == ("3..3,7..11", "")
