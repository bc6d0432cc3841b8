"""Queries to a partition's owner, repeated until the owner answers or the request times out.

The client requests marks, flushes, ranges and data from the partition's current owner. The client
repeats a request if the server has died, no longer owns the partition, or is busy.

Rules:
    1. Queries change nothing, so they may be sent any number of times.
    2. After a retriable error, the client reads the owner from ZooKeeper again and retries. The
       delay doubles each time, unless the server states a delay. When the request timeout has
       passed, the client raises the last error. If the last attempt began shortly before the
       timeout, its error is not informative. Then the client raises the error of the previous
       attempt.
    3. A read also works without nearby replicas. So if the groups cannot be read, no replica is
       treated as nearby.
    4. A 0.13 server gets the queries that it supports (`legacy_server_reads.py`). Such a server
       cannot confirm that its mark is not stale, so the client checks the partition's owner in
       ZooKeeper. If the server owned the partition both before and after its answer, no other
       server has committed a transaction up to this answer.
    5. If a partition moves while a query waits for the former owner, the query is sent to the new
       owner. The reason is that the former owner may be frozen or on a dead host, and not answer
       before the timeout.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from random import Random
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from waltz_core import errors
from waltz_core.client.links.connections import ServerLink, ServerLinks
from waltz_core.client.links.directory import Directory, Owner
from waltz_core.client.read.ranges import (
    ArchivedRange,
    RangeChunk,
    RangeQuery,
    ReplicaSet,
    chunk_from_legacy_records,
    chunk_from_server,
    range_request_of,
)
from waltz_core.client.read.reported_rejections import Rejection, decode_rejections
from waltz_core.config.declarations import NO_GROUP, ClientConfig
from waltz_core.legacy.legacy_server_reads import LegacyServerReads
from waltz_core.parallel import run_parallel
from waltz_core.records.record import BEFORE_FIRST, NO_SESSION, PartitionId, ReqId, TransactionId
from waltz_core.wire import messages
from waltz_core.wire.messages import ClientMessage

_log = logging.getLogger(__name__)

# Answers that use the second connection (connections.py, rule 4).
_LARGE_ANSWER_TYPES = (messages.RangeData, messages.TransactionDataResponse)
# If a 0.13 server does not own the partition (yet), it never answers these requests. So the client
# sends them again after a timeout. The timeout of a flush is longer, because it may have to wait
# for appends in flight.
LEGACY_ANSWER_TIMEOUT_S: dict[type[ClientMessage], float] = {
    messages.HighWaterMarkResponse: 1.0,
    messages.FlushResponse: 5.0,
}
# Requests without appends need no client ID (docs/design/wire-format.md 2.1).
NO_CLIENT_ID = -1
# If an attempt had less than this part of the request timeout left, its error is not raised
# (rule 2).
_ATTEMPT_TIMEOUT_SHARE_MIN: Final = 0.1


class OwnerLink(NamedTuple):
    """A partition, its owner, and a link to it."""

    link: ServerLink
    owner: Owner
    partition_id: PartitionId
    timeout_s: float


AnswerT = TypeVar("AnswerT", bound=ClientMessage)
ResponseT = TypeVar("ResponseT")
OwnerRequest: TypeAlias = Callable[[OwnerLink], Coroutine[Any, Any, ResponseT]]


class _WaitingQuery(NamedTuple):
    """A query that waits for an answer, and the server that it was sent to."""

    partition_id: PartitionId
    address: str
    timeout: asyncio.Timeout


class OwnerRequests:
    """Sends queries to the partitions' owners."""

    def __init__(
        self, directory: Directory, links: ServerLinks, config: ClientConfig, random: Random
    ) -> None:
        self._directory = directory
        self._links = links
        self._config = config
        self._random = random
        self._waiting: dict[int, _WaitingQuery] = {}
        self._query_numbers = count(1)
        self._legacy_reads = LegacyServerReads(directory, links, NO_CLIENT_ID)

    def on_owners_changed(self, owners: Mapping[PartitionId, Owner]) -> None:
        """Repeat queries on the new owner if their partition has moved (rule 5)."""
        for query in self._waiting.values():
            owner = owners.get(query.partition_id)
            is_moved = owner is not None and owner.address != query.address
            if is_moved and not query.timeout.expired():
                query.timeout.reschedule(0.0)

    def close(self) -> None:
        """Stop the reads from 0.13 servers, and close their connections."""
        self._legacy_reads.close()

    async def query(
        self,
        partition_id: PartitionId,
        answer: type[AnswerT],
        make_request: Callable[[ReqId], ClientMessage],
    ) -> AnswerT:
        """Query the owner until it answers; raises an error after the request timeout (rule 2)."""

        async def request_owner(owner_link: OwnerLink) -> AnswerT:
            return await _query_owner(owner_link, answer, make_request)

        return await self._query_until_answered(
            partition_id, request_owner, is_bulk=answer in _LARGE_ANSWER_TYPES
        )

    async def _query_until_answered(
        self, partition_id: PartitionId, query: OwnerRequest[ResponseT], *, is_bulk: bool
    ) -> ResponseT:
        """Query the owner until it answers; raises the errors of `query`."""
        loop = asyncio.get_running_loop()
        total_s = self._config.request_timeout_ms / 1000
        deadline_s = loop.time() + total_s
        pause_s = self._config.retry_interval_ms_min / 1000
        previous_error: errors.Unavailable | None = None
        while True:
            timeout_s = max(deadline_s - loop.time(), 0.001)
            try:
                return await self._query_once(
                    partition_id,
                    query,
                    is_bulk=is_bulk,
                    timeout_s=timeout_s,
                    previous_error=previous_error,
                )
            except errors.Unavailable as error:
                now_s = loop.time()
                if now_s + pause_s >= deadline_s:
                    was_cut_short = (
                        now_s >= deadline_s and timeout_s < total_s * _ATTEMPT_TIMEOUT_SHARE_MIN
                    )
                    last_error = (
                        previous_error if was_cut_short and previous_error is not None else error
                    )
                    raise errors.error_from_code(
                        last_error.code,
                        f"no server answered a read of partition {partition_id} within "
                        f"{self._config.request_timeout_ms} ms: {last_error}",
                        retry_after_ms=_retry_after_ms(last_error),
                    ) from error
                previous_error = error
                requested_pause_s = _retry_after_ms(error) / 1000
                requested_pause_s = min(requested_pause_s, deadline_s - now_s - pause_s)
            await asyncio.sleep(max(requested_pause_s, pause_s * (0.5 + self._random.random() / 2)))
            pause_s = min(2 * pause_s, self._config.retry_interval_ms_max / 1000)

    async def _query_once(
        self,
        partition_id: PartitionId,
        query: OwnerRequest[ResponseT],
        *,
        is_bulk: bool,
        timeout_s: float,
        previous_error: errors.Unavailable | None,
    ) -> ResponseT:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        owner = await self._owner(partition_id, timeout_s=timeout_s, previous_error=previous_error)
        timeout_s = max(deadline_s - loop.time(), 0.001)
        number = next(self._query_numbers)
        try:
            async with asyncio.timeout(None) as timeout:
                self._waiting[number] = _WaitingQuery(partition_id, owner.address, timeout)
                link = await self._link(owner, is_bulk=is_bulk)
                return await query(OwnerLink(link, owner, partition_id, timeout_s))
        except TimeoutError as error:  # rule 5
            raise errors.Unreachable(
                f"{owner.address}: the partition has moved to another server"
            ) from error
        finally:
            self._waiting.pop(number, None)

    async def _owner(
        self,
        partition_id: PartitionId,
        *,
        timeout_s: float,
        previous_error: errors.Unavailable | None,
    ) -> Owner:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._directory.owner(
                    partition_id, after_failure=previous_error is not None
                )
        except TimeoutError as error:  # ZooKeeper's own timeout is longer
            reason = "" if previous_error is None else f"; before that: {previous_error}"
            raise errors.CoordinatorUnavailable(
                f"ZooKeeper has no owner for the partition{reason}"
            ) from error

    async def _link(self, owner: Owner, *, is_bulk: bool) -> ServerLink:
        try:
            return await self._links.get(owner.address, is_bulk=is_bulk)
        except errors.RemoteProtocolError as error:
            # Another program uses the address now, so the server is not reachable there.
            raise errors.Unreachable(str(error)) from error

    async def high_water_mark(
        self, partition_id: PartitionId, *, linearizable: bool
    ) -> TransactionId:
        """Return the partition's high-water mark; with `linearizable`, proven not to be stale."""
        if linearizable:
            return TransactionId(
                (await self.replicas(partition_id, linearizable=True)).high_water_mark
            )
        return await self._query_until_answered(partition_id, _request_mark, is_bulk=False)

    async def flush(self, partition_id: PartitionId) -> TransactionId:
        """Wait until all appends received before this request are final; return the mark."""

        async def flush(owner_link: OwnerLink) -> TransactionId:
            answer = await _query_owner(owner_link, messages.FlushResponse, messages.FlushRequest)
            return _checked_mark(owner_link, answer.high_water_mark)

        return await self._query_until_answered(partition_id, flush, is_bulk=False)

    async def replicas(self, partition_id: PartitionId, *, linearizable: bool) -> ReplicaSet:
        """Return the store session, its high-water mark, and the replicas that may be read.

        For a 0.13 server there are no replicas, because its storages do not answer readers.
        """

        async def query(owner_link: OwnerLink) -> ReplicaSet:
            if owner_link.link.is_legacy_server:
                mark = await _request_mark(owner_link)
                if linearizable:
                    await self._check_owner(owner_link)
                cluster = self._directory.cluster
                return ReplicaSet(cluster.key, cluster.partition_count, NO_SESSION, mark, ())
            answer = await _query_owner(
                owner_link,
                messages.ReplicasResponse,
                lambda req_id: messages.ReplicasRequest(req_id, linearizable),
            )
            return ReplicaSet(
                answer.cluster_key,
                answer.partition_count,
                answer.session_id,
                answer.high_water_mark,
                answer.replicas,
                archived=_archived_range_in(answer),
            )

        return await self._query_until_answered(partition_id, query, is_bulk=False)

    async def recent_rejections(self, partition_id: PartitionId) -> list[Rejection]:
        """Return the newest rejections of a partition, newest first.

        Raises:
            BadRequest: the server has an older version that does not support this request.
        """

        async def query(owner_link: OwnerLink) -> list[Rejection]:
            if not owner_link.link.reports_rejections:
                raise errors.BadRequest(
                    f"{owner_link.owner.address} does not report the rejections of partition "
                    f"{partition_id}: expected client protocol L "
                    f"{messages.RejectionsRequest.since} or later, found an older version. Hint: "
                    "upgrade the server."
                )
            return decode_rejections(
                await _query_owner(
                    owner_link, messages.RejectionsResponse, messages.RejectionsRequest
                )
            )

        return await self._query_until_answered(partition_id, query, is_bulk=False)

    async def _check_owner(self, owner_link: OwnerLink) -> None:
        """Check that the owner has not changed (rule 4); raises NotOwned."""
        current_owner = await self._directory.read_current_owner(owner_link.partition_id)
        if current_owner != owner_link.owner:
            raise errors.NotOwned(
                f"{owner_link.owner.address} no longer owns partition {owner_link.partition_id}"
            )

    async def expire(self, partition_id: PartitionId, before: int, before_ms: int) -> bool:
        """Request that archived objects expire; if this returns False, repeat the call.

        Whole objects expire. An object expires if all its IDs are below `before`, or if all its
        commit times are before `before_ms`. 0 disables a condition.

        Raises:
            BadRequest: no part of the partition is archived.
            LocalProtocolError: the server has an older version without this request.
        """

        async def query(owner_link: OwnerLink) -> bool:
            answer = await _query_owner(
                owner_link,
                messages.ExpireResponse,
                lambda req_id: messages.ExpireRequest(req_id, before, before_ms),
            )
            return answer.is_done

        return await self._query_until_answered(partition_id, query, is_bulk=False)

    async def replace_object(
        self,
        partition_id: PartitionId,
        name: str,
        first: TransactionId,
        last: TransactionId,
        *,
        token: int,
    ) -> messages.ObjectReplacementResponse:
        """Request that an archived object with these IDs is replaced from the log of a storage.

        Repeat the call until the answer states that the attempt has ended. With another random
        `token` of 63 bits, the owner begins another attempt.

        Raises:
            BadRequest: these IDs are not archived.
            LocalProtocolError: the server has an older version without this request.
        """

        async def query(owner_link: OwnerLink) -> messages.ObjectReplacementResponse:
            return await _query_owner(
                owner_link,
                messages.ObjectReplacementResponse,
                lambda req_id: messages.ObjectReplacementRequest(req_id, name, first, last, token),
            )

        return await self._query_until_answered(partition_id, query, is_bulk=False)

    async def has_legacy_server(self, partition_ids: Iterable[PartitionId]) -> bool:
        """Return whether a 0.13 server owns any of these partitions now."""

        async def query(owner_link: OwnerLink) -> bool:
            return owner_link.link.is_legacy_server

        answers = await query_partitions(
            partition_ids,
            lambda partition_id: self._query_until_answered(partition_id, query, is_bulk=False),
        )
        return any(answers.values())

    async def replica_sets(
        self, partition_ids: Iterable[PartitionId], *, linearizable: bool, group: int
    ) -> dict[int, ReplicaSet]:
        """Return the replicas of each partition; replicas in `group` are nearby (rule 3)."""
        query = partial(self.replicas, linearizable=linearizable)
        sets_by_partition = await query_partitions(partition_ids, query)
        if group == NO_GROUP:
            return sets_by_partition
        try:
            addresses = {
                address
                for replica_set in sets_by_partition.values()
                for address in replica_set.replicas
            }
            groups = await self._directory.groups(addresses)
        except errors.WaltzError as error:
            _log.warning("client.groups_read_failed error=%s", error)
            return sets_by_partition
        return {
            partition: replace(
                replica_set,
                replicas_in_group=tuple(
                    address for address in replica_set.replicas if groups.get(address) == group
                ),
            )
            for partition, replica_set in sets_by_partition.items()
        }

    async def fetch_range(self, partition_id: PartitionId, query: RangeQuery) -> RangeChunk:
        """Return one verified chunk of a range from the server.

        An empty chunk means that the log ends before the range; a quorum has confirmed this end.
        """
        while True:
            chunk = await self._query_until_answered(
                partition_id, partial(self._fetch_range_from, query), is_bulk=True
            )
            if chunk.next > query.first:
                return chunk
            # The server may have lost the partition without knowing it. Then newer transactions are
            # missing there.
            if await self.high_water_mark(partition_id, linearizable=True) < query.first:
                return chunk
            await asyncio.sleep(self._config.retry_interval_ms_min / 1000)

    async def _fetch_range_from(self, query: RangeQuery, owner_link: OwnerLink) -> RangeChunk:
        if owner_link.link.is_legacy_server:
            return chunk_from_legacy_records(
                query, await self._legacy_reads.read_range(owner_link, query)
            )
        answer = await _query_owner(
            owner_link, messages.RangeData, lambda req_id: range_request_of(req_id, query)
        )
        return chunk_from_server(owner_link.partition_id, query, answer)

    async def fetch_data_range(self, partition_id: PartitionId, query: RangeQuery) -> RangeChunk:
        """Return a range of records that are known to be committed; only IDs and data are valid."""

        async def query_owner(owner_link: OwnerLink) -> RangeChunk:
            if owner_link.link.is_legacy_server:
                return chunk_from_legacy_records(
                    query, await self._legacy_reads.read_data(owner_link, query)
                )
            return await self._fetch_range_from(query, owner_link)

        return await self._query_until_answered(partition_id, query_owner, is_bulk=True)

    async def fetch_data(self, partition_id: PartitionId, transaction_id: TransactionId) -> bytes:
        """Return one transaction's data."""
        answer = await self.query(
            partition_id,
            messages.TransactionDataResponse,
            lambda req_id: messages.TransactionDataRequest(req_id, transaction_id),
        )
        data, error_text = answer.result
        if data is None:
            raise errors.BadRequest(f"transaction {transaction_id}: {error_text}")
        return bytes(data)


