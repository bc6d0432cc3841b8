"""The checks of a reader that reads a storage's files on the same machine."""

import asyncio
import errno
import os
import sys
import threading

import numpy as np
import pytest

from tests.storage_owner import encode_records
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core import errors
from waltz_core.client.read import local_reader as local_reader_module
from waltz_core.client.read.local_reader import LocalReader, ReadGrant
from waltz_core.records.record import LineageEntry
from waltz_core.wire.record_locations import FileLocation, decode_segment

FIRST_RECORD_OFFSET = 128  # the size of a segment's file header


class Files:
    """Records 10..29 in two segments, 10..16 and 17..29, and the requests for them."""

    def __init__(self, directory):
        self.directory = directory
        self.records, _, lengths = encode_records(10, 20)
        self.lengths = np.frombuffer(lengths, ">i4").astype(np.int64)
        self.size = int(self.lengths[0])
        self.write(10, self.records[: 7 * self.size])
        self.write(17, self.records[7 * self.size :])
        self.ticket = b""
        self.requested_ids = []
        self.opened_segments = []

    def write(self, segment, records):
        (self.directory / str(segment)).write_bytes(bytes(FIRST_RECORD_OFFSET) + records)

    def request_descriptor(self, socket_name, request, *, timeout_s):
        assert (socket_name, timeout_s) == ("the name", 5.0)
        partition_id, segment, ticket = decode_segment(request)
        assert (partition_id, ticket) == (3, self.ticket)
        self.opened_segments.append(segment)
        return os.open(self.directory / str(segment), os.O_RDONLY)

    def grant(self, first, count):
        """Return a grant for the given number of records from `first` on."""
        locations = []
        for segment, end in ((10, 17), (17, 30)):
            low, high = max(first, segment), min(first + count, end)
            if low < high:
                offset = FIRST_RECORD_OFFSET + (low - segment) * self.size
                locations.append(FileLocation(segment, offset, (high - low) * self.size))
        lineage = (LineageEntry(8, 14, 1, 77, bytes(16)), LineageEntry(15, 40, 2, 78, bytes(16)))
        return ReadGrant(first, self.lengths[:count], tuple(locations), lineage, self.ticket)

    def read(self, reader, first, last, bytes_max=1 << 20, count=20):
        async def request_grant():
            self.requested_ids.append(first)
            return self.grant(first, min(count, 30 - first))

        return asyncio.run(reader.read(first, last, bytes_max, request_grant))


@pytest.fixture
def files(tmp_path, monkeypatch):
    storage_files = Files(tmp_path)
    monkeypatch.setattr(
        local_reader_module.descriptor_passing,
        "request_descriptor",
        storage_files.request_descriptor,
    )
    return storage_files


@pytest.fixture
def reader():
    local_reader = LocalReader("10.0.0.2:15280", "the name", 3, timeout_s=5.0)
    yield local_reader
    local_reader.close()


def test_a_range_over_two_segments_is_read_in_pieces_with_one_grant_of_the_storage(files, reader):
    records, first = b"", 10
    while first < 30:
        records_read = files.read(reader, first, 29, 3 * files.size)
        assert records_read.lengths.size == min(3, 30 - first)
        batch_starts = {8} if first + 2 < 15 else {8, 15} if first < 15 else {15}
        assert {entry.first for entry in records_read.lineage} == batch_starts
        records += bytes(records_read.records)
        first += records_read.lengths.size
    assert records == files.records
    assert files.requested_ids == [10]
    assert files.opened_segments == [10, 17]


def test_files_are_requested_with_the_ticket_of_the_latest_grant(files, reader):
    for ticket in (b"first", b"second"):
        files.ticket = ticket  # `request_descriptor` compares the ticket of the request with it
        reader.close()
        assert files.read(reader, 10, 12, count=3).lengths.size == 3
        files.read(reader, 20, 22, count=3)
    assert files.opened_segments == [10, 17, 10, 17]


def test_a_read_is_limited_to_the_requested_bytes_and_has_at_least_one_record(files, reader):
    assert files.read(reader, 12, 13).lengths.size == 2
    assert files.read(reader, 20, 29, 1).lengths.size == 1
    assert files.read(reader, 11, 29).lengths.size == 19
    assert files.requested_ids == [12, 11]  # records outside of a grant are requested


def test_records_after_the_end_of_a_grant_are_requested_again(files, reader):
    assert files.read(reader, 10, 29, count=8).lengths.size == 8
    assert files.read(reader, 18, 29).lengths.size == 12
    assert files.requested_ids == [10, 18]


@pytest.mark.parametrize("at", [7, 28, 35, 36, 43])
def test_a_changed_byte_of_a_record_is_rejected(files, reader, at):
    bad = bytearray(files.records[: 7 * files.size])
    bad[2 * files.size + at] ^= 1
    files.write(10, bytes(bad))
    with pytest.raises(
        errors.ChecksumMismatch,
        match=r"partition 3: at least one of the "
        r"records 10\.\.29",
    ):
        files.read(reader, 10, 29)


