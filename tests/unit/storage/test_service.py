"""The session rules of a storage on a real directory; the test decides when work runs."""

import dataclasses
import itertools
import shutil
import time
import zlib
from contextlib import contextmanager

import numpy as np
import pytest

from tests.storage_owner import OwnerSession, encode_records
from waltz_core import errors
from waltz_core.errors import DiskFailed, NoSpace, ReadFailed, UnknownPartition, error_from_code
from waltz_core.machine import Report, Wakeup
from waltz_core.records.record import BEFORE_FIRST, GENESIS_CHAIN, next_chain
from waltz_core.storage.disk.file_system import RealDisk
from waltz_core.storage.files.format import Slot
from waltz_core.storage.log.log_files import LogSettings
from waltz_core.storage.log.scrub import Scrub
from waltz_core.storage.service import service, service_effects
from waltz_core.storage.service.service import StorageIdentity, StorageService
from waltz_core.storage.service.storage_engine import StorageEngine
from waltz_core.storage.service.work import LaneRequest
from waltz_core.wire.messages import (
    Appended,
    DamageFound,
    Engage,
    Heartbeat,
    HeartbeatResponse,
    LineageRequest,
    LineageResponse,
    LockBlocks,
    LockBlocksRequest,
    Nack,
    OpenRequest,
    Prepare,
    Prepared,
    RangeBytes,
    RangeForm,
    RangeRaw,
    Repair,
    ReplicaEnd,
    SetLowWaterMark,
    SuccessResponse,
    Truncate,
)

KEY = b"the cluster key."
STORAGE_ID = b"the storage's id"
NO_ID = bytes(16)


class FailingFile:
    """A real file that fails when its disk is configured to fail."""

    def __init__(self, file, disk):
        self._file = file
        self._disk = disk

    def __getattr__(self, name):
        return getattr(self._file, name)

    def sync(self):
        self._disk.raise_next_error("sync")
        self._file.sync()

    def pwrite(self, parts, offset):
        self._disk.raise_next_error("pwrite")
        self._file.pwrite(parts, offset)

    def pread(self, size, offset):
        self._disk.raise_next_error("pread")
        return self._file.pread(size, offset)


class FailingDisk(RealDisk):
    """A real disk that raises a given error at the next call of a given function."""

    def __init__(self):
        super().__init__()
        self.next_errors = {}
        self.reported_free_bytes = None  # the reported free space, or None for the real one

    def free_bytes(self, directory):
        return (
            super().free_bytes(directory)
            if self.reported_free_bytes is None
            else self.reported_free_bytes
        )

    def raise_next_error(self, call):
        error = self.next_errors.pop(call, None)
        if error is not None:
            raise error

    def open(self, path, **how):
        return FailingFile(super().open(path, **how), self)


class ServiceWorld:
    """A service with recorded effects; the test runs the queued work."""

    def __init__(self, directory, *, reserve_bytes=0, segment_bytes_max=1 << 20, **options):
        self.disk = FailingDisk()
        settings = LogSettings(KEY, segment_bytes_max, lambda: time.time_ns() // 1_000_000)
        self.engine = StorageEngine.open(
            self.disk,
            directory,
            settings,
            partition_count=4,
            new_storage_id=STORAGE_ID,
            reserve_bytes=reserve_bytes,
        )
        options = {"queue_bytes_max": 1 << 20, "space": self.engine.space} | options
        self.service = StorageService(StorageIdentity(KEY, 4, STORAGE_ID), **options)
        self.now_ms = 1_000_000
        self.effects = []
        self.work_items = []
        self.log = self.engine.assign(0)
        self.step(service.PartitionOpened(self.log))

    def step(self, event):
        wanted = self.service.step(event, self.now_ms)
        self.effects += wanted
        self.work_items += [
            each.work for each in wanted if isinstance(each, service_effects.RunWork)
        ]
        return wanted

    def send(self, connection, *messages):
        """Accept requests; blocking work is not done yet."""
        for message in messages:
            self.step(LaneRequest(connection, message))

    def finish(self):
        """Run the queued work and the work that it causes; return the number of pieces."""
        count = 0
        while self.work_items:
            work = self.work_items.pop(0)
            self.step(service.WorkDone(work, work.run()))
            count += 1
        return count

    def ask(self, connection, message):
        """Return the answer to a request; no other message may be sent."""
        before = len(self.answers())
        self.send(connection, message)
        self.finish()
        answers = [
            answer for answer in self.answers()[before:] if not isinstance(answer[1], DamageFound)
        ]
        assert len(answers) == 1, answers
        assert answers[0][0] == connection
        assert answers[0][1].sequence == message.sequence
        return answers[0][1]

    def refusal(self, connection, message):
        """Return the class of the error that rejected a request."""
        answer = self.ask(connection, message)
        assert isinstance(answer, Nack), answer
        assert answer.message
        return type(error_from_code(answer.error_code, answer.message))

    def answers(self, connection=None):
        found = [
            (effect.connection, effect.message)
            for effect in self.effects
            if isinstance(effect, service_effects.SendStorageMessage)
        ]
        return found if connection is None else [m for c, m in found if c == connection]

    def effects_of(self, kind):
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def owned(self, session_id=1, connection=1, *, engaged=True):
        """Return an owner whose session is prepared and, if requested, engaged."""
        owner = OwnerSession(session_id)
        prepared = self.ask(connection, prepare(owner))
        assert isinstance(prepared, Prepared)
        owner.next_id, owner.chain = prepared.synced_max + 1, bytes(prepared.chain)
        if engaged:
            mark = owner.make(SetLowWaterMark, prepared.synced_max, prepared.chain)
            assert isinstance(self.ask(connection, mark), ReplicaEnd)
            engage = owner.make(Engage, prepared.synced_max)
            assert isinstance(self.ask(connection, engage), ReplicaEnd)
        return owner


@pytest.fixture
def make(tmp_path):
    worlds = []

    def make_world(**options):
        worlds.append(ServiceWorld(tmp_path / str(len(worlds)), **options))
        return worlds[-1]

    yield make_world
    for world in worlds:
        world.engine.abandon()


@pytest.fixture
def world(make):
    return make()


def prepare(owner, *, storage_id=STORAGE_ID, key=KEY, count=4):
    return owner.make(Prepare, owner.nonce, storage_id, key, count)


def range_of(owner, first, last, **options):
    fields = {
        "bytes_max": 1 << 20,
        "form": RangeForm.WHOLE,
        "whole_batches": False,
        "reader": False,
    } | options
    return owner.make(RangeRaw, first, last, *fields.values())


def open_request(key=KEY, count=4):
    return OpenRequest(-1, -1, -1, key, count)


# ---- preparing


@pytest.mark.parametrize("storage_id", [STORAGE_ID, NO_ID], ids=["registered", "not yet"])
def test_a_new_replica_reports_an_empty_log(world, storage_id):
    answer = world.ask(1, prepare(OwnerSession(5), storage_id=storage_id))
    assert answer == Prepared(
        5, 1, 0, STORAGE_ID, -1, BEFORE_FIRST, True, BEFORE_FIRST, GENESIS_CHAIN, False, b""
    )
    assert world.log.promised == 5


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"key": b"another cluster."}, errors.ClusterKeyMismatch),
        ({"count": 5}, errors.ClusterKeyMismatch),
        ({"storage_id": b"another storage."}, errors.StorageIdMismatch),
    ],
)
def test_a_prepare_for_another_cluster_or_storage_is_rejected_without_a_promise(
    world, wrong, error
):
    assert world.refusal(1, prepare(OwnerSession(5), **wrong)) is error
    assert world.log.promised == -1


