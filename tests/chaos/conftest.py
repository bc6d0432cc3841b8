"""A cluster in network namespaces for the tests of this folder, and an application that writes."""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.chaos.cluster import ChaosCluster, ClusterSize, run_cluster
from tests.chaos.history import ClientRun, check_history, longest_gap_s, read_log
from tests.chaos.network import Network
from tests.chaos.round import Applications
from tests.fault.load import four_writers

WORLD = ClusterSize(servers=2, clients=1)
CLIENT = "client-1"
RECOVERY_TIMEOUT_S = 40.0
EQUAL_REPLICAS_TIMEOUT_S = 60.0


class NetworkScenario:
    """A cluster, and all outcomes that applications have received, over several tests."""

    def __init__(self, cluster: ChaosCluster, directory: Path) -> None:
        self.cluster = cluster
        self.network = cluster.network
        self.applications = Applications(cluster, directory)

    @property
    def current_run(self) -> ClientRun:
        """Return the journal of the current application."""
        return self.applications.client_runs[-1]

    def begin(self) -> None:
        """Start an application; wait until it writes everywhere and each server has partitions."""
        began_s = time.monotonic()
        self.applications.start(CLIENT)
        self.await_commits(range(WORLD.partitions), since_s=began_s)
        if len(set(self.cluster.owners().values())) < WORLD.servers:
            # Partitions that were moved stay at their server until a server starts or ends.
            self.cluster.kill("server-1")
            self.cluster.start("server-1")
        self.wait("both servers own some", lambda: len(set(self.cluster.owners().values())) == 2)

    def owned_by(self, server: str) -> list[int]:
        """Return the partitions that a server owns."""
        found = [partition for partition, owner in self.cluster.owners().items() if owner == server]
        assert found, f"{server} owns no partition"
        return found

    def wait(
        self, description: str, condition: object, *, seconds: float = RECOVERY_TIMEOUT_S
    ) -> float:
        """Wait for a condition; return the seconds that it took."""
        assert callable(condition)
        return self.cluster.wait_until(description, condition, seconds=seconds)

    def await_commits(
        self, partitions: Iterable[int], *, since_s: float, seconds: float = RECOVERY_TIMEOUT_S
    ) -> float:
        """Wait until each given partition has committed a newly sent row; return the seconds."""
        wanted = list(partitions)

        def has_commits() -> bool:
            self.applications.poll()
            return all(
                self.current_run.first_commit_s(each, since_s) is not None for each in wanted
            )

        return self.wait(f"commits in partitions {wanted}", has_commits, seconds=seconds)

    def gap_s(self, partitions: Iterable[int], *, since_s: float) -> float:
        """Return the longest time in seconds without a commit in any of the given partitions."""
        self.applications.poll()
        now_s = time.monotonic()
        return max(
            longest_gap_s([self.current_run], partition, since_s=since_s, until_s=now_s)
            for partition in partitions
        )

    def latencies_s(self, *, since_s: float) -> list[float]:
        """Return the sorted latencies in seconds of the commits of rows sent since."""
        self.applications.poll()
        return sorted(
            message.recorded.reported_s - message.recorded.sent_s
            for message in self.current_run.sent.values()
            if message.recorded.sent_s >= since_s and message.recorded.outcome == four_writers.OK
        )

    def check(self) -> None:
        """Stop the application; compare its journal with the log, and the replicas."""
        self.applications.stop()
        self.applications.poll()
        with self.cluster.client() as client:
            log = read_log(client)
        self.applications.end({session: log.last(session) for session in log.sessions})
        verdict = check_history(self.applications.client_runs, log)
        assert verdict.wrong == []
        assert verdict.counts[four_writers.OK] > 0
        assert self.applications.unexpected_ends == []
        self.applications.remove_ended()
        self.wait(
            "all replicas are equal",
            self.cluster.has_equal_replicas,
            seconds=EQUAL_REPLICAS_TIMEOUT_S,
        )
        self.cluster.record_ended_members()
        assert self.cluster.unexpected_ends == []


@pytest.fixture(scope="session")
def _skip_without_namespaces() -> None:
    """Skip if links cannot be cut here."""
    with Network(["here", "there"]) as network:
        if not network.can_cut:
            pytest.skip(network.cannot_cut_reason)


@pytest.fixture(scope="module")
def module_scenario(
    _skip_without_namespaces: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[NetworkScenario]:
    """Yield one cluster for all tests of a file."""
    directory = tmp_path_factory.mktemp("chaos")
    with run_cluster(WORLD, directory) as cluster:
        yield NetworkScenario(cluster, directory)


@pytest.fixture
def scenario(module_scenario: NetworkScenario) -> Iterator[NetworkScenario]:
    """Yield the file's cluster with a running application; repair all faults afterwards."""
    module_scenario.begin()
    yield module_scenario
    module_scenario.applications.kill_all_clients()
    module_scenario.network.repair()
    for name in module_scenario.cluster.members:
        module_scenario.cluster.start(name)
