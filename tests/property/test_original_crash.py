"""What an original's server writes through a storage whose disk loses power, at every step.

What has to hold: what was answered is there, the session that was promised too, nothing makes the
replica suspect, and the batches that the next opening makes are those that the ids give.
"""

from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random

import pytest

from tests.property.storage_model import KEY, PARTITION, ROOT, SURVIVALS
from waltz_core import raw_records
from waltz_core.record import (
    BEFORE_FIRST,
    GENESIS_CHAIN,
    NO_SESSION,
    LineageEntry,
    Record,
    ReqId,
    next_chain,
)
from waltz_core.storage import recovery
from waltz_core.storage.control_file import ControlFile
from waltz_core.storage.partition_log import LogSettings
from waltz_core.storage.replica_log import ReplicaLog, encoded_record
from waltz_sim.world.disk import Fault, PowerLoss, SimDisk

BATCH_IDS = 8


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(recovery, "ADOPTED_BATCH_IDS", BATCH_IDS)


@dataclass
class World:
    """A log, and what it must hold: `acked` is the last id that was answered."""

    rng: Random
    disk: SimDisk = field(default_factory=SimDisk)
    records: list[Record] = field(default_factory=list)
    acked: int = BEFORE_FIRST
    promised: int = NO_SESSION
    mark: int = BEFORE_FIRST
    new_mark: int | None = None
    cut_to: int | None = None

    def __post_init__(self):
        self.disk.make_directory(ROOT)
        self.open()

    def open(self):
        self.control = ControlFile.open(self.disk, ROOT, KEY, 4, 1)
        settings = LogSettings(KEY, 900, lambda: 1_700_000_000_000)
        self.log = ReplicaLog.open(
            self.disk, ROOT / str(PARTITION), PARTITION, self.control, settings
        )

    def lose_power(self, survival):
        self.disk.power_loss(survival, self.rng)
        self.open()
        self.check()

    # ---- an original's server

    def begin(self, session):
        self.log.promise(session)
        self.promised = session

    def set_mark(self, mark):
        self.new_mark = mark
        self.log.set_original_mark(self.promised, mark)
        self.mark, self.new_mark = mark, None

    def append(self, count):
        first = len(self.records)
        made = [
            Record(first + one, ReqId(1, 1, 0, first + one), 7, self.rng.randbytes(50))
            for one in range(count)
        ]
        self.records += made
        self.log.append_records(self.promised, made)
        self.log.sync_records()
        self.acked = len(self.records) - 1

    def cut(self, last):
        self.cut_to = last
        assert self.log.cut_to(self.promised, last) == last
        del self.records[last + 1 :]
        self.acked, self.cut_to = last, None

    # ---- what must be

    def check(self):
        log = self.log
        if self.cut_to is not None and log.max_id <= self.cut_to:
            del self.records[self.cut_to + 1 :]
            self.acked = self.cut_to
        self.cut_to = None
        assert self.acked <= log.max_id < len(self.records)
        del self.records[log.max_id + 1 :]
        self.acked = log.max_id
        assert not log.suspect
        assert not log.damaged
        assert log.promised >= self.promised
        info = self.control.info(PARTITION)
        assert info.low_water_mark in (self.mark, self.new_mark)
        self.mark, self.new_mark = info.low_water_mark, None
        self.check_content()
        self.check_batches()

    def check_content(self):
        if self.records:
            read = self.log.read_range(0, self.log.max_id, 1 << 20, whole_batches=False)
            assert read.records == b"".join(map(encoded_record, self.records))

    def check_batches(self):
        assert self.log.lineage(0, max(0, self.log.max_id))[1] == tuple(self.bounded())

    def bounded(self):
        """The batches of records that no session of S 1 has written."""
        crcs = [encoded_record(each)[-4:] for each in self.records]
        first, chain = 0, GENESIS_CHAIN
        while first < len(crcs):
            last = min(first - first % BATCH_IDS + BATCH_IDS - 1, len(crcs) - 1)
            if first <= self.mark:
                last = min(last, self.mark)
            chain = next_chain(chain, first, last, NO_SESSION, b"".join(crcs[first : last + 1]))
            yield LineageEntry(first, last, NO_SESSION, 0, chain)
            first = last + 1


