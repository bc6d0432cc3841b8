"""Packs rows into payloads, and defines the Spark schema of a transaction.

The table shows how `data` represents each Spark type. `waltz_core/records/unpacking.py` decodes it.

    Spark type                   msgpack                     json
    boolean, integers            unchanged                   unchanged
    double, float (exact)        unchanged                   unchanged; no NaN, no infinity
    decimal                      text, all digits            text, all digits
    string                       text                        text
    binary                       bin                         text, base64
    date                         int, days since 1970-01-01  text, 2013-01-31
    timestamp (both kinds)       int, microseconds           text, ISO 8601, in UTC
    array, struct, map           array, map by name, map     array, object, list of pairs
    null                         nil                         null

The encoders of Avro and Protobuf receive Python values, such as dates: see `payload_schemas.py`.

Rules:
    1. Arrow casts whole columns; Python code receives plain values only.
"""

import base64
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import types
from pyspark.sql.types import StructType

from waltz_core.errors import BadRequest
from waltz_core.records.payload_types import is_binary, nested_type, plain_type, without_nulls
from waltz_core.records.strict_json import to_json
from waltz_core.records.typed_values import TYPED_FORMATS
from waltz_spark.options import CHANGE_COLUMN, ERROR_COLUMN, ReadOptions, log_columns

_LOG_COLUMN_TYPES = {
    "partition": "int",
    "transaction_id": "bigint",
    "header": "int",
    "request_id": "struct<client_id:int,generation:int,partition:int,sequence:int>",
    "commit_time": "timestamp",
    "data": "binary",
    ERROR_COLUMN: "string",
    CHANGE_COLUMN: "string",
}
assert tuple(_LOG_COLUMN_TYPES) == log_columns(has_keys=True, has_changes=True)


def log_columns_ddl(columns: Sequence[str]) -> str:
    """Return the DDL for the given columns of the log, in this order; all are nullable."""
    return ", ".join(f"{name} {_LOG_COLUMN_TYPES[name]}" for name in columns)


def check_log_column_types(schema: StructType, options: ReadOptions) -> None:
    """Reject a user's schema that declares a column of the log with another type.

    A column that may be null cannot be declared NOT NULL: `commit_time`, and with option
    `encryptionKeys` also `data` and `data_error`. No other column of the log is ever null.

    Raises:
        BadRequest: the error names the column and both types.
    """
    for field in schema.fields:
        expected_type = _LOG_COLUMN_TYPES[field.name] if field.name in options.log_columns else None
        found_type = field.dataType.simpleString()
        if expected_type is not None and found_type != expected_type:
            raise BadRequest(
                f"column {field.name!r} of the log: expected type {expected_type}, found "
                f"{found_type} in the "
                "schema"
            )
        if field.name == "commit_time" and not field.nullable:
            raise BadRequest(
                "column 'commit_time' is NOT NULL in the schema, but it is null for "
                "transactions that a Waltz 0.13 server wrote. Hint: declare the column as "
                "nullable."
            )
        is_decrypted = options.encryption_keys is not None and expected_type is not None
        if is_decrypted and field.name in ("data", ERROR_COLUMN) and not field.nullable:
            raise BadRequest(
                f"column {field.name!r} is NOT NULL in the schema, but with option "
                "encryptionKeys it may be null. Hint: declare the column as nullable."
            )


_PACKED_TYPES = (
    types.BooleanType,
    types.ByteType,
    types.ShortType,
    types.IntegerType,
    types.LongType,
    types.FloatType,
    types.DoubleType,
    types.DecimalType,
    types.StringType,
    types.CharType,
    types.VarcharType,
    types.BinaryType,
    types.DateType,
    types.TimestampType,
    types.TimestampNTZType,
    types.NullType,
)


