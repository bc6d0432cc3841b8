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


class Bench:
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
        answers = [one for one in self.answers()[before:] if not isinstance(one[1], DamageFound)]
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
            (each.connection, each.message)
            for each in self.effects
            if isinstance(each, service_effects.SendStorageMessage)
        ]
        return found if connection is None else [m for c, m in found if c == connection]

    def effects_of(self, kind):
        return [each for each in self.effects if isinstance(each, kind)]

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
    benches = []

    def make_bench(**options):
        benches.append(Bench(tmp_path / str(len(benches)), **options))
        return benches[-1]

    yield make_bench
    for bench in benches:
        bench.engine.abandon()


@pytest.fixture
def bench(make):
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
def test_a_new_replica_reports_an_empty_log(bench, storage_id):
    answer = bench.ask(1, prepare(OwnerSession(5), storage_id=storage_id))
    assert answer == Prepared(
        5, 1, 0, STORAGE_ID, -1, BEFORE_FIRST, True, BEFORE_FIRST, GENESIS_CHAIN, False, b""
    )
    assert bench.log.promised == 5


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"key": b"another cluster."}, errors.ClusterKeyMismatch),
        ({"count": 5}, errors.ClusterKeyMismatch),
        ({"storage_id": b"another storage."}, errors.StorageIdMismatch),
    ],
)
def test_a_storage_of_another_cluster_is_not_prepared(bench, wrong, error):
    assert bench.refusal(1, prepare(OwnerSession(5), **wrong)) is error
    assert bench.log.promised == -1


def test_a_session_far_above_the_promised_one_is_rejected(bench):
    assert bench.refusal(1, prepare(OwnerSession(-1))) is errors.BadRequest
    assert bench.refusal(1, prepare(OwnerSession(1 << 40))) is errors.BadRequest
    assert bench.log.promised == -1


@pytest.mark.parametrize("rival", [{"session_id": 4}, {"nonce": b"another nonce..."}], ids=str)
def test_the_error_for_an_outdated_session_has_the_promised_session(bench, rival):
    bench.owned(5)
    answer = bench.ask(2, prepare(OwnerSession(**{"session_id": 5} | rival)))
    assert (answer.error_code, answer.promised) == (errors.SessionFenced.code, 5)
    assert bench.effects_of(service_effects.CloseConnection) == []


def test_after_a_lost_control_slot_only_a_newer_session_is_accepted(tmp_path):
    bench = Bench(tmp_path)
    bench.owned(5)
    bench.engine.abandon()
    slots = tmp_path / "0" / "waltz-x.ctl"
    content = bytearray(slots.read_bytes())
    newer = max((0, 1), key=lambda position: Slot.decode(content[4096 * position :][:512]).sequence)
    content[4096 * newer] ^= 1
    slots.write_bytes(content)
    bench = Bench(tmp_path)
    earlier = bench.ask(1, prepare(OwnerSession(4)))
    assert (earlier.error_code, earlier.promised) == (errors.SessionFenced.code, 5)
    assert bench.refusal(1, prepare(OwnerSession(5))) is errors.ReplicaSuspect
    assert bench.refusal(1, prepare(OwnerSession(6))) is errors.ReplicaSuspect
    assert bench.ask(1, prepare(OwnerSession(7))).suspect
    bench.engine.abandon()


def test_the_same_owner_may_reconnect(bench):
    owner = bench.owned(5, connection=1)
    assert isinstance(bench.ask(2, prepare(owner)), Prepared)
    assert [each.connection for each in bench.effects_of(service_effects.CloseConnection)] == [1]
    assert bench.refusal(1, owner.append()) is errors.SessionFenced
    owner.next_id, owner.chain = 0, GENESIS_CHAIN
    assert isinstance(bench.ask(2, owner.append()), Appended)


def test_late_messages_of_a_superseded_connection_are_ignored(bench):
    """The disk hangs, the owner reconnects, and then the storage reads earlier requests."""
    owner = OwnerSession(5)
    bench.send(2, prepare(owner))
    bench.send(1, prepare(owner))
    bench.finish()
    (late, rejections), (later, answer) = bench.answers()
    assert (late, type(rejections), later, type(answer)) == (1, Nack, 2, Prepared)
    assert rejections.error_code == errors.ConnectionSuperseded.code
    assert isinstance(bench.ask(2, owner.append()), Appended)


