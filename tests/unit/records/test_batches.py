"""Tests of `waltz_core.records.batches`."""

import struct
from collections.abc import Callable
from datetime import UTC, datetime
from functools import reduce
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.call_counting import record_calls
from waltz_core.errors import BadRequest, TooLarge
from waltz_core.records import batches, checksum, raw_records
from waltz_core.records.checksum import crc32
from waltz_core.records.record import (
    RECORD_PREFIX,
    TRANSACTION_BYTES_MAX,
    ClientId,
    Generation,
    PartitionId,
    ReqId,
    TransactionId,
)

REQ_ID = ReqId(ClientId(5), Generation(2), PartitionId(1), 100)
LOCKS = pa.list_(pa.int32())
ints = st.integers(-(2**31), 2**31 - 1)
locks = st.lists(ints, max_size=3)
rows_strategy = st.lists(
    st.tuples(ints, st.binary(max_size=50), locks, locks, locks, st.integers(-1, 2**62)),
    min_size=1,
    max_size=8,
)
Row = tuple[int, bytes, list[int], list[int], list[int], int]


def encode(rows: list[Row], *, with_marks: bool = False) -> bytes:
    headers, data, write, read, append, marks = zip(*rows, strict=True)
    return batches.encode_append(
        headers,
        data,
        write_locks=write,
        read_locks=read,
        append_locks=append,
        marks=marks if with_marks else None,
    )


def encode_data(data: list[bytes]) -> bytes:
    return encode([(i, row, [i], [], [], 0) for i, row in enumerate(data)])


def decode(payload: bytes, *, rows_max: int = 20_000) -> batches.AppendRows:
    return batches.decode_append(payload, rows_max=rows_max, bytes_max=1 << 24)


def stream(
    schema: pa.Schema, *columns: object, options: object = None, batch_count: int = 1
) -> bytes:
    """Write a valid or invalid Arrow stream in which each batch has the same rows."""
    sink = pa.BufferOutputStream()
    arrays = [pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)]
    with pa.ipc.new_stream(sink, schema, options=options) as writer:
        for _ in range(batch_count):
            writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
    return bytes(sink.getvalue().to_pybytes())


def lists_of(column: batches.LockColumn) -> list[list[int]]:
    bounds = column.offsets.tolist()
    return [column.values[a:b].tolist() for a, b in pairwise(bounds)]


def expected_record(transaction_id: int, row_number: int, header: int, data: bytes) -> bytes:
    identity = REQ_ID._replace(sequence=REQ_ID.sequence + row_number).to_bytes()
    body = RECORD_PREFIX.pack(transaction_id, identity, header, len(data), 0)[:32]
    body += crc32(data).to_bytes(4, "big") + data
    return body + crc32(body).to_bytes(4, "big")


# ---------------------------------------------------------------------------------------------
# append batches


@given(rows=rows_strategy, with_marks=st.booleans())
def test_an_append_batch_round_trips(*, rows: list[Row], with_marks: bool) -> None:
    decoded = decode(encode(rows, with_marks=with_marks))
    headers, data, write, read, append, marks = (list(c) for c in zip(*rows, strict=True))
    assert decoded.count == len(rows)
    assert decoded.headers.tolist() == headers
    assert decoded.data.to_pylist() == data
    assert decoded.lengths.tolist() == [len(d) for d in data]
    assert decoded.crcs.tolist() == [crc32(d) for d in data]
    assert lists_of(decoded.write_locks) == write
    assert lists_of(decoded.read_locks) == read
    assert lists_of(decoded.append_locks) == append
    assert (decoded.marks.tolist() == marks) if decoded.marks is not None else not with_marks


def test_columns_from_arrow_may_be_absent_null_sliced_or_wider() -> None:
    data = pa.array([b"drop", b"a", b"bb"], pa.large_binary()).slice(1)
    write = pa.array([[9], None, [1, 2]], pa.list_(pa.int64())).slice(1)
    payload = batches.encode_append_arrow(
        pa.RecordBatch.from_pydict({"write_locks": write, "data": data})
    )
    decoded = decode(payload)
    assert decoded.data.to_pylist() == [b"a", b"bb"]
    assert decoded.headers.tolist() == [0, 0]
    assert lists_of(decoded.write_locks) == [[], [1, 2]]
    assert lists_of(decoded.read_locks) == [[], []]
    assert decoded.marks is None


