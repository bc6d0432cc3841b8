"""What the append pipeline has its partition do.

The pipeline says these words, the partition carries them out, and whoever watches the two needs
nothing else of either.
"""

from typing import TypeAlias

from waltz_core.machine import Report
from waltz_core.records.record import LineageEntry
from waltz_core.replication.session_events import Batch
from waltz_core.server.locking.tickets import Ticket
from waltz_core.server.partition_events import Answer, Fetch
from waltz_core.values import value


@value(frozen=True, slots=True)
class SubmitBatch:
    """Hand these records to the store."""

    batch: Batch


@value(frozen=True, slots=True)
class BatchCommitted:
    """These records are in the log for ever."""

    entry: LineageEntry
    batch: Batch


@value(frozen=True, slots=True)
class Reached:
    """All that a flush or a mount waited for is final."""

    token: int


@value(frozen=True, slots=True)
class Ahead:
    """Have `tell_ahead` answer this when the session is proven, or is not (pipeline.py, rule 9)."""

    ticket: Ticket


AppendOutcome: TypeAlias = Answer | SubmitBatch | BatchCommitted | Reached | Ahead | Fetch | Report
