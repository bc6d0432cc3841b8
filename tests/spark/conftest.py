"""One Spark session and one real cluster for all Spark tests: both take seconds to start."""

import os
import sys
from collections.abc import Iterator

import pytest

os.environ["PYSPARK_PYTHON"] = sys.executable

from pyspark.sql import SparkSession

import waltz_core.local
import waltz_spark

# The first test of a process starts Java and a cluster, and where others use the machine all take
# their time.
TIMEOUT_S = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test of this folder more time, unless it says how much it may take."""
    for each in items:
        if each.get_closest_marker("spark") and not each.get_closest_marker("timeout"):
            each.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    session = waltz_spark.session(
        "waltz tests",
        master="local[2]",
        **{"spark.sql.shuffle.partitions": "4", "spark.sql.ansi.enabled": "true"},
    )
    yield session
    session.stop()


@pytest.fixture(scope="session")
def cluster() -> Iterator[waltz_core.local.LocalCluster]:
    with waltz_core.local.running() as running:
        yield running


@pytest.fixture
def connect(cluster: waltz_core.local.LocalCluster) -> str:
    return cluster.connect