def test_an_encoded_batch_is_a_read_only_buffer() -> None:
    payload = batches.encode_append_arrow(pa.RecordBatch.from_pydict({"data": [b"a", b"bb"]}))
    assert payload == bytes(payload)
    assert payload.readonly
    assert payload.tolist() == list(bytes(payload))


def test_the_encoding_of_a_batch_does_not_depend_on_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = pa.RecordBatch.from_pydict({"data": [b"a", b"bb"]})
    usual = batches.encode_append_arrow(rows)
    monkeypatch.setenv("ARROW_PRE_0_15_IPC_FORMAT", "1")
    assert bytes(batches.encode_append_arrow(rows)) == bytes(usual)


def test_precomputed_checksums_are_sent_unchanged() -> None:
    """The server detects rows that have changed since the checksum was computed."""
    data = pa.array([b"a", b"b" * 5_000])
    rows = pa.RecordBatch.from_pydict({"data": data, "crc": batches.data_crcs(data)})
    assert decode(batches.encode_append_arrow(rows)).data.to_pylist() == data.to_pylist()
    changed = rows.set_column(0, "data", pa.array([b"a", b"c" * 5_000]))
    with pytest.raises(BadRequest, match="CRC"):
        decode(batches.encode_append_arrow(changed))


def test_strings_are_encoded_as_payloads() -> None:
    payload = batches.encode_append_arrow(pa.RecordBatch.from_pydict({"data": pa.array(["é"])}))
    assert decode(payload).data.to_pylist() == ["é".encode()]


def test_a_null_lock_list_has_no_locks_although_arrow_stores_values_under_it() -> None:
    """Arrow allows values under a null slot; they must not be added to the next row."""
    offsets = pa.array([0, 2, 3], pa.int32())
    spanning = pa.ListArray.from_arrays(
        offsets, pa.array([7, 8, 9], pa.int32()), mask=pa.array([True, False])
    )
    payload = batches.encode_append_arrow(
        pa.RecordBatch.from_pydict({"data": pa.array([b"", b""]), "write_locks": spanning})
    )
    assert lists_of(decode(payload).write_locks) == [[], [9]]


@given(st.lists(st.sampled_from([b"", b"short", b"x" * 900, b"y" * 5_000]), max_size=8), st.data())
def test_each_row_of_a_slice_has_the_crc_of_its_bytes(
    rows: list[bytes], data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(rows)))
    column = pa.array(rows, pa.binary()).slice(start, data.draw(st.integers(0, len(rows))))
    assert batches.data_crcs(column).tolist() == [crc32(row) for row in column.to_pylist()]


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"header": [1]}, "expected a column 'data'"),
        ({"data": [b""], "crc": ["x"]}, "column crc: expected uint32, found string"),
        ({"data": [b""], "color": [1]}, "found .*color"),
        ({"data": [None, b""]}, "column data: expected no nulls, found 1"),
        ({"data": [b""], "header": [None]}, "column header"),
        ({"data": [b""], "header": ["seven"]}, "column header: expected int32, found string"),
        ({"data": [b""], "header": [2**40]}, "column header: expected int32, found int64"),
        ({"data": [b""], "write_locks": [["a"]]}, "column write_locks"),
        ({"data": [b""], "write_locks": [[None]]}, "column write_locks"),
        ({"data": [b""], "write_locks": [3]}, "column write_locks"),
        ({"data": [1.5]}, "column data: expected binary, found double"),
    ],
)
def test_invalid_columns_are_rejected_before_they_are_sent(
    columns: dict[str, list[object]], problem: str
) -> None:
    rows = pa.RecordBatch.from_pydict({name: pa.array(c) for name, c in columns.items()})
    with pytest.raises(BadRequest, match=problem):
        batches.encode_append_arrow(rows)


