"""Confluent's wire format: the bytes before an Avro or Protobuf payload, which identify its schema.

    0      1                       5
    | 0x00 | schema ID (uint32 BE) | Avro: the value
    | 0x00 | schema ID (uint32 BE) | Protobuf: message indexes | the message

Source: "Wire format" of Confluent's page about serializers and deserializers.

Rules:
    1. The message indexes are the path to a message type in its file. The first index selects a
       type of the file, and each following index selects a type that is nested in the previous one.
       The path is encoded as the number of indexes, followed by the indexes; all are zigzag varints
       of Protobuf.
    2. The path [0], the first type of the file, is written as the single byte 0. Readers also
       accept its long form.
"""

import struct
from collections.abc import Sequence
from typing import Final

from waltz_core.errors import BadFormat

MAGIC_BYTE: Final = 0
SCHEMA_ID_MAX: Final = (1 << 31) - 1
_PREFIX: Final = struct.Struct(">BI")
# protoc rejects types that are nested more deeply. The limit also bounds the work for a payload.
_PATH_STEPS_MAX: Final = 32
_VARINT_BYTES_MAX: Final = 5

FIRST_MESSAGE_PATH: Final = (0,)


def prefix_of(schema_id: int) -> bytes:
    """Return the 5 bytes that identify a schema."""
    assert 0 <= schema_id <= SCHEMA_ID_MAX
    return _PREFIX.pack(MAGIC_BYTE, schema_id)


def split_prefix(data: bytes) -> tuple[int, bytes]:
    """Split a payload into its schema ID and the bytes after the prefix.

    Raises:
        BadFormat: the payload does not begin with this format.
    """
    if len(data) < _PREFIX.size:
        raise BadFormat(
            f"expected Confluent's wire format, which has at least {_PREFIX.size} bytes, found "
            f"{len(data)}"
        )
    magic, schema_id = _PREFIX.unpack_from(data)
    if magic != MAGIC_BYTE:
        raise BadFormat(
            f"expected Confluent's wire format, which begins with byte 0x00, found {magic:#04x}. "
            "Hint: the payload was written in another format, or is encrypted."
        )
    if schema_id > SCHEMA_ID_MAX:
        raise BadFormat(f"expected a schema ID up to {SCHEMA_ID_MAX}, found {schema_id}")
    return schema_id, data[_PREFIX.size :]


def encode_message_indexes(path: Sequence[int]) -> bytes:
    """Encode the path to a message type (rules 1 and 2)."""
    assert path
    if tuple(path) == FIRST_MESSAGE_PATH:
        return b"\0"
    return b"".join(_encode_varint(number << 1) for number in (len(path), *path))


def split_message_indexes(body: bytes) -> tuple[tuple[int, ...], bytes]:
    """Split bytes into the path to a message type and the bytes of the message.

    Raises:
        BadFormat: the indexes are damaged.
    """
    count, offset = _read_varint(body, 0)
    if count == 0:
        return FIRST_MESSAGE_PATH, body[offset:]
    if not 0 < count <= _PATH_STEPS_MAX:
        raise BadFormat(f"expected 1 to {_PATH_STEPS_MAX} message indexes, found {count}")
    path = []
    for _ in range(count):
        step, offset = _read_varint(body, offset)
        if step < 0:
            raise BadFormat(f"expected message indexes from 0, found {step}")
        path.append(step)
    return tuple(path), body[offset:]


def _encode_varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _read_varint(body: bytes, offset: int) -> tuple[int, int]:
    """Decode the zigzag varint at an offset; return it, and the offset after it."""
    value = 0
    for byte_index in range(_VARINT_BYTES_MAX):
        if offset + byte_index >= len(body):
            raise BadFormat("the message indexes are truncated")
        byte = body[offset + byte_index]
        value |= (byte & 0x7F) << (7 * byte_index)
        if not byte & 0x80:
            return (value >> 1) ^ -(value & 1), offset + byte_index + 1
    raise BadFormat(f"a message index has over {_VARINT_BYTES_MAX} bytes")
