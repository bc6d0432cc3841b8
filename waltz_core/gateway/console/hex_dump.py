"""Hex dumps of binary data: offset, 16 bytes in hexadecimal, and their ASCII characters.

00000010  68 65 6c 6c 6f 00                                hello.
"""

from typing import Final

LINE_BYTES: Final = 16
_HEX_WIDTH: Final = 3 * LINE_BYTES - 1
# The offset, the columns with their spaces, and the line break.
_LINE_CHARACTERS: Final = 8 + 2 + _HEX_WIDTH + 2 + LINE_BYTES + 1
_PRINTABLE: Final = bytes(each if 0x20 <= each < 0x7F else ord(".") for each in range(256))


def hex_dump(data: bytes, *, start: int = 0, characters_max: int) -> tuple[str, bool]:
    """Return a dump of the bytes from `start` on, and whether it was shortened to its limit."""
    line_count = max(0, characters_max // _LINE_CHARACTERS)
    end = start + LINE_BYTES * line_count
    lines = [
        _dump_line(data[offset : offset + LINE_BYTES], offset)
        for offset in range(start, min(end, len(data)), LINE_BYTES)
    ]
    return "\n".join(lines), len(data) > end


def _dump_line(part: bytes, offset: int) -> str:
    text = part.translate(_PRINTABLE).decode("ascii")
    return f"{offset:08x}  {part.hex(' '):<{_HEX_WIDTH}}  {text}"
