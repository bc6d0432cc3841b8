"""One Spark session and one real cluster for all Spark tests: both take seconds to start."""

import os
import sys
from collections.abc import Iterator

import pytest

os.environ["PYSPARK_PYTHON"] = sys.executable

from pyspark.sql import SparkSession

import waltz_core.local
import waltz_spark


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
