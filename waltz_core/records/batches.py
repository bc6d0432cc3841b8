"""Arrow batches: encodes and decodes append batches, and converts between batches and records.

Rows stay in batches from the DataFrame to the disk and back. The conversions run in C++ and NumPy,
without Python code per row.

Rules:
    1. Invalid bytes from outside raise only BadRequest or TooLarge. Before any allocation that is
       larger than the bytes, this module checks the bytes. They must have the exact schema, without
       compression and dictionaries. Every offset and every data CRC is validated.
    2. The sender computes the CRC of a row's data. This module verifies the CRC and copies the CRC
       into the record. So one checksum protects the data from the DataFrame to the reader.
    3. Row i of a request has sequence number `first + i`, even if other rows are rejected.
    4. `encode_records` returns exactly the bytes of a segment file.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from waltz_core.errors import BadRequest, TooLarge
from waltz_core.records import arrow_buffers, checksum, raw_records
from waltz_core.records.raw_records import I32, I64, U32, Buffer
from waltz_core.records.record import (
    BEFORE_FIRST,
    RECORD_OVERHEAD_BYTES,
    TRANSACTION_BYTES_MAX,
    PartitionId,
    ReqId,
    TransactionId,
)

Mask = npt.NDArray[np.bool_]

_LOCKS = pa.list_(pa.int32())
MARK_FIELD: Final = pa.field("client_high_water_mark", pa.int64())
APPEND_SCHEMA: Final = pa.schema(
    [
        pa.field("header", pa.int32()),
        pa.field("data", pa.binary()),
        pa.field("crc", pa.uint32()),
        pa.field("write_locks", _LOCKS),
        pa.field("read_locks", _LOCKS),
        pa.field("append_locks", _LOCKS),
    ]
)
APPEND_SCHEMA_WITH_MARKS: Final = APPEND_SCHEMA.append(MARK_FIELD)
_TYPE_BY_COLUMN: Final = {field.name: field.type for field in APPEND_SCHEMA_WITH_MARKS}
LOCK_COLUMNS: Final = ("write_locks", "read_locks", "append_locks")

# An append batch has about 700 bytes of Arrow metadata.
_METADATA_BYTES_MAX: Final = 16 * 1024
_STREAM_END_BYTES: Final = 8  # a continuation marker and a length of 0
# From this average size of rows on, CRCs are computed over views of the rows, because copies would
# cost more.
_VIEWED_ROW_BYTES_MIN: Final = 1024
# The exceptions of pyarrow for unreadable bytes. Not all of them are subclasses of ArrowException.
_UNREADABLE_ERRORS: Final = (
    pa.ArrowException,
    OSError,
    EOFError,
    ValueError,
    TypeError,
    OverflowError,
)


class LockColumn(NamedTuple):
    """The locks of all rows. Row i has the locks `values[offsets[i]:offsets[i + 1]]`."""

    offsets: I64
    values: I32

    @property
    def counts(self) -> I64:
        """The number of locks of each row."""
        return raw_records.lengths_between(self.offsets)

    def slice(self, start: int, stop: int) -> "LockColumn":
        """Return the locks of rows start..stop - 1, without copying the values."""
        offsets = self.offsets[start : stop + 1]
        return LockColumn(offsets - offsets[0], self.values[offsets[0] : offsets[-1]])


@dataclass(frozen=True, slots=True)
class AppendRows:
    """The checked rows of one append, as views of the frame, which they keep in memory.

    `data` is an Arrow binary array. `lengths` and `crcs` are the length in bytes and the CRC-32 of
    each row's data. `marks` has the client's high-water mark for each row. `marks` is None if the
    mark of the request applies to all rows.
    """

    headers: I32
    data: pa.BinaryArray
    lengths: I64
    crcs: U32
    write_locks: LockColumn
    read_locks: LockColumn
    append_locks: LockColumn
    marks: I64 | None

    @property
    def count(self) -> int:
        return int(self.headers.size)

    def slice(self, start: int, stop: int) -> "AppendRows":
        """Return rows start..stop - 1, as views of the same memory."""
        assert 0 <= start < stop <= self.count
        if stop - start == self.count:
            return self
        return AppendRows(
            headers=self.headers[start:stop],
            data=self.data.slice(start, stop - start),
            lengths=self.lengths[start:stop],
            crcs=self.crcs[start:stop],
            write_locks=self.write_locks.slice(start, stop),
            read_locks=self.read_locks.slice(start, stop),
            append_locks=self.append_locks.slice(start, stop),
            marks=None if self.marks is None else self.marks[start:stop],
        )


class EncodedBatch(NamedTuple):
    """The records first..last, with the same bytes as on every disk.

    `lengths` (big-endian int32) and `record_crcs` (big-endian uint32) have one number per record.
    `records_crc` is the CRC-32 of all bytes in `records`. The fields correspond to those of
    `Batch` in `replication/session_events.py`.
    """

    first: TransactionId
    last: TransactionId
    lengths: bytes
    records: memoryview
    record_crcs: bytes
    records_crc: int


# ---------------------------------------------------------------------------------------------
# append batches: the client's side


def encode_append(
    headers: Sequence[int],
    data: Sequence[bytes],
    *,
    write_locks: Sequence[Sequence[int]],
    read_locks: Sequence[Sequence[int]],
    append_locks: Sequence[Sequence[int]],
    marks: Sequence[int] | None = None,
) -> bytes:
    """Encode an append batch as an Arrow IPC stream with one record batch; return its bytes.

    Raises:
        BadRequest: a value does not fit its column, or the columns differ in length.
        TooLarge: the data of a row exceeds `TRANSACTION_BYTES_MAX`.
    """
    columns: dict[str, Any] = {
        "header": headers,
        "data": data,
        "write_locks": write_locks,
        "read_locks": read_locks,
        "append_locks": append_locks,
    }
    if marks is not None:
        columns[MARK_FIELD.name] = marks
    arrays: dict[str, pa.Array] = {}
    for name, values in columns.items():
        try:
            arrays[name] = pa.array(values, _TYPE_BY_COLUMN[name])
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise BadRequest(f"append batch, column {name}: {error}") from error
    if len({len(array) for array in arrays.values()}) != 1:
        row_counts = {name: len(array) for name, array in arrays.items()}
        raise BadRequest(
            f"append batch: expected columns with equal numbers of rows, found {row_counts}"
        )
    return bytes(_encode_columns(arrays))


def encode_append_arrow(rows: pa.RecordBatch) -> memoryview:
    """Encode Arrow columns as the payload of an append batch.

    The columns have the names of `APPEND_SCHEMA_WITH_MARKS`. Only `data` is required. If `header`
    is absent, all headers are 0. Absent or null locks mean that a row has no locks. If
    `client_high_water_mark` is absent, the mark of the request applies to all rows. If `crc` is
    present, it must contain the result of `data_crcs`. Other columns are rejected.

    Raises:
        BadRequest: a column is missing, unknown or duplicate, or has a wrong type or nulls that its
            column does not permit.
        TooLarge: the data of a row exceeds `TRANSACTION_BYTES_MAX`.
    """
    names = rows.schema.names
    unknown_names = [name for name in names if name not in _TYPE_BY_COLUMN]
    if unknown_names or "data" not in names or len(set(names)) < len(names):
        raise BadRequest(
            "append batch: expected a column 'data', and optionally other columns of "
            f"{APPEND_SCHEMA_WITH_MARKS.names}, each once; found {names}"
        )
    return _encode_columns(dict(zip(names, rows.columns, strict=True)))


def _encode_columns(given_columns: dict[str, pa.Array]) -> memoryview:
    columns = {name: _cast_column(name, column) for name, column in given_columns.items()}
    data = columns["data"]
    lengths = raw_records.lengths_between(_offsets(data))
    too_long_rows = np.flatnonzero(lengths > TRANSACTION_BYTES_MAX)
    if too_long_rows.size:
        raise TooLarge(
            f"append batch: expected at most {TRANSACTION_BYTES_MAX} bytes of data in a row, "
            f"found {lengths[too_long_rows[0]]} bytes in row {too_long_rows[0]}"
        )
    if "header" not in columns:
        columns["header"] = pa.array(np.zeros(len(data), dtype=np.int32))
    for name in LOCK_COLUMNS:
        if name not in columns:
            columns[name] = pa.nulls(len(data), _LOCKS)
    if "crc" not in columns:
        columns["crc"] = data_crcs(data)
    schema = APPEND_SCHEMA_WITH_MARKS if MARK_FIELD.name in columns else APPEND_SCHEMA
    batch = pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)
    # Allocate exactly the needed size once, independent of Arrow's environment settings.
    size = schema.serialize().size + pa.ipc.get_record_batch_size(batch) + _STREAM_END_BYTES
    encoded = pa.allocate_buffer(size)
    with pa.FixedSizeBufferWriter(encoded) as sink:
        with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions()) as stream:
            stream.write_batch(batch)
        assert sink.tell() == size
    return memoryview(encoded).cast("B").toreadonly()  # The elements of Arrow's views are signed.


def data_crcs(data: pa.Array) -> pa.Array:
    """Return the CRC-32 of each row of a binary column; the column must not have nulls."""
    offsets = _offsets(data)
    parts: Sequence[Buffer]
    if offsets[-1] - offsets[0] < len(data) * _VIEWED_ROW_BYTES_MIN:
        parts = data.to_pylist()
    elif len(data):
        view = memoryview(data.buffers()[2])
        parts = [view[start:end] for start, end in pairwise(offsets.tolist())]
    else:
        parts = []
    return pa.array(checksum.crc32_of_each(parts))


def _cast_column(name: str, column: pa.Array) -> pa.Array:
    kind = _TYPE_BY_COLUMN[name]
    try:
        cast = column if column.type == kind else column.cast(kind)
    except pa.ArrowException as error:
        raise BadRequest(
            f"append batch, column {name}: expected {kind}, found {column.type} ({error})"
        ) from error
    if name in LOCK_COLUMNS:
        # `values` may contain elements outside of the lists. Its null count costs nothing, so it is
        # checked first.
        if cast.values.null_count and cast.flatten().null_count:
            raise BadRequest(
                f"append batch, column {name}: expected locks without nulls, found a null"
            )
    elif cast.null_count:
        raise BadRequest(
            f"append batch, column {name}: expected no nulls, found {cast.null_count} nulls"
        )
    return cast


# ---------------------------------------------------------------------------------------------
# append batches: the server's side


def decode_append(payload: Buffer, *, rows_max: int, bytes_max: int) -> AppendRows:
    """Check an append batch (rule 1) and return its rows, without copying their data.

    Raises:
        TooLarge: the payload exceeds `bytes_max`, or has more than `rows_max` rows.
        BadRequest: the payload is invalid for another reason.
    """
    if len(payload) > bytes_max:
        raise TooLarge(f"append batch: expected at most {bytes_max} bytes, found {len(payload)}")
    try:
        batch = _read_batch(payload)
    except _UNREADABLE_ERRORS as error:
        raise BadRequest(
            "append batch: expected an Arrow stream with one record batch, found other bytes "
            f"({_short_message(error)})"
        ) from error
    if batch.num_rows > rows_max:
        raise TooLarge(f"append batch: expected at most {rows_max} rows, found {batch.num_rows}")
    if batch.num_rows == 0:
        raise BadRequest("append batch: expected at least one row, found none")
    try:
        batch.validate(full=True)
    except _UNREADABLE_ERRORS as error:
        raise BadRequest(
            "append batch: expected columns that match each other, found an inconsistency "
            f"({_short_message(error)})"
        ) from error
    rows = _rows_of(batch)
    _verify_data(rows)
    return rows


def _short_message(error: BaseException) -> str:
    """Return the first line of pyarrow's error, shortened, because it may quote the whole input."""
    return str(error).partition("\n")[0][:300]


