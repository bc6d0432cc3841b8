"""The client's connections: two to each server at most, shared by all partitions that it owns.

Many partitions speak over one connection, some requests are answered once and others for ever.
Which message belongs to whom is decided here, by request id and partition.

Rules:
    1. A request that is no append has a negative sequence number, so that no answer is taken for
       a row's. Streams use numbers down to `CONTROL_SEQUENCE_MIN`, this file those below.
    2. Whoever waits for an answer waits under a timeout, and is told when the connection breaks.
    3. A dial is shared by all who want the address meanwhile, and nobody's cancellation is
       another's: when the one that dials is cancelled, one of those that wait dials again.
    4. What is large has a connection of its own: a range on its way holds up whatever comes behind
       it, and a server reads no appends from who does not take its answers. Each of the two is made
       when it is first needed (docs/decisions/014).
    5. At an original server (`legacy/old_server_link.py`) streams are translated here, between them
       and the socket; requests are not: whoever makes them knows whom he asks.
    6. A server that keeps somebody waiting, and says nothing to anybody meanwhile, is `silent`: it
       may be frozen, and what it owned may be elsewhere, long before time is up for who waits.
       The log tells of it once (`silence.py`).
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Container
from ssl import SSLContext
from typing import NamedTuple, TypeVar, cast

from waltz_core import errors
from waltz_core.client.links.silence import Silences
from waltz_core.legacy import old_server_stream
from waltz_core.legacy.old_server_link import OriginalLink
from waltz_core.records.record import (
    CONTROL_SEQUENCE_MIN,
    ClientId,
    Generation,
    PartitionId,
    ReqId,
)
from waltz_core.transport import net
from waltz_core.wire.messages import AppendFollowing, ClientMessage, ErrorResponse, Message, Surface

_log = logging.getLogger(__name__)

_SEQUENCE_FIRST = CONTROL_SEQUENCE_MIN - 1
_SEQUENCE_MIN = -(1 << 31)
# A quarter of the time after which ZooKeeper gives a server up: found out within twice this.
SILENT_S = 1.0
_DIAL = 0  # connections are counted from 1 on

MessageCallback = Callable[[int, ClientMessage], None]
LostCallback = Callable[[int, str], None]
Waiting = Callable[[], bool]
# Finds out if a link's server still owns the partition at the generation at which it was mounted.
ProveCallback = Callable[[Callable[[bool], None]], None]
_Key = tuple[str, bool]  # the server's address, and whether it is for large answers
AnswerT = TypeVar("AnswerT", bound=ClientMessage)


class _Stream(NamedTuple):
    """Whom a partition's messages go to."""

    on_message: MessageCallback
    on_lost: LostCallback
    prove: ProveCallback