def test_a_duplicate_column_is_rejected() -> None:
    columns = [pa.array([b"one"]), pa.array([b"other"])]
    rows = pa.RecordBatch.from_arrays(columns, names=["data", "data"])
    with pytest.raises(BadRequest, match="each once; found"):
        batches.encode_append_arrow(rows)


def test_invalid_lists_are_rejected_before_they_are_sent() -> None:
    none: list[list[int]] = [[]]
    with pytest.raises(BadRequest, match="column header"):
        batches.encode_append([2**31], [b""], write_locks=none, read_locks=none, append_locks=none)
    with pytest.raises(BadRequest, match="equal numbers of rows"):
        batches.encode_append([1, 2], [b""], write_locks=none, read_locks=none, append_locks=none)


def test_a_row_over_the_limit_is_rejected_before_it_is_sent() -> None:
    with pytest.raises(TooLarge, match=f"found {TRANSACTION_BYTES_MAX + 1} bytes in row 1"):
        encode_data([b"", bytes(TRANSACTION_BYTES_MAX + 1)])
    encode_data([bytes(TRANSACTION_BYTES_MAX)])


@pytest.mark.parametrize("cuts", [[0, 4], [0, 1, 4], [0, 1, 2, 3, 4]])
def test_encoding_a_batch_in_parts_gives_equal_records(cuts: list[int]) -> None:
    locks = [[1, 2], [], [3], [4, 5, 6]]
    data = [b"a", b"", b"ccc", b"dd"]
    whole = decode(
        encode([(n, data[n], locks[n], locks[n - 1], locks[n - 2], n) for n in range(4)])
    )
    records = b""
    for start, stop in pairwise(cuts):
        part = whole.slice(start, stop)
        assert part.count == stop - start
        assert lists_of(part.write_locks) == locks[start:stop]
        assert lists_of(part.read_locks) == lists_of(whole.read_locks)[start:stop]
        assert lists_of(part.append_locks) == lists_of(whole.append_locks)[start:stop]
        first, req_id = TransactionId(4 + start), REQ_ID._replace(sequence=REQ_ID.sequence + start)
        records += bytes(batches.encode_records(part, None, first, req_id).records)
    assert records == bytes(batches.encode_records(whole, None, TransactionId(4), REQ_ID).records)
    with pytest.raises(AssertionError):
        whole.slice(3, 5)


def test_a_batch_over_its_limits_is_rejected() -> None:
    payload = encode_data([b"a", b"b", b"c"])
    assert decode(payload, rows_max=3).count == 3
    with pytest.raises(TooLarge, match="at most 2 rows, found 3"):
        decode(payload, rows_max=2)
    with pytest.raises(TooLarge, match="bytes"):
        batches.decode_append(payload, rows_max=3, bytes_max=len(payload) - 1)


GOOD = ([1, 2], [b"x" * 500, b"y"], [crc32(b"x" * 500), crc32(b"y")], [[1], []], [[], []], [[], []])


def test_a_valid_stream_is_decoded() -> None:
    assert decode(stream(batches.APPEND_SCHEMA, *GOOD)).count == 2


@pytest.mark.parametrize(
    ("column_index", "column", "problem"),
    [
        (0, [1, None], "column header: expected no nulls, found 1"),
        (1, [b"x", None], "column data: expected no nulls, found 1"),
        (2, [1, None], "column crc: expected no nulls, found 1"),
        (2, [1, 2], "data of row 0: expected CRC 00000001"),
        (2, [crc32(b"x" * 500), 2], "data of row 1: expected CRC 00000002"),
        (3, [[1], [None]], "nulls, found a null"),
    ],
)
def test_invalid_contents_are_rejected(
    column_index: int, column: list[object], problem: str
) -> None:
    columns = [*GOOD[:column_index], column, *GOOD[column_index + 1 :]]
    with pytest.raises(BadRequest, match=problem):
        decode(stream(batches.APPEND_SCHEMA, *columns))


