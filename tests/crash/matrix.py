"""Opens the files that a crash leaves, and compares them with the acknowledged records."""

import hashlib
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from random import Random

from tests.crash.scenarios import (
    ROOT,
    Acknowledged,
    History,
    Marks,
    Promise,
    Scenario,
    info_of,
    marks_of,
    open_engine,
    promise_of,
    site,
    with_either_dirty_flag,
)
from waltz_core.errors import ChecksumMismatch, WaltzError
from waltz_core.storage.files.control_file import SLOTS_FILE_NAME
from waltz_core.storage.files.format import SLOT_BLOCK_BYTES, SLOT_BYTES, AckedMarker, Slot
from waltz_core.storage.log.removal import WIPE_FILE_NAME
from waltz_sim.world.crash import (
    DiskState,
    KeepNone,
    KeepRandom,
    PositionMarker,
    RecordingDisk,
    keep_choices,
)
from waltz_sim.world.simulated_disk import Contents

RANDOM_SURVIVALS = 8
RANDOM_SECOND = 1
KILLS_OF_A_SCENARIO = 30
EVERY_KILL = 10  # after every tenth kill, power is lost at every change
SHARE_AFTER_A_KILL = 0.25
EVERY_SECOND = 80  # in every 80th opening, power is lost at every change


class Violation(AssertionError):
    """A crash has led to a state that is not permitted."""


@dataclass(frozen=True)
class OpenedLog:
    """One partition after an opening."""

    records: tuple[bytes, ...]
    unreadable: tuple[tuple[int, int], ...]
    entries: tuple
    promise: Promise
    marks: Marks
    info: Marks
    suspect: bool
    damaged: tuple
    start: AckedMarker

    @property
    def last(self):
        return len(self.records) - 1


@dataclass(frozen=True)
class OpenedDirectory:
    """A directory after an opening."""

    storage_id: bytes
    assigned: tuple[int, ...]
    logs: tuple[tuple[int, OpenedLog], ...]
    failed: tuple[tuple[int, str], ...]


def found_log(log):
    """Read all of a log; records at or below its start are empty."""
    at = log.start.transaction_id + 1
    records, unreadable = [b""] * at, []
    while at <= log.max_id:
        try:
            read = log.read_range(at, log.max_id, 1 << 20, whole_batches=False)
        except ChecksumMismatch:
            hole = next(one for one in log.damaged if one.first <= at <= one.last)
            unreadable.append((at, hole.last))
            records += [b""] * (hole.last + 1 - at)
            at = hole.last + 1
            continue
        offset = 0
        for length in read.lengths.tolist():
            records.append(read.records[offset : offset + length])
            offset += length
        at += read.lengths.size
    entries = log.lineage(0, log.max_id)[1] if log.max_id > log.start.transaction_id else ()
    return OpenedLog(
        tuple(records),
        tuple(unreadable),
        tuple(entries),
        promise_of(log),
        marks_of(log),
        info_of(log),
        log.suspect,
        log.damaged,
        log.start,
    )


def open_directory(disk, new_storage_id=b"T" * 16):
    """Open a directory as a restarted process does; return its content and the engine."""
    engine = open_engine(disk, new_storage_id=new_storage_id)
    logs = tuple((number, found_log(log)) for number, log in sorted(engine.logs.items()))
    failed = tuple((number, str(error)) for number, error in sorted(engine.open_errors.items()))
    return OpenedDirectory(
        engine.storage_id, tuple(engine.assigned_partitions()), logs, failed
    ), engine


def check_opened(found):
    if isinstance(found, Exception):
        raise Violation(f"does not open: {type(found).__name__}: {found}")


def check(acknowledged: Acknowledged, found: OpenedDirectory):
    """Raise Violation if the result of an opening is not acceptable."""
    if found.failed:
        raise Violation(f"cannot be opened: {found.failed}")
    if acknowledged.storage_id not in {None, found.storage_id}:
        raise Violation(f"another storage ID: {found.storage_id!r}")
    logs = dict(found.logs)
    if not set(acknowledged.sure) <= set(found.assigned) <= set(acknowledged.assigned):
        raise Violation(
            f"partitions {found.assigned}, expected {acknowledged.sure} to {acknowledged.assigned}"
        )
    for partition, log in logs.items():
        check_log(
            partition,
            acknowledged.logs[partition],
            log,
            acknowledged.damaged if partition == 0 else (),
        )


def check_log(partition, expected, found, damaged):
    where = f"partition {partition}"
    if found.suspect not in expected.suspects:
        raise Violation(f"{where}: suspect {found.suspect}, expected {expected.suspects}")
    if found.last < 0 and True in expected.suspects and not found.suspect:
        raise Violation(f"{where} has lost its log, but is not suspect")
    if any(one not in damaged for one in (*found.damaged, *found.unreadable)):
        raise Violation(f"{where} has damage {found.damaged}")
    if found.start not in expected.starts:
        raise Violation(f"{where} begins after {found.start}, expected {expected.starts}")
    if found.promise not in expected.promises:
        raise Violation(f"{where}: {found.promise}, expected one of {expected.promises}")
    if found.marks not in expected.marks:
        raise Violation(f"{where}: {found.marks}, expected one of {expected.marks}")
    if found.info not in expected.infos:
        raise Violation(f"{where}: control file {found.info}, expected one of {expected.infos}")
    wrong = [_mismatch(history, found) for history in expected.histories]
    if all(wrong):
        raise Violation(f"{where}: {'; or '.join(one for one in wrong if one)}")


