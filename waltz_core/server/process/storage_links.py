"""Links to storages: one link for each store session and replica, and other links for reading.

Only this module turns the effects of the replication machines into TCP connections. This module has
no protocol state: the machines interpret answers and lost links.

Rules:
    1. Each session has its own links, which no later session uses. Messages in flight on an older
       link may still arrive at its storage. The storage rejects these messages because of their
       session ID.
    2. `OpenReplica` has one outcome, and a lost link is reported once. After a link was closed on
       request, it causes no further event (replication/session_events.py, rule 2).
    3. Readers have their own links, so that a large read cannot delay an append.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from itertools import count
from ssl import SSLContext
from typing import Any, Final, Protocol, TypeAlias

from waltz_core.errors import RemoteProtocolError, Unreachable, WaltzError, error_from_code
from waltz_core.records.record import ReplicaId, SessionId
from waltz_core.replication import session_events as replication
from waltz_core.transport.net import Link, dial
from waltz_core.wire.messages import (
    LockBlocks,
    LockBlocksRequest,
    Message,
    Nack,
    OpenRequest,
    RangeBytes,
    RangeRaw,
    StorageMessage,
    SuccessResponse,
    WireProtocol,
)

DIAL_TIMEOUT_S: Final = 3.0
READ_TIMEOUT_S: Final = 15.0
# The timeout of a read if another storage can be queried. A frozen storage does not close its
# connections, so only a timeout detects it.
URGENT_READ_TIMEOUT_S: Final = 2.0
_NO_PARTITION_ID: Final = -1
_ReadAnswer: TypeAlias = RangeBytes | LockBlocks


class TaskStarter(Protocol):
    """Starts tasks, like an `asyncio.TaskGroup`."""

    def create_task(self, coroutine: Coroutine[Any, Any, None], /) -> object:
        """Run `coroutine` as a task; `coroutine` must not raise."""


@dataclass(slots=True)
class _SessionLink:
    """The link of one store session to one replica."""

    link: Link | None = None
    is_closed: bool = False


class SessionLinks:
    """The links of one partition's store sessions."""

    def __init__(
        self,
        tasks: TaskStarter,
        post: Callable[[replication.ReplicaOpened | replication.ReplicaLost], None],
        post_answer: Callable[[replication.ReplicaResponded], None],
        *,
        write_backlog_bytes_max: int,
        ssl: SSLContext | None = None,
    ) -> None:
        self._tasks = tasks
        self._post = post
        self._post_answer = post_answer
        self._write_backlog_bytes_max = write_backlog_bytes_max
        self._ssl = ssl
        self._links: dict[tuple[SessionId, ReplicaId], _SessionLink] = {}

    def open(self, effect: replication.OpenReplica) -> None:
        """Dial the storage; `ReplicaOpened` or `ReplicaLost` follows."""
        key = (effect.session_id, effect.replica)
        assert key not in self._links
        entry = self._links[key] = _SessionLink()
        self._tasks.create_task(self._dial(key, entry))

    def send(self, effect: replication.SendToReplica) -> None:
        """Send a message, in order.

        If the link is lost, do nothing: the loss is reported separately.
        """
        entry = self._links.get((effect.session_id, effect.replica))
        if entry is not None and entry.link is not None:
            entry.link.send(effect.message)

    def close(self, effect: replication.CloseReplica) -> None:
        """Close the link, or cancel the dial in progress."""
        self._close((effect.session_id, effect.replica), "the store session has ended")

    def close_all(self) -> None:
        """Close all links; no events follow."""
        for key in list(self._links):
            self._close(key, "the server no longer serves the partition")

    def _close(self, key: tuple[SessionId, ReplicaId], reason: str) -> None:
        entry = self._links.pop(key, None)
        if entry is not None:
            entry.is_closed = True
            if entry.link is not None:
                entry.link.close(reason)

    async def _dial(self, key: tuple[SessionId, ReplicaId], entry: _SessionLink) -> None:
        session_id, replica = key
        try:
            link = await dial(
                WireProtocol.STORAGE,
                replica,
                timeout_s=DIAL_TIMEOUT_S,
                ssl=self._ssl,
                write_backlog_bytes_max=self._write_backlog_bytes_max,
            )
        except WaltzError as error:
            self._on_link_lost(key, entry, str(error))
            return
        if entry.is_closed:
            link.abort("the store session has ended")
            return
        entry.link = link

        def post_answers(messages: list[Message]) -> None:
            for message in messages:
                # Rule 2. The machine may close the link while it processes one of these messages.
                if entry.is_closed:
                    return
                assert isinstance(message, StorageMessage)
                self._post_answer(replication.ReplicaResponded(session_id, replica, message))

        self._post(replication.ReplicaOpened(session_id, replica))
        if not entry.is_closed:
            link.start(post_answers, lambda reason: self._on_link_lost(key, entry, reason))

    def _on_link_lost(
        self, key: tuple[SessionId, ReplicaId], entry: _SessionLink, reason: str
    ) -> None:
        if entry.is_closed:
            return
        entry.is_closed = True
        del self._links[key]
        session_id, replica = key
        self._post(replication.ReplicaLost(session_id, replica, reason))


