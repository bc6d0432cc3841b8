"""The contract between ZooKeeper and a cluster, tested in memory and on a real ZooKeeper.

`test_coordinator.py` runs the scenarios in memory, and `test_zookeeper.py` on a real ZooKeeper.
Each scenario has its own root.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar
from uuid import UUID

import pytest

from tests.time_limits import TEST_TIMEOUT_S
from waltz_core import errors
from waltz_core.access.permissions import Permissions, PrincipalLimits
from waltz_core.cluster.change.creation import NewCluster, NewStorage
from waltz_core.cluster.change.stored_permissions import Author
from waltz_core.cluster.coordinator import Coordinator, PartitionVersions
from waltz_core.cluster.membership.registration import ServersView
from waltz_core.cluster.znodes import access_node, model
from waltz_core.cluster.znodes.interface import (
    NO_NODE,
    CreateNode,
    DeleteNode,
    SessionState,
    SetNode,
    Znodes,
)

CLUSTER_KEY = UUID("00112233-4455-6677-8899-aabbccddeeff")
STORAGES = tuple(NewStorage(f"10.0.0.{n}:5280", 5281, n) for n in range(3))
ADDRESSES = tuple(storage.address for storage in STORAGES)
NONCE = bytes(range(16))

ValueT = TypeVar("ValueT")


class ZooKeeperUnderTest(Protocol):
    """A ZooKeeper, real or in memory, in which scenarios open sessions."""

    async def znodes(self) -> Znodes: ...

    async def expire(self, znodes: Znodes) -> None: ...


class CallbackRecorder:
    """Records the values passed to a callback, and waits for an expected one."""

    def __init__(self) -> None:
        self.values: list = []
        self._has_new_value = asyncio.Event()

    def __call__(self, value: object) -> None:
        self.values.append(value)
        self._has_new_value.set()

    async def wait_for(self, is_expected: Callable[[ValueT], bool]) -> ValueT:
        async with asyncio.timeout(TEST_TIMEOUT_S):
            while not (self.values and is_expected(self.values[-1])):
                self._has_new_value.clear()
                await self._has_new_value.wait()
        return self.values[-1]


@contextlib.asynccontextmanager
async def run_meanwhile(*coroutines: Awaitable[object]) -> AsyncIterator[None]:
    """Run endless coroutines for the duration of the block; the block raises their errors."""

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_await(coroutine)) for coroutine in coroutines]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


async def _await(each: Awaitable[object]) -> None:
    await each


async def open_coordinator(world: ZooKeeperUnderTest, root: str) -> Coordinator:
    return Coordinator(await world.znodes(), root)


async def create_cluster(
    world: ZooKeeperUnderTest, root: str, *, partition_count: int = 4
) -> Coordinator:
    coordinator = await open_coordinator(world, root)
    await coordinator.create_cluster(NewCluster("payments", partition_count, CLUSTER_KEY, STORAGES))
    return coordinator


def server_descriptor(server_id: int, preferred: Sequence[int] = ()) -> model.ServerDescriptor:
    return model.ServerDescriptor(server_id, "10.0.1.1", 5000 + server_id, tuple(preferred))


def owners_and_generations(view: ServersView) -> dict[int, tuple[int, int]]:
    return {partition: tuple(owner) for partition, owner in view.owners.items()}


# --- the cluster


async def a_cluster_is_created_once(world: ZooKeeperUnderTest, root: str) -> None:
    coordinator = await open_coordinator(world, root)
    with pytest.raises(errors.BadConfig, match=f"is no cluster at {root} .*cluster create"):
        await coordinator.read_cluster()
    await coordinator.create_cluster(NewCluster("payments", 4, CLUSTER_KEY, STORAGES))
    view = await coordinator.read_cluster()
    assert view.params == model.ClusterParams("payments", 4)
    assert view.store == model.StoreParams(CLUSTER_KEY, 4)
    assert (await coordinator.read_groups()).groups == dict(zip(ADDRESSES, range(3), strict=True))
    assert (await coordinator.read_connections()).admin_ports == dict.fromkeys(ADDRESSES, 5281)
    assert (await coordinator.read_replica_assignment()).partitions == dict.fromkeys(
        ADDRESSES, (0, 1, 2, 3)
    )
    with pytest.raises(errors.CoordinatorConflict, match="a cluster exists already"):
        await coordinator.create_cluster(NewCluster("other", 2, UUID(int=7)))
    assert await coordinator.read_cluster() == view


async def a_cluster_has_the_nodes_of_0_13(world: ZooKeeperUnderTest, root: str) -> None:
    await create_cluster(world, root, partition_count=2)
    znodes = await world.znodes()
    found: dict[str, bytes] = {}

    async def walk(path: str) -> None:
        found[path.removeprefix(root)] = (await znodes.get(path)).data
        for name in (await znodes.children(path)).names:
            await walk(f"{path}/{name}")

    await walk(root)
    assert {path for path in found if not path.startswith("/x")} == {
        "",
        "/ids",
        "/ids/client",
        "/ids/server",
        "/serverDescriptors",
        "/store",
        "/store/assignment",
        "/store/connection",
        "/store/group",
        "/store/partition",
    }
    assert found[""].hex() == "b4e8734701" + "0008" + b"payments".hex() + "00000002"
    assert found["/ids"] == found["/store/partition"] == b""
    assert found["/ids/client"] == found["/ids/server"] == bytes(4)
    assert found["/serverDescriptors"].hex() == "03ffffffff0000000000000000"
    assert found["/store"].hex() == "01" + CLUSTER_KEY.hex + "00000002"
    assert (await znodes.get(root)).stat.version == 1
    marker = "0101" + "ff" * 8 + "00" * 16
    assert {path: data.hex() for path, data in found.items() if path.startswith("/x")} == {
        "/x": "",
        "/x/partition": "",
        "/x/partition/0": marker,
        "/x/partition/1": marker,
        "/x/storage": "",
    }


async def a_large_cluster_takes_several_writes(world: ZooKeeperUnderTest, root: str) -> None:
    coordinator = await create_cluster(world, root, partition_count=1500)
    assert (await coordinator.read_cluster()).params.partition_count == 1500
    last = await coordinator.read_partition(1499)
    assert last.marker == model.PartitionMarker(model.MarkerState.NEW)


async def an_unfinished_creation_is_no_cluster(world: ZooKeeperUnderTest, root: str) -> None:
    znodes = await world.znodes()
    coordinator = Coordinator(znodes, root)
    for path in (root[:end] for end in range(1, len(root)) if root[end] == "/"):
        with contextlib.suppress(errors.CoordinatorConflict):
            await znodes.write([CreateNode(path)])
    await znodes.write([CreateNode(root), CreateNode(f"{root}/ids")])
    with pytest.raises(errors.BadConfig, match="is no cluster at"):
        await coordinator.read_cluster()
    with pytest.raises(errors.CoordinatorConflict, match="remains of an unfinished one"):
        await coordinator.create_cluster(NewCluster("payments", 4, CLUSTER_KEY))
    await znodes.write([DeleteNode(f"{root}/ids", 0)])
    await coordinator.create_cluster(NewCluster("payments", 4, CLUSTER_KEY))
    assert (await coordinator.read_cluster()).store.cluster_key == CLUSTER_KEY


async def an_error_names_a_damaged_node(world: ZooKeeperUnderTest, root: str) -> None:
    coordinator = await create_cluster(world, root)
    znodes = await world.znodes()
    await znodes.write([SetNode(f"{root}/store", b"\7nonsense", 0)])
    with pytest.raises(
        errors.BadFormat, match=f"{root}/store: znode data of a StoreParams: expected version 1"
    ):
        await coordinator.read_cluster()


# --- IDs


async def ids_are_never_allocated_twice(world: ZooKeeperUnderTest, root: str) -> None:
    members = [
        await create_cluster(world, root),
        await open_coordinator(world, root),
        await open_coordinator(world, root),
    ]
    allocated: list[int] = []

    async def take(coordinator: Coordinator) -> None:
        allocated.extend([await coordinator.next_client_id() for _ in range(5)])

    async with asyncio.TaskGroup() as group:
        for coordinator in members * 3:
            group.create_task(take(coordinator))
    assert sorted(allocated) == list(range(1, 46))
    assert await members[0].next_server_id() == 1
    assert await members[1].next_server_id() == 2


# --- partitions


async def a_partition_is_written_by_compare_and_set(world: ZooKeeperUnderTest, root: str) -> None:
    first, second = await create_cluster(world, root), await open_coordinator(world, root)
    view = await first.read_partition(2)
    new = model.PartitionMarker(model.MarkerState.NEW)
    assert view == (None, NO_NODE, new, 0)
    assert (await second.read_partition(2)) == view
    states = {ADDRESSES[0]: model.ReplicaState(0), ADDRESSES[1]: model.ReplicaState(0, 41)}
    metadata = model.PartitionMetadata(1, 0, states)
    marker = model.PartitionMarker(model.MarkerState.OPEN, 0, NONCE)
    versions = await first.write_partition(2, metadata, marker, view.versions)
    assert versions == (1, 1)
    assert await second.read_partition(2) == (metadata, 1, marker, 1)
    later = model.PartitionMetadata(2, 1, states)
    with pytest.raises(errors.CoordinatorConflict):
        await second.write_partition(2, later, marker, view.versions)
    with pytest.raises(errors.CoordinatorConflict):
        await second.write_partition(2, later, marker, PartitionVersions(1, 0))
    assert await first.read_partition(2) == (metadata, 1, marker, 1)
    assert await second.write_partition(2, later, marker, versions) == (2, 2)
    assert (await first.read_partition(1)).metadata is None


async def a_partition_of_0_13_is_adopted(world: ZooKeeperUnderTest, root: str) -> None:
    coordinator = await create_cluster(world, root)
    znodes = await world.znodes()
    for name in (
        "partition/0",
        "partition/1",
        "partition/2",
        "partition/3",
        "partition",
        "storage",
    ):
        await znodes.write([DeleteNode(f"{root}/x/{name}", 0)])
    await znodes.write([DeleteNode(f"{root}/x", 0)])
    metadata = model.PartitionMetadata(3, 9, {})
    await znodes.write([CreateNode(f"{root}/store/partition/0", metadata.to_bytes(0))])
    view = await coordinator.read_partition(0)
    assert view == (metadata, 0, None, NO_NODE)
    marker = model.PartitionMarker(model.MarkerState.OPEN, 10, NONCE)
    versions = await coordinator.write_partition(0, metadata, marker, view.versions)
    assert versions == (1, 0)
    assert (await coordinator.read_partition(0)).marker == marker


# --- storages


async def the_first_registered_storage_id_is_kept(world: ZooKeeperUnderTest, root: str) -> None:
    coordinator, other = await create_cluster(world, root), await open_coordinator(world, root)
    assert await coordinator.read_storage_ids() == {}
    first_id, second_id = UUID(int=1), UUID(int=2)
    assert await coordinator.register_storage_id("10.0.0.1:5280", first_id) == first_id
    assert await other.register_storage_id("10.0.0.1:5280", second_id) == first_id
    assert await coordinator.register_storage_id("10.0.0.1:5280", first_id) == first_id
    assert await other.register_storage_id("[::1]:5280", second_id) == second_id
    assert await other.read_storage_ids() == {"10.0.0.1:5280": first_id, "[::1]:5280": second_id}


async def a_follower_receives_changes_of_the_replica_assignment(
    world: ZooKeeperUnderTest, root: str
) -> None:
    coordinator, follower = await create_cluster(world, root), await open_coordinator(world, root)
    inbox = CallbackRecorder()
    one_more = (*ADDRESSES, "10.0.0.9:5280")
    async with run_meanwhile(follower.follow_replica_assignment(inbox)):
        before = await inbox.wait_for(lambda found: True)
        assert list(before.partitions) == list(ADDRESSES)
        written = await coordinator.update_replica_assignment(
            lambda old: model.ReplicaAssignments(dict.fromkeys(one_more, (0, 1, 2, 3)))
        )
        assert await inbox.wait_for(lambda found: len(found.partitions) == 4) == written
        with pytest.raises(
            errors.BadRequest, match="partition 0: in one step, 2 of the 3 replicas"
        ):
            await coordinator.update_replica_assignment(
                lambda old: model.ReplicaAssignments(
                    {ADDRESSES[0]: (0,), "10.0.0.8:1": (0,), "10.0.0.7:1": (0,)}
                )
            )
    assert len(inbox.values) == 2


async def a_follower_receives_changes_of_the_permissions(
    world: ZooKeeperUnderTest, root: str
) -> None:
    coordinator, follower = await create_cluster(world, root), await open_coordinator(world, root)
    znodes, path = await world.znodes(), coordinator.paths.access
    inbox = CallbackRecorder()
    async with run_meanwhile(follower.follow_permissions(inbox)):
        assert await inbox.wait_for(lambda found: True) is None
        first, second = (Permissions(each, "ops", 0, bytes(32)) for each in (1, 2))
        await znodes.write([CreateNode(path, access_node.encode_permissions(first))])
        assert await inbox.wait_for(lambda found: found is not None) == first
        await znodes.write([SetNode(path, access_node.encode_permissions(second), 0)])
        assert await inbox.wait_for(lambda found: found.revision == 2) == second
        await znodes.write([DeleteNode(path, 1)])
        assert await inbox.wait_for(lambda found: found is None) is None
    assert len(inbox.values) == 4
    await znodes.write([CreateNode(path, b"{}")])
    async with asyncio.timeout(TEST_TIMEOUT_S):
        with pytest.raises(errors.BadFormat, match=f"{path}: permissions: expected format 1"):
            await follower.follow_permissions(inbox)


async def permissions_are_changed_by_compare_and_set(world: ZooKeeperUnderTest, root: str) -> None:
    one, two = await create_cluster(world, root), await open_coordinator(world, root)
    author = Author("ann\n@host", 7)
    assert await one.permissions.read() is None
    for change in (
        one.permissions.read_existing(),
        one.permissions.change(add_limited_principal(1), author),
    ):
        with pytest.raises(errors.BadRequest, match=r"has no permissions.* `access init`"):
            await change
    created = await one.permissions.create(Permissions(1, "", 0, bytes(32)), author)
    assert created == Permissions(1, "ann?@host", 7, bytes(32))
    assert await two.permissions.read_existing() == created
    with pytest.raises(errors.BadRequest, match="has permissions already"):
        await two.permissions.create(created, author)

    # Concurrent changes have different revisions, and no change is lost.
    changes = (one, two) * 3
    async with asyncio.TaskGroup() as group:
        results = [
            group.create_task(each.permissions.change(add_limited_principal(number), author))
            for number, each in enumerate(changes, 1)
        ]
    assert sorted(result.result().after.revision for result in results) == list(range(2, 8))
    now = await one.permissions.read_existing()
    assert sorted(now.limits) == [f"p{number}" for number in range(1, 7)]
    assert now.revision == 7

    again = await one.permissions.change(add_limited_principal(1), Author("bob", 9))
    assert again.before == again.after == now == await two.permissions.read_existing()

    def reject_change(_old: Permissions) -> Permissions:
        raise errors.BadRequest("not this")

    with pytest.raises(errors.BadRequest, match="not this"):
        await one.permissions.change(reject_change, author)
    assert await two.permissions.read_existing() == now


def add_limited_principal(number: int) -> Callable[[Permissions], Permissions]:
    """A change that adds a principal."""
    limits = PrincipalLimits(feeds=1)
    return lambda old: replace(old, limits={**old.limits, f"p{number}": limits})


async def imported_permissions_have_a_later_revision(world: ZooKeeperUnderTest, root: str) -> None:
    coordinator = await create_cluster(world, root)
    author, revisions, key = Author("ops", 5), [], b"k" * 32
    saved = Permissions(9, "ann", 1, bytes(32), limits={"*": PrincipalLimits(feeds=2)})

    def record_revisions(before: Permissions, after: Permissions) -> None:
        revisions.append((before.revision, after.revision))

    first = await coordinator.permissions.replace(saved, author, record_revisions, new_key=key)
    # If there were no permissions before, the counter of client IDs may have started again. So the
    # proofs of earlier client IDs must not match.
    imported = replace(saved, revision=10, changed_by="ops", changed_ms=5)
    assert first == (None, replace(imported, client_key=key))
    second = await coordinator.permissions.replace(saved, author, record_revisions, new_key=key)
    assert second.after == replace(imported, revision=11)
    assert revisions == [(10, 11)]
    znodes, path = await world.znodes(), coordinator.paths.access
    found = await znodes.get(path)
    await znodes.write([SetNode(path, b"{}", found.stat.version)])
    with pytest.raises(errors.BadFormat, match=f"{path}: permissions"):
        await coordinator.permissions.read_existing()
    third = await coordinator.permissions.replace(saved, author, record_revisions, new_key=key)
    assert third == (None, imported)
    assert await coordinator.permissions.read_existing() == imported


async def the_revision_in_use_is_published_in_each_session(
    world: ZooKeeperUnderTest, root: str
) -> None:
    commands, znodes = await create_cluster(world, root), await world.znodes()
    storage, name = Coordinator(znodes, root), "storage-10.0.0.1:5280"
    author, at_storage, states = Author("ops", 0), CallbackRecorder(), CallbackRecorder()
    storage.on_session_state(states)
    signals = await world.znodes()
    assert await commands.read_applied_revisions() == {}

    def take(permissions: Permissions | None) -> None:
        if permissions is not None:
            storage.set_applied_revision(name, permissions.revision)
        at_storage(permissions)

    async with run_meanwhile(storage.follow_permissions(take)):
        assert await at_storage.wait_for(lambda found: True) is None
        await commands.permissions.create(Permissions(1, "", 0, bytes(32)), author)
        await await_applied_revisions(commands, signals, {name: 1})
        await commands.permissions.change(add_limited_principal(1), author)
        await await_applied_revisions(commands, signals, {name: 2})
        number = znodes.session_number
        await world.expire(znodes)
        await states.wait_for(
            lambda state: state is SessionState.CONNECTED and znodes.session_number != number
        )
        await await_applied_revisions(commands, signals, {name: 2}, znodes.session_number)
        assert len(at_storage.values) == 3

        # The successor of a killed process replaces its node.
        successor = await open_coordinator(world, root)
        successor.set_applied_revision(name, 2)
        async with run_meanwhile(successor.follow_permissions(CallbackRecorder())):
            await await_applied_revisions(
                commands, signals, {name: 2}, successor._znodes.session_number
            )
            await successor.close()
    await await_applied_revisions(commands, signals, {})


async def a_revision_that_cannot_be_published_does_not_delay_the_next(
    world: ZooKeeperUnderTest, root: str
) -> None:
    """Another daemon may have created a node at the revision's path that cannot be deleted."""
    commands, znodes = await create_cluster(world, root), await world.znodes()
    storage, name = Coordinator(await world.znodes(), root), "storage-10.0.0.1:5280"
    author, applied, failed = Author("ops", 0), CallbackRecorder(), CallbackRecorder()
    paths = commands.paths
    for path in (
        paths.applied_revisions,
        paths.applied_revision(name),
        f"{paths.applied_revision(name)}/child",
    ):
        await znodes.write([CreateNode(path, b"{}")])

    def take(permissions: Permissions | None) -> None:
        if permissions is not None:
            storage.set_applied_revision(name, permissions.revision)
        applied(permissions)

    async with run_meanwhile(storage.follow_permissions(take, failed)):
        await commands.permissions.create(Permissions(1, "", 0, bytes(32)), author)
        assert await failed.wait_for(lambda error: True)
        await commands.permissions.change(add_limited_principal(1), author)
        await applied.wait_for(lambda found: found is not None and found.revision == 2)


