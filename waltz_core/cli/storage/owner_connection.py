"""Sends storages the requests of a session's owner: promise a session, read it, mark the log.

A server sends the same messages in its sessions, and a storage applies the same rules to them.
`cluster/change/rebuilding.py` decides, based on the answers.

Rules:
    1. ZooKeeper has allocated the session that a storage promises to this command only.
    2. A connection serves one purpose, and is closed afterwards, which ends its promises.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from waltz_core.cli import command_connections
from waltz_core.cluster.change.rebuilding import NO_IDS, MaximumIds, ReportedLog
from waltz_core.errors import RemoteProtocolError, Unreachable, WaltzError, from_code
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
ANSWER_S: Final = 30.0
IDS_ROWS_MAX: Final = 10_000
_NO_CLIENT_ID: Final = -1
_ANY_STORAGE: Final = bytes(16)


@dataclass(frozen=True, slots=True)
class ExpectedCluster:
    """The cluster to which a storage must belong."""

    cluster_key: bytes
    partition_count: int


@dataclass(frozen=True, slots=True)
class ClaimedSession:
    """A session of one partition that this command has claimed."""

    session_id: SessionId
    nonce: bytes


class OwnerConnection:
    """A connection to one storage, for the requests of a session's owner."""

    def __init__(self, address: ReplicaId, link: Link, facts: ExpectedCluster) -> None:
        self.address = address
        self._link = link
        self._facts = facts

    @staticmethod
    async def open(address: ReplicaId, facts: ExpectedCluster) -> "OwnerConnection":
        """Connect; raises Unreachable, or ClusterKeyMismatch for a storage of another cluster."""
        link = await command_connections.dial(
            WireProtocol.STORAGE, address, timeout_s=DIAL_TIMEOUT_S
        )
        made = OwnerConnection(address, link, facts)
        opening = OpenRequest(
            _NO_CLIENT_ID, _NO_CLIENT_ID, _NO_CLIENT_ID, facts.cluster_key, facts.partition_count
        )
        try:
            (answer,) = await made._request([opening])
            made._expect(answer, SuccessResponse)
        except BaseException:
            made.close()
            raise
        return made

    async def prepare(
        self, sessions: Mapping[PartitionId, ClaimedSession]
    ) -> dict[PartitionId, Prepared | Nack]:
        """Request the storage to promise sessions; return its state, or its error, by partition."""
        requests = [
            Prepare(
                session.session_id,
                number,
                partition_id,
                session.nonce,
                _ANY_STORAGE,
                self._facts.cluster_key,
                self._facts.partition_count,
            )
            for number, (partition_id, session) in enumerate(sessions.items())
        ]
        answers = await self._request(requests)
        found: dict[PartitionId, Prepared | Nack] = {}
        for answer in answers:
            if not isinstance(answer, Prepared | Nack):
                raise self._unexpected_answer_error(answer)
            found[PartitionId(answer.partition_id)] = answer
        return found

    async def set_mark(
        self, partition_id: PartitionId, session: ClaimedSession, prepared: Prepared
    ) -> None:
        """Store the session and the low-water mark at the end of the log, which is then trusted."""
        fields = (session.session_id, 1_000_000, partition_id)
        mark = SetLowWaterMark(*fields, prepared.synced_max, bytes(prepared.chain))
        (answer,) = await self._request([mark])
        self._expect(answer, ReplicaEnd)

    async def chain_at(
        self, partition_id: PartitionId, session: ClaimedSession, last: TransactionId
    ) -> Chain | None:
        """Return the chain hash of the log up to an ID; None if the ID is inside a batch.

        Raises the error in the storage's answer.
        """
        first = TransactionId(last + 1)
        (answer,) = await self._request(
            [LineageRequest(session.session_id, 1_000_002, partition_id, first, first)]
        )
        self._expect(answer, LineageResponse)
        assert isinstance(answer, LineageResponse)
        begins = not answer.lineage or answer.lineage[0].first == first
        return Chain(bytes(answer.chain_before)) if begins else None

    async def newest_ids(
        self, partition_id: PartitionId, session: ClaimedSession, prepared: Prepared
    ) -> MaximumIds:
        """Return the highest client ID and generation in the last `IDS_ROWS_MAX` records on disk.

        Raises the error in the storage's answer, also if it cannot read a record.
        """
        last = prepared.synced_max
        first = max(0, prepared.start + 1, last - IDS_ROWS_MAX + 1)
        fields = (session.session_id, 1_000_001, partition_id)
        size = RECORD_HEADER.size * IDS_ROWS_MAX
        newest = NO_IDS
        while first <= last:
            window = (first, last, size, RangeForm.HEADERS)
            requests = RangeRaw(*fields, *window, whole_batches=False, reader=False)
            (answer,) = await self._request([requests])
            self._expect(answer, RangeBytes)
            assert isinstance(answer, RangeBytes)
            if not answer.count:
                raise self._unexpected_answer_error(answer)
            for _, packed, _ in RECORD_HEADER.iter_unpack(answer.records):
                client_id, generation, *_ = REQ_ID.unpack(packed)
                newest = newest.maximum_with(MaximumIds.of_record(client_id, generation))
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
            async with asyncio.timeout(ANSWER_S):
                while len(answers) < len(requests):
                    for message in await self._link.receive():
                        if isinstance(message, DamageFound):
                            continue  # this message answers no request
                        if not isinstance(message, StorageMessage):
                            raise self._unexpected_answer_error(message)
                        answers.append(message)
        except TimeoutError as error:
            raise Unreachable(f"{self.address} did not answer within {ANSWER_S} s") from error
        return answers

    def _expect(self, answer: Message, kind: type[Message]) -> None:
        if isinstance(answer, Nack):
            raise from_code(answer.error_code, f"{self.address}: {answer.message}")
        if not isinstance(answer, kind):
            raise self._unexpected_answer_error(answer)

    def _unexpected_answer_error(self, answer: object) -> RemoteProtocolError:
        return RemoteProtocolError(
            f"{self.address} answered with an unexpected message, {type(answer).__name__}"
        )


async def open_links(
    storages: Sequence[ReplicaId], facts: ExpectedCluster
) -> tuple[dict[ReplicaId, OwnerConnection], dict[ReplicaId, str]]:
    """Connect to all storages concurrently; return the connections, and errors by storage."""
    links: dict[ReplicaId, OwnerConnection] = {}
    failures: dict[ReplicaId, str] = {}

    async def dial(address: ReplicaId) -> None:
        try:
            links[address] = await OwnerConnection.open(address, facts)
        except WaltzError as error:
            failures[address] = str(error)

    async with asyncio.TaskGroup() as tasks:
        for address in storages:
            tasks.create_task(dial(address))
    return {each: links[each] for each in storages if each in links}, failures


def log_of(prepared: Prepared) -> ReportedLog:
    """Return the description of a log from the answer of its replica."""
    pairs = memoryview(prepared.damaged)
    lasts = (int.from_bytes(pairs[at + 8 : at + 16], "big") for at in range(0, len(pairs), 16))
    return ReportedLog(
        SessionId(prepared.last_session),
        TransactionId(prepared.synced_max),
        prepared.suspect,
        any(last > prepared.low_water_mark for last in lasts),
    )
