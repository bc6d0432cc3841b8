"""What `append` takes, before Spark is asked for anything."""

import json

import numpy as np
import pytest

from waltz_core.errors import BadConfig, BadRequest
from waltz_spark.api import _marks_text, append


def test_marks_are_a_mapping_of_any_whole_numbers() -> None:
    marks = {0: 41, np.int32(1): np.int64(1 << 40), 2: -1}
    assert json.loads(_marks_text(marks)) == {"0": 41, "1": 1 << 40, "2": -1}


@pytest.mark.parametrize(
    ("marks", "found"),
    [
        ([41, 7], r"found \[41, 7\] \(list\)"),
        ('{"0": 41}', r"\(str\)"),
        (41, r"found 41 \(int\)"),
        ({0: "x"}, "found 0: 'x'"),
        ({"zero": 1}, "found 'zero': 1"),
        ({0: 1.5}, r"found 0: 1\.5"),
        ({0: -2}, "found 0: -2"),
        ({-1: 0}, "found -1: 0"),
        ({0: True}, "found 0: True"),
    ],
)
def test_anything_else_is_told_with_what_was_expected(marks: object, found: str) -> None:
    with pytest.raises(BadConfig, match="a mapping from partition to high-water mark") as caught:
        _marks_text(marks)
    caught.match(found)


@pytest.mark.parametrize("what", [None, [(1, "a")], "df"])
def test_what_is_no_data_frame_is_told(what: object) -> None:
    with pytest.raises(
        BadRequest, match=f"append takes a DataFrame .* found {type(what).__name__}"
    ):
        append(what, "localhost:2181/waltz")  # type: ignore[arg-type]
