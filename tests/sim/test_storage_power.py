"""A real storage directory that loses power at every step of each call.

`tests/crash` has random calls, and more states that a crash may leave.
"""

import random
from contextlib import suppress

import pytest

from tests.unit.storage.test_partition_log import NONCE, PowerLost, World, make_records

pytestmark = pytest.mark.sim


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
    ("call", "last_acknowledged"),
    [
        (cut_in_the_middle, 30),
        (cut_at_an_end, 15),
        (append_over_segments, 45),
        (set_a_mark, 45),
        (prepare_the_next, 45),
        (close_cleanly, 45),
    ],
)
def test_after_any_power_loss_the_log_opens_with_all_acknowledged_data(
    tmp_path, call, last_acknowledged
):
    for steps in range(200):
        world, written = prepared_world(tmp_path / str(steps))
        written += make_records(46, [20] * 34)[0]
        world.disk.steps_left = steps
        lost = False
        try:
            call(world)
        except PowerLost:
            lost = True
        # The second power loss occurs during the first opening, at any step.
        for again in (steps % 17, None):
            world.disk.steps_left = None
            world.log.abandon()
            world.control.close()
            world.disk.lose_unsynced(random.Random(steps))
            world.disk.steps_left = again
            with suppress(PowerLost):
                world.open()
                break
        world.disk.steps_left = None
        log = world.log
        assert (log.suspect, log.damaged) == (False, ())
        assert log.max_id >= last_acknowledged
        assert world.all_records() == written[: 60 * (log.max_id + 1)]
        entries = log.lineage(0, log.max_id)[1]
        assert [0, *(entry.last + 1 for entry in entries)] == [
            *(entry.first for entry in entries),
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
    pytest.fail("the call never completed")
