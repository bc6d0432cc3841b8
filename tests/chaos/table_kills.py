"""Kills of followers, servers and storages at random points; the table always equals a replay.

    python -m tests.chaos.table_kills --kills 50 --seed 1
    python -m tests.chaos.table_kills --kills 50 --follower inferred
    PYSPARK_VERSION=4.2.1 scripts/run python -m tests.chaos.table_kills --kills 50 --follower spark

A client appends to a local cluster, and a follower keeps a Delta table equal to the log. Meanwhile,
processes of the cluster and of the follower are killed (SIGKILL). At the end, each version of the
table is compared with a replay of the log in plain Python.

Rules:
    1. The victim and the moment of each kill are drawn from the seed. A kill happens after a delay,
       or when a file appears. The file has data of an uncommitted version, is a version, or is a
       version that only adds fields of structs.
    2. A killed process is started again, after a drawn time or at once. Half of the kills wait
       until the table contains all transactions that were in the log at the previous kill. The
       other kills do not wait.
    3. The expected table is computed from the log alone. The log must have all acknowledged
       transactions.
    4. The follower `found` infers the columns. For this follower, the payloads have structs that
       gain fields over time.
"""

import argparse
import contextlib
import json
import random
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import isqrt
from pathlib import Path

import msgpack
from deltalake import DeltaTable

from tests.chaos.table_followers import (
    CommandFollower,
    InferringFollower,
    SparkFollower,
    TableFollower,
)
from tests.fault.load import wait_until
from tests.time_limits import PATIENT_CLIENT
from tests.written_log import (
    DELETE_HEADER,
    KEY_COUNT,
    OTHER_HEADER,
    PARTITION_COUNT,
    WrittenLog,
    end_marks,
    marks_by_version,
    read_table,
)
from waltz_core import local
from waltz_core.client import WaltzClient
from waltz_core.errors import WaltzError
from waltz_core.local import LocalCluster
from waltz_core.tables.table_marks import decode_marks

FOLLOWERS = {"command": CommandFollower, "inferred": InferringFollower, "spark": SparkFollower}
MEMBERS = {"server": 1, "storage": 1}
MOMENTS = ("delay", "data", "version")
FIELDS = "fields"  # another moment: a version only adds fields of structs
DELAY_S = 3.0
POLL_S = 0.001
SESSION_MS = 4_000
BURST = 20
ROOT = Path(__file__).parents[2]


@dataclass
class Outcome:
    """The result of a run."""

    seed: int
    kills: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    unexpected_ends: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class EndlessWriter:
    """Appends upserts, deletes and other transactions in a thread; records the committed ones."""

    def __init__(self, client: WaltzClient, seed: int, *, has_structs: bool = False) -> None:
        self._client, self._rng = client, random.Random(seed)
        self._has_structs = has_structs
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)
        self.committed: dict[tuple[int, int], tuple[int, dict]] = {}
        self.counts: Counter[str] = Counter()

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def stop(self) -> None:
        """Wait for the outcomes of all appends."""
        self._enough.set()
        self._thread.join()

    def _write(self) -> None:
        while not self._enough.is_set():
            sent = [self._append() for _ in range(self._rng.randrange(1, BURST))]
            for partition, header, row, future in sent:
                try:
                    self.committed[partition, int(future.result())] = header, row
                    self.counts["committed"] += 1
                except WaltzError as error:
                    self.counts[type(error).__name__] += 1
            self._enough.wait(self._rng.uniform(0, 0.1))

    def _append(self) -> tuple:
        rng = self._rng
        key = rng.randrange(KEY_COUNT)
        header = rng.choice((1, 1, 1, DELETE_HEADER, OTHER_HEADER))
        row = {"id": key, "op": rng.choice("UUUD"), "value": self._value()}
        if header == DELETE_HEADER:
            row = {"id": key}
        elif header == OTHER_HEADER:
            row = {"other": True}
        partition = key % PARTITION_COUNT
        future = self._client.append(msgpack.packb(row), partition=partition, header=header)
        return partition, header, row, future

    def _value(self) -> object:
        """Return a number, or a struct with a list of structs; structs gain fields (rule 4)."""
        number = self._rng.randrange(1000)
        if not self._has_structs:
            return number
        fields = isqrt(self.counts["committed"])
        names = [f"f{self._rng.randint(0, fields)}" for _ in range(2)]
        return {names[0]: number, "list": [{names[1]: number}, {"f0": number}]}


