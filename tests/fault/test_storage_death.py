"""Storages and servers are killed, paused and started again in the middle of a load.

No reported outcome may be wrong, and everything becomes whole by itself.
"""

import signal

import pytest

from tests.fault.load import Story, shown, wait_until
from tests.patience import HANG_S
from waltz_core.client import WaltzClient

pytestmark = pytest.mark.fault
STORAGES = ("storage-1", "storage-2", "storage-3")


@pytest.mark.parametrize("victim", STORAGES)
def test_a_killed_storage_is_whole_again_by_itself(story: Story, victim: str):
    with story.load() as load:
        load.await_commits()
        story.cluster.kill(victim)
        load.await_commits(1_000)
        story.cluster.start(victim)
        load.await_commits()
    story.check_whole()
    story.check_agrees()


def test_without_a_quorum_nothing_is_reported_wrong_and_it_resumes(story: Story):
    with story.load() as load:
        load.await_commits()
        story.cluster.kill("storage-1")
        story.cluster.kill("storage-3")
        recorded_count = len(load.ledger)
        committed = load.committed
        story.cluster.start("storage-3")
        load.await_commits()
        assert load.committed > committed
        assert len(load.ledger) > recorded_count
        story.cluster.start("storage-1")
        load.await_commits()
    story.check_whole()
    story.check_agrees()


def test_appends_stop_without_a_quorum(story: Story):
    """With one storage left, only earlier appends and unknown outcomes are reported."""
    with story.load() as load:
        load.await_commits()
        story.cluster.kill("storage-2")
        story.cluster.kill("storage-3")
        with WaltzClient(story.cluster.connect) as client:
            futures = [client.append(story.row(each), partition=each) for each in range(4)]
            assert not any(each.done() for each in futures)
            story.cluster.start("storage-2")
            story.cluster.start("storage-3")
            assert all(each.result(HANG_S) >= 0 for each in futures)
        load.await_commits()
    story.check_whole()
    story.check_agrees()


def test_all_storages_killed_at_once(story: Story):
    with story.load() as load:
        load.await_commits()
        for name in STORAGES:
            story.cluster.member(name).process().send_signal(signal.SIGKILL)
        for name in STORAGES:
            story.cluster.kill(name)
        for name in STORAGES:
            story.cluster.start(name)
        load.await_commits()
    story.check_whole()
    story.check_agrees()


def test_clients_of_a_killed_server_move_to_the_other(story: Story):
    with story.load() as load:
        load.await_commits()
        story.cluster.kill("server-1")
        load.await_commits(1_000)
        wait_until("one server owns all", lambda: len(owners(story)) == 1)
        load.await_commits()
        story.cluster.start("server-1")
        wait_until("both servers own some", lambda: len(owners(story)) == 2)
        load.await_commits()
    story.check_whole()
    story.check_agrees()


def test_a_server_that_slept_too_long_gets_nothing_in(story: Story):
    sleeper = story.cluster.member("server-2")
    address = f"127.0.0.1:{sleeper.port}"
    wait_until("both servers own some", lambda: len(owners(story)) == 2)
    moved = [int(each) for each, part in partitions(story).items() if part["server"] == address]
    with story.load() as load:
        load.await_commits()
        story.cluster.kill("server-2", signal.SIGSTOP)
        try:
            wait_until("it has lost its partitions", lambda: address not in owners(story))
            load.await_commits(1_000)
            with WaltzClient(story.cluster.connect) as client:
                seen = {each: client.replicas(each, linearizable=True) for each in moved}
        finally:
            story.cluster.kill("server-2", signal.SIGCONT)
        load.await_commits(1_000)
    assert moved
    with WaltzClient(story.cluster.connect) as client:
        for each in moved:
            first = seen[each].high_water_mark + 1
            last = client.high_water_mark(each, linearizable=True)
            assert last >= first
            for chunk in client.read_range(each, first, last):
                assert all(entry.session_id >= seen[each].session_id for entry in chunk.lineage)
    story.check_whole()
    story.check_agrees()


def partitions(story: Story) -> dict[str, dict[str, object]]:
    found = shown(story.cluster)["partitions"]
    assert isinstance(found, dict)
    return found


def owners(story: Story) -> set[object]:
    return {each["server"] for each in partitions(story).values()}
