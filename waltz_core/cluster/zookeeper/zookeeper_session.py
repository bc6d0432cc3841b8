"""A session with a real ZooKeeper, through kazoo.

kazoo runs callbacks on its own threads. Only this module passes their results to the event loop, so
no other module needs locks. The code of `kazoo_connection.py` runs on kazoo's threads.

Rules:
    1. kazoo's callbacks only pass results to the event loop, by `call_soon_threadsafe`.
    2. A write is sent only while there is a connection. Without a connection, the write waits. So
       if a write times out without a connection, it was certainly never sent.
    3. Every wait has a timeout. If ZooKeeper does not answer a write that was sent, the outcome of
       the write is unknown. A read without an answer has failed.
    4. kazoo never gets version -1, which would mean "any".
    5. The session exists only while the event loop runs: if the loop hangs, the session expires
       (`watchdog.py`).
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from kazoo.client import KazooClient, KazooState, TransactionRequest
from kazoo.exceptions import (
    BadVersionError,
    ConnectionClosedError,
    ConnectionLoss,
    KazooException,
    NoAuthError,
    NoChildrenForEphemeralsError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    OperationTimeoutError,
    RolledBackError,
    RuntimeInconsistency,
    SessionExpiredError,
)
from kazoo.protocol.serialization import Create as CreateRequest
from kazoo.protocol.states import ZnodeStat
from kazoo.security import ACL, OPEN_ACL_UNSAFE, Id, Permissions

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
from waltz_core.cluster.znodes.paths import MEMBER_PERMISSIONS, Znode, znode_at
from waltz_core.cluster.znodes.shared_request import SharedRequest
from waltz_core.cluster.zookeeper.credentials import (
    DIGEST_SCHEME,
    Credentials,
    NodePermission,
    parse_credentials,
)
from waltz_core.cluster.zookeeper.kazoo_connection import KazooHandler, KazooHooks, clock_ms
from waltz_core.cluster.zookeeper.watchdog import BEATS_PER_TIMEOUT
from waltz_core.config.connect_string import ConnectString, parse_connect_string

CONNECT_TIMEOUT_MS = 10_000
SESSION_TIMEOUT_MS = 10_000
REQUEST_TIMEOUT_MS = 10_000
# After this time, the nodes of a watch are read again, because the watch may have been lost.
RESYNC_MS = 30_000
CLOSE_TIMEOUT_MS = 5_000
RECONNECT_DELAY_S_MAX = 0.5
EPHEMERAL_FLAG = 1
SEQUENTIAL_FLAG = 2

_WRITE_PERMISSION_BITS = {"c": Permissions.CREATE, "d": Permissions.DELETE, "w": Permissions.WRITE}
PERMISSION_BITS = {**_WRITE_PERMISSION_BITS, "r": Permissions.READ, "a": Permissions.ADMIN}

CONNECTION_ERRORS = (
    ConnectionLoss,
    ConnectionClosedError,
    OperationTimeoutError,
    SessionExpiredError,
)
CONFLICT_ERRORS = (
    BadVersionError,
    NoChildrenForEphemeralsError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
)
_FILE_HINT = (
    "Hint: an auth file has users of ZooKeeper, not a token (docs/zookeeper.md, 'Access "
    "control'). Commands that change the cluster need the file of an administrator."
)
# ZooKeeper's errors for the other operations of a rejected write.
OTHER_OPERATION_ERRORS = (RolledBackError, RuntimeInconsistency)

_log = logging.getLogger(__name__)

# While no ZooKeeper answers, kazoo logs several attempts per second, without the host. Instead, a
# session logs the beginning and the end of an outage. Set the level of this logger to see kazoo's
# own log lines.
logger = logging.getLogger("waltz_core.kazoo")
logger.addHandler(logging.NullHandler())
if logger.level == logging.NOTSET:
    logger.setLevel(logging.ERROR)

T = TypeVar("T")


async def connect(
    text: str | ConnectString,
    *,
    connect_timeout_ms: int = CONNECT_TIMEOUT_MS,
    session_timeout_ms: int = SESSION_TIMEOUT_MS,
    request_timeout_ms: int = REQUEST_TIMEOUT_MS,
) -> Coordinator:
    """Open a session for the cluster that a connect string names; the caller must close it.

    Raises BadConfig for an invalid connect string or auth file, and CoordinatorUnavailable if no
    ZooKeeper answers within `connect_timeout_ms`. This function does not check that the cluster
    exists; the first read does.
    """
    connect_string = text if isinstance(text, ConnectString) else parse_connect_string(text)
    session = ZooKeeperSession(
        connect_string.hosts,
        connect_timeout_ms=connect_timeout_ms,
        session_timeout_ms=session_timeout_ms,
        request_timeout_ms=request_timeout_ms,
        credentials=_read_credentials(connect_string),
        root=connect_string.root,
    )
    await session.open()
    return Coordinator(session, connect_string.root)


@contextlib.asynccontextmanager
async def open_session(
    text: str | ConnectString,
    *,
    connect_timeout_ms: int = CONNECT_TIMEOUT_MS,
    session_timeout_ms: int = SESSION_TIMEOUT_MS,
    request_timeout_ms: int = REQUEST_TIMEOUT_MS,
) -> AsyncIterator[Coordinator]:
    """Open a session like `connect`, and close it at the end of the block."""
    coordinator = await connect(
        text,
        connect_timeout_ms=connect_timeout_ms,
        session_timeout_ms=session_timeout_ms,
        request_timeout_ms=request_timeout_ms,
    )
    try:
        yield coordinator
    finally:
        await coordinator.close()


async def protect(text: str, *, connect_timeout_ms: int = CONNECT_TIMEOUT_MS) -> int:
    """Set the access lists of an auth file on a cluster's znodes; return their number.

    Raises BadConfig in these cases:

        - The connect string names no auth file.
        - ZooKeeper denies the change.
        - The auth file is that of a member.
        - The cluster has two users, and the auth file does not name the members.
    """
    connect_string = parse_connect_string(text)
    credentials = _read_credentials(connect_string)
    if credentials is None:
        raise errors.BadConfig(f"expected a connect string that ends in ?auth=FILE, found {text!r}")
    session = ZooKeeperSession(
        connect_string.hosts,
        connect_timeout_ms=connect_timeout_ms,
        session_timeout_ms=SESSION_TIMEOUT_MS,
        request_timeout_ms=REQUEST_TIMEOUT_MS,
        credentials=credentials,
        root=connect_string.root,
    )
    session.check_not_member()
    await session.open()
    try:
        await session.check_administrator()
        return await session.protect(connect_string.root)
    finally:
        await session.close()


class ZooKeeperSession:
    """One session; implements `znodes.Znodes`.

    A session belongs to the event loop that opened this session. `root` is the root of the cluster;
    the access list of a node depends on its path below the root.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        connect_timeout_ms: int,
        session_timeout_ms: int,
        request_timeout_ms: int,
        credentials: Credentials | None = None,
        root: str = "",
    ) -> None:
        self._hosts = ",".join(hosts)
        self._credentials = credentials
        self._root = root
        self._connect_timeout_ms = connect_timeout_ms
        self._request_timeout_s = request_timeout_ms / 1000
        self._client = KazooClient(
            self._hosts,
            timeout=session_timeout_ms / 1000,
            handler=KazooHandler(connect_timeout_ms / 1000 / len(hosts)),
            connection_retry={
                "max_tries": -1,
                "delay": 0.05,
                "backoff": 2,
                "max_jitter": 0.5,
                "max_delay": RECONNECT_DELAY_S_MAX,
            },
            auth_data=[
                (DIGEST_SCHEME, f"{user.name}:{user.password}")
                for user in (credentials.users if credentials else ())
            ],
            logger=logger,
        )
        self._hooks = KazooHooks(self._client, session_timeout_ms)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._state = SessionState.LOST
        self._session_number = PERSISTENT
        self._disconnected_ms: int | None = None
        self._is_connected = asyncio.Event()
        self._is_closed = False
        self._signals: list[_KazooSignal] = []
        self._callbacks: list[StateCallback] = []
        self._sync_request = SharedRequest(
            lambda: self._read(lambda: self._client.sync_async("/"), "/")
        )

    async def open(self) -> None:
        """Connect; if this fails, end the session and raise CoordinatorUnavailable."""
        self._loop = asyncio.get_running_loop()
        self._beat()
        self._client.add_listener(self._on_kazoo_state)
        self._client.start_async()
        try:
            async with asyncio.timeout(self._connect_timeout_ms / 1000):
                await self._is_connected.wait()
        except BaseException as error:
            self._stop()
            if not isinstance(error, TimeoutError):
                raise
            raise errors.CoordinatorUnavailable(
                f"no ZooKeeper answered at {self._hosts} within {self._connect_timeout_ms} ms: "
                f"{self._client.handler.failure}"
            ) from error

    # --- Znodes

    @property
    def hosts(self) -> str:
        """The hosts of ZooKeeper, for messages to users."""
        return self._hosts

    @property
    def state(self) -> SessionState:
        """The session's state."""
        return self._state

    @property
    def session_number(self) -> int:
        """ZooKeeper's ID of the session."""
        return self._session_number

    @property
    def session_timeout_ms(self) -> int:
        """The granted session timeout; ZooKeeper allows 2 to 20 of its ticks."""
        return self._hooks.session_timeout_ms

    @property
    def now_ms(self) -> int:
        """The time since the start of the machine, in ms."""
        return clock_ms()

    def set_signal_later(self, signal: Signal, after_ms: int) -> None:
        """Set a signal after `after_ms` milliseconds."""
        assert self._loop is not None
        self._loop.call_later(after_ms / 1000, signal.set)

    async def get(self, path: str, signal: Signal | None = None) -> Node | None:
        """Read a node; see `Znodes.get`."""
        watch = _watch_of(signal)
        while True:
            try:
                data, stat = await self._read(lambda: self._client.get_async(path, watch), path)
            except NoNodeError:
                # Reading a missing node sets no watch, but a check for existence does.
                if not watch or not await self._exists(path, watch):
                    return None
            else:
                return Node(data or b"", _node_stat(stat))

    async def children(self, path: str, signal: Signal | None = None) -> Children | None:
        """Read the names of the children; see `Znodes.children`."""
        watch = _watch_of(signal)
        while True:
            try:
                names, stat = await self._read(
                    lambda: self._client.get_children_async(path, watch, include_data=True), path
                )
            except NoNodeError:
                if not watch or not await self._exists(path, watch):
                    return None
            else:
                return Children(tuple(sorted(names)), _node_stat(stat))

    async def write(self, operations: Sequence[Operation]) -> list[int]:
        """Do all operations or none, in one multi."""
        request = self._client.transaction()
        for operation in operations:
            _add_operation(request, operation, self._acl_of)
        await self._wait_for_connection()
        try:
            async with asyncio.timeout(self._request_timeout_s):
                results = await self._result_of(request.commit_async())
        except (TimeoutError, *CONNECTION_ERRORS) as error:
            raise errors.CoordinatorOutcomeUnknown(
                f"ZooKeeper {self._hosts} has not answered a write to {operations[0].path} "
                f"({type(error).__name__}); the write may or may not have been made"
            ) from error
        except KazooException as error:
            raise self._rejection_error(operations[0].path, error) from error
        return self._new_versions(operations, results)

    async def sync(self) -> None:
        """Let the connected ZooKeeper server catch up with the leader."""
        await self._sync_request.wait_for_answer()

    def new_signal(self) -> Signal:
        """Return a signal, also set at each change of state."""
        assert self._loop is not None
        signal = _KazooSignal(self._loop)
        self._signals.append(signal)
        return signal

    def drop_signal(self, signal: Signal) -> None:
        """Release a signal."""
        self._signals.remove(cast("_KazooSignal", signal))

    def on_state(self, callback: StateCallback) -> None:
        """Call back at each change of state."""
        self._callbacks.append(callback)

    async def close(self) -> None:
        """End the session."""
        if self._is_closed:
            return
        stopped = self._stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_MS / 1000):
                await stopped.wait()

    def _stop(self) -> asyncio.Event:
        """Begin to close the session; the returned event is set when kazoo's threads have ended."""
        self._is_closed = True
        self._callbacks.clear()
        self._client.remove_listener(self._on_kazoo_state)
        self._change_state(SessionState.LOST)
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()

        def stop() -> None:
            # kazoo waits here for its own threads, up to 10 seconds.
            with contextlib.suppress(Exception):
                self._client.stop()
                self._client.close()
            _call_soon(loop, stopped.set)

        # A separate thread, because an event loop that ends waits for the threads of its pool.
        try:
            threading.Thread(target=stop, name="kazoo-stop", daemon=True).start()
        except RuntimeError:  # Python 3.12 and later start no thread during exit.
            stop()
        return stopped

    # --- the session's state

    def _beat(self) -> None:
        """Notify kazoo's thread regularly that the loop runs (`watchdog.py`)."""
        assert self._loop is not None
        if not self._is_closed:
            self._hooks.watchdog.beat(clock_ms())
            self._loop.call_later(self.session_timeout_ms / 1000 / BEATS_PER_TIMEOUT, self._beat)

    def _on_kazoo_state(self, kazoo_state: str) -> None:
        # On kazoo's thread.
        assert self._loop is not None
        state = {
            KazooState.CONNECTED: SessionState.CONNECTED,
            KazooState.SUSPENDED: SessionState.SUSPENDED,
            KazooState.LOST: SessionState.LOST,
        }[kazoo_state]
        identity = self._client.client_id
        number = identity[0] if identity else None
        _call_soon(self._loop, self._change_state, state, number)

    def _change_state(self, state: SessionState, number: int | None = None) -> None:
        if not self._is_closed:
            self._log_change(state, is_same=number in (None, self._session_number))
        self._state = state
        # Without a connection the last number stays: the session may continue.
        self._session_number = self._session_number if number is None else number
        if state is SessionState.CONNECTED:
            self._is_connected.set()
        else:
            self._is_connected.clear()
        for callback in list(self._callbacks):
            callback(state)
        for signal in list(self._signals):
            signal.set()

    def _log_change(self, state: SessionState, *, is_same: bool) -> None:
        """Log one line when the connection is lost, and one line when it is restored."""
        if state is SessionState.CONNECTED and self._disconnected_ms is not None:
            disconnected_ms, self._disconnected_ms = clock_ms() - self._disconnected_ms, None
            session = "same" if is_same else "new"
            _log.info(
                "zookeeper.connected hosts=%s disconnected_ms=%d session=%s at=%s",
                self._hosts,
                disconnected_ms,
                session,
                _utc_now(),
            )
        elif self._state is SessionState.CONNECTED and state is not SessionState.CONNECTED:
            self._disconnected_ms = clock_ms()
            _log.info("zookeeper.disconnected hosts=%s at=%s", self._hosts, _utc_now())

    # --- requests and answers

    async def _wait_for_connection(self) -> None:
        """Wait for a connection; raises CoordinatorUnavailable after the request timeout."""
        if self._is_closed:
            raise errors.CoordinatorUnavailable(
                f"the session with ZooKeeper {self._hosts} is closed"
            )
        try:
            async with asyncio.timeout(self._request_timeout_s):
                await self._is_connected.wait()
        except TimeoutError as error:
            raise errors.CoordinatorUnavailable(
                f"no connection to ZooKeeper {self._hosts} for "
                f"{self._request_timeout_s * 1000:.0f} ms"
            ) from error

    async def _read(self, send: Callable[[], Any], path: str) -> Any:  # noqa: ANN401 - kazoo's
        await self._wait_for_connection()
        try:
            async with asyncio.timeout(self._request_timeout_s):
                while True:
                    try:
                        return await self._result_of(send())
                    except ConnectionLoss:  # A read changes nothing, so it can be repeated.
                        await self._wait_for_connection()
        except (TimeoutError, *CONNECTION_ERRORS) as error:
            raise errors.CoordinatorUnavailable(
                f"ZooKeeper {self._hosts} has not answered a read of {path} "
                f"({type(error).__name__})"
            ) from error
        except NoNodeError:
            raise
        except KazooException as error:
            raise self._rejection_error(path, error) from error

    async def _exists(self, path: str, watch: Callable[[Any], None]) -> bool:
        stat = await self._read(lambda: self._client.exists_async(path, watch), path)
        return stat is not None

    async def _result_of(self, result: Any) -> Any:  # noqa: ANN401 - kazoo's
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        result.rawlink(lambda done: _call_soon(loop, _set_result, future, done))
        return await future

    def _new_versions(self, operations: Sequence[Operation], results: Sequence[Any]) -> list[int]:
        for operation, result in zip(operations, results, strict=True):
            if isinstance(result, OTHER_OPERATION_ERRORS) or not isinstance(result, Exception):
                continue
            if isinstance(result, CONFLICT_ERRORS):
                raise errors.CoordinatorConflict(_conflict_message(operation, result)) from result
            raise self._rejection_error(operation.path, result) from result
        versions: list[int] = []
        for operation, result in zip(operations, results, strict=True):
            match operation:
                case CreateNode():
                    versions.append(0)
                case SetNode():
                    versions.append(cast("ZnodeStat", result).version)
                case DeleteNode():
                    versions.append(NO_NODE)
                case CheckVersion(version=version):
                    versions.append(version)
        return versions

    async def protect(self, path: str) -> int:
        """Set the access lists of a node and all nodes below it; return their number.

        Raises BadConfig without permission, CoordinatorUnavailable if ZooKeeper does not answer.
        """
        if not await self._try_set_acl(path):
            return 0  # It was deleted meanwhile.
        listing = await self.children(path)
        names = () if listing is None else listing.names
        return 1 + sum([await self.protect(f"{path}/{name}") for name in names])

    async def reset_access_list(self, path: str) -> None:
        """Give a node the access list of a new node."""
        if self._credentials is not None:
            await self._try_set_acl(path)

    async def _try_set_acl(self, path: str) -> bool:
        acl = self._acl_of(path)
        try:
            await self._read(lambda: self._client.set_acls_async(path, acl), path)
        except NoNodeError:
            return False
        return True

    def _rejection_error(self, path: str, error: Exception) -> errors.BadConfig:
        if isinstance(error, NoAuthError):
            return errors.BadConfig(self._denied_message(path))
        return errors.BadConfig(
            f"ZooKeeper {self._hosts} denies a request for {path}: {type(error).__name__}"
        )

    def _denied_message(self, path: str) -> str:
        if self._credentials is None:
            return (
                f"ZooKeeper {self._hosts} requires authentication for {path}: expected a "
                f"connect string with ?auth=FILE, found one without. {_FILE_HINT}"
            )
        name = self._credentials.user.name
        if self._credentials.is_member and self._znode_row(path).members != MEMBER_PERMISSIONS:
            return (
                f"ZooKeeper {self._hosts} denies access to {path}: {_wrong_auth_file_message(name)}"
            )
        return (
            f"ZooKeeper {self._hosts} denies access to {path}: the user {name!r} in "
            f"{self._credentials.where} is not the one that created the znode, or its "
            f"password differs. {_FILE_HINT}"
        )

    def check_not_member(self) -> None:
        """Raise BadConfig if the auth file is that of the members' user."""
        if self._credentials is not None and self._credentials.is_member:
            raise self._wrong_user_error(_wrong_auth_file_message(self._credentials.user.name))

    async def check_administrator(self) -> None:
        """Raise BadConfig if the auth file lacks a user that a changing command needs."""
        self.check_not_member()
        credentials = self._credentials
        if credentials is None or not credentials.has_one_user:
            return
        name = credentials.user.name
        # NB: only a line with permission "a" names an administrator. With other lines, members
        # could write the permissions.
        administrators = {
            grant.identity for grant in credentials.grants if "a" in grant.permissions
        }
        for identity in sorted(await self._read_member_users()):
            member = identity.partition(":")[0]
            # Without the permission "a", ZooKeeper shows no hash.
            if member == name:
                raise self._wrong_user_error(_wrong_auth_file_message(name))
            if identity not in administrators:
                raise self._wrong_user_error(
                    f"the auth file has only user {name!r}, but {self._root} also grants access "
                    f"to {member!r}, so servers and storages could not read znodes that this "
                    "command creates. Hint: add the line "
                    f"members:{DIGEST_SCHEME}:{member}:PASSWORD to "
                    "the auth file"
                )

    async def _read_member_users(self) -> set[str]:
        """Return the users with exactly the permissions of members at R and R/x.

        With one user, further lines grant the same permissions at both nodes.
        """
        users: list[set[str]] = []
        for path in (self._root, f"{self._root}/x"):
            expected = _acl_entry(
                NodePermission(DIGEST_SCHEME, "", self._znode_row(path).members)
            ).perms
            with contextlib.suppress(NoNodeError):
                acl, _ = await self._read(partial(self._client.get_acls_async, path), path)
                users.append(
                    {
                        acl_entry.id.id
                        for acl_entry in acl
                        if acl_entry.id.scheme == DIGEST_SCHEME and acl_entry.perms == expected
                    }
                )
        return set.intersection(*users) if users else set()

    def _wrong_user_error(self, problem: str) -> errors.BadConfig:
        return errors.BadConfig(
            f"the command does not change {self._root} of ZooKeeper {self._hosts}: {problem}"
        )

    def _znode_row(self, path: str) -> Znode:
        return znode_at(self._root, path)

    def _acl_of(self, path: str) -> list[ACL]:
        """Return the access list of a new node."""
        if self._credentials is None:
            return list(OPEN_ACL_UNSAFE)
        return [
            _acl_entry(permission)
            for permission in self._credentials.access_list_of(self._znode_row(path))
        ]


