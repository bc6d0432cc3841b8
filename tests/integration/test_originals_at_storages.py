"""Original servers at real storage daemons: S 0 over TCP, and our own servers before and after."""

import asyncio
import contextlib
import json
import signal
import struct
from pathlib import Path
from uuid import UUID

import pytest

from tests import original_server as original
from tests.crash import layout
from tests.integration.run_storage import KEY, PARTITION_COUNT
from tests.integration.test_server_daemon import ALICE, ROOT, Client, World, ids
from tests.integration.test_storage_daemon import StorageProcess, session
from tests.loops import until
from tests.original_server import Link, Metadata, Refused, Session, State, record_of
from tests.patience import HANG_S
from tests.ports import free_port
from waltz_core import net
from waltz_core.cli.main import main as command
from waltz_core.cluster.creation import NewCluster, NewStorage
from waltz_core.cluster.znodes import Create, Delete, Set
from waltz_core.record import PartitionId, ReplicaId
from waltz_core.wire import messages
from waltz_core.wire.messages import Appended, Nack, RangeForm, Surface

METADATA = f"{ROOT}/store/partition/0"
GOLDEN = Path(__file__).parents[1] / "golden" / "wire" / "storage_v0.json"
CONFLICT = "com.wepay.waltz.storage.exception.ConcurrentUpdateException: session id has changed to "
STORAGE_ERROR = "com.wepay.waltz.storage.exception.StorageException: "


def on_loop(main):
    """Run a story; it starts storages and servers, which a busy machine takes long for."""

    async def bounded():
        async with asyncio.timeout(HANG_S):
            await main

    net.run(bounded())


class Storages:
    """Real storages, each with its directory and a port of its own."""

    def __init__(self, root, count):
        self.directories = [root / str(number) for number in range(count)]
        self.ports = [free_port() for _ in range(count)]
        self.addresses = [f"127.0.0.1:{port}" for port in self.ports]
        self.processes = [None] * count
        self.links = []
        for directory in self.directories:
            directory.mkdir()

    def start(self, number):
        directory, port = self.directories[number], str(self.ports[number])
        self.processes[number] = StorageProcess(directory, str(KEY), "0", port)
        assert self.processes[number].line.startswith("storage ready"), self.processes[number].line

    def end(self, number, how=signal.SIGKILL):
        self.processes[number].end(how)
        self.processes[number] = None

    def link(self, number, *, opens=True):
        options = {"key": KEY.bytes, "partition_count": PARTITION_COUNT} if opens else {}
        self.links.append(Link(self.addresses[number], **options))
        return self.links[-1]

    def session(self, metadata, partition=0):
        return Session(KEY.bytes, PARTITION_COUNT, partition, self.addresses, metadata)

    def records(self, number, partition=0):
        """What an original finds in the files; the storage is not running."""
        files = {each: each.read_bytes() for each in self.directories[number].rglob("*.*")}
        return layout.read_directory(files, self.directories[number])[1][partition]


@contextlib.contextmanager
def storages(root, count=3):
    found = Storages(root, count)
    try:
        for number in range(count):
            found.start(number)
        yield found
    finally:
        for link in found.links:
            link.close()
        for number, process in enumerate(found.processes):
            if process is not None:
                found.end(number)


@contextlib.contextmanager
def one(root):
    with storages(root, 1) as found:
        yield found, found.link(0)


def on_disk(record):
    """A record of the wire as it lies in a segment."""
    data_crc, body = record[-4:], record[:-4]
    plain = body[: original.RECORD.size] + data_crc + body[original.RECORD.size :]
    return plain + layout.zlib.crc32(plain).to_bytes(4, "big")


def many(first, count, size=40):
    return [record_of(each, b"%d-" % each + bytes(size)) for each in range(first, first + count)]


def refused(call, *arguments):
    with pytest.raises(Refused) as found:
        call(*arguments)
    return str(found.value)


# ---------------------------------------------------------------------------------------------
# what is answered


def golden(name, number=0):
    found = [each for each in json.loads(GOLDEN.read_text()) if each["name"] == name]
    return found[number]


def frame(name, number=0):
    return bytes.fromhex(golden(name, number)["frame_hex"])


def payload(name, number=0):
    return frame(name, number)[7:]


def said(captured):
    """What a captured failure says, but for its stack: ours is empty."""
    (size,) = struct.unpack_from(">i", captured, 7 + 21)
    return captured[7 : 7 + 25 + size] + bytes(4)


