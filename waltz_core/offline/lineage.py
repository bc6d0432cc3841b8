"""The batches of a partition, and their chain computed anew from the records.

Records and batches lie in different files and cross the borders of segments at different places.
Here the two meet: records come in as they are walked through, entries are read as they are due.

Rules:
    1. The chain after a batch is blake2b-16 over the chain before it, its first id, last id and
       session, and the CRCs of its records. Nothing else is in it; the stamp is not.
    2. What cannot be computed is not guessed: a batch with a record that cannot be read is
       counted as unchecked, and the next one goes on from the chain that its entry states.
    3. A batch of the session `MADE_UP` stands for others that were lost. Neither its chain nor
       that of the next one is made of what can be read.
"""

import hashlib
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from waltz_core.offline.file_findings import Findings, records_text
from waltz_core.offline.files import OpenFile, ReadableFile, segment_path
from waltz_core.offline.layout import (
    BATCH_BYTES,
    CHAIN_HEADER_BYTES,
    GENESIS,
    MADE_UP,
    BatchEntry,
    ChainHeader,
    batch,
    chain_header,
)

_BLOCK_BATCHES: Final = 4096
_CHAIN_INPUT: Final = struct.Struct(">16sqqq")
_CRC_BYTES: Final = 4
_SPARE: Final = 1 << 63  # above any id: a fault by which none is lost


class Placed(NamedTuple):
    """An entry and where it stands."""

    place: int
    offset: int
    batch: BatchEntry


def header_of(file: ReadableFile) -> ChainHeader:
    """Return the header of a `.chn` file."""
    return chain_header(file.pread(CHAIN_HEADER_BYTES, 0))


def batches_of(file: ReadableFile, segment_crc: int, place: int = 0) -> Iterator[Placed]:
    """Return the entries of a `.chn` file from a place on; an incomplete one at its end too."""
    size = file.size()
    offset = CHAIN_HEADER_BYTES + BATCH_BYTES * place
    while offset < size:
        data = file.pread(_BLOCK_BATCHES * BATCH_BYTES, offset)
        for at in range(0, len(data), BATCH_BYTES):
            yield Placed(place, offset + at, batch(data[at : at + BATCH_BYTES], place, segment_crc))
            place += 1
        offset += len(data)


class BatchesEnd(NamedTuple):
    """Where the batches of a log end."""

    last: int
    chain: bytes


