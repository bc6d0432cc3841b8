"""A reader on the storage's machine: the storage sends record locations, not records."""

import asyncio
import contextlib

import numpy as np
import pytest

from tests.integration.run_storage import KEY, PARTITION_COUNT
from tests.integration.test_storage_daemon import config_for, on_loop, serving, session
from tests.storage_owner import encode_records
from waltz_core import errors
from waltz_core.client.read import ranges
from waltz_core.client.read.ranges import RangeQuery, ReplicaReader, ReplicaSet
from waltz_core.storage.files.format import SEGMENT_HEADER_BYTES, segment_name
from waltz_core.transport import descriptor_passing
from waltz_core.wire.messages import DamageFound, RangeForm

pytestmark = pytest.mark.skipif(
    not descriptor_passing.IS_SUPPORTED, reason="abstract socket names exist only on Linux"
)

COUNT = 60
RECORDS = encode_records(0, COUNT)[0]
SIZE = len(RECORDS) // COUNT


class Log:
    """A daemon with 60 records in batches of 10, and a daemon that reads them."""

    def __init__(self, address, owner):
        self.address = address
        self.owner = owner
        self.from_server = []

    async def server(self, query):
        self.from_server.append(query.first)
        raise errors.Unavailable("the server's turn")

    @contextlib.contextmanager
    def reader(self, session_id=5, last=COUNT - 1):
        replicas = ReplicaSet(KEY.bytes, PARTITION_COUNT, session_id, last, (self.address,))
        reader = ReplicaReader(0, replicas, self.server, first=0, timeout_s=10.0)
        try:
            yield reader
        finally:
            reader.close()

    async def read(self, reader, first=0, last=COUNT - 1, form=RangeForm.WHOLE):
        """Read in chunks of 7 records; return the bytes that the reader gets without the server."""
        received = b""
        while first <= last:
            try:
                chunk = await reader.fetch(RangeQuery(first, last, form, (), 7 * SIZE))
            except errors.Unavailable:
                break
            assert chunk.first == first
            assert chunk.lineage[0].first <= first
            assert chunk.lineage[-1].last >= chunk.next - 1
            received += bytes(chunk.records)
            first = chunk.next
        return received


@contextlib.asynccontextmanager
async def opened_log(directory):
    async with serving(config_for(directory)) as address, session(address, 5) as owner:
        await owner.prepare()
        await owner.engage()
        for _ in range(COUNT // 10):
            await owner.ask(owner.owner.append(10))
        yield Log(address, owner)


def test_records_read_from_the_files_have_all_their_bytes(tmp_path):
    async def main():
        async with opened_log(tmp_path) as log:
            with log.reader() as reader:
                assert await log.read(reader) == RECORDS
                assert reader.from_local_count == reader.from_replica_count == 9
                assert await log.read(reader, 33, 41) == RECORDS[33 * SIZE : 42 * SIZE]
                headers = await log.read(reader, 0, 9, RangeForm.HEADERS)
                assert headers[28:56] == RECORDS[SIZE : SIZE + 28]
                assert (reader.from_local_count, reader.from_replica_count) == (11, 12)
            assert log.from_server == []

    on_loop(main())


def test_damage_is_found_by_the_reader_and_reported_to_the_storage(tmp_path):
    async def main():
        async with opened_log(tmp_path) as log:
            path = tmp_path / "0" / segment_name(0, ".seg")
            offset = SEGMENT_HEADER_BYTES + 33 * SIZE + 37
            content = path.read_bytes()
            path.write_bytes(content[:offset] + b"X" + content[offset + 1 :])
            with log.reader() as reader:
                assert await log.read(reader) == RECORDS[: 33 * SIZE]
                assert reader.from_local_count == 4  # the fifth chunk has the damaged record
            assert log.from_server == [33]
            (message,) = await log.owner.link.receive()  # so that the owner repairs it
            assert isinstance(message, DamageFound)
            assert np.frombuffer(message.damaged, ">i8").tolist() == [33, 33]
            with log.reader() as reader:  # known damage is not reported
                assert await log.read(reader, 30) == RECORDS[30 * SIZE : 33 * SIZE]
                assert reader.from_local_count == 1

    on_loop(main())


def test_a_storage_ignores_damage_reports_of_other_store_sessions(tmp_path):
    async def main():
        async with opened_log(tmp_path) as log:
            for session_id in (4, 6):
                with log.reader(session_id) as reader:
                    assert await log.read(reader) == b""
            async with session(log.address, 6) as later:
                await later.prepare()
                with log.reader() as reader:
                    assert await log.read(reader) == b""
                with log.reader(6) as reader:  # the replica is prepared, but not engaged yet
                    assert await log.read(reader) == b""
            assert log.from_server == [0, 0, 0, 0]

    on_loop(main())


def test_a_local_reader_requests_no_records_after_its_last_id(tmp_path):
    async def main():
        async with opened_log(tmp_path) as log:
            with log.reader(last=19) as reader:
                assert await log.read(reader, 0, 19) == RECORDS[: 20 * SIZE]
                assert await log.read(reader, 0, 20) == b""
            assert log.from_server == [0]

    on_loop(main())


def test_a_local_reader_abandons_a_storage_that_disconnects_during_a_request(tmp_path):
    async def main():
        async with contextlib.AsyncExitStack() as running:
            log = await running.enter_async_context(opened_log(tmp_path))
            with log.reader() as reader:
                assert await log.read(reader, 0, 6) == RECORDS[: 7 * SIZE]
                await reader.fetch(RangeQuery(7, COUNT - 1, RangeForm.WHOLE, (), SIZE))
                await running.aclose()
                assert await log.read(reader, 8) == b""
            assert log.from_server == [8]

    on_loop(main())


def test_a_local_reader_that_is_closed_passes_its_pending_request_to_the_server(tmp_path):
    async def read_without_answer(reader):
        with pytest.raises(errors.Unavailable) as message:
            await reader.fetch(RangeQuery(0, COUNT - 1))
        return str(message.value)

    async def main():
        async with opened_log(tmp_path) as log:
            with log.reader() as reader:
                await reader.fetch(RangeQuery(30, COUNT - 1, RangeForm.WHOLE, (), SIZE))
                async with asyncio.TaskGroup() as tasks:
                    message = tasks.create_task(read_without_answer(reader))
                    await asyncio.sleep(0)  # the storage is queried for their positions
                    reader.close()
                assert await message == "the server's turn"
            assert log.from_server == [0]

    on_loop(main())


def test_a_storage_that_passes_no_file_sends_the_records(tmp_path, monkeypatch):
    async def main():
        async with opened_log(tmp_path) as log:
            with log.reader() as reader, monkeypatch.context() as changed:
                changed.setattr(ranges.descriptor_passing, "is_offered", lambda _door: False)
                assert await log.read(reader) == RECORDS
                assert reader.from_local_count == 0
            (tmp_path / "0" / segment_name(0, ".seg")).rename(tmp_path / "elsewhere")
            with (
                log.reader() as reader
            ):  # it returns the positions, but cannot open the file for another process
                assert await log.read(reader) == RECORDS
                assert (reader.from_local_count, reader.from_replica_count) == (0, 9)

    on_loop(main())
