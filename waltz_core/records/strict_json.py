"""Standard JSON: only finite numbers and whole characters, in both directions.

Python's `json` writes `NaN` and `Infinity`, which other readers reject, and also reads them, as
well as numbers like `1e999`, as an infinity. It reads `"\\ud800"`, half of a character, as a text
that UTF-8 does not have, so that it cannot be stored or printed. The client's serializer and
Spark's payloads use this module.

Rules:
    1. The output is UTF-8 without unnecessary blanks.
    2. A value that JSON does not have is an error with its value and position, `$.prices[2]`.
    3. A value that is nested too deeply for Python is an error, like invalid JSON.
    4. An error of a text with more than `_LOCATED_CHARACTERS_MAX` characters has no position.
"""

import json
import math
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final, NoReturn

# A search in a larger text takes too long for a process that has received it from a peer.
_LOCATED_CHARACTERS_MAX: Final = 256 * 1024
_HALF = re.compile("[\ud800-\udfff]")
_ESCAPED_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # a pair of them is one character
NOT_JSON = "JSON supports neither NaN nor infinities"
TOO_DEEP = (
    "the value is nested too deeply: expected at most a few hundred levels of lists and objects"
)


def to_json(value: Any) -> bytes:  # noqa: ANN401 - any JSON value
    """Return a value as JSON.

    Raises:
        ValueError: a number is not finite, or a text has half a character (with value and
            position); or the value contains itself or is nested too deeply.
        TypeError: a type that JSON does not have.
    """
    try:
        text = _ENCODER.encode(value)
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
    except ValueError as error:
        place = _find_wrong_part(value, _is_not_finite)
        if place is None:
            raise
        found, where = place
        raise ValueError(
            f"found {found} at {where}; {NOT_JSON}. Hint: write null or a string instead."
        ) from error
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise _half_of_character(value) from error


def from_json(data: bytes) -> Any:  # noqa: ANN401
    """Return the value of a JSON text.

    Raises:
        ValueError: it is not JSON, or is nested too deeply; the error names `NaN`, infinities,
            numbers that are too large, and texts with half a character with their position.
    """
    text = data.decode(json.detect_encoding(data))
    try:
        return _check_characters(text, _decoded(text))
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error


def exact_from_json(data: bytes) -> Any:  # noqa: ANN401
    """Return the value, with each number that has a fraction or an exponent as a Decimal.

    Raises:
        ValueError: like `from_json`; no number is too large.
    """
    text = data.decode(json.detect_encoding(data))
    try:
        return _check_characters(text, _EXACT.decode(text))
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
    except (json.JSONDecodeError, _HalfOfCharacterError):
        raise
    except ValueError as error:
        raise ValueError(f"found {error}; {NOT_JSON}") from error


def _check_characters(text: str, value: Any) -> Any:  # noqa: ANN401
    """Return the value of a text; raises ValueError if it has half a character."""
    if _ESCAPED_HALF.search(text):
        # NB: the encoder is written in C. `_find_wrong_part` takes seconds for a MiB, which a
        # peer can send.
        try:
            _ANY_ENCODER.encode(value).encode()
        except UnicodeEncodeError as error:
            is_located = len(text) <= _LOCATED_CHARACTERS_MAX  # rule 4
            raise _half_of_character(value if is_located else None) from error
    return value


class _HalfOfCharacterError(ValueError):
    """A text has half a character."""


def _half_of_character(value: object) -> ValueError:
    found = _find_wrong_part(value, _is_half)
    where = "a text" if found is None else found[1]
    return _HalfOfCharacterError(
        f"found an unpaired surrogate at {where}, which UTF-8 cannot encode"
    )


def _is_half(part: object) -> bool:
    return isinstance(part, str) and _HALF.search(part) is not None


def _decoded(text: str) -> Any:  # noqa: ANN401
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        if len(text) > _LOCATED_CHARACTERS_MAX:  # rule 4
            raise ValueError(f"found {error}; {NOT_JSON}") from error
        # Read once more with these words kept, to find their position.
        place = _find_wrong_part(_LENIENT.decode(text), lambda part: type(part) is _NonFinite)
        if place is None:  # A later value of the same key has replaced it.
            raise ValueError(f"found {error}; {NOT_JSON}") from error
        raise ValueError(f"found {place[0]} at {place[1]}; {NOT_JSON}") from error


class _NonFinite(str):
    """`NaN`, `Infinity`, `-Infinity` or a number that is too large, as it was read."""

    __slots__ = ()


def _reject(word: str) -> NoReturn:
    raise ValueError(word)


def _parse_finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _reject(text)


def _finite_or_word(text: str) -> float | _NonFinite:
    number = float(text)
    return number if math.isfinite(number) else _NonFinite(text)


_ENCODER = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"))
_ANY_ENCODER = json.JSONEncoder(ensure_ascii=False, check_circular=False, default=str)
_DECODER = json.JSONDecoder(parse_constant=_reject, parse_float=_parse_finite)
_EXACT = json.JSONDecoder(parse_constant=_reject, parse_float=Decimal)
_LENIENT = json.JSONDecoder(parse_constant=_NonFinite, parse_float=_finite_or_word)


def _is_not_finite(part: object) -> bool:
    return isinstance(part, float) and not math.isfinite(part)


def _find_wrong_part(
    value: object, is_wrong: Callable[[object], bool]
) -> tuple[object, str] | None:
    """Return the first wrong part of a value and its position, without recursion."""
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