async def await_applied_revisions(
    commands: Coordinator, znodes: Znodes, expected: dict[str, int], owner: int | None = None
) -> None:
    """Wait until daemons have published these revisions, the first one in this session."""
    signal, paths = znodes.new_signal(), commands.paths
    async with asyncio.timeout(TEST_TIMEOUT_S):
        while True:
            await znodes.children(paths.applied_revisions, signal)
            await znodes.get(paths.applied_revisions, signal)
            nodes = {
                each: await znodes.get(paths.applied_revision(each), signal) for each in expected
            }
            owners = [node.stat.owner for node in nodes.values() if node is not None]
            is_owned = owner is None or owners == [owner]
            if is_owned and await commands.read_applied_revisions() == expected:
                break
            await signal.wait()
            signal.clear()
    znodes.drop_signal(signal)


# --- servers


async def servers_register_and_unregister(world: ZooKeeperUnderTest, root: str) -> None:
    client = await create_cluster(world, root)
    one, two = await open_coordinator(world, root), await open_coordinator(world, root)
    at_client, at_one, at_two = CallbackRecorder(), CallbackRecorder(), CallbackRecorder()
    async with run_meanwhile(
        client.follow_servers(at_client), one.follow_servers(at_one), two.follow_servers(at_two)
    ):
        await at_client.wait_for(lambda view: not view.servers)
        await one.register_server(server_descriptor(1))
        view = await at_client.wait_for(lambda view: len(view.servers) == 1)
        assert owners_and_generations(view) == dict.fromkeys(range(4), (1, 1))
        await two.register_server(server_descriptor(2))
        for inbox in (at_client, at_one, at_two):
            view = await inbox.wait_for(lambda view: len(view.servers) == 2)
            assert view.is_settled
            assert owners_and_generations(view) == {0: (1, 1), 1: (1, 1), 2: (2, 2), 3: (2, 2)}
            assert view.partitions_of(2) == {2: 2, 3: 2}
            assert view.servers[2].address == "10.0.1.1:5002"
        # When the leader disconnects, the other server becomes the leader.
        await one.unregister_server()
        for inbox in (at_client, at_one, at_two):
            view = await inbox.wait_for(lambda view: list(view.servers) == [2])
            assert owners_and_generations(view) == {0: (2, 2), 1: (2, 2), 2: (2, 2), 3: (2, 2)}
        await two.close()
        view = await at_client.wait_for(lambda view: not view.servers)
        assert view.owners == {}
    third = await open_coordinator(world, root)
    at_third = CallbackRecorder()
    await third.register_server(server_descriptor(3, preferred=[3]))
    async with run_meanwhile(third.follow_servers(at_third)):
        view = await at_third.wait_for(lambda view: list(view.servers) == [3])
        assert owners_and_generations(view) == dict.fromkeys(range(4), (3, 3))
    assert (await client.read_servers()) == view