class ChainCheck:
    """Takes the records of a partition in order, and holds them against its batches.

    `is_wrong` tells of an id if a fault there is wrong, and not what a stop may leave. `ends` are
    ids at which a batch should end; `chains` gets the chains there.
    """

    def __init__(
        self,
        directory: Path,
        firsts: list[int],
        findings: Findings,
        is_wrong: Callable[[int], bool],
        ends: frozenset[int],
    ) -> None:
        self.end = BatchesEnd(-1, GENESIS)
        self.count = 0
        self.unchecked = 0
        self.chains: dict[int, bytes] = {-1: GENESIS}
        self._directory = directory
        self._firsts = firsts
        self._findings = findings
        self._is_wrong = is_wrong
        self._ends = ends
        self._chain_is_sure = True
        self._segment = 0
        self._entries = self._all_entries()
        self._current: tuple[Placed, int] | None = None  # and the first id of its segment
        self._digest = hashlib.blake2b(digest_size=16)
        self._due = 0  # the id that the current batch goes on with
        self._is_whole = True

    # ---- records

    def take(self, first: int, crcs: bytes | None, count: int) -> None:
        """Take records with their CRCs, or None where they cannot be read."""
        last = first + count - 1
        at = first
        while at <= last:
            if self._current is None and not self._begin():
                return
            assert self._current is not None
            entry = self._current[0].batch
            if entry.last < at:
                self._is_whole = (
                    False  # it begins before the one behind it has ended; that was said
                )
                self._finish()
                continue
            if entry.first > at:
                at = entry.first  # what is in no batch was said when this one was read
                continue
            self._is_whole = self._is_whole and at == self._due
            stop = min(entry.last, last)
            if crcs is None:
                self._is_whole = False
            else:
                self._digest.update(
                    crcs[_CRC_BYTES * (at - first) : _CRC_BYTES * (stop - first + 1)]
                )
            at = self._due = stop + 1
            if stop == entry.last:
                self._finish()

    def finish(self, last: int) -> None:
        """Look at the batches behind the last record."""
        while self._current is not None or self._begin():
            assert self._current is not None
            (_, offset, entry), segment = self._current
            missing = records_text(max(entry.first, last + 1), entry.last)
            self._say(
                segment,
                offset,
                f"batch {entry.first}..{entry.last}: the log ends at {last}, without {missing}",
                is_wrong=self._is_wrong(entry.last),
            )
            self._is_whole = False
            self._finish()
        if self.count and self.end.last < last:
            self._say(
                self._firsts[-1],
                None,
                f"the batches end without {records_text(self.end.last + 1, last)}",
                is_wrong=self._is_wrong(self.end.last + 1),
            )

    # ---- batches

    def _begin(self) -> bool:
        self._current = next(self._entries, None)
        if self._current is None:
            return False
        entry = self._current[0].batch
        self._digest = hashlib.blake2b(
            _CHAIN_INPUT.pack(self.end.chain, entry.first, entry.last, entry.session),
            digest_size=16,
        )
        self._due = entry.first
        # Where batches are missing before this one its chain goes on from one that is not known.
        self._is_whole = self._chain_is_sure and entry.session != MADE_UP
        return True

    def _finish(self) -> None:
        assert self._current is not None
        (_, offset, entry), segment = self._current
        found = self._digest.digest()
        if not self._is_whole:
            self.unchecked += 1
        elif found != entry.chain:
            self._say(
                segment,
                offset,
                f"batch {entry.first}..{entry.last}: expected chain {found.hex()} for these "
                f"records, found {entry.chain.hex()}",
                is_wrong=self._is_wrong(entry.last),
            )
        self.count += 1
        self.end = BatchesEnd(entry.last, entry.chain)
        self._chain_is_sure = entry.session != MADE_UP
        if entry.last in self._ends:
            self.chains[entry.last] = entry.chain
        self._current = None

    def _all_entries(self) -> Iterator[tuple[Placed, int]]:
        """Return the good entries of all `.chn` files; say what is wrong on the way."""
        before = -1
        unreadable: list[tuple[Placed, int]] = []
        for place, first in enumerate(self._firsts):
            path = segment_path(self._directory, first, ".chn")
            if not path.exists():
                lost = "is missing: its batches are lost"
                self._say(first, None, lost, is_wrong=self._is_wrong(-1))
                self._chain_is_sure = False
                continue
            next_first = self._firsts[place + 1] if place + 1 < len(self._firsts) else None
            with OpenFile(path) as file:
                header = header_of(file)
                self._check_header(first, header, is_sure=self._chain_is_sure and not unreadable)
                if header.wrong:
                    self._chain_is_sure = False
                    continue
                for placed in batches_of(file, header.segment_crc):
                    entry = placed.batch
                    if entry.wrong:
                        unreadable.append((placed, first))
                    elif self._is_in_place(placed, first, next_first):
                        self._check_unreadable(unreadable, before, entry.first)
                        self._check_order(placed, first, before)
                        before = entry.last
                        yield placed, first
        self._check_unreadable(unreadable, before, None)

    def _check_header(self, first: int, header: ChainHeader, *, is_sure: bool) -> None:
        """The rest of the header is compared with that of `.seg`, by whoever reads that one."""
        for one in header.wrong:
            what = f"header: {one}; its batches cannot be told"
            self._say(first, 0, what, is_wrong=self._is_wrong(-1))
        if not header.wrong and is_sure and header.chain_before != self.end.chain:
            self._say(
                first,
                40,
                f"header: expected chain {self.end.chain.hex()} before the first batch, "
                f"found {header.chain_before.hex()}",
                is_wrong=self._is_wrong(-1),
            )

    def _check_unreadable(
        self, unreadable: list[tuple[Placed, int]], before: int, next_first: int | None
    ) -> None:
        """Say of entries that they cannot be read; `next_first` begins the next one that can."""
        for placed, segment in unreadable:
            # Where none is missing it stood for nothing: a stop in the middle of a write left it.
            lost = before + 1 if next_first != before + 1 else _SPARE
            self._say(
                segment,
                placed.offset,
                f"entry {placed.place}, behind batch {before}: {'; '.join(placed.batch.wrong)}",
                is_wrong=self._is_wrong(lost),
            )
            self._chain_is_sure = self._chain_is_sure and lost == _SPARE
        unreadable.clear()

    def _is_in_place(self, placed: Placed, first: int, next_first: int | None) -> bool:
        """Tell if an entry is in the segment of its last record; say so if not."""
        entry = placed.batch
        if first <= entry.last and (next_first is None or entry.last < next_first):
            return True
        # A file that a failed write has ended may have its tail back: that cut is not synced.
        self._say(
            first,
            placed.offset,
            f"batch {entry.first}..{entry.last}: expected in the segment that holds its last "
            "record",
            is_wrong=self._is_wrong(-1 if entry.last < first else _SPARE),
        )
        return False

    def _check_order(self, placed: Placed, first: int, before: int) -> None:
        entry = placed.batch
        if entry.first != before + 1:
            # After an entry that cannot be read this is what it looks like; that one was told.
            if self._chain_is_sure:
                self._say(
                    first,
                    placed.offset,
                    f"batch {entry.first}..{entry.last}: expected it to begin at {before + 1}",
                    is_wrong=self._is_wrong(entry.last),
                )
            self._chain_is_sure = False

    def _say(self, segment: int, offset: int | None, what: str, *, is_wrong: bool) -> None:
        path = segment_path(Path(self._directory.name), segment, ".chn")
        self._findings.add(str(path), offset, what, is_wrong=is_wrong)
