"""Fixtures of the tests of stream readers."""

import pytest

from tests.unit.spark.streams import Cluster
from waltz_spark.datasource import stream_read


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    new_cluster = Cluster()
    monkeypatch.setattr(stream_read, "client_of", new_cluster.client)
    monkeypatch.setattr(stream_read, "query_replica_sets", new_cluster.sources)
    return new_cluster
