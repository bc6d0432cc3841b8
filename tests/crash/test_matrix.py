"""After a crash at any change, a directory has all acknowledged records and no torn ones.

Each test counts the crash points, the combinations of surviving changes and the openings that it
has tried. The sums are printed at the end of a run.
`test_the_crash_matrix_has_its_documented_size` checks them.
"""

from random import Random

import pytest

from tests.crash.matrix import (
    RANDOM_SURVIVALS,
    Matrix,
    check_kills,
    crash_points,
    power_losses,
    restart_and_append,
    second_losses,
)
from tests.crash.scenarios import (
    ADMIN_CONNECTION,
    SCENARIOS,
    failed_sync_of_an_index,
    with_either_dirty_flag,
)
from waltz_sim.world.crash import KeepNone, keep_choices

CUTS_MIN = 1_500
SURVIVALS_MIN = 25_000
EVERY = (*SCENARIOS, *ADMIN_CONNECTION)


def acknowledge(record_property, matrix):
    for name, count in matrix.counts.items():
        record_property(f"crash: {name}", count)


@pytest.mark.parametrize("scenario", EVERY, ids=lambda one: one.__name__)
def test_acknowledged_data_survives_a_power_loss_and_a_second_one_during_recovery(
    scenario, record_property
):
    matrix, history = Matrix(scenario.__name__), scenario()
    states = power_losses(matrix, history.disk.changes, history.begin)
    second_losses(matrix, states)
    acknowledge(record_property, matrix)
    assert matrix.counts["cuts"] >= len(history.disk.changes) - history.begin
    assert matrix.counts["second survivals"] > 80


@pytest.mark.parametrize("scenario", EVERY, ids=lambda one: one.__name__)
def test_acknowledged_data_survives_a_kill_at_any_change_and_a_later_power_loss(
    scenario, record_property
):
    matrix, history = Matrix(scenario.__name__), scenario()
    check_kills(matrix, history.disk.changes, history.begin)
    acknowledge(record_property, matrix)
    assert matrix.counts["kills"] > 14
    assert matrix.counts["survivals after a kill"] > 150


def test_an_index_whose_sync_has_failed_is_written_again_by_the_next_process():
    """More than the last batch's sector is lost, but the page cache reports this part as clean."""
    matrix, history = Matrix("failed_sync_of_an_index"), failed_sync_of_an_index()
    changes = history.disk.changes
    after = restart_and_append(
        matrix, changes, with_either_dirty_flag(history.acknowledged), "killed"
    ).disk.changes
    *_, (_, disk_state, acknowledged) = crash_points(after, len(changes) + 1)
    _, found = matrix.check_result(
        acknowledged, disk_state.contents_after_crash(KeepNone()), "power lost at the end"
    )
    assert not dict(found.logs)[0].suspect


def test_the_crash_matrix_has_its_documented_size():
    cuts = survival_count = 0
    for scenario in EVERY:
        history = scenario()
        for position, disk_state, _ in crash_points(history.disk.changes, history.begin):
            cuts += 1
            rng = Random(position)
            survival_count += sum(
                1 for _ in keep_choices(disk_state, rng, random_count=RANDOM_SURVIVALS)
            )
    assert cuts >= CUTS_MIN
    assert survival_count >= SURVIVALS_MIN
