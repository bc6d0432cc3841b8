"""Three examples always fail with a plain log and never fail with Waltz."""

import subprocess
import sys

import pytest

from tests.fault.load import PROJECT_ROOT
from tests.time_limits import TEST_TIMEOUT_S

pytestmark = pytest.mark.fault


def run(name: str, *options: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(PROJECT_ROOT / "examples" / f"{name}.py"), *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=TEST_TIMEOUT_S,
    )


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("counter", "after 10 increments the counter is 10"),
        ("payments", "payer: the payment was made already"),
    ],
)
def test_with_locks_the_anomaly_does_not_happen(waltz_cluster, name, line):
    result = run(name, "--connect", waltz_cluster)
    assert result.returncode == 0, result.stdout + result.stderr
    assert line in result.stdout.splitlines()
    assert result.stdout.splitlines()[-1].startswith(f"{name}: OK")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("counter", "LOST: 5 of 10 increments"),
        ("constraint", "the balance is -60"),
        ("payments", "WRONG: paid 2 times"),
    ],
)
def test_on_a_plain_log_the_anomaly_happens(waltz_cluster, name, line):
    result = run(name, "--connect", waltz_cluster, "--plain")
    assert result.returncode == 1, result.stdout + result.stderr
    assert line in result.stdout.splitlines()


@pytest.mark.slow
def test_an_example_without_a_cluster_starts_one():
    result = run("constraint")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "starting a small cluster" in result.stdout
    assert "the balance is 20" in result.stdout.splitlines()
    assert result.stdout.splitlines()[-1].startswith("constraint: OK")
