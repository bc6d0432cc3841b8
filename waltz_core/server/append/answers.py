"""The answers to clients, except the outcomes of appends.

`served_partition.py` decides which request gets which answer and when; these functions build them.
"""

from collections.abc import Sequence

from waltz_core import errors
from waltz_core.records.record import ReplicaId, SessionId, TransactionId
from waltz_core.server.append.mounts import PartitionPlace
from waltz_core.server.locking.tickets import Ticket
from waltz_core.server.partition_events import (
    Answer,
    PartitionIdentity,
    PartitionLimits,
    Received,
    rejection,
)
from waltz_core.wire.messages import (
    ClientMessage,
    FlushRequest,
    FlushResponse,
    HighWaterMarkResponse,
    Mounted,
    MountRequest,
    MountResponse,
    MountState,
    MountWriter,
    ReplicasRequest,
    ReplicasResponse,
)


def reject(question: Received, error: errors.WaltzError) -> Answer:
    """Report an error."""
    message = question.message
    return rejection(question.connection, message.req_id, question.cost_bytes, error, message)


def reject_ticket(ticket: Ticket, error: errors.WaltzError) -> Answer:
    """Report an error that concerns a whole append."""
    return rejection(ticket.connection, ticket.req_id, ticket.cost_bytes, error, ticket.message)


def superseded(question: Received) -> Answer:
    """Report that a later request of the same client replaces this one."""
    error = errors.ConnectionSuperseded("a later mount of the client has taken its place")
    return reject(question, error)


def not_owned(question: Received, place: PartitionPlace) -> Answer:
    """Report that another server owns the partition."""
    if isinstance(question.message, MountRequest):
        return _state(question, MountState.NOT_READY)
    return reject(question, errors.NotOwned(f"this server does not own {place}"))


def reject_mount(question: Received, error: errors.WaltzError) -> Answer:
    """Report why a connection may not mount."""
    if isinstance(question.message, MountRequest) and isinstance(error, errors.ClientAhead):
        return _state(question, MountState.CLIENT_AHEAD)
    return reject(question, error)


def mounted(
    question: Received, mark: TransactionId, session_id: SessionId, limits: PartitionLimits
) -> Answer:
    """Report that a connection is mounted, and to a `MountWriter` the limits of its appends."""
    if not isinstance(question.message, MountWriter):
        return _state(question, MountState.READY)
    answer = Mounted(
        question.message.req_id,
        session_id,
        mark,
        limits.batch_rows_max,
        limits.batch_bytes_max,
        limits.connection_bytes_max,
    )
    return Answer(question.connection, answer, question.cost_bytes)


def with_mark(
    question: Received,
    mark: TransactionId,
    session_id: SessionId,
    replicas: Sequence[ReplicaId],
    identity: PartitionIdentity,
) -> Answer:
    """Answer a flush, or a request for the mark or for the replicas."""
    req_id = question.message.req_id
    answer: ClientMessage
    if isinstance(question.message, FlushRequest):
        answer = FlushResponse(req_id, mark)
    elif isinstance(question.message, ReplicasRequest):
        answer = ReplicasResponse(
            req_id,
            session_id,
            mark,
            tuple(replicas),
            identity.cluster_key,
            identity.partition_count,
        )
    else:
        answer = HighWaterMarkResponse(req_id, mark)
    return Answer(question.connection, answer, question.cost_bytes)


def _state(question: Received, state: MountState) -> Answer:
    message = MountResponse(question.message.req_id, state)
    return Answer(question.connection, message, question.cost_bytes)
