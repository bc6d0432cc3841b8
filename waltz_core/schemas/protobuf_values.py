"""Converts Protobuf messages to values, and values to messages.

    Protobuf                                value
    bool, integers, float, double           bool, int, float
    string, bytes                           str, bytes
    enum                                    str, the name; int for a number without a name
    repeated, map                           list, dict
    message                                 dict by field name
    google.protobuf.Timestamp               datetime.datetime in UTC
    wrappers, such as ...Int64Value         the value in them
    google.type.Date                        datetime.date
    google.type.TimeOfDay                   datetime.time
    confluent.type.Decimal                  decimal.Decimal

Rules:
    1. If a field has presence (in the sense of Protobuf) and is not set, the dict does not contain
       it. A field without presence has its default, because Protobuf does not store whether it was
       set.
    2. A value is written only if it has the type of its field and nothing is lost
       (`strict_values.py`). A null is an absent field. If the message cannot express that the field
       is absent, the null is an error. A key that is not a field is an error.
    3. A message has at most `VALUES_PER_BYTE` fields for each byte of the payload; `VALUES_MIN`
       fields are always permitted. Without this limit, a small payload could produce a huge value,
       because fields of a nested message may take no bytes.
"""

from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final, NamedTuple

from waltz_core.config.settings import first_names_text
from waltz_core.schemas.strict_values import (
    Converter,
    check_boolean,
    check_text,
    decimal_from_unscaled,
    float_converter,
    integer_converter,
    mismatch_error,
    to_bytes,
    to_unscaled,
    twos_complement_bytes,
)

VALUES_PER_BYTE: Final = 8
VALUES_MIN: Final = 100_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
# The codes of FieldDescriptor.type.
_MESSAGE_CODES: Final = (10, 11)
_ENUM_CODE: Final = 14
_STRING_CODE: Final = 9
_SCALAR_CONVERTERS: Final[dict[int, Converter]] = {
    1: float_converter("<d", "double"),
    2: float_converter("<f", "float"),
    **dict.fromkeys((3, 16, 18), integer_converter("int64", -(1 << 63), (1 << 63) - 1)),
    **dict.fromkeys((5, 15, 17), integer_converter("int32", -(1 << 31), (1 << 31) - 1)),
    **dict.fromkeys((4, 6), integer_converter("uint64", 0, (1 << 64) - 1)),
    **dict.fromkeys((7, 13), integer_converter("uint32", 0, (1 << 32) - 1)),
    8: check_boolean,
    9: check_text,
    12: to_bytes,
}
# Message classes are created at runtime, so mypy has no type for a message or a descriptor.
Message = Any
Descriptor = Any


class MessageField(NamedTuple):
    """One field of a message type."""

    name: str
    has_presence: bool
    is_repeated: bool
    key_converter: Converter | None  # the conversion of keys, if the field is a map
    scalar_converter: Converter | None  # None for messages
    enum_names: dict[int, str] | None  # names by number, if the field is an enum
    message_type: Descriptor | None
    oneof_name: str | None
    is_text: bool


class MessageType(NamedTuple):
    """The fields of a message type by name, and the values of fields that are not set (rule 1)."""

    fields: dict[str, MessageField]
    defaults: dict[str, Any]
    lists: tuple[str, ...]  # the names of repeated fields
    maps: tuple[str, ...]


class MessageTypes:
    """The fields of a schema's message types, computed at the first use of each type."""

    def __init__(self) -> None:
        self._types_by_name: dict[str, MessageType] = {}

    def message_type(self, kind: Descriptor) -> MessageType:
        """Return the fields and defaults of a message type."""
        result = self._types_by_name.get(kind.full_name)
        if result is None:
            result = self._types_by_name[kind.full_name] = _message_type(kind)
        return result


def _message_type(kind: Descriptor) -> MessageType:
    fields = {part.name: _message_field(part) for part in kind.fields}
    fields_without_presence = [
        part for part in kind.fields if not part.has_presence and not part.is_repeated
    ]
    defaults = {
        part.name: _enum_name(fields[part.name], part.default_value)
        for part in fields_without_presence
    }
    repeated = [part for part in fields.values() if part.is_repeated]
    lists = tuple(part.name for part in repeated if part.key_converter is None)
    return MessageType(
        fields,
        defaults,
        lists,
        tuple(part.name for part in repeated if part.key_converter is not None),
    )


def _enum_name(part: MessageField, value: Any) -> Any:  # noqa: ANN401
    return value if part.enum_names is None else part.enum_names.get(value, value)


