"""Maps the Arrow type of a column to the type of its values in a msgpack or JSON payload.

`unpacking.py` reads payloads. `waltz_spark/rows.py` writes them, and contains the table of types.
"""

from collections.abc import Callable

import pyarrow as pa


def plain_type(kind: pa.DataType, data_format: str) -> pa.DataType:
    """Return the Arrow type of the values that a payload stores for a column of type `kind`.

    A packer supports the Python values of the returned type. A cast from the returned type to
    `kind` is exact.
    """
    return nested_type(kind, lambda flat: _plain_flat(flat, data_format))


def nested_type(kind: pa.DataType, leaf: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """Return the type `kind` in which each flat type is replaced by the result of `leaf`."""
    if pa.types.is_map(kind):
        return pa.map_(nested_type(kind.key_type, leaf), nested_type(kind.item_type, leaf))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, nested_type(field.type, leaf)) for field in kind])
    if pa.types.is_nested(kind):
        return pa.list_(nested_type(kind.value_type, leaf))
    return leaf(kind)


def without_nulls(kind: pa.DataType) -> pa.DataType:
    """Return the type unchanged; return boolean instead of the null type."""
    # NB: pyarrow 26 loses some nulls in a cast from nulls to nulls inside lists.
    return pa.bool_() if pa.types.is_null(kind) else kind


def is_binary(kind: pa.DataType) -> bool:
    """Whether a type is Arrow's binary or large binary type."""
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _plain_flat(kind: pa.DataType, data_format: str) -> pa.DataType:
    if pa.types.is_decimal(kind):
        return pa.string()
    as_text = data_format == "json"
    if pa.types.is_date(kind):
        return pa.string() if as_text else pa.int32()
    if pa.types.is_timestamp(kind):
        return pa.string() if as_text else pa.int64()
    return pa.int64() if pa.types.is_duration(kind) else without_nulls(kind)