def test_a_reconnecting_owner_is_not_rejected_as_another_owner(bench):
    """An owner halts its partition permanently if its session is promised to another owner."""
    owner = OwnerSession(5)
    bench.send(1, prepare(owner))
    bench.send(1, prepare(owner))  # the first request is running, this one waits
    bench.send(2, prepare(owner))
    bench.finish()
    answered = [(each, type(answer)) for each, answer in bench.answers()]
    assert (2, Prepared) in answered
    codes = {answer.error_code for _, answer in bench.answers() if isinstance(answer, Nack)}
    assert codes == {errors.ConnectionSuperseded.code}


def test_a_connection_may_continue_with_a_later_session(bench):
    bench.owned(5, connection=1)
    later = bench.owned(6, connection=1)
    assert bench.effects_of(service_effects.CloseConnection) == []
    assert isinstance(bench.ask(1, later.append()), Appended)


def test_a_partition_that_is_not_assigned_here_is_rejected(bench):
    assert bench.refusal(1, prepare(OwnerSession(5, partition_id=3))) is errors.UnknownPartition


def test_a_promise_that_could_not_be_made_durable_ends_the_session(bench):
    bench.disk.next_errors["pwrite"] = DiskFailed("slots are gone")
    assert bench.refusal(1, prepare(OwnerSession(5))) is DiskFailed
    assert [each.connection for each in bench.effects_of(service_effects.CloseConnection)] == [1]
    assert bench.refusal(1, OwnerSession(5).make(Heartbeat)) is errors.SessionFenced
    # The rejected session stays fenced: an earlier session is rejected, too.
    assert bench.refusal(2, prepare(OwnerSession(4))) is errors.SessionFenced


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


def test_requests_without_a_prepared_session_are_rejected(bench):
    for message in requests_of(bench.owned(5, connection=1)):
        assert bench.refusal(2, message) is errors.SessionFenced
    assert bench.log.synced_max == BEFORE_FIRST


def test_the_error_for_a_message_of_another_session_has_the_promised_one(bench):
    owner = bench.owned(5)
    for request, session_id in itertools.product(requests_of(owner), (-1, 4, 6, 1 << 62)):
        for connection in (1, 2):
            message = dataclasses.replace(request, session_id=session_id)
            answer = bench.ask(connection, message)
            assert (answer.error_code, answer.promised) == (errors.SessionFenced.code, 5)
            assert answer.session_id == session_id
    assert bench.log.promised == 5
    assert isinstance(bench.ask(1, owner.make(Heartbeat)), HeartbeatResponse)


def test_an_unexpected_message_is_rejected(bench):
    owner = bench.owned(5)
    assert bench.refusal(1, owner.make(SuccessResponse)) is errors.BadRequest


def test_a_heartbeat_is_answered_at_once_while_work_is_in_progress(bench):
    owner = bench.owned(5)
    bench.send(1, owner.append(), owner.make(Heartbeat))
    assert isinstance(bench.answers(1)[-1], HeartbeatResponse)
    bench.finish()


def test_a_later_session_is_reported_while_its_prepare_waits(bench):
    owner = bench.owned(5, connection=1)
    bench.send(4, open_request())
    assert isinstance(bench.ask(4, owner.make(Heartbeat)), HeartbeatResponse)
    bench.send(1, owner.append())
    bench.send(2, prepare(OwnerSession(6)))
    bench.send(4, owner.make(Heartbeat))
    answer = bench.answers(4)[-1]
    assert (answer.error_code, answer.promised) == (errors.SessionFenced.code, 6)
    bench.send(3, prepare(OwnerSession(7)))
    waiting = bench.answers(2)[-1]
    assert (waiting.error_code, waiting.promised) == (errors.SessionFenced.code, 7)
    bench.finish()


# ---- appending


def test_appends_are_answered_after_the_sync_and_can_be_read(bench):
    owner = bench.owned(5)
    first, second = owner.append(3), owner.append(2)
    assert bench.ask(1, first) == Appended(5, first.sequence, 0, 2)
    assert bench.ask(1, second) == Appended(5, second.sequence, 0, 4)
    found = bench.ask(1, range_of(owner, 1, 4))
    records, _, lengths = encode_records(1, 4)
    assert isinstance(found, RangeBytes)
    assert (found.first, found.count, bytes(found.records), bytes(found.lengths)) == (
        1,
        4,
        records,
        lengths,
    )
    assert [entry.last for entry in found.lineage] == [2, 4]


