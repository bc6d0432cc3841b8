"""Replaces the batches of existing records by other batches.

The opening of a log replaces the batches of records that Waltz 0.13 has written. A running log
replaces the batches of records for which an owner sends other batches. Between the removal of the
old batches and the creation of the new batches, records have no batch. This state is made durable
first: by `UNBATCHED_CHAIN` in the acked marker, or by the slot that the opening of a log writes.

Rules:
    1. A batch's entry is in the segment of its last record. The entry is durable when the call
       returns.
    2. Old batches are removed newest first. The change of each file is synced before the next file
       is changed. New batches are added oldest first. So after a crash, the remaining batches cover
       the log from its beginning, without a gap.
    3. The header of a `.chn` file has the chain hash before its first batch. This header is written
       again when the batches of earlier segments have changed.
"""

from collections.abc import Sequence

from waltz_core.errors import BadFormat, ChecksumMismatch
from waltz_core.records.record import BEFORE_FIRST, Chain, LineageEntry, TransactionId
from waltz_core.storage.files.segment import Segment
from waltz_core.storage.files.segments import Segments


def drop_batches(segments: Segments, end: TransactionId) -> None:
    """Remove all batches that end after `end`, durably; the records stay (rule 2)."""
    current = segments.current.lineage  # it may have entries of removed records, too
    count = current.count
    if segments.last_id > end:
        current.truncate(_position_after(segments.current, end))
    current.truncate(current.position_of(TransactionId(end + 1)))
    if current.count < count:
        current.sync()
    for segment in reversed(segments.all[:-1]):
        if segment.last <= end:
            break
        if segment.lineage.count:
            segment.lineage.truncate(_position_after(segment, end))
            segment.lineage.sync()


def add_batches(segments: Segments, entries: Sequence[LineageEntry]) -> None:
    """Add batches after the existing batches, durably.

    Their records must already exist (rule 1).
    """
    for segment in segments.all:
        segment_entries = [
            entry for entry in entries if segment.first <= entry.last < segment.next_id
        ]
        if segment_entries:
            segment.append_entries(segment_entries, BEFORE_FIRST)
            segment.sync()


def rewrite_chain_headers(segments: Segments) -> None:
    """Rewrite `.chn` headers whose chain hash changed with the batches of earlier segments."""
    for position, segment in enumerate(segments.all):
        chain = chain_before(segments, position, within=False)
        if segment.lineage.chain_before != chain:
            segment.rewrite_lineage_header(chain)


def _position_after(segment: Segment, end: TransactionId) -> int:
    """Return how many entries of a segment end at or before an ID; stop at an invalid entry."""
    count = 0
    try:
        for entry in segment.lineage.entries(0):
            if entry.last > end:
                break
            count += 1
    except (BadFormat, ChecksumMismatch):
        pass
    return count


def chain_before(segments: Segments, position: int, *, within: bool = True) -> Chain:
    """Return the chain hash after all batches of the segments up to a position.

    If `within` is False, the segment at this position is excluded.
    """
    for index in range(position if within else position - 1, -1, -1):
        lineage = segments.all[index].lineage
        if lineage.count:
            return lineage.chain_at(lineage.count)
    return segments.oldest_chain()
