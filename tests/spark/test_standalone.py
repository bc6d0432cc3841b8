"""A standalone Spark cluster of two workers: both read from and write to the log.

The tests use `spark-submit` like a user. If the machine permits network namespaces, each worker has
a separate network.
"""

import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

import waltz_core.local
from tests.spark.exactly_once_rows import WRITES
from tests.spark.simulated_hosts import simulated_hosts
from tests.spark.speculation_job import SLOW_TASK
from tests.spark.standalone import StandaloneSpark
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.client import WaltzClient

# Master, workers, drivers and executors are separate processes. Shorter tests of the same rules:
# `test_once_cluster.py` has executor processes, `test_moving.py` reads from replicas,
# `test_scale.py` counts the connections of workers, and `test_batch.py` writes with locks, reads
# back, and causes a conflict.
pytestmark = [pytest.mark.spark, pytest.mark.slow]

COUNT = 200_000
ROW_BYTES = 80
SERVERS, STORAGES = 2, 3


@dataclass(frozen=True)
class WaltzAndSpark:
    """A Waltz cluster and a Spark cluster."""

    waltz: waltz_core.local.LocalCluster
    spark: StandaloneSpark

    def ports(self, kind: str) -> tuple[int, ...]:
        """Return the ports at which members of a kind listen for clients."""
        return tuple(member.port for member in self.waltz.members if member.kind == kind)

    @property
    def hosts(self) -> set[str]:
        """The addresses of Spark's workers."""
        return {worker_host.address for worker_host in self.spark.worker_hosts}

    def total(self, metric: str) -> float:
        """Return a counter's sum over its labels and over all daemons that have it."""
        found = 0.0
        kind = metric.split("_")[1]
        for member in (each for each in self.waltz.members if each.kind == kind):
            url = f"http://{self.spark.hub.address}:{member.http_port}/metrics"
            with urllib.request.urlopen(url, timeout=TEST_TIMEOUT_S) as page:
                lines = page.read().decode().splitlines()
            found += sum(float(line.split()[-1]) for line in lines if line.startswith(metric))
        return found


@pytest.fixture(scope="module")
def programs(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[WaltzAndSpark]:
    directory = tmp_path_factory.mktemp("standalone")
    with simulated_hosts() as (hub, *worker_hosts), hub.enter():
        if not hub.has_own_network:
            plugins = request.config.pluginmanager
            with plugins.get_plugin("capturemanager").global_and_fixture_disabled():
                notice = "no network namespaces here: Spark's workers share the loopback"
                plugins.get_plugin("terminalreporter").write_line(notice)
        with (
            waltz_core.local.running_cluster(
                host=hub.address,
                insecure_network=True,
                server_count=SERVERS,
                storage_count=STORAGES,
            ) as waltz,
            StandaloneSpark(directory, hub, (worker_hosts[0], worker_hosts[1])).running() as spark,
        ):
            yield WaltzAndSpark(waltz, spark)


def test_a_job_runs_on_both_workers_and_reads_from_replicas(
    programs: WaltzAndSpark, tmp_path: Path
) -> None:
    ports = programs.ports("server") + programs.ports("storage")
    arguments = (programs.waltz.connect, str(tmp_path), str(COUNT))
    job = programs.spark.submit("cluster_job.py", *arguments, ports=ports)
    assert job.report == {
        "committed": COUNT,
        "results": COUNT,
        "read": COUNT,
        "differing": 0,
        "refused": 100,
        "taken": 100,
        # out of conf/spark-defaults.conf
        "zone": "UTC",
        "rows_in_batch": "10000",
    }
    assert {attempt["Host"] for attempt in job.attempts() if attempt["won"]} == programs.hosts

    # If a task had read through a server, the server would have read its cache, or fetched records.
    assert programs.total("waltz_server_cache_reads_total") == 0
    assert programs.total("waltz_server_fetched_bytes_total") == 0
    assert programs.total("waltz_storage_read_bytes_total") > COUNT * ROW_BYTES

    connections = job.connections
    assert len(connections) >= 2
    for kind in ("server", "storage"):
        connection_count = sum(
            connections[pid][port] for pid in connections for port in programs.ports(kind)
        )
        assert 0 < connection_count < 2 * len(connections) * len(programs.ports(kind))


def test_executors_that_can_reach_only_the_servers_read_and_write(
    programs: WaltzAndSpark, tmp_path: Path
) -> None:
    """A firewall blocks ZooKeeper and the storages for the executors, but not for the driver."""
    if not programs.spark.hub.has_own_network:
        pytest.skip("separate networks on one machine need network namespaces")
    with WaltzClient(programs.waltz.connect) as client:
        futures = [client.append(b"row") for _ in range(100)]
        assert all(future.result(TEST_TIMEOUT_S) >= 0 for future in futures)
        count = sum(mark + 1 for mark in client.high_water_marks(linearizable=True).values())
    ports = programs.ports("zookeeper") + programs.ports("storage")
    before = programs.total("waltz_server_cache_reads_total")
    with ExitStack() as stack:
        for worker_host in programs.spark.worker_hosts:
            stack.enter_context(worker_host.block_ports(ports))
        job = programs.spark.submit(
            "servers_only_job.py",
            programs.waltz.connect,
            str(tmp_path),
            ports=ports,
            **{"spark.task.maxFailures": "1"},
        )
    assert job.report["read"] == count
    assert programs.total("waltz_server_cache_reads_total") > before
    assert job.connections != {}
    assert all(seen[port] == 0 for seen in job.connections.values() for port in ports)
    # The servers keep the record of a write, so its tasks need no ZooKeeper.
    assert job.report["error"] == ""
    with WaltzClient(programs.waltz.connect) as client:
        marks = client.high_water_marks(linearizable=True)
    assert sum(mark + 1 for mark in marks.values()) == count + 1


def test_two_concurrent_attempts_of_a_task_write_each_row_once(
    programs: WaltzAndSpark, tmp_path: Path
) -> None:
    job = programs.spark.submit(
        "speculation_job.py", programs.waltz.connect, str(tmp_path), imports_tests=True
    )
    assert job.exit_code == 0, job.errors[-6_000:]
    attempts = [attempt for attempt in job.attempts() if attempt["Index"] == SLOW_TASK]
    assert len(attempts) == 2 * len(WRITES)
    for first, second in zip(attempts[::2], attempts[1::2], strict=True):
        assert (second["Attempt"], second["Speculative"]) == (1, True)
        assert first["Host"] != second["Host"]
        assert (first["won"], second["won"]) == (False, True)
    for write in WRITES:
        assert (tmp_path / write / "first continues").exists()  # while the second attempt ran, too