def test_valid_records_with_unexpected_ids_are_rejected(files, reader):
    """A position that is off by a record has valid checksums and wrong IDs."""
    files.write(10, files.records[files.size : 8 * files.size])
    with pytest.raises(errors.ChecksumMismatch):
        files.read(reader, 10, 12)


def test_a_file_that_is_truncated_before_the_read_is_reported(files, reader):
    files.read(reader, 10, 12)
    os.truncate(files.directory / "10", FIRST_RECORD_OFFSET + 4 * files.size + 5)
    assert files.read(reader, 13, 13).lengths.size == 1
    with pytest.raises(errors.ReadFailed, match="ends too early:"):
        files.read(reader, 13, 14)


def test_a_storage_that_passes_no_file_descriptor_is_reported(files, reader, monkeypatch):
    def no_answer(_socket_name, _request, *, timeout_s):
        raise errors.Unreachable(f"no answer within {timeout_s}")

    monkeypatch.setattr(local_reader_module.descriptor_passing, "request_descriptor", no_answer)
    with pytest.raises(errors.Unreachable, match="no answer"):
        files.read(reader, 10, 12)


def test_a_reader_that_was_closed_has_no_files_open(files, reader):
    files.read(reader, 10, 29)
    opened = list(reader._files.values())
    reader.close()
    assert [file.closed for file in opened] == [True, True]


def test_files_that_a_reader_has_finished_are_closed(files, reader):
    files.read(reader, 10, 29, count=7)
    (open_file,) = reader._files.values()
    files.read(reader, 17, 29)
    assert open_file.closed
    assert list(reader._files) == [17]


class Preadv:
    """Replaces `os.preadv`: records its callers, and can report that no page is in memory."""

    def __init__(self, monkeypatch, error=None):
        self.callers = []
        self._error = error
        self._call = os.preadv
        monkeypatch.setattr(local_reader_module.os, "preadv", self.read)

    def read(self, descriptor, buffers, offset, flags):
        is_main = threading.current_thread() is threading.main_thread()
        self.callers.append("loop" if is_main else "thread")
        assert bool(flags) == is_main, "only a thread may wait"
        if flags and self._error == 0:
            return 0  # as Linux 5.10 does
        if flags and self._error is not None:
            raise OSError(self._error, "not in memory")
        return self._call(descriptor, buffers, offset, flags)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports what is in memory")
def test_cached_records_need_no_thread_once_the_file_is_open(files, reader, monkeypatch):
    system_call = Preadv(monkeypatch)
    records = [bytes(files.read(reader, first, first + 4).records) for first in (10, 15, 20, 25)]
    assert b"".join(records) == files.records
    # If a grant needs a segment whose file is not open yet, the grant is read on a thread.
    assert system_call.callers == ["thread"] * 3 + ["loop"] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports what is in memory")
@pytest.mark.parametrize("error", [errno.EAGAIN, errno.EOPNOTSUPP, 0])
def test_records_outside_of_the_page_cache_are_read_on_a_thread(files, reader, monkeypatch, error):
    files.read(reader, 10, 29)
    system_call = Preadv(monkeypatch, error)
    records = [bytes(files.read(reader, first, first + 4).records) for first in (10, 15, 20, 25)]
    assert b"".join(records) == files.records
    # After the first failure, the rest of the grant is read on a thread.
    assert system_call.callers.count("loop") == 1


def test_a_read_fails_while_a_thread_still_runs_a_cancelled_read(files, monkeypatch):
    is_running, reader = (
        threading.Event(),
        LocalReader("10.0.0.2:15280", "the name", 3, timeout_s=0.05),
    )

    def hang(_socket_name, request, *, timeout_s):
        assert is_running.wait(TEST_TIMEOUT_S)
        return files.request_descriptor("the name", request, timeout_s=100 * timeout_s)

    monkeypatch.setattr(local_reader_module.descriptor_passing, "request_descriptor", hang)

    async def request_grant():
        return files.grant(10, 20)

    async def read():
        with pytest.raises(errors.Unreachable, match=r"within 0\.05 s"):
            await reader.read(10, 29, 1 << 20, request_grant)
        with pytest.raises(
            errors.Unreachable, match="another read of this connection is still running"
        ):
            await reader.read(10, 29, 1 << 20, request_grant)
        is_running.set()

    asyncio.run(read())  # `read` waits for the thread
    reader.close()


def test_buffers_in_use_are_not_overwritten(files, reader):
    kept = [files.read(reader, first, first).records[:] for first in range(10, 30)]
    assert b"".join(kept) == files.records


def test_unreferenced_memory_is_used_again(files, reader):
    addresses = {
        files.read(reader, first, first).records.obj.ctypes.data for first in range(10, 30)
    }
    assert len(addresses) <= 2