def test_all_appends_that_wait_are_synced_once(bench):
    owner = bench.owned(5)
    appends = [owner.append(2) for _ in range(5)]
    bench.send(1, appends[0])
    bench.send(1, *appends[1:])
    assert [len(work.requests) for work in bench.work_items] == [1]
    before = bench.log.sync_count
    assert bench.finish() == 2
    one_group = bench.log.sync_count - before
    answers = bench.answers(1)[-5:]
    assert [(each.sequence, each.synced_max) for each in answers] == [
        (appends[0].sequence, 1),
        *((each.sequence, 9) for each in appends[1:]),
    ]
    # Two groups take as many syncs as two appends.
    before = bench.log.sync_count
    bench.ask(1, owner.append())
    assert one_group == 2 * (bench.log.sync_count - before)


def test_an_append_with_changed_bytes_is_rejected_with_all_later_ones(bench):
    owner = bench.owned(5)
    good, bad, after = owner.append(), owner.append(), owner.append()
    bad = dataclasses.replace(bad, records=b"\xff" + bad.records[1:])
    bench.send(1, owner.make(Engage, BEFORE_FIRST), good, bad, after)
    bench.finish()
    _, first, second, third = bench.answers(1)[-4:]
    assert first == Appended(5, good.sequence, 0, 0)
    assert {second.error_code, third.error_code} == {errors.ChecksumMismatch.code}
    assert bench.log.synced_max == 0


def test_appends_are_synced_before_later_requests(bench):
    owner = bench.owned(5)
    bench.send(1, owner.append(), owner.append())
    bench.send(1, owner.make(Truncate, 0, 0, owner.chain), owner.make(Heartbeat))
    assert bench.finish() == 3
    assert isinstance(bench.answers(1)[-1], Nack)  # the chain at 0 is another
    assert bench.log.synced_max == 1


# ---- fencing


def test_a_later_session_ends_the_earlier_one_at_once(bench):
    old = bench.owned(5, connection=1)
    under_way, *queued = (old.append() for _ in range(4))
    bench.send(1, under_way, *queued)
    bench.send(1, range_of(old, 0, 0))
    new = OwnerSession(6)
    bench.send(2, prepare(new))
    rejections = bench.answers(1)[-4:]
    assert all(each.error_code == errors.SessionFenced.code for each in rejections)
    assert [each.connection for each in bench.effects_of(service_effects.CloseConnection)] == [1]
    bench.send(1, old.append())
    assert bench.answers(1)[-1].promised == 6
    bench.finish()
    # The running append is on disk, and the new session finds it.
    prepared = bench.answers(2)[-1]
    assert (prepared.synced_max, prepared.last_session) == (0, 5)
    assert bench.service.queue_limits.owner_bytes == 0


def test_requests_of_a_disconnected_owner_are_removed_from_the_queue(bench):
    owner = bench.owned(5)
    bench.send(1, *(owner.append() for _ in range(4)))
    bench.step(service.Disconnected(1))
    bench.finish()
    assert bench.log.synced_max == 0
    assert bench.service.queue_limits.owner_bytes == 0
    again = OwnerSession(5).continue_after(owner)
    assert bench.ask(2, prepare(again)).synced_max == 0


# ---- reading


def test_a_reader_is_answered_while_the_session_that_it_names_is_engaged(bench):
    owner = bench.owned(5, engaged=False)
    reader = OwnerSession(5)
    request = range_of(reader, 0, 9, reader=True)
    assert bench.refusal(7, request) is errors.BadRequest  # the reader has not sent its cluster key
    assert bench.ask(7, open_request()) == SuccessResponse(-1, -1, -1)
    assert bench.refusal(7, request) is errors.NotMounted
    bench.ask(1, owner.make(SetLowWaterMark, BEFORE_FIRST, GENESIS_CHAIN))
    bench.ask(1, owner.append(3))
    assert bench.refusal(7, request) is errors.NotMounted
    owner = bench.owned(6, connection=1)
    bench.ask(1, owner.append(2))
    assert bench.refusal(7, request) is errors.SessionFenced
    found = bench.ask(7, range_of(OwnerSession(6), 1, 99, reader=True))
    assert (found.first, found.count) == (1, 4)
    beyond = bench.ask(7, range_of(OwnerSession(6), 5, 99, reader=True))
    assert (beyond.first, beyond.count, beyond.records) == (5, 0, b"")
    bench.step(service.Disconnected(1))  # the owner has disconnected, the log is unchanged
    assert bench.ask(7, range_of(OwnerSession(6), 0, 0, reader=True)).count == 1
    bench.step(service.Disconnected(7))  # nothing is kept for closed connections
    assert bench.refusal(7, range_of(OwnerSession(6), 0, 0, reader=True)) is errors.BadRequest