def _read_batch(payload: Buffer) -> pa.RecordBatch:
    messages = list(islice(pa.ipc.MessageReader.open_stream(pa.py_buffer(payload)), 3))
    if len(messages) != 2:
        found_text = ", ".join(message.type for message in messages) or "nothing"
        raise BadRequest(
            f"append batch: expected a schema and one record batch, found {found_text}"
        )
    head, body = messages
    for message, kind in ((head, "schema"), (body, "record batch")):
        if message.type != kind:
            raise BadRequest(
                f"append batch: expected an Arrow message of kind {kind}, found {message.type}"
            )
        if message.metadata.size > _METADATA_BYTES_MAX:
            raise BadRequest(
                f"append batch: expected at most {_METADATA_BYTES_MAX} bytes of metadata, "
                f"found {message.metadata.size}"
            )
    schema = pa.ipc.read_schema(head)
    if not (schema.equals(APPEND_SCHEMA) or schema.equals(APPEND_SCHEMA_WITH_MARKS)):
        expected = ", ".join(f"{field.name} {field.type}" for field in APPEND_SCHEMA)
        found_text = ", ".join(f"{field.name} {field.type}" for field in schema)[:500]
        raise BadRequest(f"append batch: expected the columns {expected}, found {found_text}")
    if _is_compressed(memoryview(body.metadata)):
        raise BadRequest("append batch: expected uncompressed buffers, found compressed ones")
    return pa.ipc.read_record_batch(body, schema)


