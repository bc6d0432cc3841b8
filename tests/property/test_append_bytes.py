"""The append decoder returns rows or a typed error for any bytes, in bounded memory."""

from contextlib import suppress

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from waltz_core.errors import BadRequest, TooLarge
from waltz_core.records import batches
from waltz_core.records.checksum import crc32
from waltz_core.records.record import ClientId, Generation, PartitionId, ReqId, TransactionId

REQ_ID = ReqId(ClientId(1), Generation(1), PartitionId(0), 1)


def a_payload() -> bytes:
    return batches.encode_append(
        [1, 2, 3],
        [b"first row", b"", b"third"],
        write_locks=[[1], [], [2, 3]],
        read_locks=[[], [4], []],
        append_locks=[[5], [6], []],
        marks=[0, 7, -1],
    )


PAYLOAD = a_payload()
# Where numbers are counts, lengths and offsets, these values do most harm.
numbers = st.sampled_from([0, 1, 2**31 - 1, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**64 - 1])
damages = st.lists(
    st.one_of(
        st.tuples(st.just("bit"), st.integers(0, len(PAYLOAD) - 1), st.integers(0, 7)),
        st.tuples(st.just("word"), st.integers(0, len(PAYLOAD) // 8 - 1), numbers),
        st.tuples(st.just("cut"), st.integers(0, len(PAYLOAD)), st.just(0)),
    ),
    min_size=1,
    max_size=4,
)


def decoded(payload: bytes) -> batches.AppendRows | None:
    """Return the rows, or None when the bytes were refused in the way they may be."""
    with suppress(BadRequest, TooLarge):
        return batches.decode_append(payload, rows_max=100, bytes_max=1 << 16)
    return None


def check(payload: bytes) -> None:
    before = pa.default_memory_pool().bytes_allocated()
    rows = decoded(payload)
    assert pa.default_memory_pool().bytes_allocated() - before <= 1 << 16
    if rows is None:
        return
    # What is let through is whole: every row's data fits its CRC and makes a record.
    assert rows.crcs.tolist() == [crc32(row) for row in rows.data.to_pylist()]
    for column in (rows.write_locks, rows.read_locks, rows.append_locks):
        assert column.offsets.size == rows.count + 1
        assert column.offsets[-1] == column.values.size
        assert np.all(column.counts >= 0)
    made = batches.encode_records(rows, None, TransactionId(0), REQ_ID)
    assert crc32(made.records) == made.records_crc


@given(st.binary(max_size=400))
def test_any_bytes(payload: bytes) -> None:
    check(payload)


@settings(max_examples=500)
@given(damages)
def test_a_damaged_payload(course: list[tuple[str, int, int]]) -> None:
    payload = bytearray(PAYLOAD)
    for kind, position, value in course:
        if kind == "bit" and position < len(payload):
            payload[position] ^= 1 << value
        elif kind == "word" and 8 * position + 8 <= len(payload):
            payload[8 * position : 8 * position + 8] = value.to_bytes(8, "little")
        elif kind == "cut":
            del payload[position:]
    check(bytes(payload))


def test_the_payload_undamaged() -> None:
    assert batches.decode_append(PAYLOAD, rows_max=3, bytes_max=1 << 16).count == 3
