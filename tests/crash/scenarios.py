"""Recorded runs of a storage directory: each change, and the records acknowledged before it.

`Acknowledged` is the expected result of a crash at one point of the run: the states that the crash
may leave. The expected records and batches come from a model. The expected slots come from the log,
before and after each call. A crash during a call may leave either of the two states.
"""

import re
import sys
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from linecache import getline
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np

import waltz_core.storage
from tests.storage_model import make_batches
from waltz_core.errors import ChecksumMismatch, DiskFailed, NoSpace
from waltz_core.records.record import BEFORE_FIRST, GENESIS_CHAIN, next_chain
from waltz_core.storage.files.format import GENESIS_MARKER, AckedMarker
from waltz_core.storage.log.log_files import LogSettings
from waltz_core.storage.service.storage_engine import StorageEngine
from waltz_sim.world.crash import PositionMarker, RecordingDisk, Sync, Write
from waltz_sim.world.simulated_disk import DiskFault

KEY = bytes(range(16))
ROOT = Path("/disk/storage")
PARTITIONS = 3
RESERVE_BYTES = 3000
STARTED_MS = 1_700_000_000_000


STORAGE_FOLDER = Path(waltz_core.storage.__path__[0])
# Frames without information about the reason of a sync.
TRANSPARENT = {
    "index.sync",
    "segments.<genexpr>",
    "segments.sync",
    "segments.sync_index",
    "control_file.write",
    "control_file._write",
    "control_file._write_all",
    "control_file._sync",
    "log_files.write_slot",
}


class History(NamedTuple):
    """One possible log: its records, its batches, and the number of records that must survive."""

    records: tuple[bytes, ...] = ()
    entries: tuple = ()
    acked: int = BEFORE_FIRST


class Promise(NamedTuple):
    session: int
    nonce: bytes


class Marks(NamedTuple):
    last_session: int
    low_water_mark: int
    confirmed: int


class AcknowledgedLog(NamedTuple):
    """The possible states of one partition; each field lists the possible values."""

    histories: tuple[History, ...]
    promises: tuple[Promise, ...]
    marks: tuple[Marks, ...]
    infos: tuple[Marks, ...]  # session and marks in the control file of 0.13
    markers: tuple[int, ...]  # the marker on the disk is one of these, or later
    is_dirty: tuple[bool, ...]
    suspects: tuple[bool, ...] = (False,)  # True: an empty log is suspect
    starts: tuple[AckedMarker, ...] = (GENESIS_MARKER,)


@dataclass(frozen=True)
class Acknowledged:
    """The states that a crash may leave. None permits any value."""

    storage_id: bytes | None = None
    assigned: tuple[int, ...] = ()
    sure: tuple[int, ...] = ()  # partitions that must be assigned; the others in `assigned` may be
    logs: dict[int, AcknowledgedLog] = field(default_factory=dict)
    damaged: tuple[tuple[int, int], ...] = ()  # of partition 0


def with_either_dirty_flag(acknowledged):
    """Return the states that a crash may leave during an opening or a close: dirty or not."""
    logs = {
        number: log._replace(is_dirty=(False, True)) for number, log in acknowledged.logs.items()
    }
    return replace(acknowledged, logs=logs)


def settings(now_ms=lambda: STARTED_MS, segment_bytes_max=700):
    return LogSettings(KEY, segment_bytes_max, now_ms)


def open_engine(disk, *, new_storage_id=b"S" * 16, reserve_bytes=RESERVE_BYTES, with_settings=None):
    return StorageEngine.open(
        disk,
        ROOT,
        with_settings or settings(),
        partition_count=PARTITIONS,
        new_storage_id=new_storage_id,
        reserve_bytes=reserve_bytes,
    )


def marks_of(log):
    return Marks(log.last_session, log.low_water_mark, log.confirmed_low_water_mark)


def info_of(log):
    return Marks(*log._control.info(log.partition_id)[:3])


def promise_of(log):
    return Promise(log.slot.promised, log.slot.nonce)


