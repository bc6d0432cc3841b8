"""Compressed payloads: a serializer around another one, with the encoding stored in the payload.

    ENTRIES = Zstd(JSON)
    builder.set_transaction_data(entry, ENTRIES)
    ...
    entry = transaction.value(ENTRIES)

The log does not interpret payloads, so writers and readers must agree on the encoding: both use
this class. The codec is part of Arrow, which every installation has.

    0      1        2             6
    | 0xC1 | 0      | the value's bytes
    | 0xC1 | 1      | n (uint32)  | a zstd frame that decompresses to n bytes

Rules:
    1. The first two bytes state the encoding of the rest, so readers do not guess. No msgpack, JSON
       or UTF-8 begins with 0xC1. So a payload without these two bytes was written without this
       class.
    2. Decompressed data never exceeds the maximum size of a transaction. If a payload states a
       larger size, it is rejected before memory is allocated.
    3. A payload is compressed only if that makes it smaller.
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
    """A serializer that compresses with zstd where this makes payloads smaller.

    Args:
        inner: the serializer of the uncompressed bytes.
        level: from 1 (fast) to 22 (small); zstd's own default is 3.
        minimum_bytes: smaller payloads are not compressed.

    Raises:
        BadRequest: zstd does not have this level.
    """

    def __init__(self, inner: Serializer[T], *, level: int = 3, minimum_bytes: int = 200) -> None:
        if not LEVEL_MIN <= level <= LEVEL_MAX:
            raise errors.BadRequest(
                f"zstd compression: expected a level from {LEVEL_MIN} to {LEVEL_MAX}, found {level}"
            )
        self._inner = inner
        self._level = level
        self._minimum_bytes = minimum_bytes

    def serialize(self, value: T) -> bytes:
        """Return the bytes of a value, compressed if this makes them smaller.

        Raises:
            TooLarge: the value has over 4 MiB before compression (rule 2).
        """
        uncompressed = self._inner.serialize(value)
        if len(uncompressed) > TRANSACTION_BYTES_MAX:
            raise errors.TooLarge(
                f"transaction data: expected at most {TRANSACTION_BYTES_MAX} bytes before "
                f"compression, found {len(uncompressed)}"
            )
        if len(uncompressed) >= self._minimum_bytes:
            packed: bytes = self._zstd().compress(uncompressed, asbytes=True)
            if _ZSTD_HEAD.size + len(packed) < len(_PLAIN_HEAD) + len(uncompressed):
                return _ZSTD_HEAD.pack(MAGIC, ZSTD, len(uncompressed)) + packed
        return _PLAIN_HEAD + uncompressed

    def deserialize(self, data: bytes) -> T:
        """Decompress the data and return its value.

        Raises:
            BadFormat: the bytes were not written by this class, or are damaged.
        """
        return self._inner.deserialize(self._decompress(data))

    def _decompress(self, data: bytes) -> bytes:
        if len(data) < len(_PLAIN_HEAD) or data[0] != MAGIC or data[1] not in (PLAIN, ZSTD):
            raise errors.BadFormat(
                f"transaction data: expected {MAGIC:#x} and a byte 0 (plain) or 1 (zstd) at its "
                f"start, found {bytes(data[:2])!r}. The data was written without "
                "compression.Zstd, or by a later version"
            )
        if data[1] == PLAIN:
            return bytes(data[len(_PLAIN_HEAD) :])
        if len(data) < _ZSTD_HEAD.size:
            raise errors.BadFormat(
                f"transaction data: the zstd payload of {len(data)} bytes is incomplete"
            )
        size: int = _ZSTD_HEAD.unpack_from(data)[2]
        if not 0 < size <= TRANSACTION_BYTES_MAX:  # rule 2
            raise errors.BadFormat(
                "transaction data: zstd payload: expected an uncompressed size of 1 to "
                f"{TRANSACTION_BYTES_MAX} bytes, found {size}"
            )
        try:
            # `decompress` returns exactly `size` bytes, or raises.
            uncompressed: bytes = self._zstd().decompress(
                memoryview(data)[_ZSTD_HEAD.size :], decompressed_size=size, asbytes=True
            )
        except (OSError, ValueError) as error:
            raise errors.BadFormat(
                f"transaction data: the zstd payload of {size} bytes cannot be decompressed: "
                f"{error}"
            ) from error
        if len(uncompressed) != size:
            raise errors.BadFormat(
                f"transaction data: zstd payload: expected {size} bytes after "
                f"decompression, found {len(uncompressed)}"
            )
        return uncompressed

    def _zstd(self) -> pa.Codec:
        # NB: the codec is not stored, because serializers are sent to other processes. Creating a
        # codec takes 1 us.
        return pa.Codec("zstd", compression_level=self._level)
