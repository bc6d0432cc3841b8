"""Encodes a range of the feed as many FEED_DATA frames at once, for 0.13 clients.

A 0.13 client gets one message for each transaction, so a client that catches up gets millions of
messages. To encode these messages fast, this module builds the frames as rows of one array: each
frame is 36 bytes long. A test compares the layout with that of `messages.FeedData`:

    magic (1) | version (2) | length (4) | type (1) | request ID (16) | ID (8) | header (4)
"""

from typing import Final

import numpy as np

from waltz_core.records.raw_records import FEED_HEADER_BYTES, FEED_HEADER_DTYPE
from waltz_core.wire.messages import Buffer, FeedData, WireProtocol

_FRAME: Final = np.dtype(
    [
        ("magic", "u1"),
        ("version", ">i2"),
        ("length", ">i4"),
        ("type", "u1"),
        ("req_id", FEED_HEADER_DTYPE["req_id"]),
        ("transaction_id", ">i8"),
        ("header", ">i4"),
    ]
)
FEED_FRAME_BYTES: Final = _FRAME.itemsize
_PAYLOAD_BYTES: Final = FEED_FRAME_BYTES - 7
assert FEED_FRAME_BYTES == 36


def feed_frames(first: int, headers: Buffer, version: int) -> bytes:
    """Encode one frame for each transaction from `first` on.

    `headers` has 20 bytes for each transaction: request ID, application header.
    """
    heads = np.frombuffer(headers, FEED_HEADER_DTYPE)
    assert heads.size * FEED_HEADER_BYTES == len(headers)
    frames = np.empty(heads.size, _FRAME)
    frames["magic"] = WireProtocol.CLIENT.magic
    frames["version"] = version
    frames["length"] = _PAYLOAD_BYTES
    frames["type"] = FeedData.code
    frames["req_id"] = heads["req_id"]
    frames["transaction_id"] = np.arange(first, first + heads.size)
    frames["header"] = heads["header"]
    return frames.tobytes()
