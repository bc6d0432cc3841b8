"""A real cluster fulfills the client contract: the scenarios that also run in memory."""

from collections.abc import Iterator

import pytest

from tests.client_contract import SCENARIOS, ScenarioSetup, is_log_complete
from waltz_core.client import WaltzClient
from waltz_core.local import running_cluster

pytestmark = pytest.mark.zookeeper


@pytest.fixture(scope="module")
def connect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_cluster(tmp_path_factory.mktemp("cluster") / "local", storage_count=1) as cluster:
        yield cluster.connect


@pytest.mark.parametrize("number", range(len(SCENARIOS)), ids=lambda i: SCENARIOS[i].__name__)
def test_a_real_cluster_fulfills_the_client_contract(number: int, connect: str):
    world = ScenarioSetup(lambda: WaltzClient(connect), number % 4)
    SCENARIOS[number](world)
    assert is_log_complete(world)
