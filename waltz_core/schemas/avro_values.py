"""Converts values for Avro: logical types after reading, and every value before writing.

    Avro                                    value
    null, boolean, int, long                None, bool, int
    float, double                           float
    bytes, fixed                            bytes
    string, enum                            str
    array, map, record                      list, dict, dict
    date                                    datetime.date
    time-millis, time-micros                datetime.time
    timestamp-millis, -micros, -nanos       datetime.datetime with a time zone, UTC when read
    local-timestamp-millis, ...             datetime.datetime without a time zone
    decimal                                 decimal.Decimal
    uuid                                    uuid.UUID

Rules:
    1. A value is written only if it has the type of its field and nothing is lost, except that a
       float is rounded. An integer is also accepted as float and decimal, and a text as uuid.
    2. For a union, the first type that accepts the value is written; `float` is tried last.
    3. If a value lacks a field, the field's default is written, or null if the field has no
       default. A key that is not a field is an error.
"""

from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final, NamedTuple
from uuid import UUID

from waltz_core.config.settings import first_names_text
from waltz_core.schemas.avro_schemas import DEFAULT_KEY, RENAMED_PREFIX, branch_name
from waltz_core.schemas.strict_values import (
    Converter,
    check_boolean,
    check_null,
    check_text,
    decimal_from_unscaled,
    float_converter,
    integer_converter,
    mismatch_error,
    to_bytes,
    to_unscaled,
    twos_complement_bytes,
)

_EPOCH_ORDINAL: Final = date(1970, 1, 1).toordinal()
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LOCAL_EPOCH: Final = datetime(1970, 1, 1)  # noqa: DTZ001 - a local time has no zone
_DAY_MICROS: Final = 86_400_000_000
_MICROSECOND: Final = timedelta(microseconds=1)


# ---------------------------------------------------------------------------------------------
# Reading


def _read_date(value: int, *_: object) -> date:
    return date.fromordinal(value + _EPOCH_ORDINAL)


def _timestamp_reader(nanos: int, epoch: datetime) -> Callable[..., datetime]:
    """Return the conversion from integers; their unit is `nanos` nanoseconds."""

    def convert(value: int, *_: object) -> datetime:
        micros, rest_nanos = divmod(value * nanos, 1_000)
        if rest_nanos:
            raise ValueError(f"expected whole microseconds, found {value} nanoseconds")
        return epoch + timedelta(microseconds=micros)

    return convert


def _time_reader(micros: int) -> Callable[..., time]:
    def convert(value: int, *_: object) -> time:
        if not 0 <= value * micros < _DAY_MICROS:
            raise ValueError(f"expected a time of day, found {value}")
        return (_LOCAL_EPOCH + timedelta(microseconds=value * micros)).time()

    return convert


def _read_decimal(data: bytes, schema: Mapping[str, Any], *_: object) -> Decimal:
    unscaled = int.from_bytes(data, "big", signed=True)
    if abs(unscaled) >= 10 ** schema["precision"]:
        raise ValueError(f"expected a decimal of up to {schema['precision']} digits, found more")
    return decimal_from_unscaled(unscaled, schema["scale"])


_UNIT_NANOS: Final = {"millis": 1_000_000, "micros": 1_000, "nanos": 1}

# Each key is a base type and a renamed logical type. fastavro calls a reader with a value, the
# schema of this value, and further arguments.
LOGICAL_READERS: Final[dict[str, Callable[..., Any]]] = {
    f"int-{RENAMED_PREFIX}date": _read_date,
    f"int-{RENAMED_PREFIX}time-millis": _time_reader(1_000),
    f"long-{RENAMED_PREFIX}time-micros": _time_reader(1),
    **{
        f"long-{RENAMED_PREFIX}timestamp-{unit}": _timestamp_reader(n, _EPOCH)
        for unit, n in _UNIT_NANOS.items()
    },
    **{
        f"long-{RENAMED_PREFIX}local-timestamp-{unit}": _timestamp_reader(n, _LOCAL_EPOCH)
        for unit, n in _UNIT_NANOS.items()
    },
    f"bytes-{RENAMED_PREFIX}decimal": _read_decimal,
    f"fixed-{RENAMED_PREFIX}decimal": _read_decimal,
    f"string-{RENAMED_PREFIX}uuid": lambda value, *_: UUID(value),
    f"fixed-{RENAMED_PREFIX}uuid": lambda value, *_: UUID(bytes=value),
}


# ---------------------------------------------------------------------------------------------
# Writing


