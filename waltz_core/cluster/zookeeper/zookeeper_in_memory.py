"""ZooKeeper in memory: the same nodes, versions, sessions and watches, with injected faults.

With this module, tests and the simulator inject a failure at a chosen moment. The tests of the
interface `znodes.Znodes` run with this module and with a real ZooKeeper.

Rules:
    1. No method waits: each returns or raises at once.
    2. Watches fire after the write is complete, in the order in which they were set.
    3. If a callback writes, the watches of this write fire after the watches that are already due.
    4. Time does not advance until `advance` is called.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from waltz_core import errors
from waltz_core.cluster.coordinator import Coordinator
from waltz_core.cluster.znodes.interface import (
    NO_NODE,
    PERSISTENT,
    CheckVersion,
    Children,
    CreateNode,
    DeleteNode,
    Node,
    NodeStat,
    Operation,
    SessionState,
    SetNode,
    Signal,
    StateCallback,
)

SESSION_TIMEOUT_MS = 10_000


class WriteFault(Enum):
    """A fault of a write."""

    REQUEST_LOST = auto()  # the request never arrives
    REPLY_LOST = auto()  # the write is done, and the reply is lost


@dataclass(frozen=True, slots=True)
class _NodeEntry:
    data: bytes | None
    version: int = 0
    cversion: int = 0
    owner: int = PERSISTENT
    mtime_ms: int = 0

    @property
    def stat(self) -> NodeStat:
        return NodeStat(self.version, self.cversion, self.owner, self.mtime_ms)


@dataclass(slots=True)
class _Watches:
    # Signals by path, in the order in which they were set; the values have no meaning.
    of_data: dict[str, dict[Signal, None]] = field(default_factory=dict)
    of_children: dict[str, dict[Signal, None]] = field(default_factory=dict)


class MemoryZooKeeper:
    """The nodes, shared by all sessions."""

    def __init__(self, new_signal: Callable[[], Signal]) -> None:
        self.make_signal = new_signal
        self._nodes: dict[str, _NodeEntry] = {"/": _NodeEntry(None)}
        self._sessions: list[MemorySession] = []
        self._next_session = 1
        self._signals_to_set: list[Signal] = []
        self._is_setting_signals = False
        self.now_ms = 0
        self._delayed_signals: list[tuple[int, Signal]] = []

    def session(self) -> "MemorySession":
        """Open a session with this ZooKeeper."""
        session = MemorySession(self)
        self._sessions.append(session)
        return session

    def coordinator(self, root: str) -> Coordinator:
        """Open a session for one process of the cluster at `root`."""
        return Coordinator(self.session(), root)

    def dump(self) -> dict[str, bytes]:
        """Return every node's data, by path."""
        return {path: entry.data or b"" for path, entry in sorted(self._nodes.items())}

    def advance(self, ms: int) -> None:
        """Advance the time of all sessions."""
        self.now_ms += ms
        due = [signal for at_ms, signal in self._delayed_signals if at_ms <= self.now_ms]
        self._delayed_signals = [
            delayed_signal
            for delayed_signal in self._delayed_signals
            if delayed_signal[0] > self.now_ms
        ]
        for signal in due:
            signal.set()

    # --- for sessions

    def set_signal_later(self, signal: Signal, after_ms: int) -> None:
        """Set a signal after `after_ms` milliseconds."""
        self._delayed_signals.append((self.now_ms + after_ms, signal))

    def next_session_number(self) -> int:
        """Return a new session number."""
        self._next_session += 1
        return self._next_session - 1

    def entry(self, path: str) -> _NodeEntry | None:
        """Return the entry of a node; None if the node does not exist."""
        return self._nodes.get(path)

    def child_names(self, path: str) -> tuple[str, ...]:
        """Return the sorted names of a node's children."""
        prefix = "/" if path == "/" else f"{path}/"
        relative_paths = (
            path_text[len(prefix) :]
            for path_text in self._nodes
            if path_text.startswith(prefix) and path_text != path
        )
        return tuple(sorted(name for name in relative_paths if "/" not in name))

    def apply_operations(self, operations: Sequence[Operation], owner: int) -> list[int]:
        """Do all operations or none, then fire the watches; return the new versions."""
        before = dict(self._nodes)
        changed_paths: list[str] = []
        try:
            versions = [
                self._apply_one(operation, owner, changed_paths) for operation in operations
            ]
        except errors.CoordinatorConflict:
            self._nodes = before
            raise
        self._fire_watches(changed_paths)
        return versions

    def end_session(self, number: int) -> None:
        """Delete the ephemeral nodes of a session."""
        paths = [path for path, entry in self._nodes.items() if entry.owner == number]
        for path in paths:
            self.apply_operations([DeleteNode(path, self._nodes[path].version)], PERSISTENT)

    # --- private

    def _apply_one(self, operation: Operation, owner: int, changed_paths: list[str]) -> int:
        match operation:
            case CreateNode():
                return self._create(operation, owner, changed_paths)
            case SetNode(path, data, version):
                entry = self._expect(path, version)
                written = replace(entry, data=data, version=version + 1, mtime_ms=self.now_ms)
                self._nodes[path] = written
                changed_paths.append(path)
                return version + 1
            case DeleteNode(path, version):
                self._expect(path, version)
                if self.child_names(path):
                    raise errors.CoordinatorConflict(f"{path} has children")
                del self._nodes[path]
                self._touch_parent(path)
                changed_paths.append(path)
                return NO_NODE
            case CheckVersion(path, version):
                return self._expect(path, version).version

    def _create(self, operation: CreateNode, owner: int, changed_paths: list[str]) -> int:
        parent = self._nodes.get(_parent(operation.path))
        if parent is None:
            raise errors.CoordinatorConflict(f"{operation.path}: its parent does not exist")
        if parent.owner != PERSISTENT:
            raise errors.CoordinatorConflict(f"{operation.path}: its parent is ephemeral")
        path = operation.path
        if operation.is_sequential:
            # The number of children that were ever created. `cversion` counts these and also the
            # deleted children.
            parent_path = _parent(operation.path)
            created_count = (parent.cversion + len(self.child_names(parent_path))) // 2
            path += f"{created_count:010d}"
        if path in self._nodes:
            raise errors.CoordinatorConflict(f"{path} exists already")
        owner = owner if operation.is_ephemeral else PERSISTENT
        self._nodes[path] = _NodeEntry(operation.data, owner=owner, mtime_ms=self.now_ms)
        self._touch_parent(path)
        changed_paths.append(path)
        return 0

    def _expect(self, path: str, version: int) -> _NodeEntry:
        assert version >= 0
        entry = self._nodes.get(path)
        if entry is None:
            raise errors.CoordinatorConflict(f"{path}: expected version {version}, found no node")
        if entry.version != version:
            raise errors.CoordinatorConflict(
                f"{path}: expected version {version}, found {entry.version}"
            )
        return entry

    def _touch_parent(self, path: str) -> None:
        parent = _parent(path)
        entry = self._nodes[parent]
        self._nodes[parent] = replace(entry, cversion=entry.cversion + 1)

    def _fire_watches(self, changed_paths: Sequence[str]) -> None:
        for path in changed_paths:
            for session in self._sessions:
                self._signals_to_set.extend(session.watches.of_data.pop(path, ()))
                # NB: a change of a child's data also sets these signals. This is unnecessary, but
                # harmless.
                self._signals_to_set.extend(session.watches.of_children.pop(_parent(path), ()))
        if self._is_setting_signals:
            return  # rule 3
        self._is_setting_signals = True
        try:
            while self._signals_to_set:
                self._signals_to_set.pop(0).set()
        finally:
            self._is_setting_signals = False


