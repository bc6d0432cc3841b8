"""Delta tables that follow the log in Spark: drivers, workers and executors are killed."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests import table_libraries
from tests.spark.tables_job import DURING_A_COMMIT, STEPS, follow_table
from tests.time_limits import TEST_TIMEOUT_S
from tests.written_log import WrittenLog, check_versions, end_marks, read_table

pytestmark = [
    pytest.mark.spark,
    pytest.mark.core,
    pytest.mark.skipif(
        not table_libraries.DELTA.jars(), reason=table_libraries.DELTA.missing_reason()
    ),
]

ROOT = Path(__file__).parents[2]


def run_job(written: WrittenLog, table: Path, step: str, **more: str) -> int:
    result = subprocess.run(
        [sys.executable, "-m", "tests.spark.tables_job", written.connect, str(table), step],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), **more},
        capture_output=True,
        text=True,
        timeout=2 * TEST_TIMEOUT_S,
        check=False,
    )
    assert result.returncode in (0, -9), result.stderr[-4000:]
    return result.returncode


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([DURING_A_COMMIT], id=DURING_A_COMMIT),
        pytest.param(STEPS, id="every step", marks=pytest.mark.versions),
    ],
)
def test_a_follower_continues_after_its_driver_was_killed(
    spark: SparkSession, written: WrittenLog, tmp_path: Path, steps: Sequence[str]
) -> None:
    """Each kill needs a separate Spark. The kill in `make test` leaves files without a commit."""
    table = tmp_path / "table"
    for step in steps:
        assert run_job(written, table, step) == -9
        if any(table.glob("_delta_log/*.json")):  # the first changes create the table
            check_versions(written, table)
    follow_table(spark, written.connect, str(table))
    check_versions(written, table)
    assert read_table(table) == written.replayed(end_marks(written))


@pytest.mark.versions
def test_a_table_is_correct_after_workers_and_executors_are_killed(
    written: WrittenLog, tmp_path: Path
) -> None:
    table = tmp_path / "table"
    assert run_job(written, table, "tasks", STRUCK=str(tmp_path)) == 0
    assert (tmp_path / "worker").exists()
    assert (tmp_path / "executor").exists()
    check_versions(written, table)
    assert read_table(table) == written.replayed(end_marks(written))
