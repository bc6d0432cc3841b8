"""Compressed payloads: a serializer around another one, which says in the payload what it did.

    ENTRIES = Zstd(JSON)
    builder.set_transaction_data(entry, ENTRIES)
    ...
    entry = transaction.value(ENTRIES)

The log carries bytes and never looks into them, so how they are packed is between who writes and
who reads, and both find it here. The codec is Arrow's, which every installation has.

    0      1        2             6
    | 0xC1 | 0      | the value's bytes
    | 0xC1 | 1      | n (uint32)  | a zstd frame of n bytes

Rules:
    1. The first two bytes say how the rest is packed; nothing is guessed. 0xC1 begins no msgpack,
       no JSON and no UTF-8, so a payload that was written without this is told as what it is.
    2. What is unpacked is never larger than a transaction may be, whatever a payload claims, and
       that is known before anything is allocated for it.
    3. A payload is compressed where that makes it smaller, and stays plain where it does not.
"""

import struct
from typing import Final, Generic, TypeVar

import pyarrow as pa

from waltz_core import errors
from waltz_core.client.model.serializers import Serializer
from waltz_core.records.record import TRANSACTION_BYTES_MAX

T = TypeVar("T")

MAGIC: Final = 0xC1
PLAIN, ZSTD = 0, 1
_PLAIN_HEAD: Final = bytes((MAGIC, PLAIN))
_ZSTD_HEAD: Final = struct.Struct(">BBI")
LEVEL_MIN, LEVEL_MAX = 1, 22


class Zstd(Generic[T]):
    """A serializer whose bytes are compressed with zstd where that pays.

    Args:
        inner: makes bytes of values, and values of bytes.
        level: 1 is fast, 22 is small; zstd's own default is 3.
        minimum_bytes: what is smaller than this is not worth a try.

    Raises:
        BadRequest: a level that zstd does not have.
    """

    def __init__(self, inner: Serializer[T], *, level: int = 3, minimum_bytes: int = 200) -> None:
        if not LEVEL_MIN <= level <= LEVEL_MAX:
            raise errors.BadRequest(
                f"zstd: expected a level of {LEVEL_MIN} to {LEVEL_MAX}, found {level}"
            )
        self._inner = inner
        self._level = level
        self._minimum_bytes = minimum_bytes

    def serialize(self, value: T) -> bytes:
        """Return the value's bytes, packed.

        Raises:
            TooLarge: the value's bytes are over 4 MiB before they are compressed (rule 2).
        """
        plain = self._inner.serialize(value)
        if len(plain) > TRANSACTION_BYTES_MAX:
            raise errors.TooLarge(
                f"transaction data: expected at most {TRANSACTION_BYTES_MAX} bytes before they are "
                f"compressed, found {len(plain)}"
            )
        if len(plain) >= self._minimum_bytes:
            packed: bytes = self._zstd().compress(plain, asbytes=True)
            if _ZSTD_HEAD.size + len(packed) < len(_PLAIN_HEAD) + len(plain):
                return _ZSTD_HEAD.pack(MAGIC, ZSTD, len(plain)) + packed
        return _PLAIN_HEAD + plain

    def deserialize(self, data: bytes) -> T:
        """Return the value.

        Raises:
            BadFormat: the bytes were not packed by this, or are damaged.
        """
        return self._inner.deserialize(self._unpacked(data))

    def _unpacked(self, data: bytes) -> bytes:
        if len(data) < len(_PLAIN_HEAD) or data[0] != MAGIC or data[1] not in (PLAIN, ZSTD):
            raise errors.BadFormat(
                f"transaction data: expected {MAGIC:#x} and how it is packed, found "
                f"{bytes(data[:2])!r}: it was written without compression.Zstd, or by a later one"
            )
        if data[1] == PLAIN:
            return bytes(data[len(_PLAIN_HEAD) :])
        if len(data) < _ZSTD_HEAD.size:
            raise errors.BadFormat(f"transaction data: a zstd payload of {len(data)} bytes")
        size: int = _ZSTD_HEAD.unpack_from(data)[2]
        if not 0 < size <= TRANSACTION_BYTES_MAX:  # rule 2
            raise errors.BadFormat(
                f"transaction data: expected 1 to {TRANSACTION_BYTES_MAX} bytes, found {size} "
                "said to be compressed"
            )
        try:
            # It fills what it is given exactly, or raises.
            plain: bytes = self._zstd().decompress(
                memoryview(data)[_ZSTD_HEAD.size :], decompressed_size=size, asbytes=True
            )
        except (OSError, ValueError) as error:
            raise errors.BadFormat(f"transaction data: {size} bytes of zstd: {error}") from error
        if len(plain) != size:
            raise errors.BadFormat(f"transaction data: {size} bytes of zstd are {len(plain)}")
        return plain

    def _zstd(self) -> pa.Codec:
        # NB: not kept, as a serializer is sent to other processes; it is made in a microsecond.
        return pa.Codec("zstd", compression_level=self._level)
