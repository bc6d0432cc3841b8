"""Values of nodes survive encoding; arbitrary bytes decode to a value or BadFormat."""

import contextlib
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waltz_core import errors
from waltz_core.cluster.znodes import model

INT32 = st.integers(-(2**31), 2**31 - 1)
NATURAL = st.integers(0, 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
PORT = st.integers(0, 65535)
# In modified UTF-8, a lone surrogate is valid, and a pair of surrogates is one character.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
ADDRESS = TEXT
PARTITIONS = st.lists(NATURAL, max_size=6).map(tuple)
UUIDS = st.binary(min_size=16, max_size=16).map(lambda data: UUID(bytes=data))


@st.composite
def assignments(draw):
    count = draw(st.integers(0, 30))
    servers = draw(st.lists(INT32, max_size=5, unique=True))
    owned = {server: {} for server in servers}
    if servers:
        for partition in draw(st.permutations(range(count))):
            if draw(st.booleans()):
                owned[draw(st.sampled_from(servers))][partition] = draw(INT32)
    return model.PartitionAssignment(draw(INT32), count, owned)


VALUES = st.one_of(
    st.builds(model.ClusterParams, TEXT, NATURAL),
    st.builds(model.ServerDescriptor, INT32, TEXT, PORT, PARTITIONS),
    assignments(),
    st.builds(model.StoreParams, UUIDS, NATURAL),
    st.builds(model.ReplicaAssignments, st.dictionaries(ADDRESS, PARTITIONS, max_size=5)),
    st.builds(model.GroupDescriptor, st.dictionaries(ADDRESS, INT32, max_size=5)),
    st.builds(model.ConnectionMetadata, st.dictionaries(ADDRESS, PORT, max_size=5)),
    st.builds(
        model.PartitionMarker,
        st.sampled_from(model.MarkerState),
        INT64,
        st.binary(min_size=16, max_size=16),
    ),
    st.builds(model.StorageRegistration, UUIDS),
)
METADATA = st.builds(
    model.PartitionMetadata,
    INT32,
    INT64,
    st.dictionaries(ADDRESS, st.builds(model.ReplicaState, INT64, INT64), max_size=5),
)
DECODERS = [
    model.ClusterParams.from_bytes,
    model.ServerDescriptor.from_bytes,
    model.PartitionAssignment.from_bytes,
    model.StoreParams.from_bytes,
    model.ReplicaAssignments.from_bytes,
    model.GroupDescriptor.from_bytes,
    model.ConnectionMetadata.from_bytes,
    model.PartitionMarker.from_bytes,
    model.StorageRegistration.from_bytes,
    model.decode_id_counter,
    lambda data: model.PartitionMetadata.from_bytes(data, 0),
]


@given(VALUES)
def test_any_value_round_trips(value):
    data = value.to_bytes()
    found = type(value).from_bytes(data)
    assert found == value
    assert found.to_bytes() == data


@given(METADATA, NATURAL)
def test_any_metadata_round_trips(metadata, partition_id):
    data = metadata.to_bytes(partition_id)
    found = model.PartitionMetadata.from_bytes(data, partition_id)
    assert found == metadata
    assert list(found.states) == list(metadata.states)
    assert found.to_bytes(partition_id) == data


@given(VALUES, st.data())
def test_a_value_that_was_cut_or_extended_raises_bad_format(value, data):
    good = value.to_bytes()
    cut = data.draw(st.integers(0, len(good) - 1))
    for bad in (good[:cut], good + b"\0"):
        with pytest.raises(errors.BadFormat):
            type(value).from_bytes(bad)


@given(VALUES, st.data())
def test_a_flipped_byte_decodes_to_a_value_or_raises_bad_format(value, data):
    changed = bytearray(value.to_bytes())
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found = type(value).from_bytes(bytes(changed))
    except errors.BadFormat:
        return
    assert isinstance(found, type(value))
    assert type(value).from_bytes(found.to_bytes()) == found


@given(
    st.sampled_from(DECODERS),
    st.sampled_from([b"", b"\1", b"\3", b"\xb4\xe8\x73\x47\1"]),
    st.binary(),
)
def test_any_bytes_decode_to_a_value_or_raise_bad_format(decode, prefix, rest):
    with contextlib.suppress(errors.BadFormat):
        decode(prefix + rest)


@given(st.text())
def test_any_string_round_trips_through_modified_utf8(text):
    data = model.encode_utf(text)
    assert int.from_bytes(data[:2], "big") == len(data) - 2
    assert b"\0" not in data[2:]
    assert all(byte < 0xF0 for byte in data[2:])
    assert model.decode_utf(data[2:]) == text