def _utc_now() -> str:
    """Return the time in UTC, because an application's log format may not contain the time."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class _KazooSignal:
    """An event of the event loop that kazoo's threads may set; each wait has a timeout."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._event = asyncio.Event()

    def set(self) -> None:
        self._event.set()

    def clear(self) -> None:
        self._event.clear()

    async def wait(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RESYNC_MS / 1000):
                await self._event.wait()

    def on_kazoo_event(self, _event: object) -> None:
        # On kazoo's thread. NB: kazoo keeps a set of callables for each path, so each call for a
        # signal must register an equal callable. Bound methods of one object are equal.
        _call_soon(self._loop, self._event.set)


def _read_credentials(connect_string: ConnectString) -> Credentials | None:
    if not connect_string.auth_file:
        return None
    where = f"the auth file {connect_string.auth_file!r} of the connect string"
    try:
        with open(connect_string.auth_file, encoding="utf-8") as file:
            return parse_credentials(file.read(), where)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "the file is not UTF-8 text"
        raise errors.BadConfig(f"{where} cannot be read: {reason}. {_FILE_HINT}") from error
    except errors.BadConfig as error:
        raise errors.BadConfig(f"{error}. {_FILE_HINT}") from None


def _wrong_auth_file_message(name: str) -> str:
    return (
        "expected the auth file of an administrator, with a line "
        f"members:digest:USER:PASSWORD, found only the members' user {name!r}"
    )


