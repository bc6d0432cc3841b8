"""`waltz-core storage` against a whole cluster of processes, as its operator uses it."""

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import run_command
from tests.fault.load import all_engaged, wait_until
from tests.patience import HANG_S
from waltz_core.client import WaltzClient
from waltz_core.cluster.nodes.model import ReplicaAssignments
from waltz_core.cluster.zookeeper.zookeeper_session import connected
from waltz_core.local import LocalCluster, running
from waltz_core.records.record import PartitionId, ReplicaId

pytestmark = pytest.mark.fault


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    where = tmp_path_factory.mktemp("admin") / "waltz"
    with running(where, storage_count=3, server_count=1, partition_count=2) as found:
        yield found


def names(cluster: LocalCluster) -> list[str]:
    return [f"127.0.0.1:{each.port}" for each in cluster.members if each.kind == "storage"]


def storage(*words: str) -> subprocess.CompletedProcess[str]:
    return run_command("storage", *words)


def done(*words: str) -> object:
    """Run a verb with `--json` and return what it says."""
    found = storage(*words, "--json")
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


def refused(*words: str) -> str:
    """Return the one sentence that a verb fails with."""
    found = storage(*words)
    assert found.returncode == 1, (found.stdout, found.stderr)
    assert "Traceback" not in found.stderr
    (sentence,) = found.stderr.strip().splitlines()
    return sentence


def append(cluster: LocalCluster, count: int) -> int:
    """Append to partition 0 and return the last id."""
    with WaltzClient(cluster.connect) as client:
        futures = [client.append(b"x" * 100, partition=0) for _ in range(count)]
        return max(future.result(HANG_S) for future in futures)


def replica(cluster: LocalCluster, name: str, partition: int = 0) -> dict[str, object]:
    listed = done("list", "--connect", cluster.connect, "--storage", name)
    assert isinstance(listed, dict)
    (found,) = [each for each in listed["replicas"] if each["partition"] == partition]
    assert isinstance(found, dict)
    return found


def is_level(cluster: LocalCluster, name: str, last: int) -> bool:
    found = replica(cluster, name)
    return (found["state"], found["last"]) == ("online", last)


def test_all_is_well_and_in_step(cluster: LocalCluster):
    at = ("--connect", cluster.connect)
    # A cluster takes appends when a quorum of its storages runs.
    wait_until("all run", lambda: storage("validate", *at).returncode == 0)
    validated = done("validate", *at)
    assert isinstance(validated, dict)
    assert validated["is_healthy"]
    assert set(validated["storages"]) == set(names(cluster))
    assert done("sync-partitions", *at) == {"is_done": True, "steps": []}
    listed = done("list", *at)
    assert isinstance(listed, dict)
    assert len(listed["replicas"]) == 6
    assert {each["state"] for each in listed["replicas"]} == {"online"}
    last = append(cluster, 50)
    ids = done("max-transaction-id", *at, "--storage", names(cluster)[0], "--partition", "0-1")
    assert ids == {"0": last, "1": -1}


def test_a_replica_is_emptied_copied_and_returns(cluster: LocalCluster):
    one, other = names(cluster)[:2]
    at = ("--connect", cluster.connect, "--storage", other, "--partition", "0")
    last = append(cluster, 200)
    assert "found it engaged in session" in refused("re-seed", *at)
    done("availability", *at, "--online", "false")
    wait_until("the others go on", lambda: append(cluster, 1) > last)
    mark = replica(cluster, one)["low_water_mark"]
    assert "expected partition 0 to be offline" in refused(
        *("recover-partition", "--connect", cluster.connect, "--storage", one),
        *("--partition", "0", "--from", other),
    )
    done("re-seed", *at)
    found = replica(cluster, other)
    assert (found["state"], found["last"]) == ("offline, suspect", -1)
    steps = done("recover-partition", *at, "--from", one, "--batch-bytes", "5000")
    assert steps == [{"partition": 0, "last before": -1, "last after": mark}]
    done("availability", *at, "--online", "true")
    last = append(cluster, 10)
    wait_until("it is level", lambda: is_level(cluster, other, last))


def test_a_suspect_replica_is_trusted_again_after_a_session(cluster: LocalCluster):
    name = names(cluster)[2]
    at = ("--connect", cluster.connect, "--storage", name, "--partition", "0")
    wait_until("it takes part", lambda: all_engaged(cluster))
    before = replica(cluster, name)["session"]
    done("mark-suspect", *at)
    last = append(cluster, 10)
    wait_until("it is level", lambda: is_level(cluster, name, last))
    assert replica(cluster, name)["session"] > before, "it was not marked suspect"


def assign(cluster: LocalCluster, held: dict[str, tuple[int, ...]]) -> None:
    async def main() -> None:
        async with connected(cluster.connect) as coordinator:
            partitions = {
                ReplicaId(name): tuple(map(PartitionId, each)) for name, each in held.items()
            }
            await coordinator.update_replica_assignment(lambda _: ReplicaAssignments(partitions))

    asyncio.run(main())


def test_a_partition_moves_away_and_returns(cluster: LocalCluster):
    one, other, third = names(cluster)
    at = ("--connect", cluster.connect, "--storage", third, "--partition", "1")
    assert "found it assigned" in refused("remove-partition", *at, "--delete-files")
    assign(cluster, {one: (0, 1), other: (0, 1), third: (0,)})
    wait_until(
        "it is left out",
        lambda: storage("remove-partition", *at, "--delete-files").returncode == 0,
    )
    directory = Path(cluster.directory) / "storage-3" / "1"
    assert list(directory.iterdir()) == []
    assert "not assigned" in refused("max-transaction-id", *at)
    assert done("sync-partitions", "--connect", cluster.connect) == {"is_done": True, "steps": []}
    assign(cluster, {one: (0, 1), other: (0, 1), third: (0, 1)})
    wait_until("it is held", lambda: storage("max-transaction-id", *at).returncode == 0)
    assert done("add-partition", *at) == {"storage": third, "verb": "add-partition", "done": [1]}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("list",), "expected --admin HOST:ADMIN_PORT, or --connect"),
        (("list", "--admin", "127.0.0.1"), "expected host:port"),
        (("list", "--admin", "127.0.0.1:1"), "127.0.0.1:1"),
        (("list", "--admin", "127.0.0.1:1", "--storage", "x:1"), "found both"),
        (("re-seed", "--admin", "127.0.0.1:1", "--partition", "x"), "ranges such as 0-6,7"),
        (("re-seed", "--admin", "127.0.0.1:1", "--partition", "3-1"), "a range that rises"),
    ],
)
def test_invalid_requests_are_reported_in_a_sentence(words: tuple[str, ...], sentence: str):
    assert sentence in refused(*words)


def test_a_storage_that_is_none_of_the_clusters_is_reported(cluster: LocalCluster):
    at = ("--connect", cluster.connect, "--partition", "0")
    assert "expected a storage of this cluster" in refused("re-seed", *at, "--storage", "no:1")
    assert "expected --storage HOST:PORT in addition to --connect" in refused("re-seed", *at)
    port = next(each.port for each in cluster.members if each.kind == "storage")
    assert "expected a storage's admin port, found a 'Waltz Storage Server'" in refused(
        "list", "--admin", f"127.0.0.1:{port}"
    )