class MemorySession:
    """One process's session; implements `znodes.Znodes`."""

    def __init__(self, zookeeper: MemoryZooKeeper) -> None:
        self._zookeeper = zookeeper
        self._state = SessionState.CONNECTED
        self._number = zookeeper.next_session_number()
        self._signals: list[Signal] = []
        self._callbacks: list[StateCallback] = []
        self._is_closed = False
        self.watches = _Watches()
        # Faults of the next writes, in order.
        self.faults: list[WriteFault] = []

    # --- faults

    def suspend(self) -> None:
        """Cut the connection; the session stays alive."""
        self._change_state(SessionState.SUSPENDED)

    def expire(self) -> None:
        """End the session like ZooKeeper: delete its ephemeral nodes and watches."""
        self.watches = _Watches()
        self._zookeeper.end_session(self._number)
        self._change_state(SessionState.LOST)

    def resume(self) -> None:
        """Connect again, with the same session or, after `expire`, with a new one."""
        if self._state is SessionState.LOST:
            self._number = self._zookeeper.next_session_number()
        self._change_state(SessionState.CONNECTED)

    # --- Znodes

    @property
    def hosts(self) -> str:
        """The hosts, for messages to users."""
        return "memory:1"

    @property
    def state(self) -> SessionState:
        """The session's state."""
        return self._state

    @property
    def session_number(self) -> int:
        """The owner of this session's ephemeral nodes."""
        return self._number

    @property
    def session_timeout_ms(self) -> int:
        """A usual timeout, which has no effect here."""
        return SESSION_TIMEOUT_MS

    @property
    def now_ms(self) -> int:
        """The time of this ZooKeeper."""
        return self._zookeeper.now_ms

    def set_signal_later(self, signal: Signal, after_ms: int) -> None:
        """Set a signal after `after_ms` milliseconds."""
        self._zookeeper.set_signal_later(signal, after_ms)

    async def get(self, path: str, signal: Signal | None = None) -> Node | None:
        """Read a node; see `Znodes.get`."""
        self._require_connection()
        if signal is not None:
            self.watches.of_data.setdefault(path, {})[signal] = None
        entry = self._zookeeper.entry(path)
        return None if entry is None else Node(entry.data or b"", entry.stat)

    async def children(self, path: str, signal: Signal | None = None) -> Children | None:
        """Read the names of the children; see `Znodes.children`."""
        self._require_connection()
        entry = self._zookeeper.entry(path)
        if signal is not None:
            watches = self.watches.of_data if entry is None else self.watches.of_children
            watches.setdefault(path, {})[signal] = None
        return None if entry is None else Children(self._zookeeper.child_names(path), entry.stat)

    async def write(self, operations: Sequence[Operation]) -> list[int]:
        """Do all operations or none; see `Znodes.write`."""
        self._require_connection()
        fault = self.faults.pop(0) if self.faults else None
        if fault is WriteFault.REQUEST_LOST:
            raise errors.CoordinatorOutcomeUnknown(f"{self.hosts} did not answer a write")
        versions = self._zookeeper.apply_operations(operations, self._number)
        if fault is WriteFault.REPLY_LOST:
            raise errors.CoordinatorOutcomeUnknown(f"{self.hosts} did not answer a write")
        return versions

    async def sync(self) -> None:
        """Do nothing while connected: reads from memory are never stale."""
        self._require_connection()

    def new_signal(self) -> Signal:
        """Return a signal that is set at each change of state."""
        signal = self._zookeeper.make_signal()
        self._signals.append(signal)
        return signal

    def drop_signal(self, signal: Signal) -> None:
        """Release a signal."""
        self._signals.remove(signal)

    def on_state(self, callback: StateCallback) -> None:
        """Call back at each change of state."""
        self._callbacks.append(callback)

    async def check_administrator(self) -> None:
        """Do nothing: there are no users in memory."""

    async def reset_access_list(self, path: str) -> None:
        """Do nothing: there are no access lists in memory."""

    async def close(self) -> None:
        """End the session."""
        if not self._is_closed:
            self._is_closed = True
            self._callbacks.clear()
            self.expire()

    # --- private

    def _require_connection(self) -> None:
        if self._state is not SessionState.CONNECTED:
            raise errors.CoordinatorUnavailable(f"no connection to ZooKeeper {self.hosts}")

    def _change_state(self, state: SessionState) -> None:
        self._state = state
        for callback in list(self._callbacks):
            callback(state)
        for signal in list(self._signals):
            signal.set()


def _parent(path: str) -> str:
    return path.rpartition("/")[0] or "/"
