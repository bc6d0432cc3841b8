"""A real storage daemon over TCP: acknowledged records survive kills; invalid settings end it."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from tests.integration.run_storage import KEY, PARTITION_COUNT
from tests.loops import poll_until
from tests.ports import free_port
from tests.storage_owner import OwnerSession, encode_records
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core import errors
from waltz_core.cluster.change.creation import NewCluster, NewStorage
from waltz_core.cluster.coordinator import Coordinator
from waltz_core.cluster.znodes import model
from waltz_core.cluster.znodes.model import ReplicaAssignments
from waltz_core.cluster.zookeeper.zookeeper_session import open_session
from waltz_core.config import StorageConfig
from waltz_core.records.record import (
    BEFORE_FIRST,
    GENESIS_CHAIN,
    Generation,
    PartitionId,
    ReplicaId,
    SessionId,
)
from waltz_core.storage.process import served_replicas as serving_module
from waltz_core.storage.process import storage_daemon, storage_health
from waltz_core.storage.process.storage_daemon import StaticCluster, StorageDaemon, serve
from waltz_core.storage.service import admin_execution, admin_tasks
from waltz_core.storage.service.archive_reads import ArchiveQuery
from waltz_core.storage.service.storage_engine import StorageEngine
from waltz_core.storage.service.work import LaneRequest, Work
from waltz_core.transport import net
from waltz_core.wire.messages import (
    Appended,
    ArchiveRange,
    Engage,
    Nack,
    OpenRequest,
    Prepare,
    Prepared,
    RangeBytes,
    RangeForm,
    RangeRaw,
    ReplicaEnd,
    SetArchived,
    SetLowWaterMark,
    SuccessResponse,
    WireProtocol,
)

ROOT = Path(__file__).parents[2]
RUNNER = ROOT / "tests" / "integration" / "run_storage.py"
CLUSTER = StaticCluster(KEY, PARTITION_COUNT, (PartitionId(0), PartitionId(2)))


def on_loop(main):
    async def run_with_timeout():
        async with asyncio.timeout(TEST_TIMEOUT_S):
            return await main

    return net.run(run_with_timeout())


# ---------------------------------------------------------------------------------------------
# processes


class StorageProcess:
    """A daemon in a separate process, which is always killed at the end."""

    def __init__(self, directory, *arguments, flags=()):
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, *flags, str(RUNNER), str(directory), *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
        watchdog = threading.Timer(TEST_TIMEOUT_S, self.process.kill)
        watchdog.start()
        self.line = self.process.stdout.readline().decode().strip()
        watchdog.cancel()
        self.address = self.line.removeprefix("storage ready ")

    def end(self, number=signal.SIGKILL):
        self.process.send_signal(number)
        code = self.process.wait(TEST_TIMEOUT_S)
        self.process.stdout.close()
        return code


@contextlib.contextmanager
def running_storage(*arguments, **options):
    storage = StorageProcess(*arguments, **options)
    try:
        yield storage
    finally:
        if storage.process.poll() is None:
            storage.end()
        storage.process.stdout.close()


class Session:
    """An owner's connection to a storage."""

    def __init__(self, link, owner):
        self.link = link
        self.owner = owner

    async def ask(self, message):
        self.link.send(message)
        (answer,) = await self.link.receive()
        assert answer.sequence == message.sequence
        return answer

    async def prepare(self):
        owner = self.owner
        message = owner.make(Prepare, owner.nonce, bytes(16), KEY.bytes, PARTITION_COUNT)
        answer = await self.ask(message)
        assert isinstance(answer, Prepared), answer
        owner.next_id, owner.chain = answer.synced_max + 1, answer.chain
        return answer

    async def engage(self):
        owner = self.owner
        mark = owner.next_id - 1
        for message in (
            owner.make(SetLowWaterMark, mark, owner.chain),
            owner.make(Engage, mark),
        ):
            answer = await self.ask(message)
            assert isinstance(answer, ReplicaEnd), answer
            assert answer.synced_max == mark

    async def read(self, first, last, **options):
        fields = {
            "bytes_max": 1 << 20,
            "form": RangeForm.WHOLE,
            "whole_batches": False,
            "reader": False,
        } | options
        return await self.ask(self.owner.make(RangeRaw, first, last, *fields.values()))


