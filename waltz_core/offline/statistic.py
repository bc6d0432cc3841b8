"""Counts the content of one segment: sizes, IDs, batches, sessions, times, index entries.

It decodes only the frames of records, not their data, so it is as fast as the disk. `verify` checks
whether the records are valid.

Rules:
    1. Memory use grows with the number of different sizes, clients and sessions, not with the
       number of records.
    2. Percentiles of the record data sizes use the nearest-rank method, so each percentile is the
       size of a record.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from waltz_core.offline.files import OpenFile, segment_path
from waltz_core.offline.layout import (
    FILE_HEADER_BYTES,
    OFFSET_BYTES,
    RECORD,
    RECORD_FRAME_BYTES,
    FileHeader,
    decode_file_header,
)
from waltz_core.offline.lineage import batches_of, header_of
from waltz_core.offline.records import Gap, walk_records

PERCENTILES: Final = (50, 90, 99)


@dataclass(slots=True)
class SessionStatistic:
    """The batches of one store session in a segment."""

    first: int
    last: int
    batch_count: int = 0
    first_stamp_ms: int = 0
    last_stamp_ms: int = 0


@dataclass(slots=True)
class SegmentStatistic:
    """The counts of a segment."""

    path: Path
    header: FileHeader
    file_bytes: int = 0
    record_count: int = 0
    last: int | None = None
    unreadable_bytes: int = 0
    sizes: Counter[int] = field(default_factory=Counter)  # the sizes of the data of records
    clients: Counter[int] = field(default_factory=Counter)
    index_entry_count: int | None = None
    batch_count: int = 0
    batch_records: Counter[int] = field(default_factory=Counter)
    invalid_batch_count: int = 0
    sessions: dict[int, SessionStatistic] = field(default_factory=dict)
    first_stamp_ms: int | None = None
    last_stamp_ms: int | None = None

    @property
    def data_bytes(self) -> int:
        """The bytes of the data of all records."""
        return sum(size * count for size, count in self.sizes.items())

    @property
    def index_density(self) -> float | None:
        """The number of index entries per record: 1 if the index is complete.

        None without index.
        """
        if self.index_entry_count is None:
            return None
        return self.index_entry_count / self.record_count if self.record_count else 1.0


def percentile(counts: Counter[int], percent: int) -> int:
    """Return the smallest value that is not below `percent` % of all values (rule 2)."""
    rank = -(-sum(counts.values()) * percent // 100)
    for value in sorted(counts):
        rank -= counts[value]
        if rank <= 0:
            return value
    return 0


def statistic_of(path: Path) -> SegmentStatistic:
    """Count the content of a segment, given its `.seg` file."""
    with OpenFile(path) as file:
        statistic = SegmentStatistic(
            path, decode_file_header(file.pread(FILE_HEADER_BYTES, 0)), file.size()
        )
        unpack = RECORD.unpack_from
        for part in walk_records(file, int(path.stem)):
            if isinstance(part, Gap):
                statistic.unreadable_bytes += part.end - part.offset
                continue
            starts = part.bounds[:-1]
            statistic.record_count += part.length
            statistic.last = part.first + part.length - 1
            statistic.clients.update(
                [unpack(part.data, record_start)[1] for record_start in starts]
            )
            statistic.sizes.update(
                end - start - RECORD_FRAME_BYTES
                for start, end in zip(starts, part.bounds[1:], strict=True)
            )
    index = segment_path(path.parent, int(path.stem), ".idx")
    if index.exists():
        with OpenFile(index) as file:
            statistic.index_entry_count = max(0, file.size() - FILE_HEADER_BYTES) // OFFSET_BYTES
    _count_batches(statistic, segment_path(path.parent, int(path.stem), ".chn"))
    return statistic


def _count_batches(statistic: SegmentStatistic, path: Path) -> None:
    if not path.exists():
        return
    with OpenFile(path) as file:
        for placed in batches_of(file, header_of(file).segment_crc):
            entry = placed.batch
            if entry.errors:
                statistic.invalid_batch_count += 1
                continue
            statistic.batch_count += 1
            statistic.batch_records[entry.last - entry.first + 1] += 1
            stamp = entry.stamp_ms
            first, last = statistic.first_stamp_ms, statistic.last_stamp_ms
            statistic.first_stamp_ms = stamp if first is None else min(first, stamp)
            statistic.last_stamp_ms = stamp if last is None else max(last, stamp)
            session_statistic = statistic.sessions.setdefault(
                entry.session,
                SessionStatistic(
                    entry.first, entry.last, 0, first_stamp_ms=stamp, last_stamp_ms=stamp
                ),
            )
            session_statistic.last, session_statistic.last_stamp_ms = entry.last, stamp
            session_statistic.batch_count += 1
