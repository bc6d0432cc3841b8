"""Frames of the 0.13 administration: captured ones, and each type built from its table."""

import json
import struct
from pathlib import Path

import pytest

from waltz_core.records.record import Record, ReqId
from waltz_core.wire import codec
from waltz_core.wire.admin_messages import (
    AdminFailure,
    CheckCluster,
    Done,
    HeldRequest,
    HeldResponse,
    MetricsRequest,
    MetricsResponse,
    RecordListRequest,
    RecordListResponse,
    ReSeed,
    SessionInfoRequest,
    SessionInfoResponse,
    SetAssigned,
    SetAvailable,
)
from waltz_core.wire.connection import Connection
from waltz_core.wire.messages import WireProtocol

WIRE_FOLDER = Path(__file__).parent / "wire"
CAPTURED = json.loads((WIRE_FOLDER / "storage_admin_v0.json").read_text(encoding="utf-8"))
KEY = bytes.fromhex("0e6bfd32bdc64ce187fb950915c99d24")
CRC_HELLO = 0x154677BC  # of "hello-0", captured from Waltz 0.13


# The names of the fields of each type in Waltz 0.13, after its sequence.
NAMES = {
    1: (Done, ()),
    3: (CheckCluster, ("key", "numPartitions")),
    4: (SetAvailable, ("partitionIds", "toggled")),
    6: (SetAssigned, ("partitionIds", "toggled", "deleteStorageFiles")),
    7: (RecordListRequest, ("partitionId", "transactionId", "maxNumRecords")),
    8: (RecordListResponse, ("partitionId", "records")),
    9: (SessionInfoRequest, ("partitionId",)),
    10: (
        SessionInfoResponse,
        ("partitionId", "lastSessionId", "lowWaterMark", "localLowWaterMark"),
    ),
    11: (MetricsRequest, ()),
    13: (HeldRequest, ()),
    14: (HeldResponse, ("map",)),
}


def expected_message(meaning):
    """Return the message that a captured frame contains."""
    kind, names = NAMES[meaning["type"]]
    return kind(meaning["seqNum"], *(value_of(name, meaning[name]) for name in names))


def value_of(name, value):
    if name == "key":
        return bytes.fromhex(value)
    if name == "records":
        return tuple(map(record, value))
    return tuple(value) if isinstance(value, list) else value


def record(meaning):
    ids = meaning["reqId"]
    req_id = ReqId(ids["clientId"], ids["generation"], ids["partitionId"], ids["seqNum"])
    data = bytes.fromhex(meaning["data"])
    return Record(meaning["transactionId"], req_id, meaning["header"], data)


@pytest.mark.parametrize("example", CAPTURED, ids=lambda each: each["name"])
def test_captured_frames_are_decoded_correctly_and_encoded_to_the_same_bytes(example):
    data = bytes.fromhex(example["frame_hex"])
    header = codec.decode_frame_header(data)
    assert header == (ord("A"), 0, len(data) - 7)
    message = codec.decode(WireProtocol.ADMIN, 0, memoryview(data)[7:])
    assert message == expected_message(example["decoded"])
    assert b"".join(codec.encode(message, 0)) == data


# Each type of the table in docs/design/wire-format.md 3.2: type, sequence, fields.
BY_HAND = {
    Done(7): "01 0000000000000007",
    AdminFailure(7, "boom", (("a.B", "m", "B.java", 12), ("a.C", "n", None, -2))): (
        "02 0000000000000007 00000004 626f6f6d 00000002"
        "00000003 612e42 00000001 6d 00000006 422e6a617661 0000000c"
        "00000003 612e43 00000001 6e ffffffff fffffffe"
    ),
    AdminFailure(7, None, ()): "02 0000000000000007 ffffffff 00000000",
    CheckCluster(-1, KEY, 4): f"03 ffffffffffffffff {KEY.hex()} 00000004",
    SetAvailable(2, (3, 9), True): "04 0000000000000002 00000002 00000003 00000009 01",
    SetAssigned(2, (3,), False, True): "06 0000000000000002 00000001 00000003 00 01",
    SetAssigned(2, (), True, False): "06 0000000000000002 00000000 01 00",
    RecordListRequest(5, 1, 9, 20): "07 0000000000000005 00000001 0000000000000009 00000014",
    RecordListResponse(5, 1, (Record(0, ReqId(1, 1, 0, 2), 7, b"hello-0"),)): (
        "08 0000000000000005 00000001 00000001 0000000000000000"
        "00000001 00000001 00000000 00000002 00000007"
        f"00000007 68656c6c6f2d30 {CRC_HELLO:08x}"
    ),
    SessionInfoRequest(5, 2): "09 0000000000000005 00000002",
    SessionInfoResponse(5, 2, 1, 149, -1): (
        "0a 0000000000000005 00000002 0000000000000001 0000000000000095 ffffffffffffffff"
    ),
    MetricsRequest(5): "0b 0000000000000005",
    MetricsResponse(5, b"{}"): "0c 0000000000000005 00000002 7b7d",
    HeldRequest(5): "0d 0000000000000005",
    HeldResponse(5, ((0, True), (3, False))): (
        "0e 0000000000000005 00000002 00000000 01 00000003 00"
    ),
}


@pytest.mark.parametrize("message", BY_HAND, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("version", [0, 1])
def test_each_message_type_has_the_bytes_of_the_specification(message, version):
    payload = bytes.fromhex(BY_HAND[message])
    frame = b"A" + struct.pack(">hi", version, len(payload)) + payload
    assert b"".join(codec.encode(message, version)) == frame
    assert codec.decode(WireProtocol.ADMIN, version, memoryview(payload)) == message


def test_the_message_table_of_version_0_equals_the_table_of_waltz_0_13():
    assert sorted(codec._layouts(WireProtocol.ADMIN, 0)) == [1, 2, 3, 4, *range(6, 15)]
    new_codes = (
        codec._layouts(WireProtocol.ADMIN, 1).keys() - codec._layouts(WireProtocol.ADMIN, 0).keys()
    )
    assert min(new_codes) >= 64
    assert ReSeed.code in new_codes


def test_a_tool_and_a_storage_agree_on_their_newest_common_version():
    for versions, agreed in (((0,), 0), ((0, 1), 1), (None, 2)):
        storage = Connection(WireProtocol.ADMIN, is_listener=True)
        tool = Connection(WireProtocol.ADMIN, is_listener=False, versions=versions)
        storage.receive(tool.first_bytes())
        tool.receive(storage.first_bytes())
        assert (storage.version, tool.version) == (agreed, agreed)
