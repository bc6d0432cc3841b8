"""ZooKeeper's data is lost, then all replicas are suspect, then all disks but one are lost.

The tests go on from one another: each leaves a cluster that takes appends.
"""

import shutil
import signal
from collections.abc import Iterator

import pytest

from tests.fault.changing import address, begin, check_level, does, end, refuses, replicas
from tests.fault.conftest import SESSION_MS
from tests.fault.load import Story, wait_until
from waltz_core.client import WaltzClient
from waltz_core.local import running

pytestmark = pytest.mark.fault
STORAGES = ("storage-1", "storage-2", "storage-3")


@pytest.fixture(scope="module")
def module_story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """Give a cluster whose storages do not vouch for their logs after a crash."""
    settings: dict[str, dict[str, object]] = {
        "server": {"zookeeper_session_timeout_ms": SESSION_MS},
        "storage": {"zookeeper_session_timeout_ms": SESSION_MS, "trust_fsync": False},
    }
    with running(tmp_path_factory.mktemp("cluster"), settings=settings) as cluster:
        yield Story(cluster)


def test_a_new_zookeeper_learns_from_the_storages(story: Story):
    cluster = story.cluster
    with story.load() as load:
        load.goes_on()
    for member in reversed(cluster.members):
        cluster.kill(member.name, signal.SIGTERM)
    shutil.rmtree(cluster.directory / "zookeeper" / "version-2")
    cluster.start("zookeeper")
    named = []
    for name in STORAGES:
        member = cluster.member(name)
        named += ["--storage", f"127.0.0.1:{member.port}:{member.admin_port}"]
    directory = str(cluster.directory / "storage-2")
    rebuild = ("rebuild-metadata", *named, "--from-directory", directory)
    # Broken off by its time limit, the command says what it waits for, and goes on later.
    waited = refuses(cluster, *rebuild, "--timeout", "3")
    assert f"{address(cluster, 'storage-1')}" in waited
    assert "to answer: start it, or say --missing" in waited
    command = begin(cluster, *rebuild)
    for name in (*STORAGES, "server-1", "server-2"):
        cluster.start(name)
    told = end(command)
    assert told.code == 0, told
    assert len(told.told["partitions"]) == cluster.partition_count
    with story.load() as load:
        load.goes_on()
    check_level(story)
    story.check_agrees()
    story.check_whole()
    assert "nothing is to rebuild" in refuses(cluster, *rebuild)


def test_replicas_that_are_all_suspect_are_accepted_by_command(story: Story):
    cluster = story.cluster
    with story.load() as load:
        load.goes_on()
    for name in STORAGES:
        cluster.member(name).process().send_signal(signal.SIGKILL)
    for name in STORAGES:
        cluster.kill(name)
    for name in STORAGES:
        cluster.start(name)
    wait_until("no partition is open", lambda: not_passed(story))
    shown = does(cluster, "accept-replicas", "0")
    assert all(each["is_suspect"] for each in shown["replicas"].values())
    assert not_passed(story), "showing has changed something"
    for partition in range(cluster.partition_count):
        told = does(cluster, "accept-replicas", str(partition), "--yes")
        assert told["chosen"] in told["replicas"]
    with story.load() as load:
        load.goes_on()
    story.check_whole()
    story.check_agrees()


def not_passed(story: Story) -> bool:
    """Tell whether `verify` finds every partition without a quorum."""
    ran = end(begin(story.cluster, "verify"))
    sentences = [each for each in ran.told["findings"] if "nothing can be appended" in each]
    return len(sentences) == story.cluster.partition_count


def test_the_last_disk_is_accepted_and_a_new_one_takes_an_old_ones_place(story: Story):
    cluster = story.cluster
    last, lost, other = (address(cluster, name) for name in STORAGES)
    with WaltzClient(cluster.connect) as client:
        marks = client.high_water_marks()
    for name in STORAGES[1:]:
        cluster.kill(name)
        shutil.rmtree(cluster.directory / name)
    shown = does(cluster, "accept-replicas", "0")
    assert shown["accepted"] is False
    assert shown["chosen"] == last
    assert set(shown["unheard"]) == {lost, other}
    assert shown["replicas"][last]["synced_max"] == marks[0]
    assert replicas(cluster)[0] == {last, lost, other}
    partitions = range(cluster.partition_count)
    for partition in partitions:
        does(cluster, "accept-replicas", str(partition), "--yes")
    assert replicas(cluster) == {each: {last} for each in partitions}
    with story.load() as load:
        load.goes_on()
        replace = ("replace-storage", lost, lost)
        waited = refuses(cluster, *replace, "--timeout", "2")
        assert f"a storage with an empty directory to start at {lost}" in waited
        cluster.start("storage-2")
        does(cluster, *replace)
        does(cluster, "remove-storage", other)
        does(cluster, "auto-assign", "--replicas", "2")
        load.goes_on()
    assert replicas(cluster) == {each: {last, lost} for each in partitions}
    check_level(story)
    story.check_agrees()
