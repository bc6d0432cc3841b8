"""One Spark session and one real cluster for all Spark tests: both take seconds to start."""

import os
import sys
from collections.abc import Iterator

import pytest

os.environ["PYSPARK_PYTHON"] = sys.executable

from pyspark.sql import SparkSession

import waltz_core.local
import waltz_spark
from tests import table_jars

SETTINGS = {
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.ansi.enabled": "true",
    # Each query would compile classes of its own, for a few rows. The sessions of the notebooks,
    # of Spark Connect and of the clusters do so.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    **table_jars.settings(),
}


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    session = waltz_spark.session("waltz tests", master="local[2]", **SETTINGS)
    yield session
    session.stop()


@pytest.fixture(scope="session")
def cluster() -> Iterator[waltz_core.local.LocalCluster]:
    with waltz_core.local.running() as running:
        yield running


@pytest.fixture
def connect(cluster: waltz_core.local.LocalCluster) -> str:
    return cluster.connect