@pytest.mark.parametrize(
    ("offsets", "wrong"),
    [
        ((0, 500, 501), (0, 502, 501)),  # data: a row that ends before it begins
        ((0, 500, 501), (0, 500, 5_000_000)),  # beyond the end of the data
        ((0, 500, 501), (-1, 500, 501)),
        ((0, 1, 1), (0, 1, 1_000_000)),  # write locks
        ((0, 1, 1), (0, 1, -1)),
        ((0, 1, 1), (0, 2, 1)),
    ],
)
def test_offsets_out_of_bounds_are_rejected(
    offsets: tuple[int, ...], wrong: tuple[int, ...]
) -> None:
    """The sender chooses the offsets; they must not lead to reads outside of the buffer."""
    payload = stream(batches.APPEND_SCHEMA, *GOOD)
    right = struct.pack("<3i", *offsets)
    assert payload.count(right) == 1
    with pytest.raises(BadRequest, match="expected columns that match each other"):
        decode(payload.replace(right, struct.pack("<3i", *wrong)))


def crc_of_rows(crcs: checksum.U32, lengths: checksum.I64) -> int:
    """Return the CRC of all rows in sequence, from the CRC of each row."""
    both = zip(crcs.tolist(), lengths.tolist(), strict=True)
    return reduce(lambda run, row: checksum.combine(run, *row), both, 0)


def test_wrong_crcs_that_cancel_out_are_rejected() -> None:
    """CRC-32 is linear, so two wrong CRCs can cancel out over the whole batch."""
    data = [b"first", b"second", b"third"]
    crcs = np.array([crc32(row) for row in data], dtype=np.uint32)
    lengths = np.array([len(row) for row in data])
    right = crc_of_rows(crcs, lengths)
    crcs[0] ^= 1
    crcs[1] ^= checksum.shift_many(np.array([1], dtype=np.uint32), len(data[1]))[0]
    assert crc_of_rows(crcs, lengths) == right
    none: list[list[int]] = [[], [], []]
    with pytest.raises(BadRequest, match="data of row 0"):
        decode(stream(batches.APPEND_SCHEMA, [0, 0, 0], data, crcs, none, none, none))


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_compressed_buffers_are_rejected_before_they_expand(codec: str) -> None:
    bomb = [b"\0" * 4_000_000]
    payload = stream(
        batches.APPEND_SCHEMA,
        [1], bomb, [crc32(bomb[0])], [[]], [[]], [[]],
        options=pa.ipc.IpcWriteOptions(compression=codec),
    )  # fmt: skip
    assert len(payload) < 100_000
    before = pa.default_memory_pool().bytes_allocated()
    with pytest.raises(BadRequest, match="compressed"):
        decode(payload)
    assert pa.default_memory_pool().bytes_allocated() == before


UNKNOWN_COLUMN = pa.schema([("x", pa.int64())])
REVERSED = pa.schema(list(batches.APPEND_SCHEMA)[::-1])
DICTIONARY_ENCODED = batches.APPEND_SCHEMA.set(
    1, pa.field("data", pa.dictionary(pa.int8(), pa.binary()))
)
THOUSAND_COLUMNS = pa.schema([(f"column-{i}", pa.int32()) for i in range(1000)])


@pytest.mark.parametrize(
    ("payload", "problem"),
    [
        (stream(batches.APPEND_SCHEMA, [], [], [], [], [], []), "at least one row"),
        (stream(batches.APPEND_SCHEMA_WITH_MARKS, *GOOD, [5, -2]), "found -2"),
        (stream(UNKNOWN_COLUMN, [1]), "expected the columns header int32, .*, found x int64"),
        (stream(REVERSED, *GOOD[::-1]), "expected the columns header int32, data"),
        (stream(DICTIONARY_ENCODED, *GOOD), "dictionary"),
        (stream(THOUSAND_COLUMNS, *[[1]] * 1000), "bytes of metadata"),
        (
            stream(batches.APPEND_SCHEMA, *GOOD, batch_count=2),
            "found schema, record batch, record batch",
        ),
        (b"", "append batch"),
        (b"\0", "append batch"),
        (b"\xff" * 8, "append batch"),
        (b"\xff\xff\xff\xff\0\0\0\0", "append batch"),
        (b"ARROW1", "append batch"),
    ],
)
def test_arrow_streams_that_are_not_one_append_batch_are_rejected(
    payload: bytes, problem: str
) -> None:
    with pytest.raises(BadRequest, match=problem):
        decode(payload)