async def a_server_with_a_lost_session_registers_again(
    world: ZooKeeperUnderTest, root: str
) -> None:
    client = await create_cluster(world, root)
    znodes = await world.znodes()
    server = Coordinator(znodes, root)
    at_client, states = CallbackRecorder(), CallbackRecorder()
    server.on_session_state(states)
    observer = await world.znodes()
    async with run_meanwhile(
        client.follow_servers(at_client), server.follow_servers(CallbackRecorder())
    ):
        await server.register_server(server_descriptor(1))
        await at_client.wait_for(lambda view: list(view.servers) == [1])
        await await_only_child(observer, f"{root}/serverDescriptors", "s_0000000000")
        first_number = znodes.session_number
        await world.expire(znodes)
        await states.wait_for(
            lambda state: state is SessionState.CONNECTED and znodes.session_number != first_number
        )
        assert SessionState.LOST in states.values
        await await_only_child(observer, f"{root}/serverDescriptors", "s_0000000001")
    at_other = CallbackRecorder()
    async with run_meanwhile(
        server.follow_servers(CallbackRecorder()), client.follow_servers(at_other)
    ):
        view = await at_other.wait_for(lambda view: view.is_settled)
    assert list(view.servers) == [1]
    assert owners_and_generations(view) == dict.fromkeys(range(4), (1, 1))


