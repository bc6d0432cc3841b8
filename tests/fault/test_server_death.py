"""A server dies, and no other server waits for its ZooKeeper session."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.load import Story, owners, wait_until
from waltz_core.local import running

# Nothing in this file may take so long.
SESSION_MS = 60_000


@pytest.fixture
def story(tmp_path: Path) -> Iterator[Story]:
    """Give a cluster whose sessions outlive every test."""
    settings: dict[str, dict[str, object]] = {
        "server": {"zookeeper_session_timeout_ms": SESSION_MS}
    }
    with running(tmp_path, settings=settings, storage_count=1, server_count=3) as cluster:
        yield Story(cluster)


def test_partitions_of_a_killed_server_move_at_once(story: Story):
    killed = story.cluster.member("server-1")
    others = {
        f"127.0.0.1:{each.port}"
        for each in story.cluster.members
        if each.kind == "server" and each is not killed
    }
    wait_until("all three own some", lambda: len(owners(story.cluster)) == 3)
    with story.load() as load:
        load.await_commits()
        story.cluster.kill("server-1")
        wait_until("the others own all", lambda: owners(story.cluster) == others)
        load.await_commits()
        # The last one has no server to report it; but it is there, and one killed together with it
        # leaves everything to it.
        story.cluster.kill("server-2")
        wait_until("one owns all", lambda: len(owners(story.cluster)) == 1)
        load.await_commits()
    log = story.cluster.log_path("server-3").read_text(encoding="utf-8")
    assert re.search(r"neighbors\.removed server=\d+ address=127\.0\.0\.1:\d+", log)
    story.check_agrees()
