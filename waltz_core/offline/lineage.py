"""Compares the batches of a partition with the hash chain of its records.

Records and batches are stored in different files, and a batch may begin in one segment and end in a
later one. `ChainCheck` receives the records in order, and reads batch entries when it needs them.

Rules:
    1. The chain hash after a batch is a BLAKE2b hash of 16 bytes. It covers the chain hash before
       the batch, the first ID, last ID and session of the batch, and the CRCs of its records. It
       does not cover the commit stamp.
    2. If a record of a batch is unreadable, the chain hash of the batch cannot be computed. The
       batch is counted as unchecked. The check of the next batch begins with the chain hash that
       the entry of the unchecked batch states.
    3. A batch of the session `RECONSTRUCTED` replaces lost batches. The chain hashes of this batch
       and of the next batch cannot be computed.
"""

import hashlib
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from waltz_core.offline.file_findings import VerificationFindings, records_text
from waltz_core.offline.files import OpenFile, ReadableFile, segment_path
from waltz_core.offline.layout import (
    BATCH_BYTES,
    CHAIN_HEADER_BYTES,
    RECONSTRUCTED,
    BatchEntry,
    ChainHeader,
    decode_batch_entry,
    decode_chain_header,
)

_BLOCK_BATCHES: Final = 4096
_CHAIN_INPUT: Final = struct.Struct(">16sqqq")
_CRC_BYTES: Final = 4
_NO_LOST_ID: Final = 1 << 63  # above any ID: for an error that loses no record


class LocatedEntry(NamedTuple):
    """An entry, its position in the `.chn` file, and its offset in bytes."""

    position: int
    offset: int
    batch: BatchEntry


def header_of(file: ReadableFile) -> ChainHeader:
    """Decode the header of a `.chn` file."""
    return decode_chain_header(file.pread(CHAIN_HEADER_BYTES, 0))


def batches_of(file: ReadableFile, segment_crc: int, position: int = 0) -> Iterator[LocatedEntry]:
    """Yield the entries of a `.chn` file from a position on, including an incomplete last entry."""
    size = file.size()
    offset = CHAIN_HEADER_BYTES + BATCH_BYTES * position
    while offset < size:
        data = file.pread(_BLOCK_BATCHES * BATCH_BYTES, offset)
        for start in range(0, len(data), BATCH_BYTES):
            yield LocatedEntry(
                position,
                offset + start,
                decode_batch_entry(data[start : start + BATCH_BYTES], position, segment_crc),
            )
            position += 1
        offset += len(data)


class ChainEnd(NamedTuple):
    """The end of a batch: its last ID, and the chain hash there."""

    last: int
    chain: bytes