def test_a_session_far_above_the_promised_one_is_rejected(world):
    assert world.refusal(1, prepare(OwnerSession(-1))) is errors.BadRequest
    assert world.refusal(1, prepare(OwnerSession(1 << 40))) is errors.BadRequest
    assert world.log.promised == -1


@pytest.mark.parametrize("rival", [{"session_id": 4}, {"nonce": b"another nonce..."}], ids=str)
def test_the_error_for_an_outdated_session_has_the_promised_session(world, rival):
    world.owned(5)
    answer = world.ask(2, prepare(OwnerSession(**{"session_id": 5} | rival)))
    assert (answer.error_code, answer.promised) == (errors.SessionFenced.code, 5)
    assert world.effects_of(service_effects.CloseConnection) == []


def test_after_a_lost_control_slot_only_a_newer_session_is_accepted(tmp_path):
    world = ServiceWorld(tmp_path)
    world.owned(5)
    world.engine.abandon()
    slots = tmp_path / "0" / "waltz-x.ctl"
    content = bytearray(slots.read_bytes())
    newer = max((0, 1), key=lambda position: Slot.decode(content[4096 * position :][:512]).sequence)
    content[4096 * newer] ^= 1
    slots.write_bytes(content)
    world = ServiceWorld(tmp_path)
    earlier = world.ask(1, prepare(OwnerSession(4)))
    assert (earlier.error_code, earlier.promised) == (errors.SessionFenced.code, 5)
    assert world.refusal(1, prepare(OwnerSession(5))) is errors.ReplicaSuspect
    assert world.refusal(1, prepare(OwnerSession(6))) is errors.ReplicaSuspect
    assert world.ask(1, prepare(OwnerSession(7))).suspect
    world.engine.abandon()


def test_the_same_owner_may_reconnect(world):
    owner = world.owned(5, connection=1)
    assert isinstance(world.ask(2, prepare(owner)), Prepared)
    assert [effect.connection for effect in world.effects_of(service_effects.CloseConnection)] == [
        1
    ]
    assert world.refusal(1, owner.append()) is errors.SessionFenced
    owner.next_id, owner.chain = 0, GENESIS_CHAIN
    assert isinstance(world.ask(2, owner.append()), Appended)


def test_late_messages_of_a_superseded_connection_are_ignored(world):
    """The disk hangs, the owner reconnects, and then the storage reads earlier requests."""
    owner = OwnerSession(5)
    world.send(2, prepare(owner))
    world.send(1, prepare(owner))
    world.finish()
    (late, rejections), (later, answer) = world.answers()
    assert (late, type(rejections), later, type(answer)) == (1, Nack, 2, Prepared)
    assert rejections.error_code == errors.ConnectionSuperseded.code
    assert isinstance(world.ask(2, owner.append()), Appended)


