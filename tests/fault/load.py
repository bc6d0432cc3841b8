"""A background writer that compares each outcome with the log, and helpers for replicas.

The comparison is that of `examples/four_writers.py`.
"""

import importlib.util
import itertools
import json
import random
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Self

from tests.commands import run_command
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.client import WaltzClient, lock, partition_of
from waltz_core.config import ClientConfig
from waltz_core.errors import WaltzError
from waltz_core.local import LocalCluster, Member
from waltz_core.records.batches import encode_append

PROJECT_ROOT = Path(__file__).resolve().parents[2]
BATCH_ROWS, BATCHES_IN_FLIGHT = 20, 8
# The pause between two bursts of batches. So a load appends all the time, without using all CPU.
PAUSE_S = 0.2
CREATION_TIME_END = 12  # a segment begins with 4 bytes of version and 8 of creation time


def _import_four_writers() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "four_writers", PROJECT_ROOT / "examples" / "four_writers.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["four_writers"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


four_writers = _import_four_writers()


def wait_until(description: str, condition: Callable[[], object]) -> None:
    """Poll a condition until it holds; fail at the time limit.

    Other processes do not notify this one, so the condition is polled. The pause is twice the time
    of a poll, because many polls run a whole command.
    """
    deadline = time.monotonic() + TEST_TIMEOUT_S
    while True:
        began_s = time.monotonic()
        if condition():
            return
        now = time.monotonic()
        assert now < deadline, f"not within {TEST_TIMEOUT_S:.0f} s: {description}"
        time.sleep(max(0.05, 2 * (now - began_s)))


@contextmanager
def paused_process(cluster: LocalCluster, name: str) -> Iterator[None]:
    """Pause a member; it continues afterwards."""
    threads = Path("/proc", str(cluster.member(name).pid), "task")

    def all_stopped() -> bool:
        """Whether each thread has stopped; one may still be executing a rename."""
        try:
            states = [path.read_text().rpartition(") ")[2][0] for path in threads.glob("*/stat")]
        except (FileNotFoundError, ProcessLookupError):  # a thread has just ended
            return False
        return {*states} == {"T"}

    cluster.kill(name, signal.SIGSTOP)
    try:
        wait_until("all threads have stopped", all_stopped)
        yield
    finally:
        cluster.kill(name, signal.SIGCONT)


class Load:
    """Appends batches under write locks to all partitions, until it is stopped."""

    _load_numbers = itertools.count(100)

    def __init__(self, connect: str, *, request_timeout_ms: int = 20_000) -> None:
        self.ledger: list[four_writers.RecordedOutcome] = []
        self.committed = 0
        self.failure_reasons: list[str] = []
        self._number = next(self._load_numbers)
        self._random = random.Random(self._number)
        self._client = WaltzClient(connect, ClientConfig(request_timeout_ms=request_timeout_ms))
        count = self._client.partition_count
        self._locks: list[list[int]] = [[] for _ in range(count)]
        for account in range(500):
            hashed = lock("account", account)
            self._locks[partition_of(hashed, count)].append(hashed)
        self._marks = dict.fromkeys(range(count), -1)
        self._keys = itertools.count()
        self._pending: deque[four_writers.Pending] = deque()
        self._is_stopping = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="load")
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop sending, wait for all outcomes."""
        self._is_stopping.set()
        self._thread.join()
        self._client.close()
        assert self._failure is None, self._failure

    @property
    def client_id(self) -> int:
        """The client ID that its rows have in the log; it has appended."""
        client_id = self._client.client_id
        assert client_id is not None
        return client_id

    def await_commits(self, rows: int = 200) -> None:
        """Wait until N more rows are reported as committed."""
        wanted = self.committed + rows
        wait_until(
            f"{rows} more rows committed; failures: {self.failure_reasons[-3:]}",
            lambda: self.committed >= wanted or self._failure is not None,
        )

    def _run(self) -> None:
        try:
            show_partitions = itertools.cycle(range(len(self._locks)))
            while not self._is_stopping.wait(PAUSE_S):
                for partition in itertools.islice(show_partitions, BATCHES_IN_FLIGHT):
                    self._send(partition)
                self._settle()
        except BaseException as error:  # noqa: BLE001 - `stop` raises it
            self._failure = error

    def _send(self, partition: int) -> None:
        rows = [
            four_writers.Content(
                f"{self._number}.{next(self._keys)}",
                partition,
                self._marks[partition],
                [self._random.choice(self._locks[partition])],
                [],
                [],
            )
            for _ in range(BATCH_ROWS)
        ]
        data = [row.to_bytes() for row in rows]
        nothing: list[list[int]] = [[]] * BATCH_ROWS
        payload = encode_append(
            [0] * BATCH_ROWS,
            data,
            write_locks=[row.writes for row in rows],
            read_locks=nothing,
            append_locks=nothing,
        )
        now_s = time.monotonic()
        row_outcome = [
            four_writers.RecordedOutcome(row.key, partition, four_writers.digest_of(each), now_s)
            for row, each in zip(rows, data, strict=True)
        ]
        mark = self._marks[partition]
        future = self._client.append_batch(
            partition, payload, BATCH_ROWS, client_high_water_mark=mark
        )
        future.add_done_callback(lambda _: four_writers.set_report_times(row_outcome))
        self._pending.append(four_writers.Pending(future, row_outcome))

    def _settle(self) -> None:
        while self._pending:
            pending = self._pending.popleft()
            four_writers.set_outcomes(pending)
            self.ledger += pending.recorded
            outcomes = [record.outcome for record in pending.recorded]
            self.committed += outcomes.count(four_writers.OK)
            self.failure_reasons += [
                record.why for record in pending.recorded if record.outcome in ("lost", "unknown")
            ][:1]
            try:
                outcome = pending.future.result()
            except WaltzError:
                continue
            partition = pending.recorded[0].partition
            self._marks[partition] = max(self._marks[partition], int(outcome.high_water_mark))


class Scenario:
    """All outcomes on one cluster, over several loads."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.ledger: list[four_writers.RecordedOutcome] = []

    def load(self) -> "_LoadContext":
        """Run a load for the duration of a `with` block; its outcomes belong to the scenario."""
        return _LoadContext(self)

    def row(self, partition: int, *, padding: int = 0) -> bytes:
        """Return data for an append outside the loads; its outcome is not recorded."""
        content = four_writers.Content(
            f"row.{len(self.ledger)}", partition, -1, [], [], [], padding="x" * padding
        )
        data: bytes = content.to_bytes()
        row_outcome = four_writers.RecordedOutcome(
            content.key, partition, four_writers.digest_of(data), 0.0
        )
        self.ledger.append(row_outcome)
        return data

    def check_outcomes_against_log(self) -> None:
        """Compare every outcome so far with the log."""
        log = four_writers.read_log(self.cluster.connect)
        verdict = four_writers.compare(self.ledger, log)
        assert verdict.wrong == []
        assert verdict.counts[four_writers.OK] > 0
        assert len(log) >= verdict.counts[four_writers.OK]

    def check_replicas_equal(self) -> None:
        """Wait until every replica is engaged, and all hold the same bytes."""
        wait_until("all replicas are engaged", lambda: are_all_replicas_engaged(self.cluster))
        wait_until("the replicas are equal", lambda: not differing_segments(self.cluster))
        assert read_segment_files(self.cluster, "storage-1"), "no files were compared"


