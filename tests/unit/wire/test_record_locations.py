"""Record locations survive a round trip; other bytes are rejected."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from waltz_core.errors import BadFormat
from waltz_core.wire.record_locations import (
    SEGMENT_REQUEST_BYTES,
    FileLocation,
    decode_locations,
    decode_segment,
    encode_locations,
    encode_segment,
    socket_name_of,
)

KEY = bytes(range(16))
sizes = st.integers(1, 1 << 40)
places = st.lists(st.builds(FileLocation, st.integers(0, 1 << 62), st.integers(0, 1 << 40), sizes))


@settings(max_examples=30)
@given(places)
def test_record_locations_round_trip(locations):
    total = sum(place.size for place in locations)
    assert decode_locations(encode_locations(locations), total) == tuple(locations)


@settings(max_examples=30)
@given(st.binary(max_size=100), st.integers(0, 1000))
def test_arbitrary_bytes_are_rejected_or_decode_to_consistent_record_locations(data, records_bytes):
    try:
        locations = decode_locations(data, records_bytes)
    except BadFormat:
        return
    assert sum(place.size for place in locations) == records_bytes
    assert encode_locations(locations) == data


@pytest.mark.parametrize(
    ("locations", "records_bytes", "sentence"),
    [
        ([FileLocation(0, 128, 10)], 11, "expected 11 bytes of records, found 10"),
        (
            [FileLocation(0, 128, 10), FileLocation(5, 128, -1)],
            9,
            "of records: expected a run of bytes in a segment",
        ),
        ([FileLocation(0, -1, 10)], 10, "of records: expected a run of bytes in a segment"),
        ([FileLocation(-1, 0, 10)], 10, "of records: expected a run of bytes in a segment"),
    ],
)
def test_impossible_positions_are_rejected(locations, records_bytes, sentence):
    with pytest.raises(BadFormat, match=sentence):
        decode_locations(encode_locations(locations), records_bytes)


def test_a_record_location_is_complete_or_rejected():
    with pytest.raises(BadFormat, match="expected 24 bytes each, found 23"):
        decode_locations(encode_locations([FileLocation(0, 128, 10)])[:-1], 10)


@pytest.mark.parametrize("first", [0, 7, (1 << 63) - 1])
@pytest.mark.parametrize("partition_id", [0, 3, (1 << 31) - 1])
@pytest.mark.parametrize("ticket", [b"", bytes(range(24))])
def test_a_request_for_a_segment_round_trips(partition_id, first, ticket):
    question = encode_segment(partition_id, first, ticket)
    assert len(question) == SEGMENT_REQUEST_BYTES + len(ticket)
    assert decode_segment(question) == (partition_id, first, ticket)


def test_each_storage_has_a_unique_socket_name_of_valid_length():
    host = "a-host-with-a-very-long-name." * 8
    names = {
        socket_name_of(key, f"{host}:{port}", with_tickets=with_tickets)
        for key in (KEY, bytes(16))
        for port in (1, 2)
        for with_tickets in (False, True)
    }
    assert len(names) == 8
    assert max(map(len, names)) < 100
