"""A storage whose disk corrupts data reports the loss and never serves wrong data.

Seeds are fixed; `WALTZ_STORAGE_SEEDS` adds more.
"""

import os
from collections import Counter
from random import Random

import pytest

from tests.storage_model import (
    PARTITION,
    ROOT,
    ModeledLog,
    random_log,
    run_until_error,
    run_until_power_loss,
)
from waltz_core.errors import ChecksumMismatch, Damaged, DiskFailed
from waltz_core.offline.layout import (
    BATCH_BYTES,
    CHAIN_HEADER_BYTES,
    decode_batch_entry,
    decode_chain_header,
)
from waltz_sim.world.simulated_disk import Contents, DiskFault, SimDisk, Survival

SEEDS = range(12 + int(os.environ.get("WALTZ_STORAGE_SEEDS", "0")))


def rot(world):
    """Corrupt something on the disk, except the control file of Waltz 0.13."""
    disk, rng = world.disk, world.rng
    paths = [path for path, content in sorted(disk.files().items()) if content]
    path = rng.choice([one for one in paths if one.name != "waltz-storage.ctl"])
    content = bytearray(disk.visible_content(path))
    offset = rng.randrange(len(content))
    how = rng.choice(("flip", "zero", "cut"))
    if how == "flip" or path.suffix == ".ctl":
        content[offset] ^= 1 << rng.randrange(8)
    elif how == "zero":
        end = min(len(content), offset + rng.choice((8, 100, 512)))
        content[offset:end] = bytes(end - offset)
    else:
        del content[offset:]
    disk.write_durably(path, bytes(content))


def read_and_compare(world):
    """Read all records, and compare them with the written ones; return the damaged IDs."""
    log = world.log
    at, damaged = 0, set()
    while at <= log.max_id:
        try:
            read = log.read_range(at, log.max_id, 100_000, whole_batches=False)
        except ChecksumMismatch:
            hole = next(one for one in log.damaged if one.first <= at <= one.last)
            damaged.update(range(at, hole.last + 1))
            at = hole.last + 1
            continue
        count = read.lengths.size
        assert read.records == b"".join(world.records[at : at + count])
        at += count
    return damaged


@pytest.mark.parametrize("seed", range(6 * len(SEEDS)))
def test_corruption_is_reported_and_never_served(seed):
    world = random_log(seed)
    run_until_power_loss(world, 20, None)
    clean = world.rng.random() < 0.5
    if clean:
        world.close()
        safe = world.acked
    else:
        world.sync()
        safe = world.log.slot.acked.transaction_id
        world.append()
    world.disk.lose_power(Survival.EVERYTHING, world.rng)
    for _ in range(world.rng.choice((1, 1, 3))):
        rot(world)
    try:
        world.open()
    except Damaged:
        return
    damaged = read_and_compare(world)
    assert damaged <= {
        number for first, last in world.log.damaged for number in range(first, last + 1)
    }
    if world.log.suspect:
        return
    assert world.log.max_id >= safe
    assert world.log.chain == world.chain_at(world.log.max_id)
    if damaged:
        assert world.log.prepare(world.log.promised + 1, bytes(16)).damaged


# ---- confirmed records


def world_with_failures(seed):
    """Return a log after one or two failed writes; None if the log is suspect."""
    world = random_log(seed)
    world.prepare()
    world.set_mark()
    for _ in range(world.rng.choice((0, 1, 1, 2))):
        error, at_the_edge = run_until_error(world, DiskFault.IO_ERROR)
        if error is None:
            continue
        if at_the_edge or world.cut_to is not None:
            return None
        try:
            world.prepare_after_error()
        except DiskFailed:
            return None
        if world.log.suspect:
            return None
        world.cut_model(world.log.max_id)
        world.acked = world.log.max_id
        if world.rng.random() < 0.5:
            world.append()
    world.sync()
    return world


def durable_before(files, marker):
    """Return the last ID that was synced according to the readable batches, or to the marker."""
    last = marker
    paths = sorted(path.with_suffix(".chn") for path in files if path.suffix == ".seg")
    for path in paths:
        crc = decode_chain_header(files[path][:CHAIN_HEADER_BYTES]).segment_crc
        body = files[path][CHAIN_HEADER_BYTES:]
        for position in range(len(body) // BATCH_BYTES):
            one = decode_batch_entry(
                body[BATCH_BYTES * position : BATCH_BYTES * (position + 1)], position, crc
            )
            if not one.errors:
                last = max(last, one.synced if path == paths[-1] else one.last)
    return last


def corrupt_file(rng, files):
    """Return the path of a file of records, offsets or batches, and its corrupted content."""
    kinds = {}
    for path in sorted(files):
        if path.parent == ROOT / str(PARTITION) and files[path]:
            kinds.setdefault(path.suffix, []).append(path)
    path = rng.choice(kinds[rng.choice((".seg", ".idx", ".chn", ".chn"))])
    content = bytearray(files[path])
    offset = rng.randrange(len(content))
    if rng.random() < 0.5:
        content[offset] ^= 1 << rng.randrange(8)
    else:
        start = offset // 512 * 512
        content[start : start + 512] = bytes(len(content[start : start + 512]))
    return path, bytes(content)


def open_files(world, files):
    """Open the files that a crash has left of a log; None if the opening fails."""
    disk = SimDisk(is_traced=False)
    disk.replace_contents(Contents(files, frozenset({ROOT, ROOT / str(PARTITION)})))
    try:
        return ModeledLog(Random(1), world.segment_bytes_max, disk=disk)
    except Damaged:
        return None


def check_result(world, files, spoiled_path):
    """Open a log, and compare it with all that was confirmed; return the result."""
    marker = world.log.slot.acked.transaction_id
    after = open_files(world, files)
    if after is None:
        return f"refused for {spoiled_path.suffix}"
    log = after.log
    if log.suspect:
        return "suspect"
    assert log.max_id >= durable_before(files, marker)
    assert log.chain == world.chain_at(log.max_id)
    if log.damaged:
        return "damaged"
    return "whole" if log.max_id == world.max_id else "cut"


@pytest.mark.parametrize("first", range(0, 8 * len(SEEDS), 24))
def test_confirmed_records_are_never_truncated_silently(first):
    """One file is corrupted when the storage starts after an unclean stop."""
    ended = Counter()
    for seed in range(first, first + 24):
        world = world_with_failures(seed)
        if world is None:
            continue
        world.disk.lose_power(Survival.EVERYTHING, world.rng)
        whole = world.disk.files()
        for _ in range(20):
            path, content = corrupt_file(world.rng, whole)
            try:
                ended[check_result(world, {**whole, path: content}, path)] += 1
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, {path}: {error}") from error
    assert ended["suspect"] > 10
    assert ended["whole"] > 10
    assert ended["damaged"] > 0
