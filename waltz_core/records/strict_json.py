"""Strict JSON: reads and writes only finite numbers, and text without unpaired surrogates.

The client's serializer and Spark's payloads use this module, because Python's `json` accepts too
much. Python's `json` writes and reads `NaN` and `Infinity`, which other readers reject. It reads
numbers such as `1e999` as infinity. It also reads the unpaired surrogate `"\\ud800"` as a text,
although UTF-8 cannot represent this text.

Rules:
    1. The output is UTF-8 without unnecessary whitespace.
    2. A value that JSON cannot represent is an error. The error contains the value and its
       position, such as `$.prices[2]`.
    3. A value that is nested too deeply for Python is an error, like invalid JSON.
    4. If a text is longer than `_LOCATED_CHARACTERS_MAX` characters, its errors have no position.
"""

import json
import math
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final, NoReturn

# A peer may send a larger text, in which the search for a position would take too long.
_LOCATED_CHARACTERS_MAX: Final = 256 * 1024
_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # a pair of them is one character
NOT_FINITE_TEXT = "JSON supports neither NaN nor infinities"
TOO_DEEP_TEXT = (
    "the value is nested too deeply: expected at most a few hundred levels of lists and objects"
)


def to_json(value: Any) -> bytes:  # noqa: ANN401 - any JSON value
    """Encode a value as JSON in UTF-8.

    Raises:
        ValueError: a number is not finite, or a text has an unpaired surrogate; the error states
            this value and its position. Or `value` contains itself, or is nested too deeply.
        TypeError: JSON does not have the type of a value.
    """
    try:
        text = _ENCODER.encode(value)
    except RecursionError as error:
        raise ValueError(TOO_DEEP_TEXT) from error
    except ValueError as error:
        wrong_part = _find_wrong_part(value, _is_not_finite)
        if wrong_part is None:
            raise
        value_text, where = wrong_part
        raise ValueError(
            f"found {value_text} at {where}; {NOT_FINITE_TEXT}. Hint: write null or a string "
            "instead."
        ) from error
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise _surrogate_error(value) from error


def from_json(data: bytes) -> Any:  # noqa: ANN401
    """Decode a JSON text.

    Raises:
        ValueError: the bytes are not JSON, or are nested too deeply. The error states the position
            of `NaN`, infinities, numbers that are too large, and texts with an unpaired surrogate.
    """
    text = data.decode(json.detect_encoding(data))
    try:
        return _check_characters(text, _decode_text(text))
    except RecursionError as error:
        raise ValueError(TOO_DEEP_TEXT) from error


def from_json_with_decimals(data: bytes) -> Any:  # noqa: ANN401
    """Decode a JSON text; numbers with a fraction or an exponent become a Decimal.

    Raises:
        ValueError: as for `from_json`, but numbers of any size are accepted.
    """
    text = data.decode(json.detect_encoding(data))
    try:
        return _check_characters(text, _DECIMAL_DECODER.decode(text))
    except RecursionError as error:
        raise ValueError(TOO_DEEP_TEXT) from error
    except (json.JSONDecodeError, _SurrogateError):
        raise
    except ValueError as error:
        raise ValueError(f"found {error}; {NOT_FINITE_TEXT}") from error


def _check_characters(text: str, value: Any) -> Any:  # noqa: ANN401
    """Return the decoded value of a text; raises ValueError for an unpaired surrogate."""
    if _ESCAPED_SURROGATE.search(text):
        # NB: a peer can send a MiB, for which `_find_wrong_part` would take seconds. The encoder is
        # fast, because it is written in C.
        try:
            _ANY_ENCODER.encode(value).encode()
        except UnicodeEncodeError as error:
            is_located = len(text) <= _LOCATED_CHARACTERS_MAX  # rule 4
            raise _surrogate_error(value if is_located else None) from error
    return value


class _SurrogateError(ValueError):
    """A string in the JSON text contains an unpaired surrogate."""


def _surrogate_error(value: object) -> ValueError:
    wrong_part = _find_wrong_part(value, _has_surrogate)
    where = "a text" if wrong_part is None else wrong_part[1]
    return _SurrogateError(f"found an unpaired surrogate at {where}, which UTF-8 cannot encode")


def _has_surrogate(part: object) -> bool:
    return isinstance(part, str) and _SURROGATE.search(part) is not None


def _decode_text(text: str) -> Any:  # noqa: ANN401
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        if len(text) > _LOCATED_CHARACTERS_MAX:  # rule 4
            raise ValueError(f"found {error}; {NOT_FINITE_TEXT}") from error
        # Decode the text a second time, but keep `NaN`, infinities and too large numbers as texts,
        # to find their positions.
        wrong_part = _find_wrong_part(
            _LENIENT_DECODER.decode(text), lambda part: type(part) is _NonFinite
        )
        if wrong_part is None:  # A later value for the same key has replaced the word.
            raise ValueError(f"found {error}; {NOT_FINITE_TEXT}") from error
        raise ValueError(f"found {wrong_part[0]} at {wrong_part[1]}; {NOT_FINITE_TEXT}") from error


class _NonFinite(str):
    """The source text of `NaN`, `Infinity`, `-Infinity` or a number that is too large."""

    __slots__ = ()


def _reject_number(word: str) -> NoReturn:
    raise ValueError(word)


def _parse_finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _reject_number(text)


def _parse_any_float(text: str) -> float | _NonFinite:
    number = float(text)
    return number if math.isfinite(number) else _NonFinite(text)


_ENCODER = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"))
_ANY_ENCODER = json.JSONEncoder(ensure_ascii=False, check_circular=False, default=str)
_DECODER = json.JSONDecoder(parse_constant=_reject_number, parse_float=_parse_finite)
_DECIMAL_DECODER = json.JSONDecoder(parse_constant=_reject_number, parse_float=Decimal)
_LENIENT_DECODER = json.JSONDecoder(parse_constant=_NonFinite, parse_float=_parse_any_float)


def _is_not_finite(part: object) -> bool:
    return isinstance(part, float) and not math.isfinite(part)


def _find_wrong_part(
    value: object, is_wrong: Callable[[object], bool]
) -> tuple[object, str] | None:
    """Return the first wrong part of a value, with its position; works without recursion."""
    waiting: list[tuple[object, str]] = [(value, "$")]
    visited_ids: set[int] = set()
    while waiting:
        part, where = waiting.pop()
        if is_wrong(part):
            return part, where
        if not isinstance(part, dict | list | tuple) or id(part) in visited_ids:
            continue
        visited_ids.add(id(part))
        if isinstance(part, dict):
            for key in part:
                if is_wrong(key):
                    return key, f"a key of {where}"
            children = [(child, f"{where}.{key}") for key, child in part.items()]
        else:
            children = [(child, f"{where}[{index}]") for index, child in enumerate(part)]
        waiting.extend(reversed(children))
    return None
