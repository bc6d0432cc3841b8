"""A corrupt closed directory is repaired, or rejected with an error that names the damage.

For every corruption of the files, reads return only bytes that were written. If other replicas have
a record, it is repaired from these replicas. `WALTZ_CORRUPTIONS` adds seeds.
"""

import os
from collections import Counter
from random import Random

import numpy as np
import pytest

from tests.crash.scenarios import Scenario, open_engine, settings
from waltz_core.errors import ChecksumMismatch, Damaged, DataLoss, WaltzError
from waltz_core.records.record import BEFORE_FIRST, GENESIS_CHAIN
from waltz_sim.world.crash import DiskState, KeepAll
from waltz_sim.world.simulated_disk import Contents, SimDisk

SEEDS = 300 + int(os.environ.get("WALTZ_CORRUPTIONS", "0"))
SEEDS_OF_A_TEST = 50
KINDS = ("flip", "flip", "cut", "grow", "zero page", "noise", "swap", "copy", "remove")


def closed_directory():
    """Return a cleanly closed directory of two partitions with several segments, and its logs."""
    scenario = Scenario(5, segment_bytes_max=1500)
    scenario.start()
    for partition in (0, 2):
        scenario.assign(partition)
        scenario.prepare(partition)
    for number, counts in enumerate(([4, 3], [9], [1, 1, 1], [12, 2], [3])):
        for partition in (0, 2):
            scenario.append(counts, partition=partition, bytes_max=200)
            scenario.sync(partition)
        if number == 2:
            scenario.set_mark(0)
    scenario.close()
    disk_state = DiskState()
    for change in scenario.disk.changes:
        disk_state.apply_change(change)
    return disk_state.contents_after_crash(KeepAll()), scenario.histories


CLOSED, HISTORIES = closed_directory()


def corrupt_directory(rng):
    """Return a corrupted copy of the directory, and the corrupt files."""
    files = dict(CLOSED.files)
    names = sorted(path for path in files if path.name != "waltz-x.reserve")
    changed_paths = set()
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        path = rng.choice([name for name in names if name in files])
        kind = rng.choice(KINDS)
        changed_paths.add(path)
        if kind in {"swap", "copy"}:
            other = rng.choice([name for name in names if name in files])
            if kind == "swap":
                files[path], files[other] = files[other], files[path]
                changed_paths.add(other)
            else:
                files[path] = files[other]
        elif kind == "remove":
            del files[path]
        else:
            files[path] = change_content(rng, files[path], kind)
    return Contents(files, CLOSED.directories), changed_paths


def change_content(rng, content, kind):
    offset = rng.randrange(len(content) or 1)
    if kind == "cut":
        return content[:offset]
    if kind == "grow":
        return content + rng.choice((bytes(100), rng.randbytes(100), content[-64:]))
    content = bytearray(content or b"\0")
    if kind == "flip":
        content[offset] ^= 1 << rng.randrange(8)
        return bytes(content)
    page = rng.choice((512, 4096))
    start = offset // page * page
    end = min(len(content), start + page)
    content[start:end] = bytes(end - start) if kind == "zero page" else rng.randbytes(end - start)
    return bytes(content)


def is_reported(message, changed_paths):
    """Return whether an error is one sentence that names a corrupt file or its directory."""
    named = any(path.name in message and str(path.parent) in message for path in changed_paths)
    directory = any(f"{path.parent}:" in message for path in changed_paths)
    return "\n" not in message and len(message) < 400 and (named or directory)


def read_all(log, history):
    """Read all readable records, compare them with the written ones; return unreadable IDs."""
    at, unreadable = 0, set()
    while at <= log.max_id:
        try:
            read = log.read_range(at, log.max_id, 2000, whole_batches=False)
        except (ChecksumMismatch, Damaged):
            unreadable.add(at)
            at += 1
            continue
        last = at + read.lengths.size - 1
        assert read.records == b"".join(history.records[at : last + 1]), (
            f"records {at}..{last} differ from the written ones"
        )
        at = last + 1
    return unreadable


def repair(log, history):
    """Repair a log as an owner does: fill damage, copy differing ranges; return the result."""
    covered = -1
    for one in log.lineage(0, log.max_id)[1] if log.max_id >= 0 else ():
        assert one.first <= covered + 1, f"no batch from {covered + 1} to {one.first - 1}"
        covered = one.last
    for one in log.damaged:
        run = history.records[one.first : one.last + 1]
        lengths = np.array([len(each) for each in run], dtype=np.int64)
        log.repair(one.first, lengths, b"".join(run))
    session = max(log.promised, 1) + 1
    log.prepare(session, b"h" * 16)
    ends = [(BEFORE_FIRST, GENESIS_CHAIN), *((one.last, one.chain) for one in history.entries)]
    base, chain = max(one for one in ends if log.chain_at(one[0]) == one[1])
    try:
        log.truncate(session, base, base, chain)
    except DataLoss:
        return "suspect"
    run = history.records[base + 1 :]
    if run:
        entries = [one for one in history.entries if one.first > base]
        lengths = np.array([len(one) for one in run], dtype=np.int64)
        log.append(session, base + 1, lengths, b"".join(run), chain, entries)
    log.sync()
    log.set_low_water_mark(session, log.max_id, log.chain)
    return "repaired"


def check_result(seed):
    """Corrupt, open, read, repair, and read again; return the result."""
    contents, changed_paths = corrupt_directory(Random(seed))
    disk = SimDisk(is_traced=False)
    disk.replace_contents(contents)
    ended = []
    refusal, engine = None, None
    try:
        engine = open_engine(disk, with_settings=settings(segment_bytes_max=1500))
    except WaltzError as error:
        refusal = str(error)
    if engine is None:
        assert is_reported(refusal, changed_paths), f"{sorted(changed_paths)}: {refusal}"
        return ["refused"]
    for error in engine.open_errors.values():
        assert is_reported(str(error), changed_paths), f"{sorted(changed_paths)}: {error}"
        ended.append("partition refused")
    for partition, log in engine.logs.items():
        history = HISTORIES[partition]
        unreadable = read_all(log, history)
        was_wrong = bool(unreadable) or log.suspect or log.last_session < 0
        assert (
            unreadable
            <= {number for first, last in log.damaged for number in range(first, last + 1)}
            or log.suspect
        )
        if log.max_id < len(history.records) - 1:
            assert log.suspect, f"partition {partition} ends at {log.max_id}, but is not suspect"
        how = repair(log, history)
        if how == "repaired":
            assert not read_all(log, history)
            assert log.max_id == len(history.records) - 1
            assert not log.suspect
        ended.append(how if was_wrong else "whole")
    engine.close()
    return ended


@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_OF_A_TEST))
def test_a_storage_repairs_a_corrupt_directory_or_reports_its_damage(first, record_property):
    ended = Counter()
    for seed in range(first, first + SEEDS_OF_A_TEST):
        try:
            ended.update(check_result(seed))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    for how, count in ended.items():
        record_property(f"crash: corruptions: {how}", count)
    assert ended["repaired"] > SEEDS_OF_A_TEST // 10
    assert ended["refused"] + ended["partition refused"] > SEEDS_OF_A_TEST // 10
