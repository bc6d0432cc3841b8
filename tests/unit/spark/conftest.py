"""Fixtures of the tests of stream readers."""

import pytest

from tests.unit.spark.streams import Cluster
from waltz_spark.datasource import stream_read


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    monkeypatch.setattr(stream_read, "client_of", made.client)
    monkeypatch.setattr(stream_read, "query_replica_sets", made.sources)
    return made
