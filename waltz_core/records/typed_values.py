"""Builds Arrow arrays of dates, times, timestamps and UUIDs from Avro and Protobuf payloads.

In msgpack and JSON, these values are numbers and texts. In Avro and Protobuf, each value has a
declared type, so a column accepts only values of its own type.

Rules:
    1. A timestamp with a time zone fits only a column with a time zone. A timestamp without a time
       zone fits only a column without a time zone.
    2. A column of texts also accepts UUIDs.
"""

from collections.abc import Callable
from datetime import date, datetime, time
from typing import Any
from uuid import UUID

import pyarrow as pa

TYPED_FORMATS = ("avro", "protobuf")
VALUE_NAMES: dict[type, str] = {
    date: "date",
    datetime: "timestamp",
    time: "time",
    UUID: "UUID",
}

CheckTypes = Callable[..., list[Any]]


def typed_builder(
    kind: pa.DataType, check_types: CheckTypes
) -> Callable[[list[Any]], pa.Array] | None:
    """Return the function that builds an array of a type; None if no special function is needed.

    Args:
        kind: the type of the column.
        check_types: returns the given values unchanged; raises TypeError if a value has none of the
            wanted types.
    """
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return lambda values: pa.array(_texts(check_types(values, str, UUID)), kind)
    if pa.types.is_date(kind):
        return lambda values: pa.array(check_types(values, date), pa.date32()).cast(kind)
    if pa.types.is_timestamp(kind):
        return lambda values: _timestamps(check_types(values, datetime), kind)
    if pa.types.is_time(kind):
        return lambda values: pa.array(check_types(values, time), pa.time64("us")).cast(kind)
    return None


def plain_value(value: object) -> str:
    """Return a text for a value that msgpack cannot represent; equal values have equal texts."""
    return f"{type(value).__name__}:{value}"


def _texts(values: list[Any]) -> list[Any]:
    return [str(value) if type(value) is UUID else value for value in values]


def _timestamps(values: list[Any], kind: pa.DataType) -> pa.Array:
    has_zone = kind.tz is not None
    for value in values:
        if value is not None and (value.tzinfo is not None) is not has_zone:  # rule 1
            raise TypeError(
                f"expected a timestamp with{'' if has_zone else 'out'} a time zone, found one "
                f"with{'out' if has_zone else ''}"
            )
    return pa.array(values, pa.timestamp("us", kind.tz)).cast(kind)
