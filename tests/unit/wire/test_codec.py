"""Frames and versions of the codec, and rejected messages."""

import dataclasses
import struct

import pytest

from waltz_core.errors import LocalProtocolError, RemoteProtocolError
from waltz_core.records.record import LineageEntry, ReqId
from waltz_core.wire import codec, messages
from waltz_core.wire.messages import (
    ENTRIES_MAX,
    AppendRaw,
    AppendRequest,
    AppendResult,
    ErrorResponse,
    FlushRequest,
    Mounted,
    Nack,
    OpenRequest,
    Prepared,
    ServerPartitionsResponse,
    SuccessResponse,
    TransactionDataResponse,
    WireProtocol,
)

REQ_ID = ReqId(1, 2, 3, 4)


def payload(message, version):
    return memoryview(b"".join(codec.encode(message, version)))[7:]


def append_raw(records):
    return AppendRaw(
        session_id=9,
        sequence=1,
        partition_id=2,
        first=100,
        lengths=struct.pack(">i", len(records)),
        records=records,
        records_crc=0xFFFFFFFF,
        chain_before=b"c" * 16,
        lineage=(LineageEntry(100, 100, 9, 1_700_000_000_000, b"d" * 16),),
    )


def test_large_fields_are_encoded_and_decoded_without_a_copy():
    records = bytes(100_000)
    buffers = codec.encode(append_raw(records), 1)
    assert any(buffer is records for buffer in buffers)
    data = memoryview(b"".join(buffers))[7:]
    decoded = codec.decode(WireProtocol.STORAGE, 1, data)
    assert decoded == append_raw(records)
    assert decoded.records.obj is data.obj


@pytest.mark.parametrize("version", [0, 1, 2, 4])
def test_a_message_of_a_later_version_is_rejected_by_sender_and_receiver(version):
    mounted = Mounted(REQ_ID, 1, 2, 3, 4, 5)
    with pytest.raises(LocalProtocolError, match="Mounted is not in version"):
        codec.encode(mounted, version)
    with pytest.raises(RemoteProtocolError, match="no message with type 67"):
        codec.decode(WireProtocol.CLIENT, version, payload(mounted, 5))


def test_a_removed_message_is_rejected(monkeypatch):
    monkeypatch.setattr(FlushRequest, "until", 2)
    monkeypatch.setattr(codec, "_layouts_by_message", {})
    monkeypatch.setattr(codec, "_tables_by_version", {})
    assert codec.encode(FlushRequest(REQ_ID), 2)
    with pytest.raises(LocalProtocolError):
        codec.encode(FlushRequest(REQ_ID), 3)
    assert 8 not in codec._layouts(WireProtocol.CLIENT, 3)


def test_fields_of_a_later_version_are_empty_when_they_were_not_sent():
    request = AppendRequest(REQ_ID, 99, (7, -8), (), (), 5, b"abc", 0x352441C2)
    assert codec.decode(WireProtocol.CLIENT, 0, payload(request, 0)) == request
    locked = AppendRequest(REQ_ID, 99, (7, -8), (9,), (), 5, b"abc", 0x352441C2)
    with pytest.raises(LocalProtocolError, match=r"field read_locks of AppendRequest"):
        codec.encode(locked, 0)
    assert codec.decode(WireProtocol.CLIENT, 1, payload(locked, 1)) == locked


def test_a_new_field_is_not_sent_to_an_older_version():
    prepared = Prepared(
        *(9, 1, 0, bytes(16), 8, 99, True, 120, bytes(16), False, b""), engaged_session=7
    )
    assert codec.decode(WireProtocol.STORAGE, 2, payload(prepared, 2)) == prepared
    assert len(payload(prepared, 1)) == len(payload(prepared, 2)) - 8
    prepared_v1 = codec.decode(WireProtocol.STORAGE, 1, payload(prepared, 1))
    assert prepared_v1 == dataclasses.replace(prepared, engaged_session=-1)


@pytest.mark.parametrize(
    "message",
    [
        SuccessResponse(1 << 63, 0, 0),
        SuccessResponse(0, 0, 1 << 31),
        OpenRequest(-1, -1, -1, b"short", 4),
        Nack(0, 0, 0, 1, 2, "\ud800"),
        Nack(0, 0, 0, 1, 2, "x" * (messages.TEXT_BYTES_MAX + 1)),
        ServerPartitionsResponse(REQ_ID, (0,) * (ENTRIES_MAX + 1)),
        AppendResult(REQ_ID, 1, bytes(9), b"", b""),
        TransactionDataResponse(REQ_ID, 1, (b"data", "and an error")),
    ],
)
def test_a_value_that_the_wire_cannot_carry_is_a_local_error(message):
    with pytest.raises(LocalProtocolError):
        codec.encode(message, message.protocol.versions[-1])


def test_a_memoryview_of_larger_items_is_a_local_error():
    with pytest.raises(LocalProtocolError, match="view of bytes"):
        codec.encode(append_raw(memoryview(struct.pack("=2i", 1, 2)).cast("i")), 1)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "an empty payload"),
        (b"\xff", "no message with type 255"),
        (b"\x07", "cannot be decoded"),
        (b"\x07" + bytes(21), "expected no bytes after its last field, found 1"),
        (
            b"\x4f" + bytes(20) + bytes(12) + struct.pack(">i", -1),
            "count -1 at byte 33 does not fit",
        ),
        (
            b"\x4f" + bytes(20) + bytes(12) + struct.pack(">i", 5) + b"four",
            "count 5 at byte 33 does not fit",
        ),
        (b"\x4f" + bytes(20) + bytes(12) + struct.pack(">i", 2) + b"\xc3\x28", "utf-8"),
        (b"\x4f" + bytes(20) + bytes(12) + struct.pack(">i", 65_537) + bytes(65_537), "a text of"),
        (
            b"\x4c" + bytes(36) + struct.pack(">i", 2**31 - 1) + bytes(48),
            "count 2147483647 at byte 37 does not fit",
        ),
        (b"\x4c" + bytes(36) + struct.pack(">i", 65_537) + bytes(48 * 65_537), "at most 65536"),
    ],
)
def test_invalid_messages_are_reported_as_peer_errors(data, reason):
    with pytest.raises(RemoteProtocolError, match=reason):
        codec.decode(WireProtocol.STORAGE, 1, memoryview(data))


def test_a_wrong_data_checksum_is_reported_as_a_peer_error():
    data = bytearray(payload(TransactionDataResponse(REQ_ID, 1, (b"data", None)), 5))
    data[-6] ^= 1
    with pytest.raises(RemoteProtocolError, match="CRC"):
        codec.decode(WireProtocol.CLIENT, 5, memoryview(data))


def test_a_bool_is_true_only_for_the_byte_1():
    data = bytearray(payload(ErrorResponse(REQ_ID, 21, retriable=True, message="x"), 5))
    offset = 1 + 16 + 4
    assert data[offset] == 1
    data[offset] = 2
    assert codec.decode(WireProtocol.CLIENT, 5, memoryview(data)).retriable is False


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00\x00\x00\x01",
        b"\xff\xff\xff\xff",
        struct.pack(">ihi", 1, 0, -1),
        struct.pack(">ihi", 1, 0, 1) + b"\xff",
        struct.pack(">ihi", 1, 0, 0) + b"more",
    ],
)
def test_invalid_hellos_are_reported_as_peer_errors(data):
    with pytest.raises(RemoteProtocolError):
        codec.decode_hello(data)
