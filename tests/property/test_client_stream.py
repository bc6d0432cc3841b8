"""Under any fault, the outcome that a client receives for an append agrees with the log."""

from random import Random

import pytest

from tests.unit.client.model_server import ModelWorld
from waltz_core import errors
from waltz_core.client.stream import stream_events
from waltz_core.wire.messages import RowOutcomeCode


@pytest.mark.parametrize("block", range(10))
def test_outcomes_agree_with_the_log(block):
    reasons = set()
    unknown = 0
    for seed in range(block * 30, block * 30 + 30):
        world = ModelWorld(Random(seed), wants_feed=seed % 2 == 0)
        world.run(300)
        world.finish_without_faults()
        world.check()
        for settled in world.settled.values():
            if isinstance(settled, stream_events.SubmissionSettled):
                reasons.update(settled.outcome.reasons.tolist())
            elif isinstance(settled.error, errors.OutcomeUnknown):
                unknown += 1
    # The schedules reach the intended situations.
    assert reasons >= {
        RowOutcomeCode.COMMITTED,
        RowOutcomeCode.LOCK,
        RowOutcomeCode.LOST,
        RowOutcomeCode.OVERLOADED,
    }
    assert unknown > 0 or block > 0


@pytest.mark.parametrize("values", [(0,), (1, 2)])
def test_a_filtered_feed_advances_over_all_ids_and_delivers_matching_transactions(values):
    passed = over = 0
    for seed in range(60):
        world = ModelWorld(Random(seed), wants_feed=True, header_values=values)
        world.run(300)
        world.finish_without_faults()
        world.check()
        over += world.fed.count(None)
        passed += len(world.fed) - world.fed.count(None)
    assert passed > 100
    assert over > 100


def test_without_faults_every_row_gets_an_outcome_and_is_delivered_by_the_feed():
    world = ModelWorld(Random(1), wants_feed=True)
    for _ in range(20):
        world.append()
    world.finish_without_faults()
    for _ in range(500):
        world.feed()
        world.deliver_to_client()
        world.apply()
        world.deliver_to_server()
    world.check()
    assert world.fed == world.log
    assert len(world.log) > 0
