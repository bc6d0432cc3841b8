"""Reads ranges directly from the files of a storage on this machine.

The storage answers with the positions of the records (a *grant*), and the client reads the files.
Through a socket, each byte would be copied twice and pass through two processes.

Rules:
    1. The client reads the same bytes that the storage would have sent. The request contains the
       session that the server named, and asks only for records that this session has committed. The
       storage answers only while its replica is engaged in this session. Committed records never
       change, so the answer is valid while the file is open.
    2. The client checks the ID, length and CRC of every record, because the storage has not read
       the record.
    3. Any problem (no storage, a short file, a wrong record) raises an exception. Then the client
       requests the records over TCP. If the records are damaged, the storage detects the damage,
       and the records are repaired.
    4. Files are read and never mapped into memory. In a mapping, a disk error or a truncated file
       would end the process.
    5. One thread reads at a time, so files and buffers need no lock. If a read times out, the
       client abandons the read, but the read's thread still runs. The client then reads no file
       directly until this thread ends.
    6. Bytes in the page cache are read on the event loop, which costs less than a thread. A thread
       reads only bytes that must come from the disk.
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
from waltz_core.transport import descriptor_passing
from waltz_core.wire.record_locations import FileLocation, encode_segment

I64 = npt.NDArray[np.int64]

# The size of one grant, in bytes of records. In memory, a grant has only their lengths and batches.
GRANT_BYTES: Final = 32 * 1024 * 1024
# The bytes that are read and checksummed together, while they are in the processor's cache.
_PIECE_BYTES: Final = 512 * 1024
# The caller uses one buffer, the reader fills the second, and a slow caller may keep a third.
_BUFFERS_MAX: Final = 3
# The flag to read only from the page cache, or fail; not every file system supports it.
_NO_WAIT_FLAG: Final = getattr(os, "RWF_NOWAIT", 0)
_WOULD_WAIT_ERRORS: Final = (errno.EAGAIN, errno.EOPNOTSUPP, errno.ENOSYS)
_UNUSED_BUFFER_REFERENCES: Final = 2  # references of the list, and of the argument of `getrefcount`


@dataclass(frozen=True, slots=True, eq=False)
class ReadGrant:
    """The storage's answer: the positions of the transactions from `first` on in its files."""

    first: TransactionId
    lengths: I64
    locations: tuple[FileLocation, ...]
    lineage: tuple[LineageEntry, ...]
    ticket: bytes = b""  # opens the files; empty without access control

    @property
    def next_id(self) -> TransactionId:
        """The ID after the last transaction of the grant."""
        return TransactionId(self.first + int(self.lengths.size))

    def batches_of(self, first: TransactionId, last: TransactionId) -> tuple[LineageEntry, ...]:
        """Return the batches that overlap first..last."""
        low = bisect_left(self.lineage, first, key=lambda entry: entry.last)
        high = bisect_left(self.lineage, last + 1, lo=low, key=lambda entry: entry.first)
        return self.lineage[low:high]


@dataclass(frozen=True, slots=True, eq=False)
class LocalRecords:
    """Records that were read and verified, with the batches that they belong to."""

    lengths: I64
    records: memoryview
    lineage: tuple[LineageEntry, ...]


RequestGrant = Callable[[], Awaitable[ReadGrant]]