def _is_compressed(metadata: memoryview) -> bool:
    """Whether the buffers of a record batch message are compressed, without expanding a buffer.

    pyarrow does not report compression, and would allocate the size that the compressed buffers
    claim. Therefore this function follows two flatbuffer tables: slot 2 of Message (`header`), and
    in that table slot 3 of RecordBatch (`compression`). Offsets that point outside of the metadata
    raise struct.error.
    """
    try:
        (root,) = struct.unpack_from("<I", metadata, 0)
        header = _flatbuffer_field(metadata, root, 2)
        if header is None:
            raise BadRequest(
                "append batch: expected a record batch message with a header, found one without"
            )
        (distance,) = struct.unpack_from("<I", metadata, header)
        return _flatbuffer_field(metadata, header + distance, 3) is not None
    except struct.error as error:
        raise BadRequest(
            f"append batch: the metadata of the record batch is damaged ({error})"
        ) from error


def _flatbuffer_field(metadata: memoryview, table: int, slot: int) -> int | None:
    """Return the position of a field in a flatbuffer table; None if the field is absent."""
    (to_vtable,) = struct.unpack_from("<i", metadata, table)
    vtable = table - to_vtable
    if vtable < 0:
        raise BadRequest(
            "append batch: the metadata of the record batch is damaged (the vtable of a table is "
            "before the start of the metadata)"
        )
    (vtable_bytes,) = struct.unpack_from("<H", metadata, vtable)
    if 4 + 2 * slot >= vtable_bytes:
        return None
    (offset,) = struct.unpack_from("<H", metadata, vtable + 4 + 2 * slot)
    return table + offset if offset else None