def test_a_reconnecting_owner_is_not_rejected_as_another_owner(world):
    """An owner halts its partition permanently if its session is promised to another owner."""
    owner = OwnerSession(5)
    world.send(1, prepare(owner))
    world.send(1, prepare(owner))  # the first request is running, this one waits
    world.send(2, prepare(owner))
    world.finish()
    answered = [(each, type(answer)) for each, answer in world.answers()]
    assert (2, Prepared) in answered
    codes = {answer.error_code for _, answer in world.answers() if isinstance(answer, Nack)}
    assert codes == {errors.ConnectionSuperseded.code}


def test_a_connection_may_continue_with_a_later_session(world):
    world.owned(5, connection=1)
    later = world.owned(6, connection=1)
    assert world.effects_of(service_effects.CloseConnection) == []
    assert isinstance(world.ask(1, later.append()), Appended)


def test_a_partition_that_is_not_assigned_here_is_rejected(world):
    assert world.refusal(1, prepare(OwnerSession(5, partition_id=3))) is errors.UnknownPartition


def test_a_promise_that_could_not_be_made_durable_ends_the_session(world):
    world.disk.next_errors["pwrite"] = DiskFailed("slots are gone")
    assert world.refusal(1, prepare(OwnerSession(5))) is DiskFailed
    assert [effect.connection for effect in world.effects_of(service_effects.CloseConnection)] == [
        1
    ]
    assert world.refusal(1, OwnerSession(5).make(Heartbeat)) is errors.SessionFenced
    # The rejected session stays fenced: an earlier session is rejected, too.
    assert world.refusal(2, prepare(OwnerSession(4))) is errors.SessionFenced


# ---- which connections may send requests


def requests_of(owner):
    """Return one request of each kind except `Prepare`."""
    return (
        owner.make(SetLowWaterMark, BEFORE_FIRST, GENESIS_CHAIN),
        owner.make(Truncate, BEFORE_FIRST, BEFORE_FIRST, GENESIS_CHAIN),
        owner.make(Engage, BEFORE_FIRST),
        owner.make(Heartbeat),
        owner.make(LineageRequest, 0, 0),
        owner.make(Repair, 0, b"", b"", 0),
        range_of(owner, 0, 0),
        OwnerSession(5).append(),
    )


def test_requests_without_a_prepared_session_are_rejected(world):
    for message in requests_of(world.owned(5, connection=1)):
        assert world.refusal(2, message) is errors.SessionFenced
    assert world.log.synced_max == BEFORE_FIRST


def test_the_error_for_a_message_of_another_session_names_the_promised_session(world):
    owner = world.owned(5)
    for request, session_id in itertools.product(requests_of(owner), (-1, 4, 6, 1 << 62)):
        for connection in (1, 2):
            message = dataclasses.replace(request, session_id=session_id)
            answer = world.ask(connection, message)
            assert (answer.error_code, answer.promised) == (errors.SessionFenced.code, 5)
            assert answer.session_id == session_id
    assert world.log.promised == 5
    assert isinstance(world.ask(1, owner.make(Heartbeat)), HeartbeatResponse)


def test_an_unexpected_message_is_rejected(world):
    owner = world.owned(5)
    assert world.refusal(1, owner.make(SuccessResponse)) is errors.BadRequest


def test_a_heartbeat_is_answered_at_once_while_work_is_in_progress(world):
    owner = world.owned(5)
    world.send(1, owner.append(), owner.make(Heartbeat))
    assert isinstance(world.answers(1)[-1], HeartbeatResponse)
    world.finish()


def test_a_waiting_prepare_of_a_later_session_already_fences_earlier_sessions(world):
    owner = world.owned(5, connection=1)
    world.send(4, open_request())
    assert isinstance(world.ask(4, owner.make(Heartbeat)), HeartbeatResponse)
    world.send(1, owner.append())
    world.send(2, prepare(OwnerSession(6)))
    world.send(4, owner.make(Heartbeat))
    answer = world.answers(4)[-1]
    assert (answer.error_code, answer.promised) == (errors.SessionFenced.code, 6)
    world.send(3, prepare(OwnerSession(7)))
    waiting = world.answers(2)[-1]
    assert (waiting.error_code, waiting.promised) == (errors.SessionFenced.code, 7)
    world.finish()


# ---- appending


def test_appends_are_answered_after_the_sync_and_can_be_read(world):
    owner = world.owned(5)
    first, second = owner.append(3), owner.append(2)
    assert world.ask(1, first) == Appended(5, first.sequence, 0, 2)
    assert world.ask(1, second) == Appended(5, second.sequence, 0, 4)
    answer = world.ask(1, range_of(owner, 1, 4))
    records, _, lengths = encode_records(1, 4)
    assert isinstance(answer, RangeBytes)
    assert (answer.first, answer.count, bytes(answer.records), bytes(answer.lengths)) == (
        1,
        4,
        records,
        lengths,
    )
    assert [entry.last for entry in answer.lineage] == [2, 4]