def test_lock_blocks_are_reported_to_readers_of_the_engaged_session(bench):
    owner = bench.owned(5)
    bench.ask(1, dataclasses.replace(owner.append(3), locks=b"block"))
    request = OwnerSession(5).make(LockBlocksRequest, 100)
    assert bench.refusal(7, request) is errors.BadRequest  # the reader has not sent its cluster key
    bench.ask(7, open_request())
    assert bench.ask(7, request) == LockBlocks(5, request.sequence, 0, b"block")
    assert bench.refusal(7, OwnerSession(4).make(LockBlocksRequest, 100)) is errors.SessionFenced
    assert bench.service.queue_limits.owner_bytes == 0
    bench.send(7, OwnerSession(5).make(LockBlocksRequest, 100))
    assert bench.service.queue_limits.owner_bytes == 512 + 100


def test_a_reader_never_sees_unsynced_records(bench):
    owner = bench.owned(5)
    bench.send(7, open_request())
    bench.send(1, owner.append())
    append = bench.work_items[0]
    bench.send(7, range_of(OwnerSession(5), 0, 9, reader=True))
    assert bench.work_items == [append]
    bench.finish()
    assert bench.answers(7)[-1].count == 1


@pytest.mark.parametrize("wrong", [{"key": b"another cluster."}, {"count": 5}])
def test_a_reader_of_another_cluster_is_rejected(bench, wrong):
    bench.send(7, open_request(**wrong))
    assert bench.answers(7)[-1].error_code == errors.ClusterKeyMismatch.code
    bench.owned(5)
    assert bench.refusal(7, range_of(OwnerSession(5), 0, 0, reader=True)) is errors.BadRequest


def test_the_owner_reads_headers_whole_batches_and_the_lineage(bench):
    owner = bench.owned(5)
    bench.ask(1, owner.append(3))
    chain = owner.chain
    bench.ask(1, owner.append(3))
    headers = bench.ask(1, range_of(owner, 1, 4, form=RangeForm.HEADERS))
    assert (headers.first, headers.count, len(headers.records)) == (1, 4, 4 * 28)
    assert bytes(headers.lengths) == b""
    batches = bench.ask(1, range_of(owner, 3, 5, whole_batches=True))
    assert (batches.first, batches.count, bytes(batches.chain_before)) == (3, 3, chain)
    _, crcs, _ = encode_records(3, 3)
    assert bytes(batches.lineage[0].chain) == next_chain(chain, 3, 5, 5, crcs)
    assert bench.refusal(1, range_of(owner, 4, 5, whole_batches=True)) is errors.BadRequest
    assert bench.refusal(1, range_of(owner, 6, 9)) is errors.BadRequest
    assert bench.refusal(1, range_of(owner, 0, 1, form=9)) is errors.BadRequest
    found = bench.ask(1, owner.make(LineageRequest, 1, 4))
    assert isinstance(found, LineageResponse)
    assert [(entry.first, entry.last) for entry in found.lineage] == [(0, 2), (3, 5)]
    assert bytes(found.chain_before) == GENESIS_CHAIN


# ---- limits


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_connection_over_the_memory_limit_is_paused(make, is_gone):
    bench = make(queue_bytes_max=4_000)
    owner = bench.owned(5)
    bench.send(1, *(owner.append(data=bytes(500)) for _ in range(8)))
    assert [each.connection for each in bench.effects_of(service_effects.PauseReading)] == [1]
    assert bench.effects_of(service_effects.ResumeReading) == []
    if is_gone:
        bench.step(service.Disconnected(1))
    bench.finish()
    resumed = [each.connection for each in bench.effects_of(service_effects.ResumeReading)]
    assert resumed == ([] if is_gone else [1])
    assert bench.service.queue_limits.owner_bytes == 0
    assert bench.log.synced_max == (0 if is_gone else 7)