def site():
    """Return the calls within the storage that lead to a sync, innermost last.

    The number at the end is that of the sync or write within its function.
    """
    frames, frame = [], sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.parent.parent == STORAGE_FOLDER:
            frames.append((f"{path.stem}.{frame.f_code.co_name}", frame.f_code, frame.f_lineno))
        frame = frame.f_back
    # A site does not contain the call that opens a partition, or the depth of its directory.
    names = [name for name, _, _ in reversed(frames) if name not in TRANSPARENT]
    if "partition_log.open" in names:
        names = names[names.index("partition_log.open") + 1 :]
    names = [name for name, before in zip(names, ["", *names], strict=False) if name != before]
    # A function that only passes calls on is not counted.
    caller = next((one for one in frames if one[0] not in TRANSPARENT), None)
    return f"{' > '.join(names)}#{_call_number(*caller[1:])}" if caller else ""


@cache
def _call_number(code, line):
    lines = (getline(code.co_filename, one) for one in range(code.co_firstlineno + 1, line + 1))
    return sum(1 for one in lines if re.search(r"(sync|write)\w*\(", one))


class Scenario:
    """A storage directory on a disk that records every change."""

    def __init__(self, seed=1, disk=None, acknowledged=None, *, segment_bytes_max=700):
        self.rng = Random(seed)
        self.disk = disk or RecordingDisk(site=site)
        self.segment_bytes_max = segment_bytes_max
        self.now_ms = STARTED_MS
        self.engine = None
        self.histories = {}  # partition -> History, with all records written so far
        self.acknowledged = acknowledged or Acknowledged()
        self.begin = 0  # the index of the first change at which a crash occurs
        self.disk.mark_position(self.acknowledged)

    def log(self, partition=0):
        return self.engine.logs[partition]

    # ---- acknowledged state

    def _found(self):
        """Return the acknowledged state: slots from the engine, histories from the model."""
        logs = {
            partition: AcknowledgedLog(
                (self.histories[partition],),
                (promise_of(log),),
                (marks_of(log),),
                (info_of(log),),
                (log.slot.acked.transaction_id,),
                (log.slot.dirty,),
                (log.suspect,),
                (log.start,),
            )
            for partition, log in self.engine.logs.items()
        }
        assigned = tuple(self.engine.assigned_partitions())
        return Acknowledged(
            self.engine.storage_id, assigned, assigned, logs, self.acknowledged.damaged
        )

    def acknowledge(self):
        self.acknowledged = self._found()
        self.disk.mark_position(self.acknowledged)

    def call(self, call, *, history=None, partition=0, final=True, marker=None):
        """Make a call; a crash before its outcome may leave the state from before the call.

        Without `final`, the call makes nothing durable, so a later crash may also leave this state.
        """
        before = self.acknowledged
        position = len(self.disk.changes)
        self.disk.mark_position(before)
        error = None
        try:
            call()
        except (DiskFailed, NoSpace) as caught:
            error = caught
        if history is not None and error is None:
            self.histories[partition] = history
        tried = {} if history is None else {partition: history}
        between = self._between(before, self._found(), tried)
        if marker is not None:
            log = between.logs[partition]
            between.logs[partition] = log._replace(markers=(*log.markers, marker))
        self.disk.changes[position] = PositionMarker(between)
        if error is not None or not final:
            self.acknowledged = between
            self.disk.mark_position(between)
        else:
            self.acknowledge()
        if error is not None:
            raise error

    def _between(self, before, after, tried):
        logs = dict(before.logs)
        for partition, log in after.logs.items():
            old = before.logs.get(partition)
            if old is None:
                # After a crash the log may not exist at all, so no slot is checked.
                logs[partition] = log._replace(markers=(), is_dirty=())
                continue
            both = [(*one, *other) for one, other in zip(old, log, strict=True)]
            if partition in tried:
                both[0] += (tried[partition],)
            logs[partition] = AcknowledgedLog(*(tuple(dict.fromkeys(one)) for one in both))
        for partition in before.logs.keys() - after.logs.keys():
            # The crash may lose the slots, so their content is not checked.
            logs[partition] = logs[partition]._replace(markers=(), is_dirty=())
        assigned = tuple(sorted({*before.assigned, *after.assigned}))
        sure = tuple(one for one in before.sure if one in after.assigned)
        return Acknowledged(before.storage_id, assigned, sure, logs, before.damaged)

    # ---- actions

    def start(self, *, histories=None):
        """Open the directory; `histories` are the logs that it has."""
        self.histories = {} if histories is None else histories
        self.expect_either_dirty_flag()
        with_settings = settings(lambda: self.now_ms, self.segment_bytes_max)
        self.engine = open_engine(self.disk, with_settings=with_settings)
        self.acknowledge()

    def expect_either_dirty_flag(self):
        """Expect the states of an opening or a close from here on."""
        self.acknowledged = with_either_dirty_flag(self.acknowledged)
        self.disk.mark_position(self.acknowledged)

    def assign(self, partition, history=None):
        self.histories[partition] = history or History()
        self.call(lambda: self.engine.assign(partition))

    def assign_all(self, partitions):
        """Assign several new partitions in one call, as a daemon does."""

        def assign_new():
            self.engine.assign_new(partitions)
            for partition in partitions:
                self.engine.assign(partition)

        self.histories |= dict.fromkeys(partitions, History())
        self.call(assign_new)

    def remove(self, partition):
        """Unassign a partition and delete its files."""
        self.call(lambda: self.engine.unassign(partition, deletes_files=True))
        del self.histories[partition]

    def stop_serving(self, partition):
        """Unassign a partition; return the history of its files."""
        self.expect_either_dirty_flag()
        self.call(lambda: self.engine.unassign(partition, deletes_files=False))
        history = self.histories.pop(partition)
        return history._replace(acked=len(history.records) - 1)

    def re_seed(self, partition):
        """Discard a log; an empty, suspect one replaces it at once."""

        def re_seed_and_assign():
            self.engine.re_seed(partition)
            self.engine.assign(partition)

        self.expect_either_dirty_flag()
        self.call(re_seed_and_assign, history=History(), partition=partition)
        assert self.log(partition).suspect

    def prepare(self, partition=0):
        """Begin a session, which acknowledges the end of the log."""
        log = self.log(partition)
        session = max(log.promised, 0) + 1
        self.call(lambda: log.prepare(session, self.rng.randbytes(16)))
        self._synced(partition)

    def _synced(self, partition):
        last, history = self.log(partition).synced_max, self.histories[partition]
        assert history.acked <= last < len(history.records)
        entries = tuple(entry for entry in history.entries if entry.last <= last)
        self.histories[partition] = History(history.records[: last + 1], entries, last)
        self.acknowledge()

    def append(self, counts, *, partition=0, bytes_max=150):
        """Write batches without a sync."""
        history, log = self.histories[partition], self.log(partition)
        records, entries = make_batches(
            len(history.records), counts, log.promised, log.chain, self.rng, bytes_max=bytes_max
        )
        lengths = np.array([len(record) for record in records], dtype=np.int64)
        after = History((*history.records, *records), (*history.entries, *entries), history.acked)
        run, first = b"".join(records), len(history.records)
        self.call(
            lambda: log.append(log.promised, first, lengths, run, log.chain, entries),
            history=after,
            partition=partition,
            final=False,
        )

    def sync(self, partition=0):
        self.call(self.log(partition).sync, partition=partition, final=False)
        self._synced(partition)

    def set_mark(self, partition=0, *, engages=True):
        log = self.log(partition)
        self.call(lambda: log.set_low_water_mark(log.promised, log.max_id, log.chain))
        if engages:
            self.call(lambda: log.engage(log.promised, log.max_id))

    def truncate(self, last, partition=0):
        history, log = self.histories[partition], self.log(partition)
        entries = [one for one in history.entries if one.last <= last]
        base = entries[-1] if entries else None
        cut = next((one for one in history.entries if one.first <= last < one.last), None)
        if cut is not None:
            crcs = b"".join(one[-4:] for one in history.records[cut.first : last + 1])
            before = base.chain if base else GENESIS_CHAIN
            chain = next_chain(before, cut.first, last, cut.session_id, crcs)
            entries.append(cut._replace(last=last, chain=chain))
        after = History(history.records[: last + 1], tuple(entries), last)
        base_id, base_chain = (base.last, base.chain) if base else (BEFORE_FIRST, GENESIS_CHAIN)
        self.call(
            lambda: log.truncate(log.promised, last, base_id, base_chain),
            history=after,
            partition=partition,
            marker=base_id,
        )

    def remove_oldest(self, partition=0):
        log = self.log(partition)
        archived = AckedMarker(
            log.confirmed_low_water_mark, log.chain_at(log.confirmed_low_water_mark)
        )
        self.call(lambda: log.remove_oldest(archived), partition=partition)
        assert log.start > GENESIS_MARKER

    def reset(self, last, partition=0):
        """Reset a log to an ID; its records up to there are archived."""
        log, start = self.log(partition), AckedMarker(last, self.rng.randbytes(16))
        after = History((b"",) * (last + 1), (), last)
        self.call(lambda: log.reset(log.promised, start), history=after, partition=partition)

    def close(self):
        histories = self.histories
        self.expect_either_dirty_flag()
        self.engine.close()
        logs = {}
        for partition, history in histories.items():
            last = len(history.records) - 1
            histories[partition] = history._replace(acked=last)
            logs[partition] = self.acknowledged.logs[partition]._replace(
                histories=(histories[partition],), markers=(last,), is_dirty=(False,)
            )
        self.acknowledged = replace(self.acknowledged, logs=logs)
        self.disk.mark_position(self.acknowledged)

    def restart(self):
        self.close()
        self.start(histories=self.histories)

    def failing(self, kind, call, *, fault=DiskFault.IO_ERROR):
        """Make a call in which a change fails: the next of this kind, or the one of this number."""
        inner = self.disk.inner
        if isinstance(kind, int):
            inner.plan_fault(inner.step_count + kind, fault)
        else:
            inner.plan_fault_at_call((kind,), fault)
        try:
            call()
        except (DiskFailed, NoSpace):
            self.disk.inner.cancel_plans()
            return
        raise AssertionError("nothing has failed")

    def append_and_sync(self):
        self.append([2])
        self.sync()

    def report_damage(self, damaged):
        """Expect that exactly these IDs cannot be read from now on."""
        self.acknowledged = replace(self.acknowledged, damaged=tuple(damaged))
        self.disk.mark_position(self.acknowledged)

    def rot(self, partition, transaction_id):
        """Change a byte of a record durably, without an error."""
        log = self.log(partition)
        segment = log._files.segments.all[log._files.segments._index_of(transaction_id)]
        offset = int(segment.bounds(transaction_id, transaction_id)[0]) + 37
        path = ROOT / str(partition) / f"{segment.first:019d}.seg"
        self.disk.inner.flip_bits(path, offset)
        number = self.disk.file_id_of(path)
        changed = self.disk.inner.visible_content(path)[offset : offset + 1]
        self.disk.changes += [Write(number, offset, changed), Sync(number, path)]


