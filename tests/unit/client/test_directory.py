"""Directories of owners: with a given layout, and with concurrent lookups."""

import asyncio
from types import SimpleNamespace
from uuid import UUID

import pytest

from tests.loops import run_in_virtual_time
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core import errors
from waltz_core.client import AsyncWaltzClient
from waltz_core.client.links.directory import (
    ClusterInfo,
    ClusterLayout,
    FixedDirectory,
    Owner,
    ZooKeeperDirectory,
)
from waltz_core.cluster.membership.registration import Ownership, ServersView
from waltz_core.cluster.znodes.model import GroupDescriptor, ServerDescriptor
from waltz_core.cluster.znodes.restore_sources import NO_RESTORE_SOURCES
from waltz_core.config import ClientConfig
from waltz_core.records.record import ReplicaId

CLUSTER = ClusterInfo("shop", bytes(16), 3)
LAYOUT = ClusterLayout("zk:2181/shop", CLUSTER, {0: ("a:1", 1), 2: ("b:2", 4)})
CONNECT = "waltz_core.client.links.directory.zookeeper_session.connect"


def directory_of(zookeeper):
    return ZooKeeperDirectory("zk:2181/shop", connect_timeout_ms=20_000, coordinator=zookeeper)


def test_a_task_gets_the_owner_of_its_own_partition_only():
    assert LAYOUT.for_partition(2) == ClusterLayout("zk:2181/shop", CLUSTER, {2: ("b:2", 4)})
    assert LAYOUT.for_partition(1) == ClusterLayout("zk:2181/shop", CLUSTER, {})


def test_newer_owners_in_a_layout_are_used_without_a_request_and_reported():
    directory = FixedDirectory(LAYOUT.for_partition(0), connect_timeout_ms=1)
    reported = []
    run_in_virtual_time(directory.open(lambda owners: reported.append(dict(owners))))
    before = directory.owners
    for layout in (
        LAYOUT,
        *(ClusterLayout("zk:2181/shop", CLUSTER, {0: ("gone:9", old)}) for old in (0, 1)),
        ClusterLayout("zk:2181/shop", CLUSTER, {0: ("new:9", 2), 2: ("b:2", 4)}),
    ):
        directory.add_owners(layout)
    assert directory.owners == {0: Owner("new:9", 2), 2: Owner("b:2", 4)}
    assert reported == [{2: Owner("b:2", 4)}, {0: Owner("new:9", 2)}]
    assert run_in_virtual_time(directory.owner(2, after_failure=False)) == Owner("b:2", 4)
    assert before == {0: Owner("a:1", 1)}  # another thread may still iterate over it


class AnsweringZooKeeper:
    """A ZooKeeper that answers when the test permits it, and counts its callers."""

    connect_string = "zk:2181/shop"

    def __init__(self, error=None):
        self.count = 0
        self.error = error
        self.may_answer = asyncio.Event()

    async def read_servers(self):
        self.count += 1
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        server = ServerDescriptor(7, "a", 1)
        return ServersView({7: server}, {n: Ownership(7, 3) for n in range(3)}, is_settled=True)


async def request_concurrently(zookeeper, count, *, cancelled=None):
    """Send several requests at once; return the answers, and None for the cancelled request."""
    directory = directory_of(zookeeper)

    async def look_up(partition):
        try:
            return await directory.owner(partition, after_failure=True)
        except errors.WaltzError as error:
            return error

    async with asyncio.timeout(TEST_TIMEOUT_S), asyncio.TaskGroup() as group:
        tasks = [group.create_task(look_up(number)) for number in range(count)]
        while zookeeper.count == 0:  # noqa: ASYNC110 - the first one queries
            await asyncio.sleep(0)
        if cancelled is not None:
            tasks[cancelled].cancel()
            await asyncio.wait([tasks[cancelled]])
        zookeeper.may_answer.set()
    return [None if task.cancelled() else task.result() for task in tasks]


OWNER = Owner("a:1", 3)


