"""Sends storages the requests that normally only the owner of a store session sends.

The commands for disaster recovery need these requests to inspect and choose logs. The storage
applies the same rules to requests of these commands as to requests of a server.
`cluster/change/rebuilding.py` decides, based on the answers.

Rules:
    1. No server may have the same session. So `accept-replicas` uses a session that it has claimed
       in ZooKeeper, and `rebuild-metadata` uses sessions above all promised sessions.
    2. A connection is used for one task and then closed. When it closes, the storage ends the
       sessions of this connection.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from waltz_core.administration import member_connections
from waltz_core.cluster.change.rebuilding import NO_IDS, MaximumIds, ReportedLog
from waltz_core.errors import RemoteProtocolError, Unreachable, WaltzError, error_from_code
from waltz_core.records.record import (
    RECORD_HEADER,
    REQ_ID,
    Chain,
    PartitionId,
    ReplicaId,
    SessionId,
    TransactionId,
)
from waltz_core.transport.net import Link
from waltz_core.wire.messages import (
    DamageFound,
    LineageRequest,
    LineageResponse,
    Message,
    Nack,
    OpenRequest,
    Prepare,
    Prepared,
    RangeBytes,
    RangeForm,
    RangeRaw,
    ReplicaEnd,
    SetLowWaterMark,
    StorageMessage,
    SuccessResponse,
    WireProtocol,
)

DIAL_TIMEOUT_S: Final = 3.0
ANSWER_TIMEOUT_S: Final = 30.0
ID_RECORDS_MAX: Final = 10_000
_NO_CLIENT_ID: Final = -1
_ANY_STORAGE_ID: Final = bytes(16)


@dataclass(frozen=True, slots=True)
class ExpectedCluster:
    """The key and the partition count of the cluster to which a storage must belong."""

    cluster_key: bytes
    partition_count: int


@dataclass(frozen=True, slots=True)
class ClaimedSession:
    """A session of one partition that this command has claimed."""

    session_id: SessionId
    nonce: bytes


class OwnerConnection:
    """A connection to one storage, over which the command acts as the owner of a session."""

    def __init__(self, address: ReplicaId, link: Link, expected: ExpectedCluster) -> None:
        self.address = address
        self._link = link
        self._expected = expected

    @staticmethod
    async def open(address: ReplicaId, expected: ExpectedCluster) -> "OwnerConnection":
        """Connect; raises Unreachable, or ClusterKeyMismatch for a storage of another cluster."""
        link = await member_connections.dial(
            WireProtocol.STORAGE, address, timeout_s=DIAL_TIMEOUT_S
        )
        connection = OwnerConnection(address, link, expected)
        opening = OpenRequest(
            _NO_CLIENT_ID,
            _NO_CLIENT_ID,
            _NO_CLIENT_ID,
            expected.cluster_key,
            expected.partition_count,
        )
        try:
            (answer,) = await connection._request([opening])
            connection._check_answer(answer, SuccessResponse)
        except BaseException:
            connection.close()
            raise
        return connection

    async def prepare(
        self, sessions: Mapping[PartitionId, ClaimedSession]
    ) -> dict[PartitionId, Prepared | Nack]:
        """Request the storage to promise sessions; return each replica's state or error."""
        requests = [
            Prepare(
                session.session_id,
                number,
                partition_id,
                session.nonce,
                _ANY_STORAGE_ID,
                self._expected.cluster_key,
                self._expected.partition_count,
            )
            for number, (partition_id, session) in enumerate(sessions.items())
        ]
        answers = await self._request(requests)
        answers_by_partition: dict[PartitionId, Prepared | Nack] = {}
        for answer in answers:
            if not isinstance(answer, Prepared | Nack):
                raise self._unexpected_answer_error(answer)
            answers_by_partition[PartitionId(answer.partition_id)] = answer
        return answers_by_partition

    async def set_low_water_mark(
        self, partition_id: PartitionId, session: ClaimedSession, prepare_answer: Prepared
    ) -> None:
        """Store the session, and the log's end as low-water mark; then the log is trusted."""
        fields = (session.session_id, 1_000_000, partition_id)
        mark = SetLowWaterMark(*fields, prepare_answer.synced_max, bytes(prepare_answer.chain))
        (answer,) = await self._request([mark])
        self._check_answer(answer, ReplicaEnd)

    async def chain_at(
        self, partition_id: PartitionId, session: ClaimedSession, last: TransactionId
    ) -> Chain | None:
        """Return the chain hash of the log up to an ID; None if no batch ends there.

        Raises the error in the storage's answer.
        """
        first = TransactionId(last + 1)
        (answer,) = await self._request(
            [LineageRequest(session.session_id, 1_000_002, partition_id, first, first)]
        )
        self._check_answer(answer, LineageResponse)
        assert isinstance(answer, LineageResponse)
        is_batch_start = not answer.lineage or answer.lineage[0].first == first
        return Chain(bytes(answer.chain_before)) if is_batch_start else None

    async def highest_ids(
        self, partition_id: PartitionId, session: ClaimedSession, prepare_answer: Prepared
    ) -> MaximumIds:
        """Return the highest client ID and generation in the last `ID_RECORDS_MAX` records on disk.

        Raises the error in the storage's answer, for example if the storage cannot read a record.
        """
        last = prepare_answer.synced_max
        first = max(0, prepare_answer.start + 1, last - ID_RECORDS_MAX + 1)
        fields = (session.session_id, 1_000_001, partition_id)
        size = RECORD_HEADER.size * ID_RECORDS_MAX
        newest = NO_IDS
        while first <= last:
            window = (first, last, size, RangeForm.HEADERS)
            requests = RangeRaw(*fields, *window, whole_batches=False, reader=False)
            (answer,) = await self._request([requests])
            self._check_answer(answer, RangeBytes)
            assert isinstance(answer, RangeBytes)
            if not answer.count:
                raise self._unexpected_answer_error(answer)
            for _, packed_req_id, _ in RECORD_HEADER.iter_unpack(answer.records):
                client_id, generation, *_ = REQ_ID.unpack(packed_req_id)
                newest = newest.maximum_of_each(MaximumIds.of_record(client_id, generation))
            first += answer.count
        return newest

    def close(self) -> None:
        """Close the connection."""
        self._link.abort("done")

    async def _request(self, requests: Sequence[StorageMessage]) -> list[StorageMessage]:
        """Send requests, and return one answer for each request."""
        for request in requests:
            self._link.send(request)
        answers: list[StorageMessage] = []
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                while len(answers) < len(requests):
                    for message in await self._link.receive():
                        if isinstance(message, DamageFound):
                            continue  # this message answers no request
                        if not isinstance(message, StorageMessage):
                            raise self._unexpected_answer_error(message)
                        answers.append(message)
        except TimeoutError as error:
            raise Unreachable(
                f"{self.address} did not answer within {ANSWER_TIMEOUT_S} s"
            ) from error
        return answers

    def _check_answer(self, answer: Message, kind: type[Message]) -> None:
        if isinstance(answer, Nack):
            raise error_from_code(answer.error_code, f"{self.address}: {answer.message}")
        if not isinstance(answer, kind):
            raise self._unexpected_answer_error(answer)

    def _unexpected_answer_error(self, answer: object) -> RemoteProtocolError:
        return RemoteProtocolError(
            f"{self.address} answered with an unexpected message, {type(answer).__name__}"
        )