def test_all_appends_that_wait_are_synced_once(world):
    owner = world.owned(5)
    appends = [owner.append(2) for _ in range(5)]
    world.send(1, appends[0])
    world.send(1, *appends[1:])
    assert [len(work.requests) for work in world.work_items] == [1]
    before = world.log.sync_count
    assert world.finish() == 2
    one_group = world.log.sync_count - before
    answers = world.answers(1)[-5:]
    assert [(answer.sequence, answer.synced_max) for answer in answers] == [
        (appends[0].sequence, 1),
        *((append.sequence, 9) for append in appends[1:]),
    ]
    # Two groups take as many syncs as two appends.
    before = world.log.sync_count
    world.ask(1, owner.append())
    assert one_group == 2 * (world.log.sync_count - before)


def test_an_append_with_changed_bytes_is_rejected_with_all_later_ones(world):
    owner = world.owned(5)
    good, bad, after = owner.append(), owner.append(), owner.append()
    bad = dataclasses.replace(bad, records=b"\xff" + bad.records[1:])
    world.send(1, owner.make(Engage, BEFORE_FIRST), good, bad, after)
    world.finish()
    _, first, second, third = world.answers(1)[-4:]
    assert first == Appended(5, good.sequence, 0, 0)
    assert {second.error_code, third.error_code} == {errors.ChecksumMismatch.code}
    assert world.log.synced_max == 0


def test_appends_are_synced_before_later_requests(world):
    owner = world.owned(5)
    world.send(1, owner.append(), owner.append())
    world.send(1, owner.make(Truncate, 0, 0, owner.chain), owner.make(Heartbeat))
    assert world.finish() == 3
    assert isinstance(world.answers(1)[-1], Nack)  # the chain at 0 is another
    assert world.log.synced_max == 1


# ---- fencing


def test_a_later_session_ends_the_earlier_one_at_once(world):
    old = world.owned(5, connection=1)
    under_way, *queued = (old.append() for _ in range(4))
    world.send(1, under_way, *queued)
    world.send(1, range_of(old, 0, 0))
    new = OwnerSession(6)
    world.send(2, prepare(new))
    rejections = world.answers(1)[-4:]
    assert all(rejection.error_code == errors.SessionFenced.code for rejection in rejections)
    assert [effect.connection for effect in world.effects_of(service_effects.CloseConnection)] == [
        1
    ]
    world.send(1, old.append())
    assert world.answers(1)[-1].promised == 6
    world.finish()
    # The running append is on disk, and the new session finds it.
    prepared = world.answers(2)[-1]
    assert (prepared.synced_max, prepared.last_session) == (0, 5)
    assert world.service.queue_limits.owner_bytes == 0


def test_requests_of_a_disconnected_owner_are_removed_from_the_queue(world):
    owner = world.owned(5)
    world.send(1, *(owner.append() for _ in range(4)))
    world.step(service.Disconnected(1))
    world.finish()
    assert world.log.synced_max == 0
    assert world.service.queue_limits.owner_bytes == 0
    again = OwnerSession(5).continue_after(owner)
    assert world.ask(2, prepare(again)).synced_max == 0


# ---- reading


def test_only_a_reader_that_names_the_engaged_session_is_answered(world):
    owner = world.owned(5, engaged=False)
    reader = OwnerSession(5)
    request = range_of(reader, 0, 9, reader=True)
    assert world.refusal(7, request) is errors.BadRequest  # the reader has not sent its cluster key
    assert world.ask(7, open_request()) == SuccessResponse(-1, -1, -1)
    assert world.refusal(7, request) is errors.NotMounted
    world.ask(1, owner.make(SetLowWaterMark, BEFORE_FIRST, GENESIS_CHAIN))
    world.ask(1, owner.append(3))
    assert world.refusal(7, request) is errors.NotMounted
    owner = world.owned(6, connection=1)
    world.ask(1, owner.append(2))
    assert world.refusal(7, request) is errors.SessionFenced
    answer = world.ask(7, range_of(OwnerSession(6), 1, 99, reader=True))
    assert (answer.first, answer.count) == (1, 4)
    beyond = world.ask(7, range_of(OwnerSession(6), 5, 99, reader=True))
    assert (beyond.first, beyond.count, beyond.records) == (5, 0, b"")
    world.step(service.Disconnected(1))  # the owner has disconnected, the log is unchanged
    assert world.ask(7, range_of(OwnerSession(6), 0, 0, reader=True)).count == 1
    world.step(service.Disconnected(7))  # nothing is kept for closed connections
    assert world.refusal(7, range_of(OwnerSession(6), 0, 0, reader=True)) is errors.BadRequest


def test_lock_blocks_are_reported_to_readers_of_the_engaged_session(world):
    owner = world.owned(5)
    world.ask(1, dataclasses.replace(owner.append(3), locks=b"block"))
    request = OwnerSession(5).make(LockBlocksRequest, 100)
    assert world.refusal(7, request) is errors.BadRequest  # the reader has not sent its cluster key
    world.ask(7, open_request())
    assert world.ask(7, request) == LockBlocks(5, request.sequence, 0, b"block")
    assert world.refusal(7, OwnerSession(4).make(LockBlocksRequest, 100)) is errors.SessionFenced
    assert world.service.queue_limits.owner_bytes == 0
    world.send(7, OwnerSession(5).make(LockBlocksRequest, 100))
    assert world.service.queue_limits.owner_bytes == 512 + 100


def test_a_reader_never_sees_unsynced_records(world):
    owner = world.owned(5)
    world.send(7, open_request())
    world.send(1, owner.append())
    append = world.work_items[0]
    world.send(7, range_of(OwnerSession(5), 0, 9, reader=True))
    assert world.work_items == [append]
    world.finish()
    assert world.answers(7)[-1].count == 1


