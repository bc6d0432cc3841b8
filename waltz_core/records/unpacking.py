"""Decodes payloads into the columns of a declared schema.

`waltz_spark/rows.py` defines how `data` stores each type. docs/spark.md, "Conversions", lists the
accepted values of each type.

Rules:
    1. A value is converted only without loss. A float is not an integer, a boolean is not a number,
       and a value outside of the type's range is an error. A string that is not base64 is an error
       in a binary column.
    2. The error for a payload that does not fit the schema states the partition, transaction and
       column.
    3. A nested array is built from its children, and each child is cast separately. A cast of the
       whole array would also cast the values that Arrow stores at the positions of nulls. Such a
       value may not fit the type.
    4. A key of a payload must be equal to the name of its column. In Spark, the key may also differ
       in case, unless `spark.sql.caseSensitive` is on.
    5. A field that is not nullable never contains a null, because Spark plans queries accordingly.
       A null or absent value does not fit such a field.
"""

import base64
import re
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from decimal import Decimal
from itertools import chain, compress
from types import NoneType
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from waltz_core.errors import BadFormat
from waltz_core.records.payload_types import is_binary, plain_type
from waltz_core.records.strict_json import from_json, from_json_with_decimals
from waltz_core.records.typed_values import TYPED_FORMATS, VALUE_NAMES, plain_value, typed_builder

# Decodes one payload. Raises BadFormat, ValueError or TypeError if the payload is damaged.
Decode = Callable[[bytes], Any]
# The maximum number of digits in Arrow's widest decimal. Spark's has 38.
_DECIMAL_DIGITS_MAX = 76