async def await_only_child(znodes: Znodes, path: str, name: str) -> None:
    """Wait until a node has this child and no other."""
    signal = znodes.new_signal()
    async with asyncio.timeout(TEST_TIMEOUT_S):
        while (await znodes.children(path, signal)).names != (name,):
            await signal.wait()
            signal.clear()
    znodes.drop_signal(signal)


async def a_server_is_registered_once(world: ZooKeeperUnderTest, root: str) -> None:
    server = await create_cluster(world, root)
    inbox = CallbackRecorder()
    await server.register_server(server_descriptor(1))
    async with run_meanwhile(server.follow_servers(inbox)):
        await inbox.wait_for(lambda view: list(view.servers) == [1])
        await server.register_server(server_descriptor(1))
        await server.register_server(server_descriptor(1, preferred=[2]))
        view = await inbox.wait_for(lambda view: view.servers[1].preferred == (2,))
    assert list(view.servers) == [1]
    znodes = await world.znodes()
    assert len((await znodes.children(f"{root}/serverDescriptors")).names) == 1


# --- the interface itself


async def a_write_is_atomic(world: ZooKeeperUnderTest, root: str) -> None:
    znodes = await world.znodes()
    base = "/" + root.replace("/", "-")
    assert await znodes.get(base) is None
    assert await znodes.children(base) is None
    assert await znodes.write([CreateNode(base), CreateNode(f"{base}/a", b"1")]) == [0, 0]
    assert await znodes.write(
        [SetNode(f"{base}/a", b"2", 0), SetNode(f"{base}/a", b"3", 1), CreateNode(f"{base}/b", b"")]
    ) == [1, 2, 0]
    rejected_writes = [
        [SetNode(f"{base}/a", b"4", 2), SetNode(f"{base}/b", b"4", 7)],
        [SetNode(f"{base}/a", b"4", 2), CreateNode(f"{base}/b")],
        [SetNode(f"{base}/a", b"4", 2), CreateNode(f"{base}/none/c")],
        [SetNode(f"{base}/a", b"4", 2), DeleteNode(f"{base}/none", 0)],
        [DeleteNode(f"{base}/a", 1)],
    ]
    for operations in rejected_writes:
        with pytest.raises(errors.CoordinatorConflict, match=base):
            await znodes.write(operations)
    data, stat = await znodes.get(f"{base}/a")
    assert (data, stat.version, stat.cversion, stat.owner) == (b"3", 2, 0, 0)
    names, stat = await znodes.children(base)
    assert (names, stat.version, stat.cversion, stat.owner) == (("a", "b"), 0, 2, 0)
    numbered = CreateNode(f"{base}/s_", b"x", is_ephemeral=True, is_sequential=True)
    await znodes.write([numbered])
    await znodes.write([numbered])
    assert (await znodes.children(base)).names == ("a", "b", "s_0000000002", "s_0000000003")
    owner = (await znodes.get(f"{base}/s_0000000003")).stat.owner
    assert owner == znodes.session_number != 0
    assert await znodes.write([DeleteNode(f"{base}/a", 2)]) == [NO_NODE]
    assert (await znodes.get(base)).stat.cversion == 5
    await znodes.close()
    other = await world.znodes()
    assert (await other.children(base)).names == ("b",)


