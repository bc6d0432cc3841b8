"""Many seeds in several processes: an interrupted or killed run leaves no process."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.time_limits import TEST_TIMEOUT_S

pytestmark = pytest.mark.sim


@pytest.fixture(autouse=True)
def interrupts_are_handled():
    """Let children handle interrupts, which a shell may block for background jobs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def started():
    run = subprocess.Popen(
        [sys.executable, "-m", "waltz_sim", "--seeds", "100000", "--jobs", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert run.stdout is not None
    return run


def are_at_work(processes):
    return sum(sum(process.cpu_times()[:2]) > 1.5 for process in processes) >= 2


def interrupted_when(is_interrupt_due):
    """Interrupt a run of the command as a terminal does; return its exit code and output."""
    run = started()
    text = run.stdout.readline()
    deadline = time.monotonic() + TEST_TIMEOUT_S
    while not is_interrupt_due(psutil.Process(run.pid).children()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    children = psutil.Process(run.pid).children()
    os.killpg(run.pid, signal.SIGINT)
    text += run.communicate(timeout=TEST_TIMEOUT_S)[0]
    _, living = psutil.wait_procs(children, timeout=TEST_TIMEOUT_S)
    assert not living
    return run.returncode, text


@pytest.mark.parametrize(
    "is_interrupt_due",
    [
        pytest.param(lambda all_: len(all_) >= 3, id="while its processes start"),
        pytest.param(are_at_work, id="while they run"),
    ],
)
def test_an_interrupt_ends_all_processes_and_is_reported_in_a_line(is_interrupt_due):
    code, text = interrupted_when(is_interrupt_due)
    first_line, *progress, last_line = text.splitlines()
    assert first_line == "seeds from 0 on, 2 processes"
    assert all(" of 100000 seeds, " in line for line in progress)
    assert last_line.startswith("interrupted after ")
    assert last_line.endswith(" s: 0 broke a rule")
    assert code == 130


def test_a_killed_run_leaves_no_process():
    run = started()
    deadline = time.monotonic() + TEST_TIMEOUT_S
    while not are_at_work(children := psutil.Process(run.pid).children()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    run.kill()
    assert run.wait(TEST_TIMEOUT_S) == -signal.SIGKILL
    _, living = psutil.wait_procs(children, timeout=TEST_TIMEOUT_S)
    for each in living:
        each.kill()
    run.communicate(timeout=TEST_TIMEOUT_S)
    assert not living
