"""Spark Connect: a server in separate processes, and a client without Java.

A Python process can have either classic Spark sessions or Connect sessions. Therefore
`connect_tests.py` runs in a separate pytest process.
"""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.time_limits import TEST_TIMEOUT_S

pytestmark = pytest.mark.spark

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_all_tests_of_spark_connect_pass_in_a_separate_run(connect: str) -> None:
    tests = ROOT / "tests" / "spark" / "connect_tests.py"
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    environment = {**os.environ, "WALTZ_TESTS_CONNECT": connect, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        line, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        output, _ = process.communicate(timeout=2 * TEST_TIMEOUT_S)
    finally:
        end(process)
    assert process.returncode == 0, output.decode()


def end(process: subprocess.Popen[bytes]) -> None:
    """End all processes that still run, including the server of Spark Connect and its workers."""
    if process.poll() is not None:
        return
    for each in (*psutil.Process(process.pid).children(recursive=True), process):
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
