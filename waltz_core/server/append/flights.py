"""What the append pipeline has given ids to, until that is final: drafts, and batches in flight.

These are the two shapes of what lies between judgement and outcome, and the pipeline's rules about
them are easier to read without their fields.
"""

from dataclasses import dataclass, field
from typing import Final

from waltz_core.records.batches import EncodedBatch
from waltz_core.records.lock_blocks import TOLD_APART_MAX
from waltz_core.records.record import LineageEntry
from waltz_core.replication.session_events import Batch
from waltz_core.server.append.outcomes import Outcome
from waltz_core.server.locking.tickets import Ticket

# From the right place on it takes each byte from a number; a loop would take long for many locks.
_FROM_255_DOWN: Final = bytes(range(255, -1, -1)) * 2


@dataclass(slots=True)
class Flight:
    """A batch in flight, and who is to be told when it has landed."""

    entry: LineageEntry
    batch: Batch
    submitted_ms: int
    tickets: list[Ticket]
    is_large: bool = False
    waiting: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Draft:
    """What one turn has taken so far, and what was left to be gathered with it.

    `waiting` are the tokens of those who wait until all of it is final; `is_urgent`: something in
    it goes to the store at once, whatever is in flight.
    """

    parts: list[EncodedBatch] = field(default_factory=list)
    locks: list[bytes] = field(default_factory=list)
    writers: list[bytes] = field(default_factory=list)  # of each lock, its row in its part
    tickets: list[Ticket] = field(default_factory=list)
    out: list[Outcome] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    is_large: bool = False
    is_urgent: bool = False
    size_bytes: int = 0  # what its records take; asked for at every turn

    def add(self, part: EncodedBatch, locks: bytes, writers: bytes) -> None:
        """Add records that were given ids, their locks, and of which record each lock is."""
        self.parts.append(part)
        self.locks.append(locks)
        self.writers.append(writers)
        self.size_bytes += len(part.records)

    def behind(self) -> bytes:
        """Return how far each lock's writer is behind the last id; none where that is too far."""
        last = self.parts[-1].last
        if last - self.parts[0].first >= TOLD_APART_MAX:
            return b""
        return b"".join(
            rows.translate(_FROM_255_DOWN[255 - (last - part.first) :][:256])
            for part, rows in zip(self.parts, self.writers, strict=True)
        )