def test_a_cancelled_caller_of_a_shared_request_does_not_cancel_the_other_callers():
    zookeeper = AnsweringZooKeeper()
    assert run_in_virtual_time(request_concurrently(zookeeper, 3, cancelled=1)) == [
        OWNER,
        None,
        OWNER,
    ]
    assert zookeeper.count == 1


def test_a_waiting_caller_queries_zookeeper_if_the_querying_caller_is_cancelled():
    zookeeper = AnsweringZooKeeper()
    assert run_in_virtual_time(request_concurrently(zookeeper, 3, cancelled=0)) == [
        None,
        OWNER,
        OWNER,
    ]
    assert zookeeper.count == 2


def test_all_callers_of_a_shared_request_get_its_failure():
    zookeeper = AnsweringZooKeeper(errors.CoordinatorUnavailable("gone"))
    assert run_in_virtual_time(request_concurrently(zookeeper, 3)) == [zookeeper.error] * 3
    assert zookeeper.count == 1


class ZooKeeperWithViews(AnsweringZooKeeper):
    """A ZooKeeper that answers at once with the given views, one after the other."""

    def __init__(self, *views):
        super().__init__()
        self.views = list(views)

    async def read_servers(self):
        self.count += 1
        return self.views.pop(0)


def view(server_id=7, *, host="a", is_settled=True):
    server = ServerDescriptor(server_id, host, 1)
    return ServersView({server_id: server}, {0: Ownership(server_id, 3)}, is_settled=is_settled)


def test_an_owner_is_ignored_if_the_assignment_does_not_match_the_live_servers():
    zookeeper = ZooKeeperWithViews(view(is_settled=False), view())
    directory = directory_of(zookeeper)
    with pytest.raises(errors.NotOwned):
        run_in_virtual_time(directory.owner(0, after_failure=True))
    assert directory.owners == {}
    assert run_in_virtual_time(directory.owner(0, after_failure=True)) == OWNER


def test_function_read_current_owner_rejects_an_outdated_assignment():
    requests = []

    class ZooKeeper:
        connect_string = "zk:2181/shop"

        async def read_latest_servers(self):
            requests.append("now")
            return view(host="b", is_settled=len(requests) > 1)

    directory = directory_of(ZooKeeper())

    async def scenario():
        with pytest.raises(errors.NotOwned, match="has no owner yet: ZooKeeper"):
            await directory.read_current_owner(0)
        return await directory.read_current_owner(0)

    assert run_in_virtual_time(scenario()) == Owner("b:1", 3)
    assert not directory.owners  # an answer that changes no owner


def test_zookeeper_is_queried_again_only_after_the_known_owner_has_failed():
    zookeeper = ZooKeeperWithViews(view(), view(8, host="b"))
    directory = directory_of(zookeeper)
    for after_failure, owner, count in (
        (False, OWNER, 1),
        (False, OWNER, 1),
        (True, Owner("b:1", 3), 2),
    ):
        assert run_in_virtual_time(directory.owner(0, after_failure=after_failure)) == owner
        assert zookeeper.count == count


class OtherCluster:
    """A ZooKeeper with the cluster of another key."""

    connect_string = "zk:2181/shop"
    key = bytes([1] * 16)
    generation = 9
    open_count = 0

    def __init__(self):
        OtherCluster.open_count += 1

    async def read_cluster(self):
        params = SimpleNamespace(name="shop", partition_count=3)
        store = SimpleNamespace(cluster_key=SimpleNamespace(bytes=self.key))
        return SimpleNamespace(params=params, store=store)

    async def read_restore_sources(self):
        return NO_RESTORE_SOURCES

    async def read_servers(self):
        owners = {partition: Ownership(7, self.generation) for partition in range(3)}
        return ServersView({7: ServerDescriptor(7, "z", 1)}, owners, is_settled=True)

    async def close(self):
        OtherCluster.open_count -= 1


