"""The requests on one connection that wait for their answers."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from waltz_core import errors
from waltz_core.records.record import CONTROL_SEQUENCE_MIN, ClientId, Generation, PartitionId, ReqId
from waltz_core.transport import net
from waltz_core.wire.messages import ClientMessage, ErrorResponse

_SEQUENCE_FIRST = CONTROL_SEQUENCE_MIN - 1
_SEQUENCE_MIN = -(1 << 31)
AnswerT = TypeVar("AnswerT", bound=ClientMessage)


class PendingRequests:
    """Sends requests, and finds each answer by its request ID (`connections.py`, rules 1 and 2)."""

    def __init__(self, link: net.Link) -> None:
        self._link = link
        self._sequence = _SEQUENCE_FIRST
        self._waiting: dict[ReqId, asyncio.Future[ClientMessage]] = {}

    @property
    def has_waiting_callers(self) -> bool:
        """Whether a caller waits for an answer."""
        return bool(self._waiting)

    async def request(
        self,
        answer: type[AnswerT],
        make_request: Callable[[ReqId], ClientMessage],
        *,
        client_id: int,
        partition_id: int,
        timeout_s: float,
    ) -> AnswerT:
        """Send a request and return its answer.

        Raises the error that the server returns. If the server does not answer in time, raises
        Unreachable. If it answers with another kind of message, raises RemoteProtocolError.
        """
        link = self._link
        if link.is_closed:
            raise errors.Unreachable(f"{link.address}: {link.closed_reason}")
        req_id = self._next_id(client_id, partition_id)
        future: asyncio.Future[ClientMessage] = asyncio.get_running_loop().create_future()
        self._waiting[req_id] = future
        request = make_request(req_id)
        try:
            link.send(request)
            async with asyncio.timeout(timeout_s):
                message = await future
        except TimeoutError as error:
            raise errors.Unreachable(
                f"{link.address} did not answer the {type(request).__name__} for partition "
                f"{partition_id} within {timeout_s} s"
            ) from error
        finally:
            self._waiting.pop(req_id, None)
        if isinstance(message, ErrorResponse):
            raise errors.error_from_code(
                message.error_code,
                message.message,
                message.first_available,
                message.retry_after_ms,
            )
        if not isinstance(message, answer):
            raise errors.RemoteProtocolError(
                f"{link.address}: expected message {answer.__name__} in answer to "
                f"{type(request).__name__}, found {type(message).__name__}"
            )
        return message

    def try_complete(self, message: ClientMessage) -> bool:
        """Pass an answer to the caller that waits for it; return False if no caller does."""
        future = self._waiting.pop(message.req_id, None)
        if future is None:
            return False
        if not future.done():
            future.set_result(message)
        return True

    def fail(self, reason: str) -> None:
        """Fail all pending requests with Unreachable, because the connection is closed."""
        waiting, self._waiting = list(self._waiting.values()), {}
        for future in waiting:
            if not future.done():
                future.set_exception(errors.Unreachable(f"{self._link.address}: {reason}"))

    def _next_id(self, client_id: int, partition_id: int) -> ReqId:
        sequence = self._sequence
        self._sequence = sequence - 1 if sequence > _SEQUENCE_MIN else _SEQUENCE_FIRST
        return ReqId(ClientId(client_id), Generation(0), PartitionId(partition_id), sequence)
