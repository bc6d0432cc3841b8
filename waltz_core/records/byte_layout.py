"""Declares a structure of bytes as a list of named fields, and builds its `struct` from the list.

The tables of docs/design/disk-format.md are generated from these declarations.

Rules:
    1. All integers are big-endian.
    2. `struct` packs the fields in their order, without the CRC. The caller appends the CRC.
"""

import struct
from typing import Final, NamedTuple


class Field(NamedTuple):
    """One field of a structure. `code` is a format of the `struct` module, such as "q" or "16s"."""

    name: str
    code: str
    note: str = ""


class FieldOffset(NamedTuple):
    """A field, with its offset and size in its structure, in bytes."""

    offset: int
    size_bytes: int
    field: Field


_ORDER: Final = ">"
_CRC: Final = Field("CRC-32", "I", "of all bytes before it")


class ByteLayout:
    """A structure of fields without gaps; with `has_crc`, a CRC-32 follows the fields."""

    def __init__(self, *fields: Field, has_crc: bool = False) -> None:
        self.struct = struct.Struct(_ORDER + "".join(field.code for field in fields))
        self.fields = (*fields, _CRC) if has_crc else fields
        self.size_bytes = sum(_size_bytes(field) for field in self.fields)

    def field_offsets(self, start: int = 0) -> list[FieldOffset]:
        """Return all fields with their offsets; `start` is the offset of the first field."""
        offsets = []
        for field in self.fields:
            size_bytes = _size_bytes(field)
            offsets.append(FieldOffset(start, size_bytes, field))
            start += size_bytes
        return offsets


def _size_bytes(field: Field) -> int:
    return struct.calcsize(_ORDER + field.code)
