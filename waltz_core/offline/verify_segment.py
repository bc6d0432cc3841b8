"""Verifies one segment: its headers, every record of `.seg`, and every entry of `.idx`.

It compares one file after the other with the known facts about the log (`ExpectedLog`). Batches,
which may cross segments, are checked in `lineage`.

Rules:
    1. Both CRCs of every record are computed: the CRC of its data, and the CRC of the complete
       record.
    2. Every entry of the index is compared with the position of its record, except for unreadable
       records, whose position is unknown.
    3. If a storage was not closed cleanly, bytes that are not known to be synced may be torn. Torn
       bytes were never acknowledged, and the next start truncates them. So a fault in these bytes
       is a note. Any other fault is an error.
    4. The creation times have no checksum and no effect. If the three files of a segment have
       different creation times, this is only a note, because a crash can cause the difference, too.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from waltz_core.offline.file_findings import FileFindings, VerificationFindings, records_text
from waltz_core.offline.files import OpenFile, segment_path
from waltz_core.offline.layout import (
    CHAIN_HEADER_BYTES,
    FILE_HEADER_BYTES,
    OFFSET_BYTES,
    ControlSlot,
    FileHeader,
    crc32,
    decode_chain_header,
    decode_file_header,
)
from waltz_core.offline.lineage import ChainCheck, ChainEnd
from waltz_core.offline.records import Gap, RecordRun, record_fields, walk_records

_CREATION_TIME_OFFSET = 4  # offset of the creation time in a header


class ExpectedLog(NamedTuple):
    """The facts about a log that are known before the log is read.

    `cluster_key` is None if it is unknown. `gets_batches` is set if the next start of the
    storage creates batches for records of Waltz 0.13. `last_synced_id` is the last ID that the
    control files state as synced. `batch_ends` are IDs at which a batch of the log should end.
    """

    partition: int | None
    cluster_key: bytes | None
    slot: ControlSlot | None = None
    gets_batches: bool = False
    last_synced_id: int = -1
    batch_ends: frozenset[int] = frozenset()


@dataclass(slots=True)
class FoundLog:
    """The content of one partition's files, as the verification found it."""

    segment_count: int = 0
    record_count: int = 0
    bytes_read: int = 0
    checksum_count: int = 0
    batch_count: int = 0
    unchecked_batch_count: int = 0
    last: int = -1
    end: ChainEnd | None = None
    chains_by_id: dict[int, bytes] = field(default_factory=dict)
    unreadable: list[tuple[int, int]] = field(default_factory=list)  # ranges of IDs

    def note_unreadable(self, first: int, last: int) -> None:
        """Note that the records first..last cannot be read."""
        if self.unreadable and self.unreadable[-1][1] == first - 1:
            self.unreadable[-1] = (self.unreadable[-1][0], last)
        else:
            self.unreadable.append((first, last))