# ---------------------------------------------------------------------------------------------
# the scenarios


def first_start():
    """A directory is created, and is assigned two partitions, which are used."""
    scenario = Scenario()
    scenario.start()
    for partition in (1, 0):
        scenario.assign(partition)
        scenario.prepare(partition)
    scenario.append([2, 1])
    scenario.sync()
    scenario.append([1], partition=1)
    scenario.sync(1)
    return scenario


def first_start_of_several():
    """A directory is assigned several partitions at once."""
    scenario = Scenario()
    scenario.start()
    scenario.assign_all((2, 0, 1))
    for partition in (0, 2):
        scenario.prepare(partition)
        scenario.append([2, 1], partition=partition)
        scenario.sync(partition)
    return scenario


def _start_scenario(counts=(2, 1), *, segment_bytes_max=700, seed=1, marks=True):
    """Return a scenario of one partition with a session and acknowledged records."""
    scenario = Scenario(seed, segment_bytes_max=segment_bytes_max)
    scenario.start()
    scenario.assign(0)
    scenario.prepare()
    if marks:
        scenario.set_mark()
    scenario.append(counts)
    scenario.sync()
    scenario.begin = len(scenario.disk.changes)
    return scenario


def appends():
    """Small and large groups, synced together and one by one."""
    scenario = _start_scenario(segment_bytes_max=1_000_000)
    scenario.append([1])
    scenario.sync()
    scenario.append([3, 2])
    scenario.append([1], bytes_max=1500)
    scenario.append([4])
    scenario.sync()
    scenario.append([2], bytes_max=3000)
    scenario.sync()
    return scenario