def test_what_was_captured_of_an_original_is_answered_as_it_was(tmp_path):
    with one(tmp_path) as (found, _):
        link = found.link(0, opens=False)
        assert link.exchange(payload("OPEN_REQUEST")) == payload("SUCCESS_RESPONSE")
        with_partition = payload("LAST_SESSION_INFO_RESPONSE")
        ask = struct.pack(">bqqib", 2, 0, 3, 2, 0)
        assert link.exchange(ask) == with_partition
        answer = link.exchange(payload("MAX_TRANSACTION_ID_REQUEST"))
        assert answer == struct.pack(">bqqiq", 14, 0, 4, 2, -1)
        truncated = link.exchange(payload("TRUNCATE_REQUEST"))
        assert truncated == struct.pack(">bqqiq", 14, 0, 8, 0, -1)
        marked = link.exchange(payload("SET_LOW_WATER_MARK_REQUEST"))
        assert marked == struct.pack(">bqqi", 7, 0, 12, 0)
        appended = link.exchange(payload("APPEND_REQUEST"))
        assert appended == struct.pack(">bqqi", 7, 0, 16, 0)
        # 0..98 of partition 2, as the captured ones were.
        captured = original.split_records(payload("RECORD_LIST_RESPONSE")[21:])
        single = payload("RECORD_RESPONSE")[22:]
        batch = original.split_records(payload("APPEND_REQUEST", 1)[21:-1])
        log = [record_of(each, b"x") for each in range(99)]
        log[7], log[20:22], log[90:99] = single, batch, captured
        header = payload("RECORD_HEADER_LIST_RESPONSE")[25:]
        log[34] = header + record_of(34, b"x")[28:]
        link.set_mark(0, 2, -1)
        link.append(0, 2, log[:20])
        assert link.exchange(payload("APPEND_REQUEST", 1)) == struct.pack(">bqqi", 7, 0, 30, 2)
        link.append(0, 2, log[22:])
        lists = ("RECORD_HEADER_LIST", "RECORD_LIST")
        for name in lists:
            assert link.exchange(payload(f"{name}_REQUEST")) == payload(f"{name}_RESPONSE")
        assert link.exchange(payload("RECORD_REQUEST")) == payload("RECORD_RESPONSE")
        assert link.exchange(struct.pack(">bqqiq", 9, 1, 9, 2, 99)) == struct.pack(
            ">bqqib", 10, 1, 9, 2, 0
        )
        assert link.exchange(struct.pack(">bqqiq", 11, 1, 10, 2, 99)) == struct.pack(
            ">bqqib", 12, 1, 10, 2, 0
        )
        unknown = struct.pack(">bqqib", 2, 100, 16, 77, 0)
        assert link.exchange(unknown) == said(frame("FAILURE_RESPONSE", 2))


def test_another_cluster_is_told_so_and_the_connection_stays(tmp_path):
    with one(tmp_path) as (found, _):
        link = found.link(0, opens=False)
        for key, count, text in (
            (bytes(16), PARTITION_COUNT, "Provided cluster key is inconsistent with key"),
            (KEY.bytes, 9, "Provided number of partitions is inconsistent with the total number"),
        ):
            answer = link.exchange(
                original.PREFIX.pack(1, -1, -1, -1) + key + struct.pack(">i", count)
            )
            assert answer[:21] == original.PREFIX.pack(8, -1, -1, -1)
            assert text.encode() in answer
        # An original does not ask who was refused, or has not asked: nor do we.
        assert link.info(0, 2) == (-1, -1, -1)


def test_a_later_session_ends_an_earlier_one_and_survives_a_kill(tmp_path):
    with one(tmp_path) as (found, link):
        assert link.info(3, 0) == (-1, -1, -1)
        other = found.link(0)
        assert refused(other.info, 2, 0) == f"{CONFLICT}3, but request context contains 2"
        assert other.max_id(5, 0) == -1
        assert refused(link.append, 3, 0, many(0, 1)) == (
            f"{CONFLICT}5, but request context contains 3"
        )
        assert link.max_id(3, 2) == -1, "of this partition it is still the session"
        assert "expected one soon after" in refused(link.max_id, 6 + (1 << 32), 0)
        found.end(0)
        found.start(0)
        again = found.link(0)
        assert refused(again.info, 4, 0) == f"{CONFLICT}5, but request context contains 4"
        assert again.info(5, 0) == (-1, -1, -1)


