"""Feed frames for 0.13 clients: bulk encoding gives the same bytes as single messages."""

import struct

import pytest

from waltz_core.legacy.feed_frames import FEED_FRAME_BYTES, feed_frames
from waltz_core.records.record import ClientId, Generation, PartitionId, ReqId
from waltz_core.wire import codec
from waltz_core.wire.messages import FeedData


@pytest.mark.parametrize("version", range(5))
@pytest.mark.parametrize("count", [0, 1, 2, 100])
def test_bulk_encoding_equals_encoding_each_message(version: int, count: int) -> None:
    first = (1 << 40) - 1
    messages = [
        FeedData(
            ReqId(ClientId(-1 - row), Generation(7), PartitionId(row), 0x7FFFFFFF),
            first + row,
            -row,
        )
        for row in range(count)
    ]
    headers = b"".join(
        message.req_id.to_bytes() + struct.pack(">i", message.header) for message in messages
    )
    frames = feed_frames(first, memoryview(headers), version)
    assert frames == b"".join(b"".join(codec.encode(message, version)) for message in messages)
    assert len(frames) == count * FEED_FRAME_BYTES


def test_a_frame_has_the_bytes_of_the_specification() -> None:
    append = bytes.fromhex("00000001000000010000000000000002")
    header = bytes.fromhex("00000007")
    expected = "4c0004" + "0000001d" + "04" + append.hex() + "0000000000000005" + header.hex()
    assert feed_frames(5, append + header, 4).hex() == expected
