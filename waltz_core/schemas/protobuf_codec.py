"""Encodes and decodes Protobuf with one schema; the only file that imports google.protobuf.

Rules:
    1. A schema is a serialized descriptor of a file. The registry compiles this descriptor from the
       source. Each codec has its own descriptor pool, because two schemas may have types with the
       same name.
    2. A payload names the message type by its path in the file (`schema_prefix.py`).
    3. The parser limits the depth of messages to 100, and memory to the size of the payload.
       `protobuf_values.py` limits the number of fields.
    4. The registry does not store the files that each compiler contains: the well-known types, and
       some files of google.type and Confluent. `_BUILT_IN_FILES` contains these files. In
       `_BUILT_IN_FILES`, Confluent's meta.proto is empty, because this file declares only options,
       and no code here reads options.
"""

import base64
import binascii
from typing import Any, Final, NamedTuple

from waltz_core.config.settings import first_names_text
from waltz_core.errors import BadConfig, BadFormat, BadRequest
from waltz_core.schemas.protobuf_values import MessageBuilder, MessageReader, MessageTypes
from waltz_core.schemas.registered_schemas import RegisteredSchema
from waltz_core.schemas.schema_prefix import encode_message_indexes, split_message_indexes

try:
    from google.protobuf import (
        any_pb2,
        api_pb2,
        descriptor_pb2,
        descriptor_pool,
        duration_pb2,
        empty_pb2,
        field_mask_pb2,
        message_factory,
        source_context_pb2,
        struct_pb2,
        timestamp_pb2,
        type_pb2,
        wrappers_pb2,
    )
    from google.protobuf.message import DecodeError, EncodeError
except ImportError as error:
    raise BadConfig(
        f"Protobuf needs the package protobuf: {error}. Hint: run "
        "pip install 'waltz-spark[protobuf]'."
    ) from error

_WELL_KNOWN_MODULES: Final = (
    any_pb2,
    api_pb2,
    descriptor_pb2,
    duration_pb2,
    empty_pb2,
    field_mask_pb2,
    source_context_pb2,
    struct_pb2,
    timestamp_pb2,
    type_pb2,
    wrappers_pb2,
)
# The errors that the library raises for a descriptor or a message that is not valid.
_INVALID_ERRORS: Final = (
    DecodeError,
    TypeError,
    ValueError,
    KeyError,
    AttributeError,
    OverflowError,
    RecursionError,
)
_INT32, _UINT32, _BYTES = 5, 13, 12


class _MessageClass(NamedTuple):
    """A message type: the class of its messages, and its path in the file as bytes."""

    message: Any
    indexes: bytes