@pytest.mark.parametrize("wrong", [{"key": b"another cluster."}, {"count": 5}])
def test_a_reader_of_another_cluster_is_rejected(world, wrong):
    world.send(7, open_request(**wrong))
    assert world.answers(7)[-1].error_code == errors.ClusterKeyMismatch.code
    world.owned(5)
    assert world.refusal(7, range_of(OwnerSession(5), 0, 0, reader=True)) is errors.BadRequest


def test_the_owner_can_read_headers_and_whole_batches_and_the_lineage(world):
    owner = world.owned(5)
    world.ask(1, owner.append(3))
    chain = owner.chain
    world.ask(1, owner.append(3))
    headers = world.ask(1, range_of(owner, 1, 4, form=RangeForm.HEADERS))
    assert (headers.first, headers.count, len(headers.records)) == (1, 4, 4 * 28)
    assert bytes(headers.lengths) == b""
    batches = world.ask(1, range_of(owner, 3, 5, whole_batches=True))
    assert (batches.first, batches.count, bytes(batches.chain_before)) == (3, 3, chain)
    _, crcs, _ = encode_records(3, 3)
    assert bytes(batches.lineage[0].chain) == next_chain(chain, 3, 5, 5, crcs)
    assert world.refusal(1, range_of(owner, 4, 5, whole_batches=True)) is errors.BadRequest
    assert world.refusal(1, range_of(owner, 6, 9)) is errors.BadRequest
    assert world.refusal(1, range_of(owner, 0, 1, form=9)) is errors.BadRequest
    answer = world.ask(1, owner.make(LineageRequest, 1, 4))
    assert isinstance(answer, LineageResponse)
    assert [(entry.first, entry.last) for entry in answer.lineage] == [(0, 2), (3, 5)]
    assert bytes(answer.chain_before) == GENESIS_CHAIN


# ---- limits


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_connection_over_the_memory_limit_is_paused(make, is_gone):
    world = make(queue_bytes_max=4_000)
    owner = world.owned(5)
    world.send(1, *(owner.append(data=bytes(500)) for _ in range(8)))
    assert [effect.connection for effect in world.effects_of(service_effects.PauseReading)] == [1]
    assert world.effects_of(service_effects.ResumeReading) == []
    if is_gone:
        world.step(service.Disconnected(1))
    world.finish()
    resumed = [effect.connection for effect in world.effects_of(service_effects.ResumeReading)]
    assert resumed == ([] if is_gone else [1])
    assert world.service.queue_limits.owner_bytes == 0
    assert world.log.synced_max == (0 if is_gone else 7)


def test_many_reads_of_clients_do_not_pause_the_owner(make):
    """If reads paused the owner, a client could stop the appends and heartbeats of all sessions."""
    world = make(queue_bytes_max=4_000)
    owner = world.owned(5)
    world.ask(1, owner.append())
    for reader in (7, 8):
        world.ask(reader, open_request())
    world.send(
        7, *(range_of(OwnerSession(5), 0, 9, reader=True, bytes_max=1 << 30) for _ in range(4))
    )
    world.send(8, range_of(OwnerSession(5), 0, 9, reader=True, bytes_max=1))
    world.send(1, owner.append(data=bytes(500)))
    assert [effect.connection for effect in world.effects_of(service_effects.PauseReading)] == [
        7,
        8,
    ]
    world.finish()
    assert [effect.connection for effect in world.effects_of(service_effects.ResumeReading)] == [
        7,
        8,
    ]
    assert world.service.queue_limits.reader_bytes == 0


# ---- the disk


def test_a_prepare_on_a_failing_disk_is_not_rejected_as_fenced(world):
    owner = world.owned(5)
    world.send(1, owner.append())
    world.send(2, prepare(OwnerSession(6)))
    world.disk.next_errors["sync"] = DiskFailed("sync of x.seg: Input/output error")
    world.finish()
    assert world.answers(2)[-1].error_code == DiskFailed.code


def test_a_second_failed_sync_ends_the_process(world):
    owner = world.owned(5)
    world.ask(1, owner.append(2))
    kept = OwnerSession(6).continue_after(owner)
    world.send(1, owner.append())
    world.send(1, owner.append(), owner.append())
    world.disk.next_errors["sync"] = DiskFailed("sync of x.seg: Input/output error")
    world.finish()
    rejections = world.answers(1)[-3:]
    assert rejections[0].error_code == DiskFailed.code
    assert "x.seg" in rejections[0].message
    assert {rejection.error_code for rejection in rejections[1:]} == {DiskFailed.code}
    assert [effect.connection for effect in world.effects_of(service_effects.CloseConnection)] == [
        1
    ]
    assert world.effects_of(service_effects.EndProcess) == []
    assert world.refusal(1, owner.make(Heartbeat)) is errors.SessionFenced
    world.ask(7, open_request())
    assert world.refusal(7, range_of(OwnerSession(5), 0, 1, reader=True)) is errors.NotMounted

    prepared = world.ask(2, prepare(kept))
    assert (prepared.synced_max, bytes(prepared.chain)) == (1, kept.chain)
    assert world.ask(2, kept.append()).synced_max == 2
    world.disk.next_errors["sync"] = DiskFailed("sync of y.seg: Input/output error")
    assert world.refusal(2, kept.append()) is DiskFailed
    (end,) = world.effects_of(service_effects.EndProcess)
    assert "y.seg" in end.reason


