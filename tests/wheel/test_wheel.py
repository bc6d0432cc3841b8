"""The installed wheel, from its metadata to a cluster with Spark. `make test-wheel` runs it."""

import json
import subprocess
import sys
import sysconfig
from importlib import import_module
from importlib.metadata import distribution
from pathlib import Path

import pytest

import waltz_core
import waltz_spark
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.client import WaltzClient, lock

WHEEL = distribution("waltz-spark")
SITE_PACKAGES = Path(sysconfig.get_path("purelib"))
BIN = Path(sysconfig.get_path("scripts"))
FILES = [str(path) for path in WHEEL.files or ()]

pytestmark = [
    pytest.mark.timeout(3 * TEST_TIMEOUT_S),
    pytest.mark.skipif(
        "waltz_core/__init__.py" not in FILES,
        reason="runs only with the installed wheel: make test-wheel",
    ),
]


def waltz(*words: str) -> str:
    result = subprocess.run(
        [BIN / "waltz-core", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=TEST_TIMEOUT_S,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize("name", ["waltz_core", "waltz_spark", "pyspark_waltz"])
def test_packages_are_imported_from_the_wheel(name):
    file = import_module(name).__file__
    assert file is not None
    assert Path(file).is_relative_to(SITE_PACKAGES)


def test_the_wheel_contains_only_the_product():
    names = {path.split("/")[0] for path in FILES if not path.startswith(("..", "__pycache__"))}
    assert names == {
        "waltz_core",
        "waltz_spark",
        "pyspark_waltz.py",
        f"waltz_spark-{waltz_core.__version__}.dist-info",
    }
    assert {"waltz_core/py.typed", "waltz_spark/py.typed"} <= set(FILES)


def test_the_metadata_names_version_license_and_readme():
    assert WHEEL.version == waltz_core.__version__
    metadata = WHEEL.metadata
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]
    license_file = f"waltz_spark-{WHEEL.version}.dist-info/licenses/LICENSE"
    assert "Apache License" in (SITE_PACKAGES / license_file).read_text()
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "# Waltz for Spark" in str(metadata.get_payload())


def test_the_command_prints_the_version():
    assert waltz("--version") == f"waltz-core {WHEEL.version}"


def test_pytest_loads_the_fixtures(pytestconfig, waltz_memory):
    plugin = pytestconfig.pluginmanager.get_plugin("waltz")
    assert Path(plugin.__file__).is_relative_to(SITE_PACKAGES)
    with waltz_memory.client() as client:
        assert client.append(b"one", partition=3).result() == 0


def test_a_local_cluster_takes_appends_and_spark_finds_the_data_source(tmp_path):
    directory = str(tmp_path / "cluster")
    small = ("--storages", "3", "--servers", "1", "--partitions", "1")
    connect = waltz("local", "up", "--directory", directory, *small)
    try:
        with WaltzClient(connect) as client:
            assert client.append(b"first", write_locks=[lock("account", 7)]).result() == 0
        assert json.loads(waltz("client", "append", "second", "--connect", connect, "--json"))
        read = waltz("client", "read", "--connect", connect)
        assert "first" in read
        assert "second" in read
        spark = waltz_spark.session("wheel", master="local[1]")
        try:
            rows = spark.read.format("waltz").load(connect).select("data").collect()
            assert [bytes(row.data) for row in rows] == [b"first", b"second"]
        finally:
            spark.stop()
    finally:
        waltz("local", "down", "--directory", directory)


def test_the_command_runs_as_a_module():
    result = subprocess.run(
        [sys.executable, "-m", "waltz_core", "--version"],
        capture_output=True,
        text=True,
        check=True,
        timeout=TEST_TIMEOUT_S,
    )
    assert result.stdout.strip() == f"waltz-core {WHEEL.version}"
