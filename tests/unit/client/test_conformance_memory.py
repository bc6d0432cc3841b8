"""`MemoryWaltz` fulfills the client contract, with and without faults."""

import pytest

from tests.client_contract import (
    SCENARIOS,
    SCENARIOS_UNDER_ANY_FAULTS,
    ScenarioSetup,
    is_log_complete,
)
from waltz_core.memory_waltz import MemoryWaltz


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_memory_waltz_fulfills_the_client_contract(scenario):
    with MemoryWaltz(delay_ms=(0.5, 3.0)) as waltz:
        world = ScenarioSetup(waltz.client, 1)
        scenario(world)
        assert is_log_complete(world)


@pytest.mark.parametrize(
    "scenario", SCENARIOS_UNDER_ANY_FAULTS, ids=lambda scenario: scenario.__name__
)
def test_memory_waltz_fulfills_the_client_contract_under_faults(scenario):
    with MemoryWaltz(seed=7, fault_rate=0.2) as waltz:
        world = ScenarioSetup(waltz.client, 1)
        scenario(world)
        assert is_log_complete(world)
