"""A whole cluster on this machine: ZooKeeper, storages and servers as real processes.

The command `waltz-core local`, the notebooks, the tests and the demo use the class `LocalCluster`.
Only this module starts the processes, finds them again after a crash, and stops them.

Rules:
    1. Every part is real: sockets, disks, fdatasync, and ZooKeeper from PySpark's jars.
    2. The cluster stops only processes that it has started. It recognizes them by the process ID
       and the start time: both must be equal to the recorded values.
    3. Ports are chosen once for a directory and recorded in it. Until a daemon listens at its port,
       this process keeps a socket bound to the port, so that no other cluster chooses this port. If
       another program uses a port at the next start, the cluster chooses a new port. Two kinds of
       ports cannot be replaced, and cause an error instead: ports that a port base determines, and
       ports that other processes have recorded, such as a storage's port.
    4. The directory contains everything for another start, so nothing is lost if all processes are
       killed.
"""

import asyncio
import contextlib
import fcntl
import itertools
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeAlias

import psutil

from waltz_core.config.connect_string import ConnectString, parse_connect_string
from waltz_core.config.declarations import render_toml
from waltz_core.config.host_names import is_loopback
from waltz_core.errors import BadConfig, Unavailable, Unreachable, WaltzError
from waltz_core.local import ports
from waltz_core.local.zookeeper_process import EnsemblePeer, write_node_number, zookeeper_config

if TYPE_CHECKING:
    import socket

    from waltz_core.cluster.coordinator import ServersView

ROOT_DEFAULT = "/waltz/local"
LOOPBACK = "127.0.0.1"
STATE_FILE = "cluster.json"
STATE_VERSION = 1
DEFAULT_ZOOKEEPER_PORT = 2181
DEFAULT_QUORUM_PORT = 2888
DEFAULT_ELECTION_PORT = 3888
DEFAULT_STORAGE_PORT = 15280
DEFAULT_SERVER_PORT = 15180
# The setting `archive_age_ms` of the storages, if the cluster has an archive. The setting is short,
# so that users see archived transactions soon. With a shorter setting, rare appends would cause
# many objects.
ARCHIVE_AGE_MS = 60_000
ARCHIVE_INTERVAL_MS = 1_000
STOP_TIMEOUT_S = 10.0
# The timeout of a start, which takes minutes on a busy machine. If a process exits, the start fails
# at once.
START_TIMEOUT_S = 300.0
PROGRESS_INTERVAL_S = 5.0
ShowLine: TypeAlias = Callable[[str], None]
PORT_FIELDS = ("port", "admin_port", "http_port", "quorum_port", "election_port")


def _ignore_line(_line: str) -> None:
    pass


def process_start_s(process: psutil.Process) -> float:
    """Return the start time of a process, in seconds; clock changes do not affect it.

    psutil adds the boot time, which depends on the current clock. This function subtracts it again.
    """
    return float(process.create_time() - (psutil.boot_time() if psutil.LINUX else 0))


@dataclass(slots=True)
class Member:
    """One process of the cluster: its name, its ports, and its process ID while it runs."""

    name: str  # "zookeeper" (or "zookeeper-1", ...), "storage-1", "server-1", ...
    port: int
    admin_port: int = 0
    http_port: int = 0
    # For a node of a ZooKeeper ensemble: the ports for the other nodes.
    quorum_port: int = 0
    election_port: int = 0
    pid: int = 0
    started: float = 0.0  # the start time of the process, from `process_start_s`

    @property
    def kind(self) -> str:
        """Return the kind of process: "zookeeper", "storage" or "server"."""
        return self.name.split("-")[0]

    def process(self) -> psutil.Process | None:
        """Return the live process that the cluster has started; None if there is none (rule 2)."""
        if not self.pid:
            return None
        try:
            os_process = psutil.Process(self.pid)
            alive = (
                abs(process_start_s(os_process) - self.started) < 0.5
                and os_process.status() != psutil.STATUS_ZOMBIE
            )
        except psutil.NoSuchProcess:
            return None
        return os_process if alive else None

    @property
    def state(self) -> str:
        """Return "up", "stopped" (by a signal, such as SIGSTOP) or "down"."""
        process = self.process()
        if process is None:
            return "down"
        try:
            return "stopped" if process.status() == psutil.STATUS_STOPPED else "up"
        except psutil.NoSuchProcess:
            return "down"