def checkpoints():
    """The marker advances each second, and the index becomes durable with it."""
    scenario = _start_scenario(segment_bytes_max=1_000_000)
    for counts in ([2], [1, 1], [3]):
        scenario.now_ms += 1500
        scenario.append(counts)
        scenario.sync()
        scenario.append([1])
    scenario.sync()
    return scenario


def roll_over():
    """Batches that fill segments, span two of them, or end with one."""
    scenario = _start_scenario(segment_bytes_max=500)
    scenario.append([4, 5], bytes_max=200)
    scenario.sync()
    scenario.append([9], bytes_max=300)
    scenario.append([1])
    scenario.sync()
    return scenario


def sessions_and_marks():
    """Promises, confirmed and provisional marks, and appends that confirm a mark."""
    scenario = _start_scenario()
    scenario.prepare()
    scenario.set_mark()
    scenario.append([1])
    scenario.sync()
    scenario.prepare()
    scenario.set_mark(engages=False)
    scenario.append([1])
    scenario.sync()
    scenario.prepare()
    scenario.append([2])
    scenario.sync()
    scenario.set_mark(engages=False)
    return scenario


def truncate():
    """Truncations within a batch, at its end and over segments; and appends after a truncation."""
    scenario = _start_scenario([3], segment_bytes_max=500)
    scenario.append([4, 6, 5], bytes_max=120)
    scenario.sync()
    scenario.now_ms += 1500
    scenario.append([3, 4], bytes_max=200)
    scenario.sync()
    scenario.prepare()
    scenario.truncate(21)
    scenario.truncate(scenario.histories[0].entries[-2].last)
    scenario.append([3], bytes_max=200)
    scenario.sync()
    scenario.prepare()
    scenario.truncate(4)
    scenario.append([2])
    scenario.sync()
    return scenario