@contextlib.asynccontextmanager
async def session(address, session_id, partition_id=0):
    link = await net.dial(WireProtocol.STORAGE, address)
    try:
        yield Session(link, OwnerSession(session_id, partition_id))
    finally:
        link.close("done")
        await link.wait_closed()


def test_acknowledged_data_survives_a_kill(tmp_path):
    async def fill(address):
        async with session(address, 5) as owner:
            first = await owner.prepare()
            assert (first.synced_max, first.last_session) == (BEFORE_FIRST, -1)
            await owner.engage()
            appends = [owner.owner.append(100, data=bytes(512)) for _ in range(10)]
            for append in appends:
                owner.link.send(append)
            answers = []
            while len(answers) < 10:
                answers += await owner.link.receive()
            assert all(isinstance(answer, Appended) for answer in answers), answers
            assert answers[-1].synced_max == 999
            await check_records(owner)
            return first.storage_id, owner.owner.chain

    async def check_records(owner):
        found = await owner.read(0, 999)
        assert isinstance(found, RangeBytes)
        assert (found.first, found.count) == (0, 1000)
        assert bytes(found.records) == encode_records(0, 1000, bytes(512))[0]

    async def read_after_start(address):
        async with session(address, 6) as owner:
            prepared = await owner.prepare()
            await check_records(owner)
            return prepared

    with running_storage(tmp_path) as storage:
        storage_id, chain = on_loop(fill(storage.address))
        assert storage.end(signal.SIGKILL) == -signal.SIGKILL
    with running_storage(tmp_path) as storage:
        prepared = on_loop(read_after_start(storage.address))
        assert prepared.storage_id == storage_id
        assert (prepared.synced_max, prepared.chain) == (999, chain)
        assert (prepared.last_session, prepared.low_water_mark) == (5, BEFORE_FIRST)
        assert (prepared.mark_confirmed, prepared.suspect) == (True, False)
        assert storage.end(signal.SIGTERM) == 0
    with running_storage(tmp_path) as storage:
        assert storage.line.startswith("storage ready")


def test_an_older_server_gets_fewer_fields(tmp_path, monkeypatch):
    async def prepared_by(address, session_id):
        async with session(address, session_id) as owner:
            prepared = await owner.prepare()
            await owner.engage()
            return owner.link.version, prepared.last_session, prepared.engaged_session

    with running_storage(tmp_path) as storage:
        assert on_loop(prepared_by(storage.address, 5)) == (4, -1, -1)
        assert on_loop(prepared_by(storage.address, 6)) == (4, 5, 5)
        monkeypatch.setattr(WireProtocol.STORAGE, "versions_offered", (0, 1))
        assert on_loop(prepared_by(storage.address, 7)) == (1, 6, -1)


def test_a_storage_does_not_start_if_python_disables_assertions(tmp_path):
    program = (
        "from waltz_core.storage.process.storage_daemon import run\n"
        "from waltz_core.config.declarations import StorageConfig\n"
        f"run(StorageConfig(connect='nowhere:1/none', directory={str(tmp_path / 'x')!r}))\n"
    )
    result = subprocess.run(
        [sys.executable, "-O", "-c", program],
        cwd=ROOT,
        capture_output=True,
        timeout=TEST_TIMEOUT_S,
        check=False,
    )
    assert result.returncode == 1
    assert b"without -O" in result.stderr
    assert not (tmp_path / "x").exists()


# ---------------------------------------------------------------------------------------------
# in this process


def config_for(directory, **more):
    options = {
        "connect": "127.0.0.1:1/none",
        "directory": str(directory),
        "port": 0,
        "admin_port": 0,
        "reserve_bytes": 0,
    }
    return StorageConfig(**(options | more))


@contextlib.asynccontextmanager
async def serving(config, cluster=CLUSTER):
    """Give the address of a daemon that runs in this loop."""
    ready = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(
            serve(config, cluster=cluster, on_ready=ready.set_result, stop=stop)
        )
        await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            await task
        try:
            yield ready.result()
        finally:
            stop.set()


