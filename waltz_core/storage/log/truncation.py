"""A truncation: first the intent is written, then the files are changed, then the slot is written.

A session begins a truncation, and the next opening of the log may have to finish it. The resulting
log must be the same in both cases.

Rules:
    1. The intent is durable in the slot before anything is truncated. From then on the truncation
       is carried out, if necessary by the next opening of the log.
    2. Each step may be repeated: a step for which the disk was full is repeated when there is
       space.
    3. If a batch is truncated in its middle, its beginning stays as a batch with its own chain
       hash. The intent contains this chain hash, because the records from which it is computed may
       not exist after the truncation.
"""

from dataclasses import replace

from waltz_core.errors import ChecksumMismatch
from waltz_core.records.record import GENESIS_CHAIN, Chain, LineageEntry, TransactionId, next_chain
from waltz_core.storage.files.format import UNBATCHED_CHAIN, AckedMarker, Slot, TruncateIntent
from waltz_core.storage.files.id_ranges import damage_up_to
from waltz_core.storage.files.segments import Segments


def slot_with_intent(slot: Slot, segments: Segments, last_to_keep: TransactionId) -> Slot:
    """Return the slot with the intent, without state that the truncation makes invalid (rule 1).

    Raises:
        ChecksumMismatch: the batch that the truncation shortens cannot be read.
    """
    shortened, end = plan_truncation(segments, last_to_keep)
    provisional = slot.provisional
    if provisional is not None and last_to_keep < provisional.low_water_mark <= segments.last_id:
        provisional = None  # the log will end below this mark, so the mark must not be confirmed
    # If the log never reached the provisional mark, a 0.13 server has set this mark. The mark is
    # kept, because it shows that the log is incomplete.
    return replace(
        slot,
        truncate=TruncateIntent(last_to_keep, shortened),
        acked=min(
            slot.acked, _acked_marker_at(slot, *end), key=lambda marker: marker.transaction_id
        ),
        provisional=provisional,
    )


def plan_truncation(
    segments: Segments, last_to_keep: TransactionId
) -> tuple[LineageEntry | None, AckedMarker]:
    """Return the entry of the batch that the truncation shortens, and the batch end before it."""
    is_whole = last_to_keep <= segments.start.transaction_id
    entry = None if is_whole else segments.entry_of(last_to_keep)
    if entry is None or entry.last == last_to_keep:
        return None, AckedMarker(last_to_keep, segments.chain_at(last_to_keep) or GENESIS_CHAIN)
    chain, _ = segments.entries(entry.last, entry.last, 1)
    crcs = segments.record_crcs(entry.first, last_to_keep)
    if crcs is None:
        raise ChecksumMismatch(
            f"records {entry.first}..{last_to_keep}: cannot shorten their batch, because it "
            "cannot be read"
        )
    shortened = entry._replace(
        last=last_to_keep,
        chain=next_chain(chain, entry.first, last_to_keep, entry.session_id, crcs),
    )
    return shortened, AckedMarker(TransactionId(entry.first - 1), chain)


def carry_out(segments: Segments, intent: TruncateIntent) -> None:
    """Truncate the files as a durable intent states; the changes are durable on return."""
    segments.truncate(*intent)
    segments.sync()
    segments.sync_index()


def slot_after_truncation(slot: Slot, segments: Segments) -> Slot:
    """Return the slot after a truncation was carried out, without the intent."""
    return replace(
        slot,
        truncate=None,
        acked=_acked_marker_at(slot, segments.last_id, segments.chain),
        damaged=damage_up_to(slot.damaged, segments.last_id),
    )


def _acked_marker_at(slot: Slot, last: TransactionId, chain: Chain) -> AckedMarker:
    """Return the acked marker for an ID.

    If the records have batches, it contains the chain hash.
    """
    return AckedMarker(last, UNBATCHED_CHAIN if slot.is_unbatched else chain)