def test_marks_cuts_and_appends_keep_to_the_log(tmp_path):
    with one(tmp_path) as (_, link):
        link.info(1, 0)
        link.set_mark(1, 0, -1)
        out_of_order = f"{STORAGE_ERROR}transaction out of order"
        assert refused(link.append, 1, 0, many(1, 1)) == out_of_order
        assert refused(link.append, 1, 0, [*many(0, 2), *many(3, 1)]) == out_of_order
        link.append(1, 0, many(0, 10))
        assert refused(link.set_mark, 1, 0, 8) == (
            f"{STORAGE_ERROR}low-water mark is lower than the max transaction id"
        )
        assert link.truncate(1, 0, 20) == 9
        assert link.info(2, 0) == (1, -1, -1)
        assert link.truncate(2, 0, 7) == 7
        link.set_mark(2, 0, 7)
        assert link.info(2, 0) == (2, 7, 7)
        link.append(2, 0, many(8, 4))
        assert "below the low-water mark 7" in refused(link.truncate, 3, 0, 6)
        link.set_mark(3, 0, 15)
        assert link.info(3, 0) == (3, 15, 11)
        assert link.records(3, 0, 10, 1 << 30) == many(10, 2)
        assert link.records(3, 0, 12, 5) == link.records(3, 0, -1, 5) == []
        assert "cannot run offline recovery" in refused(lambda: link.info(3, 0, offline=True))


def test_a_list_is_no_longer_than_there_is_room_for(tmp_path):
    with one(tmp_path) as (_, link):
        link.info(0, 0)
        large = [record_of(each, bytes(1 << 20)) for each in range(12)]
        for each in large:
            link.append(0, 0, [each])
        found = link.records(0, 0, 0, (1 << 31) - 1)
        assert found == large[:3]
        assert link.records(0, 0, 3, (1 << 31) - 1) == large[3:6]


def test_a_storage_is_one_servers_at_a_time_whichever_kind_it_is(tmp_path):
    async def main(found):
        link = found.link(0)
        link.info(1, 0)
        link.set_mark(1, 0, -1)
        link.append(1, 0, many(0, 5))
        async with session(found.addresses[0], 2) as ours:
            prepared = await ours.prepare()
            assert (prepared.synced_max, prepared.last_session) == (4, 1)
            assert refused(link.max_id, 1, 0) == f"{CONFLICT}2, but request context contains 1"
            assert refused(link.max_id, 2, 0) == f"{CONFLICT}2, but request context contains 2"
            await ours.engage()
            assert isinstance(await ours.ask(ours.owner.append(3)), Appended)
            later = found.link(0)
            assert later.info(3, 0) == (2, 4, 4)
            assert later.max_id(3, 0) == 7
            await ours.link.wait_closed()
            assert link.max_id(0, 2) == -1, "other partitions are not concerned"
        async with session(found.addresses[0], 3) as late:
            owner = late.owner
            late.link.send(owner.make(messages.Heartbeat))
            (answer,) = await late.link.receive()
            assert isinstance(answer, Nack)

    with storages(tmp_path, 1) as found:
        on_loop(main(found))


# ---------------------------------------------------------------------------------------------
# three storages, and servers of both kinds


def test_three_storages_under_an_original(tmp_path, capsys):
    log = []
    with storages(tmp_path) as found:
        first = found.session(Metadata(1))
        assert first.mark == -1
        append(first, log, 1_000)
        found.end(1)
        append(first, log, 1_000)
        assert len(first.ready) == 2
        first.close()
        found.start(1)
        second = found.session(first.metadata)
        assert (second.mark, len(second.ready)) == (1_999, 3)
        append(second, log, 500)
        found.end(2)
        append(second, log, 400)
        second.close()
        third = found.session(second.metadata)
        append(third, log, 100)
        found.start(2)
        # In the session that is open, and what it has missed meanwhile.
        late = found.link(2)
        assert late.info(third.number, 0)[0] == second.number
        third.links[found.addresses[2]] = late
        third.maxes[found.addresses[2]] = late.truncate(third.number, 0, third.mark)
        late.set_mark(third.number, 0, third.mark)
        third.catch_up(found.addresses[2], found.addresses[0], third.next_id - 1)
        third.ready.append(found.addresses[2])
        append(third, log, 10)
        assert len(third.ready) == 3
        third.close()
        found.end(0)
        found.end(1, signal.SIGTERM)
        found.end(2)
        for number in range(3):
            assert found.records(number) == [on_disk(each) for each in log]
            assert command(["disk", "verify", str(found.directories[number])]) == 0, (
                capsys.readouterr().out
            )


def append(session, log, count, portion=100):
    while count:
        made = many(len(log), min(portion, count))
        session.append(made)
        log += made
        count -= len(made)