def test_readers_get_records_and_the_pages_show_metrics(tmp_path):
    pages = {}
    http_host = "127.0.0.5"  # not the address of the other ports

    def fetch(port, path):
        with urllib.request.urlopen(
            f"http://{http_host}:{port}{path}", timeout=TEST_TIMEOUT_S
        ) as page:
            return page.read().decode()

    async def main():
        http_port = free_port()
        config = config_for(tmp_path, http_host=http_host, http_port=http_port)
        async with serving(config) as address:
            pages["address"] = address
            async with session(address, 5) as owner, session(address, 5) as reader:
                await owner.prepare()
                await owner.engage()
                for _ in range(3):
                    await owner.ask(owner.owner.append(10))
                nack = await reader.read(0, 9, reader=True)
                assert isinstance(nack, Nack)
                opened = OpenRequest(-1, -1, -1, KEY.bytes, PARTITION_COUNT)
                assert await reader.ask(opened) == SuccessResponse(-1, -1, -1)
                found = await reader.read(5, 99, reader=True)
                assert (found.first, found.count) == (5, 25)
            for path in ("/metrics", "/health", "/readyz", "/livez"):
                pages[path] = await asyncio.to_thread(fetch, http_port, path)

    on_loop(main())
    metrics = pages["/metrics"].splitlines()
    for line in (
        f'waltz_storage_info{{replica="{pages["address"]}"}} 1.0',
        'waltz_storage_appended_transactions_total{partition="0"} 30.0',
        'waltz_storage_requests_total{request="AppendRaw"} 3.0',
        'waltz_storage_requests_total{request="RangeRaw"} 2.0',
        'waltz_storage_read_transactions_total{partition="0"} 25.0',
        "waltz_storage_syncs_total 3.0",
        'waltz_storage_last_transaction{partition="0"} 29.0',
        'waltz_storage_low_water_mark{partition="0"} -1.0',
        "waltz_storage_queued_bytes 0.0",
    ):
        assert line in metrics, line
    assert pages["/livez"] == "ok\n"
    assert json.loads(pages["/readyz"]) == {"is_ready": True, "reasons": []}
    health = json.loads(pages["/health"])
    assert health["is_healthy"] is True
    assert health["partitions"] == [0, 2]


def test_partitions_of_one_storage_have_independent_sessions(tmp_path):
    async def main():
        async with serving(config_for(tmp_path)) as address:
            async with (
                session(address, 5, 0) as first_session,
                session(address, 7, 2) as second_session,
            ):
                for each in (first_session, second_session):
                    await each.prepare()
                    await each.engage()
                    await each.ask(each.owner.append(3))
                assert (await second_session.read(0, 2)).count == 3
            async with session(address, 5, 1) as absent:
                message = absent.owner.make(
                    Prepare, absent.owner.nonce, bytes(16), KEY.bytes, PARTITION_COUNT
                )
                answer = await absent.ask(message)
                assert answer.error_code == errors.UnknownPartition.code

    on_loop(main())


def test_a_storage_has_the_same_threads_with_one_and_with_all_partitions(tmp_path):
    async def threads_with(partition_ids, directory):
        async with serving(
            config_for(directory), StaticCluster(KEY, PARTITION_COUNT, partition_ids)
        ) as address:
            for partition_id in partition_ids:
                async with session(address, 5, partition_id) as owner:
                    await owner.prepare()
                    await owner.engage()
                    assert isinstance(await owner.ask(owner.owner.append(3)), Appended)
            return Counter(thread.name for thread in threading.enumerate())

    all_ids = tuple(PartitionId(number) for number in range(PARTITION_COUNT))
    with_one = on_loop(threads_with(all_ids[:1], tmp_path / "one"))
    with_all = on_loop(threads_with(all_ids, tmp_path / "all"))
    assert "storage-writer-0" in with_one
    assert with_all <= with_one  # a thread of an earlier test may have ended between them


