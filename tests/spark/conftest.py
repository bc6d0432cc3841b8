"""One Spark session and one real cluster for all Spark tests: both take seconds to start."""

import os
import sys
from collections.abc import Iterator

import pytest

os.environ["PYSPARK_PYTHON"] = sys.executable

from pyspark.sql import SparkSession

import waltz_core.local
import waltz_spark
from tests import table_libraries
from tests.written_log import WrittenLog, running_log

SETTINGS = {
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.ansi.enabled": "true",
    # Without this setting, Spark would compile classes for each query, even for a few rows. The
    # sessions of the notebooks, of Spark Connect and of the clusters have the default.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    **table_libraries.spark_settings(),
}


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    session = waltz_spark.session("waltz tests", master="local[2]", **SETTINGS)
    yield session
    session.stop()


@pytest.fixture(scope="session")
def cluster() -> Iterator[waltz_core.local.LocalCluster]:
    """Yield a cluster of one storage; test_moving.py and test_standalone.py have three."""
    with waltz_core.local.running_cluster(storage_count=1) as running:
        yield running


@pytest.fixture
def connect(cluster: waltz_core.local.LocalCluster) -> str:
    return cluster.connect


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WrittenLog]:
    """Yield a log of row changes, in a separate cluster."""
    with running_log(tmp_path_factory.mktemp("cluster") / "local") as log:
        yield log