def test_many_reads_of_clients_do_not_pause_the_owner(make):
    """Otherwise a client could stop the appends and heartbeats of all sessions."""
    bench = make(queue_bytes_max=4_000)
    owner = bench.owned(5)
    bench.ask(1, owner.append())
    for reader in (7, 8):
        bench.ask(reader, open_request())
    bench.send(
        7, *(range_of(OwnerSession(5), 0, 9, reader=True, bytes_max=1 << 30) for _ in range(4))
    )
    bench.send(8, range_of(OwnerSession(5), 0, 9, reader=True, bytes_max=1))
    bench.send(1, owner.append(data=bytes(500)))
    assert [each.connection for each in bench.effects_of(service_effects.PauseReading)] == [7, 8]
    bench.finish()
    assert [each.connection for each in bench.effects_of(service_effects.ResumeReading)] == [7, 8]
    assert bench.service.queue_limits.reader_bytes == 0


# ---- the disk


def test_a_prepare_on_a_failing_disk_is_not_rejected_as_fenced(bench):
    owner = bench.owned(5)
    bench.send(1, owner.append())
    bench.send(2, prepare(OwnerSession(6)))
    bench.disk.next_errors["sync"] = DiskFailed("sync of x.seg: Input/output error")
    bench.finish()
    assert bench.answers(2)[-1].error_code == DiskFailed.code


def test_a_second_failed_sync_ends_the_process(bench):
    owner = bench.owned(5)
    bench.ask(1, owner.append(2))
    kept = OwnerSession(6).continue_after(owner)
    bench.send(1, owner.append())
    bench.send(1, owner.append(), owner.append())
    bench.disk.next_errors["sync"] = DiskFailed("sync of x.seg: Input/output error")
    bench.finish()
    rejections = bench.answers(1)[-3:]
    assert rejections[0].error_code == DiskFailed.code
    assert "x.seg" in rejections[0].message
    assert {each.error_code for each in rejections[1:]} == {DiskFailed.code}
    assert [each.connection for each in bench.effects_of(service_effects.CloseConnection)] == [1]
    assert bench.effects_of(service_effects.EndProcess) == []
    assert bench.refusal(1, owner.make(Heartbeat)) is errors.SessionFenced
    bench.ask(7, open_request())
    assert bench.refusal(7, range_of(OwnerSession(5), 0, 1, reader=True)) is errors.NotMounted

    prepared = bench.ask(2, prepare(kept))
    assert (prepared.synced_max, bytes(prepared.chain)) == (1, kept.chain)
    assert bench.ask(2, kept.append()).synced_max == 2
    bench.disk.next_errors["sync"] = DiskFailed("sync of y.seg: Input/output error")
    assert bench.refusal(2, kept.append()) is DiskFailed
    (end,) = bench.effects_of(service_effects.EndProcess)
    assert "y.seg" in end.reason


def test_a_full_disk_rejects_appends_and_still_reads(bench):
    owner = bench.owned(5)
    bench.ask(1, owner.append(2))
    kept = (owner.next_id, owner.chain)
    bench.disk.next_errors["pwrite"] = NoSpace("x.seg: no space left")
    assert bench.refusal(1, owner.append()) is NoSpace
    assert bench.effects_of(service_effects.CloseConnection) == []
    assert bench.ask(1, range_of(owner, 0, 1)).count == 2
    owner.next_id, owner.chain = kept
    assert bench.ask(1, owner.append()).synced_max == 2


def test_the_acked_marker_moves_when_a_log_becomes_idle(bench):
    owner = bench.owned(5)
    assert bench.service.wake_at_ms is None
    bench.ask(1, owner.append(2))
    assert bench.service.wake_at_ms == bench.now_ms + 1000
    bench.step(Wakeup())  # too early
    assert bench.work_items == []
    bench.now_ms += 1000
    bench.step(Wakeup())
    assert [work.requests for work in bench.work_items] == [()]
    assert bench.log.slot.acked.transaction_id == BEFORE_FIRST
    bench.finish()
    assert bench.log.slot.acked.transaction_id == 1
    assert bench.service.wake_at_ms is None
    bench.ask(1, owner.append())
    bench.now_ms += 1000
    bench.send(1, owner.append())
    bench.step(Wakeup())  # the partition is busy and gets another turn
    bench.finish()
    assert bench.service.wake_at_ms == bench.now_ms + 1000


# ---- added and removed partitions