@dataclass(slots=True)
class _ReadLink:
    """A link for reads, with the requests that wait for answers."""

    link: Link
    waiting: dict[int, asyncio.Future[_ReadAnswer]] = field(default_factory=dict)  # by sequence


class ReadLinks:
    """One link to each storage for reading, opened on first use, shared by all partitions."""

    def __init__(
        self, cluster_key: bytes, partition_count: int, *, ssl: SSLContext | None = None
    ) -> None:
        self._ssl = ssl
        # A storage answers readers only after this request, which contains the cluster key.
        self._open_request = OpenRequest(
            _NO_PARTITION_ID, _NO_PARTITION_ID, _NO_PARTITION_ID, cluster_key, partition_count
        )
        self._links: dict[ReplicaId, _ReadLink] = {}
        self._dialing: dict[ReplicaId, asyncio.Lock] = {}
        # The links use their own sequence numbers, because the callers' sequence numbers may
        # collide.
        self._numbers = count(1)

    async def fetch(
        self,
        replica: ReplicaId,
        message: RangeRaw | LockBlocksRequest,
        *,
        is_urgent: bool = False,
    ) -> _ReadAnswer:
        """Send a request to a storage and return its answer, with the sequence number of `message`.

        `is_urgent`: use the shorter timeout, because another storage can be queried.

        Raises Unreachable, or the error of the storage's answer.
        """
        number = next(self._numbers)
        timeout_s = URGENT_READ_TIMEOUT_S if is_urgent else READ_TIMEOUT_S
        try:
            async with asyncio.timeout(timeout_s):
                read_link = await self._get_link(replica)
                answer: asyncio.Future[_ReadAnswer] = asyncio.get_running_loop().create_future()
                read_link.waiting[number] = answer
                read_link.link.send(replace(message, sequence=number))
                try:
                    fetched = await answer
                finally:
                    read_link.waiting.pop(number, None)
        except TimeoutError as error:
            raise Unreachable(f"replica {replica} did not answer within {timeout_s} s") from error
        return replace(fetched, sequence=message.sequence)

    def close(self) -> None:
        """Close all links."""
        for read_link in self._links.values():
            read_link.link.close("shutting down")

    async def _get_link(self, replica: ReplicaId) -> _ReadLink:
        lock = self._dialing.setdefault(replica, asyncio.Lock())
        async with lock:
            open_link = self._links.get(replica)
            if open_link is not None:
                return open_link
            link = await dial(
                WireProtocol.STORAGE, replica, timeout_s=DIAL_TIMEOUT_S, ssl=self._ssl
            )
            read_link = self._links[replica] = _ReadLink(link)
            link.start(
                lambda messages: _process_answers(replica, read_link, messages),
                lambda reason: self._on_link_lost(replica, read_link, reason),
            )
            if link.is_closed:  # The link was closed before `start`, so `start` reports nothing.
                raise Unreachable(f"{replica}: {link.closed_reason}")
            link.send(self._open_request)
            return read_link

    def _on_link_lost(self, replica: ReplicaId, read_link: _ReadLink, reason: str) -> None:
        if self._links.get(replica) is read_link:
            del self._links[replica]
        for answer in read_link.waiting.values():
            if not answer.done():
                answer.set_exception(Unreachable(f"{replica}: {reason}"))


def _process_answers(replica: ReplicaId, read_link: _ReadLink, messages: list[Message]) -> None:
    for message in messages:
        assert isinstance(message, StorageMessage)
        if message.partition_id == _NO_PARTITION_ID and isinstance(message, Nack):
            # This answers the open request: the storage belongs to another cluster.
            read_link.link.abort(message.message)
            return
        waiting = read_link.waiting.get(message.sequence)
        if waiting is not None and not waiting.done():
            _complete_answer(replica, waiting, message)


def _complete_answer(
    replica: ReplicaId, waiting: asyncio.Future[_ReadAnswer], message: StorageMessage
) -> None:
    if isinstance(message, RangeBytes | LockBlocks):
        waiting.set_result(message)
    elif isinstance(message, Nack):
        text = f"{replica}: {message.message}"
        waiting.set_exception(error_from_code(message.error_code, text, message.first_available))
    else:
        name = type(message).__name__
        waiting.set_exception(
            RemoteProtocolError(f"replica {replica}: expected a range of records, found {name}")
        )


async def is_reachable(
    replica: ReplicaId, cluster_key: bytes, partition_count: int, *, ssl: SSLContext | None = None
) -> bool:
    """Whether a storage answers and belongs to this cluster."""
    try:
        link = await dial(WireProtocol.STORAGE, replica, timeout_s=DIAL_TIMEOUT_S, ssl=ssl)
    except WaltzError:
        return False
    try:
        async with asyncio.timeout(DIAL_TIMEOUT_S):
            link.send(
                OpenRequest(
                    _NO_PARTITION_ID,
                    _NO_PARTITION_ID,
                    _NO_PARTITION_ID,
                    cluster_key,
                    partition_count,
                )
            )
            (answer, *_) = await link.receive()
            return isinstance(answer, SuccessResponse)
    except (WaltzError, TimeoutError):
        return False
    finally:
        link.abort("the check of the connection has ended")
