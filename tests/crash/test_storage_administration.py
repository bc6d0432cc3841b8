"""Crashes at every step while administration changes a storage directory.

After every crash the directory opens, and the command has taken effect completely or not at all. No
log is partly removed, and a discarded log is suspect. An acknowledged command remains in effect.
"""

from itertools import cycle
from pathlib import Path
from random import Random

import numpy as np
import pytest

from tests.storage_model import make_batches
from waltz_core.errors import DiskFailed, NoSpace, UnknownPartition
from waltz_core.records.record import BEFORE_FIRST, GENESIS_CHAIN, NO_SESSION
from waltz_core.storage.files.format import ProvisionalMark
from waltz_core.storage.log.log_files import LogSettings
from waltz_core.storage.service.storage_engine import StorageEngine
from waltz_sim.world.simulated_disk import DiskFault, PowerLoss, SimDisk, Survival

ROOT = Path("/storage")
SETTINGS = LogSettings(bytes(range(16)), 900, lambda: 7)
UNCHANGED, CHANGED = 0, 1
SESSION, NONCE = 5, b"a nonce of owner"
LAST = 15  # the last ID of the initial log, which has several segments


def open_engine(disk):
    return StorageEngine.open(disk, ROOT, SETTINGS, partition_count=3, new_storage_id=bytes(16))


def fill(log, rng):
    log.prepare(SESSION, NONCE)
    log.set_low_water_mark(SESSION, BEFORE_FIRST, GENESIS_CHAIN)
    log.engage(SESSION, BEFORE_FIRST)
    append(log, [8, 8], rng)
    # The state after an owner has died between its second compare-and-set and ENGAGE.
    log.prepare(SESSION + 1, NONCE)
    log.set_low_water_mark(SESSION + 1, log.max_id, log.chain)


def append(log, counts, rng):
    for count in counts:
        records, entries = make_batches(log.max_id + 1, [count], log.promised, log.chain, rng)
        lengths = np.array([len(record) for record in records], dtype=np.int64)
        log.append(log.promised, log.max_id + 1, lengths, b"".join(records), log.chain, entries)
        log.sync()


def filled():
    """Return a disk's state with two partitions of equal records, and the chain of each."""
    disk = SimDisk(is_traced=False)
    engine = open_engine(disk)
    for partition in (UNCHANGED, CHANGED):
        fill(engine.assign(partition), Random(3))
    chain = engine.log(CHANGED).chain
    engine.close()
    return disk.durable_contents(), chain


CONTENTS, CHAIN = filled()


class Directory:
    """A storage directory with two partitions, open."""

    def __init__(self):
        self.disk = SimDisk(is_traced=False)
        self.disk.replace_contents(CONTENTS)
        self.engine = open_engine(self.disk)

    def reopen(self, survival, rng):
        self.disk.lose_power(survival, rng)
        self.engine = open_engine(self.disk)
        assert not self.engine.open_errors
        self.check_whole(UNCHANGED)

    def is_held(self):
        return CHANGED in self.engine.assigned_partitions()

    def log(self):
        return self.engine.assign(CHANGED)

    def check_whole(self, partition, *, suspect=False):
        """Check that the log is complete, with its promise and its provisional mark."""
        log = self.engine.log(partition)
        assert (log.max_id, log.chain, log.damaged) == (LAST, CHAIN, ())
        assert (log.promised, log.slot.nonce) == (SESSION + 1, NONCE)
        assert log.slot.provisional == ProvisionalMark(SESSION + 1, LAST)
        assert (log.last_session, log.confirmed_low_water_mark) == (SESSION + 1, BEFORE_FIRST)
        assert log.suspect == suspect
        assert log.read_range(0, LAST, 1 << 20, whole_batches=False).lengths.size == LAST + 1

    def check_reopened(self):
        """Check that the log is empty and suspect, and keeps its promise."""
        log = self.log()
        assert (log.max_id, log.chain, log.suspect) == (BEFORE_FIRST, GENESIS_CHAIN, True)
        assert (log.promised, log.slot.nonce) == (SESSION + 1, NONCE)
        assert (log.last_session, log.low_water_mark) == (NO_SESSION, BEFORE_FIRST)

    def files(self):
        return [path.name for path in self.disk.files() if path.parent == ROOT / str(CHANGED)]


# Each command, with the checks for two states: after the command's execution, and without it.


def check_removed(directory):
    assert not directory.is_held()
    assert directory.files() == []


def check_unassigned(directory):
    assert not directory.is_held()
    directory.log()  # if the partition is assigned again, its log is unchanged
    directory.check_whole(CHANGED)


def check_emptied(directory):
    assert directory.is_held()
    directory.check_reopened()


def check_marked_suspect(directory):
    assert directory.is_held()
    directory.log()
    directory.check_whole(CHANGED, suspect=True)


def check_offline(directory):
    assert directory.is_held()
    assert not directory.engine.is_available(CHANGED)
    directory.log()
    directory.check_whole(CHANGED)


def check_unchanged(directory):
    assert directory.is_held()
    assert directory.engine.is_available(CHANGED)
    directory.log()
    directory.check_whole(CHANGED)


