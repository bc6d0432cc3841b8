"""Decodes untrusted MessagePack to JSON text, with limits on depth and size.

The package msgpack always decodes a complete payload. This reader stops when it has enough text, so
that a large payload does not delay the gateway.

JSON has no form for some values of MessagePack. They become objects with a key that begins with
"$":

    bytes                                    {"$bytes": "<base64>"}
    a timestamp (extension -1)               {"$timestamp": "2026-11-30T10:00:00Z"}
    another extension                        {"$extension": 5, "$bytes": "<base64>"}
    NaN and infinities                       {"$float": "NaN"}
    a map with other keys than texts, or     {"$map": [[key, value], ...]}
    with a repeated key

Rules:
    1. Only a payload that is one map or array is recognized as MessagePack. Single numbers and
       texts are not recognized, because most bytes are valid small integers.
    2. Before a length is used, it is compared with the number of remaining bytes. Each element
       takes at least one byte, so a short payload cannot claim a large number of elements.
    3. The reader stops when the text has reached its limit. It does not check the bytes after
       this position.
    4. At most `DEPTH_MAX` levels are nested. The key of a map must not be a map or an array.
"""

import base64
import math
import struct
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from waltz_core.records import strict_json

DEPTH_MAX: Final = 64

_NIL, _FALSE, _TRUE = 0xC0, 0xC2, 0xC3
_TIMESTAMP_TYPE: Final = -1
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_NANOSECONDS: Final = 1_000_000_000
_NUMBERS: Final = {
    0xCA: struct.Struct(">f"),
    0xCB: struct.Struct(">d"),
    0xCC: struct.Struct(">B"),
    0xCD: struct.Struct(">H"),
    0xCE: struct.Struct(">I"),
    0xCF: struct.Struct(">Q"),
    0xD0: struct.Struct(">b"),
    0xD1: struct.Struct(">h"),
    0xD2: struct.Struct(">i"),
    0xD3: struct.Struct(">q"),
}
# For each code, the size in bytes of the length that follows the code.
_BYTES_CODES: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4}
_EXTENSION_CODES: Final = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_FIXED_EXTENSIONS: Final = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}  # code: length
_TEXT_CODES: Final = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_ARRAY_CODES: Final = {0xDC: 2, 0xDD: 4}
_MAP_CODES: Final = {0xDE: 2, 0xDF: 4}


class _NotMessagePack(ValueError):
    """The bytes are not MessagePack, or exceed a limit."""


def message_pack_to_json(data: bytes, *, characters_max: int) -> tuple[str, bool] | None:
    """Return a payload as JSON text, and whether the text lacks values at its end (rule 3).

    The text may be longer than `characters_max`, because it may contain escaped characters. Returns
    None if the payload is not one map or array in MessagePack (rule 1).
    """
    if not data or not _is_container(data[0]):
        return None
    reader = _Reader(data, characters_max)
    try:
        value = reader.read_value(0)
    except _NotMessagePack:
        return None
    if not reader.is_full() and reader.offset != len(data):
        return None
    return strict_json.to_json(value).decode(), reader.is_full()


def _is_container(code: int) -> bool:
    return 0x80 <= code <= 0x9F or code in _ARRAY_CODES or code in _MAP_CODES