@contextlib.asynccontextmanager
async def at_an_append(storage, append_started):
    """Yield an owner whose append has started, and a function that stops the daemon."""
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(storage.serve(stop, ready.set_result))
        async with session(await ready, 5) as owner:
            await owner.prepare()
            await owner.engage()
            owner.link.send(owner.owner.append())
            assert await asyncio.to_thread(append_started.wait, TEST_TIMEOUT_S)
            yield owner, stop


def test_unfinished_work_keeps_the_storage_directory_locked_after_the_shutdown(
    tmp_path, monkeypatch
):
    """An append occupies the only thread, so no work of the shutdown may need this thread."""
    monkeypatch.setattr(storage_daemon, "CLOSE_S_MAX", 0.05)
    run, append_started, may_continue, ended = Work.run, *(threading.Event() for _ in range(3))

    def slow(self, clock_s):
        if self.is_append:
            append_started.set()
            assert may_continue.wait(TEST_TIMEOUT_S)
        try:
            return run(self, clock_s)
        finally:
            if self.is_append:
                ended.set()

    monkeypatch.setattr(Work, "run", slow)
    storages = []

    async def main():
        storage = StorageDaemon(config_for(tmp_path, writer_thread_count=1), CLUSTER, None)
        storages.append(storage)
        async with at_an_append(storage, append_started) as (_, stop):
            stop.set()

    on_loop(main())
    (storage,) = storages
    with pytest.raises(errors.DiskFailed, match="another process uses this storage directory"):
        storage._open_engine()
    may_continue.set()
    assert ended.wait(TEST_TIMEOUT_S)
    log = storage._engine.logs[0]
    assert (log.synced_max, log.slot.dirty) == (0, True)
    storage._engine.abandon()  # as the end of the process does
    engine = storage._open_engine()
    assert engine.logs[0].max_id == 0
    engine.close()


@contextlib.contextmanager
def event_at_call(monkeypatch, name):
    """Return an event that is set when this method abandons the engine."""
    called, call = threading.Event(), getattr(StorageEngine, name)

    def notice(self):
        called.set()
        call(self)

    monkeypatch.setattr(StorageEngine, name, notice)
    yield called
    assert called.is_set()


def test_the_shutdown_waits_for_work_that_starts_right_after_other_work(tmp_path, monkeypatch):
    run, append_started, may_continue = Work.run, threading.Event(), threading.Event()
    early = []

    def slow(self, clock_s):
        if self.is_append and not append_started.is_set():
            append_started.set()
            assert may_continue.wait(TEST_TIMEOUT_S)
        elif self.is_append:
            early.append(closed.wait(0.3))
        return run(self, clock_s)

    monkeypatch.setattr(Work, "run", slow)

    async def main():
        storage = StorageDaemon(config_for(tmp_path), CLUSTER, None)
        async with at_an_append(storage, append_started) as (owner, stop):
            queued = storage._machine.queue_limits.owner_bytes
            owner.link.send(owner.owner.append())
            await poll_until(lambda: storage._machine.queue_limits.owner_bytes > queued)
            stop.set()
            await poll_until(storage._served_replicas._locks[0].locked)
            may_continue.set()
            await poll_until(lambda: early)

    with event_at_call(monkeypatch, "close") as closed:
        on_loop(main())
    assert early == [False]


def test_after_a_failure_the_shutdown_waits_for_the_work_of_other_partitions(tmp_path, monkeypatch):
    work_started = threading.Event()
    early = []

    def run(self, _clock_s):
        if self.partition_id == 0:
            assert work_started.wait(TEST_TIMEOUT_S)
            raise AssertionError("a bug")
        work_started.set()
        early.append(abandoned.wait(0.3))
        raise AssertionError("another bug")

    async def main():
        async with (
            serving(config_for(tmp_path)) as address,
            session(address, 5, 0) as first_session,
            session(address, 7, 2) as second_session,
        ):
            for each in (first_session, second_session):
                await each.prepare()
                await each.engage()
            monkeypatch.setattr(storage_daemon.Work, "run", run)
            for each in (first_session, second_session):
                each.link.send(each.owner.append())
            with pytest.raises(errors.Unreachable):
                await first_session.link.receive()

    with (
        event_at_call(monkeypatch, "abandon") as abandoned,
        pytest.raises(BaseExceptionGroup) as caught,
    ):
        on_loop(main())
    assert caught.group_contains(AssertionError, match="a bug")
    assert early == [False]