def test_another_cluster_at_the_same_address_is_rejected(monkeypatch):
    """A second caller is rejected, too, and the session at the other cluster is closed."""

    async def connect(*_place, **_options):
        return OtherCluster()

    async def look_up_twice():
        directory = FixedDirectory(LAYOUT, connect_timeout_ms=1_000)
        await directory.open(reported.append)
        for _ in range(2):
            with pytest.raises(
                errors.ClusterKeyMismatch, match="than before: expected cluster key 00"
            ):
                await directory.owner(0, after_failure=True)
        # The servers of the other cluster do not become owners.
        assert await directory.owner(0, after_failure=False) == Owner("a:1", 1)
        await directory.close()

    reported = []
    monkeypatch.setattr(CONNECT, connect)
    run_in_virtual_time(look_up_twice())
    assert OtherCluster.open_count == 0
    assert reported == []


class OutdatedZooKeeper(OtherCluster):
    """A ZooKeeper that has the right cluster, and answers with outdated data."""

    key = CLUSTER.key
    generation = 3


def test_a_late_answer_of_zookeeper_does_not_replace_newer_owners(monkeypatch):
    async def connect(*_place, **_options):
        return OutdatedZooKeeper()

    async def look_up():
        directory = FixedDirectory(LAYOUT, connect_timeout_ms=1_000)
        await directory.open(lambda owners: reported.append(dict(owners)))
        await directory.owner(1, after_failure=False)
        assert directory.owners == {0: Owner("z:1", 3), 1: Owner("z:1", 3), 2: Owner("b:2", 4)}
        await directory.owner(2, after_failure=True)
        await directory.close()
        return await directory.owner(2, after_failure=False)

    reported = []
    monkeypatch.setattr(CONNECT, connect)
    assert run_in_virtual_time(look_up()) == Owner("b:2", 4)
    assert reported == [{0: Owner("z:1", 3), 1: Owner("z:1", 3)}]


def test_a_request_during_the_close_leaves_no_session_behind(monkeypatch):
    async def connect(*_place, **_options):
        await may_connect.wait()
        return OutdatedZooKeeper()

    async def look_up_and_close():
        directory = FixedDirectory(LAYOUT, connect_timeout_ms=1_000)
        await directory.open(lambda _owners: None)

        async def look_up():
            with pytest.raises(errors.UsageError, match="the client is closed"):
                await directory.owner(1, after_failure=True)

        async with asyncio.TaskGroup() as group:
            group.create_task(look_up())
            await asyncio.sleep(0)
            await directory.close()
            may_connect.set()
        await look_up()

    may_connect = asyncio.Event()
    monkeypatch.setattr(CONNECT, connect)
    run_in_virtual_time(look_up_and_close())
    assert OtherCluster.open_count == 0


class ZooKeeperWithGroups:
    """A ZooKeeper that counts requests for groups."""

    def __init__(self):
        self.count = 0
        self.groups = {ReplicaId("s1:1"): 1, ReplicaId("s2:1"): 2}

    async def read_groups(self):
        self.count += 1
        return GroupDescriptor(dict(self.groups))


def test_groups_are_read_again_only_for_an_unknown_storage():
    zookeeper = ZooKeeperWithGroups()
    directory = directory_of(zookeeper)

    async def look_up(*storages):
        return await directory.groups(storages)

    for _ in range(3):
        assert run_in_virtual_time(look_up("s1:1", "s2:1")) == {"s1:1": 1, "s2:1": 2}
    assert zookeeper.count == 1
    zookeeper.groups[ReplicaId("s3:1")] = 2
    assert run_in_virtual_time(look_up("s2:1", "s3:1"))["s3:1"] == 2
    assert run_in_virtual_time(look_up("s1:1", "s3:1"))["s1:1"] == 1
    assert zookeeper.count == 2


def test_a_request_to_a_closed_directory_fails():
    directory = directory_of(OutdatedZooKeeper())

    async def close_and_look_up():
        await directory.close()
        await directory.owner(0, after_failure=True)

    with pytest.raises(errors.UsageError, match="the client is closed"):
        run_in_virtual_time(close_and_look_up())


