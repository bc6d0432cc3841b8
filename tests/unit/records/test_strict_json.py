"""JSON that every parser accepts, and errors for other values."""

import json
import math
from collections.abc import Callable

import pytest

from waltz_core.records import strict_json
from waltz_core.records.strict_json import from_json, from_json_with_decimals, to_json


def test_json_values_round_trip() -> None:
    value = {"a": [1, 2.5, None, "ü"], "b": {"c": True}, "d": []}
    assert to_json(value) == '{"a":[1,2.5,null,"ü"],"b":{"c":true},"d":[]}'.encode()
    assert from_json(to_json(value)) == value
    assert from_json("\ufeff[1]".encode()) == [1]


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (math.nan, "found nan at $;"),
        ({"a": [1, {"b": math.inf}], "c": math.nan}, "found inf at $.a[1].b;"),
        ((0.5, [-math.inf]), "found -inf at $[1][0];"),
        ({"a": {math.nan: 1}}, "found nan at a key of $.a;"),
    ],
)
def test_errors_name_the_json_path_of_nan_and_infinities(value: object, sentence: str) -> None:
    with pytest.raises(ValueError, match="neither NaN nor infinities") as caught:
        to_json(value)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("NaN", "found NaN at $;"),
        ('{"a": "NaN", "b": [1, -Infinity, NaN]}', "found -Infinity at $.b[1];"),
        ('{"a": NaN, "a": 1}', "found NaN;"),
        ('{"a": [1e308, 1e999]}', "found 1e999 at $.a[1];"),
        ("-1e400", "found -1e400 at $;"),
    ],
)
def test_nan_and_infinity_in_a_text_are_errors_with_their_position(
    text: str, sentence: str
) -> None:
    with pytest.raises(ValueError, match="neither NaN nor infinities") as caught:
        from_json(text.encode())
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize("decode", [from_json, from_json_with_decimals])
def test_valid_escaped_characters_do_not_start_the_slow_error_search(
    decode: Callable[[bytes], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a search takes seconds for 1 MiB, and would block a server."""
    monkeypatch.setattr(strict_json, "_find_wrong_part", None)
    text = rb'["\ud83d\ude00", "\\ud800", 0.5, 1]'
    assert decode(text) == ["\U0001f600", r"\ud800", 0.5, 1]


@pytest.mark.parametrize("decode", [from_json, from_json_with_decimals])
def test_a_lone_surrogate_is_an_error_with_its_position(decode: Callable[[bytes], object]) -> None:
    assert decode(rb'["\ud83d\ude00", "\\ud800"]') == ["\U0001f600", r"\ud800"]
    for text, position in (
        (rb'{"a": [1, "\udfff"]}', "$.a[1]"),
        (rb'{"a": {"\uD83d": 1}}', "a key of $.a"),
        (rb'"\ude00\ud83d"', "$"),
    ):
        with pytest.raises(ValueError, match="found an unpaired surrogate") as caught:
            decode(text)
        assert f" at {position}," in str(caught.value)
    with pytest.raises(ValueError, match="can't decode"):
        decode(b'"\xed\xa0\x80"')
    with pytest.raises(ValueError, match=r"found an unpaired surrogate at \$\.a, which"):
        to_json({"a": "\ud800"})


@pytest.mark.parametrize(("word", "cause"), [("NaN", "found NaN"), ('"\\ud800"', "a text")])
def test_an_error_of_a_large_text_has_no_position(word: str, cause: str) -> None:
    with pytest.raises(ValueError, match=cause) as caught:
        from_json(b"[" + b"0," * 200_000 + word.encode() + b"]")
    assert "$" not in str(caught.value)


@pytest.mark.parametrize("inside", ["1", "NaN"])
def test_too_deeply_nested_text_is_rejected_as_json(inside: str) -> None:
    text = f"[{inside}, " + "[" * 10_000 + "]" * 10_000 + "]"
    with pytest.raises(ValueError, match="nested too deeply"):
        from_json(text.encode())


def test_too_deeply_nested_values_are_not_written() -> None:
    value: list[object] = []
    for _ in range(10_000):
        value = [value]
    with pytest.raises(ValueError, match="nested too deeply"):
        to_json(value)
    while value:
        value = value.pop()  # type: ignore[assignment]


def test_other_json_errors_are_reported_unchanged() -> None:
    cycle: list[object] = []
    cycle.append(cycle)
    with pytest.raises(ValueError, match="Circular"):
        to_json(cycle)
    with pytest.raises(TypeError, match="not JSON serializable"):
        to_json({"a": b"bytes"})
    with pytest.raises(json.JSONDecodeError, match="line 1"):
        from_json(b'{"a": ')
    with pytest.raises(UnicodeDecodeError):
        from_json(b'"\xff"')