def _message_field(part: Descriptor) -> MessageField:
    key, item = None, part
    if part.message_type is not None and part.message_type.GetOptions().map_entry:
        key = _SCALAR_CONVERTERS[part.message_type.fields_by_name["key"].type]
        item = part.message_type.fields_by_name["value"]
    names = None
    if item.type == _ENUM_CODE:
        names = {value.number: value.name for value in item.enum_type.values}
    return MessageField(
        part.name,
        part.has_presence,
        part.is_repeated,
        key,
        None
        if item.type in _MESSAGE_CODES
        else _SCALAR_CONVERTERS.get(item.type, _enum_converter(names or {})),
        names,
        item.message_type if item.type in _MESSAGE_CODES else None,
        None if part.containing_oneof is None else part.containing_oneof.name,
        item.type == _STRING_CODE,
    )


def _enum_converter(names: Mapping[int, str]) -> Converter:
    numbers = {name: number for number, name in names.items()}

    def convert(value: Any) -> int:  # noqa: ANN401
        if isinstance(value, str) and value in numbers:
            return numbers[value]
        if not isinstance(value, int) or isinstance(value, bool):
            raise mismatch_error(f"one of {first_names_text(list(numbers), 10)}", value)
        return value

    return convert


# ---------------------------------------------------------------------------------------------
# Reading


class MessageReader:
    """Converts one message to a value; an object can be used once.

    Args:
        types: the fields of message types.
        size: the size of the message in bytes, which limits the fields (rule 3).
    """

    def __init__(self, types: MessageTypes, size: int) -> None:
        self._types = types
        self._limit = self._remaining_fields = VALUES_MIN + VALUES_PER_BYTE * size

    def value(self, message: Message) -> Any:  # noqa: ANN401
        """Convert the message; raises ValueError, OverflowError or AttributeError.

        AttributeError: a message has the name of a well-known type, but other fields.
        """
        special = _SPECIAL_READERS.get(message.DESCRIPTOR.full_name)
        if special is not None:
            return special(message)
        fields, defaults, lists, maps = self._types.message_type(message.DESCRIPTOR)
        self._remaining_fields -= len(fields)
        if self._remaining_fields < 0:
            raise ValueError(
                f"expected at most {self._limit} fields, including unset fields, in the message "
                "and its nested messages, the limit for a payload of this size; found more"
            )
        result = defaults.copy()
        for name in lists:
            result[name] = []
        for name in maps:
            result[name] = {}
        for descriptor, field_value in message.ListFields():
            if not descriptor.is_extension:
                part = fields[descriptor.name]
                result[part.name] = self._field_value(part, field_value)
        return result

    def _field_value(self, part: MessageField, field_value: Any) -> Any:  # noqa: ANN401
        if part.key_converter is not None:
            # For a map of messages, `items` would return copies of the keys only.
            return {key: self._single_value(part, field_value[key]) for key in field_value}
        if part.is_repeated:
            return [self._single_value(part, element) for element in field_value]
        return self._single_value(part, field_value)

    def _single_value(self, part: MessageField, field_value: Any) -> Any:  # noqa: ANN401
        if part.message_type is not None:
            return self.value(field_value)
        if part.is_text and not isinstance(field_value, str):  # proto2
            raise ValueError(f"field {part.name!r} is not valid UTF-8")
        return _enum_name(part, field_value)


def _read_timestamp(message: Message) -> datetime:
    micros, rest_nanos = divmod(message.nanos, 1_000)
    if rest_nanos:
        raise ValueError(f"expected whole microseconds, found {message.nanos} nanoseconds")
    return _EPOCH + timedelta(seconds=message.seconds, microseconds=micros)


def _read_time(message: Message) -> time:
    micros, rest_nanos = divmod(message.nanos, 1_000)
    if rest_nanos:
        raise ValueError(f"expected whole microseconds, found {message.nanos} nanoseconds")
    return time(message.hours, message.minutes, message.seconds, micros)


def _read_decimal(message: Message) -> Decimal:
    return decimal_from_unscaled(
        int.from_bytes(to_bytes(message.value), "big", signed=True), message.scale
    )


_WRAPPED_TYPES: Final = (
    "Double",
    "Float",
    "Int64",
    "UInt64",
    "Int32",
    "UInt32",
    "Bool",
    "String",
    "Bytes",
)
_WRAPPERS: Final = tuple(f"google.protobuf.{name}Value" for name in _WRAPPED_TYPES)
_SPECIAL_READERS: Final[dict[str, Callable[[Message], Any]]] = {
    "google.protobuf.Timestamp": _read_timestamp,
    "google.type.Date": lambda message: date(message.year, message.month, message.day),
    "google.type.TimeOfDay": _read_time,
    "confluent.type.Decimal": _read_decimal,
    **dict.fromkeys(_WRAPPERS, lambda message: message.value),
}