def check_packed_type(name: str, kind: types.DataType, data_format: str | None = None) -> None:
    """Reject a column whose type, at any nesting level, is not in the table of this file.

    Args:
        name: the column.
        kind: its type.
        data_format: a format; types that it cannot pack are rejected, too.

    Raises:
        BadRequest: names the column and its type.
    """
    match kind:
        case types.ArrayType():
            check_packed_type(name, kind.elementType, data_format)
        case types.MapType():
            _check_map_key(name, kind, data_format)
            check_packed_type(name, kind.keyType, data_format)
            check_packed_type(name, kind.valueType, data_format)
        case types.StructType():
            for field in kind.fields:
                check_packed_type(f"{name}.{field.name}", field.dataType, data_format)
        case _ if not isinstance(kind, _PACKED_TYPES):
            raise BadRequest(
                f"column {name!r} has type {kind.simpleString()}, which option 'dataFormat' "
                "cannot pack. Hint: cast it to a string or a number first; convert a variant "
                "with to_json()."
            )
        case _:
            pass


def _check_map_key(name: str, kind: types.MapType, data_format: str | None) -> None:
    if isinstance(kind.keyType, types.NullType):
        raise BadRequest(
            f"column {name!r} has type {kind.simpleString()}, but a packed map cannot have "
            "null keys. Hint: cast it to a map with keys of another type."
        )
    is_nested = isinstance(kind.keyType, types.StructType | types.ArrayType)
    is_text = isinstance(kind.keyType, types.StringType | types.CharType | types.VarcharType)
    if (data_format in ("msgpack", "protobuf") and is_nested) or (
        data_format == "avro" and not is_text
    ):
        raise BadRequest(
            f"column {name!r} has type {kind.simpleString()}, but dataFormat={data_format} does "
            "not support keys of this type. Hint: use dataFormat=json, or cast the keys to "
            "strings."
        )


_PERMISSIVE_REASON = (
    "mode=PERMISSIVE returns null for a payload that cannot be unpacked. Hint: use "
    ".schema(df.schema.toNullable()), or omit NOT NULL in DDL; or use mode=FAILFAST or "
    "DROPMALFORMED, which return no nulls for it."
)
DECRYPTION_REASON = (
    "option encryptionKeys returns null for a payload that cannot be decrypted. Hint: use "
    ".schema(df.schema.toNullable()), or omit NOT NULL in DDL."
)


def check_nullable(
    name: str, kind: types.DataType, reason: str = _PERMISSIVE_REASON, *, nullable: bool
) -> None:
    """Reject a column that is declared NOT NULL, at any nesting level.

    A read that may return nulls needs this check. Spark trusts the declaration NOT NULL: it answers
    `IS NULL` without reading the column, and would read a null as a zero.

    Raises:
        BadRequest: the error names the column.
    """
    if not nullable:
        raise BadRequest(
            f"column {name!r} is NOT NULL in the schema (nullable=False, "
            f"containsNull=False), but {reason}"
        )
    match kind:
        case types.ArrayType():
            check_nullable(f"{name}.element", kind.elementType, reason, nullable=kind.containsNull)
        case types.MapType():
            check_nullable(f"{name}.key", kind.keyType, reason, nullable=True)
            check_nullable(f"{name}.value", kind.valueType, reason, nullable=kind.valueContainsNull)
        case types.StructType():
            for field in kind.fields:
                check_nullable(
                    f"{name}.{field.name}", field.dataType, reason, nullable=field.nullable
                )
        case _:
            pass


# ---------------------------------------------------------------------------------------------
# Columns to payloads


def pack_rows(
    columns: Sequence[pa.Array],
    names: Sequence[str],
    data_format: str,
    encode: Callable[[dict[str, Any]], bytes] | None = None,
) -> pa.Array:
    """Pack each row into one binary payload, in which the column names are the keys.

    Args:
        columns: arrays of equal length.
        names: the names of the columns.
        data_format: a value of option `dataFormat`.
        encode: returns the payload for a row; required for Avro and Protobuf.

    Raises:
        BadRequest: the format cannot represent a value, or a string is not valid UTF-8. The message
            names the column.
    """
    value_columns = [
        _to_values_or_raise(name, column, data_format)
        for name, column in zip(names, columns, strict=True)
    ]
    rows = zip(*value_columns, strict=True)
    if encode is not None:
        payloads = [encode(dict(zip(names, row, strict=True))) for row in rows]
    elif data_format == "msgpack":
        pack_one = msgpack.Packer(use_bin_type=True).pack
        payloads = [pack_one(dict(zip(names, row, strict=True))) for row in rows]
    else:
        try:
            payloads = [to_json(dict(zip(names, row, strict=True))) for row in rows]
        except ValueError as error:
            raise BadRequest(
                f"a row cannot be packed with option dataFormat=json: {error}. Hint: "
                "dataFormat=msgpack may support it."
            ) from None
    return pa.array(payloads, pa.binary())


