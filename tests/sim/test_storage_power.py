"""A real storage directory whose power goes: at random, and at every step of each call.

Slower than a unit test of one file may be: every case opens the directory again, often twice.
"""

import random
from contextlib import suppress
from itertools import pairwise

import numpy as np
import pytest

from tests.unit.storage.test_partition_log import (
    NONCE,
    PowerLost,
    World,
    make_entries,
    make_records,
)
from waltz_core.records.record import GENESIS_CHAIN

pytestmark = pytest.mark.sim


# ---- the model


class Model:
    """A log as a list, to compare with the real one."""

    def __init__(self, directory, rng):
        self.rng = rng
        self.world = World(directory, rng.choice([300, 2000, 10_000]))
        self.session = 0
        self.records = []  # one bytes object for each id
        self.ends = {-1: GENESIS_CHAIN}
        self.synced = -1
        self.prepare()

    @property
    def log(self):
        return self.world.log

    def prepare(self):
        self.session += 1
        self.log.prepare(self.session, NONCE)

    def append(self):
        counts = [self.rng.randint(1, 12) for _ in range(self.rng.randint(1, 3))]
        sizes = [self.rng.choice([0, 10, 100, 700]) for _ in range(sum(counts))]
        first, chain = self.log.max_id + 1, self.log.chain
        run, lengths = make_records(first, sizes, self.rng.random())
        entries = make_entries(run, lengths, first, chain, self.session, counts)
        self.log.append(self.session, first, lengths, run, chain, entries)
        bounds = [0, *np.cumsum(lengths).tolist()]
        self.records += [run[a:b] for a, b in pairwise(bounds)]
        self.ends.update((one.last, one.chain) for one in entries)

    def sync(self):
        self.synced = self.log.sync()
        assert self.synced == len(self.records) - 1

    def crash(self):
        self.world.crash(self.rng)
        self.check()
        self.prepare()

    def close(self):
        self.synced = len(self.records) - 1
        self.world.close()
        self.world.disk.lose_unsynced(self.rng)
        self.world.open()
        self.check()
        self.prepare()

    def truncate(self):
        self.prepare()
        keep = self.rng.randint(self.log.confirmed_low_water_mark, len(self.records) - 1)
        base = max(end for end in self.ends if end <= keep)
        top, self.ends[keep] = self.log.truncate(self.session, keep, base, self.ends[base])
        assert top == self.log.synced_max == keep
        self.synced = keep
        self.check()

    def mark(self):
        self.sync()
        self.log.set_low_water_mark(self.session, self.log.max_id, self.log.chain)
        choice = self.rng.random()
        if choice < 0.5:
            self.log.engage(self.session, self.log.max_id)
            assert self.log.confirmed_low_water_mark == self.log.max_id
        elif choice < 0.75:
            self.prepare()

    def check(self):
        top = self.log.max_id
        assert (self.log.suspect, self.log.damaged) == (False, ())
        assert self.synced <= top < len(self.records)
        del self.records[top + 1 :]
        self.ends = {end: chain for end, chain in self.ends.items() if end <= top}
        assert self.log.chain == self.ends[top]
        assert self.world.everything() == b"".join(self.records)
        if top >= 0:
            chain, entries = self.log.lineage(0, top)
            assert chain == GENESIS_CHAIN
            found = {-1: GENESIS_CHAIN} | {one.last: one.chain for one in entries}
            assert found == self.ends
        self.synced = top


@pytest.mark.parametrize("seed", range(40))
def test_appends_syncs_crashes_and_truncations_agree_with_a_list(tmp_path, seed):
    rng = random.Random(seed)
    model = Model(tmp_path, rng)
    weights = {"append": 5, "sync": 3, "crash": 1, "close": 1, "truncate": 1, "mark": 1}
    for action in rng.choices(list(weights), list(weights.values()), k=60):
        model.world.clock.now += rng.choice([0, 10, 400, 1500])
        getattr(model, action)()
    assert model.log.max_id == len(model.records) - 1
    model.sync()
    model.check()
    model.world.log.abandon()
    model.world.control.close()


# ---- the power goes in the middle of a call


def prepared_world(directory):
    world = World(directory, 700)
    world.log.prepare(1, NONCE)
    parts = [world.append([3, 4]), world.append([9])]
    world.log.set_low_water_mark(1, 15, world.log.chain)
    world.log.engage(1, 15)
    world.clock.now += 2000
    parts += [world.append([20]), world.append([5, 5])]
    return world, b"".join(parts)


def cut_in_the_middle(world):
    world.log.truncate(1, 30, 15, world.log.chain_at(15))


def cut_at_an_end(world):
    world.log.truncate(1, 15, 15, world.log.chain_at(15))


def append_over_segments(world):
    world.append([30, 4])


def set_a_mark(world):
    world.log.set_low_water_mark(1, 45, world.log.chain)
    world.log.engage(1, 45)


def prepare_the_next(world):
    world.log.prepare(2, NONCE)


def close_cleanly(world):
    world.log.close()


@pytest.mark.parametrize(
    ("call", "kept"),
    [
        (cut_in_the_middle, 30),
        (cut_at_an_end, 15),
        (append_over_segments, 45),
        (set_a_mark, 45),
        (prepare_the_next, 45),
        (close_cleanly, 45),
    ],
)
def test_after_any_power_loss_the_log_opens_with_all_acknowledged_data(tmp_path, call, kept):
    for steps in range(200):
        world, written = prepared_world(tmp_path / str(steps))
        written += make_records(46, [20] * 34)[0]
        world.disk.left = steps
        lost = False
        try:
            call(world)
        except PowerLost:
            lost = True
        # The second loss of power hits the first opening, wherever that has come to.
        for again in (steps % 17, None):
            world.disk.left = None
            world.log.abandon()
            world.control.close()
            world.disk.lose_unsynced(random.Random(steps))
            world.disk.left = again
            with suppress(PowerLost):
                world.open()
                break
        world.disk.left = None
        log = world.log
        assert (log.suspect, log.damaged) == (False, ())
        assert log.max_id >= kept
        assert world.everything() == written[: 60 * (log.max_id + 1)]
        entries = log.lineage(0, log.max_id)[1]
        assert [0, *(one.last + 1 for one in entries)] == [
            *(one.first for one in entries),
            log.max_id + 1,
        ]
        assert entries[-1].chain == log.chain
        assert log.confirmed_low_water_mark in {15, 45}
        log.prepare(3, NONCE)
        world.append([2], session=3, seed=5)
        world.crash()
        assert not world.log.suspect
        world.log.abandon()
        world.control.close()
        if not lost:
            assert steps > 0
            return
    pytest.fail("the call never came to its end")
