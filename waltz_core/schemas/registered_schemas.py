"""Schemas as a schema registry returns them."""

from enum import Enum
from typing import NamedTuple


class SchemaType(Enum):
    """The kind of a schema; the values are the names in the registry's API."""

    AVRO = "AVRO"
    PROTOBUF = "PROTOBUF"


class NamedSchema(NamedTuple):
    """A schema to which another schema refers by name."""

    name: str
    text: str


class RegisteredSchema(NamedTuple):
    """A schema with its ID, and its references: each before the schemas that refer to it.

    `text` is JSON for Avro, and base64 of a serialized FileDescriptorProto for Protobuf.
    """

    schema_id: int
    kind: SchemaType
    text: str
    references: tuple[NamedSchema, ...] = ()