def truncate_a_mark():
    """The log is truncated below a provisional mark."""
    scenario = _start_scenario([3])
    scenario.append([2])
    scenario.sync()
    scenario.prepare()
    scenario.set_mark(engages=False)
    scenario.prepare()
    scenario.truncate(3)
    scenario.append([2])
    scenario.sync()
    return scenario


def restart():
    """Two clean stops and starts."""
    scenario = _start_scenario(segment_bytes_max=500)
    scenario.restart()
    scenario.prepare()
    scenario.append([3, 2], bytes_max=250)
    scenario.sync()
    scenario.append([1])
    scenario.restart()
    return scenario


def _failed_append(step):
    scenario = _start_scenario(segment_bytes_max=900)
    scenario.append([2])
    scenario.failing(step, scenario.append_and_sync)
    scenario.prepare()
    scenario.append([1, 2])
    scenario.sync()
    scenario.restart()
    return scenario


def failed_write():
    """A write fails; the log continues in a new segment."""
    return _failed_append("write")


def failed_sync():
    """A sync fails; the log continues in a new segment."""
    return _failed_append("sync")


def failed_sync_of_batches():
    """The records are synced, and the sync of the batches fails."""
    return _failed_append(5)


def failed_sync_of_an_index():
    """The marker would advance over more than a sector of the index, whose sync fails."""
    scenario = _start_scenario(segment_bytes_max=1_000_000)
    scenario.append([100])
    scenario.sync()
    scenario.append([1])
    scenario.sync()
    scenario.now_ms += 1500
    scenario.failing(6, scenario.append_and_sync)
    return scenario


def failed_write_of_batches():
    """The records are written, and the write of the batches fails."""
    return _failed_append(3)


def failed_write_of_an_empty_log():
    """The first write of a log fails; the new segment gets the name of the old one."""
    scenario = Scenario()
    scenario.start()
    scenario.assign(0)
    scenario.prepare()
    scenario.begin = len(scenario.disk.changes)
    scenario.failing("write", lambda: scenario.append([2]))
    scenario.prepare()
    scenario.append([1])
    scenario.sync()
    return scenario


def failed_roll_over():
    """The creation of a new segment fails."""
    scenario = _start_scenario(segment_bytes_max=300)
    scenario.failing("create", lambda: scenario.append([3, 3], bytes_max=300))
    scenario.prepare()
    scenario.append([1, 2])
    scenario.sync()
    return scenario


