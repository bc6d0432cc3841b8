"""Ranges from a storage of this machine: it says where records lie, and they are read here.

A socket copies each byte twice and has two processes look at it. Of a storage that shares its
memory for files with the reader, only the places of the records are needed.

Rules:
    1. What is read is what the storage would have sent: it is asked in the session that the server
       named, for what that session has committed, and answers only while it takes part. Such
       records never change again, so that its answer holds for as long as the file is open.
    2. Every record is checked here, id, length and CRC, for the storage has not looked at it.
    3. Whatever is not as it should be (nobody there, a file that is shorter, a record that is
       wrong) raises. Then the storage is asked for the records themselves: it finds damage
       by itself, has it mended, and what it sends instead is right.
    4. Bytes are read and never mapped: what a mapping meets (an error of the disk, a file that
       was cut) would end the process.
    5. One thread reads at a time, so that files and buffers need no lock. A read that took too long
       is given up while its thread is still at it: then nothing more is read here.
    6. What the system has in memory is read by the loop itself, which takes less than to have a
       thread do it and be told. For what lies on the disk alone a thread waits.
"""

import asyncio
import errno
import os
import sys
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from io import FileIO
from typing import Final

import numpy as np
import numpy.typing as npt

from waltz_core import errors
from waltz_core.records import raw_records
from waltz_core.records.checksum import crc32
from waltz_core.records.record import LineageEntry, PartitionId, TransactionId
from waltz_core.transport import handover
from waltz_core.wire.places import FilePlace, encode_segment

I64 = npt.NDArray[np.int64]

# What is asked for at once: it costs the memory of its lengths and batches, and not of its bytes.
GRANT_BYTES: Final = 32 * 1024 * 1024
# Read and summed in one go, while they are in the processor's own memory.
_PIECE_BYTES: Final = 512 * 1024
# One that is looked at, one that is on its way, and one more for who lags behind.
_BUFFERS_MAX: Final = 3
# Read what is in memory, or fail; not every file system can tell.
_NO_WAITING: Final = getattr(os, "RWF_NOWAIT", 0)
_WAITING_IS_NEEDED: Final = (errno.EAGAIN, errno.EOPNOTSUPP, errno.ENOSYS)
_REFERENCES_OF_OURS: Final = 2  # the list's, and that of who asks


@dataclass(frozen=True, slots=True, eq=False)
class ReadGrant:
    """Where transactions from `first` on lie, as the storage has said."""

    first: TransactionId
    lengths: I64
    places: tuple[FilePlace, ...]
    lineage: tuple[LineageEntry, ...]

    @property
    def next(self) -> TransactionId:
        """The id after the last one."""
        return TransactionId(self.first + int(self.lengths.size))

    def batches_of(self, first: TransactionId, last: TransactionId) -> tuple[LineageEntry, ...]:
        """Return the batches that touch first..last."""
        low = bisect_left(self.lineage, first, key=lambda entry: entry.last)
        high = bisect_left(self.lineage, last + 1, lo=low, key=lambda entry: entry.first)
        return self.lineage[low:high]


@dataclass(frozen=True, slots=True, eq=False)
class NearbyRecords:
    """Records that were read and found right, with the batches that they belong to."""

    lengths: I64
    records: memoryview
    lineage: tuple[LineageEntry, ...]


Ask = Callable[[], Awaitable[ReadGrant]]