class Unpacker:
    """Converts payloads to the columns of a user's schema; a column that a payload lacks is null.

    Args:
        fields: the wanted columns, with Spark's Arrow types.
        data_format: `msgpack`, `json`, `avro` or `protobuf`.
        decode: decodes one payload; required for `avro` and `protobuf`.
        required: columns that each payload must have; their names may differ in case
            (`columns_matching`).
        is_case_sensitive: whether names that differ only in case are different columns (rule 4).
    """

    def __init__(
        self,
        fields: Sequence[pa.Field],
        data_format: str,
        *,
        decode: Decode | None = None,
        required: Collection[str] = (),
        is_case_sensitive: bool = False,
    ) -> None:
        self._fields = list(fields)
        names = [field.name for field in fields]
        required_names = {
            name for required_name in required for name in columns_matching(required_name, names)
        }
        self._required = [name for name in names if name in required_names]
        self._find_value = dict.get if is_case_sensitive else _find_ignoring_case
        self._array_builders = [
            _array_builder(field.type, data_format, self._find_value) for field in fields
        ]
        self._format = data_format
        reads_decimals = any(_has_decimal(field.type) for field in fields)
        self._decode = decode or decoder_of(data_format, reads_decimals=reads_decimals)

    def columns(self, data: pa.Array, where: Callable[[int], str]) -> list[pa.Array]:
        """Decode payloads; return one array for each wanted column.

        Args:
            data: binary payloads.
            where: returns the location of row i for an error message, such as "partition 0,
                transaction 17".

        Raises:
            BadFormat: a payload is damaged or not a map, has a value of another type, or has no
                value for a column that is required or not nullable.
        """
        rows = self.decode_maps(data, where)
        for index, name in self._missing_values(rows):
            raise BadFormat(
                f"{where(index)}: the payload has no column {name!r} of option 'requiredColumns'"
            )
        values = (self._values(rows, field.name) for field in self._fields)
        return [
            self._column(column, column_index, where) for column_index, column in enumerate(values)
        ]

    def readable_columns(self, data: pa.Array) -> tuple[list[pa.Array], npt.NDArray[np.bool_]]:
        """Decode payloads; return the columns, and a mask of the payloads that fit the schema.

        In a payload that does not fit, all columns are null.
        """
        columns, is_complete = self.columns_with_nulls(data)
        if is_complete.all():
            return columns, is_complete
        indexes = pa.array(np.arange(len(data)), mask=~is_complete)
        return [column.take(indexes) for column in columns], is_complete

    def columns_with_nulls(self, data: pa.Array) -> tuple[list[pa.Array], npt.NDArray[np.bool_]]:
        """Decode payloads; return the wanted columns, and a mask of the complete rows.

        If a value does not fit, only its column is null; if a payload is not a map, all columns are
        null. A row is complete if its payload is a map, all values fit, no required column is
        absent, and no null is in a column that is not nullable (rule 5).
        """
        rows, is_complete = self._decode_each_map(data)
        for index, _ in self._missing_values(rows):
            is_complete[index] = False
        columns = []
        for column_index, field in enumerate(self._fields):
            values = self._values(rows, field.name)
            try:
                columns.append(self._array_builders[column_index](values))
            except _MISMATCH_ERRORS:
                for row in self._mismatched_rows(values, column_index, 0):
                    values[row] = None
                    is_complete[row] = False
                columns.append(self._array_builders[column_index](values))
            if not field.nullable:  # rule 5
                is_complete &= columns[-1].is_valid().to_numpy(zero_copy_only=False)
        return columns, is_complete

    def _values(self, rows: list[dict[str, Any]], name: str) -> list[Any]:
        values = [row.get(name) for row in rows]
        if None not in values:
            return values
        # `_find_value` for each row would take longer than all other work here.
        return [
            self._find_value(row, name) if value is None else value
            for row, value in zip(rows, values, strict=True)
        ]

    def _missing_values(self, rows: list[dict[str, Any]]) -> Iterator[tuple[int, str]]:
        for name in self._required:
            for index, row in enumerate(rows):
                if name not in row and self._find_value(row, name, _ABSENT) is _ABSENT:
                    yield index, name

    def _decode_each_map(
        self, data: pa.Array
    ) -> tuple[list[dict[str, Any]], npt.NDArray[np.bool_]]:
        """Decode payloads; return an empty map for each non-map, and a mask of the maps."""
        is_map = np.ones(len(data), dtype=np.bool_)
        try:
            return self.decode_maps(data, _no_location), is_map
        except BadFormat:
            rows: list[dict[str, Any]] = []
        for index in range(len(data)):
            try:
                rows += self.decode_maps(data.slice(index, 1), _no_location)
            except BadFormat:
                rows.append({})
                is_map[index] = False
        return rows, is_map

    def _mismatched_rows(self, values: list[Any], column_index: int, start: int) -> Iterator[int]:
        """Yield the indexes of the rows whose values do not fit a column, found by bisection."""
        try:
            self._array_builders[column_index](values)
        except _MISMATCH_ERRORS:
            middle = len(values) // 2
            if middle == 0:
                yield start
                return
            yield from self._mismatched_rows(values[:middle], column_index, start)
            yield from self._mismatched_rows(values[middle:], column_index, start + middle)

    def decode_maps(self, data: pa.Array, where: Callable[[int], str]) -> list[dict[str, Any]]:
        """Return the payloads as maps; raises BadFormat if a payload is damaged or not a map."""
        payloads = data.to_pylist()
        rows: list[dict[str, Any]] = []
        try:
            rows.extend(map(self._decode, payloads))
        except (BadFormat, ValueError, TypeError, msgpack.UnpackException) as error:
            reason = str(error) or _MSGPACK_REASONS.get(type(error), type(error).__name__)
            if "Hint: " not in reason:
                hint = "the payload may have another format, or is encrypted"
                reason = f"{reason.removesuffix('.')}. Hint: {hint}."
            raise BadFormat(
                f"{where(len(rows))}: expected a payload in {self._format}: {reason}"
            ) from None
        for index, row in enumerate(rows):
            if type(row) is not dict:
                raise BadFormat(
                    f"{where(index)}: expected a map of columns as payload, found "
                    f"{type(row).__name__}"
                )
        return rows

    def _column(
        self, values: list[Any], column_index: int, where: Callable[[int], str]
    ) -> pa.Array:
        field = self._fields[column_index]
        try:
            array = self._array_builders[column_index](values)
        except _MISMATCH_ERRORS:
            row = next(self._mismatched_rows(values, column_index, 0))
        else:
            if not field.nullable and array.null_count:  # rule 5
                raise BadFormat(
                    f"{where(values.index(None))}: column {field.name!r} is NOT NULL in the "
                    "schema, and the payload has no value for it. Hint: declare the column as "
                    "nullable, to read null instead (in Spark: .schema(df.schema.toNullable()), or "
                    "a DDL schema without NOT NULL)."
                )
            return array
        value = values[row]
        try:
            return self._array_builders[column_index]([value])
        except _MISMATCH_ERRORS as error:
            raise BadFormat(
                f"{where(row)}, column {field.name!r}: expected {field.type}, found {value!r} "
                f"({error})"
            ) from None


