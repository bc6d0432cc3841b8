"""Declares a structure of bytes as a list of named fields, from which its `struct` is built.

The tables of docs/design/disk-format.md are generated from these declarations.

Rules:
    1. All integers are big-endian.
    2. `struct` packs the fields in their order, without the CRC: the caller adds it.
"""

import struct
from typing import Final, NamedTuple


class Field(NamedTuple):
    """One field; `code` is that of the `struct` module, such as "q" or "16s"."""

    name: str
    code: str
    note: str = ""


class FieldOffset(NamedTuple):
    """A field and where it is in its structure."""

    offset: int
    size_bytes: int
    field: Field


_ORDER: Final = ">"
_CRC: Final = Field("CRC-32", "I", "of all bytes before it")


class ByteLayout:
    """Fields back to back; with `has_crc` a CRC-32 follows them."""

    def __init__(self, *fields: Field, has_crc: bool = False) -> None:
        self.struct = struct.Struct(_ORDER + "".join(each.code for each in fields))
        self.fields = (*fields, _CRC) if has_crc else fields
        self.size_bytes = sum(_size_bytes(each) for each in self.fields)

    def places(self, start: int = 0) -> list[FieldOffset]:
        """Return the fields with their offsets; the first one is at `start`."""
        found = []
        for each in self.fields:
            size_bytes = _size_bytes(each)
            found.append(FieldOffset(start, size_bytes, each))
            start += size_bytes
        return found


def _size_bytes(field: Field) -> int:
    return struct.calcsize(_ORDER + field.code)