class _RecordField(NamedTuple):
    name: str
    convert: Converter
    default: Any  # in the form that fastavro writes
    has_default: bool


class AvroConverter:
    """Creates the functions that convert values to the values that fastavro writes (rules 1 to 3).

    Each function raises ValueError or TypeError for a value that does not fit.

    Args:
        types_by_name: the named types of the schema, by full name.
    """

    def __init__(self, types_by_name: Mapping[str, Any]) -> None:
        self._named_types = types_by_name

    def converter_of(self, schema: Any) -> Converter:  # noqa: ANN401, PLR0911 - a schema; a case each
        """Return the conversion function for a checked schema."""
        if isinstance(schema, str):
            return _PRIMITIVES.get(schema) or self.converter_of(self._named_types[schema])
        if isinstance(schema, list):
            return self._union_converter(schema)
        logical = schema.get("logicalType")
        if logical is not None:
            return _logical_converter(schema, logical.removeprefix(RENAMED_PREFIX))
        match schema["type"]:
            case "record":
                return self._record_converter(schema)
            case "array":
                return _array_converter(self.converter_of(schema["items"]))
            case "map":
                return _map_converter(self.converter_of(schema["values"]))
            case "enum":
                return _enum_converter(frozenset(schema["symbols"]))
            case "fixed":
                return _fixed_converter(schema["size"])
            case name:
                return _PRIMITIVES[name]

    def _record_converter(self, schema: Mapping[str, Any]) -> Converter:
        fields = [
            _RecordField(
                field["name"],
                self.converter_of(field["type"]),
                self._convert_default(field["type"], field[DEFAULT_KEY])
                if DEFAULT_KEY in field
                else None,
                DEFAULT_KEY in field,
            )
            for field in schema["fields"]
        ]
        names = {field.name for field in fields}

        def convert(value: Any) -> dict[str, Any]:  # noqa: ANN401
            if not isinstance(value, dict):
                raise mismatch_error("a map of fields", value)
            if not value.keys() <= names:
                unknown_field = next(key for key in value if key not in names)
                raise ValueError(f"the schema has no field {unknown_field!r:.100}")
            record = {}
            for name, converter, default, has_default in fields:
                if has_default and name not in value:
                    record[name] = default
                    continue
                try:
                    record[name] = converter(value.get(name))
                except (TypeError, ValueError, OverflowError) as error:
                    raise ValueError(f"field {name!r}: {error}") from None
            return record

        return convert

    def _union_converter(self, schema: list[Any]) -> Converter:
        branches = [
            (branch_name(branch_schema), self.converter_of(branch_schema))
            for branch_schema in schema
            if branch_schema != "null"
        ]
        branches.sort(key=lambda branch: branch[0] == "float")  # rule 2
        has_null = "null" in schema

        # For a union, fastavro expects a pair: the name of the chosen type, and the value.
        def convert(value: Any) -> tuple[str, Any]:  # noqa: ANN401
            if value is None and has_null:
                return "null", None
            reasons = []
            for name, converter in branches:
                try:
                    return name, converter(value)
                except (TypeError, ValueError, OverflowError) as error:
                    reasons.append(str(error))
            raise ValueError(", or ".join(reasons[-3:]) or f"expected null, found {value!r:.100}")

        return convert

    def _convert_default(self, schema: Any, default: Any) -> Any:  # noqa: ANN401 - JSON
        """Convert the JSON default of a field to the form that fastavro writes."""
        if isinstance(schema, str) and schema in self._named_types:
            schema = self._named_types[schema]
        if isinstance(schema, list):
            branch = schema[0] if default is not None or "null" not in schema else "null"
            return branch_name(branch), self._convert_default(branch, default)
        kind = schema if isinstance(schema, str) else schema["type"]
        if kind in ("bytes", "fixed"):
            return default.encode("latin-1")
        if kind == "array":
            return [self._convert_default(schema["items"], each) for each in default]
        if kind == "map":
            return {
                key: self._convert_default(schema["values"], each) for key, each in default.items()
            }
        if kind == "record":
            return {
                each["name"]: self._convert_default(
                    each["type"], default.get(each["name"], each.get(DEFAULT_KEY))
                )
                for each in schema["fields"]
            }
        return default


_LONG: Final = integer_converter("long", -(1 << 63), (1 << 63) - 1)
_PRIMITIVES: Final[dict[str, Converter]] = {
    "null": check_null,
    "boolean": check_boolean,
    "int": integer_converter("int", -(1 << 31), (1 << 31) - 1),
    "long": _LONG,
    "float": float_converter("<f", "float"),
    "double": float_converter("<d", "double"),
    "bytes": to_bytes,
    "string": check_text,
}