# The errors that a builder raises for a value that does not fit the type of its column.
_MISMATCH_ERRORS = (pa.ArrowException, TypeError, ValueError, AttributeError, OverflowError)


def decoder_of(data_format: str, *, reads_decimals: bool = False) -> Decode:
    """Return the decoder for msgpack or JSON; `reads_decimals`: JSON fractions become decimals."""
    assert data_format not in TYPED_FORMATS, "needs a schema registry"
    if data_format == "msgpack":
        return _unpack_msgpack
    return from_json_with_decimals if reads_decimals else from_json


def packed_identity(data: bytes, names: Sequence[str], decode: Decode) -> bytes | None:
    """Pack the named columns of a payload; None if it is not a map, or lacks a column."""
    try:
        row = decode(data)
        packed: bytes = msgpack.packb([row[name] for name in names], default=plain_value)
    except (BadFormat, ValueError, msgpack.UnpackException, KeyError, TypeError):
        return None
    return packed


_ABSENT = object()
# These exceptions of msgpack have no message.
_MSGPACK_REASONS: dict[type, str] = {
    msgpack.StackError: "the payload is nested too deeply",
    msgpack.FormatError: "the payload has an invalid byte",
}


def columns_matching(name: str, columns: Sequence[str]) -> list[str]:
    """Return the column with this name, or else all columns whose names differ only in case."""
    if name in columns:
        return [name]
    return [column for column in columns if column.lower() == name.lower()]


def _find_ignoring_case(row: dict[str, Any], name: str, default: Any = None) -> Any:  # noqa: ANN401
    """Return the value for key `name`, otherwise for the first key that differs only in case."""
    if name in row:
        return row[name]
    lower_name = name.lower()
    for key, value in row.items():
        if type(key) is str and key.lower() == lower_name:
            return value
    return default


def _has_decimal(kind: pa.DataType) -> bool:
    if pa.types.is_nested(kind):
        return any(_has_decimal(kind.field(index).type) for index in range(kind.num_fields))
    return bool(pa.types.is_decimal(kind))


def _no_location(_row: int) -> str:
    return ""


def _unpack_msgpack(payload: bytes) -> Any:  # noqa: ANN401 - any packed value
    return msgpack.unpackb(payload, strict_map_key=False)


# ---------------------------------------------------------------------------------------------
# Values to arrays, child by child (rule 3)

_Builder = Callable[[list[Any]], pa.Array]
_FindValue = Callable[..., Any]


def _array_builder(kind: pa.DataType, data_format: str, find: _FindValue) -> _Builder:
    """Return the function that builds an array. It raises if a value has another type."""
    if pa.types.is_struct(kind):
        return _struct_builder(kind, data_format, find)
    if pa.types.is_map(kind):
        return _map_builder(kind, data_format, find)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _list_builder(kind, data_format, find)
    return _flat_builder(kind, data_format)


