"""Administration of a real storage daemon with the tools of 0.13 and of this version."""

import asyncio
import json
import struct
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.integration.run_storage import KEY, PARTITION_COUNT
from tests.integration.test_storage_daemon import (
    assign,
    config_for,
    new_cluster,
    on_loop,
    running_storage,
    serving,
    session,
    write_states,
)
from tests.ports import free_port
from waltz_core import errors
from waltz_core.client.links.storage_admin import admin_connection
from waltz_core.cluster.zookeeper.zookeeper_session import open_session
from waltz_core.records.record import BEFORE_FIRST, PartitionId, ReplicaId
from waltz_core.storage.process.storage_daemon import StaticCluster
from waltz_core.wire import codec
from waltz_core.wire.admin_messages import (
    AdminFailure,
    AdminMessage,
    CheckCluster,
    Done,
    HeldRequest,
    HeldResponse,
    MarkSuspect,
    MetricsRequest,
    MetricsResponse,
    RecordListRequest,
    RecordListResponse,
    RemovePartition,
    ReplicaRequest,
    ReplicaResponse,
    ReSeed,
    ScrubRequest,
    ScrubResponse,
    SessionInfoRequest,
    SessionInfoResponse,
    SetAssigned,
    SetAvailable,
    StorageRequest,
    StorageResponse,
)
from waltz_core.wire.messages import Appended, Hello, Nack, Prepare, Prepared, WireProtocol

WIRE = Path(__file__).parents[1] / "golden" / "wire"
CAPTURED = {
    (each["name"], each["decoded"]["seqNum"]): bytes.fromhex(each["frame_hex"])
    for each in json.loads((WIRE / "storage_admin_v0.json").read_text(encoding="utf-8"))
}


