"""Structures on disk survive a round trip; changed bytes are rejected."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from waltz_core.records.record import LineageEntry
from waltz_core.storage.files.format import (
    DAMAGED_RANGES_MAX,
    PARTITIONS_MAX,
    SLOT_BYTES,
    AckedMarker,
    ControlHeader,
    IdRange,
    LineageHeader,
    PartitionInfo,
    ProvisionalMark,
    SegmentHeader,
    Slot,
    TruncateIntent,
    decode_entry,
    decode_storage_id,
    encode_entry,
    encode_storage_id,
    first_id_in_name,
    segment_name,
)
from waltz_core.storage.log.removal import WipeIntent

INT32 = st.integers(-(1 << 31), (1 << 31) - 1)
UINT32 = st.integers(0, 0xFFFFFFFF)
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
ID_MAX = (1 << 63) - 1
IDS = st.integers(0, ID_MAX)
MARKS = st.integers(-1, ID_MAX)
B16 = st.binary(min_size=16, max_size=16)


@st.composite
def entries(draw):
    first, last = sorted((draw(IDS), draw(IDS)))
    return LineageEntry(first, last, draw(INT64), draw(INT64), draw(B16))


@st.composite
def damaged_ranges(draw):
    ends = draw(st.lists(IDS, unique=True, max_size=2 * DAMAGED_RANGES_MAX).map(sorted))
    return tuple(IdRange(*pair) for pair in zip(ends[::2], ends[1::2], strict=False))


SLOTS = st.builds(
    Slot,
    INT32,
    sequence=INT64,
    control_file_sequence=INT64,
    promised=MARKS,
    nonce=B16,
    last_session=MARKS,
    low_water_mark=MARKS,
    provisional=st.none() | st.builds(ProvisionalMark, MARKS, MARKS),
    acked=st.builds(AckedMarker, MARKS, B16),
    truncate=st.none() | st.builds(TruncateIntent, MARKS, st.none() | entries()),
    damaged=damaged_ranges(),
    dirty=st.booleans(),
    suspect=st.booleans(),
)
SEGMENT_HEADERS = st.builds(SegmentHeader, INT64, B16, INT32, IDS)


@given(SLOTS, st.none() | st.integers(0, (1 << 32) - 2))
def test_control_slots_round_trip(slot, back):
    if back is not None and back <= slot.last_session:
        slot = replace(slot, engaged=slot.last_session - back)
    assert len(slot.encode()) == SLOT_BYTES
    assert Slot.decode(slot.encode()) == slot


@given(entries(), st.data())
def test_lineage_entries_round_trip(entry, data):
    synced = data.draw(st.integers(-1, entry.first - 1))
    bound = {"segment_crc": data.draw(UINT32), "position": data.draw(IDS)}
    assert decode_entry(encode_entry(entry, synced, **bound), **bound) == (entry, synced)


@given(st.builds(ControlHeader, INT64, B16, st.integers(0, PARTITIONS_MAX)))
def test_control_headers_round_trip(header):
    assert ControlHeader.decode(header.encode()) == header


@given(st.builds(PartitionInfo, MARKS, MARKS, MARKS, INT32, INT32))
def test_partition_infos_round_trip(info):
    assert PartitionInfo.decode(info.encode()) == info


@given(SEGMENT_HEADERS, B16)
def test_segment_and_lineage_headers_round_trip(header, chain):
    assert SegmentHeader.decode(header.encode()) == header
    assert LineageHeader.decode(LineageHeader(header, chain).encode()).chain_before == chain


@given(B16)
def test_storage_ids_round_trip(storage_id):
    assert decode_storage_id(encode_storage_id(storage_id)) == storage_id


@given(IDS, st.sampled_from([".seg", ".idx", ".chn"]))
def test_segment_names_round_trip(first, suffix):
    name = segment_name(first, suffix)
    assert len(name) == 23
    assert first_id_in_name(name) == (first if suffix == ".seg" else None)


@given(st.text(max_size=30))
def test_only_canonical_file_names_are_parsed_as_segment_names(name):
    found = first_id_in_name(name)
    assert found is None or segment_name(found, ".seg") == name


@given(st.builds(WipeIntent, INT32, st.booleans(), MARKS, B16))
def test_wipe_intents_round_trip(wipe):
    assert WipeIntent.decode(wipe.encode()) == wipe