def _rows_of(batch: pa.RecordBatch) -> AppendRows:
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    for name, column in columns.items():
        if name not in LOCK_COLUMNS and column.null_count:
            raise BadRequest(
                f"append batch, column {name}: expected no nulls, found {column.null_count} nulls"
            )
    data = columns["data"]
    marks = _values(columns[MARK_FIELD.name], np.int64) if MARK_FIELD.name in columns else None
    if marks is not None and marks.min() < BEFORE_FIRST:
        raise BadRequest(
            f"append batch, column {MARK_FIELD.name}: expected marks of at least {BEFORE_FIRST}, "
            f"found {marks.min()}"
        )
    return AppendRows(
        headers=_values(columns["header"], np.int32),
        data=data,
        lengths=raw_records.lengths_between(_offsets(data)),
        crcs=_values(columns["crc"], np.uint32),
        write_locks=_lock_column("write_locks", columns["write_locks"]),
        read_locks=_lock_column("read_locks", columns["read_locks"]),
        append_locks=_lock_column("append_locks", columns["append_locks"]),
        marks=marks,
    )


def _values(column: pa.Array, kind: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return the values of a fixed-width column without nulls, as a view."""
    return _buffer_values(column, kind, len(column))


def _offsets(column: pa.Array) -> I64:
    """Return the offsets of a binary or list column; there is one more offset than rows."""
    return _buffer_values(column, np.int32, len(column) + 1).astype(np.int64)


def _buffer_values(column: pa.Array, kind: npt.DTypeLike, count: int) -> npt.NDArray[Any]:
    """Return `count` numbers of a column's second buffer, starting at the column's offset.

    The buffer may contain more numbers than the column needs.
    """
    if count == 0:
        return np.zeros(0, dtype=kind)
    start = column.offset * np.dtype(kind).itemsize
    return np.frombuffer(column.buffers()[1], dtype=kind, count=count, offset=start)


def _lock_column(name: str, column: pa.ListArray) -> LockColumn:
    values = column.values
    if column.null_count or values.null_count:
        # A null list may still refer to values. `flatten` omits these values, so the list counts as
        # empty.
        values = column.flatten()
        counts = pc.fill_null(pc.list_value_length(column), 0)
        offsets = raw_records.offsets_of(_values(counts, np.int32).astype(np.int64))
    else:
        offsets = _offsets(column)
    if values.null_count:
        raise BadRequest(f"append batch, column {name}: expected locks without nulls, found a null")
    assert offsets[-1] <= len(values)
    hashes = _values(values, np.int32)[offsets[0] : offsets[-1]]
    return LockColumn(offsets - offsets[0], hashes)


def _verify_data(rows: AppendRows) -> None:
    # The CRCs are checked row by row. One CRC over all rows, compared with the combination of the
    # rows' CRCs, would take a third of the time. But a client could choose wrong CRCs that combine
    # correctly, and the log would contain wrong records.
    wrong_rows = np.flatnonzero(checksum.crc32_of_each(rows.data.to_pylist()) != rows.crcs)
    if wrong_rows.size:
        raise BadRequest(
            f"append batch: data of row {wrong_rows[0]}: expected CRC "
            f"{rows.crcs[wrong_rows[0]]:08x}, found "
            f"{checksum.crc32(rows.data[int(wrong_rows[0])].as_py()):08x}"
        )


# ---------------------------------------------------------------------------------------------
# record bytes


def encode_records(
    rows: AppendRows, kept_rows: Mask | None, first: TransactionId, req_id: ReqId
) -> EncodedBatch:
    """Encode rows as records with IDs from `first` on.

    `kept_rows` is a mask of the rows to encode, at least one; None means all rows. `req_id` is the
    request ID of row 0. The caller has checked that the sequence number of the last row fits into
    31 bits.
    """
    assert req_id.sequence + rows.count - 1 <= 0x7FFFFFFF
    data, lengths, crcs, headers = rows.data, rows.lengths, rows.crcs, rows.headers
    row_numbers = np.arange(rows.count, dtype=np.int64)
    if kept_rows is not None and not kept_rows.all():
        data = data.filter(arrow_buffers.as_booleans(kept_rows))
        lengths, crcs, headers = lengths[kept_rows], crcs[kept_rows], headers[kept_rows]
        row_numbers = row_numbers[kept_rows]
    count = row_numbers.size
    assert count > 0
    prefixes = raw_records.encode_prefixes(
        np.arange(first, first + count, dtype=np.int64),
        req_id,
        row_numbers,
        headers,
        lengths=lengths,
        data_crcs=crcs,
    )
    record_crcs = checksum.combine_many(raw_records.prefix_crcs(prefixes), crcs, lengths)
    trailers = record_crcs.astype(">u4")
    joined = pc.binary_join_element_wise(
        arrow_buffers.fixed_width_binary(prefixes, prefixes.shape[1]),
        data,
        arrow_buffers.fixed_width_binary(trailers, 4),
        arrow_buffers.EMPTY_BINARY,
    )
    record_lengths = lengths + RECORD_OVERHEAD_BYTES
    records = memoryview(joined.buffers()[2])[: int(record_lengths.sum())]
    return EncodedBatch(
        first=first,
        last=TransactionId(first + count - 1),
        lengths=raw_records.lengths_to_wire(record_lengths),
        records=records,
        record_crcs=trailers.tobytes(),
        records_crc=raw_records.run_crc(record_crcs, record_lengths),
    )


def select_records(records: Buffer, lengths: I64, kept_rows: Mask) -> tuple[memoryview, I64]:
    """Copy the records of `kept_rows` into a new run; return the run and its lengths."""
    kept_lengths = lengths[kept_rows]
    if kept_lengths.size == 0:
        return memoryview(b""), kept_lengths
    chosen = arrow_buffers.as_binary(records, lengths).filter(arrow_buffers.as_booleans(kept_rows))
    return memoryview(chosen.buffers()[2])[: int(kept_lengths.sum())], kept_lengths


# ---------------------------------------------------------------------------------------------
# Conversion of records to DataFrames

READ_SCHEMA: Final = pa.schema(
    [
        pa.field("partition", pa.int32()),
        pa.field("transaction_id", pa.int64()),
        pa.field("header", pa.int32()),
        pa.field(
            "request_id",
            pa.struct(
                [
                    pa.field("client_id", pa.int32()),
                    pa.field("generation", pa.int32()),
                    pa.field("partition", pa.int32()),
                    pa.field("sequence", pa.int32()),
                ]
            ),
        ),
        pa.field("commit_time", pa.timestamp("us", tz="UTC")),
        pa.field("data", pa.binary()),
    ]
)
ARROW_ROWS_MAX: Final = 8192
ARROW_BYTES_MAX: Final = 8 * 1024 * 1024


def range_to_arrow(
    records: Buffer,
    lengths: I64,
    stamps: Sequence[tuple[int, int, int]],
    columns: Sequence[str],
    *,
    partition_id: PartitionId,
) -> list[pa.RecordBatch]:
    """Convert a run of records to Arrow batches with the given columns of `READ_SCHEMA`, in order.

    `stamps` is a list of (first ID, last ID, commit stamp in ms), in ID order. The commit time is
    null for an ID that has no stamp or whose stamp is 0. A batch has at most 8,192 rows and about 8
    MiB.
    """
    headers = np.frombuffer(raw_records.headers_of(records, lengths), raw_records.HEADER_DTYPE)
    arrays = _header_columns(headers, stamps, columns, partition_id)
    if "data" in columns:
        arrays["data"] = arrow_buffers.as_binary(records, lengths)
    ends = np.cumsum(lengths)
    batches = []
    start = 0
    while start < lengths.size:
        start_offset = int(ends[start - 1]) if start else 0
        bytes_stop = int(np.searchsorted(ends, start_offset + ARROW_BYTES_MAX, side="right"))
        stop = max(start + 1, min(start + ARROW_ROWS_MAX, bytes_stop))
        batches.append(_record_batch_slice(arrays, columns, start, stop))
        start = stop
    return batches


def headers_to_arrow(
    headers: Buffer,
    stamps: Sequence[tuple[int, int, int]],
    columns: Sequence[str],
    *,
    partition_id: PartitionId,
) -> list[pa.RecordBatch]:
    """Convert record headers of 28 bytes to Arrow batches; `columns` must not contain data.

    Raises:
        BadRequest: the number of bytes is not a multiple of 28.
    """
    assert "data" not in columns
    if len(headers) % raw_records.HEADER_DTYPE.itemsize:
        raise BadRequest(
            f"record headers: expected 28 bytes each, found {len(headers)} bytes in total"
        )
    header_array = np.frombuffer(headers, raw_records.HEADER_DTYPE)
    arrays = _header_columns(header_array, stamps, columns, partition_id)
    return [
        _record_batch_slice(arrays, columns, start, min(start + ARROW_ROWS_MAX, header_array.size))
        for start in range(0, header_array.size, ARROW_ROWS_MAX)
    ]


def _record_batch_slice(
    arrays: dict[str, pa.Array], columns: Sequence[str], start: int, stop: int
) -> pa.RecordBatch:
    slices = []
    for name in columns:
        array = arrays[name]
        if stop - start < len(array):
            array = array.slice(start, stop - start)
        # The data of a whole record is between its prefix and its CRC.
        if name == "data":
            array = pc.binary_slice(array, raw_records.PREFIX_DTYPE.itemsize, -4)
        slices.append(array)
    schema = pa.schema([READ_SCHEMA.field(name) for name in columns])
    return pa.RecordBatch.from_arrays(slices, schema=schema)


def _header_columns(
    headers: npt.NDArray[np.void],
    stamps: Sequence[tuple[int, int, int]],
    columns: Sequence[str],
    partition_id: PartitionId,
) -> dict[str, pa.Array]:
    """Return the given columns, except the data, which the caller adds."""
    arrays: dict[str, pa.Array] = {}
    for name in columns:
        if name == "partition":
            arrays[name] = _number_column(name, np.full(headers.size, partition_id, dtype=np.int32))
        elif name == "transaction_id":
            arrays[name] = _number_column(name, headers["transaction_id"].astype(np.int64))
        elif name == "header":
            arrays[name] = _number_column(name, headers["header"].astype(np.int32))
        elif name == "request_id":
            arrays[name] = _request_ids(headers["req_id"])
        elif name == "commit_time":
            arrays[name] = _commit_times(headers["transaction_id"].astype(np.int64), stamps)
        else:
            assert name == "data", f"no column {name} in READ_SCHEMA"
    return arrays


def _number_column(name: str, values: npt.NDArray[Any]) -> pa.Array:
    return arrow_buffers.as_numbers(values, READ_SCHEMA.field(name).type)


def _request_ids(req_ids: npt.NDArray[np.void]) -> pa.StructArray:
    names = ("client_id", "generation", "partition_id", "sequence")
    arrays = [
        arrow_buffers.as_numbers(req_ids[name].astype(np.int32), pa.int32()) for name in names
    ]
    return pa.StructArray.from_arrays(arrays, fields=list(READ_SCHEMA.field("request_id").type))


def _commit_times(ids: I64, stamps: Sequence[tuple[int, int, int]]) -> pa.Array:
    # Arrow stores microseconds, so not every int64 of milliseconds fits. A stamp that does not fit
    # is clipped, because no code depends on the value of such a stamp.
    stamp_ms_max = np.iinfo(np.int64).max // 1000
    stamps_us = raw_records.stamps_of(
        ids, [(first, last, 1000 * min(max(ms, 0), stamp_ms_max)) for first, last, ms in stamps]
    )
    is_present = stamps_us > 0
    kind = READ_SCHEMA.field("commit_time").type
    return arrow_buffers.as_numbers(
        stamps_us, kind, is_present=None if is_present.all() else is_present
    )