def _flat_builder(kind: pa.DataType, data_format: str) -> _Builder:  # noqa: PLR0911 - a case each
    """Return the builder of a flat (not nested) type (rule 1)."""
    if pa.types.is_boolean(kind):
        return lambda values: pa.array(_check_types(values, bool), kind)
    if pa.types.is_integer(kind):
        return lambda values: pa.array(_check_types(values, int), kind)
    if pa.types.is_floating(kind):
        return lambda values: _floats(values, kind)
    if pa.types.is_decimal(kind):
        return lambda values: _decimals(values, kind)
    if is_binary(kind) and data_format == "json":
        return lambda values: pa.array(
            map(_from_base64, _check_types(values, str)), kind, size=len(values)
        )
    if is_binary(kind):
        return lambda values: pa.array(_check_types(values, bytes), kind)
    typed = typed_builder(kind, _check_types) if data_format in TYPED_FORMATS else None
    return typed or _plain_builder(kind, data_format)


def _plain_builder(kind: pa.DataType, data_format: str) -> _Builder:
    """Return the builder for a type whose values are numbers or texts in payloads."""
    if pa.types.is_timestamp(kind) and data_format == "json":
        return lambda values: _timestamps(values, kind)
    plain_kind = plain_type(kind, data_format)
    if pa.types.is_null(kind):
        return lambda values: pa.array(values, kind)
    if pa.types.is_string(plain_kind) or pa.types.is_large_string(plain_kind):
        return lambda values: pa.array(_check_types(values, str), plain_kind).cast(kind)
    return lambda values: pa.array(_check_types(values, int), plain_kind).cast(kind)


def _check_types(values: list[Any], *types: type) -> list[Any]:
    """Return the values; raises TypeError if a value is neither None nor of a wanted type."""
    if not set(map(type, values)) <= {NoneType, *types}:
        value = next(each for each in values if each is not None and type(each) not in types)
        names = " or ".join(_TYPE_NAMES.get(each, each.__name__) for each in types)
        raise TypeError(
            f"expected {names}, found {_TYPE_NAMES.get(type(value), type(value).__name__)}"
        )
    return values


def _floats(values: list[Any], kind: pa.DataType) -> pa.Array:
    if not set(map(type, values)) <= {NoneType, float}:
        _check_types(values, float, int, Decimal)
        values = [
            value if value is None or type(value) is float else _exact_float(value, kind)
            for value in values
        ]
    numbers = pa.array(values, pa.float64())
    if kind == numbers.type:
        return numbers
    narrowed = numbers.cast(kind)
    if pc.any(pc.and_(pc.is_inf(narrowed), pc.is_finite(numbers))).as_py():
        raise ValueError(f"a number is out of the range of {kind}")
    return narrowed


def _exact_float(value: int | Decimal, kind: pa.DataType) -> float:
    number = float(value)
    if type(value) is int:
        converted = number
        if kind == pa.float32():
            (converted,) = struct.unpack("f", struct.pack("f", number))
        if int(converted) != value:
            raise ValueError(f"{value} cannot be represented exactly as a {kind}")
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"{value} is out of the range of a float")
    return number


def _decimals(values: list[Any], kind: pa.DataType) -> pa.Array:
    texts = [
        value if value is None else _decimal_text(value)
        for value in _check_types(values, str, int, Decimal)
    ]
    # Convert through a wider type, because Arrow's cast overflows for a text with too many digits
    # for 128 bits.
    wide_numbers = pa.array(texts, pa.string()).cast(pa.decimal256(_DECIMAL_DIGITS_MAX, kind.scale))
    return wide_numbers.cast(kind)


def _decimal_text(value: str | int | Decimal) -> str:
    if isinstance(value, Decimal):
        if abs(value.adjusted()) > _DECIMAL_DIGITS_MAX:
            raise ValueError(f"{value} is out of the range of a decimal")
        value = format(value, "f")
    text = value if isinstance(value, str) else str(value)
    if len(text) > 2 * _DECIMAL_DIGITS_MAX or sum(map(str.isdigit, text)) > _DECIMAL_DIGITS_MAX:
        raise ValueError(f"expected at most {_DECIMAL_DIGITS_MAX} digits, found more")
    return text


_NANOSECONDS = re.compile(r"(\.\d{6})0{1,3}(?!\d)")