class Both(World):
    """Real storages, and one ZooKeeper for servers of both kinds."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    async def start(self, partition_count):
        coordinator = self.zookeeper.coordinator(ROOT)
        replicas = [ReplicaId(each) for each in self.found.addresses]
        held = tuple(map(PartitionId, range(partition_count)))
        await coordinator.create_cluster(
            NewCluster(
                "test",
                partition_count,
                UUID(bytes=KEY.bytes),
                tuple(NewStorage(each, 1, 0) for each in replicas),
                dict.fromkeys(replicas, held),
            )
        )
        znodes = self.zookeeper.session()
        for number in range(partition_count):
            await znodes.write([Delete(f"{ROOT}/x/partition/{number}", 0)])

    async def metadata(self):
        node = await self.zookeeper.session().get(METADATA)
        return Metadata.decode(node.data)

    def are_all_ready(self):
        metadata = Metadata.decode(self.zookeeper.entry(METADATA).data)
        return set(metadata.states.values()) == {State(metadata.session)}

    async def leave(self, metadata):
        """Have ZooKeeper say what an original has written."""
        znodes = self.zookeeper.session()
        node = await znodes.get(METADATA)
        if node is None:
            await znodes.write([Create(METADATA, metadata.encode(0))])
        else:
            await znodes.write([Set(METADATA, metadata.encode(0), node.stat.version)])

    async def our_turn(self, log, count):
        """Have a server of ours find all that is in the log, and append to it.

        With nothing to append, it stays until all storages are level, which is not sure otherwise.
        """
        async with asyncio.TaskGroup() as tasks:
            server = await self.serve(tasks)
            await until(lambda: 0 in server.hosts and server.hosts[0].partition.is_open)
            generation = server.hosts[0].partition.generation
            link = await net.dial(Surface.CLIENT, server.address)
            client = Client(link, ALICE, generation)
            mounted = await client.mount()
            assert mounted.high_water_mark == len(log) - 1
            assert await read_all(client, len(log)) == b"".join(map(on_disk, log))
            if count:
                assert await ids(client.append(count)) == list(range(len(log), len(log) + count))
            whole = await read_all(client, len(log) + count)
            at = len(b"".join(map(on_disk, log)))
            while at < len(whole):
                size = struct.unpack_from(">i", whole, at + 28)[0] + 40
                log.append(off_disk(whole[at : at + size]))
                at += size
            if not count:
                await until(self.are_all_ready)
            self.stops.pop().set()
            link.close("done")


async def read_all(client, count):
    parts, first = [], 0
    while first < count:
        ask = messages.RangeRequest(client.req_id(), first, count - 1, 1 << 20, RangeForm.WHOLE, ())
        found = await client.ask(ask)
        assert isinstance(found, messages.RangeData), found
        parts.append(bytes(found.records))
        first = found.next
    return b"".join(parts)


def off_disk(record):
    """A record as it lies in a segment, as it goes over the wire of S 0."""
    head, data_crc, data = record[:32], record[32:36], record[36:-4]
    return head + data + data_crc


def test_servers_of_both_kinds_take_turns(tmp_path, capsys):
    log = []

    async def main(found):
        world = Both(found)
        await world.start(PARTITION_COUNT)

        def begin(metadata):
            return asyncio.to_thread(found.session, metadata)

        first = await begin(Metadata(0))
        append(first, log, 1_500)
        found.end(1)
        append(first, log, 300)
        first.close()
        found.start(1)
        second = await begin(first.metadata)
        append(second, log, 200)
        second.close()
        await world.leave(second.metadata)
        await world.our_turn(log, 50)
        third = await begin(await world.metadata())
        assert third.mark == len(log) - 1
        append(third, log, 30)
        # A storage that is started again in between has made batches of what was there then.
        found.end(0)
        append(third, log, 20)
        third.close()
        found.start(0)
        fourth = await begin(third.metadata)
        assert len(fourth.ready) == 3
        append(fourth, log, 1_200)
        fourth.close()
        await world.leave(fourth.metadata)
        await world.our_turn(log, 10)
        await world.our_turn(log, 0)

    with storages(tmp_path) as found:
        on_loop(main(found))
        check_equal(found, log, capsys)


def check_equal(found, log, capsys):
    """End the storages; all have the log, and the same batches of it."""
    for number in range(3):
        found.end(number, signal.SIGTERM)
    lineages = set()
    for number, directory in enumerate(found.directories):
        assert found.records(number) == [on_disk(each) for each in log]
        assert command(["disk", "verify", str(directory)]) == 0, capsys.readouterr().out
        data = b"".join(each.read_bytes()[64:] for each in sorted(directory.glob("0/*.chn")))
        # Of each entry what all replicas copy, without what was synced before it here.
        lineages.add(b"".join(data[at : at + 48] for at in range(0, len(data), 64)))
    assert len(lineages) == 1


def test_what_one_storage_got_from_an_original_alone_is_taken_over(tmp_path, capsys):
    """It has other batches of the same records, from below the mark of the original's session."""
    log = []

    async def main(found):
        world = Both(found)
        await world.start(PARTITION_COUNT)
        first = await asyncio.to_thread(found.session, Metadata(0))
        append(first, log, 10)
        first.close()
        await world.leave(first.metadata)
        await world.our_turn(log, 5)
        found.end(2)
        await world.our_turn(log, 30)
        found.start(2)
        second = await asyncio.to_thread(found.session, await world.metadata())
        assert len(second.ready) == 3
        append(second, log, 20)
        second.close()
        await world.leave(second.metadata)
        await world.our_turn(log, 10)
        await world.our_turn(log, 0)

    with storages(tmp_path) as found:
        on_loop(main(found))
        check_equal(found, log, capsys)