def _array_converter(item_converter: Converter) -> Converter:
    def convert(value: Any) -> list[Any]:  # noqa: ANN401
        if not isinstance(value, list | tuple):
            raise mismatch_error("a list", value)
        return [item_converter(element) for element in value]

    return convert


def _map_converter(value_converter: Converter) -> Converter:
    def convert(value: Any) -> dict[str, Any]:  # noqa: ANN401
        if not isinstance(value, dict):
            raise mismatch_error("a map", value)
        return {check_text(key): value_converter(element) for key, element in value.items()}

    return convert


def _enum_converter(symbols: frozenset[str]) -> Converter:
    def convert(value: Any) -> str:  # noqa: ANN401
        if not isinstance(value, str) or value not in symbols:
            raise mismatch_error(f"one of {first_names_text(sorted(symbols), 10)}", value)
        return value

    return convert


def _fixed_converter(size: int) -> Converter:
    def convert(value: Any) -> bytes:  # noqa: ANN401
        data = to_bytes(value)
        if len(data) != size:
            raise ValueError(f"expected {size} bytes, found {len(data)}")
        return data

    return convert


def _logical_converter(schema: Mapping[str, Any], name: str) -> Converter:
    unit = name.rpartition("-")[2]
    match name:
        case "date":
            return _write_date
        case "decimal":
            return _decimal_writer(schema)
        case "uuid":
            return _write_uuid_text if schema["type"] == "string" else _write_uuid
        case "time-millis" | "time-micros":
            return _time_writer(_UNIT_NANOS[unit] // 1_000)
        case _:  # a timestamp
            pass
    epoch = _LOCAL_EPOCH if name.startswith("local-") else _EPOCH
    return _timestamp_writer(_UNIT_NANOS[unit], epoch)


def _write_date(value: Any) -> int:  # noqa: ANN401
    if not isinstance(value, date) or isinstance(value, datetime):
        raise mismatch_error("a date", value)
    return value.toordinal() - _EPOCH_ORDINAL


def _time_writer(micros: int) -> Converter:
    def convert(value: Any) -> int:  # noqa: ANN401
        if not isinstance(value, time) or value.tzinfo is not None:
            raise mismatch_error("a time without a time zone", value)
        time_of_day = datetime.combine(_LOCAL_EPOCH, value) - _LOCAL_EPOCH
        return _divide_exactly(time_of_day // _MICROSECOND, micros)

    return convert


def _timestamp_writer(nanos: int, epoch: datetime) -> Converter:
    has_zone = epoch.tzinfo is not None

    def convert(value: Any) -> int:  # noqa: ANN401
        if not isinstance(value, datetime) or (value.tzinfo is not None) is not has_zone:
            raise mismatch_error(f"a timestamp with{'' if has_zone else 'out'} a time zone", value)
        units = _divide_exactly((value - epoch) // _MICROSECOND * 1_000, nanos)
        number: int = _LONG(units)
        return number

    return convert


def _divide_exactly(value: int, unit: int) -> int:
    quotient, remainder = divmod(value, unit)
    if remainder:
        raise ValueError("the value is more precise than the unit of the schema")
    return quotient


def _decimal_writer(schema: Mapping[str, Any]) -> Converter:
    scale, precision = schema["scale"], schema["precision"]
    size = schema.get("size")

    def convert(value: Any) -> bytes:  # noqa: ANN401
        if isinstance(value, bool) or not isinstance(value, Decimal | int):
            raise mismatch_error("a decimal", value)
        unscaled = to_unscaled(value, scale)
        if abs(unscaled) >= 10**precision:
            raise ValueError(f"expected up to {precision} digits, found {value!r:.100}")
        if size is None:
            return twos_complement_bytes(unscaled)
        return unscaled.to_bytes(size, "big", signed=True)

    return convert


def _write_uuid_text(value: Any) -> str:  # noqa: ANN401
    return str(UUID(value) if isinstance(value, str) else _check_uuid(value))


def _write_uuid(value: Any) -> bytes:  # noqa: ANN401
    return (UUID(value) if isinstance(value, str) else _check_uuid(value)).bytes


def _check_uuid(value: Any) -> UUID:  # noqa: ANN401
    if not isinstance(value, UUID):
        raise mismatch_error("a UUID", value)
    return value
