"""The interface to ZooKeeper: nodes with versions, one atomic write, one-shot watches, a session.

`coordinator.py` uses only this interface, so that the same code runs over a real ZooKeeper
(`zookeeper_session.py`) and, in tests and the simulator, over a ZooKeeper in memory
(`zookeeper_in_memory.py`).

Rules for implementations:
    1. Every write is an atomic list of operations, each with its expected version. A rejected write
       raises `errors.CoordinatorConflict` and has changed nothing. A write whose answer was lost
       raises `errors.CoordinatorOutcomeUnknown`. A write that was never sent raises
       `errors.CoordinatorUnavailable`.
    2. A watch is a signal: it is set when data that was read with this watch may have changed, and
       at each change of the session's state. Early and unnecessary signals are harmless.
    3. Signals and state callbacks arrive on the thread of the caller's event loop.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, Protocol

# The version of a node that does not exist. NB: ZooKeeper itself uses -1 for "any version", so this
# value must never be sent. Implementations assert that expected versions are not negative.
NO_NODE = -1
# The owner of a node that is not ephemeral.
PERSISTENT = 0


class NodeStat(NamedTuple):
    """The versions of a node and of its list of children, and the session that owns the node.

    `mtime_ms` is the time of the last write, by the clock of ZooKeeper's leader.
    """

    version: int
    cversion: int
    owner: int = PERSISTENT
    mtime_ms: int = 0


class Node(NamedTuple):
    """The content of a node; `data` is b"" for no data and for empty data."""

    data: bytes
    stat: NodeStat


class Children(NamedTuple):
    """The names of a node's children, sorted, and the node's stat at the moment of the read."""

    names: tuple[str, ...]
    stat: NodeStat


@dataclass(frozen=True, slots=True)
class CreateNode:
    """Create a node that must not exist; `is_sequential` lets ZooKeeper append a number."""

    path: str
    data: bytes | None = None
    is_ephemeral: bool = False
    is_sequential: bool = False


@dataclass(frozen=True, slots=True)
class SetNode:
    """Replace the data of a node that must be at `version`."""

    path: str
    data: bytes
    version: int


@dataclass(frozen=True, slots=True)
class DeleteNode:
    """Delete a node that must be at `version` and have no children."""

    path: str
    version: int


@dataclass(frozen=True, slots=True)
class CheckVersion:
    """Check that a node is at `version`, without a change."""

    path: str
    version: int


Operation = CreateNode | SetNode | DeleteNode | CheckVersion


class SessionState(Enum):
    """The state of the session with ZooKeeper."""

    CONNECTED = auto()
    SUSPENDED = auto()  # no connection; session, ephemeral nodes and watches may still exist
    LOST = auto()  # the session is over, and ZooKeeper deletes its ephemeral nodes


class Signal(Protocol):
    """A flag that is set when data must be read again. `asyncio.Event` implements this protocol."""

    def set(self) -> None:
        """Set the signal and wake up the waiting callers; it stays set until it is cleared."""

    def clear(self) -> None:
        """Clear the signal."""

    async def wait(self) -> object:
        """Return when the signal is set (implementations may also return earlier)."""


StateCallback = Callable[[SessionState], None]


class Znodes(Protocol):
    """One session with ZooKeeper."""

    @property
    def hosts(self) -> str:
        """The hosts of ZooKeeper, for messages to users."""

    @property
    def state(self) -> SessionState:
        """The session's state."""

    @property
    def session_number(self) -> int:
        """ZooKeeper's ID of this session: the owner of its ephemeral nodes."""

    @property
    def session_timeout_ms(self) -> int:
        """The time without heartbeats after which ZooKeeper ends the session."""

    @property
    def now_ms(self) -> int:
        """The time of a monotonic clock, in ms."""

    def set_signal_later(self, signal: Signal, after_ms: int) -> None:
        """Set a signal after `after_ms` milliseconds."""

    async def get(self, path: str, signal: Signal | None = None) -> Node | None:
        """Read a node, None if it is missing; its change, creation or deletion sets the signal."""

    async def children(self, path: str, signal: Signal | None = None) -> Children | None:
        """Read a node's child names, None if the node is missing; a change sets the signal."""

    async def write(self, operations: Sequence[Operation]) -> list[int]:
        """Do all operations or none; return the nodes' new versions (NO_NODE if deleted)."""

    async def sync(self) -> None:
        """Wait until reads return the results of all writes that completed before this call."""

    def new_signal(self) -> Signal:
        """Return a signal. Until `drop_signal`, each change of state also sets the signal."""

    def drop_signal(self, signal: Signal) -> None:
        """Release a signal."""

    def on_state(self, callback: StateCallback) -> None:
        """Call back at each change of the session's state, until closed."""

    async def check_administrator(self) -> None:
        """Raise BadConfig if the session has only the members' user, or does not know that user.

        Members are servers and storages. With their user, a change with several writes could fail
        after the first writes. If the cluster has two users and the session knows only one of them,
        members cannot read the nodes that the session creates.
        """

    async def reset_access_list(self, path: str) -> None:
        """Set a node's access list to the list of a new node, if the session has credentials.

        Raises BadConfig without permission, CoordinatorUnavailable if ZooKeeper does not answer.
        """

    async def close(self) -> None:
        """End the session; its ephemeral nodes are deleted at once. May be called twice."""