def full_disk():
    """The disk is full at an append; the reserve is released, and the log continues at its end."""
    scenario = _start_scenario(segment_bytes_max=1000)
    scenario.append([1])
    scenario.failing(
        "write", lambda: scenario.append([2, 2], bytes_max=300), fault=DiskFault.DISK_FULL
    )
    scenario.call(scenario.engine.space.release_reserve)
    scenario.append([2])
    scenario.sync()
    scenario.call(scenario.engine.space.fill_reserve)
    scenario.append([1])
    scenario.sync()
    return scenario


def repair():
    """Damage is detected, and repaired with records of another replica."""
    scenario = _start_scenario([4, 4], segment_bytes_max=450)
    scenario.append([3])
    scenario.sync()
    scenario.now_ms += 1500
    scenario.append([1])
    scenario.sync()
    log, records = scenario.log(), scenario.histories[0].records
    scenario.report_damage([(2, 2)])
    scenario.rot(0, 2)
    with suppress(ChecksumMismatch):
        log.read_range(2, 2, 10_000, whole_batches=False)
    lengths = np.array([len(records[2])], dtype=np.int64)
    log.repair(2, lengths, records[2])
    scenario.report_damage([])
    scenario.append([2])
    scenario.sync()
    return scenario


def removed_segments():
    """The oldest segments are archived and removed, while the log continues."""
    scenario = _start_scenario([4, 4], segment_bytes_max=450)
    scenario.append([3, 5])
    scenario.sync()
    scenario.prepare()
    scenario.set_mark()
    for _ in range(3):
        scenario.remove_oldest()
        scenario.append([3])
        scenario.sync()
    scenario.restart()
    scenario.remove_oldest()
    return scenario


def reset():
    """A log that has no batch in common with other logs is reset to the end of the archive."""
    scenario = _start_scenario([4, 4], segment_bytes_max=450)
    scenario.prepare()
    scenario.reset(60)
    scenario.append([2, 3])
    scenario.sync()
    scenario.set_mark()
    scenario.append([1])
    scenario.sync()
    return scenario


def _two_partitions():
    """Return a scenario of two partitions with sessions and records in several segments."""
    scenario = Scenario(segment_bytes_max=300)
    scenario.start()
    for partition in (0, 1):
        scenario.assign(partition)
        scenario.prepare(partition)
        scenario.set_mark(partition)
        scenario.append([3, 2], partition=partition)
        scenario.sync(partition)
    scenario.begin = len(scenario.disk.changes)
    return scenario


def removal():
    """A partition is removed with its files, and assigned again later; the other one continues."""
    scenario = _two_partitions()
    scenario.remove(1)
    scenario.append([1])
    scenario.sync()
    scenario.assign(1)
    scenario.prepare(1)
    scenario.append([2], partition=1)
    scenario.sync(1)
    return scenario


def unassigned():
    """A partition is unassigned but keeps its files; then it is assigned again with them."""
    scenario = _two_partitions()
    history = scenario.stop_serving(1)
    scenario.append([1])
    scenario.sync()
    scenario.assign(1, history)
    scenario.prepare(1)
    scenario.append([2], partition=1)
    scenario.sync(1)
    return scenario


def re_seed():
    """The log of an assigned partition is discarded; its promise remains."""
    scenario = _two_partitions()
    scenario.re_seed(1)
    scenario.append([1])
    scenario.sync()
    scenario.prepare(1)
    scenario.append([2], partition=1)
    scenario.sync(1)
    return scenario


SCENARIOS = (
    first_start,
    first_start_of_several,
    appends,
    checkpoints,
    roll_over,
    sessions_and_marks,
    truncate,
    truncate_a_mark,
    restart,
    failed_write,
    failed_sync,
    failed_sync_of_batches,
    failed_write_of_batches,
    failed_write_of_an_empty_log,
    failed_roll_over,
    full_disk,
    repair,
    removed_segments,
    reset,
)
# Scenarios whose logs begin above 0, which Waltz 0.13 cannot read.
STARTS = (removed_segments, reset)
# Administrative changes of a partition. They have no mutants: an omitted sync has an effect only
# when a removed partition is assigned again (tests/crash/test_storage_administration).
ADMIN_CONNECTION = (removal, unassigned, re_seed)