def test_every_truncation_is_rejected() -> None:
    payload = encode_data([b"abc", b"d"])
    end = len(payload) - 8  # The end marker of the stream may be missing.
    for length in range(end):
        with pytest.raises(BadRequest):
            decode(payload[:length])
    assert decode(payload[:end]).count == 2


# ---------------------------------------------------------------------------------------------
# records


@given(rows_strategy, st.data())
def test_encoded_records_have_the_bytes_of_a_segment_file(
    rows: list[Row], data: st.DataObject
) -> None:
    keep = np.array(data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))))
    if not keep.any():
        keep[0] = True
    decoded = decode(encode(rows))
    encoded = batches.encode_records(decoded, keep, TransactionId(10), REQ_ID)
    if keep.all():
        assert batches.encode_records(decoded, None, TransactionId(10), REQ_ID) == encoded
    kept = [(number, row) for number, row in enumerate(rows) if keep[number]]
    expected = [
        expected_record(10 + column_index, number, row[0], row[1])
        for column_index, (number, row) in enumerate(kept)
    ]
    assert bytes(encoded.records) == b"".join(expected)
    assert (encoded.first, encoded.last) == (10, 10 + len(kept) - 1)
    assert encoded.lengths == b"".join(len(r).to_bytes(4, "big") for r in expected)
    assert encoded.record_crcs == b"".join(r[-4:] for r in expected)
    assert encoded.records_crc == crc32(b"".join(expected))
    lengths = raw_records.lengths_from_wire(encoded.lengths, len(encoded.records))
    assert raw_records.first_bad_record(encoded.records, lengths) is None


@given(rows_strategy, st.data())
def test_select_records_returns_the_chosen_records(rows: list[Row], data: st.DataObject) -> None:
    keep = np.array(data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))))
    encoded = batches.encode_records(decode(encode(rows)), None, TransactionId(0), REQ_ID)
    lengths = raw_records.lengths_from_wire(encoded.lengths, len(encoded.records))
    chosen, chosen_lengths = batches.select_records(encoded.records, lengths, keep)
    numbers = np.flatnonzero(keep).tolist()
    expected = [expected_record(n, n, rows[n][0], rows[n][1]) for n in numbers]
    assert bytes(chosen) == b"".join(expected)
    assert chosen_lengths.tolist() == [len(r) for r in expected]


# ---------------------------------------------------------------------------------------------
# reading


def run_of(data: list[bytes], first: int = 10) -> tuple[memoryview, raw_records.I64]:
    headers = pa.array(range(len(data)), pa.int32())
    rows = pa.RecordBatch.from_pydict({"data": pa.array(data), "header": headers})
    payload = batches.encode_append_arrow(rows)
    encoded = batches.encode_records(decode(payload), None, TransactionId(first), REQ_ID)
    return encoded.records, raw_records.lengths_from_wire(encoded.lengths, len(encoded.records))


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=8))
def test_a_range_becomes_a_table_with_its_values(data: list[bytes]) -> None:
    records, lengths = run_of(data)
    stamps = [(0, 10, 1_700_000_000_123), (11, 12, 0), (13, 40, 1_700_000_000_456)]
    batch = batches.range_to_arrow(
        records, lengths, stamps, batches.READ_SCHEMA.names, partition_id=PartitionId(1)
    )
    table = pa.Table.from_batches(batch, schema=batches.READ_SCHEMA)
    table.validate(full=True)
    of_headers = batches.headers_to_arrow(
        raw_records.headers_of(records, lengths),
        stamps,
        table.drop_columns("data").column_names,
        partition_id=PartitionId(1),
    )
    assert pa.Table.from_batches(of_headers) == table.drop_columns("data")
    for number, row in enumerate(table.to_pylist()):
        stamp = {0: 123, 1: None, 2: None}.get(number, 456)
        time = stamp and datetime(2023, 11, 14, 22, 13, 20, 1000 * stamp, tzinfo=UTC)
        identity = {"client_id": 5, "generation": 2, "partition": 1, "sequence": 100 + number}
        assert row == {
            "partition": 1,
            "transaction_id": 10 + number,
            "header": number,
            "request_id": identity,
            "commit_time": time,
            "data": data[number],
        }