def story(world):
    """Two sessions, segments, a cut, and an opening in the middle."""
    world.begin(1)
    world.set_mark(-1)
    for count in (3, 1, 14, 9):
        world.append(count)
    world.begin(2)
    world.cut(22)
    world.set_mark(22)
    world.append(4)
    world.log.mark_acked()
    world.log.abandon()
    world.control.close()
    world.open()
    world.check()
    world.begin(3)
    world.set_mark(30)
    world.append(4)
    world.append(7)
    world.log.close()
    world.control.close()
    world.open()
    world.check()


@pytest.mark.parametrize("survival", SURVIVALS)
def test_power_loss_at_every_step(survival):
    step, lost = 0, True
    while lost:
        step += 1
        world = World(Random(step))
        world.disk.plan(world.disk.step_count + step, Fault.POWER_LOSS)
        lost = False
        try:
            story(world)
        except PowerLoss:
            lost = True
            world.lose_power(survival)
            world.begin(world.log.promised + 1)
            world.append(3)
            world.lose_power(survival)
    assert step > 150


# ---------------------------------------------------------------------------------------------
# other batches for records that are here


@contextmanager
def power(world, step):
    """Lose power at a step; nothing that was there is gone, and the log has batches."""
    world.disk.plan(world.disk.step_count + step, Fault.POWER_LOSS)
    try:
        yield
    except PowerLoss:
        world.disk.power_loss(world.rng.choice(SURVIVALS), world.rng)
        world.open()
    world.disk.forget_plans()


def other_batches(records, counts, session):
    """Batches of records with these sizes: (fields of an append) for each."""
    first, chain = 0, GENESIS_CHAIN
    for count in counts:
        last = first + count - 1
        encoded = [encoded_record(each) for each in records[first : last + 1]]
        before = chain
        chain = next_chain(chain, first, last, session, b"".join(one[-4:] for one in encoded))
        lengths = raw_records.np.array([len(one) for one in encoded], dtype="int64")
        yield first, lengths, b"".join(encoded), before, (LineageEntry(first, last, 2, 9, chain),)
        first = last + 1


def test_no_record_goes_while_others_batches_take_the_place_of_an_originals():
    step, interrupted = 0, True
    while interrupted:
        step += 1
        world = World(Random(step))
        world.begin(1)
        world.set_mark(-1)
        world.append(30)
        world.set_mark(29)
        world.append(5)
        made = list(world.records)
        # The last batch is one that this replica had only a part of.
        extra = Record(35, ReqId(1, 1, 0, 35), 7, b"new")
        appends = list(other_batches([*made, extra], (7, 9, 12, 8), 2))
        interrupted = True
        with power(world, step):
            log = world.log
            prepared = log.prepare(5, bytes(15) + b"x")
            assert (prepared.synced_max, prepared.mark_confirmed) == (34, False)
            assert log.truncate(5, BEFORE_FIRST, BEFORE_FIRST, GENESIS_CHAIN)[0] == BEFORE_FIRST
            for fields in appends:
                log.append(5, *fields)
                log.sync()
            log.set_low_water_mark(5, 35, log.chain)
            log.engage(5, 35)
            interrupted = False
        log = world.log
        assert log.max_id in (34, 35)
        assert not log.suspect
        whole = b"".join(map(encoded_record, [*made, extra]))
        read = log.read_range(0, log.max_id, 1 << 20, whole_batches=False)
        assert read.records == whole[: len(read.records)]
        if interrupted:
            assert log.prepare(6, bytes(15) + b"y").synced_max == log.max_id
            log.close()
        else:
            entries = tuple(fields[-1][0] for fields in appends)
            assert log.lineage(0, 35)[1] == entries
            log.close()
            world.control.close()
            world.open()
            assert world.log.lineage(0, 35)[1] == entries
            assert not world.log.suspect
    assert step > 30, step