def test_a_dropped_partition_is_not_served_any_more(bench):
    owner = bench.owned(5)
    assert bench.service.partitions == (0,)
    bench.send(1, owner.append(), owner.append())
    bench.step(service.PartitionDropped(0))
    assert bench.effects_of(service_effects.PartitionIdle) == []
    assert [each.connection for each in bench.effects_of(service_effects.CloseConnection)] == [1]
    bench.finish()
    assert [each.log for each in bench.effects_of(service_effects.PartitionIdle)] == [bench.log]
    assert bench.refusal(1, owner.make(Heartbeat)) is errors.UnknownPartition
    bench.step(service.PartitionOpened(bench.log))
    assert bench.owned(6, connection=2).next_id == 1
    bench.step(service.PartitionDropped(0))
    assert len(bench.effects_of(service_effects.PartitionIdle)) == 2


def test_rejections_are_reported(bench):
    bench.refusal(1, prepare(OwnerSession(5, partition_id=3)))
    (report,) = bench.effects_of(Report)
    assert report.name == "storage.request_rejected"
    assert dict(report.fields) == {"request": "Prepare", "error": "UnknownPartition"}


@pytest.mark.parametrize("session_id", [5, 6])
def test_a_damaged_range_is_repaired_in_this_session_or_the_next(bench, session_id):
    owner = bench.owned(5)
    bench.ask(1, owner.append(6))
    with flipped_byte(bench.engine.directory / "0", 3):
        assert bench.refusal(1, range_of(owner, 3, 3)) is errors.ChecksumMismatch
    if session_id == 6:
        owner = OwnerSession(6)
        prepared = bench.ask(1, prepare(owner))
        assert np.frombuffer(prepared.damaged, dtype=">i8").tolist() == [3, 3]
    records, _, lengths = encode_records(3, 1)
    message = owner.make(Repair, 3, lengths, records, zlib.crc32(records))
    wrong = dataclasses.replace(message, records_crc=1)
    assert bench.refusal(1, wrong) is errors.ChecksumMismatch
    assert isinstance(bench.ask(1, message), ReplicaEnd)
    assert reports(bench, "storage.damage_repaired") == [{"partition": 0, "ids": "3..3"}]
    assert bench.ask(1, range_of(owner, 0, 5)).count == 6


# ---- detected damage


def reported_damage(bench, connection=1):
    return [
        np.frombuffer(each.damaged, dtype=">i8").tolist()
        for each in bench.answers(connection)
        if isinstance(each, DamageFound)
    ]


def reports(bench, name):
    return [dict(each.fields) for each in bench.effects_of(Report) if each.name == name]


def test_the_owner_is_notified_of_damage_found_by_any_read(bench):
    owner = bench.owned(5)
    bench.ask(1, owner.append(6))
    bench.ask(2, open_request())
    reader = OwnerSession(5)
    with flipped_byte(bench.engine.directory / "0", 3):
        answer = bench.ask(2, range_of(reader, 0, 5, reader=True))
    assert answer.count == 3
    assert reported_damage(bench) == [[3, 3]]
    assert reported_damage(bench, 2) == []
    (notice,) = [each for each in bench.answers(1) if isinstance(each, DamageFound)]
    assert (notice.session_id, notice.sequence, notice.partition_id) == (5, 0, 0)
    with flipped_byte(bench.engine.directory / "0", 5):
        bench.ask(2, range_of(reader, 4, 5, reader=True))
        bench.ask(2, range_of(reader, 4, 5, reader=True))
    assert reported_damage(bench) == [[3, 3], [3, 3, 5, 5]], (
        "all known damage is reported when it grows"
    )
    assert [each["ids"] for each in reports(bench, "storage.damage_found")] == ["3..3", "5..5"]


def test_damage_without_an_owner_is_reported_with_the_next_session(bench):
    owner = bench.owned(5)
    bench.ask(1, owner.append(6))
    bench.step(service.Disconnected(1))
    with flipped_byte(bench.engine.directory / "0", 2):
        bench.step(service.ScrubRequested())
        bench.finish()
    assert reported_damage(bench) == []
    assert reports(bench, "storage.damage_found") == [{"partition": 0, "ids": "2..2"}]
    prepared = bench.ask(2, prepare(OwnerSession(6)))
    assert np.frombuffer(prepared.damaged, dtype=">i8").tolist() == [2, 2]


def test_unrepaired_damage_is_reported_again_after_each_pass(bench):
    owner = bench.owned(5)
    bench.ask(1, owner.append(6))
    with flipped_byte(bench.engine.directory / "0", 3):
        for passes_count in (1, 2, 3):
            bench.step(service.ScrubRequested())
            bench.finish()
            while bench.service.scrub_states(bench.now_ms)[0].passes_count < passes_count:
                tick(bench)
                bench.finish()
    assert reported_damage(bench) == [[3, 3]] * 4, (
        "damage is reported when found, and after each pass"
    )


