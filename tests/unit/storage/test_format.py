"""Structures on disk: invalid bytes and flipped bits are rejected."""

import struct
from contextlib import suppress
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from waltz_core.errors import BadFormat, ChecksumMismatch
from waltz_core.records.checksum import crc32
from waltz_core.records.record import LineageEntry
from waltz_core.storage.files import format as disk_format
from waltz_core.storage.files.format import (
    ControlHeader,
    IdRange,
    LineageHeader,
    PartitionInfo,
    Promise,
    ProvisionalMark,
    SegmentHeader,
    Slot,
    TruncateIntent,
    with_crc,
)
from waltz_core.storage.log.removal import WipeIntent

KEY = bytes(range(16))
ENTRY = LineageEntry(3, 9, 7, 11, KEY)
BOUND = {"segment_crc": 77, "position": 5}
SLOT_LAYOUT = Slot(
    2,
    provisional=ProvisionalMark(1, 5),
    truncate=TruncateIntent(4, ENTRY),
    damaged=(IdRange(0, 3),),
    dirty=True,
    last_session=8,
    engaged=6,
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
    "slot": (SLOT_LAYOUT.encode(), Slot.decode),
    "wipe": (WipeIntent(2, True, 7, KEY).encode(), WipeIntent.decode),
}
CHECKED = ("info", "lineage", "entry", "id", "slot", "wipe")


@pytest.mark.parametrize("name", STRUCTURES)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_arbitrary_bytes_are_decoded_or_rejected(name, data):
    good, decode = STRUCTURES[name]
    raw = bytearray(
        good[: data.draw(st.integers(0, len(good)))] if data.draw(st.booleans()) else good
    )
    for position in data.draw(st.lists(st.integers(0, max(0, len(raw) - 1)), max_size=8)):
        if raw:
            raw[position] = data.draw(st.integers(0, 255))
    if name in CHECKED and len(raw) >= 4 and data.draw(st.booleans()):
        before = crc32(struct.pack(">q", BOUND["position"]), BOUND["segment_crc"])
        raw = bytearray(with_crc(bytes(raw[:-4]), before if name == "entry" else 0))
    with suppress(BadFormat, ChecksumMismatch):
        decode(bytes(raw))


@pytest.mark.parametrize("name", CHECKED)
def test_every_flipped_bit_is_detected(name):
    good, decode = STRUCTURES[name]
    for position in range(len(good)):
        for bit in range(8):
            raw = bytearray(good)
            raw[position] ^= 1 << bit
            with pytest.raises(ChecksumMismatch):
                decode(bytes(raw))


def test_a_slot_stores_the_last_engaged_session():
    for last, engaged in ((-1, -1), (7, -1), (7, 0), (7, 7), (1 << 40, (1 << 40) - 9)):
        slot = Slot(0, last_session=last, engaged=engaged)
        assert Slot.decode(slot.encode()) == slot
    # A distance too large to be stored, and a session number below all valid ones.
    assert Slot.decode(Slot(0, last_session=1 << 40, engaged=3).encode()).engaged == -1
    body = Slot(0, last_session=7, engaged=0).encode()[:-8] + (9).to_bytes(4, "big")
    with pytest.raises(BadFormat, match="expected an engaged session of at least 0, found -1"):
        Slot.decode(with_crc(body))


def test_a_promise_after_loss_is_above_all_known_sessions():
    assert Promise(5, b"n" * 16).last_seen_session == 5
    lost = Promise.after_loss(5)
    assert (lost.session_id, lost.last_seen_session, lost.is_after_loss) == (6, 5, True)
    assert lost.at_least(6) == lost
    assert lost.at_least(7) == Promise(7)
    assert not Promise(7).is_after_loss
