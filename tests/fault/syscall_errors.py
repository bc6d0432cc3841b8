"""Errors that strace injects into the system calls of a storage."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fault.load import Scenario, wait_until
from tests.time_limits import TEST_TIMEOUT_S


@contextmanager
def inject_errors(scenario: Scenario, storage: str, *options: str) -> Iterator[None]:
    """Inject errors into system calls of a storage, by options of strace."""
    tool = shutil.which("strace")
    if tool is None:
        pytest.skip("strace is not installed")
    process = scenario.cluster.member(storage).process()
    assert process is not None
    command = [tool, "-f", "-qq", "-p", str(process.pid), "-o", "/dev/null", *options]
    strace = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        # strace prints nothing when it is attached, so the status in /proc is polled.
        status = Path(f"/proc/{process.pid}/status")
        wait_until(
            "strace is attached",
            lambda: strace.poll() is not None or "TracerPid:\t0" not in status.read_text(),
        )
        if strace.poll() is not None:
            assert strace.stderr is not None
            pytest.skip(f"strace cannot trace processes here: {strace.stderr.read().strip()}")
        yield
    finally:
        # If strace is requested to end, it waits without limit for threads that may be ending.
        strace.kill()
        strace.communicate(timeout=TEST_TIMEOUT_S)
