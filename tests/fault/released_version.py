"""The released version of Waltz, as processes together with those of this checkout."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fault.load import PROJECT_ROOT
from waltz_core.local import LocalCluster

RELEASE = "0.2.0"
# The commit of the release: no package index has it yet.
RELEASED_COMMIT = "92906b7e33b5433428ef3901d016dbd2c150ae11"


def unpack(directory: Path) -> Path:
    """Write the packages of the release into a directory; skip the test without the history."""
    archive = [
        "git",
        "-C",
        str(PROJECT_ROOT),
        "archive",
        RELEASED_COMMIT,
        "waltz_core",
        "waltz_spark",
    ]
    result = subprocess.run(archive, capture_output=True, check=False)
    if result.returncode:
        pytest.skip(f"the checkout has no history with release {RELEASE}: {result.stderr!r}")
    subprocess.run(["tar", "-x", "-C", str(directory)], input=result.stdout, check=True)
    return directory


@contextmanager
def packages_of(directory: Path | None) -> Iterator[None]:
    """Let new processes import the packages of a directory; for None, those of this checkout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(PROJECT_ROOT if directory is None else directory))
        yield


def restart(cluster: LocalCluster, name: str, directory: Path | None) -> None:
    """Stop a member as an operator does, and start it with the packages of a directory."""
    cluster.kill(name, 15)
    with packages_of(directory):
        cluster.start(name)
    pid = cluster.member(name).pid
    environment = Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
    assert f"PYTHONPATH={PROJECT_ROOT if directory is None else directory}".encode() in environment


def run_script(script: str, *words: str, directory: Path | None) -> str:
    """Run a Python script with the packages of a directory; return its output."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(PROJECT_ROOT if directory is None else directory),
    }
    result = subprocess.run(
        [sys.executable, "-c", script, *words],
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
