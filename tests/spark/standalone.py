"""A real Spark cluster out of the pip package: a standalone master and two workers, each a process.

Master and driver run on the hub, like the processes of Waltz. Each worker runs on another simulated
host (`simulated_hosts.py`). All of them have the settings of `conf/spark-defaults.conf`.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.spark.simulated_hosts import SimulatedHost, die_with_parent

ROOT = Path(__file__).parents[2]
SPARK_HOME = Path(os.environ["SPARK_HOME"])  # `tests/spark_home.py`
JOB_TIMEOUT_S = 500
DAEMONS_PACKAGE = "org.apache.spark.deploy"
PYTHON_WORKER = "pyspark.daemon"
TCP_ESTABLISHED = "01"


@dataclass
class FinishedJob:
    """The output of a submitted job, and its observed connections."""

    exit_code: int
    output: str
    errors: str
    events: list[dict[str, Any]]
    # By process ID of a Python worker: the maximum of its concurrent connections to each port.
    connections: dict[int, dict[int, int]] = field(default_factory=dict)

    @property
    def report(self) -> dict[str, Any]:
        """The last line of its output, which is JSON."""
        assert self.exit_code == 0, self.errors[-6_000:]
        document: dict[str, Any] = json.loads(self.output.strip().splitlines()[-1])
        return document

    def attempts(self) -> list[dict[str, Any]]:
        """Return each attempt of each task, from Spark's event log: `Index`, `Attempt`, `Host` ...

        `won` states whether Spark used the result of this attempt.
        """
        found: dict[int, dict[str, Any]] = {}
        for event in self.events:
            if event["Event"] in ("SparkListenerTaskStart", "SparkListenerTaskEnd"):
                info = event["Task Info"]
                won = event.get("Task End Reason", {}).get("Reason") == "Success"
                found[info["Task ID"]] = {**info, "won": won}
        return list(found.values())


class StandaloneSpark:
    """A master and its workers.

    Args:
        directory: for logs, work and events.
        hub: the host of the master and the drivers.
        worker_hosts: the hosts of the workers.
    """

    def __init__(
        self, directory: Path, hub: SimulatedHost, worker_hosts: tuple[SimulatedHost, SimulatedHost]
    ) -> None:
        self.hub, self.worker_hosts = hub, worker_hosts
        self.master = ""
        self.workers: list[subprocess.Popen[bytes]] = []
        self._directory = directory
        self._events = directory / "events"
        self._job_count = 0

    @contextlib.contextmanager
    def running(self) -> Iterator["StandaloneSpark"]:
        """Run the cluster for the duration of a `with` block; all of its processes end with it."""
        self._events.mkdir(parents=True)
        with contextlib.ExitStack() as stack:
            words = ("master.Master", "--host", self.hub.address, "--port", "0")
            stack.enter_context(self._daemon("master", self.hub, *words))
            found = self._await_matches("master", r"Starting Spark master at (spark://\S+)", 1)
            self.master = found[0]
            for number, worker_host in enumerate(self.worker_hosts, 1):
                words = (
                    "worker.Worker",
                    "--host",
                    worker_host.address,
                    "--cores",
                    "2",
                    "--memory",
                    "1g",
                )
                words += ("--work-dir", str(self._directory / f"work-{number}"), self.master)
                worker = stack.enter_context(self._daemon(f"worker-{number}", worker_host, *words))
                self.workers.append(worker)
            self._await_matches("master", r"Registering worker (\S+)", len(self.worker_hosts))
            yield self

    def submit(
        self,
        script: str,
        *arguments: str,
        ports: tuple[int, ...] = (),
        imports_tests: bool = False,
        **settings: str,
    ) -> FinishedJob:
        """Submit a script from the hub, as a user would, and wait for its end.

        The connections of Python workers to `ports` are counted meanwhile. With `imports_tests` the
        script and its functions may import modules of the tests.
        """
        self._job_count += 1
        name = f"job-{self._job_count}"
        event_settings = {
            "spark.eventLog.enabled": "true",
            "spark.eventLog.dir": self._events.as_uri(),
            "spark.eventLog.compress": "false",
            "spark.eventLog.rolling.enabled": "false",
        }
        small_settings = {
            "spark.executor.memory": "512m",
            "spark.executor.extraJavaOptions": os.environ["SPARK_SUBMIT_OPTS"],
            "spark.sql.shuffle.partitions": "4",
        }
        conf = {**small_settings, "spark.ui.enabled": "false", **event_settings, **settings}
        path = {"PYTHONPATH": str(ROOT)} if imports_tests else {}
        conf |= {f"spark.executorEnv.{key}": value for key, value in path.items()}
        words = [str(SPARK_HOME / "bin" / "spark-submit"), "--master", self.master, "--name", name]
        for key, value in conf.items():
            words += ["--conf", f"{key}={value}"]
        words += [str(ROOT / "tests" / "spark" / script), *arguments]
        before = set(self._events.iterdir())
        with self._run_program(name, self.hub, words, path) as job:
            connections = self._watch_connections(job, ports)
        logs = set(self._events.iterdir()) - before
        events = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
        output, errors = (
            self._log_path(name, end).read_text(errors="replace") for end in ("out", "err")
        )
        return FinishedJob(job.returncode, output, errors, events, connections)

    # -- the processes

    @contextlib.contextmanager
    def _daemon(
        self, name: str, host: SimulatedHost, *words: str
    ) -> Iterator[subprocess.Popen[bytes]]:
        main, *options = words
        command = [str(SPARK_HOME / "bin" / "spark-class"), f"{DAEMONS_PACKAGE}.{main}"]
        defaults = ["--properties-file", str(ROOT / "conf" / "spark-defaults.conf")]
        words_of_all = [*command, "--webui-port", "0", *defaults, *options]
        with self._run_program(name, host, words_of_all, {}) as started:
            yield started

    @contextlib.contextmanager
    def _run_program(
        self, name: str, host: SimulatedHost, words: list[str], variables: dict[str, str]
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Run a program for the duration of a `with` block; its child processes end with it."""
        environment = os.environ | {
            "SPARK_CONF_DIR": str(ROOT / "conf"),
            "SPARK_LOCAL_IP": host.address,
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": os.environ["SPARK_SUBMIT_OPTS"],
            "PYSPARK_PYTHON": sys.executable,
            **variables,
        }
        with (
            self._log_path(name, "out").open("wb") as output,
            self._log_path(name, "err").open("wb") as errors,
            subprocess.Popen(
                host.command(*words),
                env=environment,
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - it only asks the kernel
            ) as child,
        ):
            try:
                yield child
            finally:
                _end_process_tree(child)

    def _log_path(self, name: str, end: str) -> Path:
        return self._directory / f"{name}.{end}"

    def _await_matches(self, name: str, pattern: str, count: int) -> list[str]:
        """Return the matches in a log as soon as there is the given number of them."""

        def found() -> list[str]:
            return re.findall(pattern, self._log_path(name, "err").read_text(errors="replace"))

        deadline = time.monotonic() + JOB_TIMEOUT_S
        while len(found()) < count:
            assert time.monotonic() < deadline, self._log_path(name, "err").read_text(
                errors="replace"
            )
            time.sleep(0.05)
        return found()

    def _watch_connections(
        self, job: subprocess.Popen[bytes], ports: tuple[int, ...]
    ) -> dict[int, dict[int, int]]:
        """Wait for a job's end; return the most connections of each Python worker by port."""
        connections_max: dict[int, dict[int, int]] = {}
        deadline = time.monotonic() + JOB_TIMEOUT_S
        while job.poll() is None:
            assert time.monotonic() < deadline, self._log_path(
                f"job-{self._job_count}", "err"
            ).read_text()
            for pid in self._python_workers() if ports else ():
                now, maximum_by_port = connections_of(pid), connections_max.setdefault(pid, {})
                for port in ports:
                    maximum_by_port[port] = max(maximum_by_port.get(port, 0), now.count(port))
            time.sleep(0.1)
        return connections_max

    def _python_workers(self) -> list[int]:
        found = []
        for worker in self.workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(worker.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        is_python = PYTHON_WORKER in child.cmdline()
                        if is_python and PYTHON_WORKER in child.parent().cmdline():
                            found.append(child.pid)
        return found


def connections_of(pid: int) -> list[int]:
    """Return the remote port of each TCP connection that a process has, in its own network."""
    try:
        handles = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
        table = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    except OSError:  # it has ended
        return []
    rows = [line.split() for line in table]
    rows_of_process = [
        row for row in rows if f"socket:[{row[9]}]" in handles and row[3] == TCP_ESTABLISHED
    ]
    return [int(row[2].split(":")[1], 16) for row in rows_of_process]


def _end_process_tree(child: subprocess.Popen[bytes]) -> None:
    """End a process and its child processes; a Spark worker ends its executors itself."""
    try:
        family = psutil.Process(child.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    child.terminate()
    try:
        child.wait(20)
    except subprocess.TimeoutExpired:
        child.kill()
    for remaining in psutil.wait_procs(family, timeout=10)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            remaining.kill()
