"""Values to data and back; `test_transaction.py` has what is refused."""

import pytest

from waltz_core.client.model.serializers import BYTES, JSON, MSGPACK


@pytest.mark.parametrize("serializer", [MSGPACK, JSON])
@pytest.mark.parametrize("value", [None, 7, -1.5, "ä", [1, [2]], {"a": {"b": None}}])
def test_serialized_values_round_trip(serializer, value):
    assert serializer.deserialize(serializer.serialize(value)) == value


def test_bytes_stay_as_they_are():
    assert BYTES.serialize(memoryview(b"abc")) == b"abc"
    assert BYTES.deserialize(b"abc") == b"abc"
