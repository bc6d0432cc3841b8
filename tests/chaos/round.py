"""One round of chaos: a cluster, its applications, a schedule of faults, and the verdict.

`make chaos` runs many rounds, and a test runs a short one.

Rules:
    1. The driver does not wait for the effect of a fault. The next fault starts at its drawn time.
    2. After the last fault all links are repaired, and all members are started. No daemon starts
       without ZooKeeper. Once ZooKeeper answers, every client must receive a commit in every
       partition within a time limit, and all replicas must become equal.
    3. Then there is a period without faults. Its only outcomes are "committed" and "rejected".
    4. With an archive, all servers, storages and stores are then killed at the same time, so that
       no upload is left. One client starts again at ID 0 and writes. So each partition gets a new
       store session that archives and collects. Then the archive, the logs and the feeds are
       compared.
"""

import contextlib
import json
import re
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos import archive_checks
from tests.chaos.cluster import ChaosCluster, run_cluster
from tests.chaos.history import ClientRun, Log, check_history, longest_gap_s, read_log
from tests.chaos.network import environment
from tests.chaos.schedule import Fault, Schedule
from tests.fault.load import four_writers
from tests.spark.simulated_hosts import die_with_parent
from tests.time_limits import TEST_TIMEOUT_S, machine_slowdown
from waltz_core.errors import ObjectMissing, WaltzError

ZOOKEEPER_TIMEOUT_S = 60.0
PROGRESS_TIMEOUT_S = 45.0
EQUAL_REPLICAS_TIMEOUT_S = 60.0
# An interrupted request to the store fails after 20 s, and may be repeated.
ARCHIVE_TIMEOUT_S = 120.0
# A round with an archive waits until each partition has at least this high-water mark, so that the
# logs have enough segments for storages to remove some.
TRANSACTIONS_MIN = 800
FAULT_FREE_S = 4.0
SLEEP_S = 0.02
POLL_INTERVAL_S = 0.25
# Lines that a daemon must never log.
ERROR_LINE = re.compile(r" (ERROR|CRITICAL) |^Traceback |AssertionError")
# If the machine is slower by more than this factor, a process may get no CPU time for a whole
# session timeout.
SLOWNESS_MAX = 3.0
LOOP_UNRESPONSIVE = " process.event_loop_unresponsive "

PrintProgress = Callable[[str], None]


@dataclass
class RoundOutcome:
    """The result of a round."""

    schedule: Schedule
    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    skipped_faults: Counter[str] = field(default_factory=Counter)
    zookeeper_s: float = 0.0
    recovered_s: float = 0.0
    engaged_s: float = 0.0
    gap_s: float = 0.0