class ServerLink:
    """One connection to one server."""

    def __init__(
        self,
        number: int,
        link: net.Link,
        *,
        lost: Callable[["ServerLink"], None],
        silences: Silences,
    ) -> None:
        self.number = number
        self._link = link
        self._lost = lost
        self._silences = silences
        self._looks_again: asyncio.TimerHandle | None = None
        self._silent_since_s = 0.0
        self._has_spoken = False
        self._sequence = _SEQUENCE_FIRST
        self._waiting: dict[ReqId, asyncio.Future[ClientMessage]] = {}
        self._used_by: dict[int, Waiting] = {}
        self._close_after_s: float | None = None
        self._streams: dict[int, _Stream] = {}
        self.is_original = (link.version or 0) <= old_server_stream.VERSION_MAX
        self._original = OriginalLink() if self.is_original else None
        self._effects: deque[old_server_stream.Effect] = deque()
        self._is_performing = False
        self._wakes: asyncio.TimerHandle | None = None
        self._wakes_at_ms = 0
        link.start(self._take, self._closed)

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._link.is_closed

    @property
    def address(self) -> str:
        return self._link.address

    def attach(
        self,
        partition_id: int,
        on_message: MessageCallback,
        on_lost: LostCallback,
        is_waiting: Waiting,
        prove: ProveCallback,
    ) -> None:
        """Hand what is not the answer to a `request` to the partition's stream from now on.

        `prove` finds out, and tells, if the server owns the partition now; asked at an original.
        """
        self._streams[partition_id] = _Stream(on_message, on_lost, prove)
        self._used_by[partition_id] = is_waiting

    def leave(self, partition_id: int) -> None:
        """The partition's stream sends elsewhere now; late answers still reach it."""
        self._used_by.pop(partition_id, None)
        self._close_if_unused()

    def detach(self, partition_id: int) -> None:
        """The partition's stream has ended."""
        self._streams.pop(partition_id, None)
        self.leave(partition_id)

    def retire(self, close_after_s: float) -> None:
        """Nobody new will use it: close it when all have left and had time for late answers."""
        self._close_after_s = close_after_s
        self._close_if_unused()

    @property
    def may_follow(self) -> bool:
        """Whether the server knows authors who follow what is in flight."""
        return (self._link.version or 0) >= AppendFollowing.since

    def send(self, message: ClientMessage) -> None:
        """Send a message of a stream; a closed connection tells by its callback."""
        if self._original is None:
            self._link.send(message)
        elif not self.is_closed:
            self._perform(self._original.say(message, self._now_ms()))
        self._watch()

    async def request(
        self,
        answer: type[AnswerT],
        make: Callable[[ReqId], ClientMessage],
        *,
        client_id: int,
        partition_id: int,
        timeout_s: float,
    ) -> AnswerT:
        """Send a request and return its answer.

        Raises what the server answers as an error, Unreachable when it does not answer in time,
        RemoteProtocolError when it answers something else.
        """
        if self._link.is_closed:
            raise errors.Unreachable(f"{self.address}: {self._link.closed_reason}")
        req_id = self._next_id(client_id, partition_id)
        future: asyncio.Future[ClientMessage] = asyncio.get_running_loop().create_future()
        self._waiting[req_id] = future
        request = make(req_id)
        try:
            self._link.send(request)
            self._watch()
            async with asyncio.timeout(timeout_s):
                message = await future
        except TimeoutError as error:
            raise errors.Unreachable(
                f"{self.address}: no answer to {type(request).__name__} for partition "
                f"{partition_id} within {timeout_s} s"
            ) from error
        finally:
            self._waiting.pop(req_id, None)
        if isinstance(message, ErrorResponse):
            raise errors.from_code(message.error_code, message.message)
        if not isinstance(message, answer):
            raise errors.RemoteProtocolError(
                f"{self.address}: expected {answer.__name__} in answer to "
                f"{type(request).__name__}, found {type(message).__name__}"
            )
        return message

    def close(self, reason: str) -> None:
        """End the connection once what is unsent is sent."""
        self._link.close(reason)

    async def wait_closed(self) -> None:
        """Wait until the connection is gone."""
        await self._link.wait_closed()

    def _close_if_unused(self) -> None:
        if self._close_after_s is not None and not self._used_by and not self.is_closed:
            loop = asyncio.get_running_loop()
            loop.call_later(self._close_after_s, self._link.close, "replaced by a newer connection")

    def _next_id(self, client_id: int, partition_id: int) -> ReqId:
        sequence = self._sequence
        self._sequence = sequence - 1 if sequence > _SEQUENCE_MIN else _SEQUENCE_FIRST
        return ReqId(ClientId(client_id), Generation(0), PartitionId(partition_id), sequence)

    def _watch(self) -> None:
        if self._looks_again is None:
            self._has_spoken = False
            loop = asyncio.get_running_loop()
            self._silent_since_s = loop.time()
            self._looks_again = loop.call_later(SILENT_S, self._look)

    def _look(self) -> None:
        """Tell when the server has been silent since the last look (rule 6)."""
        self._looks_again = None
        if self.is_closed:
            return
        if not (self._waiting or any(each() for each in self._used_by.values())):
            self._silences.left(self.address, self.number, "nobody waits for it")
            return
        if not self._has_spoken:
            self._silences.goes_on(self.address, self.number, since_s=self._silent_since_s)
        self._watch()

    def _take(self, received: list[Message]) -> None:
        if not self._has_spoken:
            self._has_spoken = True
            self._silences.spoke(self.address, self.number)
        rest: list[ClientMessage] = []
        for each in received:
            message = cast("ClientMessage", each)
            future = self._waiting.pop(message.req_id, None)
            if future is not None:
                if not future.done():
                    future.set_result(message)
            elif self._original is not None:
                rest.append(message)
            else:
                self._hand_on(message)
        if self._original is not None and rest:
            self._perform(self._original.hear(rest, self._now_ms()))

    def _hand_on(self, message: ClientMessage) -> None:
        stream = self._streams.get(message.req_id.partition_id)
        if stream is not None:
            stream.on_message(self.number, message)

    # --- at an original (rule 5)

    def _perform(self, effects: list[old_server_stream.Effect]) -> None:
        """Do these in order; a stream that hears of one and answers at once comes behind them."""
        self._effects += effects
        if self._is_performing:
            return
        self._is_performing = True
        try:
            while self._effects and not self.is_closed:
                self._do(self._effects.popleft())
        finally:
            self._is_performing = False
        self._arm()

    def _do(self, effect: old_server_stream.Effect) -> None:
        match effect:
            case old_server_stream.ToServer():
                self._link.send_all(effect.messages)
            case old_server_stream.ToStream():
                self._hand_on(effect.message)
            case old_server_stream.Prove():
                stream = self._streams.get(effect.partition_id)
                if stream is not None:
                    stream.prove(lambda is_owner: self._proven(effect, is_owner=is_owner))
            case old_server_stream.GiveUp():
                self._link.abort(effect.reason)

    def _proven(self, asked: old_server_stream.Prove, *, is_owner: bool) -> None:
        if self._original is not None and not self.is_closed:
            self._perform(
                self._original.proven(
                    asked.partition_id, asked.number, is_owner=is_owner, now_ms=self._now_ms()
                )
            )

    def _arm(self) -> None:
        assert self._original is not None
        wanted_ms = self._original.wake_at_ms
        if wanted_ms is None or (self._wakes is not None and self._wakes_at_ms <= wanted_ms):
            return
        if self._wakes is not None:
            self._wakes.cancel()
        self._wakes_at_ms = wanted_ms
        delay_s = max(wanted_ms - self._now_ms(), 0) / 1000
        self._wakes = asyncio.get_running_loop().call_later(delay_s, self._wake)

    def _wake(self) -> None:
        self._wakes = None
        if self._original is not None and not self.is_closed:
            self._perform(self._original.wake(self._now_ms()))

    def _now_ms(self) -> int:
        return int(asyncio.get_running_loop().time() * 1000)

    # --- its end

    def _closed(self, reason: str) -> None:
        self._silences.left(self.address, self.number, reason)
        if self._wakes is not None:
            self._wakes.cancel()
        waiting, self._waiting = list(self._waiting.values()), {}
        for future in waiting:
            if not future.done():
                future.set_exception(errors.Unreachable(f"{self.address}: {reason}"))
        streams, self._streams = list(self._streams.values()), {}
        for each in streams:
            each.on_lost(self.number, reason)
        self._lost(self)


