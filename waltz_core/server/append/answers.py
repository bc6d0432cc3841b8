"""Builds the answers to clients, except the outcomes of appends.

`served_partition.py` decides which request gets which answer, and when. The functions of this
module only build the answers.
"""

import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from waltz_core import errors
from waltz_core.cluster.znodes.model import ArchivedMark
from waltz_core.records.record import ReplicaId, SessionId, TransactionId
from waltz_core.replication.session_events import ArchiveBacklog, ReplacementOutcome
from waltz_core.server.append.mounts import PartitionPosition
from waltz_core.server.append.recent_rejections import RejectionEntry
from waltz_core.server.locking.pending_appends import PendingAppend
from waltz_core.server.partition_events import (
    PartitionIdentity,
    PartitionLimits,
    RequestReceived,
    SendToClient,
    error_answer,
)
from waltz_core.wire.messages import (
    ClientMessage,
    ExpireResponse,
    FlushRequest,
    FlushResponse,
    HighWaterMarkResponse,
    Mounted,
    MountRequest,
    MountResponse,
    MountState,
    MountWriter,
    ObjectReplacementResponse,
    RejectionsResponse,
    ReplicasRequest,
    ReplicasResponse,
)


class ArchivePosition(NamedTuple):
    """The state of a partition's archive: its recorded mark, and the backlog.

    `interval_ms` is the interval between two archive attempts; 0 if the server archives nothing.
    """

    recorded_mark: ArchivedMark
    backlog: ArchiveBacklog | None
    interval_ms: int


def request_error_answer(request: RequestReceived, error: errors.WaltzError) -> SendToClient:
    """Build the answer that reports an error for a request."""
    message = request.message
    return error_answer(request.connection, message.req_id, request.cost_bytes, error, message)


def append_error_answer(pending: PendingAppend, error: errors.WaltzError) -> SendToClient:
    """Build the answer that reports an error for a whole append."""
    return error_answer(
        pending.connection, pending.req_id, pending.cost_bytes, error, pending.message
    )


def superseded_answer(request: RequestReceived) -> SendToClient:
    """Build the answer to a request that a later mount of the same client has replaced."""
    error = errors.ConnectionSuperseded("a later mount of the same client has replaced this mount")
    return request_error_answer(request, error)


def not_owned_answer(request: RequestReceived, position: PartitionPosition) -> SendToClient:
    """Build the answer to a request for a partition that this server does not own."""
    if isinstance(request.message, MountRequest):
        return _mount_state_answer(request, MountState.NOT_READY)
    return request_error_answer(request, errors.NotOwned(f"this server does not own {position}"))


def mount_error_answer(request: RequestReceived, error: errors.WaltzError) -> SendToClient:
    """Build the answer that rejects a mount, with the reason."""
    if isinstance(request.message, MountRequest) and isinstance(error, errors.ClientAheadOfLog):
        return _mount_state_answer(request, MountState.CLIENT_AHEAD)
    return request_error_answer(request, error)


def mounted_answer(
    request: RequestReceived, mark: TransactionId, session_id: SessionId, limits: PartitionLimits
) -> SendToClient:
    """Build the answer to a successful mount; for a `MountWriter`, with the append limits."""
    if not isinstance(request.message, MountWriter):
        return _mount_state_answer(request, MountState.READY)
    answer = Mounted(
        request.message.req_id,
        session_id,
        mark,
        limits.batch_rows_max,
        limits.batch_bytes_max,
        limits.connection_bytes_max,
    )
    return SendToClient(request.connection, answer, request.cost_bytes)


def mark_answer(
    request: RequestReceived,
    mark: TransactionId,
    session_id: SessionId,
    replicas: Sequence[ReplicaId],
    identity: PartitionIdentity,
    archived: ArchivePosition | None,
) -> SendToClient:
    """Build the answer to a flush, or to a request for the high-water mark or the replicas."""
    req_id = request.message.req_id
    answer: ClientMessage
    if isinstance(request.message, FlushRequest):
        answer = FlushResponse(req_id, mark)
    elif isinstance(request.message, ReplicasRequest):
        answer = ReplicasResponse(
            req_id,
            session_id,
            mark,
            tuple(replicas),
            identity.cluster_key,
            identity.partition_count,
        )
        if archived is not None:
            recorded, backlog, interval_ms = archived
            byte_count = None if backlog is None else backlog.byte_count
            answer = replace(
                answer,
                first_available=recorded.first,
                archived=recorded.last,
                manifest=recorded.manifest,
                manifest_crc=recorded.manifest_crc,
                unarchived_bytes=-1 if byte_count is None else byte_count,
                archive_interval_ms=interval_ms,
            )
    else:
        answer = HighWaterMarkResponse(req_id, mark)
    return SendToClient(request.connection, answer, request.cost_bytes)


def rejections_answer(request: RequestReceived, rows: Sequence[RejectionEntry]) -> SendToClient:
    """Build the answer to a request for the newest rejections."""
    int64s = struct.Struct(f">{len(rows)}q")
    answer = RejectionsResponse(
        request.message.req_id,
        int64s.pack(*(row.stamp_ms for row in rows)),
        b"".join(row.req_id.to_bytes() for row in rows),
        bytes(row.reason for row in rows),
        int64s.pack(*(row.conflict for row in rows)),
    )
    return SendToClient(request.connection, answer, request.cost_bytes)


def expiry_answer(
    request: RequestReceived, archived: ArchivedMark | None, *, is_done: bool
) -> SendToClient:
    """Build the answer to a request for an expiry of the archive."""
    if archived is None:
        error_text = "no transaction of the partition is archived, so none can expire"
        return request_error_answer(request, errors.BadRequest(error_text))
    answer = ExpireResponse(request.message.req_id, archived.first, is_done)
    return SendToClient(request.connection, answer, request.cost_bytes, request.message)


def replacement_answer(
    request: RequestReceived, outcome: ReplacementOutcome | None
) -> SendToClient:
    """Build the answer to an object replacement; without an outcome, the work is in progress."""
    req_id = request.message.req_id
    answer = ObjectReplacementResponse(
        req_id, is_ended=False, is_replaced=False, storage="", failures=()
    )
    if outcome is not None:
        answer = ObjectReplacementResponse(
            req_id,
            is_ended=True,
            is_replaced=outcome.is_replaced,
            storage=outcome.replica or "",
            failures=outcome.failures,
        )
    return SendToClient(request.connection, answer, request.cost_bytes, request.message)


def _mount_state_answer(request: RequestReceived, state: MountState) -> SendToClient:
    message = MountResponse(request.message.req_id, state)
    return SendToClient(request.connection, message, request.cost_bytes)