class UnsettledZooKeeper(OutdatedZooKeeper):
    """A ZooKeeper whose servers have just changed."""

    async def read_servers(self):
        return view(is_settled=False)


def test_a_reopened_directory_forgets_the_owners_of_the_earlier_session(monkeypatch):
    """The earlier session may have been at another cluster."""

    async def connect(*_place, **_options):
        return sessions.pop(0)()

    async def open_twice():
        directory = directory_of(None)
        for _ in range(2):
            await directory.open(lambda _owners: None)
            seen.append(len(directory.owners))
            await directory.close()

    sessions, seen = [OutdatedZooKeeper, UnsettledZooKeeper], []
    monkeypatch.setattr(CONNECT, connect)
    run_in_virtual_time(open_twice())
    assert seen == [3, 0]


class SlowConnect:
    """Completes a connection when the test permits it, and counts the requests."""

    def __init__(self, error=None):
        self.count = 0
        self.error = error
        self.may_connect = asyncio.Event()

    async def __call__(self, *_place, **_options):
        self.count += 1
        await self.may_connect.wait()
        if self.error is not None:
            raise self.error
        return OutdatedZooKeeper()


def test_a_caller_that_times_out_does_not_restart_the_connection_attempt(monkeypatch):
    async def look_up():
        directory = FixedDirectory(LAYOUT, connect_timeout_ms=20_000)
        for _ in range(2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await directory.owner(0, after_failure=True)
        slow_connect.may_connect.set()
        assert await directory.owner(0, after_failure=True) == Owner("z:1", 3)
        await directory.close()

    slow_connect = SlowConnect()
    monkeypatch.setattr(CONNECT, slow_connect)
    run_in_virtual_time(look_up())
    assert slow_connect.count == 1
    assert OtherCluster.open_count == 0


def test_all_waiting_callers_get_the_error_of_an_unavailable_zookeeper(monkeypatch):
    """If each caller tried by itself, it would wait for all callers before it."""

    async def look_up():
        directory = FixedDirectory(LAYOUT, connect_timeout_ms=20_000)

        async def expect_error(partition):
            with pytest.raises(errors.CoordinatorUnavailable, match="refused"):
                await directory.owner(partition, after_failure=True)

        async with asyncio.TaskGroup() as group:
            for partition in range(3):
                group.create_task(expect_error(partition))
            while slow_connect.count == 0:  # noqa: ASYNC110 - the first one queries
                await asyncio.sleep(0)
            slow_connect.may_connect.set()

    slow_connect = SlowConnect(errors.CoordinatorUnavailable("refused"))
    monkeypatch.setattr(CONNECT, slow_connect)
    run_in_virtual_time(look_up())
    assert slow_connect.count == 1


def test_closing_ends_requests_that_wait_for_zookeeper(monkeypatch):
    async def look_up_and_close():
        directory = FixedDirectory(LAYOUT, connect_timeout_ms=20_000)

        async def look_up():
            with pytest.raises(errors.UsageError, match="the client is closed"):
                await directory.owner(0, after_failure=True)

        async with asyncio.timeout(TEST_TIMEOUT_S), asyncio.TaskGroup() as group:
            group.create_task(look_up())
            while slow_connect.count == 0:  # noqa: ASYNC110 - it queries
                await asyncio.sleep(0)
            await directory.close()
            await directory.close()
        assert len(asyncio.all_tasks()) == 1

    slow_connect = SlowConnect()
    monkeypatch.setattr(CONNECT, slow_connect)
    run_in_virtual_time(look_up_and_close())


def test_a_client_with_a_layout_uses_its_configured_timeouts_for_zookeeper(monkeypatch):
    async def connect(*_place, **options):
        requests.append(options)
        return OutdatedZooKeeper()

    async def look_up():
        config = ClientConfig(
            zookeeper_connect_timeout_ms=7_000, zookeeper_session_timeout_ms=9_000
        )
        async with AsyncWaltzClient.at(LAYOUT, config) as client:
            monkeypatch.setattr(OutdatedZooKeeper, "follow_servers", follow, raising=False)
            await client.directory.owner(0, after_failure=True)

    async def follow(*_):
        pass

    requests = []
    monkeypatch.setattr(CONNECT, connect)
    run_in_virtual_time(look_up())
    assert requests == [{"connect_timeout_ms": 7_000, "session_timeout_ms": 9_000}]
    assert OtherCluster.open_count == 0


class RebuiltZooKeeper(ZooKeeperWithViews):
    """A ZooKeeper whose cluster is missing for a while after the directory was opened."""

    def __init__(self):
        super().__init__()
        self.key = UUID(int=7)
        self.is_missing = False

    async def read_cluster(self):
        self._check()
        params = SimpleNamespace(name="shop", partition_count=3)
        return SimpleNamespace(params=params, store=SimpleNamespace(cluster_key=self.key))

    async def read_restore_sources(self):
        return NO_RESTORE_SOURCES

    async def read_servers(self):
        self._check()
        return view()

    async def follow_servers(self, callback):
        self._check()
        callback(view(host="followed"))

    def _check(self):
        if self.is_missing:
            raise errors.ClusterNotFound("no cluster at root /shop")


def reopen_after_missing_cluster(zookeeper):
    """Return a directory whose cluster was missing for a while after it was opened."""

    async def open_and_lose_cluster():
        directory = directory_of(zookeeper)
        await directory.open(lambda _owners: None)
        zookeeper.is_missing = True
        for look_up in (lambda: directory.owner(0, after_failure=True), directory.run):
            with pytest.raises(
                errors.CoordinatorUnavailable,
                match="of this client does not exist any more: no clu",
            ):
                await look_up()
        zookeeper.is_missing = False
        return directory

    return run_in_virtual_time(open_and_lose_cluster())


def test_a_directory_finds_owners_again_after_a_rebuild_with_the_same_cluster_key():
    zookeeper = RebuiltZooKeeper()
    directory = reopen_after_missing_cluster(zookeeper)
    assert run_in_virtual_time(directory.owner(0, after_failure=True)) == OWNER
    run_in_virtual_time(directory.run())
    assert directory.owners == {0: Owner("followed:1", 3)}


def test_a_node_that_cannot_be_decoded_counts_as_no_answer():
    """An error that is not retried would end streams and feeds permanently."""
    zookeeper = RebuiltZooKeeper()
    directory = directory_of(zookeeper)
    run_in_virtual_time(directory.open(lambda _owners: None))

    async def raise_bad_format():
        raise errors.BadFormat("/shop/serverDescriptors/s_0: rotten")

    zookeeper.read_servers = zookeeper.read_latest_servers = raise_bad_format
    for look_up in (
        lambda: directory.owner(0, after_failure=True),
        lambda: directory.read_current_owner(0),
    ):
        with pytest.raises(
            errors.CoordinatorUnavailable, match=r"a znode of the cluster is damaged: .*s_0: rotten"
        ):
            run_in_virtual_time(look_up())


def test_a_directory_rejects_another_cluster_that_replaces_a_missing_cluster():
    zookeeper = RebuiltZooKeeper()
    directory = reopen_after_missing_cluster(zookeeper)
    zookeeper.key = UUID(int=8)
    for look_up in (lambda: directory.owner(0, after_failure=True), directory.run):
        with pytest.raises(errors.ClusterKeyMismatch, match=f"key {UUID(int=7).hex}"):
            run_in_virtual_time(look_up())


def test_opening_a_directory_fails_at_once_if_the_cluster_does_not_exist():
    zookeeper = RebuiltZooKeeper()
    zookeeper.is_missing = True
    directory = directory_of(zookeeper)

    async def close():
        pass

    zookeeper.close = close
    with pytest.raises(errors.ClusterNotFound):
        run_in_virtual_time(directory.open(lambda _owners: None))
