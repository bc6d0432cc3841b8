"""The outcomes that the append pipeline returns and its partition carries out."""

from typing import TypeAlias

from waltz_core.machine import Report
from waltz_core.records.record import LineageEntry
from waltz_core.replication.session_events import Batch
from waltz_core.server.locking.pending_appends import PendingAppend
from waltz_core.server.partition_events import Fetch, SendToClient
from waltz_core.values import value


@value(frozen=True, slots=True)
class SubmitBatch:
    """Hand these records to the store."""

    batch: Batch


@value(frozen=True, slots=True)
class BatchCommitted:
    """These records are committed."""

    entry: LineageEntry
    batch: Batch


@value(frozen=True, slots=True)
class BarrierReached:
    """Everything that a flush or a mount waited for is final."""

    token: int


@value(frozen=True, slots=True)
class AheadOfLog:
    """Prove the session, then answer this with `answer_ahead` (pipeline.py, rule 9)."""

    pending: PendingAppend


AppendOutcome: TypeAlias = (
    SendToClient | SubmitBatch | BatchCommitted | BarrierReached | AheadOfLog | Fetch | Report
)