def test_a_full_disk_rejects_appends_and_still_reads(world):
    owner = world.owned(5)
    world.ask(1, owner.append(2))
    kept = (owner.next_id, owner.chain)
    world.disk.next_errors["pwrite"] = NoSpace("x.seg: no space left")
    assert world.refusal(1, owner.append()) is NoSpace
    assert world.effects_of(service_effects.CloseConnection) == []
    assert world.ask(1, range_of(owner, 0, 1)).count == 2
    owner.next_id, owner.chain = kept
    assert world.ask(1, owner.append()).synced_max == 2


def test_the_acked_marker_moves_when_a_log_becomes_idle(world):
    owner = world.owned(5)
    assert world.service.wake_at_ms is None
    world.ask(1, owner.append(2))
    assert world.service.wake_at_ms == world.now_ms + 1000
    world.step(Wakeup())  # too early
    assert world.work_items == []
    world.now_ms += 1000
    world.step(Wakeup())
    assert [work.requests for work in world.work_items] == [()]
    assert world.log.slot.acked.transaction_id == BEFORE_FIRST
    world.finish()
    assert world.log.slot.acked.transaction_id == 1
    assert world.service.wake_at_ms is None
    world.ask(1, owner.append())
    world.now_ms += 1000
    world.send(1, owner.append())
    world.step(Wakeup())  # the partition is busy and gets another turn
    world.finish()
    assert world.service.wake_at_ms == world.now_ms + 1000


# ---- added and removed partitions


def test_a_dropped_partition_is_not_served_any_more(world):
    owner = world.owned(5)
    assert world.service.partitions == (0,)
    world.send(1, owner.append(), owner.append())
    world.step(service.PartitionDropped(0))
    assert world.effects_of(service_effects.PartitionIdle) == []
    assert [effect.connection for effect in world.effects_of(service_effects.CloseConnection)] == [
        1
    ]
    world.finish()
    assert [effect.log for effect in world.effects_of(service_effects.PartitionIdle)] == [world.log]
    assert world.refusal(1, owner.make(Heartbeat)) is errors.UnknownPartition
    world.step(service.PartitionOpened(world.log))
    assert world.owned(6, connection=2).next_id == 1
    world.step(service.PartitionDropped(0))
    assert len(world.effects_of(service_effects.PartitionIdle)) == 2


def test_rejections_are_reported(world):
    world.refusal(1, prepare(OwnerSession(5, partition_id=3)))
    (report,) = world.effects_of(Report)
    assert report.name == "storage.request_rejected"
    assert dict(report.fields) == {"request": "Prepare", "error": "UnknownPartition"}


@pytest.mark.parametrize("session_id", [5, 6])
def test_a_damaged_range_can_be_repaired_in_the_same_or_the_next_session(world, session_id):
    owner = world.owned(5)
    world.ask(1, owner.append(6))
    with flipped_byte(world.engine.directory / "0", 3):
        assert world.refusal(1, range_of(owner, 3, 3)) is errors.ChecksumMismatch
    if session_id == 6:
        owner = OwnerSession(6)
        prepared = world.ask(1, prepare(owner))
        assert np.frombuffer(prepared.damaged, dtype=">i8").tolist() == [3, 3]
    records, _, lengths = encode_records(3, 1)
    message = owner.make(Repair, 3, lengths, records, zlib.crc32(records))
    wrong = dataclasses.replace(message, records_crc=1)
    assert world.refusal(1, wrong) is errors.ChecksumMismatch
    assert isinstance(world.ask(1, message), ReplicaEnd)
    assert reports(world, "storage.damage_repaired") == [{"partition": 0, "ids": "3..3"}]
    assert world.ask(1, range_of(owner, 0, 5)).count == 6


# ---- detected damage


def reported_damage(world, connection=1):
    return [
        np.frombuffer(answer.damaged, dtype=">i8").tolist()
        for answer in world.answers(connection)
        if isinstance(answer, DamageFound)
    ]


def reports(world, name):
    return [dict(effect.fields) for effect in world.effects_of(Report) if effect.name == name]


def test_the_owner_is_notified_of_damage_found_by_any_read(world):
    owner = world.owned(5)
    world.ask(1, owner.append(6))
    world.ask(2, open_request())
    reader = OwnerSession(5)
    with flipped_byte(world.engine.directory / "0", 3):
        answer = world.ask(2, range_of(reader, 0, 5, reader=True))
    assert answer.count == 3
    assert reported_damage(world) == [[3, 3]]
    assert reported_damage(world, 2) == []
    (notice,) = [each for each in world.answers(1) if isinstance(each, DamageFound)]
    assert (notice.session_id, notice.sequence, notice.partition_id) == (5, 0, 0)
    with flipped_byte(world.engine.directory / "0", 5):
        world.ask(2, range_of(reader, 4, 5, reader=True))
        world.ask(2, range_of(reader, 4, 5, reader=True))
    assert reported_damage(world) == [[3, 3], [3, 3, 5, 5]], (
        "all known damage is reported when it grows"
    )
    assert [report["ids"] for report in reports(world, "storage.damage_found")] == ["3..3", "5..5"]


