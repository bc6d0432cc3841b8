"""JSON as its standard has it: a number is finite, in both directions.

Python's own module writes `NaN` and `Infinity`, which no other reader of a log takes, and reads
them too, beside numbers like `1e999` that it makes an infinity of. The client's serializer and
Spark's payloads share what is here.

Rules:
    1. What is written is UTF-8 without needless blanks, the same bytes from both.
    2. What JSON does not have is refused with its value and its place, `$.prices[2]`.
    3. A value that is nested deeper than Python can follow is refused like one that is no JSON.
"""

import json
import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any, NoReturn

NOT_JSON = "JSON has neither NaN nor infinities"
TOO_DEEP = "nested too deeply: expected at most some hundred lists and objects in one another"


def to_json(value: Any) -> bytes:  # noqa: ANN401 - whatever JSON can hold
    """Return a value as JSON.

    Raises:
        ValueError: a number is not finite (value and place are named), or the value holds itself
            or is nested too deeply.
        TypeError: a type that JSON does not know.
    """
    try:
        text = _ENCODER.encode(value)
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
    except ValueError as error:
        place = _place(value, _is_not_finite)
        if place is None:
            raise
        found, where = place
        raise ValueError(f"found {found} at {where}; {NOT_JSON}: write null or a text") from error
    return text.encode()


def from_json(data: bytes) -> Any:  # noqa: ANN401
    """Return the value of some JSON.

    Raises:
        ValueError: it is none, or is nested too deeply; `NaN` and its like, and numbers that are
            too great, are named with their place.
    """
    text = data.decode(json.detect_encoding(data), "surrogatepass")
    try:
        return _decoded(text)
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error


def exact_from_json(data: bytes) -> Any:  # noqa: ANN401
    """Return the same with each number that has a fraction or an exponent as a Decimal.

    Raises:
        ValueError: as `from_json`; no number is too great.
    """
    text = data.decode(json.detect_encoding(data), "surrogatepass")
    try:
        return _EXACT.decode(text)
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        raise ValueError(f"found {error}; {NOT_JSON}") from error


def _decoded(text: str) -> Any:  # noqa: ANN401
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        # Read once more with the words kept, which tells where they stand.
        place = _place(_LENIENT.decode(text), lambda part: type(part) is _Word)
        if place is None:  # A later value of the same key has taken its place.
            raise ValueError(f"found {error}; {NOT_JSON}") from error
        raise ValueError(f"found {place[0]} at {place[1]}; {NOT_JSON}") from error


class _Word(str):
    """`NaN`, `Infinity`, `-Infinity` or a number that is too great, as it was read."""

    __slots__ = ()


def _refuse(word: str) -> NoReturn:
    raise ValueError(word)


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)


def _finite_or_word(text: str) -> float | _Word:
    number = float(text)
    return number if math.isfinite(number) else _Word(text)


_ENCODER = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"))
_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)
_EXACT = json.JSONDecoder(parse_constant=_refuse, parse_float=Decimal)
_LENIENT = json.JSONDecoder(parse_constant=_Word, parse_float=_finite_or_word)


def _is_not_finite(part: object) -> bool:
    return isinstance(part, float) and not math.isfinite(part)


def _place(value: object, is_wrong: Callable[[object], bool]) -> tuple[object, str] | None:
    """Return the first wrong part of a value and its place, without recursion and its limits."""
    waiting: list[tuple[object, str]] = [(value, "$")]
    seen: set[int] = set()
    while waiting:
        part, where = waiting.pop()
        if is_wrong(part):
            return part, where
        if not isinstance(part, dict | list | tuple) or id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, dict):
            for key in part:
                if is_wrong(key):
                    return key, f"a key of {where}"
            children = [(child, f"{where}.{key}") for key, child in part.items()]
        else:
            children = [(child, f"{where}[{index}]") for index, child in enumerate(part)]
        waiting.extend(reversed(children))
    return None