class Nearby:
    """One storage of this machine, as the reader of one partition in one session uses it."""

    def __init__(self, door: str, partition_id: PartitionId, *, timeout_s: float) -> None:
        self._door = door
        self._partition_id = partition_id
        self._timeout_s = timeout_s
        self._files: dict[TransactionId, FileIO] = {}
        self._buffers = _Buffers()
        self._grant: ReadGrant | None = None
        self._on_disk: ReadGrant | None = None  # it is not in memory, or was not just now
        self._is_at_it = False  # rule 5

    def close(self) -> None:
        """Give the files back; what is being read of them comes to nothing."""
        files, self._files = self._files, {}
        for file in files.values():
            file.close()

    async def read(
        self, first: TransactionId, last: TransactionId, bytes_max: int, ask: Ask
    ) -> NearbyRecords:
        """Read first..last as far as `bytes_max` reaches, one record at least.

        Raises:
            Unreachable, ReadFailed: the file cannot be had, or its bytes cannot.
            ChecksumMismatch: a record is not what it should be.
        """
        if self._is_at_it:
            raise errors.Unreachable(f"{self._door}: a read is not done yet")
        grant = self._grant
        if grant is None or not grant.first <= first < grant.next:
            grant = self._grant = await ask()
            self._leave_all_but({place.segment for place in grant.places})
        low = first - grant.first
        high = min(last + 1, grant.next) - grant.first
        high = low + raw_records.count_within(grant.lengths[low:high], bytes_max)
        records = self._read_at_once(grant, low, high)
        if records is None:
            records = await self._read_on_a_thread(grant, low, high)
        end = TransactionId(grant.first + high - 1)
        return NearbyRecords(grant.lengths[low:high], records, grant.batches_of(first, end))

    def _read_at_once(self, grant: ReadGrant, low: int, high: int) -> memoryview | None:
        """Read what needs no waiting for; None where something does (rule 6)."""
        if self._on_disk is grant or any(each.segment not in self._files for each in grant.places):
            return None
        try:
            return self._read(grant, low, high, _NO_WAITING)
        except BlockingIOError:
            self._on_disk = grant  # neither is the rest of it tried
            return None

    async def _read_on_a_thread(self, grant: ReadGrant, low: int, high: int) -> memoryview:
        def read() -> memoryview:
            try:
                return self._read(grant, low, high, 0)
            finally:
                self._is_at_it = False

        loop = asyncio.get_running_loop()
        self._is_at_it = True
        try:
            async with asyncio.timeout(self._timeout_s):
                return await loop.run_in_executor(None, read)
        except TimeoutError as error:
            raise errors.Unreachable(
                f"{self._door}: nothing was read within {self._timeout_s} s"
            ) from error

    def _leave_all_but(self, segments: Collection[TransactionId]) -> None:
        """Give files back that a reader has got beyond: a log may have more than it may open."""
        for segment in [each for each in self._files if each not in segments]:
            self._files.pop(segment).close()

    def _read(self, grant: ReadGrant, low: int, high: int, flags: int) -> memoryview:
        """Read records low..high-1 of a grant and check them (rule 2).

        Raises BlockingIOError where the flags are not to wait and that is needed.
        """
        lengths = grant.lengths[low:high]
        skip, size = raw_records.sum_of(grant.lengths[:low]), raw_records.sum_of(lengths)
        records = self._buffers.take(size)
        done = crc = 0
        for place in grant.places:
            if skip < place.size and done < size:
                count = min(place.size - skip, size - done)
                part = records[done : done + count]
                crc = self._fill(part, place.segment, place.offset + skip, crc, flags)
                done += count
            skip = max(0, skip - place.size)
        first = TransactionId(grant.first + low)
        if raw_records.proven_crcs(records, lengths, first, records_crc=crc) is None:
            raise errors.ChecksumMismatch(
                f"partition {self._partition_id}: one of the records {first}.."
                f"{first + lengths.size - 1} of {self._door} is damaged"
            )
        return records

    def _fill(
        self, part: memoryview, segment: TransactionId, offset: int, crc: int, flags: int
    ) -> int:
        """Read bytes of a segment; return the CRC of what `crc` is of followed by them."""
        file = self._files.get(segment)
        try:
            if file is None:
                question = encode_segment(self._partition_id, segment)
                taken = handover.take(self._door, question, timeout_s=self._timeout_s)
                file = self._files[segment] = FileIO(taken)
            while part:
                count = os.preadv(file.fileno(), [part[:_PIECE_BYTES]], offset, flags)
                if not count and flags:
                    # Linux 5.9 and 5.10 say so of what is not in memory, too (preadv2(2), "Bugs").
                    raise BlockingIOError(errno.EAGAIN, "perhaps not in memory")
                if not count:
                    raise errors.ReadFailed(
                        f"partition {self._partition_id}: expected {len(part)} more bytes at "
                        f"{offset} of segment {segment} of {self._door}, found its end"
                    )
                crc = crc32(part[:count], crc)
                part = part[count:]
                offset += count
        except (OSError, ValueError) as error:  # a file that was closed meanwhile is a ValueError
            if flags and isinstance(error, OSError) and error.errno in _WAITING_IS_NEEDED:
                raise BlockingIOError(error.errno, str(error)) from error
            raise errors.ReadFailed(f"segment {segment} of {self._door}: {error}") from error
        return crc


class _Buffers:
    """Memory for what is read, used again as soon as nobody holds a view of it.

    New memory for each read costs more than the read: the system clears it first. Views may be let
    go by any thread, but only one takes (rule 5): two would find the same memory free.
    """

    def __init__(self) -> None:
        self._all: list[npt.NDArray[np.uint8]] = []

    def take(self, size: int) -> memoryview:
        """Return memory of a size, which nobody else has; its bytes are any."""
        for place in range(len(self._all)):
            # Whoever has a view of it, or one of a view, counts as one more.
            if sys.getrefcount(self._all[place]) == _REFERENCES_OF_OURS:
                if self._all[place].size < size:
                    self._all[place] = np.empty(size, dtype=np.uint8)
                return self._all[place].data[:size]
        made = np.empty(size, dtype=np.uint8)
        if len(self._all) < _BUFFERS_MAX:
            self._all.append(made)
        return made.data