def _mismatch(history, found):
    """Return the difference between a log and this history; None if they are equal."""
    if not history.acked <= found.last < len(history.records):
        return f"ends at {found.last}, expected {history.acked}..{len(history.records) - 1}"
    for position, record in enumerate(found.records):
        if record and record != history.records[position]:
            return f"record {position} differs from the written one"
    start = found.start.transaction_id
    if found.entries != tuple(
        entry for entry in history.entries if start < entry.last <= found.last
    ):
        return "other batches"
    if found.entries and found.entries[-1].last != found.last:
        return f"ends at {found.last}, where no batch ends"
    return None


def check_disk_state(acknowledged, contents):
    """Check the files themselves: marker and dirty bit, and the index up to the marker."""
    for partition, expected in acknowledged.logs.items():
        if not expected.markers:
            continue
        directory = ROOT / str(partition)
        if directory / WIPE_FILE_NAME in contents.files:
            continue  # the storage deletes this directory
        slot = _newer_slot(contents.files.get(directory / SLOTS_FILE_NAME, b""))
        if slot is None:
            raise Violation(f"partition {partition} has no slots")
        marker = slot.acked.transaction_id
        if slot.dirty not in expected.is_dirty:
            raise Violation(
                f"partition {partition}: dirty {slot.dirty}, expected {expected.is_dirty}"
            )
        if not slot.suspect and marker < min(expected.markers):
            raise Violation(f"partition {partition}: marker {marker}, expected {expected.markers}")
        if slot.truncate is None:
            _check_indexes(contents.files, directory, marker, slot.start.transaction_id)


def _newer_slot(content):
    slots = []
    for offset in (0, SLOT_BLOCK_BYTES):
        with suppress(WaltzError):
            slots.append(Slot.decode(content[offset : offset + SLOT_BYTES]))
    return max(slots, key=lambda slot: slot.sequence, default=None)


def _check_indexes(files, directory, marker, start):
    paths = sorted(file for file in files if file.parent == directory and file.suffix == ".seg")
    for path, after in zip_longest(paths, paths[1:]):
        content, index = files[path], files.get(path.with_suffix(".idx"), b"")
        first, at = int(path.stem), 128
        last = min(marker, int(after.stem) - 1) if after else marker
        while at + 40 <= len(content) and first <= last:
            stated = int.from_bytes(index[128 + 8 * (first - int(path.stem)) :][:8], "big")
            if first > start and stated != at:
                raise Violation(
                    f"{path.name}: record {first}: expected offset {at}, found {stated}"
                )
            at += 40 + int.from_bytes(content[at + 28 : at + 32], "big")
            first += 1


# ---------------------------------------------------------------------------------------------
# every point of a scenario


def digest(contents: Contents):
    """Return a hash of the content of a disk."""
    found = hashlib.blake2b(digest_size=16)
    for path in sorted(contents.directories):
        found.update(f"{path}\0".encode())
    for path, content in sorted(contents.files.items()):
        found.update(f"{path}\0{len(content)}\0".encode())
        found.update(content)
    return found.digest()


class Matrix:
    """The crashes of one scenario; equal disks are opened only once."""

    def __init__(self, name):
        self.name = name
        self.counts = Counter()
        self._found = {}  # digest -> the content after the opening, or its error
        self.openings = {}  # digest -> the changes that an opening makes

    def find(self, contents):
        key = digest(contents)
        if key not in self._found:
            disk = RecordingDisk.after_power_loss(contents)
            begin = len(disk.changes)
            try:
                self._found[key], engine = open_directory(disk, new_storage_id=b"U" * 16)
                self.openings[key] = (begin, disk.changes)
                engine.abandon()
            except (WaltzError, AssertionError) as error:
                self._found[key] = error
            self.counts["openings"] += 1
        return key, self._found[key]

    def check_result(self, acknowledged, contents, where):
        """Compare a disk after a crash with the acknowledged data; return its hash and content."""
        key, found = self.find(contents)
        try:
            check_opened(found)
            check(acknowledged, found)
            check_disk_state(acknowledged, contents)
        except Violation as error:
            raise Violation(f"{self.name}, {where}: {error}") from (
                found if isinstance(found, Exception) else None
            )
        return key, found


def crash_points(changes, begin=0):
    """Yield each possible point of a crash, with the disk state and the acknowledged records."""
    disk_state, acknowledged = DiskState(), Acknowledged()
    for position, change in enumerate(changes):
        disk_state.apply_change(change)
        if isinstance(change, PositionMarker):
            acknowledged = change.what
        if position + 1 >= begin:
            # At a position marker, the files are the same as at the previous point, but the
            # expected state differs.
            yield position + 1, disk_state, acknowledged