def test_a_directory_that_cannot_be_opened_leaves_no_threads(tmp_path):
    (tmp_path / "waltz-x.id").mkdir()

    async def main():
        storage = StorageDaemon(config_for(tmp_path), CLUSTER, None)
        with pytest.raises(errors.WaltzError):
            await storage.serve(asyncio.Event(), lambda _address: None)
        threads = storage._writers._threads
        await poll_until(lambda: not any(thread.is_alive() for thread in threads))

    on_loop(main())


# ---------------------------------------------------------------------------------------------
# with ZooKeeper


def new_cluster(address, key=KEY):
    storage = NewStorage(ReplicaId(address), 1, 1)
    held = {ReplicaId(address): (PartitionId(0),)}
    return NewCluster("test", PARTITION_COUNT, key, (storage,), held)


async def is_served(address, session_id, partition_id=0):
    async with session(address, session_id, partition_id) as owner:
        message = owner.owner.make(
            Prepare, owner.owner.nonce, bytes(16), KEY.bytes, PARTITION_COUNT
        )
        return isinstance(await owner.ask(message), Prepared)


def test_a_storage_serves_the_partitions_that_zookeeper_assigns_to_it(tmp_path, zookeeper):
    connect = f"{zookeeper}/storage-daemon"
    port = free_port()
    address = f"127.0.0.1:{port}"
    config = config_for(tmp_path / "data", connect=connect, port=port)

    async def main():
        async with open_session(connect) as coordinator:
            with pytest.raises(errors.BadConfig):
                await serve(config, stop=asyncio.Event())  # there is no cluster yet
            await coordinator.create_cluster(new_cluster(address))
            async with serving(config, None) as prepared_by:
                assert prepared_by == address
                assert await is_served(address, 5)
                assert not await is_served(address, 5, 1)
                (registered,) = (await coordinator.read_storage_ids()).items()
                assert registered[0] == address
                await coordinator.update_replica_assignment(
                    lambda _old: ReplicaAssignments(
                        {ReplicaId(address): (PartitionId(0), PartitionId(1))}
                    )
                )
                while not await is_served(address, 5, 1):  # noqa: ASYNC110 - no event reports the opening
                    await asyncio.sleep(0.01)
            other = config_for(tmp_path / "other", connect=connect, port=port)
            with pytest.raises(errors.StorageIdMismatch, match="ZooKeeper has storage ID"):
                await serve(other, stop=asyncio.Event())

    on_loop(main())


async def assign(coordinator, *replicas):
    """Assign partition 0 to these replicas."""
    partitions = dict.fromkeys(map(ReplicaId, replicas), (PartitionId(0),))
    await coordinator.update_replica_assignment(lambda _: ReplicaAssignments(partitions))


def test_a_storage_removed_from_the_cluster_registers_again_when_it_is_added_back(
    tmp_path, zookeeper, caplog
):
    connect = f"{zookeeper}/storage-again"
    port = free_port()
    address = ReplicaId(f"127.0.0.1:{port}")
    config = config_for(tmp_path / "data", connect=connect, port=port)

    async def main():
        async with open_session(connect) as coordinator:
            await coordinator.create_cluster(new_cluster(address))
            async with serving(config, None):
                before = await coordinator.read_storage_ids()
                await assign(coordinator)
                await coordinator.storages.forget_storage_id(address)
                assert await coordinator.read_storage_ids() == {}
                await poll_until(lambda: "storage.not_in_cluster" in caplog.text)
                await assign(coordinator, address)
                while (after := await coordinator.read_storage_ids()) == {}:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert after == before
            assert before.keys() == {address}

    on_loop(main())