class OriginalTool:
    """The bytes that tools of 0.13 send and read, over a socket, without code of this project."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    async def frame(self):
        header = await self.reader.readexactly(7)
        return header + await self.reader.readexactly(struct.unpack(">i", header[3:])[0])

    async def exchange(self, frame):
        self.writer.write(frame)
        return await self.frame()

    async def ask(self, message):
        answer = await self.exchange(b"".join(codec.encode(message, 0)))
        assert answer[:3] == b"A\0\0"
        decoded = codec.decode(WireProtocol.ADMIN, 0, memoryview(answer)[7:])
        assert isinstance(decoded, AdminMessage)
        assert decoded.sequence == message.sequence
        return decoded


@asynccontextmanager
async def original_tool(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    tool = OriginalTool(reader, writer)
    hello = await tool.exchange(codec.encode_hello(Hello((0,), "Waltz Storage Admin Client")))
    assert hello[:3] == b"H\0\0"
    try:
        yield tool
    finally:
        writer.close()
        await writer.wait_closed()


@asynccontextmanager
async def storage(directory, *, partitions=(0, 2), **options):
    """Give the data address and the admin port of a daemon in this loop."""
    port = free_port()
    cluster = StaticCluster(KEY, PARTITION_COUNT, tuple(map(PartitionId, partitions)))
    async with serving(config_for(directory, admin_port=port, **options), cluster) as address:
        yield address, port


def admin_of(port):
    return admin_connection(f"127.0.0.1:{port}")


async def fill(owner, batches=3):
    await owner.prepare()
    await owner.engage()
    for _ in range(batches):
        assert isinstance(await owner.ask(owner.owner.append(10)), Appended)


async def until_served(address, session_id, partition_id=0):
    """Return the answer to a session, as soon as the storage serves the partition."""
    while True:
        async with session(address, session_id, partition_id) as owner:
            make = owner.owner.make
            answer = await owner.ask(
                make(Prepare, owner.owner.nonce, bytes(16), KEY.bytes, PARTITION_COUNT)
            )
            if isinstance(answer, Prepared):
                return answer
            assert isinstance(answer, Nack)
            assert answer.error_code == errors.UnknownPartition.code
        await asyncio.sleep(0.01)


async def replica(admin, partition):
    return await admin.request(ReplicaResponse, ReplicaRequest, partition)


# ---------------------------------------------------------------------------------------------
# version 0


def test_a_tool_of_waltz_0_13_is_answered_byte_for_byte(tmp_path):
    async def main():
        async with storage(tmp_path, partitions=()) as (_, port), original_tool(port) as tool:
            opened = await tool.exchange(CAPTURED["OPEN_REQUEST", -1])
            assert opened == CAPTURED["SUCCESS_RESPONSE", -1]
            held = await tool.exchange(CAPTURED["ASSIGNED_PARTITION_STATUS_REQUEST", 0])
            assert held == CAPTURED["ASSIGNED_PARTITION_STATUS_RESPONSE", 0]
            assert await tool.exchange(CAPTURED["PARTITION_ASSIGNMENT_REQUEST", 1]) == done(1)
            assert await tool.exchange(CAPTURED["PARTITION_AVAILABLE_REQUEST", 2]) == done(2)
            answer = await tool.ask(HeldRequest(3))
            assert answer == HeldResponse(3, ((0, True), (1, True), (2, True), (3, False)))
            assert await tool.exchange(CAPTURED["PARTITION_ASSIGNMENT_REQUEST", 5]) == done(5)
            answer = await tool.ask(HeldRequest(6))
            assert answer == HeldResponse(6, ((0, True), (1, True), (2, True)))
            assert list((tmp_path / "3").iterdir()) == []
            marks = await tool.ask(SessionInfoRequest(7, 2))
            assert marks == SessionInfoResponse(7, 2, -1, -1, -1)
            failure = await tool.ask(CheckCluster(-1, bytes(16), PARTITION_COUNT))
            assert isinstance(failure, AdminFailure)
            assert "ClusterKeyMismatch" in failure.text
            failure = await tool.ask(SetAssigned(8, (3,), False, True))
            assert isinstance(failure, AdminFailure)
            assert "this storage does not have" in failure.text

    def done(sequence):
        return bytes.fromhex("41000000000009 01") + struct.pack(">q", sequence)

    on_loop(main())


def test_answers_to_a_0_13_tool_have_the_fields_that_the_tool_reads(tmp_path):
    async def main():
        async with storage(tmp_path) as (address, port), session(address, 5) as owner:
            await fill(owner)
            async with original_tool(port) as tool:
                read = await tool.ask(RecordListRequest(1, 0, 25, 20))
                assert isinstance(read, RecordListResponse)
                assert [record.transaction_id for record in read.records] == [25, 26, 27, 28, 29]
                assert {record.data for record in read.records} == {b"data"}
                metrics = await tool.ask(MetricsRequest(2))
                assert isinstance(metrics, MetricsResponse)
                gauges = json.loads(bytes(metrics.json))["gauges"]
                ids = gauges["waltz-storage.waltz-storage-partition-ids"]["value"]
                assert ids == [0, 2]
                assert gauges["waltz-storage.partition-0.session-id"]["value"] == 5
                assert gauges["waltz-storage.partition-0.flags"]["value"] == 5
            # The owner of the partition has not noticed any of this.
            assert isinstance(await owner.ask(owner.owner.append(1)), Appended)

    on_loop(main())


def test_each_port_rejects_the_other_protocols(tmp_path):
    async def main():
        async with storage(tmp_path) as (address, port):
            with pytest.raises(errors.WaltzError):
                async with session(f"127.0.0.1:{port}", 5) as owner:
                    await owner.prepare()
            with pytest.raises(errors.WaltzError):
                async with admin_connection(address) as admin:
                    await admin.request(StorageResponse, StorageRequest)
            async with admin_of(port) as admin:
                response = await admin.request(StorageResponse, StorageRequest)
                assert (response.address, response.held) == (address, (0, 2))

    on_loop(main())


# ---------------------------------------------------------------------------------------------
# version 1


def test_a_partition_that_is_offline_is_not_served_and_continues_when_it_is_back(tmp_path):
    async def main():
        async with storage(tmp_path) as (address, port), admin_of(port) as admin:
            async with session(address, 5) as owner, session(address, 5, 2) as other:
                await fill(owner)
                await fill(other)
                await admin.request(Done, SetAvailable, (0,), False)
                await owner.link.wait_closed()  # the storage has closed the connection
                assert isinstance(await other.ask(other.owner.append(1)), Appended)
            async with session(address, 6) as owner:
                nack = await owner.ask(
                    owner.owner.make(Prepare, bytes(16), bytes(16), KEY.bytes, 4)
                )
                assert "is offline, or not assigned" in nack.message
            found = await replica(admin, 0)
            assert (found.is_available, found.is_served, found.synced_max) == (False, False, 29)
            with pytest.raises(
                errors.BadRequest, match="cannot be scrubbed, because it is offline"
            ):
                await admin.request(ScrubResponse, ScrubRequest, 0, True)
            read = await admin.request(RecordListResponse, RecordListRequest, 0, 28, 9)
            assert len(read.records) == 2
        async with storage(tmp_path) as (address, port), admin_of(port) as admin:
            assert not (await replica(admin, 0)).is_served  # also after a restart
            await admin.request(Done, SetAvailable, (0,), True)
            prepared = await until_served(address, 6)
            assert (prepared.synced_max, prepared.last_session, prepared.suspect) == (29, 5, False)

    on_loop(main())


def test_a_suspect_replica_is_reported_to_the_next_session(tmp_path):
    async def main():
        async with storage(tmp_path) as (address, port), admin_of(port) as admin:
            async with session(address, 5) as owner:
                await fill(owner)
                with pytest.raises(
                    errors.BadRequest, match="the only one in sync in store session 5"
                ):
                    await admin.request(Done, MarkSuspect, 0, False)
                await admin.request(Done, MarkSuspect, 0, True)
                await owner.link.wait_closed()
            prepared = await until_served(address, 6)
            assert (prepared.suspect, prepared.synced_max) == (True, 29)

    on_loop(main())


def test_a_log_is_deleted_only_on_request_and_the_deletion_survives_a_kill(tmp_path):
    async def remove_partition(address, port):
        async with session(address, 5) as owner, admin_of(port) as admin:
            await fill(owner)
            with pytest.raises(
                errors.BadRequest, match="acknowledgements count in store session 5"
            ):
                await admin.request(Done, ReSeed, 0, False)
            assert isinstance(await owner.ask(owner.owner.append(1)), Appended)
            await admin.request(Done, ReSeed, 0, True)

    async def check_removed(address):
        async with session(address, 4) as late:
            old = await late.ask(late.owner.make(Prepare, bytes(16), bytes(16), KEY.bytes, 4))
            assert old.error_code == errors.SessionFenced.code  # the storage keeps its promise
        prepared = await until_served(address, 6)
        assert (prepared.synced_max, prepared.last_session) == (BEFORE_FIRST, -1)
        assert prepared.suspect

    port = free_port()
    with running_storage(tmp_path, str(KEY), str(port)) as process:
        on_loop(remove_partition(process.address, port))
        process.end()
    with running_storage(tmp_path) as process:
        on_loop(check_removed(process.address))


# ---------------------------------------------------------------------------------------------
# with ZooKeeper


def test_a_storage_removes_a_partition_only_after_zookeeper_and_the_session_release_it(
    tmp_path, zookeeper
):
    connect = f"{zookeeper}/storage-admin"
    port, admin_port = free_port(), free_port()
    address, other = ReplicaId(f"127.0.0.1:{port}"), ReplicaId("127.0.0.1:1")
    config = config_for(tmp_path, connect=connect, port=port, admin_port=admin_port)

    async def main():
        async with open_session(connect) as coordinator:
            await coordinator.create_cluster(new_cluster(address))
            async with serving(config, None), admin_of(admin_port) as admin:
                await until_served(address, 5)
                await assign(coordinator, address, other)
                await write_states(coordinator, address, other)
                with pytest.raises(
                    errors.BadRequest, match="because ZooKeeper assigns it to this storage"
                ):
                    await admin.request(Done, RemovePartition, 0, True, True)
                await assign(coordinator, other)
                with pytest.raises(errors.BadRequest, match="less than the quorum of 2"):
                    await admin.request(Done, RemovePartition, 0, True, False)
                assert (await replica(admin, 0)).is_held
                await write_states(coordinator, other)
                await admin.request(Done, RemovePartition, 0, True, False)
                assert list((tmp_path / "0").iterdir()) == []
                found = await replica(admin, 0)
                assert (found.is_held, found.is_served) == (False, False)
                await assign(coordinator, address, other)
                prepared = await until_served(address, 6)
                assert (prepared.synced_max, prepared.last_session) == (BEFORE_FIRST, -1)

    on_loop(main())