class ProtobufCodec:
    """Encodes and decodes messages with a schema.

    Args:
        schema: the schema, with the schemas to which it refers.
        message: the full name of the message type to write; None: the first one.

    Raises:
        BadFormat: the schema is not valid.
        BadConfig: the schema has no such message type.
    """

    def __init__(self, schema: RegisteredSchema, message: str | None = None) -> None:
        self._schema_id = schema.schema_id
        self._types = MessageTypes()
        self._classes: dict[tuple[int, ...], _MessageClass] = {}
        self._pool = descriptor_pool.DescriptorPool()
        files = {
            reference.name: _parse_file(reference.text, reference.name)
            for reference in schema.references
        }
        self._file = _parse_file(schema.text, f"schema-{schema.schema_id}.proto")
        try:
            self._add_file(self._file, files, set())
        except _INVALID_ERRORS as error:
            raise BadFormat(f"schema {schema.schema_id}: Protobuf: {error!s:.300}") from None
        self._path_to_write = (0,) if message is None else self._path_of(message)

    def decode(self, body: bytes) -> Any:  # noqa: ANN401 - a value of the schema
        """Decode message indexes and the message after them.

        Raises:
            BadFormat: the bytes are damaged.
        """
        path, data = split_message_indexes(body)
        kind = self._message_class(path)
        try:
            message = kind.message.FromString(data)
            return MessageReader(self._types, len(data)).value(message)
        except _INVALID_ERRORS as error:
            raise BadFormat(f"not a message of the Protobuf schema: {error!s:.300}") from None

    def field_names(self) -> tuple[str, ...]:
        """Return the names of the fields in the message type to write."""
        return tuple(
            part.name for part in self._message_class(self._path_to_write).message.DESCRIPTOR.fields
        )

    def encode(self, value: Any) -> bytes:  # noqa: ANN401
        """Encode a value as message indexes and a message.

        Raises:
            BadRequest: the value does not fit the schema.
        """
        kind = self._message_class(self._path_to_write)
        type_name = getattr(getattr(value, "DESCRIPTOR", None), "full_name", None)
        try:
            if type_name is not None:
                if type_name != kind.message.DESCRIPTOR.full_name:
                    raise TypeError(
                        f"expected a message of type {kind.message.DESCRIPTOR.full_name}, found "
                        f"one of type {type_name}"
                    )
                data = value.SerializeToString(deterministic=True)
            else:
                message = kind.message()
                MessageBuilder(self._types).fill(message, value)
                data = message.SerializeToString(deterministic=True)
        except (*_INVALID_ERRORS, EncodeError) as error:
            raise BadRequest(f"a value does not fit the Protobuf schema: {error}") from None
        return kind.indexes + bytes(data)

    def _add_file(self, file: Any, files: dict[str, Any], added_names: set[str]) -> None:  # noqa: ANN401
        """Add a file to the pool, after the files that it imports."""
        if file.name in added_names:
            return
        added_names.add(file.name)
        for name in file.dependency:
            imported = files.get(name) or _BUILT_IN_FILES.get(name)
            if imported is not None:  # otherwise the pool raises an error that names the file
                self._add_file(imported, files, added_names)
        self._pool.AddSerializedFile(file.SerializeToString())

    def _message_class(self, path: tuple[int, ...]) -> _MessageClass:
        message_class = self._classes.get(path)
        if message_class is None:
            message_class = self._classes[path] = _MessageClass(
                self._class_of(path), encode_message_indexes(path)
            )
        return message_class

    def _class_of(self, path: tuple[int, ...]) -> Any:  # noqa: ANN401 - a class of messages
        names = [self._file.package] if self._file.package else []
        types = self._file.message_type
        for step in path:
            if step >= len(types):
                raise BadFormat(
                    f"schema {self._schema_id} has no message type with the indexes {list(path)}"
                )
            names.append(types[step].name)
            types = types[step].nested_type
        kind = self._pool.FindMessageTypeByName(".".join(names))
        return message_factory.GetMessageClass(kind)

    def _path_of(self, name: str) -> tuple[int, ...]:
        """Return the path to a message type in the file; raises BadConfig if it does not exist."""
        prefix = f"{self._file.package}." if self._file.package else ""
        waiting: list[tuple[str, Any, tuple[int, ...]]] = [
            (prefix, message_type, (index,))
            for index, message_type in enumerate(self._file.message_type)
        ]
        known_names = []
        while waiting:
            prefix, kind, path = waiting.pop()
            full_name = prefix + kind.name
            if full_name == name:
                return path
            known_names.append(full_name)
            waiting += [
                (f"{full_name}.", message_type, (*path, index))
                for index, message_type in enumerate(kind.nested_type)
            ]
        raise BadConfig(
            f"schema {self._schema_id} has no message type {name!r}; it has "
            f"{first_names_text(sorted(known_names), 10)}"
        )


def _parse_file(text: str, name: str) -> Any:  # noqa: ANN401 - a descriptor
    """Parse the descriptor of a file, and set the name by which other files import it."""
    try:
        file = descriptor_pb2.FileDescriptorProto.FromString(base64.b64decode(text, validate=True))
    except (DecodeError, binascii.Error, ValueError) as error:
        raise BadFormat(
            f"{name}: expected a serialized descriptor, which the schema registry returns for "
            f"format=serialized, found something else: {error!s:.200}"
        ) from None
    file.name = name
    return file


def _file_descriptor(name: str, message: str, *fields: tuple[str, int]) -> Any:  # noqa: ANN401
    """Return the descriptor of a file with one message type; its fields are numbered from 1."""
    package, _, kind = message.rpartition(".")
    file = descriptor_pb2.FileDescriptorProto(name=name, package=package, syntax="proto3")
    if fields:
        type_ = file.message_type.add(name=kind)
        for number, (field, code) in enumerate(fields, 1):
            type_.field.add(name=field, number=number, type=code, label=1)
    return file


_BUILT_IN_FILES: Final = {
    **{
        module.DESCRIPTOR.name: descriptor_pb2.FileDescriptorProto.FromString(
            module.DESCRIPTOR.serialized_pb
        )
        for module in _WELL_KNOWN_MODULES
    },
    "google/type/date.proto": _file_descriptor(
        "google/type/date.proto",
        "google.type.Date",
        *(("year", _INT32), ("month", _INT32), ("day", _INT32)),
    ),
    "google/type/timeofday.proto": _file_descriptor(
        "google/type/timeofday.proto",
        "google.type.TimeOfDay",
        *(("hours", _INT32), ("minutes", _INT32), ("seconds", _INT32), ("nanos", _INT32)),
    ),
    "confluent/type/decimal.proto": _file_descriptor(
        "confluent/type/decimal.proto",
        "confluent.type.Decimal",
        *(("value", _BYTES), ("precision", _UINT32), ("scale", _INT32)),
    ),
    "confluent/meta.proto": _file_descriptor("confluent/meta.proto", "confluent."),
}