class TableKills:
    """One run: a cluster, a writer, a follower and its table."""

    def __init__(
        self,
        cluster: LocalCluster,
        follower: TableFollower,
        table: Path,
        seed: int,
        print_progress: Callable[[str], None],
    ) -> None:
        self._cluster, self._follower, self._table = cluster, follower, table
        self._rng, self._print_progress = random.Random(seed), print_progress
        self._due: list[tuple[float, Callable[[], None]]] = []  # starts, and their times
        self.outcome = Outcome(seed)

    def run(self, kills: int) -> None:
        """Kill processes; restart all in the end."""
        weights = {**self._follower.targets, **MEMBERS}
        with WaltzClient(self._cluster.connect, PATIENT_CLIENT) as client:
            while self.outcome.kills.total() < kills:
                before = {
                    int(partition): int(mark)
                    for partition, mark in client.high_water_marks().items()
                }
                self._await_moment()
                (victim,) = self._rng.choices([*weights], [*weights.values()])
                if not self._kill(victim):
                    continue
                newest = self._table / f"_delta_log/{self._version():020}.json"
                if victim == "follower" and only_adds_fields(newest):
                    victim = "follower before a merge"
                self.outcome.kills[victim] += 1
                self._print_progress(
                    f"{self.outcome.kills.total():4}  {victim}, version {self._version()}"
                )
                if self._rng.random() < 0.5:
                    self._await_marks(before)
                self._supervise()
        while self._due:
            self._pause(DELAY_S)

    def _await_moment(self) -> None:
        """Wait for a drawn moment (rule 1)."""
        infers_columns = isinstance(self._follower, InferringFollower)
        moment = self._rng.choice([*MOMENTS, FIELDS] if infers_columns else MOMENTS)
        if moment == "delay":
            self._pause(self._rng.uniform(0, DELAY_S))
            return
        pattern = "*.parquet" if moment == "data" else "_delta_log/*.json"
        after_s = self._rng.choice((0.0, 0.0, 0.002, 0.02, 0.1))
        known = set(self._table.glob(pattern))
        while True:
            new = set(self._table.glob(pattern)) - known
            if any(moment != FIELDS or only_adds_fields(each) for each in new):
                break
            known |= new
            self._supervise()
            time.sleep(POLL_S)
        self._pause(after_s)

    def _pause(self, seconds: float) -> None:
        """Wait for a drawn time: the moment of a kill is the test."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            self._supervise()
            time.sleep(POLL_S)

    def _kill(self, victim: str) -> bool:
        """Kill a process; return False if no process of this kind runs."""
        if victim not in MEMBERS:
            self._start_later(self._follower.start)
            return self._follower.kill(victim)
        names = [member.name for member in self._cluster.members if member.kind == victim]
        name = self._rng.choice(names)
        if self._cluster.member(name).process() is None:
            return False
        self._cluster.kill(name)
        self._start_later(partial(self._cluster.start, name))
        return True

    def _start_later(self, start: Callable[[], None]) -> None:
        delay_s = self._rng.choice((0.0, self._rng.uniform(0, DELAY_S)))
        self._due.append((time.monotonic() + delay_s, start))

    def _supervise(self) -> None:
        """Start the processes that are due, and a follower that has ended by itself."""
        now_s = time.monotonic()
        for each in [each for each in self._due if each[0] <= now_s]:
            self._due.remove(each)
            each[1]()
        if all(start != self._follower.start for _, start in self._due):
            self._follower.start()

    def _version(self) -> int:
        return len(list(self._table.glob("_delta_log/*.json"))) - 1

    def _await_marks(self, marks: dict[int, int]) -> None:
        def has_marks() -> bool:
            self._supervise()
            if not DeltaTable.is_deltatable(str(self._table)):
                return False
            found = marks_by_version(self._table)
            newest = found[max(found)]
            return all(newest[partition] >= mark for partition, mark in marks.items())

        wait_until(f"the marks {marks} in the table", has_marks)


def only_adds_fields(commit: Path) -> bool:
    """Whether a commit of a table only adds fields of structs."""
    try:
        lines = commit.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return False
    return {name for line in lines for name in json.loads(line)} == {
        "commitInfo",
        "metaData",
        "txn",
    }


def read_log(client: WaltzClient) -> list[list[tuple[int, dict]]]:
    """Return the transactions of each partition: header and payload."""
    log = []
    for partition in range(PARTITION_COUNT):
        last = client.high_water_mark(partition, linearizable=True)
        chunks = client.read_range(partition, 0, last)
        rows = [row for chunk in chunks for row in chunk.rows()]
        log.append([(row.header, msgpack.unpackb(row.data)) for row in rows])
    return log


def compare(written: WrittenLog, table: Path, writer: EndlessWriter) -> Iterator[str]:
    """Yield each difference between the log and the versions of the table (rule 3)."""
    for (partition, transaction_id), sent in writer.committed.items():
        if written.log[partition][transaction_id : transaction_id + 1] != [sent]:
            yield f"partition {partition}: transaction {transaction_id} is not the acknowledged one"
    before: dict[int, int] | None = None
    schema_before = ""
    history = {
        commit["version"]: commit.get("userMetadata") for commit in DeltaTable(table).history()
    }
    for version, metadata in sorted(history.items()):
        decoded = decode_marks(metadata)
        if decoded is None:
            yield f"version {version} has no marks"
            continue
        marks = dict(decoded.marks)
        found, expected = read_table(table, version), written.replayed(marks)
        if found != expected:
            keys = sorted(key for key in found | expected if found.get(key) != expected.get(key))
            yield (
                f"version {version} with marks {marks}: keys {keys} differ: expected "
                f"{[expected.get(key) for key in keys]}, found {[found.get(key) for key in keys]}"
            )
        schema = DeltaTable(table, version=version).schema().to_json()
        if before is not None and (
            (marks == before and schema == schema_before)  # it does not add fields
            or any(marks[each] < mark for each, mark in before.items())
        ):
            yield f"version {version}: expected marks above {before}, found {marks}"
        before, schema_before = marks, schema
    if before != end_marks(written):
        yield f"the table ends at {before}, the log at {end_marks(written)}"


def play(
    seed: int, kills: int, follower: str, directory: Path, print_progress: Callable[[str], None]
) -> Outcome:
    """Play one run."""
    table = directory / "table"
    settings: dict[str, dict[str, object]] = {
        kind: {"zookeeper_session_timeout_ms": SESSION_MS} for kind in MEMBERS
    }
    settings["server"]["quorum_timeout_ms"] = 2 * SESSION_MS
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(
            local.running_cluster(
                directory / "local", partition_count=PARTITION_COUNT, settings=settings
            )
        )
        written = WrittenLog(cluster.connect, [])
        client = stack.enter_context(WaltzClient(cluster.connect, PATIENT_CLIENT))
        writer = EndlessWriter(client, seed, has_structs=follower == "inferred")
        stack.callback(writer.stop)
        following = FOLLOWERS[follower](written, table, directory)
        stack.callback(following.close)
        writer.start()
        following.start()
        run = TableKills(cluster, following, table, seed, print_progress)
        run.run(kills)
        writer.stop()
        following.close()
        outcome = run.outcome
        outcome.wrong += following.finish()
        outcome.unexpected_ends += following.unexpected_ends
        if follower != "spark":
            outcome.wrong += following.unexpected_ends
        written.log.extend(read_log(client))
        outcome.wrong += compare(written, table, writer)
        outcome.counts = writer.counts + Counter(
            {
                "transactions": sum(map(len, written.log)),
                "versions": DeltaTable(table).version() + 1,
            }
        )
    return outcome


def main() -> int:
    """Play a run; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.table_kills", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--kills", type=int, default=50, help="number of kills; default 50")
    parser.add_argument("--seed", type=int, help="default: any")
    parser.add_argument("--follower", choices=[*FOLLOWERS], default="command")
    parser.add_argument("--directory", type=Path, default=ROOT / "build" / "table-kills")
    arguments = parser.parse_args()
    seed = arguments.seed
    if seed is None:
        seed = random.SystemRandom().randrange(1_000_000)
    shutil.rmtree(arguments.directory, ignore_errors=True)
    arguments.directory.mkdir(parents=True)

    def print_line(text: str) -> None:
        print(text, flush=True)  # noqa: T201 - the person at the terminal

    print_line(f"seed {seed}, {arguments.kills} kills, {arguments.follower}")
    outcome = play(seed, arguments.kills, arguments.follower, arguments.directory, print_line)
    for wrong in outcome.wrong:
        print_line(f"WRONG: {wrong}")
    for ending in outcome.unexpected_ends:
        print_line(f"the follower {ending}")
    print_line(f"kills: {dict(outcome.kills)}; {dict(outcome.counts)}")
    print_line(
        f"{len(outcome.wrong)} wrong; table and logs are in {arguments.directory}"
        if outcome.wrong
        else "OK: each version of the table equals a replay of the log"
    )
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