async def open_connections(
    storages: Sequence[ReplicaId], expected: ExpectedCluster
) -> tuple[dict[ReplicaId, OwnerConnection], dict[ReplicaId, str]]:
    """Connect to all storages concurrently; return the connections, and errors by storage."""
    connections: dict[ReplicaId, OwnerConnection] = {}
    failures: dict[ReplicaId, str] = {}

    async def dial(address: ReplicaId) -> None:
        try:
            connections[address] = await OwnerConnection.open(address, expected)
        except WaltzError as error:
            failures[address] = str(error)

    async with asyncio.TaskGroup() as tasks:
        for address in storages:
            tasks.create_task(dial(address))
    return {
        storage: connections[storage] for storage in storages if storage in connections
    }, failures


def reported_log(prepare_answer: Prepared) -> ReportedLog:
    """Return the description of a replica's log from its answer."""
    pairs = memoryview(prepare_answer.damaged)
    last_damaged_ids = (
        int.from_bytes(pairs[offset + 8 : offset + 16], "big")
        for offset in range(0, len(pairs), 16)
    )
    return ReportedLog(
        SessionId(prepare_answer.last_session),
        TransactionId(prepare_answer.synced_max),
        prepare_answer.suspect,
        any(last > prepare_answer.low_water_mark for last in last_damaged_ids),
    )