class SegmentCheck:
    """The check of one segment.

    `is_error_at` returns whether a fault at an ID is an error (rule 3). `is_index_error_at` does
    the same for the index. The index is synced less often than the records.
    """

    def __init__(  # noqa: PLR0913 - files, expected values, and findings
        self,
        directory: Path,
        first: int,
        *,
        next_first: int | None,
        expected: ExpectedLog,
        findings: VerificationFindings,
        found_log: FoundLog,
        chain: ChainCheck | None,
        is_error_at: Callable[[int], bool],
        is_index_error_at: Callable[[int], bool],
    ) -> None:
        self._first = first
        self._next_first = next_first
        self._expected = expected
        self._found_log = found_log
        self._chain = chain
        self._is_error_at = is_error_at
        self._is_index_error_at = is_index_error_at
        self._paths = {
            suffix: segment_path(directory, first, suffix) for suffix in (".seg", ".idx", ".chn")
        }
        self._report = {
            suffix: findings.in_file(f"{directory.name}/{path.name}")
            for suffix, path in self._paths.items()
        }

    def run(self) -> int:
        """Verify the segment; return the ID that the next segment should begin with."""
        self._found_log.segment_count += 1
        self._check_headers()
        report = self._report[".seg"]
        index = _IndexCheck(
            self._paths[".idx"], self._first, self._report[".idx"], self._is_index_error_at
        )
        next_id = self._first
        with OpenFile(self._paths[".seg"]) as file:
            size = file.size()
            for part in walk_records(file, self._first):
                if self._next_first is not None and part.first >= self._next_first:
                    self._report_overlap(part.offset)
                    break
                next_id = (
                    self._check_gap(part) if isinstance(part, Gap) else self._check_run(part, index)
                )
        if self._next_first is not None and next_id < self._next_first:
            what = (
                f"the segment ends with record {next_id - 1}, but the next segment begins with "
                f"{self._next_first}"
            )
            report.add_error(size, what)
            self._note_unreadable(next_id, self._next_first - 1)
        self._found_log.bytes_read += size
        index.finish(next_id, self._next_first)
        return next_id if self._next_first is None else self._next_first

    # ---- headers

    def _check_headers(self) -> None:
        headers: dict[str, FileHeader] = {}
        for suffix, path in self._paths.items():
            if not path.exists():
                continue
            with OpenFile(path) as file:
                if suffix == ".chn":
                    header = decode_chain_header(file.pread(CHAIN_HEADER_BYTES, 0)).header
                    if header.errors:
                        continue  # `ChainCheck` reports these errors
                else:
                    header = decode_file_header(file.pread(FILE_HEADER_BYTES, 0))
            headers[suffix] = header
        for suffix, header in headers.items():
            self._check_header(suffix, header, headers[".seg"])
        self._check_creation_times(
            {suffix: header.created_ms for suffix, header in headers.items()}
        )

    def _check_header(self, suffix: str, header: FileHeader, segment_header: FileHeader) -> None:
        report = self._report[suffix]
        for error in header.errors:
            report.add_error(0, f"header: {error}")
        key = (
            segment_header.cluster_key
            if self._expected.cluster_key is None
            else self._expected.cluster_key
        )
        partition = self._expected.partition
        partition = segment_header.partition if partition is None else partition
        for offset, what, expected, value in (
            (12, "cluster key", key.hex(), header.cluster_key.hex()),
            (28, "partition", partition, header.partition),
            (32, "first ID", self._first, header.first),
        ):
            if value != expected:
                report.add_error(offset, f"header: expected {what} {expected}, found {value}")

    def _check_creation_times(self, times: dict[str, int]) -> None:
        if len(times) < 3 or times[".seg"] == times[".idx"]:
            return
        for outlier, suffix, other in ((".seg", ".idx", ".chn"), (".idx", ".seg", ".chn")):
            if times[suffix] == times[other]:
                self._report[outlier].add_note(
                    _CREATION_TIME_OFFSET,
                    f"header: the creation time is {times[outlier]} ms, but {times[suffix]} ms in "
                    f"{suffix} and {other}; this has no effect",
                )

    # ---- records

    def _check_run(self, run: RecordRun, index: "_IndexCheck") -> int:
        next_first = self._next_first
        if next_first is not None and run.first + run.length > next_first:
            self._report_overlap(run.offset + run.bounds[next_first - run.first])
            run = run.up_to(next_first - 1)
        crcs = bytearray()
        bad_positions: list[int] = []
        view = memoryview(run.data)
        start = run.bounds[0]
        for position, end in enumerate(run.bounds[1:]):
            crc = crc32(view[start : end - 4]).to_bytes(4, "big")
            data_crc = crc32(view[start + 36 : end - 4]).to_bytes(4, "big")
            if crc != view[end - 4 : end] or data_crc != view[start + 32 : start + 36]:
                bad_positions.append(position)
            crcs += crc
            start = end
        self._found_log.checksum_count += 2 * run.length
        self._found_log.record_count += run.length
        index.compare(run)
        self._pass_to_chain_check(run, bytes(crcs), bad_positions)
        return run.first + run.length

    def _pass_to_chain_check(self, run: RecordRun, crcs: bytes, bad_positions: list[int]) -> None:
        """Pass the records to the chain check; bad records count as unreadable."""
        checked_count = 0
        for position in [*bad_positions, run.length]:
            if self._chain is not None and position > checked_count:
                self._chain.check_records(
                    run.first + checked_count,
                    crcs[4 * checked_count : 4 * position],
                    position - checked_count,
                )
            if position < run.length:
                self._report_bad_record(run, position)
                self._note_unreadable(run.first + position, run.first + position)
            checked_count = position + 1

    def _report_bad_record(self, run: RecordRun, position: int) -> None:
        start, end = run.bounds[position], run.bounds[position + 1]
        record = run.data[start:end]
        number = run.first + position
        parts = []
        found, expected = int.from_bytes(record[-4:], "big"), crc32(record[:-4])
        if found != expected:
            parts.append(f"expected CRC {expected:08x}, found {found:08x}")
        found, expected = record_fields(record).data_crc, crc32(record[36:-4])
        if found != expected:
            parts.append(f"expected CRC {expected:08x} of the data, found {found:08x}")
        self._report_unreadable(run.offset + start, number, number, "; ".join(parts))

    def _check_gap(self, gap: Gap) -> int:
        next_id, next_first = gap.next_id, self._next_first
        if next_id is None or (next_first is not None and next_id > next_first):
            next_id = next_first
        if next_id is not None:
            self._report_unreadable(gap.offset, gap.first, next_id - 1, gap.reason)
            self._note_unreadable(gap.first, next_id - 1)
            return next_id
        is_error = self._is_error_at(gap.first)
        tail = (
            ""
            if is_error
            else "; never acknowledged, so the next start of the storage truncates the log there"
        )
        what = (
            f"bytes {gap.offset}..{gap.end - 1} have no valid record from transaction {gap.first} "
            f"on: {gap.reason}"
        )
        self._report[".seg"].add_finding(gap.offset, what + tail, is_error=is_error)
        return gap.first

    def _note_unreadable(self, first: int, last: int) -> None:
        self._found_log.note_unreadable(first, last)
        if self._chain is not None:
            self._chain.check_records(first, None, last - first + 1)

    def _report_unreadable(self, offset: int, first: int, last: int, reason: str) -> None:
        is_error = self._is_error_at(first)
        slot = self._expected.slot
        tail = ""
        if not is_error:
            tail = "; never acknowledged, so the next start of the storage truncates the log there"
        elif slot is not None:
            tail = f"; {'' if slot.lists_as_damaged(first, last) else 'not '}listed as damaged"
        what = f"{records_text(first, last)}: {reason}{tail}"
        self._report[".seg"].add_finding(offset, what, is_error=is_error)

    def _report_overlap(self, offset: int) -> None:
        assert self._next_first is not None
        slot = self._expected.slot
        # After a failed write, a log truncates its last file and continues in a new file. The
        # truncation may not be durable, so a crash may restore the truncated bytes.
        is_error = slot is None or not slot.is_dirty
        what = f"the segment has record {self._next_first}, with which the next segment begins"
        self._report[".seg"].add_finding(offset, what, is_error=is_error)


