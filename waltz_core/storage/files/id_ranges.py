"""Arithmetic on sorted lists of disjoint ID ranges, such as the known damage of a log.

A list has at most as many ranges as fit into a slot.
"""

from itertools import pairwise

from waltz_core.records.record import TransactionId
from waltz_core.storage.files.format import DAMAGED_RANGES_MAX, IdRange


def add_damage(damaged: tuple[IdRange, ...], added: IdRange) -> tuple[IdRange, ...]:
    """Add a damaged range, and return the sorted, merged ranges, at most `DAMAGED_RANGES_MAX`.

    If there are too many, the two nearest ranges are joined: the records between them count as
    damaged, too. This costs an unnecessary repair, but no wrong record is ever returned.
    """
    merged: list[IdRange] = []
    for ids in sorted((*damaged, added)):
        if merged and ids.first <= merged[-1].last + 1:
            merged[-1] = IdRange(merged[-1].first, max(merged[-1].last, ids.last))
        else:
            merged.append(ids)
    while len(merged) > DAMAGED_RANGES_MAX:
        gaps = [after.first - before.last for before, after in pairwise(merged)]
        position = gaps.index(min(gaps))
        merged[position : position + 2] = [
            IdRange(merged[position].first, merged[position + 1].last)
        ]
    return tuple(merged)


def remove_damage(damaged: tuple[IdRange, ...], removed: IdRange) -> tuple[IdRange, ...]:
    """Remove IDs from the ranges; if too many ranges would remain, return the ranges unchanged."""
    remaining: list[IdRange] = []
    for first, last in damaged:
        before = IdRange(first, min(last, TransactionId(removed.first - 1)))
        after = IdRange(max(first, TransactionId(removed.last + 1)), last)
        remaining.extend(part for part in (before, after) if part.first <= part.last)
    return (
        tuple(remaining[:DAMAGED_RANGES_MAX]) if len(remaining) <= DAMAGED_RANGES_MAX else damaged
    )


def damage_up_to(damaged: tuple[IdRange, ...], last: TransactionId) -> tuple[IdRange, ...]:
    """Return the ranges without the IDs above the last ID of a log."""
    return tuple(IdRange(ids.first, min(ids.last, last)) for ids in damaged if ids.first <= last)


def damage_after(damaged: tuple[IdRange, ...], start: TransactionId) -> tuple[IdRange, ...]:
    """Return the ranges without the IDs at or below the start of a log."""
    first = TransactionId(start + 1)
    return tuple(IdRange(max(ids.first, first), ids.last) for ids in damaged if ids.last >= first)


def count_ids(ranges: tuple[IdRange, ...]) -> int:
    """Return the number of IDs in ranges that do not overlap."""
    return sum(last - first + 1 for first, last in ranges)


def format_ranges(ranges: tuple[IdRange, ...]) -> str:
    """Format ranges for a log line."""
    return ",".join(f"{first}..{last}" for first, last in ranges)
