"""Executors and workers are killed with -9 during a write, on a real Spark cluster."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import waltz_core.local
from tests.spark.once_rows import TASKS, WRITES

pytestmark = pytest.mark.spark

ROOT = Path(__file__).parents[2]
SECONDS_MAX = 500


def run_job(module: str, directory: Path) -> None:
    with waltz_core.local.running() as cluster:
        done = subprocess.run(
            [sys.executable, "-m", module, cluster.connect, str(directory)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-4_000:]


def test_rows_are_written_once_with_the_option_and_repeated_without_it(
    tmp_path: Path,
) -> None:
    run_job("tests.spark.once_job", tmp_path)
    for write in WRITES:
        for task in range(TASKS):
            assert (tmp_path / write / f"struck-{task}").exists()


def test_encrypted_rows_are_written_once_with_keys_of_a_function(tmp_path: Path) -> None:
    run_job("tests.spark.encrypted_job", tmp_path)
    for task in range(TASKS):
        assert (tmp_path / f"struck-{task}").exists()
