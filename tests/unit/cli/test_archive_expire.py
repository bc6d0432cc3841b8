"""The limits of `waltz-core archive expire`: accepted and rejected values."""

import pytest

from waltz_core.cli.archive.archive_expire import parse_before
from waltz_core.errors import BadConfig

NOW_MS = 1_000_000


@pytest.mark.parametrize(
    ("text", "bounds"),
    [
        ("7", (7, 0)),
        ("1970-01-01T00:00:09Z", (0, 9_000)),
        ("1970-01-01T01:00:09+01:00", (0, 9_000)),
        ("1970-01-01T00:16:40Z", (0, NOW_MS)),
    ],
)
def test_an_id_or_a_time_is_accepted_as_a_limit(text: str, bounds: tuple[int, int]) -> None:
    assert parse_before(text, NOW_MS) == bounds


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("-7", "expected a transaction ID, or a time with a time zone"),
        ("soon", "expected a transaction ID, or a time with a time zone"),
        ("1970-01-01T00:00:09", "expected a transaction ID, or a time with a time zone"),
        ("1970-01-01T00:16:41Z", "expected a time in the past"),
    ],
)
def test_invalid_limits_are_rejected(text: str, reason: str) -> None:
    with pytest.raises(BadConfig, match=f"--before: {reason}"):
        parse_before(text, NOW_MS)