def power_losses(matrix, changes, begin, *, keeps=None, only_acknowledged=False, seed=0):
    """Lose power at each point; return the different disks, with the acknowledged records.

    `keeps` specifies which unsynced changes survive at each point. By default, several choices are
    tried. With `only_acknowledged`, power is lost only directly after acknowledgements.
    """
    states = {}
    for position, disk_state, acknowledged in crash_points(changes, begin):
        if only_acknowledged and not isinstance(changes[position - 1], PositionMarker):
            continue
        matrix.counts["cuts"] += 1
        rng = Random(f"{seed} {position}")
        for keep in keeps or keep_choices(disk_state, rng, random_count=RANDOM_SURVIVALS):
            matrix.counts["survivals"] += 1
            contents = disk_state.contents_after_crash(keep)
            change_name = _name(changes, position)
            where = f"power lost after change {position} ({change_name}), {_keep_text(keep)}"
            key, found = matrix.check_result(acknowledged, contents, where)
            states.setdefault(key, (acknowledged, contents, found, where))
    return states


def second_losses(matrix, states):
    """Lose power again during an opening; the next opening must have the same result.

    For some disks the power is lost at every change of the opening, for all others at one change.
    """
    for number, (key, (acknowledged, _, found, where)) in enumerate(sorted(states.items())):
        begin, changes = matrix.openings[key]
        expected, rng = with_either_dirty_flag(acknowledged), Random(f"{matrix.name} {number}")
        only = None if number % EVERY_SECOND == 0 else rng.randint(begin, len(changes))
        for position, disk_state, _ in crash_points(changes, begin):
            if only is None:
                keeps = keep_choices(disk_state, rng, random_count=RANDOM_SECOND)
            elif position == only:
                keeps = (KeepNone(), KeepRandom(rng))
            else:
                continue
            _lose_power_again(
                matrix, expected, found, disk_state, keeps, f"{where}, and after change {position}"
            )


def _lose_power_again(matrix, acknowledged, found, disk_state, keeps, where):
    matrix.counts["second cuts"] += 1
    for keep in keeps:
        matrix.counts["second survivals"] += 1
        _, again = matrix.check_result(
            acknowledged,
            disk_state.contents_after_crash(keep),
            f"{where} of the opening, {_keep_text(keep)}",
        )
        if again.logs != found.logs and dict(found.logs).keys() <= dict(again.logs).keys():
            raise Violation(
                f"{matrix.name}, {where}: different logs: {again.logs} and {found.logs}"
            )


def check_kills(matrix, changes, begin, seed=0):
    """Kill the process at several points, restart it, append, and then lose power."""
    every = [(position, acknowledged) for position, _, acknowledged in crash_points(changes, begin)]
    for number, (position, acknowledged) in enumerate(
        every[:: 1 + len(every) // KILLS_OF_A_SCENARIO]
    ):
        matrix.counts["kills"] += 1
        rng = Random(f"{seed} {position}")
        where = f"killed after change {position} ({_name(changes, position)})"
        scenario = restart_and_append(matrix, changes[:position], acknowledged, where)
        after = scenario.disk.changes
        often = number % EVERY_KILL == 0
        for at, disk_state, now_acknowledged in crash_points(after, position + 1):
            if not often and rng.random() > SHARE_AFTER_A_KILL and at < len(after):
                continue
            keeps = [KeepNone(), KeepRandom(rng)]
            if often and at == len(after):
                keeps += keep_choices(disk_state, rng, random_count=RANDOM_SECOND)
            for keep in keeps:
                matrix.counts["survivals after a kill"] += 1
                change_name = _name(after, at)
                lost = f"{where}, power lost after change {at} ({change_name}), {_keep_text(keep)}"
                matrix.check_result(now_acknowledged, disk_state.contents_after_crash(keep), lost)


def restart_and_append(matrix, changes, acknowledged, where):
    """Restart after a kill, which loses no written changes, but makes none of them durable."""
    return open_and_append(matrix, RecordingDisk(changes, site), acknowledged, where)


def open_and_append(matrix, disk, acknowledged, where):
    """Open a directory and append to each partition."""
    scenario = Scenario(99, disk, acknowledged)
    scenario.expect_either_dirty_flag()
    try:
        found, scenario.engine = open_directory(scenario.disk)
        check(acknowledged, found)
    except (WaltzError, Violation) as error:
        raise Violation(f"{matrix.name}, {where}: {type(error).__name__}: {error}") from error
    # When an opening is complete, everything that it has read is durable.
    scenario.histories = {
        number: History(log.records, log.entries, log.last) for number, log in found.logs
    }
    scenario.acknowledge()
    for partition in scenario.engine.logs:
        scenario.prepare(partition)
        scenario.append([1], partition=partition)
        scenario.sync(partition)
    return scenario


def _name(changes, position):
    change = changes[position - 1]
    return "acknowledged" if isinstance(change, PositionMarker) else f"{change!r:.90}"


def _keep_text(keep):
    units = getattr(keep, "units", "")
    return f"{type(keep).__name__} {sorted(map(str, units)) if units else ''}"