def test_damage_found_without_an_owner_is_reported_to_the_next_owner(world):
    owner = world.owned(5)
    world.ask(1, owner.append(6))
    world.step(service.Disconnected(1))
    with flipped_byte(world.engine.directory / "0", 2):
        world.step(service.ScrubRequested())
        world.finish()
    assert reported_damage(world) == []
    assert reports(world, "storage.damage_found") == [{"partition": 0, "ids": "2..2"}]
    prepared = world.ask(2, prepare(OwnerSession(6)))
    assert np.frombuffer(prepared.damaged, dtype=">i8").tolist() == [2, 2]


def test_unrepaired_damage_is_reported_again_after_each_pass(world):
    owner = world.owned(5)
    world.ask(1, owner.append(6))
    with flipped_byte(world.engine.directory / "0", 3):
        for passes_count in (1, 2, 3):
            world.step(service.ScrubRequested())
            world.finish()
            while world.service.scrub_states(world.now_ms)[0].passes_count < passes_count:
                tick(world)
                world.finish()
    assert reported_damage(world) == [[3, 3]] * 4, (
        "damage is reported when found, and after each pass"
    )


def test_a_failed_read_is_reported_without_ending_the_session(world):
    owner = world.owned(5)
    world.ask(1, owner.append(6))
    for _ in range(3):
        world.disk.next_errors["pread"] = ReadFailed("cannot read x.seg: Input/output error")
        assert world.ask(1, range_of(owner, 0, 5)).count == 6
    assert len(reports(world, "storage.read_failed")) == 3
    assert "x.seg" in reports(world, "storage.read_failed")[0]["error"]
    assert (
        world.effects_of(service_effects.EndProcess)
        == world.effects_of(service_effects.CloseConnection)
        == []
    )
    assert world.ask(1, owner.append()).synced_max == 6


# ---- the scrub


def tick(world):
    """Advance the time to the next wake-up; return the new work."""
    world.now_ms = max(world.now_ms, world.service.wake_at_ms)
    before = len(world.work_items)
    world.step(Wakeup())
    return world.work_items[before:]


def test_a_log_is_scrubbed_in_pieces(make):
    world = make(scrub=Scrub(bytes_per_s=100, interval_ms=60_000))
    owner = world.owned(5)
    world.ask(1, owner.append(6))
    begun_ms = world.now_ms
    pieces = []
    while not reports(world, "storage.scrub_finished"):
        pieces += [(work.piece, world.now_ms) for work in tick(world) if work.piece is not None]
        world.finish()
    assert [piece.first for piece, _ in pieces] == [0, 2, 4], "100 of 264 bytes at a time"
    assert pieces[-1][1] - begun_ms == 2 * 880
    assert world.service.scrub_states(world.now_ms)[0].read_bytes == 264
    assert world.service.wake_at_ms == begun_ms + 60_000
    assert reported_damage(world) == []


def test_a_piece_waits_for_current_work_and_runs_before_queued_work(make):
    world = make(scrub=Scrub(bytes_per_s=0))
    owner = world.owned(5)
    world.ask(1, owner.append(6))
    world.step(service.ScrubRequested(3))
    assert world.work_items == [], "this partition is not served"
    world.send(1, owner.append())
    world.step(service.ScrubRequested(0))
    assert [work.piece for work in world.work_items] == [None]
    world.send(1, owner.append())
    world.step(service.WorkDone(world.work_items[0], world.work_items.pop(0).run()))
    assert [work.piece.first for work in world.work_items] == [0]
    world.finish()
    assert world.answers(1)[-1].synced_max == 7
    assert reports(world, "storage.scrub_finished") == [{"partition": 0}]


def test_the_acked_marker_moves_despite_a_scrub(world):
    owner = world.owned(5)
    world.ask(1, owner.append(2))
    world.step(service.ScrubRequested())
    world.finish()
    assert world.log.slot.acked.transaction_id == -1
    world.now_ms += 1_000
    world.step(Wakeup())
    assert [(work.requests, work.piece) for work in world.work_items] == [((), None)]
    world.finish()
    assert world.log.slot.acked.transaction_id == 1


def test_a_failed_slot_write_during_a_scrub_is_reported_and_skipped(world):
    owner = world.owned(5)
    world.ask(1, owner.append(6))
    with flipped_byte(world.engine.directory / "0", 3):
        world.step(service.ScrubRequested())
        world.disk.next_errors["pwrite"] = DiskFailed("writing waltz-x.ctl: Input/output error")
        world.finish()
    assert len(reports(world, "storage.disk_failed")) == 1
    assert "waltz-x.ctl" in reports(world, "storage.scrub_skipped")[0]["error"]
    assert world.service.wake_at_ms is None or world.service.wake_at_ms > world.now_ms


def test_a_partition_that_is_dropped_during_a_scrub_becomes_idle(make):
    world = make(scrub=Scrub(bytes_per_s=100))
    world.ask(1, world.owned(5).append(6))
    (work,) = tick(world)
    world.step(service.PartitionDropped(0))
    world.step(service.WorkDone(work, work.run()))
    assert [effect.log for effect in world.effects_of(service_effects.PartitionIdle)] == [world.log]
    assert world.service.scrub_states(world.now_ms) == []