def _archived_range_in(answer: messages.ReplicasResponse) -> ArchivedRange | None:
    if not answer.manifest:
        return None
    first, last = TransactionId(answer.first_available), TransactionId(answer.archived)
    return ArchivedRange(first, last, answer.manifest, answer.manifest_crc)


async def _query_owner(
    owner_link: OwnerLink, answer: type[AnswerT], make_request: Callable[[ReqId], ClientMessage]
) -> AnswerT:
    timeout_s = owner_link.timeout_s
    if owner_link.link.is_legacy_server:
        timeout_s = min(timeout_s, LEGACY_ANSWER_TIMEOUT_S.get(answer, timeout_s))
    return await owner_link.link.request(
        answer,
        make_request,
        client_id=NO_CLIENT_ID,
        partition_id=owner_link.partition_id,
        timeout_s=timeout_s,
    )


async def _request_mark(owner_link: OwnerLink) -> TransactionId:
    answer = await _query_owner(
        owner_link, messages.HighWaterMarkResponse, messages.HighWaterMarkRequest
    )
    return _checked_mark(owner_link, answer.high_water_mark)


def _checked_mark(owner_link: OwnerLink, mark: int) -> TransactionId:
    """Return a mark; raises NotOwned for the answer of a 0.13 server without a session."""
    if mark < BEFORE_FIRST:
        raise errors.NotOwned(
            f"{owner_link.owner.address}: partition {owner_link.partition_id} has no open store "
            "session"
        )
    return TransactionId(mark)


async def query_partitions(
    partition_ids: Iterable[PartitionId],
    query: Callable[[PartitionId], Coroutine[Any, Any, ResponseT]],
) -> dict[int, ResponseT]:
    """Query all partitions in parallel; raises the first error itself, not an exception group."""
    sorted_ids = sorted(partition_ids)
    answers = await run_parallel(query(partition_id) for partition_id in sorted_ids)
    return dict(zip(map(int, sorted_ids), answers, strict=True))


def _retry_after_ms(error: errors.WaltzError) -> int:
    return error.retry_after_ms if isinstance(error, errors.Overloaded) else 0
