"""Fixtures of the replication tests."""

import pytest

from tests.unit.replication.bench import Bench


@pytest.fixture
def bench():
    """Return a bench of three replicas whose first session is open."""
    opened = Bench()
    opened.open()
    return opened