class ServerLinks:
    """The connections of one client, by the server's address and what they are for."""

    def __init__(
        self,
        *,
        dial_timeout_s: float,
        late_answers_s: float,
        silent: Callable[[], None] | None = lambda: None,
        ssl: SSLContext | None = None,
    ) -> None:
        self._silences = Silences(silent)
        self._dial_timeout_s = dial_timeout_s
        self._late_answers_s = late_answers_s
        self._ssl = ssl
        self._links: dict[_Key, ServerLink] = {}
        self._open: dict[int, ServerLink] = {}
        self._dialling: dict[_Key, asyncio.Future[None]] = {}
        self._count = 0
        self._originals: set[str] = set()  # of which the log has told
        self._is_closed = False

    async def get(
        self, address: str, *, is_bulk: bool = False, but: Container[int] = ()
    ) -> ServerLink:
        """Return the open connection to a server, dialling when there is none `but` those.

        `is_bulk`: the one for large answers (rule 4).
        Raises Unreachable, or RemoteProtocolError when somebody else answers at the address.
        """
        key = (address, is_bulk)
        while True:
            found = self._links.get(key)
            if found is not None and not found.is_closed:
                if found.number not in but:
                    return found
                found.retire(self._late_answers_s)
                del self._links[key]
            under_way = self._dialling.get(key)
            if under_way is None:
                return await self._dial_for_all(key)
            # NB: to await a future is to cancel it when one is cancelled; `wait` leaves it alone.
            await asyncio.wait([under_way])
            if not under_way.cancelled():
                under_way.result()

    async def _dial_for_all(self, key: _Key) -> ServerLink:
        """Dial; whoever wants the same meanwhile shares the outcome (rule 3)."""
        outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._dialling[key] = outcome
        overdue = self._watch_dial(key[0])
        try:
            made = await self._dial(key)
        except errors.WaltzError as error:
            self._silences.left(key[0], _DIAL, error)
            outcome.set_exception(error)
            outcome.exception()  # nobody may be waiting
            raise
        else:
            self._silences.spoke(key[0], _DIAL)
            outcome.set_result(None)
            return made
        finally:
            overdue.cancel()
            self._silences.left(key[0], _DIAL, "the dial was given up")  # unless it is told above
            del self._dialling[key]
            outcome.cancel()  # unless it is done: the dial was given up

    def _watch_dial(self, address: str) -> asyncio.TimerHandle:
        """Tell when a server has not greeted in time (rule 6); to be cancelled when it has."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        return loop.call_later(
            SILENT_S, lambda: self._silences.goes_on(address, _DIAL, since_s=began_s)
        )

    async def dial_apart(self, address: str) -> net.Link:
        """Return a connection that nobody shares, to be closed by whoever has asked for it.

        Raises Unreachable, or RemoteProtocolError.
        """
        return await net.dial(
            Surface.CLIENT, address, timeout_s=self._dial_timeout_s, ssl=self._ssl
        )

    async def _dial(self, key: _Key) -> ServerLink:
        address = key[0]
        link = await self.dial_apart(address)
        if self._is_closed:
            link.abort("the client was closed")
            raise errors.Unreachable(f"{address}: the client was closed")
        self._count += 1
        made = ServerLink(
            self._count, link, lost=lambda gone: self._forget(key, gone), silences=self._silences
        )
        self._links[key] = self._open[made.number] = made
        if made.is_original and address not in self._originals:
            self._originals.add(address)
            _log.warning(
                "client.original_server server=%s version=%d see=docs/compatibility.md",
                address,
                link.version,
            )
        return made

    async def close(self, reason: str) -> None:
        """Close all of them."""
        self._is_closed = True
        links = list(self._open.values())
        for link in links:
            link.close(reason)
        for link in links:
            await link.wait_closed()

    def _forget(self, key: _Key, link: ServerLink) -> None:
        self._open.pop(link.number, None)
        if self._links.get(key) is link:
            del self._links[key]
