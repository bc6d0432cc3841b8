"""Lock blocks: which parts are trusted, and which errors are found."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waltz_core.records.checksum import crc32
from waltz_core.records.lock_blocks import (
    LOCKS_BYTES_MAX,
    TRAILER_BYTES,
    LockBlock,
    LockBlockReader,
    LogEnd,
    encode,
)

START = LogEnd(-1, bytes(16))


def end(last, history=0):
    return LogEnd(last, bytes([last % 256, history]) * 8)


def locks_of(*values):
    return struct.pack(f">{len(values)}i", *values)


def block(first, last, *values, before=None, history=0):
    if before is None:
        before = START if first == 0 else end(first - 1, history)
    return encode(first, end(last, history), before.chain, locks_of(*values))


def trusted_blocks(data, at, steps_max=1_000):
    """Return first, last and locks of all trusted blocks below the given end of the log."""
    blocks, found = LockBlockReader(data), []
    while (one := blocks.block_ending_at(at, steps_max)) is not None:
        found.append((one.first, one.end.last, bytes(one.locks)))
        at = one.end_before
    return found


def test_a_block_has_the_specified_bytes():
    encoded = encode(5, LogEnd(6, b"c" * 16), b"b" * 16, locks_of(-1, 258))
    assert encoded[:8] == bytes.fromhex("ffffffff00000102")
    assert encoded[8:-4] == b"WLB1" + struct.pack(">qq", 5, 6) + b"b" * 16 + b"c" * 16 + b"\0\0\0\2"
    assert len(encoded) == 8 + TRAILER_BYTES == 68
    block = LockBlockReader(encoded).block_ending_at(LogEnd(6, b"c" * 16), 1)
    assert block == LockBlock(5, LogEnd(6, b"c" * 16), b"b" * 16, encoded[:8])
    assert block.end_before == LogEnd(4, b"b" * 16)


def test_a_block_with_distances_has_the_specified_bytes():
    encoded = encode(5, LogEnd(6, b"c" * 16), b"b" * 16, locks_of(-1, 258), b"\1\0")
    assert encoded[:14] == bytes.fromhex("ffffffff00000102") + b"\1\0" + b"WLB2"
    assert len(encoded) == 10 + TRAILER_BYTES
    older = encode(4, LogEnd(4, b"b" * 16), b"a" * 16, locks_of(9))
    blocks = LockBlockReader(older + encoded)
    block = blocks.block_ending_at(LogEnd(6, b"c" * 16), 1)
    assert block == LockBlock(5, LogEnd(6, b"c" * 16), b"b" * 16, encoded[:8], b"\1\0")
    assert blocks.block_ending_at(block.end_before, 1).distances == b""


def test_blocks_are_read_backwards_to_the_first():
    data = block(0, 0, 7) + block(1, 3, 1, 2, 3) + block(4, 4)
    assert trusted_blocks(data, end(4)) == [
        (4, 4, b""),
        (1, 3, locks_of(1, 2, 3)),
        (0, 0, locks_of(7)),
    ]


def test_lost_and_repeated_blocks_are_skipped():
    lost = block(1, 2, 9, history=1, before=end(0))
    data = block(0, 0, 7) + lost + block(1, 1, 8) + block(1, 1, 8) + block(2, 2) + lost
    assert trusted_blocks(data, end(2)) == [(2, 2, b""), (1, 1, locks_of(8)), (0, 0, locks_of(7))]


def test_blocks_of_another_history_are_not_trusted():
    data = block(0, 0, 7) + block(1, 1, 8, history=1)
    assert trusted_blocks(data, end(1)) == []


def test_blocks_below_a_gap_are_not_trusted():
    data = block(0, 0, 7) + block(2, 2, 9)
    assert trusted_blocks(data, end(2)) == [(2, 2, locks_of(9))]
    blocks = LockBlockReader(data)
    blocks.block_ending_at(end(2), 9)
    assert not blocks.is_exhausted
    assert blocks.block_ending_at(end(1), 9) is None
    assert blocks.is_exhausted


def test_a_search_for_lock_blocks_may_stop_and_continue_later():
    data = block(0, 0, 7) + b"".join(block(number, number) for number in range(1, 10))
    blocks = LockBlockReader(data)
    assert blocks.block_ending_at(end(0), 9) is None
    assert not blocks.is_exhausted
    assert blocks.block_ending_at(end(0), 9).first == 0


def test_no_lock_block_is_encoded_for_too_many_locks():
    assert encode(0, end(0), bytes(16), bytes(LOCKS_BYTES_MAX))
    assert encode(0, end(0), bytes(16), bytes(LOCKS_BYTES_MAX + 4)) == b""


@pytest.mark.parametrize("count", [0, 1, 59, 60, 61, 200])
def test_invalid_bytes_end_the_search_for_lock_blocks(count):
    data = block(0, 0, 7) + bytes(count) + block(1, 1, 8)
    expected = [(1, 1, locks_of(8))] + [(0, 0, locks_of(7))] * (count == 0)
    assert trusted_blocks(data, end(1)) == expected


@pytest.mark.parametrize(("mark", "first", "last"), [(b"WLB3", 1, 1), (b"WLB1", 2, 1)])
def test_a_valid_crc_without_a_valid_block_ends_the_search(mark, first, last):
    fields = (first, last, end(0).chain, end(last).chain, 0)
    body = mark + struct.pack(">qq16s16si", *fields)
    block_bytes = body + crc32(body).to_bytes(4, "big")
    assert len(block_bytes) == TRAILER_BYTES
    assert trusted_blocks(block(0, 0, 7) + block_bytes, end(last)) == []


@given(data=st.binary(max_size=300), last=st.integers(-1, 5))
def test_random_bytes_are_not_trusted(data, last):
    assert trusted_blocks(data, end(last)) == []


@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=6),
    damage=st.data(),
)
def test_a_damaged_block_ends_the_search_after_correct_blocks(sizes, damage):
    parts, first = [], 0
    for size in sizes:
        parts.append(
            (first, first + size - 1, block(first, first + size - 1, *range(first, first + size)))
        )
        first += size
    data = bytearray(b"".join(each for _, _, each in parts))
    position = damage.draw(st.integers(0, len(data) - 1))
    damage_kind = damage.draw(st.sampled_from(("flip", "cut", "drop")))
    if damage_kind == "flip":
        data[position] ^= damage.draw(st.integers(1, 255))
    elif damage_kind == "cut":
        del data[position:]
    else:
        del data[position : position + damage.draw(st.integers(1, 80))]
    blocks = trusted_blocks(bytes(data), end(first - 1))
    intact_blocks = [
        (low, high, locks_of(*range(low, high + 1))) for low, high, _ in reversed(parts)
    ]
    assert blocks == intact_blocks[: len(blocks)]
    assert len(blocks) < len(intact_blocks)
