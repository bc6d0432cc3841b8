"""The layout of each kind of field in a payload: a function that writes it, and one that reads it.

A reader gets a view of the payload, an offset, and a list. The reader appends the value to the list
and returns the offset after the field.

Rules:
    1. A count is compared with the number of remaining bytes before memory is allocated for it.
    2. At most `ENTRIES_MAX` entries become Python objects, in both directions.
    3. Reading raises only RemoteProtocolError, `struct.error` or UnicodeDecodeError. Writing raises
       only LocalProtocolError, `struct.error` or UnicodeEncodeError.
"""

import struct
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias

from waltz_core.errors import LocalProtocolError, RemoteProtocolError
from waltz_core.records.checksum import crc32
from waltz_core.records.record import (
    RECORD_HEADER,
    Chain,
    LineageEntry,
    Record,
    ReqId,
    SessionId,
    TransactionId,
)
from waltz_core.wire.messages import ENTRIES_MAX, TEXT_BYTES_MAX, Buffer, FieldKind

_INT32: Final = struct.Struct(">i")
_UINT32: Final = struct.Struct(">I")
_LINEAGE_ENTRY_STRUCT: Final = struct.Struct(">qqqq16s")
# The maximum size of a byte field that is copied and joined with its neighbors. For a larger field,
# a separate buffer costs less than the copy.
_INLINE_BYTES_MAX: Final = 2048
assert _LINEAGE_ENTRY_STRUCT.size == 48


class FieldWriter:
    """A frame under construction: the finished buffers, and the small bytes that follow them."""

    __slots__ = ("finished", "small_bytes")

    def __init__(self) -> None:
        self.small_bytes = bytearray()
        self.finished: list[Buffer] = []

    def put_bytes(self, data: Buffer) -> None:
        """Append bytes to the frame; a large buffer is not copied."""
        if len(data) <= _INLINE_BYTES_MAX:
            self.small_bytes += data
            return
        self.finished.append(bytes(self.small_bytes))
        self.finished.append(data)
        self.small_bytes = bytearray()

    def finish(self) -> list[Buffer]:
        """Return all buffers of the frame in order; afterwards the frame must not be extended."""
        if self.small_bytes or not self.finished:
            self.finished.append(bytes(self.small_bytes))
        return self.finished


Putter: TypeAlias = Callable[[Any, FieldWriter], None]
FieldReader: TypeAlias = Callable[[memoryview, int, list[Any]], int]


# ---------------------------------------------------------------------------------------------
# Fields of fixed size


class FixedFormat(NamedTuple):
    """A format character of `struct`, and the functions that convert the value to and from it."""

    letter: str
    to_wire: Callable[[Any], object] | None = None
    from_wire: Callable[[Any], object] | None = None


def _exact_bytes(size: int) -> Callable[[Buffer], bytes]:
    """Return a function that checks that a value has this number of bytes."""

    def checked(value: Buffer) -> bytes:
        if len(value) != size:
            raise LocalProtocolError(f"expected {size} bytes, found {len(value)}")
        return bytes(value)

    return checked


_sixteen_bytes: Final = _exact_bytes(16)


def _is_one(value: int) -> bool:
    return value == 1


FIXED_FORMATS: Final[dict[FieldKind, FixedFormat]] = {
    FieldKind.BOOL: FixedFormat("B", int, _is_one),
    FieldKind.INT8: FixedFormat("b"),
    FieldKind.INT32: FixedFormat("i"),
    FieldKind.INT64: FixedFormat("q"),
    FieldKind.CRC32: FixedFormat("I"),
    FieldKind.RAW16: FixedFormat("16s", _sixteen_bytes),
    FieldKind.RAW32: FixedFormat("32s", _exact_bytes(32)),
    FieldKind.REQ_ID: FixedFormat("16s", ReqId.to_bytes, ReqId.from_bytes),
}


# ---------------------------------------------------------------------------------------------
# Fields of variable size: one `_put` and one `_read` for each


def read_count(view: memoryview, offset: int, entry_bytes_min: int) -> tuple[int, int]:
    """Read a count of entries; return the count and the offset after it.

    Raise RemoteProtocolError if the remaining bytes are too few for this count (rule 1).
    """
    (count,) = _INT32.unpack_from(view, offset)
    offset += _INT32.size
    if count < 0 or count * entry_bytes_min > len(view) - offset:
        raise RemoteProtocolError(
            f"count {count} at byte {offset - _INT32.size} does not fit the "
            f"{len(view) - offset} bytes left"
        )
    return count, offset


def _read_entries(view: memoryview, offset: int, entry_bytes_min: int) -> tuple[int, int]:
    """Read the count of entries that become Python objects; return it and the offset after it."""
    count, offset = read_count(view, offset, entry_bytes_min)
    if count > ENTRIES_MAX:
        raise RemoteProtocolError(f"expected at most {ENTRIES_MAX} entries, found {count}")
    return count, offset