# ---------------------------------------------------------------------------------------------
# Writing


class MessageBuilder:
    """Sets the fields of messages from values (rule 2)."""

    def __init__(self, types: MessageTypes) -> None:
        self._types = types

    def fill(self, message: Message, value: Any) -> None:  # noqa: ANN401
        """Set the fields of an empty message; raises TypeError, ValueError or OverflowError."""
        kind = message.DESCRIPTOR.full_name
        message.SetInParent()  # marks it as present, even if all of its fields are absent
        special = _SPECIAL_WRITERS.get(kind)
        if special is not None:
            special(message, value)
            return
        if kind in _WRAPPERS:
            value = {"value": value}
        if not isinstance(value, dict):
            raise mismatch_error("a map of fields", value)
        fields = self._types.message_type(message.DESCRIPTOR).fields
        unknown_fields = value.keys() - fields.keys()
        if unknown_fields:
            raise ValueError(f"the schema has no field {min(map(str, unknown_fields))!r:.100}")
        field_by_oneof: dict[str, str] = {}
        for name, field_value in value.items():
            part = fields[name]
            if field_value is not None and part.oneof_name is not None:
                other_field = field_by_oneof.setdefault(part.oneof_name, part.name)
                if other_field != part.name:
                    raise ValueError(
                        f"fields {other_field!r} and {part.name!r} are in the same oneof: "
                        "expected a "
                        "value in one of them, found values in both"
                    )
            try:
                self._set_field(message, part, field_value)
            except (TypeError, ValueError, OverflowError) as error:
                raise ValueError(f"field {part.name!r}: {error}") from None

    def _set_field(self, message: Message, part: MessageField, field_value: Any) -> None:  # noqa: ANN401
        if field_value is None:
            if not part.has_presence:
                raise ValueError(
                    "a null cannot be stored in a field without presence. Hint: declare the "
                    "field optional in the schema"
                )
            return
        if part.key_converter is not None:
            self._set_map(getattr(message, part.name), part, part.key_converter, field_value)
        elif part.is_repeated:
            if not isinstance(field_value, list | tuple):
                raise mismatch_error("a list", field_value)
            target = getattr(message, part.name)
            if part.scalar_converter is not None:
                target.extend([part.scalar_converter(element) for element in field_value])
            else:
                for element in field_value:
                    self.fill(target.add(), element)
        elif part.scalar_converter is not None:
            setattr(message, part.name, part.scalar_converter(field_value))
        else:
            self.fill(getattr(message, part.name), field_value)

    def _set_map(self, target: Any, part: MessageField, key: Converter, field_value: Any) -> None:  # noqa: ANN401
        if not isinstance(field_value, dict):
            raise mismatch_error("a map", field_value)
        for name, element in field_value.items():
            if part.scalar_converter is not None:
                target[key(name)] = part.scalar_converter(element)
            else:
                self.fill(target[key(name)], element)


def _write_timestamp(message: Message, value: Any) -> None:  # noqa: ANN401
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise mismatch_error("a timestamp with a time zone", value)
    seconds, micros = divmod((value - _EPOCH) // _MICROSECOND, 1_000_000)
    message.seconds, message.nanos = seconds, micros * 1_000


def _write_date(message: Message, value: Any) -> None:  # noqa: ANN401
    if not isinstance(value, date) or isinstance(value, datetime):
        raise mismatch_error("a date", value)
    message.year, message.month, message.day = value.year, value.month, value.day


def _write_time(message: Message, value: Any) -> None:  # noqa: ANN401
    if not isinstance(value, time) or value.tzinfo is not None:
        raise mismatch_error("a time without a time zone", value)
    message.hours, message.minutes, message.seconds = value.hour, value.minute, value.second
    message.nanos = value.microsecond * 1_000


def _write_decimal(message: Message, value: Any) -> None:  # noqa: ANN401
    if isinstance(value, bool) or not isinstance(value, Decimal | int):
        raise mismatch_error("a decimal", value)
    exponent = Decimal(value).as_tuple().exponent
    scale = max(0, -exponent) if isinstance(exponent, int) else 0
    unscaled = to_unscaled(value, scale)
    message.value, message.scale = twos_complement_bytes(unscaled), scale
    message.precision = max(len(str(abs(unscaled))), scale)


_SPECIAL_WRITERS: Final[dict[str, Callable[[Message, Any], None]]] = {
    "google.protobuf.Timestamp": _write_timestamp,
    "google.type.Date": _write_date,
    "google.type.TimeOfDay": _write_time,
    "confluent.type.Decimal": _write_decimal,
}
