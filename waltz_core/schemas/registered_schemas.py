"""Schemas as a schema registry has them."""

from enum import Enum
from typing import NamedTuple


class SchemaType(Enum):
    """The kind of a schema, with the registry's names."""

    AVRO = "AVRO"
    PROTOBUF = "PROTOBUF"


class NamedSchema(NamedTuple):
    """A schema to which another one refers, by a name."""

    name: str
    text: str


class RegisteredSchema(NamedTuple):
    """A schema with its ID, and the schemas to which it refers: each one before its users.

    `text` is JSON for Avro, and base64 of a serialized FileDescriptorProto for Protobuf.
    """

    schema_id: int
    kind: SchemaType
    text: str
    references: tuple[NamedSchema, ...] = ()