def _put_entries(count: int, out: FieldWriter) -> None:
    if count > ENTRIES_MAX:
        raise LocalProtocolError(f"expected at most {ENTRIES_MAX} entries, found {count}")
    out.small_bytes += _INT32.pack(count)


def _put_blob(value: Buffer, out: FieldWriter) -> None:
    out.small_bytes += _INT32.pack(_byte_length(value))
    out.put_bytes(value)


def _byte_length(value: Buffer) -> int:
    """Return the length of a buffer; raise LocalProtocolError if its items are not bytes."""
    if type(value) is memoryview and (value.itemsize != 1 or value.ndim != 1):
        raise LocalProtocolError("expected a view of bytes, found a view of larger items")
    return len(value)


def _read_blob(view: memoryview, offset: int, values: list[Any]) -> int:
    count, offset = read_count(view, offset, 1)
    values.append(view[offset : offset + count])
    return offset + count


def _packed_layout(width: int) -> tuple[Putter, FieldReader]:
    """Return the layout of packed numbers of `width` bytes each."""

    def put(value: Buffer, out: FieldWriter) -> None:
        count, remainder = divmod(_byte_length(value), width)
        if remainder:
            raise LocalProtocolError(f"expected items of {width} bytes, found {len(value)} bytes")
        out.small_bytes += _INT32.pack(count)
        out.put_bytes(value)

    def read(view: memoryview, offset: int, values: list[Any]) -> int:
        count, offset = read_count(view, offset, width)
        values.append(view[offset : offset + count * width])
        return offset + count * width

    return put, read


def _put_text(value: str, out: FieldWriter) -> None:
    data = value.encode()
    if len(data) > TEXT_BYTES_MAX:
        raise LocalProtocolError(
            f"expected a text of at most {TEXT_BYTES_MAX} bytes, found {len(data)} bytes"
        )
    out.small_bytes += _INT32.pack(len(data))
    out.small_bytes += data


def read_text(view: memoryview, offset: int, values: list[Any]) -> int:
    """Read a text in strict UTF-8 of at most `TEXT_BYTES_MAX` bytes."""
    count, offset = read_count(view, offset, 1)
    if count > TEXT_BYTES_MAX:
        raise RemoteProtocolError(
            f"expected a text of at most {TEXT_BYTES_MAX} bytes, found {count} bytes"
        )
    values.append(str(view[offset : offset + count], "utf-8"))
    return offset + count


def _put_text_or_null(value: str | None, out: FieldWriter) -> None:
    if value is None:
        out.small_bytes += _INT32.pack(-1)
    else:
        _put_text(value, out)


def _read_text_or_null(view: memoryview, offset: int, values: list[Any]) -> int:
    if _INT32.unpack_from(view, offset)[0] < 0:
        values.append(None)
        return offset + _INT32.size
    return read_text(view, offset, values)


def _put_int32s(value: tuple[int, ...], out: FieldWriter) -> None:
    _put_entries(len(value), out)
    out.small_bytes += struct.pack(f">{len(value)}i", *value)


def _read_int32s(view: memoryview, offset: int, values: list[Any]) -> int:
    count, offset = _read_entries(view, offset, 4)
    values.append(struct.unpack_from(f">{count}i", view, offset))
    return offset + 4 * count


def _tuple_layout(
    put_one: Putter, read_one: FieldReader, entry_bytes_min: int
) -> tuple[Putter, FieldReader]:
    """Return the layout of a tuple; `put_one` and `read_one` are the layout of one entry."""

    def put(value: tuple[Any, ...], out: FieldWriter) -> None:
        _put_entries(len(value), out)
        for item in value:
            put_one(item, out)

    def read(view: memoryview, offset: int, values: list[Any]) -> int:
        count, offset = _read_entries(view, offset, entry_bytes_min)
        items: list[Any] = []
        for _ in range(count):
            offset = read_one(view, offset, items)
        values.append(tuple(items))
        return offset

    return put, read


def _read_bool(view: memoryview, offset: int) -> tuple[bool, int]:
    if offset >= len(view):
        raise RemoteProtocolError(f"expected a bool at byte {offset}, found the end of the message")
    return view[offset] == 1, offset + 1


def _put_lineage_entry(value: LineageEntry, out: FieldWriter) -> None:
    out.small_bytes += _LINEAGE_ENTRY_STRUCT.pack(*value[:4], _sixteen_bytes(value.chain))


def _read_lineage_entry(view: memoryview, offset: int, values: list[Any]) -> int:
    first, last, session, stamp_ms, chain = _LINEAGE_ENTRY_STRUCT.unpack_from(view, offset)
    values.append(
        LineageEntry(
            TransactionId(first), TransactionId(last), SessionId(session), stamp_ms, Chain(chain)
        )
    )
    return offset + _LINEAGE_ENTRY_STRUCT.size


def _put_record(value: Record, out: FieldWriter) -> None:
    out.small_bytes += RECORD_HEADER.pack(
        value.transaction_id, value.req_id.to_bytes(), value.header
    )
    _put_blob(value.data, out)
    out.small_bytes += _UINT32.pack(crc32(value.data))