async def each_kind_of_change_is_signaled(world: ZooKeeperUnderTest, root: str) -> None:
    watcher, writer = await world.znodes(), await world.znodes()
    base = "/" + root.replace("/", "-") + "-signals"
    signal = watcher.new_signal()

    async def notified_after(*operations: object) -> None:
        signal_was_set = asyncio.timeout(TEST_TIMEOUT_S)
        signal.clear()
        await writer.write(operations)
        async with signal_was_set:
            await signal.wait()

    assert await watcher.get(base, signal) is None
    await notified_after(CreateNode(base, b"1"))
    assert await watcher.children(f"{base}/a", signal) is None
    await notified_after(CreateNode(f"{base}/a"))
    assert (await watcher.get(base, signal)).data == b"1"
    await notified_after(SetNode(base, b"2", 0))
    assert (await watcher.children(base, signal)).names == ("a",)
    await notified_after(CreateNode(f"{base}/b"))
    assert (await watcher.children(base, signal)).names == ("a", "b")
    await notified_after(DeleteNode(f"{base}/b", 0))
    assert (await watcher.get(f"{base}/a", signal)).data == b""
    await notified_after(DeleteNode(f"{base}/a", 0))
    watcher.drop_signal(signal)


async def a_closed_session_rejects_requests(world: ZooKeeperUnderTest, root: str) -> None:
    znodes = await world.znodes()
    await znodes.close()
    await znodes.close()
    assert znodes.state is SessionState.LOST
    with pytest.raises(errors.CoordinatorUnavailable):
        await znodes.get(root)
    with pytest.raises(errors.CoordinatorUnavailable):
        await znodes.write([CreateNode(root)])


SCENARIOS = [
    a_cluster_is_created_once,
    a_cluster_has_the_nodes_of_0_13,
    a_large_cluster_takes_several_writes,
    an_unfinished_creation_is_no_cluster,
    an_error_names_a_damaged_node,
    ids_are_never_allocated_twice,
    a_partition_is_written_by_compare_and_set,
    a_partition_of_0_13_is_adopted,
    the_first_registered_storage_id_is_kept,
    a_follower_receives_changes_of_the_replica_assignment,
    a_follower_receives_changes_of_the_permissions,
    permissions_are_changed_by_compare_and_set,
    imported_permissions_have_a_later_revision,
    the_revision_in_use_is_published_in_each_session,
    a_revision_that_cannot_be_published_does_not_delay_the_next,
    servers_register_and_unregister,
    a_server_with_a_lost_session_registers_again,
    a_server_is_registered_once,
    a_write_is_atomic,
    each_kind_of_change_is_signaled,
    a_closed_session_rejects_requests,
]