class ChainCheck:
    """Receives the records of a partition in order, and compares them with its batches.

    `start` is the batch end after which the log begins. `is_error_at` returns whether a fault at an
    ID is an error. All other faults are only traces of a crash. `ends` are IDs at which a batch
    should end; `chains` receives the chain hashes at these IDs.
    """

    def __init__(
        self,
        directory: Path,
        firsts: list[int],
        start: ChainEnd,
        findings: VerificationFindings,
        is_error_at: Callable[[int], bool],
        ends: frozenset[int],
    ) -> None:
        self.end = start
        self.count = 0
        self.unchecked_count = 0
        self.chains: dict[int, bytes] = {start.last: start.chain}
        self._directory = directory
        self._firsts = firsts
        self._findings = findings
        self._is_error_at = is_error_at
        self._ends = ends
        # If the log begins within the oldest segment, the first entry of this segment describes a
        # batch that ends at or before `start`. The chain hash before this batch is not
        # `start.chain`, and the batch may have begun in an earlier segment.
        self._is_chain_known = firsts[0] == start.last + 1
        self._segment = 0
        self._entries = self._all_entries()
        # The entry, and the first ID of its segment.
        self._current_entry: tuple[LocatedEntry, int] | None = None
        self._digest = hashlib.blake2b(digest_size=16)
        self._next_id = 0  # the next ID of the current batch
        self._is_chain_computable = True

    # ---- records

    def check_records(self, first: int, crcs: bytes | None, count: int) -> None:
        """Check records with their CRCs; `crcs` is None if the records cannot be read."""
        last = first + count - 1
        next_id = first
        while next_id <= last:
            if self._current_entry is None and not self._begin_batch():
                return
            assert self._current_entry is not None
            entry = self._current_entry[0].batch
            if entry.last < next_id:
                # The batch overlaps the preceding batch. The overlap was reported with its entry.
                self._is_chain_computable = False
                self._finish_batch()
                continue
            if entry.first > next_id:
                next_id = entry.first  # IDs without a batch were reported with this entry
                continue
            self._is_chain_computable = self._is_chain_computable and next_id == self._next_id
            stop = min(entry.last, last)
            if crcs is None:
                self._is_chain_computable = False
            else:
                self._digest.update(
                    crcs[_CRC_BYTES * (next_id - first) : _CRC_BYTES * (stop - first + 1)]
                )
            next_id = self._next_id = stop + 1
            if stop == entry.last:
                self._finish_batch()

    def finish(self, last: int) -> None:
        """Check the batches after the last record."""
        while self._current_entry is not None or self._begin_batch():
            assert self._current_entry is not None
            (_, offset, entry), segment = self._current_entry
            missing = records_text(max(entry.first, last + 1), entry.last)
            self._add_finding(
                segment,
                offset,
                f"batch {entry.first}..{entry.last}: the log ends at transaction {last}, "
                f"without {missing}",
                is_error=self._is_error_at(entry.last),
            )
            self._is_chain_computable = False
            self._finish_batch()
        if self.count and self.end.last < last:
            self._add_finding(
                self._firsts[-1],
                None,
                f"no batch has {records_text(self.end.last + 1, last)}",
                is_error=self._is_error_at(self.end.last + 1),
            )

    # ---- batches

    def _begin_batch(self) -> bool:
        self._current_entry = next(self._entries, None)
        if self._current_entry is None:
            return False
        entry = self._current_entry[0].batch
        self._digest = hashlib.blake2b(
            _CHAIN_INPUT.pack(self.end.chain, entry.first, entry.last, entry.session),
            digest_size=16,
        )
        self._next_id = entry.first
        # If batches directly before this batch are missing, the chain hash before this batch is not
        # known.
        self._is_chain_computable = self._is_chain_known and entry.session != RECONSTRUCTED
        return True

    def _finish_batch(self) -> None:
        assert self._current_entry is not None
        (_, offset, entry), segment = self._current_entry
        computed_chain = self._digest.digest()
        if not self._is_chain_computable:
            self.unchecked_count += 1
        elif computed_chain != entry.chain:
            self._add_finding(
                segment,
                offset,
                f"batch {entry.first}..{entry.last}: expected chain hash {computed_chain.hex()} "
                f"for these records, found {entry.chain.hex()}",
                is_error=self._is_error_at(entry.last),
            )
        self.count += 1
        self.end = ChainEnd(entry.last, entry.chain)
        self._is_chain_known = entry.session != RECONSTRUCTED
        if entry.last in self._ends:
            self.chains[entry.last] = entry.chain
        self._current_entry = None

    def _all_entries(self) -> Iterator[tuple[LocatedEntry, int]]:
        """Yield the valid entries of all `.chn` files with their segments, and report errors."""
        previous_last = self._firsts[0] - 1
        unreadable: list[tuple[LocatedEntry, int]] = []
        for position, first in enumerate(self._firsts):
            path = segment_path(self._directory, first, ".chn")
            if not path.exists():
                problem = "the file is missing: its batches are lost"
                self._add_finding(first, None, problem, is_error=self._is_error_at(-1))
                self._is_chain_known = False
                continue
            next_first = self._firsts[position + 1] if position + 1 < len(self._firsts) else None
            with OpenFile(path) as file:
                header = header_of(file)
                self._check_header(
                    first, header, is_chain_known=self._is_chain_known and not unreadable
                )
                if header.errors:
                    self._is_chain_known = False
                    continue
                for located_entry in batches_of(file, header.segment_crc):
                    entry = located_entry.batch
                    if entry.errors:
                        unreadable.append((located_entry, first))
                    elif self._is_in_right_segment(located_entry, first, next_first):
                        self._check_unreadable(unreadable, previous_last, entry.first)
                        self._check_order(located_entry, first, previous_last)
                        previous_last = entry.last
                        yield located_entry, first
        self._check_unreadable(unreadable, previous_last, None)

    def _check_header(self, first: int, header: ChainHeader, *, is_chain_known: bool) -> None:
        """Report the errors of a header, and a wrong chain hash in it.

        `SegmentCheck` compares the header with the header of `.seg`.
        """
        for error in header.errors:
            what = f"header: {error}; the batches of the file cannot be read"
            self._add_finding(first, 0, what, is_error=self._is_error_at(-1))
        if not header.errors and is_chain_known and header.chain_before != self.end.chain:
            self._add_finding(
                first,
                40,
                f"header: expected chain hash {self.end.chain.hex()} before the first batch, "
                f"found {header.chain_before.hex()}",
                is_error=self._is_error_at(-1),
            )

    def _check_unreadable(
        self, unreadable: list[tuple[LocatedEntry, int]], previous_last: int, next_first: int | None
    ) -> None:
        """Report unreadable entries; `next_first` is the first ID of the next readable entry."""
        for located_entry, segment in unreadable:
            # If no batch is missing here, a crash has interrupted the write of this entry.
            lost_id = previous_last + 1 if next_first != previous_last + 1 else _NO_LOST_ID
            self._add_finding(
                segment,
                located_entry.offset,
                f"entry {located_entry.position}, after transaction {previous_last}: "
                f"{'; '.join(located_entry.batch.errors)}",
                is_error=self._is_error_at(lost_id),
            )
            self._is_chain_known = self._is_chain_known and lost_id == _NO_LOST_ID
        unreadable.clear()

    def _is_in_right_segment(
        self, located_entry: LocatedEntry, first: int, next_first: int | None
    ) -> bool:
        """Return whether an entry is in the segment of its last record; if not, report an error."""
        entry = located_entry.batch
        if first <= entry.last and (next_first is None or entry.last < next_first):
            return True
        # After a failed write, a log truncates its last file and continues in a new file. The
        # truncation may not be durable, so a crash may restore the truncated bytes.
        self._add_finding(
            first,
            located_entry.offset,
            f"batch {entry.first}..{entry.last}: expected the entry in the file of the "
            "segment that has the last record of the batch",
            is_error=self._is_error_at(-1 if entry.last < first else _NO_LOST_ID),
        )
        return False

    def _check_order(self, located_entry: LocatedEntry, first: int, previous_last: int) -> None:
        entry = located_entry.batch
        if entry.first != previous_last + 1:
            # An unreadable entry was already reported. A wrong order after such an entry is not a
            # separate fault.
            if self._is_chain_known:
                self._add_finding(
                    first,
                    located_entry.offset,
                    f"batch {entry.first}..{entry.last}: expected the batch to begin at "
                    f"transaction {previous_last + 1}",
                    is_error=self._is_error_at(entry.last),
                )
            self._is_chain_known = False

    def _add_finding(self, segment: int, offset: int | None, what: str, *, is_error: bool) -> None:
        path = segment_path(Path(self._directory.name), segment, ".chn")
        self._findings.add(str(path), offset, what, is_error=is_error)