def test_a_storage_ends_when_its_whole_directory_is_deleted(tmp_path):
    async def main():
        async with serving(config_for(tmp_path / "data")) as address:
            async with session(address, 5) as owner:
                await owner.prepare()
            shutil.rmtree(tmp_path / "data")
            with contextlib.suppress(errors.Unreachable):
                assert not await is_served(address, 6)
            await asyncio.Event().wait()  # an error of `served_replicas` ends the daemon

    with pytest.raises(ExceptionGroup) as caught:
        on_loop(main())
    (error,) = caught.value.exceptions
    assert isinstance(error, errors.MissingSegment), caught.value.exceptions
    assert "waltz-storage.ctl: the file was deleted or replaced while this process" in str(error)
    assert "cluster replace-storage" in str(error)
    assert not (tmp_path / "data").exists()


async def write_states(coordinator, *replicas):
    """Write an open session of partition 0 with these replicas."""
    view = await coordinator.read_partition(PartitionId(0))
    state = model.ReplicaState(SessionId(5), model.UNRESOLVED)
    states = dict.fromkeys(map(ReplicaId, replicas), state)
    metadata = model.PartitionMetadata(Generation(0), SessionId(5), states)
    marker = model.PartitionMarker(model.MarkerState.OPEN, SessionId(5), bytes(16))
    await coordinator.write_partition(PartitionId(0), metadata, marker, view.versions)


def test_a_removed_replica_is_served_until_a_session_excludes_it(tmp_path, zookeeper):
    """A removed replica may have the only copy of a record; the next session needs its answer."""
    connect = f"{zookeeper}/storage-leaves"
    port = free_port()
    address = f"127.0.0.1:{port}"
    config = config_for(tmp_path / "data", connect=connect, port=port)
    other = ReplicaId("127.0.0.1:1")

    async def main():
        async with open_session(connect) as coordinator:
            await coordinator.create_cluster(new_cluster(address))
            async with serving(config, None):
                assert await is_served(address, 6)
                await assign(coordinator, address, other)
                await write_states(coordinator, address, other)
                await assign(coordinator, other)
            # The same applies if the process starts after the partition was assigned to another
            # storage.
            async with serving(config, None):
                assert await is_served(address, 7)
                await write_states(coordinator, other)
                # No event reports the end of serving. A connection that is in use at this moment
                # breaks.
                with contextlib.suppress(errors.Unreachable):
                    while await is_served(address, 7):  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                assert not await is_served(address, 7)

    on_loop(main())


def test_a_health_page_does_not_block_the_event_loop_while_the_disk_hangs(tmp_path, monkeypatch):
    is_requested, may_answer = threading.Event(), threading.Event()
    disk_status_of = admin_execution.disk_status_of

    def hang(engine, clock_ms):
        is_requested.set()
        assert may_answer.wait(TEST_TIMEOUT_S)
        return disk_status_of(engine, clock_ms)

    monkeypatch.setattr(admin_execution, "disk_status_of", hang)
    monkeypatch.setattr(storage_health, "DISK_STATUS_S_MAX", 0.05)

    async def main():
        storage = StorageDaemon(config_for(tmp_path), CLUSTER, None)
        stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(storage.serve(stop, ready.set_result))
            await ready
            for _ in range(2):  # the second page causes no further query
                health = await storage.health()
                assert not health.is_healthy
                assert "the disk has not answered" in health.details["disk_error"]
                (reason,) = health.unready_reasons
                assert reason.startswith("the disk has an error: the disk has not answered for")
            may_answer.set()
            while not (await storage.health()).is_healthy:
                pass
            assert (await storage.health()).unready_reasons == []
            stop.set()
        assert is_requested.is_set()

    on_loop(main())


def test_a_storage_with_a_full_disk_is_ready_and_not_healthy(tmp_path, monkeypatch):
    status = admin_tasks.DiskStatus(0, 0, is_full=True, clock_ms=0)
    monkeypatch.setattr(admin_execution, "disk_status_of", lambda *_: status)

    async def main():
        storage = StorageDaemon(config_for(tmp_path), CLUSTER, None)
        stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(storage.serve(stop, ready.set_result))
            await ready
            health = await storage.health()
            assert (health.is_healthy, health.unready_reasons) == (False, [])
            stop.set()

    on_loop(main())


