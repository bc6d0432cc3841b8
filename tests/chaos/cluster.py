"""A cluster in which each daemon runs on its own simulated machine and address.

`waltz_core.local` runs all members at one address. Here each member has its own address with the
default ports. So a link between two members can be cut without an effect on other links.

Rules:
    1. When this process ends for any reason, Linux kills all of its child processes, even paused
       ones, by the signal of the parent's death. Linux sends this signal when the thread ends that
       has started the child, so only the main thread starts processes.
    2. A member that ends by itself is an error, unless a fault has ended it (`unexpected_ends`).
       A member that found no ZooKeeper at its start is started again, as a supervisor does.
    3. On a simulated machine a storage has a small file system of its own, which can become full.
    4. With an object store the cluster archives to S3 over HTTP, and the retention of local logs is
       small. Only the proxy in front of the bucket is a member and can be killed. The bucket is not
       killed, because it would lose acknowledged objects.
"""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tests.chaos import object_store
from tests.chaos.network import Machine, Network, environment
from tests.commands import run_command
from tests.spark.simulated_hosts import die_with_parent
from tests.time_limits import TEST_TIMEOUT_S, machine_slowdown
from waltz_core.client import WaltzClient
from waltz_core.config import ClientConfig, render_toml
from waltz_core.config.connect_string import ConnectString
from waltz_core.errors import WaltzError
from waltz_core.local.zookeeper_process import EnsemblePeer, write_node_number, zookeeper_config

CLIENT_PORTS = {"store": object_store.PORT, "zookeeper": 2181, "storage": 15280, "server": 15180}
ADMIN_PORT, HTTP_PORT, QUORUM_PORT, ELECTION_PORT = 15281, 15480, 2888, 3888
OPERATOR = "operator"
SESSION_MS = 2_000
# Twice the ZooKeeper session timeout, as in production.
QUORUM_TIMEOUT_MS = 2 * SESSION_MS
STORAGE_BYTES = 192 * 1024 * 1024
RESERVE_BYTES = 4 * 1024 * 1024
FILLER_FILE = "filler"
READY_TIMEOUT_S = 60.0
# The errors of a daemon that has found no ZooKeeper, or has lost it before it was ready.
NOT_CONNECTED_ERRORS = ("waltz-core: no ZooKeeper answered", "waltz-core: ZooKeeper ")
SEGMENT_HEADER_BYTES = 128
DAEMON_SETTINGS: dict[str, dict[str, object]] = {
    "server": {
        "zookeeper_session_timeout_ms": SESSION_MS,
        "quorum_timeout_ms": QUORUM_TIMEOUT_MS,
    },
    # Small segments, so that the log has many.
    "storage": {
        "zookeeper_session_timeout_ms": SESSION_MS,
        "segment_bytes_max": 4 * 1024 * 1024,
        "reserve_bytes": RESERVE_BYTES,
    },
}
SEGMENT_BYTES, RETENTION_BYTES = 16 * 1024, 128 * 1024
# With an archive (rule 4), segments and limits are small, so that uploads and removals never pause.
ARCHIVE_SETTINGS: dict[str, dict[str, object]] = {
    "server": {"archive_interval_ms": 200},
    "storage": {
        "segment_bytes_max": SEGMENT_BYTES,
        "archive_object_bytes": 2 * SEGMENT_BYTES,
        "archive_age_ms": 1_000,
        "local_retention_bytes": RETENTION_BYTES,
    },
}


class LocalLog(NamedTuple):
    """The log of a partition on a storage: the first ID of its oldest segment, and its records."""

    first: int
    records: bytes


@dataclass(frozen=True)
class ClusterSize:
    """The numbers of processes and partitions of a cluster."""

    zookeepers: int = 1
    storages: int = 3
    servers: int = 2
    clients: int = 1
    partitions: int = 4
    stores: int = 0  # 1: it archives (rule 4)

    def names(self, kind: str) -> list[str]:
        """Return the members of a kind."""
        return [f"{kind}-{number + 1}" for number in range(getattr(self, f"{kind}s"))]

    @property
    def members(self) -> list[str]:
        """Return all daemons, in the order in which they start."""
        return [name for kind in CLIENT_PORTS for name in self.names(kind)]