def test_logs_that_a_killed_server_of_ours_has_left_unequal(tmp_path, capsys):
    """An original cuts one of them, and fills another one up; all get the same batches."""
    log = []

    async def main(found):
        world = Both(found)
        await world.start(PARTITION_COUNT)
        for address, batches in zip(found.addresses, (4, 3, 1), strict=True):
            async with session(address, 3) as ours:
                await ours.prepare()
                await ours.engage()
                for count in (7, 5, 6, 8)[:batches]:
                    assert isinstance(await ours.ask(ours.owner.append(count)), Appended)
        states = dict.fromkeys(found.addresses, State(3))
        first = await asyncio.to_thread(found.session, Metadata(0, 3, states))
        assert (first.mark, len(first.ready)) == (17, 3)
        log.extend(first.links[found.addresses[2]].records(first.number, 0, 0, 100))
        assert len(log) == 18
        append(first, log, 9)
        first.close()
        await world.leave(first.metadata)
        await world.our_turn(log, 4)
        await world.our_turn(log, 0)

    with storages(tmp_path) as found:
        on_loop(main(found))
        check_equal(found, log, capsys)


def test_what_the_first_storage_got_from_an_original_is_given_to_those_of_our_own(tmp_path, capsys):
    """The original opens and appends nothing: the others end with our batches, and its mark."""
    log = []

    async def main(found):
        world = Both(found)
        await world.start(PARTITION_COUNT)
        await world.our_turn(log, 10)
        await world.our_turn(log, 0)
        found.end(0)
        await world.our_turn(log, 30)
        await world.our_turn(log, 5)
        found.start(0)
        second = await asyncio.to_thread(found.session, await world.metadata())
        assert len(second.ready) == 3
        second.close()
        await world.leave(second.metadata)
        found.end(2)  # so that the log of the first one is the goal
        await world.our_turn(log, 10)
        found.start(2)
        await world.our_turn(log, 0)

    with storages(tmp_path) as found:
        on_loop(main(found))
        check_equal(found, log, capsys)


def test_a_directory_that_an_original_has_left_goes_on_under_one(tmp_path, capsys):
    log = many(0, 2_500)
    infos = [layout.Structure(-1, -1, -1, 1, 0)] * PARTITION_COUNT
    infos[0] = layout.Structure(7, 2_000, 2_000, 5, 9)
    with storages(tmp_path, 1) as found:
        directory = found.directories[0]
        found.end(0, signal.SIGTERM)
        for each in directory.rglob("*.*"):
            each.unlink()
        (directory / "waltz-storage.ctl").write_bytes(layout.control(KEY.bytes, infos))
        for first, last in ((0, 1_200), (1_200, 2_500)):
            files = layout.segment(KEY.bytes, 0, first, list(map(on_disk, log[first:last])))
            for suffix, data in zip((".seg", ".idx"), files, strict=True):
                (directory / "0" / f"{first:019d}{suffix}").write_bytes(data)
        found.start(0)
        again = found.session(Metadata(1, 7, {found.addresses[0]: State(7)}))
        assert (again.number, again.mark) == (8, 2_499)
        append(again, log, 100)
        again.close()
        found.end(0)
        assert found.records(0) == list(map(on_disk, log))
        assert command(["disk", "verify", str(directory)]) == 0, capsys.readouterr().out
