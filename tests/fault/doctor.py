"""A cluster with faults, the doctor that examines it, and a check of all committed rows."""

import contextlib
import io
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.fault.cluster_commands import admin_port_arguments, run_successful, start_new_storage
from tests.fault.load import PROJECT_ROOT
from tests.time_limits import PATIENT_CLIENT, TEST_TIMEOUT_S
from waltz_core.cli.main import main
from waltz_core.client import WaltzClient
from waltz_core.local import LocalCluster
from waltz_core.records.record import RECORD_OVERHEAD_BYTES

ROUNDS_MAX, ROUND_S = 4, 10.0
PAUSE_S = 0.2  # between two runs of the doctor, because no process reports its findings
PARTITIONS, ROWS = 2, 5
CRC_BYTES = 4  # at the end of a record
# A doctor on another machine cannot see the processes of this machine.
ABSENT_DIRECTORY = Path("/nonexistent")


@contextlib.contextmanager
def faulty_cluster(
    where: Path, settings: dict[str, dict[str, object]] | None = None
) -> Iterator["DiagnosedCluster"]:
    """Run three ZooKeeper servers, three storages and a spare one, two servers."""
    diagnosed = DiagnosedCluster(where, settings)
    cluster = LocalCluster(where, zookeeper_count=3, partition_count=PARTITIONS, settings=settings)
    diagnosed.started.append(cluster)
    try:
        cluster.up()
        spare = start_new_storage(cluster)
        run_successful(cluster, "add-storage", spare, *admin_port_arguments(cluster, spare))
        yield diagnosed
    finally:
        for daemon in diagnosed.daemons:
            daemon.kill()
            daemon.wait()
        diagnosed.cluster()  # as it is now: the last commands may have started processes
        for each in reversed(diagnosed.started):
            each.down()


class DiagnosedCluster:
    """The cluster of a file's tests, and the rows that clients have committed."""

    def __init__(
        self, directory: Path, settings: dict[str, dict[str, object]] | None = None
    ) -> None:
        self.directory = directory
        self._settings = settings
        # The code that starts a process must also end it.
        self.started: list[LocalCluster] = []
        self.daemons: list[subprocess.Popen[bytes]] = []
        self._committed: dict[tuple[int, int], bytes] = {}

    def cluster(self) -> LocalCluster:
        """Return the current state of the cluster; printed commands may have started processes."""
        cluster = LocalCluster(self.directory, settings=self._settings)
        self.started.append(cluster)
        return cluster

    def write(self, connect: str) -> None:
        """Commit some rows in each partition."""
        with WaltzClient(connect, PATIENT_CLIENT) as client:
            for partition in range(PARTITIONS):
                rows = [b"row %d" % (len(self._committed) + row) for row in range(ROWS)]
                futures = [client.append(row, partition=partition) for row in rows]
                for row, future in zip(rows, futures, strict=True):
                    self._committed[partition, future.result(TEST_TIMEOUT_S)] = row

    def check_rows(self, connect: str) -> None:
        """Check that all rows reported as committed can be read."""
        with WaltzClient(connect, PATIENT_CLIENT) as client:
            for partition in range(PARTITIONS):
                last = client.high_water_mark(partition, linearizable=True)
                rows = [
                    row
                    for chunk in client.read_range(partition, 0, last)
                    for row in _payloads_of(bytes(chunk.records), chunk.lengths.tolist())
                ]
                assert len(rows) == last + 1
                committed = {
                    at: row for (of, at), row in self._committed.items() if of == partition
                }
                assert {at: rows[at] for at in committed} == committed

    def run_daemon(self, line: str, directory: Path) -> None:
        """Start a daemon as printed, in the folder of its settings file."""
        words = ["/bin/sh", "-c", f"exec {line}"]
        with (directory / "daemon.log").open("ab") as log:
            self.daemons.append(
                subprocess.Popen(words, env=_environment(), cwd=directory, stdout=log, stderr=log)
            )

    def end_daemons(self) -> None:
        """End the daemons that `run_daemon` has started."""
        while self.daemons:
            daemon = self.daemons.pop()
            daemon.terminate()
            daemon.wait(TEST_TIMEOUT_S)