def _timestamps(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Convert strings to timestamps. Nanoseconds must be whole microseconds."""
    texts = _check_types(values, str)
    try:
        return pa.array(texts, pa.string()).cast(kind)
    except pa.ArrowInvalid:
        microsecond_texts = [
            text if text is None else _NANOSECONDS.sub(r"\1", text, 1) for text in texts
        ]
        return pa.array(microsecond_texts, pa.string()).cast(kind)


def _struct_builder(kind: pa.DataType, data_format: str, find: _FindValue) -> _Builder:
    parts = [(field, _array_builder(field.type, data_format, find)) for field in kind]

    def build(values: list[Any]) -> pa.Array:
        present = _present_mask(values, dict)
        if not parts:
            return pa.array([{} if is_there else None for is_there in present], kind)
        arrays = []
        for field, build_child in parts:
            field_values = [None if value is None else find(value, field.name) for value in values]
            _check_nulls(field, compress(field_values, present))
            arrays.append(build_child(field_values))
        return pa.StructArray.from_arrays(arrays, fields=list(kind), mask=pa.array(~present))

    return build


def _list_builder(kind: pa.DataType, data_format: str, find: _FindValue) -> _Builder:
    build_child = _array_builder(kind.value_type, data_format, find)
    array_type = pa.LargeListArray if pa.types.is_large_list(kind) else pa.ListArray

    def build(values: list[Any]) -> pa.Array:
        present = _present_mask(values, list)
        elements = list(chain.from_iterable(filter(None, values)))
        _check_nulls(kind.value_field, elements)
        child_array = build_child(elements)
        return array_type.from_arrays(
            _offsets(values), child_array, type=kind, mask=pa.array(~present)
        )

    return build


def _map_builder(kind: pa.DataType, data_format: str, find: _FindValue) -> _Builder:
    key = _array_builder(kind.key_type, data_format, find)
    item = _array_builder(kind.item_type, data_format, find)

    def build(values: list[Any]) -> pa.Array:
        if data_format != "json":
            present = _present_mask(values, dict)
            pairs = list(chain.from_iterable(value.items() for value in values if value))
        else:
            present = _present_mask(values, list)
            pairs = list(chain.from_iterable(filter(None, values)))
            _check_pairs(pairs)
        _check_nulls(kind.item_field, (pair[1] for pair in pairs))
        keys, items = key([pair[0] for pair in pairs]), item([pair[1] for pair in pairs])
        offsets = _offsets(values)
        return pa.MapArray.from_arrays(offsets, keys, items, type=kind, mask=pa.array(~present))

    return build


def _check_nulls(field: pa.Field, values: Iterable[Any]) -> None:
    """Raise ValueError for a null in a field that is not nullable (rule 5)."""
    if not field.nullable and any(value is None for value in values):
        raise ValueError(f"its field {field.name!r} is null, but the schema declares it NOT NULL")


def _present_mask(values: list[Any], kind: type) -> npt.NDArray[np.bool_]:
    """Return a mask of the values that are not null; these must all be of type `kind`."""
    present = np.fromiter((value is not None for value in values), np.bool_, len(values))
    for value in values:
        if value is not None and type(value) is not kind:
            raise TypeError(f"expected a {_TYPE_NAMES[kind]}, found {type(value).__name__}")
    return present


_TYPE_NAMES: dict[type, str] = {
    dict: "map",
    list: "list",
    bool: "boolean",
    int: "integer",
    Decimal: "decimal",
    str: "text",
    bytes: "binary",
    **VALUE_NAMES,
}


def _check_pairs(pairs: list[Any]) -> None:
    for pair in pairs:
        if type(pair) is not list or len(pair) != 2:
            raise TypeError(f"expected a [key, value] pair as list element, found {pair!r}")


def _offsets(values: list[Any]) -> pa.Array:
    ends = np.cumsum([0, *(len(value) if value else 0 for value in values)])
    return pa.array(ends, pa.int32())


def _from_base64(value: str | None) -> bytes | None:
    if value is None:
        return None
    data = base64.b64decode(value)
    # Python ignores invalid characters. Only valid base64 encodes to the same text again.
    if base64.b64encode(data).decode() != value:
        raise ValueError("the text is not base64 (RFC 4648, section 4)")
    return data
