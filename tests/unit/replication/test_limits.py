"""Unit tests of `waltz_core.replication.limits`."""

from dataclasses import fields

import pytest

from waltz_core.replication.limits import SessionLimits


def test_limits_must_be_positive():
    for field in fields(SessionLimits):
        with pytest.raises(AssertionError):
            SessionLimits(**{field.name: -1})
    assert SessionLimits(quorum_ms_max=0, opening_grace_ms=0).quorum_ms_max == 0


def test_a_minimum_above_its_maximum_is_rejected():
    for name in ("retry", "redial", "exclusion"):
        with pytest.raises(AssertionError):
            SessionLimits(**{f"{name}_ms_min": 10, f"{name}_ms_max": 9})
