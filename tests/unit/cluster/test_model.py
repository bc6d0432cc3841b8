"""Errors of decoders for invalid bytes, and of encoders for invalid values."""

import pytest

from waltz_core import errors
from waltz_core.cluster.znodes import model


@pytest.mark.parametrize(
    ("decode", "text", "problem"),
    [
        (
            model.ClusterParams.from_bytes,
            "",
            "expected 4 bytes of magic, found 0, at offset 0 of 0",
        ),
        (
            model.ClusterParams.from_bytes,
            "b4e87348" + "01",
            "expected magic b4e87347, found b4e87348",
        ),
        (model.ClusterParams.from_bytes, "b4e87347" + "02", "expected version 1, found 2"),
        (model.ClusterParams.from_bytes, "b4e87347" + "01" + "0001", "expected 1 bytes of name"),
        (
            model.ClusterParams.from_bytes,
            "b4e87347" + "01" + "0001" + "ff" + "00000001",
            "name is not modified UTF-8",
        ),
        (
            model.ClusterParams.from_bytes,
            "b4e87347" + "01" + "0004" + "f09f9880" + "00000001",
            "name is not modified UTF-8",
        ),
        (
            model.ClusterParams.from_bytes,
            "b4e87347" + "01" + "0000" + "ffffffff",
            "expected partition count of 0 or more, found -1",
        ),
        (
            model.ClusterParams.from_bytes,
            "b4e87347" + "01" + "0000" + "00000001" + "00",
            "found 1 bytes after the end",
        ),
        (
            model.ServerDescriptor.from_bytes,
            "01" + "00000001" + "0000" + "00010000",
            "expected port in 0..65535, found 65536",
        ),
        (model.PartitionAssignment.from_bytes, "01", "expected version 3, found 1"),
        (
            model.PartitionAssignment.from_bytes,
            "03" + "00000001" * 2 + "7fffffff",
            "server count 2147483647 needs at least 17179869176 bytes, found 0",
        ),
        (
            model.PartitionAssignment.from_bytes,
            "03" + "00000001" * 2 + "00000002" + ("00000007" + "00000000") * 2,
            "server 7 is listed twice",
        ),
        (
            model.PartitionAssignment.from_bytes,
            "03" + "00000001" * 2 + "00000001" + "00000007" + "00000001" + "00000001" * 2,
            "partition 1 is listed twice or is not below the partition count 1",
        ),
        (
            model.PartitionAssignment.from_bytes,
            "03" + "00000001" * 2 + "00000001" + "00000007" + "00000002" + "0000000000000001" * 2,
            "partition 0 is listed twice",
        ),
        (
            model.GroupDescriptor.from_bytes,
            "01" + "00000002" + "0003613a3100000000" * 2,
            "storage 'a:1' is listed twice",
        ),
        (
            model.PartitionMarker.from_bytes,
            "01" + "03" + "00" * 24,
            "expected state 1 (new) or 2 (open), found 3",
        ),
        (model.decode_id_counter, "ffffffff", "expected last ID of 0 or more"),
        (model.decode_id_counter, "000000", "expected 4 bytes of last ID, found 3"),
    ],
)
def test_decoding_errors_state_the_problem_and_its_offset(decode, text, problem):
    with pytest.raises(errors.BadFormat) as caught:
        decode(bytes.fromhex(text))
    assert problem in str(caught.value)
    assert " at offset " in str(caught.value)


def test_metadata_of_another_partition_is_rejected():
    metadata = model.PartitionMetadata(1, 2, {"a:1": model.ReplicaState(2)})
    data = metadata.to_bytes(3)
    assert model.PartitionMetadata.from_bytes(data, 3) == metadata
    with pytest.raises(errors.BadFormat, match="expected partition 4, found 3"):
        model.PartitionMetadata.from_bytes(data, 4)


def test_a_string_over_65535_bytes_is_rejected():
    assert len(model.encode_utf("a" + "é" * 32767)) == 2 + 65535
    with pytest.raises(errors.BadRequest, match="at most 65535 bytes, found 65536:"):
        model.encode_utf("é" * 32768)


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("", "0000"),
        ("a\0b", "0004" + "61c08062"),
        ("é€", "0005" + "c3a9e282ac"),
        ("\U0001f600", "0006" + "eda0bdedb880"),
        ("\ud83d", "0003" + "eda0bd"),
        ("\uffff", "0003" + "efbfbf"),
    ],
)
def test_texts_are_encoded_in_modified_utf8(text, data):
    assert model.encode_utf(text).hex() == data
    assert model.decode_utf(bytes.fromhex(data)[2:]) == text
