"""The followers of `table_kills.py`, and the processes of a follower that can be killed.

Rules:
    1. A killed follower is started again, as a supervisor does.
    2. The command `follow` never ends by itself. If a process of a Spark job or a member of the
       cluster was killed, the job may end with the error of a failed job.
    3. All processes of a Spark job are in one session of Linux. So the test finds and ends these
       processes without the driver of the job.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import psutil

from tests.commands import run_command
from tests.time_limits import TEST_TIMEOUT_S
from tests.written_log import COLUMNS, WrittenLog

ROOT = Path(__file__).parents[2]
FINISHED_TWICE = "a repeated command has written version {after}, after version {before}"


class TableFollower(Protocol):
    """A follower of a table, as a supervisor runs it."""

    targets: Mapping[str, int]  # kinds of processes to kill -> weight
    unexpected_ends: list[str]  # texts about ends without a kill

    def start(self) -> None:
        """Start it if it does not run."""

    def kill(self, target: str) -> bool:
        """Kill a process of this kind; return False if no such process runs."""

    def finish(self) -> list[str]:
        """Apply the whole log twice; return the errors."""

    def close(self) -> None:
        """End all its processes."""


class _Supervised:
    """The process of a follower, which is started again when it has ended."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._command, self._log = command, log
        self._child: subprocess.Popen[bytes] | None = None
        self._sessions: list[int] = []
        self.unexpected_ends: list[str] = []

    def start(self) -> None:
        """Start it if it does not run."""
        if self._child is not None:
            code = self._child.poll()
            if code is None:
                return
            if code != -signal.SIGKILL:
                self.unexpected_ends.append(f"ended with {code}: {self._last_line()}")
        with self._log.open("ab") as log:
            self._child = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                start_new_session=True,
            )
        self._sessions.append(self._child.pid)

    def process(self) -> psutil.Process | None:
        """Return its process; None if it has ended."""
        if self._child is None or self._child.poll() is not None:
            return None
        return psutil.Process(self._child.pid)

    def wait(self) -> None:
        """Wait for its end, after it was killed."""
        assert self._child is not None
        self._child.wait(TEST_TIMEOUT_S)

    def end_sessions(self) -> None:
        """Kill all its processes that still run (rule 3)."""
        for session in self._sessions:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(session, signal.SIGKILL)
        if self._child is not None:
            self._child.wait()
            self._child = None

    def _last_line(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        found = [line for line in lines if "Error" in line or "Exception" in line or "Hint" in line]
        return (found or lines or [""])[-1][:300]


class CommandFollower:
    """`waltz-core follow`."""

    targets: Mapping[str, int] = {"follower": 2}
    columns: Sequence[str] = COLUMNS

    def __init__(self, written: WrittenLog, table: Path, directory: Path) -> None:
        self._table = table
        self._words = written.command(table, "--batch-transactions", "100", columns=self.columns)
        self._process = _Supervised(
            [sys.executable, "-m", "waltz_core", *self._words], directory / "follower.log"
        )
        self.unexpected_ends = self._process.unexpected_ends
        self.start = self._process.start
        self.close = self._process.end_sessions

    def kill(self, target: str) -> bool:
        """Kill the process."""
        process = self._process.process()
        if process is None:
            return False
        process.kill()
        self._process.wait()
        return True

    def finish(self) -> list[str]:
        """Run the command to the end, twice."""
        versions = []
        for _ in range(2):
            result = run_command(*self._words, "--until", "now")
            if result.returncode:
                return [f"the last run ended with {result.returncode}: {result.stderr}"]
            versions.append(len(list(self._table.glob("_delta_log/*.json"))))
        if versions[0] != versions[1]:
            return [FINISHED_TWICE.format(before=versions[0] - 1, after=versions[1] - 1)]
        return []


class InferringFollower(CommandFollower):
    """`waltz-core follow`, which infers the columns."""

    columns = ()


class SparkFollower:
    """`waltz_spark.follow` on a master with two executors (`local-cluster`)."""

    # The driver is a Python process and its Java process. A kill ends both, or only one of them.
    targets: Mapping[str, int] = {"driver": 2, "python": 1, "java": 1, "executor": 2, "worker": 1}

    def __init__(self, written: WrittenLog, table: Path, directory: Path) -> None:
        self._command = [sys.executable, "-m", "tests.chaos.endless_spark_job", written.connect]
        self._command.append(str(table))
        self._directory = directory
        self._process = _Supervised(self._command, directory / "follower.log")
        self.unexpected_ends = self._process.unexpected_ends
        self.start = self._process.start
        self.close = self._process.end_sessions

    def kill(self, target: str) -> bool:
        """Kill the driver, one of its two processes, an executor, or a Python worker."""
        driver = self._process.process()
        if driver is None:
            return False
        try:
            victims = self._victims(driver, target)
            for victim in victims:
                victim.kill()
        except psutil.NoSuchProcess:
            return False
        if driver in victims:
            self._process.wait()
        return bool(victims)

    def _victims(self, driver: psutil.Process, target: str) -> list[psutil.Process]:
        java = [child for child in driver.children() if child.name() == "java"]
        executors = [child for one in java for child in one.children() if child.name() == "java"]
        if target == "executor":
            return executors[-1:]
        if target == "worker":  # a fork of the daemon, which is a child of its executor
            daemons = [child for one in executors for child in one.children()]
            return [child for one in daemons for child in one.children()][:1]
        return {"driver": [*java, driver], "python": [driver], "java": java}[target]

    def finish(self) -> list[str]:
        """Run a job to the end, which repeats the call and the batch."""
        # Without its Python process, a Java process may still commit, until it finds the pipe
        # closed and ends.
        self._process.end_sessions()
        log = self._directory / "finish.log"
        with log.open("wb") as output:
            child = subprocess.Popen(
                [*self._command, "finish"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                start_new_session=True,
            )
        code = child.wait(2 * TEST_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        if code == 3:
            return ["a repeated call or batch of Spark has written a version"]
        return [f"the last job ended with {code}; its output is in {log}"] if code else []