def test_a_failed_read_is_reported_without_ending_the_session(bench):
    owner = bench.owned(5)
    bench.ask(1, owner.append(6))
    for _ in range(3):
        bench.disk.next_errors["pread"] = ReadFailed("cannot read x.seg: Input/output error")
        assert bench.ask(1, range_of(owner, 0, 5)).count == 6
    assert len(reports(bench, "storage.read_failed")) == 3
    assert "x.seg" in reports(bench, "storage.read_failed")[0]["error"]
    assert (
        bench.effects_of(service_effects.EndProcess)
        == bench.effects_of(service_effects.CloseConnection)
        == []
    )
    assert bench.ask(1, owner.append()).synced_max == 6


# ---- the scrub


def tick(bench):
    """Advance the time to the next wake-up; return the new work."""
    bench.now_ms = max(bench.now_ms, bench.service.wake_at_ms)
    before = len(bench.work_items)
    bench.step(Wakeup())
    return bench.work_items[before:]


def test_a_log_is_scrubbed_in_pieces(make):
    bench = make(scrub=Scrub(bytes_per_s=100, interval_ms=60_000))
    owner = bench.owned(5)
    bench.ask(1, owner.append(6))
    begun_ms = bench.now_ms
    pieces = []
    while not reports(bench, "storage.scrub_finished"):
        pieces += [(work.piece, bench.now_ms) for work in tick(bench) if work.piece is not None]
        bench.finish()
    assert [piece.first for piece, _ in pieces] == [0, 2, 4], "100 of 264 bytes at a time"
    assert pieces[-1][1] - begun_ms == 2 * 880
    assert bench.service.scrub_states(bench.now_ms)[0].read_bytes == 264
    assert bench.service.wake_at_ms == begun_ms + 60_000
    assert reported_damage(bench) == []


def test_a_piece_waits_for_current_work_and_runs_before_queued_work(make):
    bench = make(scrub=Scrub(bytes_per_s=0))
    owner = bench.owned(5)
    bench.ask(1, owner.append(6))
    bench.step(service.ScrubRequested(3))
    assert bench.work_items == [], "this partition is not served"
    bench.send(1, owner.append())
    bench.step(service.ScrubRequested(0))
    assert [work.piece for work in bench.work_items] == [None]
    bench.send(1, owner.append())
    bench.step(service.WorkDone(bench.work_items[0], bench.work_items.pop(0).run()))
    assert [work.piece.first for work in bench.work_items] == [0]
    bench.finish()
    assert bench.answers(1)[-1].synced_max == 7
    assert reports(bench, "storage.scrub_finished") == [{"partition": 0}]


def test_the_acked_marker_moves_despite_a_scrub(bench):
    owner = bench.owned(5)
    bench.ask(1, owner.append(2))
    bench.step(service.ScrubRequested())
    bench.finish()
    assert bench.log.slot.acked.transaction_id == -1
    bench.now_ms += 1_000
    bench.step(Wakeup())
    assert [(work.requests, work.piece) for work in bench.work_items] == [((), None)]
    bench.finish()
    assert bench.log.slot.acked.transaction_id == 1


def test_a_failed_slot_write_during_a_scrub_is_reported_and_skipped(bench):
    owner = bench.owned(5)
    bench.ask(1, owner.append(6))
    with flipped_byte(bench.engine.directory / "0", 3):
        bench.step(service.ScrubRequested())
        bench.disk.next_errors["pwrite"] = DiskFailed("writing waltz-x.ctl: Input/output error")
        bench.finish()
    assert len(reports(bench, "storage.disk_failed")) == 1
    assert "waltz-x.ctl" in reports(bench, "storage.scrub_skipped")[0]["error"]
    assert bench.service.wake_at_ms is None or bench.service.wake_at_ms > bench.now_ms


def test_a_partition_that_is_dropped_during_a_scrub_becomes_idle(make):
    bench = make(scrub=Scrub(bytes_per_s=100))
    bench.ask(1, bench.owned(5).append(6))
    (work,) = tick(bench)
    bench.step(service.PartitionDropped(0))
    bench.step(service.WorkDone(work, work.run()))
    assert [each.log for each in bench.effects_of(service_effects.PartitionIdle)] == [bench.log]
    assert bench.service.scrub_states(bench.now_ms) == []


# ---- disk space