class LocalReader:
    """Reads one partition in one session from one storage on this machine."""

    def __init__(
        self, address: str, socket_name: str, partition_id: PartitionId, *, timeout_s: float
    ) -> None:
        self._address = address
        self._socket_name = socket_name
        self._partition_id = partition_id
        self._timeout_s = timeout_s
        self._files: dict[TransactionId, FileIO] = {}
        self._buffers = _ReadBuffers()
        self._grant: ReadGrant | None = None
        self._uncached_grant: ReadGrant | None = None  # the grant that was not in the page cache
        self._is_reading = False  # rule 5

    def close(self) -> None:
        """Close the files; a read in progress fails."""
        files, self._files = self._files, {}
        for file in files.values():
            file.close()

    async def read(
        self, first: TransactionId, last: TransactionId, bytes_max: int, query: RequestGrant
    ) -> LocalRecords:
        """Read records of first..last, at most `bytes_max` bytes, but at least one record.

        Raises:
            Unreachable, ReadFailed: the file cannot be opened or read.
            ChecksumMismatch: a record is damaged.
        """
        if self._is_reading:
            raise errors.Unreachable(
                f"{self._address}: another read of this connection is still running"
            )
        grant = self._grant
        if grant is None or not grant.first <= first < grant.next_id:
            grant = self._grant = await query()
            self._close_other_files({location.segment for location in grant.locations})
        low = first - grant.first
        high = min(last + 1, grant.next_id) - grant.first
        high = low + raw_records.count_within(grant.lengths[low:high], bytes_max)
        records = self._read_from_page_cache(grant, low, high)
        if records is None:
            records = await self._read_on_thread(grant, low, high)
        end = TransactionId(grant.first + high - 1)
        return LocalRecords(grant.lengths[low:high], records, grant.batches_of(first, end))

    def _read_from_page_cache(self, grant: ReadGrant, low: int, high: int) -> memoryview | None:
        """Read from the page cache; return None if it does not contain all bytes (rule 6)."""
        if self._uncached_grant is grant or any(
            location.segment not in self._files for location in grant.locations
        ):
            return None
        try:
            return self._read_records(grant, low, high, _NO_WAIT_FLAG)
        except BlockingIOError:
            self._uncached_grant = grant  # do not try the page cache for the rest of this grant
            return None

    async def _read_on_thread(self, grant: ReadGrant, low: int, high: int) -> memoryview:
        def read() -> memoryview:
            try:
                return self._read_records(grant, low, high, 0)
            finally:
                self._is_reading = False

        loop = asyncio.get_running_loop()
        self._is_reading = True
        try:
            async with asyncio.timeout(self._timeout_s):
                return await loop.run_in_executor(None, read)
        except TimeoutError as error:
            raise errors.Unreachable(
                f"no record was read from the files of storage {self._address} within "
                f"{self._timeout_s} s"
            ) from error

    def _close_other_files(self, segments: Collection[TransactionId]) -> None:
        """Close the files of other segments: a log may have more files than a process may open."""
        for segment in [
            open_segment for open_segment in self._files if open_segment not in segments
        ]:
            self._files.pop(segment).close()

    def _read_records(self, grant: ReadGrant, low: int, high: int, flags: int) -> memoryview:
        """Read the records low..high-1 of a grant and verify them (rule 2).

        Raises BlockingIOError if `flags` forbid waiting and the bytes are not in the page cache.
        """
        lengths = grant.lengths[low:high]
        bytes_to_skip, size = (
            raw_records.total_bytes(grant.lengths[:low]),
            raw_records.total_bytes(lengths),
        )
        records = self._buffers.take(size)
        read_bytes = crc = 0
        for location in grant.locations:
            if bytes_to_skip < location.size and read_bytes < size:
                count = min(location.size - bytes_to_skip, size - read_bytes)
                part = records[read_bytes : read_bytes + count]
                start = FileLocation(location.segment, location.offset + bytes_to_skip, count)
                crc = self._read_segment(part, start, grant.ticket, crc, flags)
                read_bytes += count
            bytes_to_skip = max(0, bytes_to_skip - location.size)
        first = TransactionId(grant.first + low)
        if raw_records.verified_crcs(records, lengths, first, records_crc=crc) is None:
            raise errors.ChecksumMismatch(
                f"partition {self._partition_id}: at least one of the records "
                f"{first}..{first + lengths.size - 1} in the files of storage {self._address} "
                "is damaged"
            )
        return records

    def _read_segment(
        self, part: memoryview, location: FileLocation, ticket: bytes, crc: int, flags: int
    ) -> int:
        """Read bytes of a segment into `part`; return `crc` continued over these bytes."""
        segment, offset = location.segment, location.offset
        file = self._files.get(segment)
        try:
            if file is None:
                request = encode_segment(self._partition_id, segment, ticket)
                descriptor = descriptor_passing.request_descriptor(
                    self._socket_name, request, timeout_s=self._timeout_s
                )
                file = self._files[segment] = FileIO(descriptor)
            while part:
                count = os.preadv(file.fileno(), [part[:_PIECE_BYTES]], offset, flags)
                if not count and flags:
                    # Linux 5.9 and 5.10 also return 0 for bytes not in memory (preadv2(2), "Bugs").
                    raise BlockingIOError(errno.EAGAIN, "perhaps not in memory")
                if not count:
                    raise errors.ReadFailed(
                        f"partition {self._partition_id}: segment {segment} of storage "
                        f"{self._address} ends too early: expected {len(part)} more bytes at "
                        f"offset {offset}"
                    )
                crc = crc32(part[:count], crc)
                part = part[count:]
                offset += count
        except (OSError, ValueError) as error:  # a file that was closed meanwhile is a ValueError
            if flags and isinstance(error, OSError) and error.errno in _WOULD_WAIT_ERRORS:
                raise BlockingIOError(error.errno, str(error)) from error
            raise errors.ReadFailed(f"segment {segment} of {self._address}: {error}") from error
        return crc


class _ReadBuffers:
    """Read buffers, which are reused as soon as no view of them is held.

    New memory for each read would cost more than the read, because the system clears it first. Any
    thread may release views. But only one thread requests buffers (rule 5), because two threads
    could get the same buffer.
    """

    def __init__(self) -> None:
        self._arrays: list[npt.NDArray[np.uint8]] = []

    def take(self, size: int) -> memoryview:
        """Return a buffer of `size` bytes that no other view uses; its content is arbitrary."""
        for index in range(len(self._arrays)):
            # Each view of the buffer, and each view of a view, adds one reference.
            if sys.getrefcount(self._arrays[index]) == _UNUSED_BUFFER_REFERENCES:
                if self._arrays[index].size < size:
                    self._arrays[index] = np.empty(size, dtype=np.uint8)
                return self._arrays[index].data[:size]
        buffer = np.empty(size, dtype=np.uint8)
        if len(self._arrays) < _BUFFERS_MAX:
            self._arrays.append(buffer)
        return buffer.data
