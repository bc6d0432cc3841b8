"""When a server dies, the others take over before its ZooKeeper session expires."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.load import Scenario, owner_addresses, wait_until
from waltz_core.local import running_cluster

# A session timeout that is longer than any step in this file.
SESSION_MS = 60_000


@pytest.fixture
def scenario(tmp_path: Path) -> Iterator[Scenario]:
    """Give a cluster whose sessions outlive every test."""
    settings: dict[str, dict[str, object]] = {
        "server": {"zookeeper_session_timeout_ms": SESSION_MS}
    }
    with running_cluster(tmp_path, settings=settings, storage_count=1, server_count=3) as cluster:
        yield Scenario(cluster)


def test_partitions_of_a_killed_server_move_at_once(scenario: Scenario):
    killed = scenario.cluster.member("server-1")
    others = {
        f"127.0.0.1:{member.port}"
        for member in scenario.cluster.members
        if member.kind == "server" and member is not killed
    }
    wait_until(
        "all three servers own partitions", lambda: len(owner_addresses(scenario.cluster)) == 3
    )
    with scenario.load() as load:
        load.await_commits()
        scenario.cluster.kill("server-1")
        wait_until(
            "the other servers own all partitions",
            lambda: owner_addresses(scenario.cluster) == others,
        )
        load.await_commits()
        # If two of three servers die, the last server takes over their partitions. If the last
        # server dies, no other server can report its death.
        scenario.cluster.kill("server-2")
        wait_until(
            "one server owns all partitions", lambda: len(owner_addresses(scenario.cluster)) == 1
        )
        load.await_commits()
    log = scenario.cluster.log_path("server-3").read_text(encoding="utf-8")
    assert re.search(r"server\.dead_peer_removed server=\d+ address=127\.0\.0\.1:\d+", log)
    scenario.check_outcomes_against_log()