class _Reader:
    """Reads values from `offset` on, until the text has reached its limit."""

    def __init__(self, data: bytes, characters_max: int) -> None:
        self._data = data
        self._characters_left = characters_max
        self.offset = 0

    def is_full(self) -> bool:
        """Whether the text has reached its limit (rule 3)."""
        return self._characters_left <= 0

    def read_value(self, depth: int) -> Any:  # noqa: ANN401 - any JSON value
        """Return the next value; if the text is full, a map or array lacks its last values."""
        code = self._take(1)[0]
        self._characters_left -= 2  # a short value and a comma
        if _is_container(code):
            return self._read_container(code, depth)
        if code <= 0x7F:
            return code
        if code >= 0xE0:
            return code - 0x100
        if 0xA0 <= code <= 0xBF:
            return self._read_text(code & 0x1F)
        if code in _TEXT_CODES:
            return self._read_text(self._read_length(_TEXT_CODES[code]))
        return self._read_other(code)

    def _read_other(self, code: int) -> Any:  # noqa: ANN401
        if code in (_NIL, _FALSE, _TRUE):
            return None if code == _NIL else code == _TRUE
        if code in _NUMBERS:
            return self._read_number(_NUMBERS[code])
        if code in _BYTES_CODES:
            return {"$bytes": self._read_base64(self._read_length(_BYTES_CODES[code]))}
        if code in _EXTENSION_CODES:
            return self._read_extension(self._read_length(_EXTENSION_CODES[code]))
        if code in _FIXED_EXTENSIONS:
            return self._read_extension(_FIXED_EXTENSIONS[code])
        raise _NotMessagePack(f"found the invalid code {code:#x}")

    # --- containers

    def _read_container(self, code: int, depth: int) -> Any:  # noqa: ANN401
        if depth >= DEPTH_MAX:  # rule 4
            raise _NotMessagePack(f"expected at most {DEPTH_MAX} levels of containers, found more")
        is_map = code <= 0x8F or code in _MAP_CODES
        if code <= 0x9F:
            count = code & 0x0F
        else:
            count = self._read_length(_MAP_CODES[code] if is_map else _ARRAY_CODES[code])
        if count * (2 if is_map else 1) > len(self._data) - self.offset:  # rule 2
            raise _NotMessagePack(f"the payload is too short for a container of {count} elements")
        return self._read_map(count, depth) if is_map else self._read_array(count, depth)

    def _read_array(self, count: int, depth: int) -> list[Any]:
        values: list[Any] = []
        while len(values) < count and not self.is_full():
            values.append(self.read_value(depth + 1))
        return values

    def _read_map(self, count: int, depth: int) -> dict[str, Any]:
        pairs: list[tuple[Any, Any]] = []
        while len(pairs) < count and not self.is_full():
            if self.offset < len(self._data) and _is_container(self._data[self.offset]):  # rule 4
                raise _NotMessagePack(
                    "expected a number or a text as key of a map, found a container"
                )
            key = self.read_value(depth + 1)
            if self.is_full():
                break
            pairs.append((key, self.read_value(depth + 1)))
        if all(isinstance(key, str) for key, _ in pairs):
            value_by_key = dict(pairs)
            if len(value_by_key) == len(pairs):
                return value_by_key
        return {"$map": [list(pair) for pair in pairs]}

    # --- flat values

    def _read_number(self, layout: struct.Struct) -> Any:  # noqa: ANN401
        (number,) = layout.unpack(self._take(layout.size))
        if isinstance(number, int) or math.isfinite(number):
            return number
        if math.isnan(number):
            return {"$float": "NaN"}
        return {"$float": "Infinity" if number > 0 else "-Infinity"}

    def _read_text(self, length: int) -> str:
        part, is_cut = self._take_displayed_part(length)
        try:
            return part.decode("utf-8")
        except UnicodeDecodeError as error:
            # The limit may be in the middle of a character, which has up to 4 bytes.
            if is_cut and error.reason == "unexpected end of data":
                return part[: error.start].decode("utf-8")
            raise _NotMessagePack("found a text that is not UTF-8") from error

    def _read_base64(self, length: int) -> str:
        return base64.b64encode(self._take_displayed_part(length)[0]).decode("ascii")

    def _read_extension(self, length: int) -> dict[str, Any]:
        kind = int.from_bytes(self._take(1), "big", signed=True)
        if kind == _TIMESTAMP_TYPE and length in (4, 8, 12):
            part = self._take(length)
            time_text = _iso_timestamp(part)
            if time_text is not None:
                return {"$timestamp": time_text}
            return {"$extension": kind, "$bytes": base64.b64encode(part).decode("ascii")}
        return {"$extension": kind, "$bytes": self._read_base64(length)}

    def _read_length(self, size: int) -> int:
        return int.from_bytes(self._take(size), "big")

    def _take_displayed_part(self, length: int) -> tuple[bytes, bool]:
        """Consume bytes of a text or of binary data; return the part that fits into the text."""
        self._check_length(length)
        part = self._data[self.offset : self.offset + min(length, max(0, self._characters_left))]
        self.offset += length
        self._characters_left -= length
        return part, len(part) < length

    def _take(self, length: int) -> bytes:
        self._check_length(length)
        part = self._data[self.offset : self.offset + length]
        self.offset += length
        return part

    def _check_length(self, length: int) -> None:
        if length > len(self._data) - self.offset:  # rule 2
            raise _NotMessagePack("the payload is truncated")


def _iso_timestamp(part: bytes) -> str | None:
    """Return the time of a timestamp of 4, 8 or 12 bytes; None if its text would not be valid."""
    if len(part) == 12:
        nanoseconds = int.from_bytes(part[:4], "big")
        seconds = int.from_bytes(part[4:], "big", signed=True)
    else:
        number = int.from_bytes(part, "big")
        nanoseconds, seconds = (0, number) if len(part) == 4 else divmod(number, 1 << 34)
    if nanoseconds >= _NANOSECONDS:
        return None
    try:
        time = _EPOCH + timedelta(seconds=seconds)
    except OverflowError:
        return None
    fraction = f".{nanoseconds:09d}".rstrip("0") if nanoseconds else ""
    return f"{time:%Y-%m-%dT%H:%M:%S}{fraction}Z"
