"""The same over Spark Connect: a server in processes of its own, a client that knows no Java.

A Python process has sessions of Spark's classic kind or of Connect, so `over_connect.py` runs in a
pytest of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.spark

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(900)  # a server, a session, and some twenty jobs
def test_everything_over_spark_connect(connect: str) -> None:
    tests = ROOT / "tests" / "spark" / "over_connect.py"
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    environment = {**os.environ, "WALTZ_TESTS_CONNECT": connect, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        line, cwd=ROOT, env=environment, capture_output=True, timeout=870, check=False
    )
    assert ran.returncode == 0, f"{ran.stdout.decode()}\n{ran.stderr.decode()[-4_000:]}"
