"""One round of chaos: a cluster, its applications, a schedule of faults, and the verdict.

`make chaos` plays many rounds, a test plays a short one.

Rules:
    1. The driver does not wait for the effect of a fault: the next one starts at its own time.
    2. After the last fault all links are repaired, and all members are started. Once ZooKeeper
       answers (without it no daemon starts) every client must receive a commit in every partition
       within a bound, and all replicas must become equal.
    3. In the period without faults that follows, the only outcomes are "committed" and "rejected".
    4. With an archive, all servers, storages and stores are then killed at the same time, so that
       no late upload remains, and one client starts again at ID 0 and writes. So each partition has
       a new store session that archives and collects. After that the archive, the logs and the
       feeds are compared.
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

from tests.chaos import archived
from tests.chaos.cluster import ChaosCluster, running
from tests.chaos.history import Life, Log, check, longest_gap_s, read_log
from tests.chaos.network import environment
from tests.chaos.schedule import Fault, Schedule
from tests.fault.load import four_writers
from tests.patience import HANG_S, slowness
from tests.spark.places import die_with_parent
from waltz_core.errors import ObjectMissing, WaltzError

ZOOKEEPER_S = 60.0
PROGRESS_S = 45.0
WHOLE_S = 60.0
# A request to the store that was cut off fails after 20 s, and may be repeated.
ARCHIVE_S = 120.0
# In each partition of a cluster with an archive: storages remove segments of all.
TRANSACTIONS_MIN = 800
CALM_S = 4.0
TICK_S = 0.02
POLL_S = 0.25
# What a daemon must never log.
ERROR_LINE = re.compile(r" (ERROR|CRITICAL) |^Traceback |AssertionError")
# On a machine with so much to do a process may get no time for as long as a session lasts.
SLOWNESS_MAX = 3.0
LOOP_UNRESPONSIVE = " process.event_loop_unresponsive "

Say = Callable[[str], None]


@dataclass
class Outcome:
    """The result of a round."""

    schedule: Schedule
    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    zookeeper_s: float = 0.0
    recovered_s: float = 0.0
    whole_s: float = 0.0
    gap_s: float = 0.0


class Applications:
    """The client processes; a restarted client has another `Life`."""

    def __init__(self, cluster: ChaosCluster, directory: Path) -> None:
        self._cluster = cluster
        self._directory = directory
        self._running: dict[str, tuple[Life, subprocess.Popen[str]]] = {}
        self._settled: set[str] = set()  # the lives that send no more
        self.lives: list[Life] = []
        self.ended: list[str] = []

    def start(self, client: str) -> None:
        """Start a client if it does not run."""
        if client in self._running:
            if self._running[client][1].poll() is None:
                return
            self._record_ended_client(client)
            self._close_client(client)
        life = Life(f"{client}.{len(self.lives)}", self._directory)
        words = (self._cluster.connect, life.name, str(self._directory.absolute()))
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
        self._running[client] = life, child
        self.lives.append(life)

    def _record_ended_client(self, client: str) -> None:
        """Record a client that has ended by itself."""
        life, child = self._running[client]
        if not life.has_ended:
            self.ended.append(f"{life.name} ended by itself, with {child.returncode}")
            life.has_ended = True

    def kill(self, client: str) -> None:
        """Kill a client."""
        if client not in self._running:
            return
        life, child = self._running[client]
        life.has_ended = True
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
        for life in self.lives:
            life.poll()

    @property
    def living(self) -> list[Life]:
        """Return the lives of the running clients."""
        return [life for life, _ in self._running.values() if not life.has_ended]

    @property
    def writing(self) -> list[Life]:
        """Return the lives of the clients that still send."""
        return [life for life in self.living if life.name not in self._settled]

    def stop(self) -> None:
        """Stop sending in all clients; wait for all outcomes."""
        self._send_order("stop", "settled", self.writing)
        self._settled.update(life.name for life in self.living)

    def end(self, marks: dict[int, int]) -> None:
        """End all clients when their feeds have reached the marks."""
        self._send_order(f"end {json.dumps(marks)}", "fed", self.living)

    def _send_order(self, order: str, answer: str, lives: list[Life]) -> None:
        for client, (life, child) in list(self._running.items()):
            if life not in lives:
                continue
            assert child.stdin is not None
            try:
                child.stdin.write(order + "\n")
                child.stdin.flush()
            except BrokenPipeError:
                child.wait()
                self._record_ended_client(client)
                self._close_client(client)
        for life, child in self._running.values():
            if life not in lives:
                continue
            printed = _read_line(child, HANG_S)
            if printed != answer:
                self.ended.append(f"{life.name} printed {printed!r}, expected {answer!r}")

    def remove_ended(self) -> None:
        """Remove the clients that have ended."""
        for client, (life, child) in list(self._running.items()):
            life.has_ended = True
            child.wait(HANG_S)
            self._close_client(client)

    def down(self) -> None:
        """Kill the remaining clients."""
        for client in list(self._running):
            self.kill(client)


def _read_line(child: "subprocess.Popen[str]", seconds: float) -> str:
    """Return the next line that a process prints; empty at a timeout."""
    assert child.stdout is not None
    ready, _, _ = select.select([child.stdout], [], [], seconds)
    return child.stdout.readline().strip() if ready else ""


class Round:
    """Plays a schedule."""

    def __init__(self, cluster: ChaosCluster, schedule: Schedule, directory: Path, say: Say):
        self._cluster = cluster
        self._schedule = schedule
        self._applications = Applications(cluster, directory)
        self._say = say
        self.outcome = Outcome(schedule)

    def run(self) -> None:
        """Play the whole round."""
        applications = self._applications
        for client in self._schedule.world.names("client"):
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
            if self._schedule.world.stores:
                self._await_archive("there is enough to remove", self._has_enough)
            self._run_without_faults()
            ended_s = time.monotonic()
            if self._schedule.world.stores:
                self._kill_all()
            self._check_outcomes(began_s, ended_s)
        finally:
            applications.down()

    # ---- faults

    def _inject_faults(self, began_s: float) -> None:
        """Begin and end each fault at its time (rule 1)."""
        moments: list[tuple[float, int, Fault, bool]] = []
        for number, fault in enumerate(self._schedule.faults):
            if why := self._skip_reason(fault):
                self.outcome.skipped[f"{fault.kind}: {why}"] += 1
                continue
            moments.append((fault.at_s, number, fault, True))
            moments.append((fault.at_s + fault.for_s, number, fault, False))
        for at_s, _, fault, begins in sorted(moments, key=lambda each: each[:2]):
            while (left := began_s + at_s - time.monotonic()) > 0:
                time.sleep(min(left, TICK_S))
            self._cluster.record_ended_members()
            if begins:
                self._say(f"{time.monotonic() - began_s:6.1f} s  {fault}")
                self.outcome.faults[fault.kind] += 1
                self._begin(fault)
            else:
                self._end(fault)

    def _skip_reason(self, fault: Fault) -> str:
        network = self._cluster.network
        if fault.kind in ("cut", "full") and not network.can_cut:
            return network.why_not
        if fault.kind == "slow" and not network.can_slow:
            return network.why_not or "no /dev/net/tun"
        return ""

    def _begin(self, fault: Fault) -> None:
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

    def _end(self, fault: Fault) -> None:
        cluster, network = self._cluster, self._cluster.network
        match fault.kind:
            case "kill" | "stop":
                for name in fault.targets:
                    self._start(name)
            case "freeze":
                cluster.thaw(fault.targets[0])
            case "full":
                cluster.empty_disk(fault.targets[0])
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
            if not member.is_wanted:
                cluster.kill(name)
            cluster.start(name)
            if member.kind == "storage":
                cluster.empty_disk(name)
        for client in self._schedule.world.names("client"):
            self._applications.start(client)

    # ---- afterwards

    def _await_zookeeper(self, since_s: float) -> None:
        """Wait until ZooKeeper answers; its start takes long on a busy machine."""
        while time.monotonic() < since_s + ZOOKEEPER_S * slowness():
            self._cluster.record_ended_members()
            with contextlib.suppress(subprocess.CalledProcessError):
                self._cluster.show_cluster()
                break
        self.outcome.zookeeper_s = time.monotonic() - since_s

    def _await_progress(self, since_s: float) -> None:
        """Wait until every client has received a commit in every partition (rule 2)."""
        outcome, applications = self.outcome, self._applications
        partitions = range(self._schedule.world.partitions)

        def waiting() -> list[str]:
            self._cluster.record_ended_members()
            applications.poll()
            return [
                f"{life.name} in partition {partition}"
                for life in applications.writing
                for partition in partitions
                if life.progress_s(partition, since_s) is None
            ]

        began_s = time.monotonic()
        while (stuck := waiting()) and time.monotonic() < began_s + PROGRESS_S * slowness():
            time.sleep(POLL_S)
        if stuck:
            outcome.wrong.append(
                f"no progress within {time.monotonic() - began_s:.0f} s: {'; '.join(stuck)}"
            )

    def _await_engaged(self, repaired_s: float) -> None:
        """Wait until ZooKeeper records every replica as engaged (rule 2)."""
        began_s = time.monotonic()
        while not (is_engaged := self._is_engaged()):
            if time.monotonic() > began_s + WHOLE_S * slowness():
                break
            time.sleep(POLL_S)
        if not is_engaged:
            self.outcome.wrong.append(
                f"not every replica engaged within {time.monotonic() - began_s:.0f} s"
            )
        self.outcome.whole_s = time.monotonic() - repaired_s

    def _is_engaged(self) -> bool:
        try:
            view = self._cluster.show_cluster()
        except subprocess.CalledProcessError:
            return False
        return all(
            set(each["engaged"]) == set(view["storages"]) for each in view["partitions"].values()
        )

    def _run_without_faults(self) -> None:
        """Let the clients write without faults (rule 3), then stop them."""
        began_s = time.monotonic()
        while time.monotonic() < began_s + CALM_S:
            time.sleep(TICK_S)
        ended_s = time.monotonic()
        self._applications.stop()
        self._applications.poll()
        recorded = [
            each.recorded
            for life in self._applications.living
            for each in life.sent.values()
            if began_s <= each.recorded.sent_s <= ended_s
        ]
        ill = [
            each
            for each in recorded
            if each.outcome not in (four_writers.OK, four_writers.REJECTED)
        ]
        self.outcome.counts["reported in the calm"] += len(recorded)
        if ill:
            self.outcome.wrong.append(
                f"in the calm {len(ill)} of {len(recorded)} were neither committed nor rejected: "
                f"{ill[0].outcome} {ill[0].why}"
            )

    def _has_enough(self) -> bool:
        with self._cluster.client() as client:
            return min(client.high_water_marks().values()) >= TRANSACTIONS_MIN

    def _kill_all(self) -> None:
        """Kill and restart all that take part in archiving, and one client (rule 4).

        Garbage in the archive at this time is made old enough to be collected.
        """
        cluster, applications = self._cluster, self._applications
        with cluster.client() as client:
            lasts = {int(each): int(last) for each, last in client.high_water_marks().items()}
        self._await_archive("all is archived", lambda: archived.is_archived(cluster, lasts))
        # Replaced manifests are not old enough yet.
        left_over = archived.count_events(cluster)["collected files"]
        self.outcome.counts["collected files of failed attempts"] = left_over
        names = [each for each in cluster.members if not each.startswith("zookeeper")]
        for name in names:
            cluster.kill(name)
        cluster.order_bucket(f"age {archived.AGE_MS}")
        for name in names:
            cluster.start(name)
        first, *_ = self._schedule.world.names("client")
        applications.kill(first)
        since_s = time.monotonic()
        applications.start(first)
        self._await_progress(since_s)
        self._run_without_faults()

    def _await_archive(self, what: str, condition: Callable[[], object]) -> None:
        try:
            self._cluster.wait_until(what, condition, seconds=ARCHIVE_S)
        except AssertionError as error:
            self.outcome.wrong.append(str(error))

    def _check_archive(self, log: Log) -> None:
        """Compare the archive with the log after the last sessions have archived and collected."""
        cluster, outcome = self._cluster, self.outcome
        lasts = {each: log.last(each) for each in log.sessions}
        directory = cluster.directory / "archive"
        orphans = ["the archive was never read"]

        def is_clean() -> bool:
            if not archived.is_archived(cluster, lasts):
                return False
            with contextlib.suppress(ObjectMissing):
                orphans[:] = archived.copy_archive(cluster, directory).orphans(archived.now_ms())
            return not orphans

        self._await_archive("all is archived, and what is left over collected", is_clean)
        if orphans:
            outcome.wrong.append(f"{len(orphans)} files are not collected: {orphans[:3]}")
        found = archived.copy_archive(cluster, directory)
        outcome.wrong += found.differences(log)
        names = self._schedule.world.names("storage")
        differences = [""]

        def is_bounded() -> bool:
            differences[:] = archived.local_differences(
                ((each, cluster.records(each)) for each in names), log
            )
            return not differences

        self._await_archive("the storages have removed what they may", is_bounded)
        outcome.wrong += differences
        verified = cluster.verify_archive()
        if not verified["passed"]:
            outcome.wrong.append(f"archive verify: {verified}")
        counts = archived.count_events(cluster)
        counts["objects"] = sum(map(len, found.objects.values()))
        counts["verified objects"] = sum(
            each["objects"] for each in verified["partitions"].values()
        )
        counts["files in the archive"] = len(found.files)
        if counts["verified objects"] != counts["objects"]:
            outcome.wrong.append(f"archive verify has not read all objects: {counts}")
        outcome.counts.update(counts)

    def _check_outcomes(self, began_s: float, ended_s: float) -> None:
        """Compare the journals and the replicas with the log."""
        cluster, outcome = self._cluster, self.outcome
        with cluster.client() as client:
            log = read_log(client)
        self._applications.end({each: log.last(each) for each in log.sessions})
        self._applications.poll()
        try:
            cluster.wait_until(
                "all replicas hold the same", cluster.has_equal_replicas, seconds=WHOLE_S
            )
        except AssertionError as error:
            outcome.wrong.append(str(error))
        if self._schedule.world.stores:
            self._check_archive(log)
        verdict = check(self._applications.lives, log)
        outcome.wrong += verdict.wrong
        outcome.counts.update(verdict.counts)
        cluster.record_ended_members()
        outcome.wrong += cluster.ended + self._applications.ended + self._grave_log_lines()
        outcome.gap_s = max(
            longest_gap_s(self._applications.lives, each, since_s=began_s, until_s=ended_s)
            for each in log.sessions
        )

    def _grave_log_lines(self) -> list[str]:
        """Return the lines in the daemons' logs that must never be logged."""
        found = []
        for name in self._cluster.members:
            text = self._cluster.log_path(name).read_text(encoding="utf-8", errors="replace")
            if name.startswith("zookeeper"):
                continue
            lines = [line for line in text.splitlines() if ERROR_LINE.search(line)]
            if slowness() > SLOWNESS_MAX:
                lines = [line for line in lines if LOOP_UNRESPONSIVE not in line]
            if lines:
                found.append(f"{name} has logged {len(lines)} lines like: {lines[0][:300]}")
        return found


def run_round(schedule: Schedule, directory: Path, say: Say, *, apart: bool = True) -> Outcome:
    """Play one round in the given directory."""
    outcome = Outcome(schedule)
    try:
        with running(schedule.world, directory, apart=apart) as cluster:
            played = Round(cluster, schedule, directory, say)
            outcome = played.outcome
            played.run()
    except (WaltzError, AssertionError, subprocess.SubprocessError) as error:
        outcome.wrong.append(f"the round broke off: {type(error).__name__}: {error}")
    return outcome
