"""The form of each Arrow type in a payload, msgpack or JSON: the type of the values that it stores.

`unpacking.py` reads payloads, `waltz_spark/rows.py` writes them and has the table of types.
"""

from collections.abc import Callable

import pyarrow as pa


def plain_type(kind: pa.DataType, data_format: str) -> pa.DataType:
    """Return the type whose Python values a packer supports; the cast to it is exact."""
    return nested_type(kind, lambda flat: _plain_flat(flat, data_format))


def nested_type(kind: pa.DataType, leaf: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """Return a type with each flat type in it replaced."""
    if pa.types.is_map(kind):
        return pa.map_(nested_type(kind.key_type, leaf), nested_type(kind.item_type, leaf))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(part.name, nested_type(part.type, leaf)) for part in kind])
    if pa.types.is_nested(kind):
        return pa.list_(nested_type(kind.value_type, leaf))
    return leaf(kind)


def without_nulls(kind: pa.DataType) -> pa.DataType:
    """Return the type, boolean for the type of nulls."""
    # NB: casting nulls to nulls inside lists loses some (pyarrow 26).
    return pa.bool_() if pa.types.is_null(kind) else kind


def is_binary(kind: pa.DataType) -> bool:
    """Whether it is a binary type of Arrow."""
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
