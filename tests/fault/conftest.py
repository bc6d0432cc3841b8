"""Clusters of real processes for tests that kill them, and clients of these clusters."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fault.load import Scenario
from tests.postgres import PostgresServer, postgres
from waltz_core.local import LocalCluster, running_cluster

__all__ = ["postgres"]  # pytest finds a fixture only in modules that import it

# The shortest session that ZooKeeper grants with its ticks of half a second is one second.
SESSION_MS = 1_500


@pytest.fixture(scope="module")
def module_scenario(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scenario]:
    """Yield one cluster for all tests of a file, with STORAGE_COUNT storages (default: three)."""
    settings: dict[str, dict[str, object]] = {
        kind: {"zookeeper_session_timeout_ms": SESSION_MS} for kind in ("server", "storage")
    }
    directory = tmp_path_factory.mktemp("cluster")
    storage_count = getattr(request.module, "STORAGE_COUNT", 3)
    with running_cluster(directory, settings=settings, storage_count=storage_count) as cluster:
        yield Scenario(cluster)


@pytest.fixture
def scenario(module_scenario: Scenario) -> Iterator[Scenario]:
    """Yield the file's cluster; members that a test has ended are restarted afterwards."""
    yield module_scenario
    for member in module_scenario.cluster.members:
        module_scenario.cluster.start(member.name)


# The bank's statements are the same for both databases. `test_sql_instances.py` has short tests of
# PostgreSQL.
@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'bank.db'}"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.create()


@pytest.fixture
def cluster_of(request: pytest.FixtureRequest) -> Callable[[LocalCluster], LocalCluster]:
    """Return a function that ends clusters that a test has created."""

    def keep(cluster: LocalCluster) -> LocalCluster:
        request.addfinalizer(lambda: cluster.exists() and cluster.down())
        return cluster

    return keep
