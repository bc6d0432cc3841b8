"""Strict conversions of Python values before they are written as Avro or Protobuf.

Rules:
    1. A value is accepted only if it has the expected type and nothing is lost, except that a float
       is rounded. An integer is also accepted as float and decimal.
    2. Each conversion raises TypeError or ValueError (OverflowError) for a value that does not fit.
"""

import struct
from collections.abc import Callable
from decimal import Context, Decimal, Inexact
from typing import Any, Final

Converter = Callable[[Any], Any]

DECIMAL_DIGITS_MAX: Final = 76
_DECIMAL_LIMIT: Final = 10**DECIMAL_DIGITS_MAX
_EXACT_DIGITS: Final = 2 * DECIMAL_DIGITS_MAX
# Results with up to twice as many digits are exact; more digits are an error.
_EXACT_CONTEXT: Final = Context(prec=2 * _EXACT_DIGITS, traps=[Inexact])


def mismatch_error(expected: str, value: object) -> TypeError:
    """Return the error for a value of an unexpected type."""
    return TypeError(f"expected {expected}, found {value!r:.100} ({type(value).__name__})")


def check_null(value: Any) -> None:  # noqa: ANN401
    """Accept only None."""
    if value is not None:
        raise mismatch_error("null", value)


def check_boolean(value: Any) -> bool:  # noqa: ANN401
    """Accept only a boolean, and return it."""
    if not isinstance(value, bool):
        raise mismatch_error("a boolean", value)
    return value


def integer_converter(kind: str, low: int, high: int) -> Converter:
    """Return a conversion that accepts integers from `low` to `high`."""

    def convert(value: Any) -> int:  # noqa: ANN401
        if not isinstance(value, int) or isinstance(value, bool):
            raise mismatch_error(f"an integer ({kind})", value)
        if not low <= value <= high:
            raise ValueError(f"{value} is out of the range of {kind}")
        return value

    return convert


def float_converter(layout: str, kind: str) -> Converter:
    """Return a conversion to float; `layout` is the float's format in `struct`."""

    pack = struct.Struct(layout).pack

    def convert(value: Any) -> float:  # noqa: ANN401
        if isinstance(value, float):
            number = value
        elif isinstance(value, int) and not isinstance(value, bool):
            number = float(value)
            (stored,) = struct.unpack(layout, pack(number))
            if int(stored) != value:
                raise ValueError(f"{value} cannot be represented exactly as a {kind}")
        else:
            raise mismatch_error(f"a number ({kind})", value)
        pack(number)  # raises OverflowError
        return number

    return convert


def to_bytes(value: Any) -> bytes:  # noqa: ANN401
    """Accept a bytes-like value, and return it as bytes."""
    if not isinstance(value, bytes | bytearray | memoryview):
        raise mismatch_error("bytes", value)
    return bytes(value)


def check_text(value: Any) -> str:  # noqa: ANN401
    """Accept only a string, and return it."""
    if not isinstance(value, str):
        raise mismatch_error("a text", value)
    return value


def to_unscaled(value: Decimal | int, scale: int) -> int:
    """Return the integer value * 10**scale; raises ValueError if this is not exact."""
    number = Decimal(value) if isinstance(value, int) and abs(value) < _DECIMAL_LIMIT else value
    if not isinstance(number, Decimal) or (number and abs(number.adjusted()) > _EXACT_DIGITS):
        raise ValueError("a number is out of the range of a decimal")
    if not number.is_finite():
        raise ValueError(f"{value} is not a number")
    if not number:
        return 0
    try:
        scaled = number.scaleb(scale, _EXACT_CONTEXT)
    except Inexact:
        raise ValueError("a number has too many digits for a decimal") from None
    unscaled = int(scaled)
    if unscaled != scaled:
        raise ValueError(f"expected up to {scale} digits after the point, found {value}")
    return unscaled


def decimal_from_unscaled(unscaled: int, scale: int) -> Decimal:
    """Return unscaled / 10**scale as a decimal.

    Raises:
        ValueError: the number has more digits than any column supports.
    """
    # NB: check this before the conversion to Decimal, which takes quadratic time.
    if abs(unscaled) >= 10**DECIMAL_DIGITS_MAX or abs(scale) > DECIMAL_DIGITS_MAX:
        raise ValueError(f"expected a decimal of up to {DECIMAL_DIGITS_MAX} digits, found more")
    sign, digits, _ = Decimal(unscaled).as_tuple()
    return Decimal((sign, digits, -scale))


def twos_complement_bytes(unscaled: int) -> bytes:
    """Return the shortest two's complement form of an integer, big-endian."""
    byte_count = (unscaled if unscaled >= 0 else ~unscaled).bit_length() // 8 + 1
    return unscaled.to_bytes(byte_count, "big", signed=True)
