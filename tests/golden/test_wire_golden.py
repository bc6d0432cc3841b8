"""Frames of released versions, including 0.13, are decoded and encoded again."""

import json
import re
from pathlib import Path

import pytest

from tests.golden import wire_examples
from waltz_core.records.record import ReqId
from waltz_core.wire import codec
from waltz_core.wire.messages import Message, WireProtocol

WIRE_FOLDER = Path(__file__).parent / "wire"
PROTOCOLS = {"L": WireProtocol.CLIENT, "S": WireProtocol.STORAGE, "A": WireProtocol.ADMIN}
EXAMPLE_COUNTS = {"client_server_v4.json": 25, "client_server_v6.json": 2}
# The names of fields in Waltz 0.13, if the table has another name.
RENAMED = {
    "clientHighWaterMark": "client_high_water_mark",
    "seqNum": "connection_sequence",
    "transactionId": "transaction_id",
    "highWaterMark": "high_water_mark",
    "partitionState": "state",
    "header": "header",
    "numPartitions": "partition_count",
    "writeLocks": "write_locks",
    "readLocks": "read_locks",
    "appendLocks": "append_locks",
    "dataCrc32": "data_crc",
    "partitionIds": "partitions",
    "result": "is_done",
}


def load(name):
    return json.loads((WIRE_FOLDER / name).read_text(encoding="utf-8"))


def read_frame(text):
    data = bytes.fromhex(text)
    header = codec.decode_frame_header(data)
    assert len(data) == 7 + header.payload_bytes
    protocol = PROTOCOLS[chr(header.magic)]
    return protocol, header.version, data


def round_trip(protocol, version, data) -> Message:
    message = codec.decode(protocol, version, memoryview(data)[7:])
    assert b"".join(codec.encode(message, version)) == data
    return message


@pytest.mark.parametrize("file", list(EXAMPLE_COUNTS))
def test_captured_frames_are_decoded_correctly_and_encoded_to_the_same_bytes(file):
    frame_count = 0
    for example in load(file):
        protocol, version, data = read_frame(example["frame_hex"])
        meaning = example["decoded"]
        message = round_trip(protocol, version, data)
        assert message.code == meaning["type"]
        ids = meaning["reqId"]
        expected = ReqId(ids["clientId"], ids["generation"], ids["partitionId"], ids["seqNum"])
        assert message.req_id == expected
        compare(message, meaning)
        frame_count += 1
    assert frame_count == EXAMPLE_COUNTS[file]


def compare(message, meaning):
    for name, value in meaning.items():
        field = RENAMED.get(name)
        if field is None or not hasattr(message, field):
            continue
        found = getattr(message, field)
        assert (list(found) if isinstance(found, tuple) else found) == value, name


def test_vectors_of_older_versions_decode_and_encode():
    vector_count = 0
    for example in load("codec_vectors.json"):
        if example["frame_hex"][:2] == "53":
            continue  # the storage protocol of 0.13 (decision 043)
        protocol, version, data = read_frame(example["frame_hex"])
        if len(data) == 7:
            assert data == codec.encode_keep_alive(protocol, version)
            continue
        message = round_trip(protocol, version, data)
        if example["name"].startswith("APPEND_REQUEST v"):
            assert message.req_id == ReqId(1, 2, 3, 4)
            assert message.client_high_water_mark == 99
            assert message.write_locks == (7, -8)
            assert message.read_locks == ((9,) if "readLocks" in example["decoded"] else ())
            assert message.append_locks == ((10,) if "appendLocks" in example["decoded"] else ())
            assert (bytes(message.data), message.data_crc) == (b"abc", 0x352441C2)
        state = re.fullmatch(r"MOUNT_RESPONSE v(\d) state=(\d)", example["name"])
        if state and int(state[1]) <= 2:
            assert message.is_ready == (state[2] == "0")
        elif state:
            assert message.state == int(state[2])
        vector_count += 1
    assert vector_count == 25


def test_messages_of_released_versions_keep_their_bytes_and_their_meaning():
    for each in load("waltz_0_2.json"):
        protocol, version, data = read_frame(each["frame_hex"])
        message = round_trip(protocol, version, data)
        assert (type(message).__name__, version) == (each["message"], each["version"])
        fields = wire_examples.json_fields(message)
        # An example lacks the fields that a later version has added.
        assert {name: fields[name] for name in each["fields"]} == each["fields"]


def test_every_message_of_a_released_version_has_an_example():
    known = {(each["message"], each["version"]) for each in load("waltz_0_2.json")}
    for protocol, versions in wire_examples.RELEASED_VERSIONS.items():
        for version in versions:
            for message_class in wire_examples.message_classes(protocol, version):
                assert (message_class.__name__, version) in known