@dataclass(slots=True)
class SavedState:
    """The content of `cluster.json`."""

    root: str
    partition_count: int
    members: list[Member] = field(default_factory=list)
    host: str = LOOPBACK
    auth_file: str = ""
    tls: str = ""
    port_base: int = 0
    archive_url: str = ""

    @property
    def ports(self) -> set[int]:
        """Return all ports of all members."""
        return {getattr(member, name) for member in self.members for name in PORT_FIELDS} - {0}


class LocalCluster:
    """A cluster of processes on this machine, and their directory.

    Args:
        directory: for data, configuration, logs and the state file; created if absent.
        zookeeper_count: ZooKeeper servers, an odd number; 3 servers tolerate the loss of one.
        storage_count: storages; every partition has a replica on each.
        server_count: servers.
        partition_count: partitions; fixed for the life of the directory.
        try_default_ports: use default ports where they are free [default: only random ports].
        port_base: the first of the consecutive ports of all processes; 0: no consecutive ports.
        exit_with_parent: stop the processes when this process ends, even if it is killed.
        host: the address of this machine at which all processes listen, and under which other
            machines connect to them. Fixed for the life of the directory.
        insecure_network: required for a host other than loopback, because every process that can
            connect to the host may read and write.
        auth_file: the credentials for ZooKeeper (docs/zookeeper.md); none: no authentication.
        tls: settings of kind "tls" for all processes (docs/operations.md); none: no TLS.
        archive_url: the URL of the archive; empty: the URL of earlier starts, if any. The URL is
            stored for later starts, and cannot change.
        settings: extra settings by kind of daemon, e.g. ``{"storage": {"segment_bytes_max": 1}}``.
    """

    def __init__(  # noqa: PLR0913 - these are the knobs of a cluster, all keyword-only but one
        self,
        directory: Path,
        *,
        zookeeper_count: int = 1,
        storage_count: int = 3,
        server_count: int = 2,
        partition_count: int = 4,
        try_default_ports: bool = False,
        port_base: int = 0,
        exit_with_parent: bool = False,
        host: str = LOOPBACK,
        insecure_network: bool = False,
        auth_file: Path | None = None,
        tls: Path | None = None,
        archive_url: str = "",
        settings: dict[str, dict[str, object]] | None = None,
    ) -> None:
        self.directory = directory.absolute()
        if zookeeper_count < 1:
            raise BadConfig(f"zookeeper_count: expected at least 1, found {zookeeper_count}")
        if not insecure_network and not is_loopback(host):
            raise BadConfig(
                f"argument host: expected a loopback address, found {host!r}. Hint: "
                "insecure_network=True permits other addresses, without access control."
            )
        self._counts = (zookeeper_count, storage_count, server_count, partition_count)
        self._try_default_ports = try_default_ports
        self._port_base = port_base
        self._exit_with_parent = exit_with_parent
        self._host = host
        self._auth_file = "" if auth_file is None else str(auth_file.absolute())
        self._tls = "" if tls is None else str(tls.absolute())
        self._archive_url = archive_url
        self._settings = settings or {}
        self._state: SavedState | None = None
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._port_holders: list[socket.socket] = []

    # -- properties -------------------------------------------------------------------------

    @property
    def connect(self) -> str:
        """Return the connect string, for Spark's ``load`` and every client."""
        state = self._load_state()
        hosts = [f"{state.host}:{member.port}" for member in self.zookeepers]
        return str(ConnectString(tuple(hosts), state.root, state.auth_file, state.tls))

    @property
    def host(self) -> str:
        """Return the address at which all members listen."""
        return self._load_state().host

    @property
    def zookeepers(self) -> list[Member]:
        """Return the ZooKeeper servers: one, or an ensemble."""
        return [member for member in self.members if member.kind == "zookeeper"]

    @property
    def members(self) -> list[Member]:
        """Return all members, ZooKeeper first."""
        return self._load_state().members

    @property
    def partition_count(self) -> int:
        return self._load_state().partition_count

    @property
    def port_base(self) -> int:
        """Return the port base with which the cluster was created; 0 for none."""
        return self._load_state().port_base

    def member(self, name: str) -> Member:
        """Return a member by name.

        Raises:
            BadConfig: the cluster has no such member.
        """
        for candidate in self._load_state().members:
            if candidate.name == name:
                return candidate
        names = ", ".join(member.name for member in self._load_state().members)
        raise BadConfig(f"this cluster has no process {name!r}; its processes are {names}")

    def log_path(self, name: str) -> Path:
        """Return the log file of a member."""
        return self.directory / "logs" / f"{name}.log"

    def exists(self) -> bool:
        """Whether the directory contains a cluster."""
        return (self.directory / STATE_FILE).exists()

    # -- commands ---------------------------------------------------------------------------

    def up(self, timeout_s: float = START_TIMEOUT_S, show_line: ShowLine = _ignore_line) -> str:
        """Start the processes that do not run; wait for open partitions and for each process.

        Returns the connect string. While `up` waits, `show_line` regularly receives a line with the
        reason.

        Raises:
            Unreachable: the cluster was not ready in time; the message shows the end of the log.
            BadConfig: another program uses a fixed port (rule 3).
        """
        deadline = time.monotonic() + timeout_s
        try:
            self._prepare(deadline, show_line)
            with self._lock_directory():
                started = [member for member in self.members if member.process() is None]
                for member in self.members:
                    self.start(member.name)
            self._await_partitions(deadline, show_line)
            self._await_members(started, deadline, show_line)
        finally:
            self._release_ports()
        return self.connect

    def prepare(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start ZooKeeper and create the cluster in it, but start no storage and no server.

        Raises:
            Unreachable: ZooKeeper was not ready in time.
        """
        try:
            self._prepare(time.monotonic() + timeout_s)
        finally:
            self._release_ports()

    def _prepare(self, deadline: float, show_line: ShowLine = _ignore_line) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        with self._lock_directory():
            self._load_or_create()
            self._store_archive_url()
            for member in self.members:  # before other members' configurations name the ports
                self._replace_ports_in_use(member)
            for member in self.zookeepers:
                self.start(member.name)
            self._create_cluster(deadline, show_line)

    def add_storage(self) -> Member:
        """Add a storage process; it does not belong to the cluster yet.

        `waltz-core cluster add-storage` adds it to the cluster.
        """
        state = self._load_state()
        number = sum(member.kind == "storage" for member in state.members) + 1
        storage = Member(
            f"storage-{number}", *[self._reserve_free_port(state.ports) for _ in range(3)]
        )
        self._release_ports()
        state.members.append(storage)
        self._save_state()
        return storage

    def start(self, name: str) -> None:
        """Start one member, unless it runs."""
        member = self.member(name)
        if member.process() is not None:
            return
        self._await_exit(member, STOP_TIMEOUT_S)
        self._replace_ports_in_use(member)
        self._write_config(member)
        self.log_path(name).parent.mkdir(exist_ok=True)
        with self.log_path(name).open("ab") as log:
            child = self._start_process(member, log)
        self._children[name] = child
        member.pid = child.pid
        member.started = process_start_s(psutil.Process(child.pid))
        self._save_state()

    def kill(self, name: str, signal_number: int = signal.SIGKILL) -> None:
        """Send a signal to one member. If the signal kills it, wait until it has exited."""
        member = self.member(name)
        self._send_signal(member, signal_number)
        if member.process() is None or signal_number in (signal.SIGKILL, signal.SIGTERM):
            self._await_exit(member, STOP_TIMEOUT_S)

    def down(self, *, keep_zookeeper: bool = False) -> list[str]:
        """Stop the members, servers first and ZooKeeper last; return the names of stopped members.

        With `keep_zookeeper`, ZooKeeper continues to run, so that its znodes can be changed.
        """
        stopped: list[str] = []
        self._load_state()
        self._release_ports()
        with self._lock_directory():
            for kind in _STOP_ORDER[:-1] if keep_zookeeper else _STOP_ORDER:
                running = [
                    member
                    for member in self.members
                    if member.kind == kind and member.process() is not None
                ]
                for member in running:
                    self._send_signal(member, signal.SIGTERM)
                for member in running:
                    if not self._await_exit(member, STOP_TIMEOUT_S):
                        self._send_signal(member, signal.SIGKILL)
                        self._await_exit(member, STOP_TIMEOUT_S)
                    stopped.append(member.name)
                    member.pid = 0
            for name in list(self._children):  # members that have exited by themselves
                if keep_zookeeper and self.member(name).kind == "zookeeper":
                    continue
                self._await_exit(self.member(name), STOP_TIMEOUT_S)
            self._save_state()
        return stopped

    @staticmethod
    def _send_signal(member: Member, number: int) -> None:
        """Send a signal to a member, unless it has exited."""
        process = member.process()
        if process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def cpu_seconds(self) -> dict[str, float]:
        """Return user + system CPU seconds of each live member, as the kernel counts them."""
        seconds_by_name: dict[str, float] = {}
        for member in self.members:
            process = member.process()
            if process is not None:
                cpu_times = process.cpu_times()
                seconds_by_name[member.name] = cpu_times.user + cpu_times.system
        return seconds_by_name

    def processes(self) -> dict[str, psutil.Process]:
        """Return the members' live processes by name, and their child processes ("NAME-1")."""
        processes_by_name: dict[str, psutil.Process] = {}
        for member in self.members:
            process = member.process()
            if process is not None:
                processes_by_name[member.name] = process
                children = enumerate(process.children(), 1)
                processes_by_name |= {
                    f"{member.name}-{number}": child for number, child in children
                }
        return processes_by_name

    # -- the directory ----------------------------------------------------------------------

    @contextlib.contextmanager
    def _lock_directory(self) -> Iterator[None]:
        with (self.directory / "lock").open("w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise BadConfig(
                    f"another command is starting or stopping the cluster in {self.directory}"
                ) from None
            yield

    def _load_state(self) -> SavedState:
        if self._state is None:
            path = self.directory / STATE_FILE
            try:
                fields = json.loads(path.read_text(encoding="utf-8"))
                members = [Member(**entry) for entry in fields["members"]]
                host = fields.get("host", LOOPBACK)
                files = [fields.get(name, "") for name in ("auth_file", "tls")]
                self._state = SavedState(
                    fields["root"], fields["partition_count"], members, host, *files
                )
                self._state.port_base = fields.get("port_base", 0)
                self._state.archive_url = fields.get("archive_url", "")
            except FileNotFoundError:
                raise BadConfig(
                    f"there is no local cluster in {self.directory}. Hint: `waltz-core local "
                    "up` starts one."
                ) from None
            except (ValueError, KeyError, TypeError) as error:
                raise BadConfig(f"{path} is not a state file of a cluster: {error}") from None
        return self._state

    def _load_or_create(self) -> None:
        if self.exists():
            self._load_state()
            return
        zookeepers, storages, servers, partitions = self._counts
        numbers = itertools.count(self._port_base)

        def port(default_port: int | None) -> int:
            return (
                self._reserve_port(next(numbers))
                if self._port_base
                else self._reserve_default_port(default_port)
            )

        members = [Member("zookeeper", port(DEFAULT_ZOOKEEPER_PORT))]
        if zookeepers > 1:
            members = [
                Member(
                    f"zookeeper-{index + 1}",
                    port(DEFAULT_ZOOKEEPER_PORT + index),
                    quorum_port=port(DEFAULT_QUORUM_PORT + index),
                    election_port=port(DEFAULT_ELECTION_PORT + index),
                )
                for index in range(zookeepers)
            ]
        for index in range(storages):
            default_port = DEFAULT_STORAGE_PORT + 10 * index
            members.append(
                Member(f"storage-{index + 1}", port(default_port), port(default_port + 1))
            )
        members += [
            Member(f"server-{index + 1}", port(DEFAULT_SERVER_PORT + 10 * index))
            for index in range(servers)
        ]
        for member in members[zookeepers:]:
            member.http_port = port(None)
        files = (self._auth_file, self._tls)
        self._state = SavedState(
            ROOT_DEFAULT, partitions, members, self._host, *files, port_base=self._port_base
        )
        self._save_state()

    def _store_archive_url(self) -> None:
        """Store the archive's URL for later starts; raises BadConfig if it cannot be changed."""
        state, url = self._load_state(), self._archive_url
        if url in ("", state.archive_url):
            return
        if state.archive_url:
            raise BadConfig(
                f"argument archive: the cluster in {self.directory} uses "
                f"{state.archive_url}, which cannot be changed; found {url}"
            )
        daemons = [member for member in self.members if member.kind != "zookeeper"]
        running = [member.name for member in daemons if member.process() is not None]
        if running:
            raise BadConfig(
                "an archive can only be added while no storage and no server runs, but "
                f"{', '.join(running)} run. Hint: run `waltz-core local down` first."
            )
        state.archive_url = url
        self._save_state()

    def _reserve_port(self, port: int) -> int:
        """Reserve and return a port of the port base; raises BadConfig if it is not free."""
        held_socket = ports.hold_port(port, self._host)
        if held_socket is not None:
            self._port_holders.append(held_socket)
        elif not ports.is_free(port, self._host):  # if free, only closed connections use it
            raise BadConfig(
                f"--port-base {self._port_base}: another program uses port {port}. Hint: "
                "choose another port base, or omit the option."
            )
        return port

    def _reserve_default_port(self, default: int | None) -> int:
        """Reserve and return the default port if it is free, otherwise a random one."""
        if self._try_default_ports and default is not None:
            held_socket = ports.hold_port(default, self._host)
            if held_socket is not None:
                self._port_holders.append(held_socket)
                return default
        return self._reserve_free_port(set())

    def _reserve_free_port(self, used_ports: set[int]) -> int:
        """Reserve and return a free port that no member has."""
        host = self._host if self._state is None else self._state.host
        port, held_socket = ports.choose_port(used_ports, host)
        self._port_holders.append(held_socket)
        return port

    def _release_ports(self) -> None:
        """Release all held ports, when the daemons listen or when none will be started."""
        while self._port_holders:
            self._port_holders.pop().close()

    def _save_state(self) -> None:
        state = self._load_state()
        path = self.directory / STATE_FILE
        temporary_path = path.with_suffix(".tmp")
        body = {"version": STATE_VERSION, **asdict(state)}
        temporary_path.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")
        temporary_path.replace(path)

    def _replace_ports_in_use(self, member: Member) -> None:
        """Replace the ports of a stopped member that other programs use now (rule 3)."""
        if member.process() is not None:
            return
        state = self._load_state()
        for name in PORT_FIELDS:
            port: int = getattr(member, name)
            if not port or ports.wait_until_free(port, state.host):
                continue
            if reason := self._fixed_port_reason(member, name):
                raise BadConfig(
                    f"another program uses port {port} of {member.name}. The process cannot use "
                    f"another port, because {reason}. Hint: free the port and start again."
                )
            setattr(member, name, self._reserve_free_port(state.ports))
            self._save_state()

    def _fixed_port_reason(self, member: Member, name: str) -> str:
        """Return the reason why a port of a member cannot be replaced; empty if it can."""
        if base := self._load_state().port_base:
            return f"the cluster was created with --port-base {base}"
        if name in {"quorum_port", "election_port"}:
            is_known = any(zookeeper.process() is not None for zookeeper in self.zookeepers)
            return "the other ZooKeeper servers are configured with that port" if is_known else ""
        if member.kind == "storage" and name != "http_port" and self._creation_marker.exists():
            return "the address of a storage is its identity"
        return ""

    # -- the processes ----------------------------------------------------------------------

    def _write_config(self, member: Member) -> None:
        path = self.directory / "conf" / f"{member.name}.{_CONFIG_SUFFIX[member.kind]}"
        path.parent.mkdir(exist_ok=True)
        if member.kind == "zookeeper":
            text = self._zookeeper_config(member)
        else:
            text = render_toml(member.kind, self._settings_of(member))
        path.write_text(text, encoding="utf-8")

    def _zookeeper_config(self, member: Member) -> str:
        nodes, host = self.zookeepers, self._load_state().host
        data = self.directory / member.name
        if len(nodes) == 1:
            return zookeeper_config(data, member.port, host=host)
        write_node_number(data, nodes.index(member) + 1)
        ensemble = [EnsemblePeer(host, node.quorum_port, node.election_port) for node in nodes]
        return zookeeper_config(data, member.port, host=host, ensemble=ensemble)

    def _settings_of(self, member: Member) -> dict[str, object]:
        """Return the settings for a member's configuration file."""
        values: dict[str, object] = {
            "connect": self.connect,
            "listen_host": self._load_state().host,
            "port": member.port,
            "advertised_host": self._load_state().host,
            "http_host": self._load_state().host,
            "http_port": member.http_port,
            "insecure_network": not is_loopback(self._load_state().host),
        }
        if member.kind == "storage":
            values["directory"] = str(self.directory / member.name)
            values["admin_port"] = member.admin_port
            values["reserve_bytes"] = 4 * 1024 * 1024
        if self._load_state().archive_url:
            values |= self._archive_settings_of(member)
        values.update(self._settings.get(member.kind, {}))
        return values

    def _archive_settings_of(self, member: Member) -> dict[str, object]:
        if member.kind == "storage":
            url, age_ms = self._load_state().archive_url, ARCHIVE_AGE_MS
            return {"archive_url": url, "archive_age_ms": age_ms}
        return {"archive_interval_ms": ARCHIVE_INTERVAL_MS}

    def _start_process(self, member: Member, log: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start a member's process, whose output goes to `log`."""
        suffix = _CONFIG_SUFFIX[member.kind]
        config = self.directory / "conf" / f"{member.name}.{suffix}"
        command = [sys.executable, "-m", "waltz_core", member.kind, "run", "--config", str(config)]
        if self._exit_with_parent:
            command.append("--exit-with-parent")
        return subprocess.Popen(  # noqa: S603 - our own program and our own arguments
            command,
            stdin=subprocess.PIPE if self._exit_with_parent else subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=not self._exit_with_parent,
            cwd=self.directory,
        )

    @property
    def _creation_marker(self) -> Path:
        """The empty file that exists once the cluster was created in ZooKeeper."""
        return self.directory / "created"

    def _create_cluster(self, deadline: float, show_line: ShowLine) -> None:
        """Run `cluster create`, unless the cluster was created before."""
        if self._creation_marker.exists():
            return
        storages = [member for member in self.members if member.kind == "storage"]
        assert storages, "a cluster has storages"
        command = [sys.executable, "-m", "waltz_core", "cluster", "create", self.connect]
        command += ["--name", "local", "--partitions", str(self._load_state().partition_count)]
        host = self._load_state().host
        command += [f"--storage={host}:{storage.port}:{storage.admin_port}" for storage in storages]
        remaining_s = max(1.0, deadline - time.monotonic())
        command += ["--if-absent", "--timeout-s", f"{remaining_s:.1f}"]
        with subprocess.Popen(  # noqa: S603 - our own program and our own arguments
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as process:
            output = self._await_creation(
                process, show_line, deadline=time.monotonic() + remaining_s + 10
            )
        if process.returncode != 0:
            raise Unreachable(
                f"the local cluster could not be created: {output.strip()}\n"
                f"{self._log_tail(self.zookeepers[0].name)}"
            )
        self._creation_marker.touch()

    def _await_creation(
        self, process: subprocess.Popen[str], show_line: ShowLine, *, deadline: float
    ) -> str:
        """Return the error output of `cluster create`; raises Unreachable if ZooKeeper exits."""
        next_line = time.monotonic() + PROGRESS_INTERVAL_S
        try:
            while time.monotonic() < deadline:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.communicate(timeout=0.1)[1]
                if time.monotonic() > next_line:
                    show_line("waiting for ZooKeeper to create the cluster")
                    next_line += PROGRESS_INTERVAL_S
                self._check_alive(self.zookeepers)
            raise Unreachable(f"the cluster in {self.directory} could not be created in time")
        finally:
            process.kill()

    def _await_partitions(self, deadline: float, show_line: ShowLine) -> None:
        """Wait until all servers are registered and every partition is open."""
        from waltz_core.client import WaltzClient  # noqa: PLC0415 - costs start-up time

        last, next_line = "no answer yet", time.monotonic() + PROGRESS_INTERVAL_S
        while time.monotonic() < deadline:
            self._check_alive(self.members)
            try:
                # A server that registers later would take over partitions that clients already use.
                if missing := self._unregistered_servers():
                    last = f"not registered in ZooKeeper yet: {', '.join(sorted(missing))}"
                else:
                    with WaltzClient(self.connect) as client:
                        client.high_water_marks()
                    self._check_alive(self.members)
                    return
            except WaltzError as error:
                last = str(error)
            if time.monotonic() > next_line:
                show_line(f"waiting for servers and partitions: {last}")
                next_line += PROGRESS_INTERVAL_S
            time.sleep(0.05)
        raise Unreachable(
            f"the cluster in {self.directory} was not ready in time: {last}\n"
            f"{self._log_tail('server-1')}"
        )

    def _await_members(self, started: list[Member], deadline: float, show_line: ShowLine) -> None:
        """Wait until the started storages and all ZooKeeper servers serve requests.

        This wait detects a storage that exits at once. Without this wait, a ZooKeeper server that
        is still starting, or still joins the ensemble, would be reported as failed. Exceeding the
        deadline is not an error. Raises Unreachable if a member exits.
        """
        waiting = [member for member in started if member.kind == "storage"]
        waiting += [member for member in self.zookeepers if member.state == "up"]
        next_line = time.monotonic() + PROGRESS_INTERVAL_S
        while waiting and time.monotonic() < deadline:
            self._check_alive(started)
            if time.monotonic() > next_line:
                show_line(f"waiting for {', '.join(member.name for member in waiting)} to start")
                next_line += PROGRESS_INTERVAL_S
            waiting = [member for member in waiting if not self._is_serving(member)]
            time.sleep(0.05)
        self._check_alive(started)

    def _is_serving(self, member: Member) -> bool:
        """Whether a storage has opened its directory, or a ZooKeeper server belongs to a quorum."""
        if member.kind == "storage":
            # A storage listens at its admin port only after it has opened its directory and has
            # registered.
            return not ports.is_free(member.admin_port, self.host)
        member_connect = replace(
            parse_connect_string(self.connect), hosts=(f"{self.host}:{member.port}",)
        )
        try:
            self._read_servers(member_connect)
        except Unavailable:
            return False
        return True

    def _unregistered_servers(self) -> set[str]:
        """Return the addresses of the servers that ZooKeeper does not list yet."""
        view = self._read_servers(parse_connect_string(self.connect))
        included = view.servers.keys() - view.excluded if view.is_settled else ()
        registered = {view.servers[server_id].address for server_id in included}
        servers = [self._settings_of(member) for member in self.members if member.kind == "server"]
        ports = [values.get("advertised_port") or values["port"] for values in servers]
        pairs = zip(servers, ports, strict=True)
        return {f"{values['advertised_host']}:{port}" for values, port in pairs} - registered

    def _read_servers(self, connect_string: ConnectString) -> "ServersView":
        """Return the registered servers; raises Unreachable if ZooKeeper does not answer."""
        from waltz_core.cluster.zookeeper import zookeeper_session  # noqa: PLC0415 - costs start-up time

        async def read() -> "ServersView":
            async with zookeeper_session.open_session(connect_string) as coordinator:
                return await coordinator.read_servers()

        with ThreadPoolExecutor(1) as thread:  # the main thread of a notebook runs an event loop
            return thread.submit(asyncio.run, read()).result()

    def _check_alive(self, members: list[Member]) -> None:
        """Raise Unreachable with the end of the log if a member has exited."""
        for member in members:
            if member.process() is None:
                raise Unreachable(
                    f"{member.name} ended while the cluster was starting. The end of its log "
                    f"({self.log_path(member.name)}):\n{self._log_tail(member.name)}"
                )

    def _await_exit(self, member: Member, timeout_s: float) -> bool:
        """Wait until a member has exited, and reap its process; return False if it still runs."""
        deadline = time.monotonic() + timeout_s
        child = self._children.get(member.name)
        if child is not None and child.stdin is not None:
            child.stdin.close()
        # A zombie has exited, even if another process has to reap it.
        while member.process() is not None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
            if child is not None:
                child.poll()
        if child is not None:
            child.wait()
            del self._children[member.name]
        return True

    def _log_tail(self, name: str, line_count: int = 15) -> str:
        """Return the last lines of a member's log."""
        try:
            lines = self.log_path(name).read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return ""
        return "\n".join(lines[-line_count:])


_STOP_ORDER = ("server", "storage", "zookeeper")
_CONFIG_SUFFIX = {"server": "toml", "storage": "toml", "zookeeper": "cfg"}


@contextlib.contextmanager
def running_cluster(directory: Path | None = None, **options: object) -> Iterator[LocalCluster]:
    """Run a cluster for the duration of a `with` block; its processes end with the block.

    Without a directory, a temporary one is created and removed. Options are those of
    `LocalCluster`.
    """
    cluster_directory = directory or Path(tempfile.mkdtemp(prefix="waltz-"))
    local_cluster = LocalCluster(cluster_directory, exit_with_parent=True, **options)  # type: ignore[arg-type]
    try:
        local_cluster.up()
        yield local_cluster
    finally:
        if local_cluster.exists():
            local_cluster.down()
        if directory is None:
            shutil.rmtree(cluster_directory, ignore_errors=True)


@contextlib.contextmanager
def cluster(directory: Path | None = None, **options: object) -> Iterator[str]:
    """Run a cluster for the duration of a `with` block, and yield its connect string.

    ``with waltz_core.local.cluster() as connect: spark.read.format("waltz").load(connect)``
    """
    with running_cluster(directory, **options) as local_cluster:
        yield local_cluster.connect