def _to_values_or_raise(name: str, column: pa.Array, data_format: str) -> list[Any]:
    try:
        return _to_values(column, data_format)
    except (
        ValueError,
        OverflowError,
        pa.ArrowException,
    ) as error:  # a Spark string may contain invalid UTF-8
        raise BadRequest(
            f"column {name!r} cannot be packed ({error}). Hint: cast strings that are not valid "
            "UTF-8 to binary."
        ) from None


def _to_values(column: pa.Array, data_format: str) -> list[Any]:
    if data_format in TYPED_FORMATS:
        return _to_typed_values(column.cast(nested_type(column.type, _type_in_utc)))
    for target in (nested_type(column.type, _type_in_utc), plain_type(column.type, data_format)):
        if target != column.type:
            column = column.cast(target)
    is_flat = not pa.types.is_nested(column.type) and not pa.types.is_null(column.type)
    if is_flat and not _needs_json_conversion(column.type, data_format):
        return _flat_values(column)
    if data_format == "msgpack":
        converted: list[Any] = column.to_pylist(maps_as_pydicts="strict")
        return converted
    convert = _json_converter(column.type)
    values = column.to_pylist()
    return values if convert is None else [convert(value) for value in values]


def _to_typed_values(column: pa.Array) -> list[Any]:
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_string(kind):
        return _flat_values(column)
    values: list[Any] = column.to_pylist(maps_as_pydicts="strict")
    return values


def _needs_json_conversion(kind: pa.DataType, data_format: str) -> bool:
    return data_format == "json" and _json_converter(kind) is not None


def _flat_values(column: pa.Array) -> list[Any]:
    """Return the values of a flat column through NumPy: four times faster than `to_pylist`."""
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        flat_values: list[Any] = column.to_numpy(zero_copy_only=False).tolist()
        return flat_values
    if not column.null_count:
        numbers: list[Any] = column.to_numpy().tolist()
        return numbers
    # With nulls, NumPy turns integers into floats. So nulls are replaced, and restored below.
    values: list[Any] = column.fill_null(0).to_numpy().tolist()
    for row in np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False)).tolist():
        values[row] = None
    return values


def _type_in_utc(kind: pa.DataType) -> pa.DataType:
    """Return a timestamp type in UTC: old zone offsets have seconds, and texts omit these."""
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return pa.timestamp(kind.unit, "UTC")
    return without_nulls(kind)


def _json_converter(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """Return a function that converts a value of this type for JSON; None if not needed."""
    if is_binary(kind):
        return lambda value: None if value is None else base64.b64encode(value).decode()
    if pa.types.is_list(kind):
        element_converter = _json_converter(kind.value_type)
        if element_converter is not None:
            return lambda value: (
                None if value is None else [element_converter(part) for part in value]
            )
    if pa.types.is_struct(kind):
        parts = {part.name: _json_converter(part.type) for part in kind}
        if any(parts.values()):
            return lambda value: None if value is None else _convert_fields(parts, value)
    if pa.types.is_map(kind):
        key, item = (
            _json_converter(kind.key_type) or _identity,
            _json_converter(kind.item_type) or _identity,
        )
        return lambda value: None if value is None else [[key(k), item(v)] for k, v in value]
    return None


def _convert_fields(
    parts: dict[str, Callable[[Any], Any] | None], value: dict[str, Any]
) -> dict[str, Any]:
    return {name: (parts[name] or _identity)(part) for name, part in value.items()}


def _identity(value: Any) -> Any:  # noqa: ANN401 - any value passes
    return value


def is_case_sensitive() -> bool:
    """Return the session's `spark.sql.caseSensitive`, which Spark passes to tasks."""
    context = TaskContext.get()
    return context is not None and context.getLocalProperty("spark.sql.caseSensitive") == "true"
