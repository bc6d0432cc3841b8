"""Executors and workers killed with -9 in the middle of a write; real Spark, real processes."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import waltz_core.local
from tests.spark.once_rows import EXPECTED, ROWS, TASKS, rows_in

pytestmark = pytest.mark.spark

ROOT = Path(__file__).parents[2]
SECONDS_MAX = 250


def run_job(connect: str, directory: Path, *options: str) -> dict[str, int]:
    """Run the job; return the counts that its driver was told."""
    arguments = [sys.executable, "-m", "tests.spark.once_job", connect, str(directory), *options]
    done = subprocess.run(
        arguments,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    for task in range(TASKS):
        assert (directory / f"struck-{task}").exists()
    counts: dict[str, int] = json.loads(done.stdout.strip().splitlines()[-1])
    return counts


def test_every_row_is_there_once(tmp_path: Path) -> None:
    with waltz_core.local.running() as cluster:
        counts = run_job(cluster.connect, tmp_path)
        assert rows_in(cluster.connect) == Counter(dict.fromkeys(EXPECTED, 1))
        assert (counts["committed"], counts["rejected"]) == (TASKS * ROWS, 0)


def test_the_same_job_with_it_off_writes_rows_twice(tmp_path: Path) -> None:
    with waltz_core.local.running() as cluster:
        run_job(cluster.connect, tmp_path, "exactlyOnce=false")
        found = rows_in(cluster.connect)
        assert set(found) == EXPECTED
        assert max(found.values()) > 1