class Applications:
    """The client processes; a restarted client has another `ClientRun`."""

    def __init__(self, cluster: ChaosCluster, directory: Path) -> None:
        self._cluster = cluster
        self._directory = directory
        self._running: dict[str, tuple[ClientRun, subprocess.Popen[str]]] = {}
        self._settled_runs: set[str] = set()  # names of runs that send no more
        self.client_runs: list[ClientRun] = []
        self.unexpected_ends: list[str] = []

    def start(self, client: str) -> None:
        """Start a client if it does not run."""
        if client in self._running:
            if self._running[client][1].poll() is None:
                return
            self._record_ended_client(client)
            self._close_client(client)
        client_run = ClientRun(f"{client}.{len(self.client_runs)}", self._directory)
        words = (self._cluster.connect, client_run.name, str(self._directory.absolute()))
        machine = self._cluster.network.machines[client]
        with (self._directory / f"{client}.log").open("ab") as log:
            child = subprocess.Popen(
                machine.command(sys.executable, "-m", "tests.chaos.client", *words),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment(),
                preexec_fn=die_with_parent,  # noqa: PLW1509 - the main thread is the only one
            )
        self._running[client] = client_run, child
        self.client_runs.append(client_run)

    def _record_ended_client(self, client: str) -> None:
        """Record a client that has ended by itself."""
        client_run, child = self._running[client]
        if not client_run.has_ended:
            self.unexpected_ends.append(
                f"{client_run.name} ended by itself, with {child.returncode}"
            )
            client_run.has_ended = True

    def kill(self, client: str) -> None:
        """Kill a client."""
        if client not in self._running:
            return
        client_run, child = self._running[client]
        client_run.has_ended = True
        child.kill()
        child.wait()
        self._close_client(client)

    def _close_client(self, client: str) -> None:
        _, child = self._running.pop(client)
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def poll(self) -> None:
        """Read the journals of all clients."""
        for client_run in self.client_runs:
            client_run.poll()

    @property
    def live_runs(self) -> list[ClientRun]:
        """Return the runs of the running clients."""
        return [client_run for client_run, _ in self._running.values() if not client_run.has_ended]

    @property
    def writing_runs(self) -> list[ClientRun]:
        """Return the runs of the clients that still send."""
        return [
            client_run for client_run in self.live_runs if client_run.name not in self._settled_runs
        ]

    def stop(self) -> None:
        """Stop sending in all clients; wait for all outcomes."""
        self._send_order("stop", "settled", self.writing_runs)
        self._settled_runs.update(client_run.name for client_run in self.live_runs)

    def end(self, marks: dict[int, int]) -> None:
        """End all clients when their feeds have reached the marks."""
        self._send_order(f"end {json.dumps(marks)}", "fed", self.live_runs)

    def _send_order(self, order: str, answer: str, client_runs: list[ClientRun]) -> None:
        for client, (client_run, child) in list(self._running.items()):
            if client_run not in client_runs:
                continue
            assert child.stdin is not None
            try:
                child.stdin.write(order + "\n")
                child.stdin.flush()
            except BrokenPipeError:
                child.wait()
                self._record_ended_client(client)
                self._close_client(client)
        for client_run, child in self._running.values():
            if client_run not in client_runs:
                continue
            printed = _read_line(child, TEST_TIMEOUT_S)
            if printed != answer:
                self.unexpected_ends.append(
                    f"{client_run.name} printed {printed!r}, expected {answer!r}"
                )

    def remove_ended(self) -> None:
        """Remove the clients that have ended."""
        for client, (client_run, child) in list(self._running.items()):
            client_run.has_ended = True
            child.wait(TEST_TIMEOUT_S)
            self._close_client(client)

    def kill_all_clients(self) -> None:
        """Kill the remaining clients."""
        for client in list(self._running):
            self.kill(client)


def _read_line(child: "subprocess.Popen[str]", seconds: float) -> str:
    """Return the next line that a process prints; empty at a timeout."""
    assert child.stdout is not None
    ready, _, _ = select.select([child.stdout], [], [], seconds)
    return child.stdout.readline().strip() if ready else ""