class _IndexCheck:
    """Compares the offsets in `.idx` with the positions of the records (rule 2)."""

    def __init__(
        self, path: Path, first: int, report: FileFindings, is_error_at: Callable[[int], bool]
    ) -> None:
        self._path = path
        self._first = first
        self._report = report
        self._is_error_at = is_error_at
        self._exists = path.exists()
        if not self._exists:
            report.add_error(None, "the file is missing; waltz-core disk repair-index rebuilds it")

    def compare(self, run: RecordRun) -> None:
        """Compare the entries of the records in a run."""
        if not self._exists or not run.length:
            return
        position = run.first - self._first
        with OpenFile(self._path) as file:
            data = file.pread(
                OFFSET_BYTES * run.length, FILE_HEADER_BYTES + OFFSET_BYTES * position
            )
        found_offsets = np.frombuffer(data[: len(data) // 8 * 8], dtype=">i8")
        expected_offsets = (
            np.array(run.bounds[:-1], dtype=np.int64)[: found_offsets.size] + run.offset
        )
        differences = np.flatnonzero(found_offsets != expected_offsets)
        if differences.size:
            index = int(differences[0])
            more_text = (
                f", and {differences.size - 1} more entries after it"
                if differences.size > 1
                else ""
            )
            self._report.add_finding(
                FILE_HEADER_BYTES + OFFSET_BYTES * (position + index),
                f"index entry of record {run.first + index}: expected offset "
                f"{expected_offsets[index]}, found {found_offsets[index]}{more_text}",
                is_error=self._is_error_at(run.first + index),
            )

    def finish(self, end_id: int, next_first: int | None) -> None:
        """Compare the number of index entries with the number of existing or expected records."""
        if not self._exists:
            return
        with OpenFile(self._path) as file:
            size = file.size()
        expected = FILE_HEADER_BYTES + OFFSET_BYTES * (end_id - self._first)
        full_size = None
        if next_first is not None:
            full_size = FILE_HEADER_BYTES + OFFSET_BYTES * (next_first - self._first)
        if size not in {expected, full_size}:
            offset = max(FILE_HEADER_BYTES, min(size, expected))
            transaction_id = self._first + (offset - FILE_HEADER_BYTES) // OFFSET_BYTES
            self._report.add_finding(
                offset,
                f"expected {expected} bytes, for the index of {end_id - self._first} records, "
                f"found {size}",
                is_error=self._is_error_at(transaction_id),
            )