@dataclass
class Member:
    """One daemon: its machine, and its process while it runs."""

    name: str
    machine: Machine
    process: subprocess.Popen[bytes] | None = None
    is_frozen: bool = False
    should_run: bool = False  # if true and it does not run, it has ended by itself
    log_start_offset: int = 0  # where in its log its process begins

    @property
    def kind(self) -> str:
        """Return "store", "zookeeper", "storage" or "server"."""
        return self.name.split("-")[0]

    @property
    def address(self) -> str:
        """Return host and port."""
        return f"{self.machine.address}:{CLIENT_PORTS[self.kind]}"

    @property
    def is_running(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.process.poll() is None


@dataclass
class ChaosCluster:
    """The daemons of a cluster on a network; `with run_cluster(...) as cluster`."""

    cluster_size: ClusterSize
    directory: Path
    network: Network
    members: dict[str, Member] = field(default_factory=dict)
    unexpected_ends: list[str] = field(default_factory=list)  # rule 2
    _bucket_process: "subprocess.Popen[str] | None" = None

    def __post_init__(self) -> None:
        for name in self.cluster_size.members:
            self.members[name] = Member(name, self.network.machines[name])

    @property
    def operator(self) -> Machine:
        """Return the machine of the process that observes the cluster."""
        return self.network.machines[OPERATOR]

    @property
    def connect(self) -> str:
        """Return the connect string."""
        hosts = tuple(self.members[name].address for name in self.cluster_size.names("zookeeper"))
        return str(ConnectString(hosts, "/waltz/chaos", ""))

    # ---- start and end

    def start_all(self) -> None:
        """Start all daemons, and wait until every partition accepts appends."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for name in self.cluster_size.names("storage"):
            self._mount_disk(self.members[name])
        for name in self.cluster_size.names("store"):
            self._start_object_store(self.members[name].machine)
        for name in (*self.cluster_size.names("store"), *self.cluster_size.names("zookeeper")):
            self.start(name)
        self._create_cluster()
        for name in (*self.cluster_size.names("storage"), *self.cluster_size.names("server")):
            self.start(name)
        self.wait_until("every partition has an owner", self.is_ready, seconds=READY_TIMEOUT_S)

    def is_ready(self) -> bool:
        """Return whether every partition answers."""
        try:
            with self.client() as client:
                client.high_water_marks(linearizable=True)
        except WaltzError:
            return False
        return True

    def kill_all(self) -> None:
        """Kill all daemons."""
        for member in self.members.values():
            member.should_run = False
            if member.process is not None:
                member.process.kill()
                member.process.wait()
        if self._bucket_process is not None:
            self._bucket_process.kill()
            self._bucket_process.communicate()

    def start(self, name: str) -> None:
        """Start a member if it does not run."""
        self.record_ended_members()
        member = self.members[name]
        if member.is_running:
            return
        with self.log_path(name).open("ab") as log:
            member.log_start_offset = log.tell()
            member.process = subprocess.Popen(
                member.machine.command(sys.executable, "-m", *self._module_and_arguments(member)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                preexec_fn=die_with_parent,  # noqa: PLW1509 - rule 1
            )
        member.is_frozen, member.should_run = False, True

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send a member a signal that ends it."""
        member = self.members[name]
        self.record_ended_members()
        member.should_run = False
        if member.is_running:
            assert member.process is not None
            member.process.send_signal(number)
            if number == signal.SIGKILL:
                member.process.wait(10)

    def freeze(self, name: str) -> None:
        """Pause a member (SIGSTOP)."""
        self._signal(name, signal.SIGSTOP)
        self.members[name].is_frozen = True

    def thaw(self, name: str) -> None:
        """Resume a paused member (SIGCONT)."""
        self._signal(name, signal.SIGCONT)
        self.members[name].is_frozen = False

    def _signal(self, name: str, number: int) -> None:
        member = self.members[name]
        if member.is_running:
            assert member.process is not None
            member.process.send_signal(number)

    def record_ended_members(self) -> None:
        """Record each member that has ended by itself (rule 2)."""
        for member in self.members.values():
            if member.should_run and not member.is_running:
                member.should_run = False
                assert member.process is not None
                log_text = (
                    self.log_path(member.name).read_bytes()[member.log_start_offset :].decode()
                )
                *_, last = ["", *log_text.splitlines()]
                if last.startswith(NOT_CONNECTED_ERRORS) and f"{member.kind} ready" not in log_text:
                    self.start(member.name)
                else:
                    code = member.process.returncode
                    self.unexpected_ends.append(
                        f"{member.name} ended by itself, with {code}: {last}"
                    )

    # ---- the archive

    @property
    def archive_url(self) -> str:
        """Return the URL of the archive (rule 4)."""
        (store,) = self.cluster_size.names("store")
        return object_store.url_at(self.members[store].machine.address)

    def send_bucket_command(self, command: str) -> int:
        """Send a command to the bucket's process; return its answer."""
        assert self._bucket_process is not None
        assert self._bucket_process.stdin is not None
        assert self._bucket_process.stdout is not None
        self._bucket_process.stdin.write(command + "\n")
        self._bucket_process.stdin.flush()
        return int(self._bucket_process.stdout.readline())

    def verify_archive(self) -> dict[str, Any]:
        """Return the output of `waltz-core archive verify --json`.

        The command runs in a separate process, because the threads of pyarrow's client stay in the
        network namespace in which they were started.
        """
        words = (
            "archive",
            "verify",
            "--connect",
            self.connect,
            "--archive",
            self.archive_url,
            "--json",
        )
        result = subprocess.run(
            self.operator.command(sys.executable, "-m", "waltz_core", *words),
            capture_output=True,
            text=True,
            check=False,
            env=self._environment(),
            timeout=TEST_TIMEOUT_S,
        )
        assert result.stdout, result.stderr
        return dict(json.loads(result.stdout))

    def _start_object_store(self, machine: Machine) -> None:
        words = ("-m", "tests.chaos.object_store", "bucket", machine.address)
        with (self.directory / "bucket.log").open("ab") as log:
            self._bucket_process = subprocess.Popen(
                machine.command(sys.executable, *words),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment(),
                preexec_fn=die_with_parent,  # noqa: PLW1509 - rule 1
            )
        assert self._bucket_process.stdout is not None
        assert self._bucket_process.stdout.readline() == "ready\n", "the bucket does not start"

    # ---- disks

    def _mount_disk(self, member: Member) -> None:
        directory = self._data_directory(member)
        directory.mkdir(parents=True, exist_ok=True)
        if member.machine.has_own_network:
            size = f"size={STORAGE_BYTES}"
            member.machine.run("mount", "-t", "tmpfs", "-o", size, "tmpfs", str(directory))

    def fill_disk(self, name: str) -> None:
        """Fill the disk of a storage."""
        path = self.files(name) / FILLER_FILE
        with contextlib.suppress(OSError), path.open("ab", buffering=0) as filler:
            for size in (1 << 20, 1 << 12):
                with contextlib.suppress(OSError):
                    while filler.write(bytes(size)):
                        pass

    def free_disk(self, name: str) -> None:
        """Free the disk of a storage."""
        (self.files(name) / FILLER_FILE).unlink(missing_ok=True)

    def files(self, name: str) -> Path:
        """Return the path of a storage's directory from outside its namespace."""
        member = self.members[name]
        return member.machine.path(self._data_directory(member))

    def records(self, name: str) -> dict[int, LocalLog]:
        """Return the records of each partition in a storage's files."""
        found: dict[int, LocalLog] = {}
        for directory in sorted(self.files(name).iterdir()):
            if directory.name.isdigit():
                segments = sorted(directory.glob("*.seg"))
                found[int(directory.name)] = LocalLog(
                    int(segments[0].stem) if segments else 0,
                    b"".join(segment.read_bytes()[SEGMENT_HEADER_BYTES:] for segment in segments),
                )
        return found

    # ---- the state of the cluster

    def client(self, **options: Any) -> WaltzClient:
        """Open a client on the operator's machine."""
        with self.operator.enter():
            return WaltzClient(self.connect, ClientConfig(request_timeout_ms=10_000, **options))

    def show_cluster(self) -> dict[str, Any]:
        """Return the output of `waltz-core cluster show --json`."""
        return dict(json.loads(self.run_command("cluster", "show", self.connect, "--json")))

    def run_command(self, *words: str) -> str:
        """Run a command in this process, on the operator's machine.

        Raises CalledProcessError.
        """
        with self.operator.enter():
            result = run_command(*words)
        result.check_returncode()
        return result.stdout

    def owners(self) -> dict[int, str]:
        """Return the name of each partition's owner; empty for a partition without an owner."""
        names = {member.address: member.name for member in self.members.values()}
        partitions = self.show_cluster()["partitions"]
        return {int(each): names.get(part["server"], "") for each, part in partitions.items()}

    def has_equal_replicas(self) -> bool:
        """Return whether every replica is engaged and all have the same records.

        With an archive, storages have removed different segments: the remaining records are
        compared.
        """
        view = self.show_cluster()
        if any(
            set(partition["engaged"]) != set(view["storages"])
            for partition in view["partitions"].values()
        ):
            return False
        try:
            found = [self.records(name) for name in self.cluster_size.names("storage")]
        except FileNotFoundError:  # a segment is removed now
            return False
        return any(each.records for each in found[0].values()) and all(
            self._are_equal([logs[partition] for logs in found]) for partition in found[0]
        )

    def _are_equal(self, logs: list[LocalLog]) -> bool:
        longest = min(logs)
        if not self.cluster_size.stores:
            return all(log == longest for log in logs)
        return all(log.records and longest.records.endswith(log.records) for log in logs)

    def log_path(self, name: str) -> Path:
        """Return the path of a member's log."""
        return self.directory / f"{name}.log"

    @staticmethod
    def wait_until(description: str, condition: Callable[[], object], *, seconds: float) -> float:
        """Poll a condition until it holds; return the seconds that it took.

        On a busy machine, the time limit is longer by the factor `machine_slowdown()`. Processes in
        another namespace cannot notify this process, so the condition is polled.
        """
        began_s = time.monotonic()
        while not condition():
            limit_s = seconds * machine_slowdown()
            assert time.monotonic() < began_s + limit_s, (
                f"not within {limit_s:.0f} s: {description}"
            )
            time.sleep(0.05)
        return time.monotonic() - began_s

    # ---- files

    def _data_directory(self, member: Member) -> Path:
        return (self.directory / member.name).absolute()

    def _create_cluster(self) -> None:
        storages = [self.members[name] for name in self.cluster_size.names("storage")]
        self.run_command(
            *("cluster", "create", self.connect, "--name", "chaos"),
            *("--partitions", str(self.cluster_size.partitions)),
            *(f"--storage={storage.address}:{ADMIN_PORT}" for storage in storages),
            *("--if-absent", "--timeout-s", str(TEST_TIMEOUT_S)),
        )

    def _environment(self) -> dict[str, str]:
        """Return the environment of a daemon, with the credentials of the archive."""
        return environment() | (object_store.CREDENTIALS if self.cluster_size.stores else {})

    def _module_and_arguments(self, member: Member) -> tuple[str, ...]:
        """Return the module that runs a member and its arguments."""
        if member.kind == "store":
            return ("tests.chaos.object_store", "front", member.machine.address)
        return ("waltz_core", member.kind, "run", "--config", str(self._write_config(member)))

    def _write_config(self, member: Member) -> Path:
        suffix = "cfg" if member.kind == "zookeeper" else "toml"
        path = self.directory.absolute() / f"{member.name}.{suffix}"
        if member.kind == "zookeeper":
            path.write_text(self._zookeeper_config(member), encoding="utf-8")
            return path
        values: dict[str, object] = {
            "connect": self.connect,
            "listen_host": member.machine.address,
            "port": CLIENT_PORTS[member.kind],
            "advertised_host": member.machine.address,
            "http_host": member.machine.address,
            "http_port": HTTP_PORT,
            "insecure_network": True,
            **DAEMON_SETTINGS[member.kind],
        }
        if member.kind == "storage":
            values |= {"directory": str(self._data_directory(member)), "admin_port": ADMIN_PORT}
        if self.cluster_size.stores:
            values |= ARCHIVE_SETTINGS[member.kind]
            values |= {"archive_url": self.archive_url} if member.kind == "storage" else {}
        path.write_text(render_toml(member.kind, values), encoding="utf-8")
        return path

    def _zookeeper_config(self, member: Member) -> str:
        data, host = self._data_directory(member), member.machine.address
        names = self.cluster_size.names("zookeeper")
        if len(names) == 1:
            return zookeeper_config(data, CLIENT_PORTS["zookeeper"], host=host)
        write_node_number(data, names.index(member.name) + 1)
        ensemble = [
            EnsemblePeer(self.members[name].machine.address, QUORUM_PORT, ELECTION_PORT)
            for name in names
        ]
        return zookeeper_config(data, CLIENT_PORTS["zookeeper"], host=host, ensemble=ensemble)


@contextlib.contextmanager
def run_cluster(
    cluster_size: ClusterSize, directory: Path, *, in_namespaces: bool = True
) -> Iterator[ChaosCluster]:
    """Start a cluster, and end it with the `with` block."""
    names = [*cluster_size.members, *cluster_size.names("client"), OPERATOR]
    with Network(names, uses_namespaces=in_namespaces) as network:
        cluster = ChaosCluster(cluster_size, directory, network)
        try:
            cluster.start_all()
            yield cluster
        finally:
            cluster.kill_all()