COMMANDS = {
    "remove": (lambda engine: engine.unassign(CHANGED, deletes_files=True), check_removed),
    "unassign": (lambda engine: engine.unassign(CHANGED, deletes_files=False), check_unassigned),
    "re-seed": (lambda engine: engine.re_seed(CHANGED), check_emptied),
    "mark suspect": (lambda engine: engine.mark_suspect(CHANGED), check_marked_suspect),
    "offline": (lambda engine: engine.set_available(CHANGED, is_available=False), check_offline),
}


def is_done(directory, name):
    """Return whether the command took effect, by state that only this command changes."""
    match name:
        case "remove" | "unassign":
            return not directory.is_held()
        case "offline":
            return not directory.engine.is_available(CHANGED)
        case _:
            return directory.log().suspect


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("survival", Survival)
def test_an_interrupted_command_takes_effect_completely_or_not_at_all(name, survival):
    command, check_done = COMMANDS[name]
    outcomes = set()
    step = 0
    while True:
        step += 1
        directory = Directory()
        directory.disk.plan_fault(directory.disk.step_count + step, DiskFault.POWER_LOSS)
        try:
            command(directory.engine)
        except PowerLoss:
            directory.reopen(survival, Random(step))
        else:
            break
        is_carried_out = is_done(directory, name)
        outcomes.add(is_carried_out)
        (check_done if is_carried_out else check_unchanged)(directory)
        assert directory.log().prepare(SESSION + 2, bytes(16)).synced_max in {LAST, BEFORE_FIRST}
    directory.reopen(Survival.NOTHING, Random(step))
    check_done(directory)
    is_long = name in {"remove", "re-seed"}
    assert step > (20 if is_long else 4), "the command ends before the first step of the disk"
    assert outcomes == {False, True} or not is_long


@pytest.mark.parametrize("name", ["remove", "re-seed"])
def test_power_loss_during_the_start_after_an_interrupted_command_is_harmless(name):
    command, check_done = COMMANDS[name]
    for step, survival in zip(range(1, 60, 4), cycle(Survival), strict=False):
        for again in range(1, 60, 2):
            directory = Directory()
            directory.disk.plan_fault(directory.disk.step_count + step, DiskFault.POWER_LOSS)
            try:
                command(directory.engine)
            except PowerLoss:
                directory.disk.lose_power(survival, Random(step))
            else:
                assert step > 20
                return
            directory.disk.plan_fault(directory.disk.step_count + again, DiskFault.POWER_LOSS)
            try:
                directory.engine = open_engine(directory.disk)
            except PowerLoss:
                directory.reopen(survival, Random(again))
            else:
                directory.disk.cancel_plans()
                break
            (check_done if is_done(directory, name) else check_unchanged)(directory)
    pytest.fail("the command was never executed completely")


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("fault", [DiskFault.IO_ERROR, DiskFault.DISK_FULL])
def test_a_command_that_fails_at_any_disk_step_can_be_repeated(name, fault):
    command, check_done = COMMANDS[name]
    step = 0
    while True:
        step += 1
        directory = Directory()
        directory.disk.plan_fault(directory.disk.step_count + step, fault)
        try:
            command(directory.engine)
        except (DiskFailed, NoSpace):
            pass  # the planned fault, as reported by the command; its effect is checked below
        else:
            break
        directory.disk.cancel_plans()
        directory.engine.abandon()
        directory.engine = open_engine(directory.disk)
        assert not directory.engine.open_errors
        if not is_done(directory, name):
            check_unchanged(directory)
            command(directory.engine)
        check_done(directory)
    assert step > 2


def test_a_removed_partition_can_be_assigned_again_and_begins_empty():
    directory = Directory()
    directory.engine.unassign(CHANGED, deletes_files=True)
    with pytest.raises(UnknownPartition):
        directory.engine.log(CHANGED)
    with pytest.raises(UnknownPartition, match="not assigned"):
        directory.engine.unassign(CHANGED, deletes_files=True)
    log = directory.engine.assign(CHANGED)
    assert (log.max_id, log.promised, log.suspect) == (BEFORE_FIRST, NO_SESSION, False)
    append_after_session(log)
    directory.reopen(Survival.NOTHING, Random(1))
    assert directory.engine.log(CHANGED).max_id == 2


def test_a_re_seeded_replica_is_suspect_until_its_mark_is_set_at_the_end_of_its_log():
    directory = Directory()
    directory.engine.re_seed(CHANGED)
    log = directory.engine.assign(CHANGED)
    log.prepare(SESSION + 2, NONCE)
    append(log, [3], Random(1))
    assert log.suspect
    directory.reopen(Survival.NOTHING, Random(1))
    log = directory.engine.log(CHANGED)
    assert log.suspect
    log.set_low_water_mark(SESSION + 2, log.max_id, log.chain)
    assert not log.suspect


def append_after_session(log):
    log.prepare(SESSION + 2, NONCE)
    log.set_low_water_mark(SESSION + 2, log.max_id, log.chain)
    log.engage(SESSION + 2, log.max_id)
    append(log, [3], Random(1))


def test_an_offline_log_is_unchanged_and_accepts_appends_when_it_is_online_again():
    directory = Directory()
    for is_available in (False, True, True):
        directory.engine.set_available(CHANGED, is_available=is_available)
        assert directory.engine.is_available(CHANGED) == is_available
        directory.reopen(Survival.NOTHING, Random(1))
        assert directory.engine.is_available(CHANGED) == is_available
    check_unchanged(directory)
    append_after_session(directory.log())
