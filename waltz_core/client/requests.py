"""Questions to the owner of a partition, asked again until it answers or time is up.

Why it stands alone: marks, flushes, ranges and data all go to whoever owns the partition now, and
each of them has to live through a server that has died, moved or is busy in the same way.

Rules:
    1. What is asked here changes nothing, so it may be asked any number of times.
    2. Retriable errors are retried with a pause that doubles, and ZooKeeper is asked again where
       the partition is; the last error is told when the request timeout has passed, and the one
       before where the last was that ZooKeeper did not answer in what was left of the time.
    3. Which replicas are nearby is a preference: where it cannot be found out, none is.
    4. When a partition moves, whoever still waits for the server that had it asks the new one: that
       server may be frozen, or on a host that is gone, and would keep him waiting to the end.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from random import Random
from typing import Any, NamedTuple, TypeVar

from waltz_core import errors
from waltz_core.client.connections import ServerLinks
from waltz_core.client.directory import Directory, Owner
from waltz_core.client.ranges import (
    RangeChunk,
    RangeQuery,
    ReplicaSet,
    chunk_of_server,
    server_request,
)
from waltz_core.config import NO_GROUP, ClientConfig
from waltz_core.record import PartitionId, ReqId, TransactionId
from waltz_core.wire import messages
from waltz_core.wire.messages import ClientMessage

_log = logging.getLogger(__name__)

# Answers that have a connection of their own (connections.py, rule 4).
_LARGE = (messages.RangeData, messages.TransactionDataResponse)
# Who only asks needs no client id of his own (interop.md 2.1).
NO_CLIENT_ID = -1

AnswerT = TypeVar("AnswerT", bound=ClientMessage)
ToldT = TypeVar("ToldT")


class _Question(NamedTuple):
    """One that waits for an answer, and for whose."""

    partition_id: PartitionId
    address: str
    patience: asyncio.Timeout


class Requests:
    """Asks the partitions' owners."""

    def __init__(
        self, directory: Directory, links: ServerLinks, config: ClientConfig, random: Random
    ) -> None:
        self._directory = directory
        self._links = links
        self._config = config
        self._random = random
        self._waiting: dict[int, _Question] = {}
        self._numbers = count(1)

    def moved(self, owners: Mapping[PartitionId, Owner]) -> None:
        """The assignment has changed (rule 4)."""
        for each in self._waiting.values():
            owner = owners.get(each.partition_id)
            is_moved = owner is not None and owner.address != each.address
            if is_moved and not each.patience.expired():
                each.patience.reschedule(0.0)

    async def ask(
        self,
        partition_id: PartitionId,
        answer: type[AnswerT],
        make: Callable[[ReqId], ClientMessage],
    ) -> AnswerT:
        """Ask until answered; raises the last error when the request timeout has passed."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._config.request_timeout_ms / 1000
        pause_s = self._config.retry_interval_ms_min / 1000
        before: errors.Unavailable | None = None
        while True:
            left_s = deadline_s - loop.time()
            try:
                return await self._once(
                    partition_id, answer, make, timeout_s=max(left_s, 0.001), before=before
                )
            except errors.Unavailable as error:
                if loop.time() + pause_s >= deadline_s:
                    raise errors.from_code(
                        error.code,
                        f"partition {partition_id}: no answer within "
                        f"{self._config.request_timeout_ms} ms: {error}",
                    ) from error
                before = error
            await asyncio.sleep(pause_s * (0.5 + self._random.random() / 2))
            pause_s = min(2 * pause_s, self._config.retry_interval_ms_max / 1000)

    async def _once(
        self,
        partition_id: PartitionId,
        answer: type[AnswerT],
        make: Callable[[ReqId], ClientMessage],
        *,
        timeout_s: float,
        before: errors.Unavailable | None,
    ) -> AnswerT:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        owner = await self._owner(partition_id, timeout_s=timeout_s, before=before)
        timeout_s = max(deadline_s - loop.time(), 0.001)
        number = next(self._numbers)
        try:
            async with asyncio.timeout(None) as patience:
                self._waiting[number] = _Question(partition_id, owner.address, patience)
                return await self._answer_of(owner, partition_id, answer, make, timeout_s=timeout_s)
        except TimeoutError as error:  # rule 4
            raise errors.Unreachable(f"{owner.address}: the partition has moved") from error
        finally:
            self._waiting.pop(number, None)

    async def _owner(
        self, partition_id: PartitionId, *, timeout_s: float, before: errors.Unavailable | None
    ) -> Owner:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._directory.owner(partition_id, after_failure=before is not None)
        except TimeoutError as error:  # ZooKeeper's own time is a longer one
            reason = "" if before is None else f"; before that: {before}"
            raise errors.CoordinatorUnavailable(
                f"ZooKeeper has not said who owns it{reason}"
            ) from error

    async def _answer_of(
        self,
        owner: Owner,
        partition_id: PartitionId,
        answer: type[AnswerT],
        make: Callable[[ReqId], ClientMessage],
        *,
        timeout_s: float,
    ) -> AnswerT:
        try:
            link = await self._links.get(owner.address, is_bulk=answer in _LARGE)
        except errors.RemoteProtocolError as error:
            # Somebody else has the address now, so the server is not there.
            raise errors.Unreachable(str(error)) from error
        return await link.request(
            answer, make, client_id=NO_CLIENT_ID, partition_id=partition_id, timeout_s=timeout_s
        )

    async def high_water_mark(
        self, partition_id: PartitionId, *, linearizable: bool
    ) -> TransactionId:
        """Return the partition's mark; `linearizable`: proven not to be stale."""
        if linearizable:
            return TransactionId(
                (await self.replicas(partition_id, linearizable=True)).high_water_mark
            )
        answer = await self.ask(
            partition_id, messages.HighWaterMarkResponse, messages.HighWaterMarkRequest
        )
        return TransactionId(answer.high_water_mark)

    async def flush(self, partition_id: PartitionId) -> TransactionId:
        """Return the mark when every append received before this request is final."""
        answer = await self.ask(partition_id, messages.FlushResponse, messages.FlushRequest)
        return TransactionId(answer.high_water_mark)

    async def replicas(self, partition_id: PartitionId, *, linearizable: bool) -> ReplicaSet:
        """Return the session, its mark, and the replicas that may be read from."""
        answer = await self.ask(
            partition_id,
            messages.ReplicasResponse,
            lambda req_id: messages.ReplicasRequest(req_id, linearizable),
        )
        return ReplicaSet(
            answer.cluster_key,
            answer.partition_count,
            answer.session_id,
            answer.high_water_mark,
            answer.replicas,
        )

    async def replica_sets(
        self, partition_ids: Iterable[PartitionId], *, linearizable: bool, group: int
    ) -> dict[int, ReplicaSet]:
        """Return what `replicas` does, with those nearby that are of a group (rule 3)."""
        ask = partial(self.replicas, linearizable=linearizable)
        found = await by_partition(partition_ids, ask)
        if group == NO_GROUP:
            return found
        try:
            told = {address for each in found.values() for address in each.replicas}
            groups = await self._directory.groups(told)
        except errors.WaltzError as error:
            _log.warning("requests.groups_unknown error=%s", error)
            return found
        return {
            partition: replace(
                each, nearby=tuple(one for one in each.replicas if groups.get(one) == group)
            )
            for partition, each in found.items()
        }

    async def range(self, partition_id: PartitionId, query: RangeQuery) -> RangeChunk:
        """Return a stretch of the log from the server, checked.

        An answer that says that the log ends before the stretch has been confirmed by a quorum.
        """
        while True:
            answer = await self.ask(
                partition_id, messages.RangeData, lambda req_id: server_request(req_id, query)
            )
            chunk = chunk_of_server(partition_id, query, answer)
            if chunk.next > query.first:
                return chunk
            # A server that has lost the partition may not know it yet, nor what was written since.
            if await self.high_water_mark(partition_id, linearizable=True) < query.first:
                return chunk
            await asyncio.sleep(self._config.retry_interval_ms_min / 1000)

    async def data(self, partition_id: PartitionId, transaction_id: TransactionId) -> bytes:
        """Return one transaction's data."""
        answer = await self.ask(
            partition_id,
            messages.TransactionDataResponse,
            lambda req_id: messages.TransactionDataRequest(req_id, transaction_id),
        )
        data, fault = answer.result
        if data is None:
            raise errors.BadRequest(f"transaction {transaction_id}: {fault}")
        return bytes(data)


async def by_partition(
    partition_ids: Iterable[PartitionId], ask: Callable[[PartitionId], Coroutine[Any, Any, ToldT]]
) -> dict[int, ToldT]:
    """Ask of all of them at once; raise the first error alone, not in a group."""
    try:
        async with asyncio.TaskGroup() as group:
            asked = {int(each): group.create_task(ask(each)) for each in sorted(partition_ids)}
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return {partition: task.result() for partition, task in asked.items()}