# ---- disk space


def test_free_space_is_rechecked_until_it_suffices(make):
    world = make(reserve_bytes=4_096)
    owner = world.owned(5)
    kept = (owner.next_id, owner.chain)
    world.disk.reported_free_bytes = 50
    for _ in range(2):
        assert world.refusal(1, owner.append(2)) is NoSpace
        assert "need 168 bytes" in world.answers(1)[-1].message
        owner.next_id, owner.chain = kept
    assert world.log.max_id == -1
    for free, is_full in ((50, True), (167, True), (168, False)):
        world.disk.reported_free_bytes = free
        assert tick(world) == []
        look = world.effects_of(service_effects.CheckSpace)[-1]
        look.space.recheck()
        world.step(service.SpaceChecked())
        assert look.space.is_full == is_full
    assert len(world.effects_of(service_effects.CheckSpace)) == 3
    names = [
        effect.name
        for effect in world.effects_of(Report)
        if effect.name.startswith("storage.disk_")
    ]
    assert names == ["storage.disk_full", "storage.disk_space_available"], (
        "each event is reported once"
    )
    assert world.ask(1, owner.append(2)).synced_max == 1
    wake_at_ms = world.service.wake_at_ms
    tick(world)
    world.finish()
    assert wake_at_ms is not None
    assert len(world.effects_of(service_effects.CheckSpace)) == 3


def test_a_slot_write_without_space_fails_and_keeps_the_reserve(make):
    world = make(reserve_bytes=4_096)
    owner = world.owned(5, engaged=False)
    world.disk.next_errors["pwrite"] = NoSpace("waltz-x.ctl: no space left")
    mark = owner.make(SetLowWaterMark, -1, owner.chain)
    assert world.refusal(1, mark) is DiskFailed, "a failed slot write is not retried"
    assert world.engine.space.reserved_bytes == 4_096


def test_a_failed_scrub_on_a_full_disk_ends_no_session(make):
    world = make(reserve_bytes=4_096)
    world.ask(1, world.owned(5).append(6))
    world.disk.reported_free_bytes = 0
    world.step(service.ScrubRequested())
    world.finish()
    assert reports(world, "storage.scrub_finished")


@contextmanager
def flipped_byte(directory, index):
    """Flip a byte in the data of a record in the first segment."""
    (segment,) = directory.glob("*.seg")
    size = 44
    with segment.open("r+b") as file:
        file.seek(128 + index * size + 37)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    yield


# ---- files that were deleted or replaced


def replace_with_copy(directory):
    """Replace a partition's directory by an older copy."""
    shutil.copytree(directory, directory.with_name("copy"))
    shutil.rmtree(directory)
    shutil.copytree(directory.with_name("copy"), directory)


@pytest.mark.parametrize("change", [shutil.rmtree, replace_with_copy])
@pytest.mark.parametrize("found_by", ["prepare", "scrub", "append", "marker"])
def test_deleted_or_replaced_files_are_not_used(make, tmp_path, change, found_by):
    world = make(scrub=Scrub())
    world.step(service.PartitionOpened(world.engine.assign(1)))
    owner = world.owned()
    assert isinstance(world.ask(1, owner.append(3)), Appended)
    change(tmp_path / "0" / "0")
    match found_by:
        case "prepare":
            world.send(2, prepare(OwnerSession(2)))
        case "scrub":
            world.step(service.ScrubRequested(0))
        case "append":  # the file is closed and cannot be opened again
            world.disk.next_errors["pwrite"] = DiskFailed("opening: no such file")
            world.send(1, owner.append())
        case "marker":
            world.now_ms += 2_000
            world.step(Wakeup())
    world.finish()
    (gone,) = world.effects_of(service_effects.DropPartition)
    assert gone.log is world.log
    names = [effect.name for effect in world.effects_of(Report)]
    assert names.count("storage.files_replaced") == 1
    assert {"storage.disk_failed", "storage.scrub_skipped", "storage.damage_found"}.isdisjoint(
        names
    )
    assert world.refusal(3, prepare(OwnerSession(4))) is UnknownPartition
    world.now_ms += 10_000
    world.step(Wakeup())
    assert world.finish() == 0
    other = dataclasses.replace(prepare(OwnerSession(2)), partition_id=1)
    assert isinstance(world.ask(4, other), Prepared)
    world.step(service.PartitionDropped(0))
    assert world.effects_of(service_effects.PartitionIdle)[-1].log is world.log
    assert not world.effects_of(service_effects.EndProcess)


def test_a_repaired_replica_is_reported(world):
    owner = world.owned()
    world.ask(1, owner.append(3))
    later = OwnerSession(2)
    assert isinstance(world.ask(2, prepare(later)), Prepared)
    later.next_id, later.chain = owner.next_id, owner.chain
    world.ask(2, later.append(2))
    mark = later.make(SetLowWaterMark, later.next_id - 1, later.chain)
    assert isinstance(world.ask(2, mark), ReplicaEnd)
    (repaired,) = [
        dict(effect.fields)
        for effect in world.effects_of(Report)
        if effect.name == "storage.replica_repaired"
    ]
    assert repaired == {"partition": 0, "session": 2, "last_before": 2, "last": 4}
