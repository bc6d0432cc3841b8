"""What an original's server has written through this storage: records that have no batches yet.

Why it stands alone: the log that is open, its truncations and its next opening all have to know of
it, and none of them is the place of another.

S 0 knows records and nothing else, and a replica that lags gets them in other portions than the
others had. Batches made of those portions would differ between replicas that hold the same records.
So none are made: the acked marker of a log that holds such records has no chain, but this word in
its place. The next opening gives them batches, from their ids alone (`recovery.py`, rule 4).

Rules:
    1. The word is durable before the first such record is written.
    2. The marker goes on to vouch for records: what it names was synced, and its index too.
    3. It goes away with the opening that has made the batches, and with that only.
"""

from typing import Final

from waltz_core.record import Chain, TransactionId
from waltz_core.storage.format import Marker, Slot
from waltz_core.storage.segments import Segments

# No hash that anything has; the marker of an empty log has the genesis chain.
UNBATCHED: Final = Chain(b"\xff" * 16)


def is_unbatched(slot: Slot) -> bool:
    """Tell if records may lie here that have no batches."""
    return slot.acked.chain == UNBATCHED


def marker(slot: Slot, last: TransactionId, chain: Chain) -> Marker:
    """Return the marker for an id, and the chain there if this log has chains."""
    return Marker(last, UNBATCHED if is_unbatched(slot) else chain)


def marker_at_roll(slot: Slot, segments: Segments) -> Marker | None:
    """Return what the marker may vouch for when all segments are synced; None for nothing."""
    if is_unbatched(slot):
        return Marker(segments.last, UNBATCHED)
    end = segments.lineage_end()
    return None if end is None else Marker(end.last, end.chain)
