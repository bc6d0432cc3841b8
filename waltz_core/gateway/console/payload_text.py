"""Decodes payloads to text for display.

The log does not store the format of a payload, so this module guesses the format from the bytes. It
tries these formats in this order, and uses the first one that fits:

    empty        no bytes
    encrypted    an envelope of `encryption/envelopes.py`; the text states its key ID and sizes
    compressed   a zstd payload of `compression.py` that cannot be decompressed. A payload that can
                 be decompressed has the format of its content, one of the following
    schema       Confluent's wire format (`schema_prefix.py`) with a schema ID from 1 on; the text
                 is the schema ID, and a dump of the bytes after the prefix
    json         a JSON text in UTF-8; it is returned as it is
    messagepack  one map or array, as JSON text (`message_pack_text.py`)
    text         UTF-8 without control characters, except tabs and line breaks
    binary       all other bytes, as a dump (`hex_dump.py`)

Rules:
    1. Every payload has a text: no payload raises an error.
    2. A text has at most `bytes_max` bytes in UTF-8, and no unpaired surrogate. If the text does
       not show the complete payload, `is_shortened` is true.
    3. `bytes_max` bounds the work, apart from copies of the payload, and from one decompression of
       at most 4 MiB. Neither the schema registry nor encryption keys are used.
    4. A payload over `bytes_max` is never `json`, because a part of a JSON text is not valid JSON.
"""

import codecs
import json
import re
from itertools import accumulate
from typing import Final, NamedTuple, NoReturn

from waltz_core.client.model import compression
from waltz_core.client.model.serializers import BYTES
from waltz_core.encryption.envelopes import is_envelope, read_envelope
from waltz_core.errors import BadFormat
from waltz_core.gateway.console.hex_dump import hex_dump
from waltz_core.gateway.console.message_pack_text import message_pack_to_json
from waltz_core.schemas import schema_prefix

JSON_DEPTH_MAX: Final = 100

# The possessive `*+` never backtracks, so the search takes linear time for any text.
_JSON_STRING: Final = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_BRACKET: Final = re.compile(r"[\[\]{}]")
_CONTROL_CHARACTER: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_ZSTD: Final = compression.Zstd(BYTES)


class PayloadText(NamedTuple):
    """A payload for display: its format, its text, and whether the text is incomplete."""

    format: str
    text: str
    is_shortened: bool


def decode_payload(data: bytes, bytes_max: int) -> PayloadText:
    """Return a payload as text of at most `bytes_max` bytes, by the module's rules."""
    assert bytes_max > 0
    decoded = _decode_outer_layer(data, bytes_max)
    encoded = decoded.text.encode()
    if len(encoded) <= bytes_max:
        return decoded
    return decoded._replace(
        text=encoded[:bytes_max].decode("utf-8", "ignore"), is_shortened=True
    )  # rule 2


def _decode_outer_layer(data: bytes, bytes_max: int) -> PayloadText:
    if not data:
        return PayloadText("empty", "", is_shortened=False)
    if is_envelope(data):
        return _describe_envelope(data, bytes_max)
    if data[0] != compression.MAGIC:
        return _decode_content(data, bytes_max)
    try:
        content = _ZSTD.deserialize(data)
    except BadFormat:
        return _dump("compressed", "zstd payload that cannot be decompressed", data, 0, bytes_max)
    if not content:
        return PayloadText("empty", "", is_shortened=False)
    return _decode_content(content, bytes_max)


def _decode_content(data: bytes, bytes_max: int) -> PayloadText:
    """Return the text of a payload that is neither empty, nor encrypted, nor compressed."""
    schema_id = _schema_id_of(data)
    if schema_id:
        prefix_bytes = len(schema_prefix.prefix_of(schema_id))
        return _dump("schema", f"schema {schema_id}", data, prefix_bytes, bytes_max)
    if len(data) <= bytes_max and (text := _json_text(data)) is not None:  # rule 4
        return PayloadText("json", text, is_shortened=False)
    json_text = message_pack_to_json(data, characters_max=bytes_max)
    if json_text is not None:
        return PayloadText("messagepack", *json_text)
    plain_text = _plain_text(data, bytes_max)
    if plain_text is not None:
        return PayloadText("text", plain_text, is_shortened=len(data) > bytes_max)
    return _dump("binary", "", data, 0, bytes_max)


def _dump(name: str, title: str, data: bytes, start: int, bytes_max: int) -> PayloadText:
    """Return a title, and a dump of the bytes from `start` on."""
    lines, is_shortened = hex_dump(data, start=start, characters_max=bytes_max - len(title) - 1)
    text = "\n".join(each for each in (title, lines) if each)
    return PayloadText(name, text, is_shortened)


def _describe_envelope(data: bytes, bytes_max: int) -> PayloadText:
    summary = read_envelope(data)
    if summary is None:
        return _dump("encrypted", "damaged envelope of an encrypted payload", data, 0, bytes_max)
    text = (
        f"key ID: {summary.key_id}\n"
        f"payload: {summary.payload_bytes} bytes\n"
        f"envelope: {len(data)} bytes"
    )
    return PayloadText("encrypted", text, is_shortened=False)


def _schema_id_of(data: bytes) -> int:
    """Return the ID in a schema prefix; 0 if there is none.

    Registries assign IDs from 1 on. A prefix with ID 0 is probably a part of a binary integer.
    """
    if data[0] != schema_prefix.MAGIC_BYTE:
        return 0
    try:
        return schema_prefix.split_prefix(data)[0]
    except BadFormat:
        return 0


# --- JSON


def _json_text(data: bytes) -> str | None:
    """Return the text of a payload if it is JSON; numbers keep all digits."""
    try:
        text = data.decode("utf-8")
        if _json_depth(text) > JSON_DEPTH_MAX:
            return None
        _JSON_DECODER.decode(text)
    except (ValueError, RecursionError):
        return None
    return text


def _json_depth(text: str) -> int:
    brackets = _BRACKET.findall(_JSON_STRING.sub("", text))
    return max(accumulate(1 if bracket in "[{" else -1 for bracket in brackets), default=0)


def _reject_constant(word: str) -> NoReturn:
    raise ValueError(word)


# Numbers are not converted: a conversion of many digits is slow, and Python limits the number of
# digits.
_JSON_DECODER: Final = json.JSONDecoder(
    parse_int=len, parse_float=len, parse_constant=_reject_constant
)


# --- text


def _plain_text(data: bytes, bytes_max: int) -> str | None:
    """Return the first `bytes_max` bytes of a payload as text; None if they are not a text."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        # If the payload is longer, an incomplete character at the end is dropped.
        text = decoder.decode(data[:bytes_max], final=len(data) <= bytes_max)
    except UnicodeDecodeError:
        return None
    return None if not text or _CONTROL_CHARACTER.search(text) else text
