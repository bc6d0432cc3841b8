"""The outcomes that the append pipeline returns, and that its partition carries out."""

from typing import TypeAlias

from waltz_core.machine import Report
from waltz_core.records.record import LineageEntry
from waltz_core.replication.session_events import Batch
from waltz_core.server.locking.pending_appends import PendingAppend
from waltz_core.server.partition_events import Fetch, SendToClient
from waltz_core.values import value


@value(frozen=True, slots=True)
class SubmitBatch:
    """Submit a batch of records to the store."""

    batch: Batch


@value(frozen=True, slots=True)
class BatchCommitted:
    """A batch of records is committed."""

    entry: LineageEntry
    batch: Batch


@value(frozen=True, slots=True)
class BarrierReached:
    """All appends that a flush or a mount waited for are final."""

    token: int


@value(frozen=True, slots=True)
class ConfirmAheadOfLog:
    """Request a confirmation of the session by a quorum (pipeline.py, rule 9).

    Pass the result to `answer_ahead_of_log`.
    """

    pending: PendingAppend


AppendOutcome: TypeAlias = (
    SendToClient
    | SubmitBatch
    | BatchCommitted
    | BarrierReached
    | ConfirmAheadOfLog
    | Fetch
    | Report
)