def test_early_requests_wait_for_the_partitions_to_open(tmp_path, monkeypatch):
    opening, may_open = threading.Event(), threading.Event()
    assign = StorageEngine.assign

    def open_late(self, partition_id):
        opening.set()
        assert may_open.wait(TEST_TIMEOUT_S)
        return assign(self, partition_id)

    monkeypatch.setattr(StorageEngine, "assign", open_late)

    async def main():
        port, stop = free_port(), asyncio.Event()
        storage = StorageDaemon(config_for(tmp_path, port=port), CLUSTER, None)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(storage.serve(stop, lambda _address: None))
            assert await asyncio.to_thread(opening.wait, TEST_TIMEOUT_S)
            async with session(f"127.0.0.1:{port}", 5) as owner:
                request_task = tasks.create_task(owner.prepare())
                await poll_until(lambda: storage._waiting_links)
                assert not request_task.done()
                may_open.set()
                assert isinstance(await request_task, Prepared)
            stop.set()

    on_loop(main())


def test_a_storage_that_waits_for_its_assignment_is_not_ready_and_can_be_stopped(
    tmp_path, zookeeper, monkeypatch
):
    connect = f"{zookeeper}/storage-waits"
    checks = []
    monkeypatch.setattr(
        serving_module, "recheck_interval_s", lambda *_, **__: checks.append(1) or 0.0
    )

    async def main():
        is_requested, stop = asyncio.Event(), asyncio.Event()

        async def follow(_coordinator, _callback):
            is_requested.set()
            await asyncio.Event().wait()  # ZooKeeper does not answer

        monkeypatch.setattr(Coordinator, "follow_replica_assignment", follow)
        async with open_session(connect) as coordinator:
            await coordinator.create_cluster(new_cluster("127.0.0.1:1"))
        ready = []
        async with asyncio.TaskGroup() as tasks:
            config = config_for(tmp_path, connect=connect)
            tasks.create_task(serve(config, on_ready=ready.append, stop=stop))
            await is_requested.wait()
            stop.set()
        assert ready == checks == []

    on_loop(main())


def test_a_partition_that_fails_to_open_affects_no_other_partition_and_opens_later(
    tmp_path, monkeypatch
):
    async def main():
        async with serving(config_for(tmp_path)):
            pass
        monkeypatch.setattr(serving_module, "REOPEN_S_MIN", 0.02)
        (slots,) = (tmp_path / "0").glob("waltz-x.ctl")
        content = slots.read_bytes()
        slots.write_bytes(bytes(8192))
        storage = StorageDaemon(config_for(tmp_path), CLUSTER, None)
        stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(storage.serve(stop, ready.set_result))
            address = await ready
            health = await storage.health()
            assert not health.is_healthy
            assert (health.details["partitions"], health.details["not_served"]) == ([2], [0])
            (reason,) = health.unready_reasons
            assert reason.startswith("partition 0 is not open: ")
            assert "not opened it yet" not in reason
            async with session(address, 5, 2) as owner:
                await owner.prepare()
            slots.write_bytes(content)  # an operator has restored the file
            while not (await storage.health()).is_healthy:  # noqa: ASYNC110 - no event reports the opening
                await asyncio.sleep(0.01)
            async with session(address, 5, 0) as owner:
                await owner.prepare()
            stop.set()

    on_loop(main())


def test_a_requested_scrub_finds_corruption_and_continues_after_a_restart(tmp_path):
    async def main():
        storage = StorageDaemon(config_for(tmp_path), CLUSTER, None)
        stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(storage.serve(stop, ready.set_result))
            address = await ready
            async with session(address, 5, 0) as owner:
                await owner.prepare()
                await owner.ask(owner.owner.append(20))
                (segment,) = (tmp_path / "0").glob("*.seg")
                with segment.open("r+b") as file:
                    file.seek(128 + 3 * 44 + 40)
                    file.write(b"rot")
                passes = [each.passes_count for each in storage.scrub_status()]
                storage.scrub_now(PartitionId(0))
                await poll_until(lambda: not storage.scrub_status()[0].is_requested)
            after = [each.passes_count for each in storage.scrub_status()]
            assert (after[0], after[1]) == (passes[0] + 1, passes[1])
            assert (await storage.health()).details["damaged"] == [0]
            assert (await storage.health()).is_healthy
            found = "waltz_storage_damage_found_transactions_total"
            assert storage.metrics.value(found, partition=0) == 1
            assert storage.metrics.value("waltz_storage_scrubbed_bytes_total", partition=0) >= 836
            storage.scrub_now()
            await poll_until(lambda: not any(each.is_requested for each in storage.scrub_status()))
            stop.set()
        assert (tmp_path / "waltz-x.scrub").exists()

    on_loop(main())


