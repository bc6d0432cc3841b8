"""Filling damaged records of a log with good ones.

Why it stands alone: it is the only way by which bytes below the low-water mark ever change, so what
it lets in can be read in one place.

Rules:
    1. A hole is filled from its beginning on, so that what is left of it is one range again.
    2. Only records that are right by themselves are written, and only into known damage.
    3. The damage is forgotten last, and not before the chain of each batch that is whole again is
       what it was: a record of the right id may still be that of another history. One beside it
       that is found wrong by that is noted as damaged: it is no fault of what was repaired.
    4. Where batches cannot be read either, their records come first: from these they are made anew.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from waltz_core.errors import BadFormat, BadRequest, ChecksumMismatch, ReadFailed
from waltz_core.record import TransactionId
from waltz_core.storage.batch_checks import check_repaired
from waltz_core.storage.format import IdRange, Slot
from waltz_core.storage.id_ranges import with_damage, without_damage
from waltz_core.storage.segments import Segments, first_wrong

I64 = npt.NDArray[np.int64]


def fill(
    slot: Slot,
    segments: Segments,
    first: TransactionId,
    lengths: I64,
    records: bytes | memoryview,
) -> tuple[IdRange, ...]:
    """Write records into a hole, durably; return the damage that is known from then on.

    Raises:
        BadRequest: `first` does not begin a damaged range, or the records go beyond it.
        ChecksumMismatch: a record's CRC does not fit, or its batch's chain does not.
        BadFormat: the bytes do not fit into the hole.
    """
    last = TransactionId(first + int(lengths.size) - 1)
    hole = next((one for one in slot.damaged if one.first == first), None)
    if hole is None or not first <= last <= hole.last:
        raise BadRequest(
            f"partition {slot.partition_id}: expected ids from the beginning of a damaged range, "
            f"found {first}..{last}"
        )
    bad = first_wrong(records, lengths, first)
    if bad is not None:
        raise ChecksumMismatch(
            f"partition {slot.partition_id}: record {first + bad} is not what was sent"
        )
    segments.fill(first, lengths, memoryview(records).cast("B"), hole)
    filled = IdRange(first, last)
    left = without_damage(slot.damaged, filled)
    beside = _batches_anew(segments, filled, left)
    if beside is None:
        return left
    for found in beside:
        left = with_damage(left, found)
    for found in check_repaired(segments, filled, left):  # rule 3
        left = with_damage(left, found)
    return left


def _batches_anew(
    segments: Segments, filled: IdRange, damaged: Sequence[IdRange]
) -> tuple[IdRange, ...] | None:
    """Make the batches of what was filled anew if they cannot be read (rule 4).

    Return the damage that came to light by that; None if they have to wait for other records.

    Raises:
        ChecksumMismatch, ReadFailed: only another opening can tell what they were.
    """
    try:
        segments.entries(*filled, filled.last - filled.first + 1)
    except (BadFormat, ChecksumMismatch, ReadFailed):
        for lost in segments.lost_batches(*filled):
            if any(one.first <= lost.last and lost.first <= one.last for one in damaged):
                return None
        return segments.mend(*filled)
    return ()