def _acl_entry(grant: NodePermission) -> ACL:
    permissions = sum(PERMISSION_BITS[letter] for letter in set(grant.permissions))
    return ACL(permissions, Id(grant.scheme, grant.identity))


def _watch_of(signal: Signal | None) -> Callable[[object], None] | None:
    return None if signal is None else cast("_KazooSignal", signal).on_kazoo_event


def _node_stat(stat: ZnodeStat) -> NodeStat:
    return NodeStat(stat.version, stat.cversion, stat.ephemeralOwner, stat.mtime)


def _add_operation(
    request: TransactionRequest, operation: Operation, acl_of: Callable[[str], list[ACL]]
) -> None:
    match operation:
        case CreateNode(path, data, is_ephemeral, is_sequential):
            flags = EPHEMERAL_FLAG * is_ephemeral | SEQUENTIAL_FLAG * is_sequential
            # `request.create` cannot create a node without data, so this code appends the request
            # itself.
            request.operations.append(CreateRequest(path, data, acl_of(path), flags))
        case SetNode(path, data, version):
            assert version >= 0  # rule 4
            request.set_data(path, data, version)
        case DeleteNode(path, version):
            assert version >= 0  # rule 4
            request.delete(path, version)
        case CheckVersion(path, version):
            assert version >= 0  # rule 4
            request.check(path, version)


def _conflict_message(operation: Operation, error: Exception) -> str:
    if isinstance(operation, CreateNode):
        expected = "expected an existing parent and no znode with this path"
    else:
        expected = f"expected version {operation.version}"
    return f"{operation.path}: {expected}, found {type(error).__name__}"


def _set_result(future: asyncio.Future[Any], result: Any) -> None:  # noqa: ANN401 - kazoo's
    if future.done():
        return  # The caller was cancelled.
    if result.exception is not None:
        future.set_exception(result.exception)
    else:
        future.set_result(result.value)


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *args: object) -> None:
    # A closed loop needs no more results.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *args)