@given(st.permutations(batches.READ_SCHEMA.names), st.integers(0, 6))
def test_a_table_has_the_requested_columns_in_the_requested_order(
    names: list[str], count: int
) -> None:
    records, lengths = run_of([b"a", b"b"])
    requested_names = names[:count]
    (batch,) = batches.range_to_arrow(
        records, lengths, [], requested_names, partition_id=PartitionId(1)
    )
    assert batch.schema.names == requested_names
    assert batch.num_rows == (2 if requested_names else batch.num_rows)


def test_a_long_range_is_sent_in_several_batches() -> None:
    data = [b"%d" % n for n in range(2 * batches.ARROW_ROWS_MAX + 5)]
    records, lengths = run_of(data)
    sent = batches.range_to_arrow(records, lengths, [], ["data"], partition_id=PartitionId(0))
    assert [b.num_rows for b in sent] == [8192, 8192, 5]
    assert pa.Table.from_batches(sent)["data"].to_pylist() == data
    heads = raw_records.headers_of(records, lengths)
    headers = batches.headers_to_arrow(heads, [], ["transaction_id"], partition_id=PartitionId(0))
    assert [b.num_rows for b in headers] == [8192, 8192, 5]


def test_a_wide_range_is_sent_in_several_batches() -> None:
    data = [bytes(3_000_000)] * 3 + [b"", b""]
    records, lengths = run_of(data)
    sent = batches.range_to_arrow(records, lengths, [], ["data"], partition_id=PartitionId(0))
    assert [b.num_rows for b in sent] == [2, 3]
    assert pa.Table.from_batches(sent)["data"].to_pylist() == data


def test_an_empty_range_becomes_no_batch() -> None:
    none = np.zeros(0, dtype=np.int64)
    assert batches.range_to_arrow(b"", none, [], ["data"], partition_id=PartitionId(0)) == []
    assert batches.headers_to_arrow(b"", [], ["header"], partition_id=PartitionId(0)) == []


def test_torn_headers_are_rejected() -> None:
    with pytest.raises(BadRequest, match="28 bytes each, found 29"):
        batches.headers_to_arrow(bytes(29), [], ["header"], partition_id=PartitionId(0))


@given(st.integers(-(2**63), 2**63 - 1))
@settings(max_examples=30)
def test_any_commit_stamp_becomes_a_time_or_null(stamp_ms: int) -> None:
    records, lengths = run_of([b"a"])
    (batch,) = batches.range_to_arrow(
        records, lengths, [(0, 99, stamp_ms)], ["commit_time"], partition_id=PartitionId(0)
    )
    assert (batch["commit_time"].null_count == 1) == (stamp_ms <= 0)


# ---------------------------------------------------------------------------------------------
# no Python per row


def count_calls(work: Callable[[], object]) -> int:
    with record_calls() as calls:
        work()
    return len(calls)


def test_the_number_of_calls_does_not_depend_on_the_number_of_rows() -> None:
    counts = []
    for row_count in (100, 3_000):
        payload = encode_data([b"%d" % n * (1 + n % 7) for n in range(row_count)])
        keep = np.arange(row_count) % 3 != 0
        first = TransactionId(65_000)

        def process_batch(
            payload: bytes = payload, keep: batches.Mask = keep, first: TransactionId = first
        ) -> None:
            rows = decode(payload)
            encoded = batches.encode_records(rows, keep, first, REQ_ID)
            lengths = raw_records.lengths_from_wire(encoded.lengths, len(encoded.records))
            assert raw_records.first_bad_record(encoded.records, lengths) is None
            raw_records.headers_of(encoded.records, lengths)
            names = batches.READ_SCHEMA.names
            batches.range_to_arrow(encoded.records, lengths, [], names, partition_id=PartitionId(0))

        process_batch()
        counts.append(count_calls(process_batch))
    assert counts[1] <= 1.3 * counts[0]
