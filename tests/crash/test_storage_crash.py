"""The storage over a disk that loses power, fails and fills up, at any step.

Acknowledged records exist unchanged, or the replica reports that it is suspect. Seeds are
fixed; `WALTZ_STORAGE_SEEDS` adds more.
"""

import os
from random import Random

import pytest

from tests.storage_model import (
    ALL_SURVIVALS,
    ModeledLog,
    check_after_error,
    random_log,
    run_until_error,
    run_until_power_loss,
)
from waltz_core.errors import DiskFailed, NoSpace
from waltz_core.records.record import GENESIS_CHAIN
from waltz_sim.world.simulated_disk import DiskFault, PowerLoss, Survival

SEEDS = range(10 + int(os.environ.get("WALTZ_STORAGE_SEEDS", "0")))


@pytest.mark.parametrize("survival", ALL_SURVIVALS)
@pytest.mark.parametrize("seed", SEEDS)
def test_acknowledged_records_survive_a_power_loss_at_a_random_step(seed, survival):
    world = random_log(seed)
    for _ in range(4):
        run_until_power_loss(world, 25, world.rng.randint(1, 120))
        world.lose_power(survival)
    world.check_new_session()
    assert world.log.prepare(world.session + 1, bytes(16)).synced_max == world.acked


@pytest.mark.parametrize("seed", SEEDS)
def test_acknowledged_records_survive_power_losses_during_recovery(seed):
    world = random_log(seed)
    for _ in range(3):
        run_until_power_loss(world, 15, world.rng.randint(1, 80))
        world.disk.lose_power(Survival.ANY_SECTORS, world.rng)
        for reach in (3, 25, 25):  # an opening has more than three steps
            world.disk.plan_fault(
                world.disk.step_count + world.rng.randint(1, reach), DiskFault.POWER_LOSS
            )
            try:
                world.open()
            except PowerLoss:
                continue
            finally:
                world.disk.lose_power(world.rng.choice(ALL_SURVIVALS), world.rng)
            assert reach > 3
        world.lose_power(world.rng.choice(ALL_SURVIVALS))
    world.check_new_session()


def scenario(world):
    """Append to several segments, mark, truncate within a batch, append again, restart."""
    world.prepare()
    world.set_mark()
    for _ in range(3):
        world.append()
        world.append()
        world.sync()
        world.now_ms += 600
    world.truncate()
    world.append()
    world.sync()
    world.new_session()
    world.restart()


def test_acknowledged_records_survive_a_power_loss_at_each_step_of_a_scenario():
    """Each step has other surviving changes; `test_matrix.py` tries all sets at each step."""
    step = 0
    lost = True
    while lost:
        step += 1
        world = ModeledLog(Random(7), segment_bytes_max=900)
        world.disk.plan_fault(world.disk.step_count + step, DiskFault.POWER_LOSS)
        lost = False
        try:
            scenario(world)
        except PowerLoss:
            lost = True
            world.lose_power(ALL_SURVIVALS[step % len(ALL_SURVIVALS)])
            world.check_new_session()
    assert step > 150, "the scenario ends before the first step of the disk"


def test_a_torn_unsynced_end_of_a_log_is_not_reported_as_damage():
    """After a power loss of the whole cluster no replica may report its torn end as damage."""
    torn = 0
    for seed in range(40):
        world = ModeledLog(Random(seed), segment_bytes_max=1_000_000, bytes_max=1500)
        world.prepare()
        world.set_mark()
        world.append()
        world.sync()
        for _ in range(8):
            world.append()
        before = world.max_id
        world.lose_power(Survival.ANY_SECTORS)  # asserts: not suspect, no damage
        torn += world.max_id < before
    assert torn > 30


# ---- errors


@pytest.mark.parametrize("fault", [DiskFault.IO_ERROR, DiskFault.DISK_FULL])
@pytest.mark.parametrize("seed", SEEDS)
def test_after_a_disk_error_the_log_continues_or_reports_the_failed_disk(seed, fault):
    world = random_log(seed)
    world.prepare()
    world.set_mark()
    for _ in range(3):
        error, at_the_edge = run_until_error(world, fault)
        if error is None:
            continue
        if isinstance(error, DiskFailed) and not at_the_edge:
            with pytest.raises(DiskFailed):  # the session is over
                world.log.append(world.session, 0, None, b"", GENESIS_CHAIN, ())
        restarts = at_the_edge or world.rng.random() < 0.3
        if not restarts:
            try:
                world.prepare_after_error()
            except DiskFailed:
                restarts = True
            else:
                check_after_error(world)
                world.check_new_session()
        if restarts or world.rng.random() < 0.5:
            world.disk.lose_power(world.rng.choice(ALL_SURVIVALS), world.rng)
            world.open()
            if world.log.suspect:
                return  # a slot or a truncation could not be written, and the error states this
            world.check_after_crash()
            world.check_new_session()


@pytest.mark.parametrize("fault", [DiskFault.IO_ERROR, DiskFault.DISK_FULL])
@pytest.mark.parametrize("seed", range(2))
def test_a_failed_append_across_segments_leaves_no_records_behind(seed, fault):
    step = 0
    while True:
        step += 1
        world = ModeledLog(Random(seed), segment_bytes_max=300, bytes_max=60)
        world.prepare()
        world.set_mark()
        world.append([1])
        world.sync()
        world.disk.plan_fault(world.disk.step_count + step, fault)
        try:
            world.append([1, 1, 5, 5])
            world.sync()
        except (DiskFailed, NoSpace):
            pass  # the planned fault, as the log reports it; the resulting state is checked below
        else:
            break
        try:
            world.prepare_after_error()
        except DiskFailed:
            continue  # the writes of the slots failed: no further call until the next open
        check_after_error(world)
        world.check_new_session()
        world.lose_power(world.rng.choice(ALL_SURVIVALS))
    assert step > 40, "the append must begin several segments"


def test_an_append_after_a_truncation_does_not_confirm_a_mark_above_the_log():
    world = ModeledLog(Random(1))
    world.prepare()
    for _ in range(4):
        world.append()
    world.sync()
    world.log.set_low_water_mark(world.session, world.max_id, world.log.chain)
    marked = world.max_id
    while world.max_id == marked:
        world.truncate()
    world.append()
    assert world.log.confirmed_low_water_mark <= world.max_id
    world.check_new_session()


def append_much(world):
    for _ in range(20):
        world.append()


def test_a_log_on_a_full_disk_rejects_appends_and_still_serves_reads():
    world = ModeledLog(Random(3))
    world.prepare()
    world.set_mark()
    for _ in range(5):
        world.append()
        world.sync()
    world.disk.capacity_bytes = sum(map(len, world.disk.files().values())) + 100
    with pytest.raises(NoSpace):
        append_much(world)
    check_after_error(world)
    world.disk.capacity_bytes = None
    world.check_new_session()
    world.lose_power(Survival.NOTHING)
