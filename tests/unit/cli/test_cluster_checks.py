"""The output of `cluster` commands that change nothing."""

import pytest

from waltz_core.cli.output import time_text


@pytest.mark.parametrize(
    ("at_ms", "shown"),
    [
        (1_700_000_000_000, "2023-11-14T22:13:20Z"),
        (2**62, f"{2**62} ms"),
        (10**400, f"{10**400} ms"),
    ],
)
def test_the_time_of_a_damaged_record_is_shown_unchanged(at_ms: int, shown: str):
    assert time_text(at_ms) == shown