# ---- the archive


def test_a_range_is_archived_and_a_store_that_fails_is_reported(tmp_path):
    settings = {"archive_url": f"file://{tmp_path}/archive", "archive_age_ms": 0}

    async def main():
        storage = StorageDaemon(config_for(tmp_path / "storage", **settings), CLUSTER, None)
        stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(storage.serve(stop, ready.set_result))
            async with session(await ready, 5, 0) as owner:
                assert (await owner.prepare()).start == -1
                await owner.ask(owner.owner.append(20))

                async def archive(attempt, first, chain, *manifest):
                    request = (attempt, first, 99, chain, *manifest)
                    answer = await owner.ask(owner.owner.make(ArchiveRange, *request))
                    assert isinstance(answer, SuccessResponse)
                    (notice,) = await owner.link.receive()
                    assert (notice.sequence, notice.attempt) == (0, attempt)
                    return notice

                archived = await archive(1, 0, GENESIS_CHAIN, "", 0)
                assert (archived.last, archived.chain, archived.error) == (
                    19,
                    owner.owner.chain,
                    "",
                )
                assert (tmp_path / "archive" / archived.manifest).exists()
                (tmp_path / "archive" / archived.manifest).unlink()
                await owner.ask(owner.owner.append(1))
                failed = await archive(
                    2, 20, archived.chain, archived.manifest, archived.manifest_crc
                )
                assert failed.manifest == ""
                assert f"{archived.manifest}, because it does not exist" in failed.error
            state = storage._archive_state()
            assert (state.failure_count, state.error) == (1, failed.error)
            assert state.is_damaged
            value = partial(storage.metrics.value, partition=0)
            assert value("waltz_storage_archived_transactions_total") == 20
            assert value("waltz_storage_archived_bytes_total") == 20 * 44
            assert value("waltz_storage_failed_uploads_total") == 1
            stop.set()

    on_loop(main())


@pytest.mark.parametrize(
    ("outcome", "damage"),
    [
        (errors.ChecksumMismatch("object 7: bad"), "object 7: bad"),
        (errors.ObjectMissing("object 7: gone"), "object 7: gone"),
        (errors.ArchiveUnavailable("no route"), ""),
        (SuccessResponse(5, 1, 0), ""),
    ],
)
def test_a_storage_reports_damage_of_the_archive_that_a_read_has_found(
    tmp_path, monkeypatch, outcome, damage
):
    async def main():
        config = config_for(tmp_path, archive_url=f"file://{tmp_path}/archive")
        storage = StorageDaemon(config, CLUSTER, None)
        monkeypatch.setattr(storage, "_post", [].append)
        owner = OwnerSession(5, 0)
        read = owner.make(RangeRaw, 7, 8, 1 << 20, RangeForm.WHOLE, False, True)
        mark = owner.make(SetArchived, 9, bytes(16), 0, 1, "manifest")
        query = ArchiveQuery(LaneRequest(1, read), mark, errors.BeforeLogStart("", 9))

        def was_read(found):
            storage._on_archive_read_done(query, found)
            return storage._archive_state().read_damage

        assert was_read(outcome) == damage
        # Damage of the log does not count as damage of the archive.
        assert was_read(query.error) == damage
        assert was_read(SuccessResponse(5, 1, 0)) == ""
        state = storage._archive_state()
        assert (state.url, state.failure_count, state.error) == (config.archive_url, 0, "")

    on_loop(main())


def test_an_archive_url_that_names_no_store_prevents_the_start(tmp_path):
    config = config_for(tmp_path, archive_url="nothing://there")

    async def main():
        with pytest.raises(errors.BadConfig, match="archive nothing://there"):
            await StorageDaemon(config, CLUSTER, None).serve(asyncio.Event(), print)

    on_loop(main())
