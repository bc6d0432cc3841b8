"""Fixtures of the replication tests."""

import pytest

from tests.unit.replication.replication_world import ReplicationWorld


@pytest.fixture
def world():
    """Return a world of three replicas whose first session is open."""
    opened = ReplicationWorld()
    opened.open()
    return opened
