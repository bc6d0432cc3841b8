"""The client at a 0.13 server fulfills the client contract as far as 0.13 allows."""

import pytest

from tests import client_contract
from tests.client_contract import SCENARIOS, ScenarioSetup, is_log_complete
from tests.original_server_for_clients import OriginalCluster
from waltz_core.client import AsyncWaltzClient, WaltzClient
from waltz_core.client.api.opening import UnopenedClient
from waltz_core.config import ClientConfig

IN_MEMORY_CONFIG = ClientConfig(
    request_timeout_ms=15_000,
    retry_interval_ms_min=5,
    retry_interval_ms_max=100,
    mount_timeout_ms=3_000,
)
# A 0.13 server does not report appends in flight.
UNSUPPORTED_SCENARIOS = (
    client_contract.an_append_rejected_because_of_one_in_flight_may_depend_on_it,
    client_contract.a_dependent_append_is_not_ahead_of_other_locks,
)


def client_of(cluster: OriginalCluster, config: ClientConfig = IN_MEMORY_CONFIG) -> WaltzClient:
    def opening() -> UnopenedClient[AsyncWaltzClient]:
        return UnopenedClient(
            AsyncWaltzClient(cluster.directory(), "original", config, client_id=None)
        )

    return WaltzClient.wrap(opening)


@pytest.mark.parametrize(
    "scenario",
    [each for each in SCENARIOS if each not in UNSUPPORTED_SCENARIOS],
    ids=lambda scenario: scenario.__name__,
)
def test_the_client_passes_each_supported_scenario_at_a_0_13_server(scenario):
    # The client handles both protocol versions alike, so two scenarios suffice for the older one.
    is_older = scenario in (
        client_contract.reads_and_feeds_return_the_appended_bytes,
        client_contract.write_and_append_locks_reject_only_later_write_and_read_locks,
    )
    with OriginalCluster(versions=(0, 1, 2, 3) if is_older else (0, 1, 2, 3, 4)) as cluster:
        world = ScenarioSetup(lambda: client_of(cluster), 1)
        scenario(world)
        assert is_log_complete(world)
