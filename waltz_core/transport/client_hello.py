"""Checks whether a peer's first bytes are a ClientHello that a port can answer with little work.

Rules:
    1. OpenSSL receives a ClientHello only if the ClientHello is complete and in one record. So
       OpenSSL computes the answer at once. The answer uses most of the CPU time of a handshake, and
       must be computed during the handshake's turn (`tls_port.py`).
    2. The key exchange must use X25519 or P-256, because OpenSSL needs 170 ms for ffdhe8192. The
       port checks this itself, because Python 3.11 cannot restrict a context to several groups.
"""

import struct
from typing import Final

from waltz_core.transport.tls import HANDSHAKE_RECORD

# A TLS record begins with its type, the version of TLS (3.x) and its size. A handshake message
# begins with its type and a size of 3 bytes.
_RECORD_HEADER_BYTES: Final = 5
_MESSAGE_HEADER_BYTES: Final = 4
_CLIENT_HELLO_TYPE: Final = 1
HELLO_RECORD_BYTES_MAX: Final = _RECORD_HEADER_BYTES + 16_384
# Extensions of a ClientHello, and codes in these extensions.
_SUPPORTED_GROUPS, _SUPPORTED_VERSIONS, _KEY_SHARE = 10, 43, 51
_TLS_1_3: Final = 0x0304
_FAST_GROUPS: Final = frozenset({0x0017, 0x001D})  # P-256, X25519
_SLOW_GROUPS: Final = frozenset({0x0018, 0x0019, *range(0x0100, 0x0200)})  # P-384, P-521, FFDHE


def bytes_needed(first_bytes: bytes) -> int:
    """Return the number of bytes that a peer must have sent before its handshake may begin."""
    if first_bytes[0] != HANDSHAKE_RECORD or first_bytes[1:2] not in (b"", b"\x03"):
        return 1  # not a handshake, or one that OpenSSL rejects
    if len(first_bytes) < _RECORD_HEADER_BYTES:
        return _RECORD_HEADER_BYTES
    return min(
        HELLO_RECORD_BYTES_MAX,
        _RECORD_HEADER_BYTES + _decode_number(first_bytes[3:_RECORD_HEADER_BYTES]),
    )


def reject_reason(first_bytes: bytes) -> str:
    """Return why OpenSSL must not receive a peer's first record; "" if it may.

    A damaged record is permitted, because OpenSSL rejects it.
    """
    message = first_bytes[_RECORD_HEADER_BYTES:]
    record_bytes = _decode_number(first_bytes[3:_RECORD_HEADER_BYTES])
    is_other_message = record_bytes > 0 and message[:1] != bytes((_CLIENT_HELLO_TYPE,))
    if first_bytes[1:2] != b"\x03" or is_other_message:
        return ""
    size = _MESSAGE_HEADER_BYTES + _decode_number(message[1:_MESSAGE_HEADER_BYTES])
    if record_bytes < size:  # OpenSSL would answer later, without a turn; it skips empty records
        return "expected a complete TLS ClientHello in one record, found a part of one"
    extensions = _extensions(message[:size])
    groups = _decode_numbers(extensions.get(_SUPPORTED_GROUPS, b"")[2:])
    is_slow = _SUPPORTED_GROUPS in extensions and groups.isdisjoint(_FAST_GROUPS)
    if _TLS_1_3 in _decode_numbers(extensions.get(_SUPPORTED_VERSIONS, b"")[1:]):
        key_shares = _parse_elements(extensions.get(_KEY_SHARE, b"")[2:])
        known_groups = (
            group for group in key_shares if group in _FAST_GROUPS or group in _SLOW_GROUPS
        )
        # OpenSSL uses the first group that it knows.
        is_slow = next(known_groups, None) not in _FAST_GROUPS
    return (
        ("expected a client that offers a key exchange with X25519 or P-256, found none")
        if is_slow
        else ""
    )


def _extensions(hello: bytes) -> dict[int, bytes]:
    offset = _MESSAGE_HEADER_BYTES + 2 + 32  # version, random
    for size_bytes in (1, 2, 1):  # session ID, ciphers, compression methods
        offset += size_bytes + _decode_number(hello[offset : offset + size_bytes])
    return _parse_elements(hello[offset + 2 :])


def _parse_elements(data: bytes) -> dict[int, bytes]:
    """Parse a list of elements with code, size and bytes; return the bytes of each code."""
    bytes_by_code, offset = dict[int, bytes](), 0
    while offset + 4 <= len(data):
        code, size = struct.unpack_from(">HH", data, offset)
        bytes_by_code[code] = data[offset + 4 : offset + 4 + size]
        offset += 4 + size
    return bytes_by_code


def _decode_numbers(data: bytes) -> set[int]:
    return {_decode_number(data[offset : offset + 2]) for offset in range(0, len(data), 2)}


def _decode_number(data: bytes) -> int:
    return int.from_bytes(data, "big")
