"""Executors and Python workers are killed with SIGKILL during a write, on a real Spark cluster."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import waltz_core.local
from tests.spark.exactly_once_rows import TASKS, WRITES
from tests.time_limits import TEST_TIMEOUT_S

pytestmark = [pytest.mark.spark, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
JOB = (sys.executable, "-m", "tests.spark.exactly_once_job")
SECONDS_MAX = 2 * TEST_TIMEOUT_S


@pytest.mark.parametrize(
    "writes",
    [pytest.param(tuple(WRITES), id="plain"), pytest.param(("encrypted",), id="encrypted")],
)
def test_rows_are_written_once_with_option_exactly_once_and_repeated_without_it(
    tmp_path: Path, writes: tuple[str, ...]
) -> None:
    """The encrypted write has keys of a function."""
    with waltz_core.local.running_cluster(storage_count=1) as cluster:
        result = subprocess.run(
            [*JOB, cluster.connect, str(tmp_path), *writes],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
        )
    assert result.returncode == 0, result.stderr[-4_000:]
    for write in writes:
        for task in range(TASKS):
            assert (tmp_path / write / f"struck-{task}").exists()