def _payloads_of(records: bytes, lengths: list[int]) -> Iterator[bytes]:
    ends = list(itertools.accumulate(lengths))
    for end, length in zip(ends, lengths, strict=True):
        yield records[end - length + RECORD_OVERHEAD_BYTES - CRC_BYTES : end - CRC_BYTES]


def run_doctor(*words: str, code: int | None = None) -> list[dict[str, str]]:
    """Return the findings of the doctor."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        found = main(["doctor", "--json", "--timeout-s", "1.5", *words])
    report = json.loads(out.getvalue())
    assert found == (0 if report["is_healthy"] else 1)
    # If the cluster becomes unreachable while the doctor runs, the report is not healthy, although
    # it has no finding.
    assert not (report["is_healthy"] and report["findings"])
    assert code is None or found == code
    findings: list[dict[str, str]] = report["findings"]
    return findings


def local_options(directory: Path) -> tuple[str, str]:
    """Run the doctor where the cluster's processes are known."""
    return "--directory", str(directory)


def remote_options(connect: str) -> tuple[str, str, str, str]:
    """Run the doctor as on another machine."""
    return "--connect", connect, "--directory", str(ABSENT_DIRECTORY)


def await_findings(names: Iterable[str], *words: str) -> list[dict[str, str]]:
    """Wait until the doctor has exactly these findings; return them."""
    deadline = time.monotonic() + TEST_TIMEOUT_S
    while True:
        findings = run_doctor(*words)
        if set(names) == {finding["name"] for finding in findings}:
            return findings
        assert time.monotonic() < deadline, f"expected the findings {set(names)}, found {findings}"
        time.sleep(PAUSE_S)


def _environment(*first_on_path: Path) -> dict[str, str]:
    path = [*map(str, first_on_path), str(Path(sys.executable).parent), os.environ["PATH"]]
    return {**os.environ, "PATH": ":".join(path), "PYTHONPATH": str(PROJECT_ROOT)}


def run_printed_command(line: str, *first_on_path: Path) -> str:
    """Run a command in a shell; return its output."""
    result = subprocess.run(
        ["/bin/sh", "-c", line],
        env=_environment(*first_on_path),
        capture_output=True,
        text=True,
        check=False,
        timeout=TEST_TIMEOUT_S,
    )
    assert "Traceback" not in result.stderr, result.stderr
    return f"{line}: {result.returncode}, {result.stdout}{result.stderr}"


def _commands_in(found: list[dict[str, str]]) -> list[str]:
    return list(dict.fromkeys(each["command"] for each in found))


def repair(directory: Path, found: list[dict[str, str]], *first_on_path: Path) -> None:
    """Run the doctor's commands until it has no findings.

    The directory `first_on_path` precedes all others in the PATH of the printed commands.
    """
    outputs: list[str] = []
    for _ in range(ROUNDS_MAX):
        commands = _commands_in(found)
        for line in commands:
            # Some commands may lose data, or need the knowledge of the operator. The doctor does
            # not decide about such commands, but this test runs them.
            words = f"{line} --yes" if "accept-replicas" in line else line
            words = words.replace("--replicas COUNT", "--replicas 3")
            outputs.append(run_printed_command(words, *first_on_path))
        # On a busy machine the effect of a command takes time, so the findings are read again
        # before a command is repeated.
        deadline = time.monotonic() + ROUND_S
        while (found := run_doctor(*local_options(directory))) and _commands_in(found) == commands:
            if time.monotonic() > deadline:
                break
            time.sleep(PAUSE_S)
        if not found:
            return
    report = "\n".join(outputs)
    pytest.fail(f"findings after {ROUNDS_MAX} rounds: {found}; commands:\n{report}")
