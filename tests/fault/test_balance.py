"""Balance by load with real servers: a partition with ten times the traffic gets its own server."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.load import show_partitions, wait_until
from tests.time_limits import PATIENT_CLIENT
from waltz_core.client import WaltzClient
from waltz_core.local import LocalCluster, running_cluster

PARTITIONS, HOT = 4, 3
INTERVAL_MS, WINDOW_MS = 200, 3_000
COOLDOWN_MS = 3_600_000
CALM_S = 3 * WINDOW_MS / 1000


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    """Give a cluster whose servers look at loads a few times a second."""
    settings: dict[str, dict[str, object]] = {
        "server": {
            "balance": "load",
            "balance_interval_ms": INTERVAL_MS,
            "balance_window_ms": WINDOW_MS,
            "balance_cooldown_ms": COOLDOWN_MS,
        }
    }
    with running_cluster(
        tmp_path, settings=settings, storage_count=1, partition_count=PARTITIONS
    ) as cluster:
        yield cluster


def owned(cluster: LocalCluster) -> dict[int, tuple[object, object]]:
    """Return owner and generation of each partition."""
    return {
        p: (shown["server"], shown["generation"]) for p, shown in show_partitions(cluster).items()
    }


def is_alone(cluster: LocalCluster) -> bool:
    """Whether the server of the hot partition owns no other partition."""
    owners = {partition: server for partition, (server, _) in owned(cluster).items()}
    return list(owners.values()).count(owners[HOT]) == 1


@pytest.mark.slow
def test_a_partition_with_ten_times_the_load_gets_a_server_of_its_own(
    cluster: LocalCluster,
):
    counts = [0] * PARTITIONS
    is_over = threading.Event()
    wait_until("both servers own two partitions", lambda: {*map(len, _by_server(cluster))} == {2})
    before = owned(cluster)

    def write() -> None:
        with WaltzClient(cluster.connect, PATIENT_CLIENT) as client:
            while not is_over.is_set():
                targets = [HOT] * 9 + list(range(PARTITIONS))
                appended = [client.append(b"x", partition=target) for target in targets]
                for partition, future in zip(targets, appended, strict=True):
                    future.result()
                    counts[partition] += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        wait_until("the hot partition has its own server", lambda: is_alone(cluster))
        is_calm = threading.Event()
        is_calm.wait(CALM_S)  # no event shows that no partition moves, so the test must wait
        after = owned(cluster)
        is_calm.wait(CALM_S)
        assert owned(cluster) == after
        assert is_alone(cluster)
        assert after[HOT] == before[HOT]
        moved = [p for p, (server, _) in after.items() if server != before[p][0]]
        assert len(moved) == 1
        assert [after[p][1] for p in moved] == [before[p][1] + 1 for p in moved]
    finally:
        is_over.set()
        writer.join()
    with WaltzClient(cluster.connect, PATIENT_CLIENT) as client:
        marks = client.high_water_marks(linearizable=True)
    assert [marks[partition] + 1 for partition in range(PARTITIONS)] == counts


def _by_server(cluster: LocalCluster) -> list[list[int]]:
    found: dict[object, list[int]] = {}
    for partition, (server, _) in owned(cluster).items():
        found.setdefault(server, []).append(partition)
    return list(found.values()) if len(found) > 1 else [[]]