def test_free_space_is_rechecked_until_it_suffices(make):
    bench = make(reserve_bytes=4_096)
    owner = bench.owned(5)
    kept = (owner.next_id, owner.chain)
    bench.disk.reported_free_bytes = 50
    for _ in range(2):
        assert bench.refusal(1, owner.append(2)) is NoSpace
        assert "need 168 bytes" in bench.answers(1)[-1].message
        owner.next_id, owner.chain = kept
    assert bench.log.max_id == -1
    for free, is_full in ((50, True), (167, True), (168, False)):
        bench.disk.reported_free_bytes = free
        assert tick(bench) == []
        look = bench.effects_of(service_effects.CheckSpace)[-1]
        look.space.recheck()
        bench.step(service.SpaceChecked())
        assert look.space.is_full == is_full
    assert len(bench.effects_of(service_effects.CheckSpace)) == 3
    names = [
        each.name for each in bench.effects_of(Report) if each.name.startswith("storage.disk_")
    ]
    assert names == ["storage.disk_full", "storage.disk_space_available"], (
        "each event is reported once"
    )
    assert bench.ask(1, owner.append(2)).synced_max == 1
    wake_at_ms = bench.service.wake_at_ms
    tick(bench)
    bench.finish()
    assert wake_at_ms is not None
    assert len(bench.effects_of(service_effects.CheckSpace)) == 3


def test_a_slot_write_without_space_fails_and_keeps_the_reserve(make):
    bench = make(reserve_bytes=4_096)
    owner = bench.owned(5, engaged=False)
    bench.disk.next_errors["pwrite"] = NoSpace("waltz-x.ctl: no space left")
    mark = owner.make(SetLowWaterMark, -1, owner.chain)
    assert bench.refusal(1, mark) is DiskFailed, "a failed slot write is not retried"
    assert bench.engine.space.reserved_bytes == 4_096


def test_a_failed_scrub_on_a_full_disk_ends_no_session(make):
    bench = make(reserve_bytes=4_096)
    bench.ask(1, bench.owned(5).append(6))
    bench.disk.reported_free_bytes = 0
    bench.step(service.ScrubRequested())
    bench.finish()
    assert reports(bench, "storage.scrub_finished")


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
    bench = make(scrub=Scrub())
    bench.step(service.PartitionOpened(bench.engine.assign(1)))
    owner = bench.owned()
    assert isinstance(bench.ask(1, owner.append(3)), Appended)
    change(tmp_path / "0" / "0")
    match found_by:
        case "prepare":
            bench.send(2, prepare(OwnerSession(2)))
        case "scrub":
            bench.step(service.ScrubRequested(0))
        case "append":  # the file is closed and cannot be opened again
            bench.disk.next_errors["pwrite"] = DiskFailed("opening: no such file")
            bench.send(1, owner.append())
        case "marker":
            bench.now_ms += 2_000
            bench.step(Wakeup())
    bench.finish()
    (gone,) = bench.effects_of(service_effects.DropPartition)
    assert gone.log is bench.log
    names = [each.name for each in bench.effects_of(Report)]
    assert names.count("storage.files_replaced") == 1
    assert {"storage.disk_failed", "storage.scrub_skipped", "storage.damage_found"}.isdisjoint(
        names
    )
    assert bench.refusal(3, prepare(OwnerSession(4))) is UnknownPartition
    bench.now_ms += 10_000
    bench.step(Wakeup())
    assert bench.finish() == 0
    other = dataclasses.replace(prepare(OwnerSession(2)), partition_id=1)
    assert isinstance(bench.ask(4, other), Prepared)
    bench.step(service.PartitionDropped(0))
    assert bench.effects_of(service_effects.PartitionIdle)[-1].log is bench.log
    assert not bench.effects_of(service_effects.EndProcess)


def test_a_repaired_replica_is_reported(bench):
    owner = bench.owned()
    bench.ask(1, owner.append(3))
    later = OwnerSession(2)
    assert isinstance(bench.ask(2, prepare(later)), Prepared)
    later.next_id, later.chain = owner.next_id, owner.chain
    bench.ask(2, later.append(2))
    mark = later.make(SetLowWaterMark, later.next_id - 1, later.chain)
    assert isinstance(bench.ask(2, mark), ReplicaEnd)
    (repaired,) = [
        dict(each.fields)
        for each in bench.effects_of(Report)
        if each.name == "storage.replica_repaired"
    ]
    assert repaired == {"partition": 0, "session": 2, "last_before": 2, "last": 4}