class Round:
    """Injects the faults of a schedule, and checks the outcomes."""

    def __init__(
        self,
        cluster: ChaosCluster,
        schedule: Schedule,
        directory: Path,
        print_progress: PrintProgress,
    ):
        self._cluster = cluster
        self._schedule = schedule
        self._applications = Applications(cluster, directory)
        self._print_progress = print_progress
        self.outcome = RoundOutcome(schedule)

    def run(self) -> None:
        """Run the whole round."""
        applications = self._applications
        for client in self._schedule.cluster_size.names("client"):
            applications.start(client)
        try:
            self._await_progress(time.monotonic())
            began_s = time.monotonic()
            self._inject_faults(began_s)
            self._repair()
            self._await_zookeeper(time.monotonic())
            repaired_s = time.monotonic()
            self._await_progress(repaired_s)
            self.outcome.recovered_s = time.monotonic() - repaired_s
            self._await_engaged(repaired_s)
            if self._schedule.cluster_size.stores:
                self._await_archive(
                    "the logs have enough segments to remove", self._has_enough_transactions
                )
            self._run_without_faults()
            ended_s = time.monotonic()
            if self._schedule.cluster_size.stores:
                self._kill_all()
            self._check_outcomes(began_s, ended_s)
        finally:
            applications.kill_all_clients()

    # ---- faults

    def _inject_faults(self, began_s: float) -> None:
        """Begin and end each fault at its time (rule 1)."""
        moments: list[tuple[float, int, Fault, bool]] = []
        for number, fault in enumerate(self._schedule.faults):
            if why := self._skip_reason(fault):
                self.outcome.skipped_faults[f"{fault.kind}: {why}"] += 1
                continue
            moments.append((fault.at_s, number, fault, True))
            moments.append((fault.at_s + fault.for_s, number, fault, False))
        for at_s, _, fault, begins in sorted(moments, key=lambda each: each[:2]):
            while (remaining_s := began_s + at_s - time.monotonic()) > 0:
                time.sleep(min(remaining_s, SLEEP_S))
            self._cluster.record_ended_members()
            if begins:
                self._print_progress(f"{time.monotonic() - began_s:6.1f} s  {fault}")
                self.outcome.faults[fault.kind] += 1
                self._begin_fault(fault)
            else:
                self._end_fault(fault)

    def _skip_reason(self, fault: Fault) -> str:
        network = self._cluster.network
        if fault.kind in ("cut", "full") and not network.can_cut:
            return network.cannot_cut_reason
        if fault.kind == "slow" and not network.can_slow:
            return network.cannot_cut_reason or "no /dev/net/tun"
        return ""

    def _begin_fault(self, fault: Fault) -> None:
        cluster, network = self._cluster, self._cluster.network
        match fault.kind:
            case "kill" | "stop":
                for name in fault.targets:
                    if fault.kind == "kill":
                        self.outcome.counts[f"killed: {name.split('-')[0]}"] += 1
                    if name in cluster.members:
                        cluster.kill(name, 9 if fault.kind == "kill" else 15)
                    else:
                        self._applications.kill(name)
            case "freeze":
                cluster.freeze(fault.targets[0])
            case "full":
                cluster.fill_disk(fault.targets[0])
            case "cut":
                network.cut(fault.links)
            case "slow":
                network.delay(fault.links, fault.lag)
            case _:
                raise AssertionError(fault.kind)

    def _end_fault(self, fault: Fault) -> None:
        cluster, network = self._cluster, self._cluster.network
        match fault.kind:
            case "kill" | "stop":
                for name in fault.targets:
                    self._start(name)
            case "freeze":
                cluster.thaw(fault.targets[0])
            case "full":
                cluster.free_disk(fault.targets[0])
            case "cut":
                network.restore(fault.links)
            case "slow":
                network.remove_delays(fault.links)

    def _start(self, name: str) -> None:
        if name in self._cluster.members:
            self._cluster.start(name)
        else:
            self._applications.start(name)

    def _repair(self) -> None:
        """Undo every fault (rule 2); kill each client that should have stopped."""
        cluster = self._cluster
        cluster.network.repair()
        for name, member in cluster.members.items():
            if member.is_frozen:
                cluster.thaw(name)
            if not member.should_run:
                cluster.kill(name)
            cluster.start(name)
            if member.kind == "storage":
                cluster.free_disk(name)
        for client in self._schedule.cluster_size.names("client"):
            self._applications.start(client)

    # ---- afterwards

    def _await_zookeeper(self, since_s: float) -> None:
        """Wait until ZooKeeper answers; its start takes long on a busy machine."""
        while time.monotonic() < since_s + ZOOKEEPER_TIMEOUT_S * machine_slowdown():
            self._cluster.record_ended_members()
            with contextlib.suppress(subprocess.CalledProcessError):
                self._cluster.show_cluster()
                break
        self.outcome.zookeeper_s = time.monotonic() - since_s

    def _await_progress(self, since_s: float) -> None:
        """Wait until every client has received a commit in every partition (rule 2)."""
        outcome, applications = self.outcome, self._applications
        partitions = range(self._schedule.cluster_size.partitions)

        def runs_without_progress() -> list[str]:
            self._cluster.record_ended_members()
            applications.poll()
            return [
                f"{client_run.name} in partition {partition}"
                for client_run in applications.writing_runs
                for partition in partitions
                if client_run.first_commit_s(partition, since_s) is None
            ]

        began_s = time.monotonic()
        while (
            stuck := runs_without_progress()
        ) and time.monotonic() < began_s + PROGRESS_TIMEOUT_S * machine_slowdown():
            time.sleep(POLL_INTERVAL_S)
        if stuck:
            outcome.wrong.append(
                f"no progress within {time.monotonic() - began_s:.0f} s: {'; '.join(stuck)}"
            )

    def _await_engaged(self, repaired_s: float) -> None:
        """Wait until ZooKeeper records every replica as engaged (rule 2)."""
        began_s = time.monotonic()
        while not (is_engaged := self._is_engaged()):
            if time.monotonic() > began_s + EQUAL_REPLICAS_TIMEOUT_S * machine_slowdown():
                break
            time.sleep(POLL_INTERVAL_S)
        if not is_engaged:
            self.outcome.wrong.append(
                f"not every replica engaged within {time.monotonic() - began_s:.0f} s"
            )
        self.outcome.engaged_s = time.monotonic() - repaired_s

    def _is_engaged(self) -> bool:
        try:
            view = self._cluster.show_cluster()
        except subprocess.CalledProcessError:
            return False
        return all(
            set(partition["engaged"]) == set(view["storages"])
            for partition in view["partitions"].values()
        )

    def _run_without_faults(self) -> None:
        """Let the clients write without faults (rule 3), then stop them."""
        began_s = time.monotonic()
        while time.monotonic() < began_s + FAULT_FREE_S:
            time.sleep(SLEEP_S)
        ended_s = time.monotonic()
        self._applications.stop()
        self._applications.poll()
        recorded = [
            message.recorded
            for client_run in self._applications.live_runs
            for message in client_run.sent.values()
            if began_s <= message.recorded.sent_s <= ended_s
        ]
        without_outcome = [
            record
            for record in recorded
            if record.outcome not in (four_writers.OK, four_writers.REJECTED)
        ]
        self.outcome.counts["reported without faults"] += len(recorded)
        if without_outcome:
            self.outcome.wrong.append(
                f"without faults, {len(without_outcome)} of {len(recorded)} appends were neither "
                f"committed nor rejected: "
                f"{without_outcome[0].outcome} {without_outcome[0].why}"
            )

    def _has_enough_transactions(self) -> bool:
        with self._cluster.client() as client:
            return min(client.high_water_marks().values()) >= TRANSACTIONS_MIN

    def _kill_all(self) -> None:
        """Kill and restart all processes that take part in archiving, and one client (rule 4).

        Also make all garbage that the archive has at this time old enough to be collected.
        """
        cluster, applications = self._cluster, self._applications
        with cluster.client() as client:
            lasts = {
                int(partition): int(last) for partition, last in client.high_water_marks().items()
            }
        self._await_archive(
            "all transactions are archived", lambda: archive_checks.is_archived(cluster, lasts)
        )
        # Replaced manifests are not old enough to be collected, so all files that were collected
        # are files of failed attempts.
        left_over = archive_checks.count_events(cluster)["collected files"]
        self.outcome.counts["collected files of failed attempts"] = left_over
        names = [member for member in cluster.members if not member.startswith("zookeeper")]
        for name in names:
            cluster.kill(name)
        cluster.send_bucket_command(f"age {archive_checks.AGED_BY_MS}")
        for name in names:
            cluster.start(name)
        first, *_ = self._schedule.cluster_size.names("client")
        applications.kill(first)
        since_s = time.monotonic()
        applications.start(first)
        self._await_progress(since_s)
        self._run_without_faults()

    def _await_archive(self, description: str, condition: Callable[[], object]) -> None:
        try:
            self._cluster.wait_until(description, condition, seconds=ARCHIVE_TIMEOUT_S)
        except AssertionError as error:
            self.outcome.wrong.append(str(error))

    def _check_archive(self, log: Log) -> None:
        """Compare the archive with the log after the last sessions have archived and collected."""
        cluster, outcome = self._cluster, self.outcome
        lasts = {session: log.last(session) for session in log.sessions}
        directory = cluster.directory / "archive"
        orphans = ["the archive was never read"]

        def is_clean() -> bool:
            if not archive_checks.is_archived(cluster, lasts):
                return False
            with contextlib.suppress(ObjectMissing):
                orphans[:] = archive_checks.copy_archive(cluster, directory).orphans(
                    archive_checks.now_ms()
                )
            return not orphans

        self._await_archive("all transactions are archived, and the garbage is collected", is_clean)
        if orphans:
            outcome.wrong.append(f"{len(orphans)} files are not collected: {orphans[:3]}")
        archive = archive_checks.copy_archive(cluster, directory)
        outcome.wrong += archive.differences(log)
        names = self._schedule.cluster_size.names("storage")
        differences = [""]

        def is_bounded() -> bool:
            differences[:] = archive_checks.local_differences(
                ((name, cluster.records(name)) for name in names), log
            )
            return not differences

        self._await_archive("the storages have removed all removable segments", is_bounded)
        outcome.wrong += differences
        verified = cluster.verify_archive()
        if not verified["passed"]:
            outcome.wrong.append(f"archive verify: {verified}")
        counts = archive_checks.count_events(cluster)
        counts["objects"] = sum(map(len, archive.objects.values()))
        counts["verified objects"] = sum(
            partition["objects"] for partition in verified["partitions"].values()
        )
        counts["files in the archive"] = len(archive.files)
        if counts["verified objects"] != counts["objects"]:
            outcome.wrong.append(f"archive verify has not read all objects: {counts}")
        outcome.counts.update(counts)

    def _check_outcomes(self, began_s: float, ended_s: float) -> None:
        """Compare the journals and the replicas with the log."""
        cluster, outcome = self._cluster, self.outcome
        with cluster.client() as client:
            log = read_log(client)
        self._applications.end({session: log.last(session) for session in log.sessions})
        self._applications.poll()
        try:
            cluster.wait_until(
                "all replicas are equal",
                cluster.has_equal_replicas,
                seconds=EQUAL_REPLICAS_TIMEOUT_S,
            )
        except AssertionError as error:
            outcome.wrong.append(str(error))
        if self._schedule.cluster_size.stores:
            self._check_archive(log)
        verdict = check_history(self._applications.client_runs, log)
        outcome.wrong += verdict.wrong
        outcome.counts.update(verdict.counts)
        cluster.record_ended_members()
        outcome.wrong += (
            cluster.unexpected_ends
            + self._applications.unexpected_ends
            + self._forbidden_log_lines()
        )
        outcome.gap_s = max(
            longest_gap_s(self._applications.client_runs, session, since_s=began_s, until_s=ended_s)
            for session in log.sessions
        )

    def _forbidden_log_lines(self) -> list[str]:
        """Return the lines in the daemons' logs that must never be logged."""
        found = []
        for name in self._cluster.members:
            text = self._cluster.log_path(name).read_text(encoding="utf-8", errors="replace")
            if name.startswith("zookeeper"):
                continue
            lines = [line for line in text.splitlines() if ERROR_LINE.search(line)]
            if machine_slowdown() > SLOWNESS_MAX:
                lines = [line for line in lines if LOOP_UNRESPONSIVE not in line]
            if lines:
                found.append(f"{name} has logged {len(lines)} lines like: {lines[0][:300]}")
        return found


def run_round(
    schedule: Schedule,
    directory: Path,
    print_progress: PrintProgress,
    *,
    in_namespaces: bool = True,
) -> RoundOutcome:
    """Run one round in the given directory."""
    outcome = RoundOutcome(schedule)
    try:
        with run_cluster(schedule.cluster_size, directory, in_namespaces=in_namespaces) as cluster:
            round_ = Round(cluster, schedule, directory, print_progress)
            outcome = round_.outcome
            round_.run()
    except (WaltzError, AssertionError, subprocess.SubprocessError) as error:
        outcome.wrong.append(f"the round broke off: {type(error).__name__}: {error}")
    return outcome
