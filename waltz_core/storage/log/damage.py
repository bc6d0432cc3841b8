"""Replaces damaged records of a log by valid copies.

Only this code changes bytes below the low-water mark.

Rules:
    1. A damaged range is repaired from its beginning, so that the remaining damage is still one
       range.
    2. Only records whose own checksum and ID are valid are written, and only into known damage.
    3. The damage is removed from the slot last. Before that, the chain hash of each batch without
       further damage is verified, because a record with the right ID may belong to a log that has
       diverged. If the verification finds another wrong record in the batch, this record is noted
       as damaged, and the repair is kept.
    4. If the lineage entry of a batch is unreadable, too, only the chain hash of the next batch can
       prove the content of the entry. So the owner must send the records of this batch, and then
       the records of the next batch. If several consecutive entries are lost, or if the last entry
       of a segment is lost, nothing proves the content of these entries, and the repair is
       rejected.
"""

from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from waltz_core.errors import BadFormat, BadRequest, ChecksumMismatch, ReadFailed
from waltz_core.records.record import TransactionId
from waltz_core.storage.files.batch_checks import check_repaired_batches
from waltz_core.storage.files.format import IdRange, Slot
from waltz_core.storage.files.id_ranges import add_damage, format_ranges, remove_damage
from waltz_core.storage.files.segments import Segments, first_invalid_record

I64 = npt.NDArray[np.int64]


def repair_damage(
    slot: Slot,
    segments: Segments,
    first: TransactionId,
    lengths: I64,
    records: bytes | memoryview,
) -> tuple[IdRange, ...]:
    """Write valid records into a damaged range, durably; return the ranges that are still damaged.

    Raises:
        BadRequest: `first` does not begin a damaged range, or the records go beyond this range.
        ChecksumMismatch: the CRC of a record or the chain hash of its batch does not match.
        BadFormat: the records do not have the size of the damaged bytes.
    """
    last = TransactionId(first + int(lengths.size) - 1)
    damaged_range = next((ids for ids in slot.damaged if ids.first == first), None)
    if damaged_range is None or not first <= last <= damaged_range.last:
        raise BadRequest(
            f"partition {slot.partition_id}: expected records that begin at the start of "
            f"a damaged range, found {first}..{last}; the damaged ranges are "
            f"{format_ranges(slot.damaged) or 'none'}"
        )
    wrong_index = first_invalid_record(records, lengths, first)
    if wrong_index is not None:
        raise ChecksumMismatch(
            f"partition {slot.partition_id}: the copy of record {first + wrong_index} is damaged "
            "or has another transaction ID"
        )
    segments.fill(first, lengths, memoryview(records).cast("B"), damaged_range)
    filled = IdRange(first, last)
    remaining = remove_damage(slot.damaged, filled)
    _prove_lost_batches(segments, filled, remaining)
    for new_damage in check_repaired_batches(segments, filled, remaining):  # rule 3
        remaining = add_damage(remaining, new_damage)
    return remaining


def _prove_lost_batches(segments: Segments, filled: IdRange, damaged: Sequence[IdRange]) -> None:
    """Rebuild unreadable batch entries whose content the filled records prove (rule 4).

    Raises:
        ChecksumMismatch, ReadFailed: the records do not prove the entries.
    """
    with suppress(BadFormat, ChecksumMismatch, ReadFailed):
        segments.entries(*filled, filled.last - filled.first + 1)
        return
    for lost in segments.lost_batches(*filled):
        is_still_damaged = any(
            ids.first <= lost.ids.last and lost.ids.first <= ids.last for ids in damaged
        )
        is_touched = filled.first <= lost.ids.last and lost.ids.first <= filled.last
        if (
            is_touched
            and not (is_still_damaged and lost.is_provable)
            and not segments.rebuild_lost_batch(lost)
        ):
            raise ChecksumMismatch(
                f"the unreadable batch entries of transactions {lost.ids.first}..{lost.ids.last} "
                f"cannot be rebuilt with the copied records {filled.first}..{filled.last}"
            )