class _LoadContext:
    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._load = Load(scenario.cluster.connect)

    def __enter__(self) -> Load:
        return self._load

    def __exit__(self, *_error: object) -> None:
        try:
            self._load.stop()
        finally:
            self._scenario.ledger += self._load.ledger


def waltz_command(*words: str) -> list[str]:
    """Return the command line of `waltz-core`."""
    return [sys.executable, "-m", "waltz_core", *words]


def show_cluster(cluster: LocalCluster) -> dict[str, object]:
    """Return the output of `waltz-core cluster show --json`."""
    result = run_command("cluster", "show", cluster.connect, "--json")
    assert result.returncode == 0, result.stderr
    document: dict[str, object] = json.loads(result.stdout)
    return document


def show_partitions(cluster: LocalCluster) -> dict[int, dict[str, object]]:
    """Return the partitions in the output of `waltz-core cluster show`."""
    found = show_cluster(cluster)["partitions"]
    assert isinstance(found, dict)
    return {int(number): each for number, each in found.items()}


def owner_addresses(cluster: LocalCluster) -> set[object]:
    """Return the addresses of the servers that own partitions."""
    return {shown["server"] for shown in show_partitions(cluster).values()}


def start_zookeeper(cluster: LocalCluster) -> None:
    """Start the killed ZooKeeper server; wait until it serves, because clients wait only 10 s."""
    cluster.start("zookeeper")
    member = cluster.member("zookeeper")
    wait_until("ZooKeeper serves", lambda: zookeeper_mode(member) != "none")


def zookeeper_mode(node: Member) -> str:
    """Return the mode that a ZooKeeper server reports, or "none" while it serves no client."""
    try:
        with socket.create_connection(("127.0.0.1", node.port), 5) as connection:
            connection.sendall(b"srvr")
            text = b"".join(iter(lambda: connection.recv(4096), b"")).decode()
    except OSError:
        return "none"
    return next((line.split()[1] for line in text.splitlines() if line[:5] == "Mode:"), "none")


def are_all_replicas_engaged(cluster: LocalCluster) -> bool:
    """Return whether ZooKeeper records every replica as engaged."""
    view = show_cluster(cluster)
    storages, found = view["storages"], view["partitions"]
    assert isinstance(found, dict)
    assert isinstance(storages, dict)
    return all(set(each["engaged"]) == set(storages) for each in found.values())


def read_segment_files(cluster: LocalCluster, storage: str) -> dict[str, bytes]:
    """Return the content of each segment file of a storage, without the creation time."""
    top = cluster.directory / storage
    found: dict[str, bytes] = {}
    for path in sorted(top.rglob("*.seg")):
        data = path.read_bytes()
        found[path.relative_to(top).as_posix()] = data[:4] + data[CREATION_TIME_END:]
    return found


def differing_segments(cluster: LocalCluster) -> list[str]:
    """Return the segment files that differ between storages."""
    names = [member.name for member in cluster.members if member.kind == "storage"]
    first, *others = [read_segment_files(cluster, name) for name in names]
    return sorted(
        {
            path
            for other in others
            for path in first.keys() | other.keys()
            if first.get(path) != other.get(path)
        }
    )