def _read_record(view: memoryview, offset: int, values: list[Any]) -> int:
    transaction_id, req_id, header = RECORD_HEADER.unpack_from(view, offset)
    parts: list[Any] = []
    offset = _read_checked_blob(view, offset + RECORD_HEADER.size, parts)
    data = bytes(parts[0])
    values.append(Record(TransactionId(transaction_id), ReqId.from_bytes(req_id), header, data))
    return offset


def _read_checked_blob(view: memoryview, offset: int, values: list[Any]) -> int:
    """Read a blob and the CRC after it. Waltz 0.13 also closes the connection if they differ."""
    offset = _read_blob(view, offset, values)
    (expected_crc,) = _UINT32.unpack_from(view, offset)
    actual_crc = crc32(values[-1])
    if actual_crc != expected_crc:
        raise RemoteProtocolError(
            f"data before byte {offset}: expected CRC {expected_crc:08x}, found {actual_crc:08x}"
        )
    return offset + _UINT32.size


def _put_data_or_error(value: tuple[Buffer | None, str | None], out: FieldWriter) -> None:
    data, error = value
    if (data is not None) and (error is not None):
        raise LocalProtocolError("expected data or an error text, found both")
    out.small_bytes.append(data is not None)
    if data is None:
        _put_text_or_null(error, out)
    else:
        _put_blob(data, out)
        out.small_bytes += _UINT32.pack(crc32(data))


def _read_data_or_error(view: memoryview, offset: int, values: list[Any]) -> int:
    is_data, offset = _read_bool(view, offset)
    parts: list[Any] = []
    if is_data:
        offset = _read_checked_blob(view, offset, parts)
        values.append((parts[0], None))
    else:
        offset = _read_text_or_null(view, offset, parts)
        values.append((None, parts[0]))
    return offset


def _put_text_bool(value: tuple[str, bool], out: FieldWriter) -> None:
    _put_text(value[0], out)
    out.small_bytes.append(value[1])


def _read_text_bool(view: memoryview, offset: int, values: list[Any]) -> int:
    parts: list[Any] = []
    offset = read_text(view, offset, parts)
    flag, offset = _read_bool(view, offset)
    values.append((parts[0], flag))
    return offset


def _put_int32_bool(value: tuple[int, bool], out: FieldWriter) -> None:
    out.small_bytes += _INT32.pack(value[0])
    out.small_bytes.append(value[1])


def _read_int32_bool(view: memoryview, offset: int, values: list[Any]) -> int:
    (number,) = _INT32.unpack_from(view, offset)
    flag, offset = _read_bool(view, offset + _INT32.size)
    values.append((number, flag))
    return offset


def _put_stack_frame(value: tuple[str, str, str | None, int], out: FieldWriter) -> None:
    _put_text(value[0], out)
    _put_text(value[1], out)
    _put_text_or_null(value[2], out)
    out.small_bytes += _INT32.pack(value[3])


def _read_stack_frame(view: memoryview, offset: int, values: list[Any]) -> int:
    parts: list[Any] = []
    offset = read_text(view, offset, parts)
    offset = read_text(view, offset, parts)
    offset = _read_text_or_null(view, offset, parts)
    parts += _INT32.unpack_from(view, offset)
    values.append(tuple(parts))
    return offset + _INT32.size


VARIABLE_FORMATS: Final[dict[FieldKind, tuple[Putter, FieldReader]]] = {
    FieldKind.BLOB: (_put_blob, _read_blob),
    FieldKind.TEXT: (_put_text, read_text),
    FieldKind.TEXT_OR_NULL: (_put_text_or_null, _read_text_or_null),
    FieldKind.INT32S: (_put_int32s, _read_int32s),
    FieldKind.PACKED_INT32S: _packed_layout(4),
    FieldKind.PACKED_INT64S: _packed_layout(8),
    FieldKind.TEXTS: _tuple_layout(_put_text, read_text, 4),
    FieldKind.LINEAGE: _tuple_layout(_put_lineage_entry, _read_lineage_entry, 48),
    FieldKind.RECORDS: _tuple_layout(_put_record, _read_record, 36),
    FieldKind.TEXT_BOOL_MAP: _tuple_layout(_put_text_bool, _read_text_bool, 5),
    FieldKind.INT32_BOOL_MAP: _tuple_layout(_put_int32_bool, _read_int32_bool, 5),
    FieldKind.DATA_OR_ERROR: (_put_data_or_error, _read_data_or_error),
    FieldKind.STACK: _tuple_layout(_put_stack_frame, _read_stack_frame, 16),
}
# The value that a reader returns for a field of a newer version, which the peer did not send.
EMPTY_VALUES: Final[dict[FieldKind, object]] = {FieldKind.INT32S: ()}
assert FIXED_FORMATS.keys() | VARIABLE_FORMATS.keys() == set(FieldKind), "a kind has no layout"
