"""Live servers: registration, the leader, and the assignment in force."""

import asyncio
import contextlib
from inspect import Signature, signature

import pytest

from tests.cluster_contract import (
    CLUSTER_KEY,
    CallbackRecorder,
    owners_and_generations,
    run_meanwhile,
    server_descriptor,
)
from tests.loops import run_on_virtual_loop
from waltz_core import errors
from waltz_core.cluster.change.creation import NewCluster
from waltz_core.cluster.coordinator import Coordinator
from waltz_core.cluster.membership.reachability import PublishedReachability, ReachReport
from waltz_core.cluster.membership.registration import WRITE_ATTEMPTS_MAX, Membership, Ownership
from waltz_core.cluster.znodes import model
from waltz_core.cluster.znodes.interface import CreateNode, SetNode
from waltz_core.cluster.znodes.node_access import ClusterNodes
from waltz_core.cluster.zookeeper.zookeeper_in_memory import (
    SESSION_TIMEOUT_MS,
    MemoryZooKeeper,
    WriteFault,
)
from waltz_core.records.record import ServerId

ROOT = "/w"
SERVERS = f"{ROOT}/serverDescriptors"
PARTITION_COUNT = 4


class Cluster:
    """A cluster in memory, and members of it."""

    def __init__(self):
        self.zookeeper = MemoryZooKeeper(asyncio.Event)

    async def create(self):
        await Coordinator(self.zookeeper.session(), ROOT).create_cluster(
            NewCluster("w", PARTITION_COUNT, CLUSTER_KEY)
        )
        return self

    def member(self):
        session = self.zookeeper.session()
        return Membership(ClusterNodes(session, ROOT)), session

    async def servers(self, count):
        """Return members that have registered, with 1 as the first ID, and their sessions."""
        found = [self.member() for _ in range(count)]
        for number, (member, _) in enumerate(found, 1):
            await member.register(server_descriptor(number))
        return found

    def registered(self):
        """Return the IDs of the registered servers in the order of their registration."""
        dump = self.zookeeper.dump()
        names = self.zookeeper.child_names(SERVERS)
        return [
            model.ServerDescriptor.from_bytes(dump[f"{SERVERS}/{name}"]).server_id for name in names
        ]


def run_in_cluster(scenario):
    """Run a scenario in a new cluster; its other parameters are those of the test."""

    async def run(**parameters):
        await scenario(await Cluster().create(), **parameters)

    _, *parameters = signature(scenario).parameters.values()
    run.__signature__ = Signature(parameters)
    return run_on_virtual_loop(run)


@run_in_cluster
async def test_unregistering_removes_only_the_servers_own_node(cluster):
    (first_server, _), (second_server, _) = cluster.member(), cluster.member()
    await first_server.unregister()
    await first_server.register(server_descriptor(1))
    await second_server.register(server_descriptor(2))
    await first_server.unregister()
    assert cluster.registered() == [2]
    await first_server.unregister()
    assert cluster.registered() == [2]


@run_in_cluster
async def test_a_failed_removal_is_not_reported_as_done(cluster):
    (first_server, own_session), (second_server, session) = cluster.member(), cluster.member()
    await first_server.register(server_descriptor(1))
    session.faults = [WriteFault.REQUEST_LOST] * WRITE_ATTEMPTS_MAX
    with pytest.raises(
        errors.CoordinatorUnavailable, match="processes changed it during each attempt"
    ):
        await second_server.remove_dead_server(server_descriptor(1))
    own_session.faults = [WriteFault.REQUEST_LOST] * WRITE_ATTEMPTS_MAX
    with pytest.raises(
        errors.CoordinatorUnavailable, match="processes changed it during each attempt"
    ):
        await first_server.unregister()
    assert cluster.registered() == [1]


@run_in_cluster
async def test_a_dead_server_is_removed_by_another_server(cluster):
    (dead, _), (other, session) = await cluster.servers(2)
    # The reported process has changed or restarted, or no server has found it dead.
    await other.remove_dead_server(server_descriptor(1, preferred=[1]))
    assert cluster.registered() == [1, 2]
    session.faults = [WriteFault.REPLY_LOST]
    await other.remove_dead_server(server_descriptor(1))
    assert cluster.registered() == [2]
    await other.remove_dead_server(server_descriptor(1))
    assert cluster.registered() == [2]
    # The server was alive, and registers again.
    seen = CallbackRecorder()
    async with run_meanwhile(dead.follow(seen)):
        await seen.wait_for(lambda view: sorted(view.servers) == [1, 2])


@pytest.mark.parametrize("faults", [[], [WriteFault.REPLY_LOST], [WriteFault.REQUEST_LOST]])
@run_in_cluster
async def test_a_server_hands_over_only_a_partition_that_it_owns(cluster, faults):
    (first_server, session), (second_server, _) = cluster.member(), cluster.member()
    assert not await first_server.hand_over(0, 1)  # this process is not registered
    await first_server.register(server_descriptor(1))
    seen = CallbackRecorder()
    async with run_meanwhile(first_server.follow(seen), second_server.follow(CallbackRecorder())):
        before = await seen.wait_for(lambda view: len(view.owners) > 0)
        generation = before.owners[0].generation
        assert not await first_server.hand_over(0, generation)  # there is no other server
        await second_server.register(server_descriptor(2))
        view = await seen.wait_for(lambda view: len(view.servers) == 2)
        generation = view.owners[0].generation
        assert view.owners[0].server_id == 1
        session.faults = list(faults)
        # The next read shows the outcome of the write whose answer was lost.
        assert await first_server.hand_over(0, generation)
        after = await seen.wait_for(lambda view: view.owners[0].server_id == 2)
        assert after.owners[0].generation == generation + 1
        assert after.is_settled
        assert not await first_server.hand_over(0, generation)


@pytest.mark.parametrize("faults", [[], [WriteFault.REPLY_LOST], [WriteFault.REQUEST_LOST]])
@run_in_cluster
async def test_a_preference_does_not_move_a_handed_over_partition_back(cluster, faults):
    """After an unhealthy server hands over a partition, a change of servers must not return it."""
    members = [cluster.member() for _ in range(3)]
    (first_server, session), (second_server, _), (third_server, _) = members
    await first_server.register(server_descriptor(1, preferred=[0, 1]))
    await second_server.register(server_descriptor(2))
    seen = CallbackRecorder()
    async with run_meanwhile(
        first_server.follow(seen),
        second_server.follow(CallbackRecorder()),
        third_server.follow(CallbackRecorder()),
    ):
        view = await seen.wait_for(lambda view: len(view.servers) == 2)
        session.faults = list(faults)
        assert await first_server.hand_over(0, view.owners[0].generation)
        after = await seen.wait_for(lambda view: view.owners[0].server_id == 2)
        assert after.servers[1].preferred == (1,)
        await third_server.register(server_descriptor(3))
        after = await seen.wait_for(lambda view: len(view.servers) == 3)
        assert after.owners[0].server_id != 1
        assert after.owners[1].server_id == 1
        # After its repair the server prefers the partition again.
        await first_server.change_preferences(server_descriptor(1, preferred=[1, 0]))
        after = await seen.wait_for(lambda view: view.owners[0].server_id == 1)
        assert after.owners[1].server_id == 1


@run_in_cluster
async def test_a_preference_stays_if_no_server_takes_the_partition(cluster):
    member, _ = cluster.member()
    await member.register(server_descriptor(1, preferred=[0]))
    seen = CallbackRecorder()
    async with run_meanwhile(member.follow(seen)):
        view = await seen.wait_for(lambda view: len(view.owners) > 0)
        assert not await member.hand_over(0, view.owners[0].generation)
        assert (await member.read()).servers[1].preferred == (0,)


@pytest.mark.parametrize("fault", WriteFault)
@run_in_cluster
async def test_a_server_registers_once_despite_a_write_of_unknown_outcome(cluster, fault):
    member, session = cluster.member()
    session.faults = [fault, fault]
    await member.register(server_descriptor(1))
    assert cluster.registered() == [1]
    session.faults = [fault]
    await member.unregister()
    assert cluster.registered() == []


@run_in_cluster
async def test_a_second_node_of_the_same_server_is_removed(cluster):
    """Two attempts may both have succeeded; the earlier node stays."""
    [(member, session)] = await cluster.servers(1)
    (name,) = cluster.zookeeper.child_names(SERVERS)
    await session.write(
        [
            CreateNode(
                f"{SERVERS}/s_",
                server_descriptor(1).to_bytes(),
                is_ephemeral=True,
                is_sequential=True,
            )
        ]
    )
    assert cluster.registered() == [1, 1]
    await member.register(server_descriptor(1))
    assert cluster.zookeeper.child_names(SERVERS) == (name,)


@run_in_cluster
async def test_each_settled_view_is_reported_once_and_no_unsettled_view_is_reported(cluster):
    (first_server, _), (second_server, _), (observer, _) = (
        cluster.member(),
        cluster.member(),
        cluster.member(),
    )
    seen = CallbackRecorder()
    async with run_meanwhile(observer.follow(seen)):
        await seen.wait_for(lambda view: not view.servers)
        # No leader assigns partitions yet, so the observer gets no settled view.
        await second_server.register(server_descriptor(2))
        assert not (await observer.read()).is_settled
        async with run_meanwhile(second_server.follow(CallbackRecorder())):
            await seen.wait_for(lambda view: list(view.servers) == [2])
        await first_server.register(server_descriptor(1))
        async with run_meanwhile(
            first_server.follow(CallbackRecorder()), second_server.follow(CallbackRecorder())
        ):
            await seen.wait_for(lambda view: list(view.servers) == [1, 2])
    assert [list(view.servers) for view in seen.values] == [[], [2], [1, 2]]
    assert owners_and_generations(seen.values[1]) == dict.fromkeys(range(PARTITION_COUNT), (2, 1))
    assert all(view.is_settled for view in seen.values[1:])
    # Moved partitions have a new generation, the others the old one.
    assert sorted(owners_and_generations(seen.values[2]).values()) == [
        (1, 2),
        (1, 2),
        (2, 1),
        (2, 1),
    ]


@run_in_cluster
async def test_only_the_leader_writes_assignments(cluster):
    (first_server, _), (second_server, two_session) = await cluster.servers(2)
    written = CallbackRecorder()
    whole = two_session.write

    async def count_writes(operations):
        written(operations)
        return await whole(operations)

    two_session.write = count_writes
    views_of_two = CallbackRecorder()
    async with run_meanwhile(
        first_server.follow(CallbackRecorder()), second_server.follow(views_of_two)
    ):
        await views_of_two.wait_for(lambda view: list(view.servers) == [1, 2])
        assert written.values == []
        await first_server.unregister()
        await views_of_two.wait_for(lambda view: list(view.servers) == [2])
    assert [type(operation) for (operation,) in written.values] == [SetNode]
    assert owners_and_generations(views_of_two.values[-1]).keys() == set(range(PARTITION_COUNT))


@run_in_cluster
async def test_the_leader_moves_partitions_and_all_servers_follow(cluster):
    (first_server, _), (second_server, _) = await cluster.servers(2)
    views_of_one, views_of_two = CallbackRecorder(), CallbackRecorder()
    async with run_meanwhile(first_server.follow(views_of_one), second_server.follow(views_of_two)):
        await views_of_two.wait_for(lambda view: list(view.servers) == [1, 2])
        seen = await second_server.read()
        assert [owner.server_id for owner in seen.owners.values()] == [1, 1, 2, 2]
        assert not await second_server.move_partitions(seen, {0: 2})  # the server is not the leader
        assert await first_server.move_partitions(seen, {0: 2})
        await views_of_two.wait_for(lambda view: view.owners[0] == Ownership(2, 2))
        await views_of_one.wait_for(lambda view: view.owners[0] == Ownership(2, 2))
        assert views_of_one.values[-1].owners | {0: seen.owners[0]} == seen.owners
        assert not await first_server.move_partitions(seen, {1: 2})  # the view is outdated


@run_in_cluster
async def test_with_load_balancing_the_leader_does_not_balance_by_count(cluster):
    members = [cluster.member()[0] for _ in range(3)]
    inbox = CallbackRecorder()
    for number, member in enumerate(members, 1):
        member.keeps_owners = True
        await member.register(server_descriptor(number))
    one, _, three = members
    async with run_meanwhile(*(each.follow(inbox) for each in members)):
        await inbox.wait_for(lambda view: list(view.servers) == [1, 2, 3])
        assert await one.move_partitions(await one.read(), {1: 2, 3: 2})
        await inbox.wait_for(lambda view: len(view.partitions_of(2)) == 3)
        before = (await one.read()).partitions_of(2)
        await three.unregister()
        await inbox.wait_for(lambda view: list(view.servers) == [1, 2])
        assert (await one.read()).partitions_of(2) == before


@run_in_cluster
async def test_a_membership_that_never_stabilizes_is_reported(cluster):
    member, session = cluster.member()
    other, _ = cluster.member()
    await other.register(server_descriptor(2))
    whole = session.children

    async def change_and_read(path, signal=None):
        node = await session.get(SERVERS)
        await cluster.zookeeper.session().write([SetNode(SERVERS, node.data, node.stat.version)])
        return await whole(path, signal)

    session.children = change_and_read
    with pytest.raises(
        errors.CoordinatorUnavailable, match="other processes changed it during each attempt"
    ):
        await member.read()
    session.children = whole
    assert list((await member.read()).servers) == [2]


@run_in_cluster
async def test_the_error_names_a_damaged_descriptor(cluster):
    [(member, session)] = await cluster.servers(1)
    (name,) = cluster.zookeeper.child_names(SERVERS)
    await session.write([SetNode(f"{SERVERS}/{name}", b"\xff", 0)])
    with pytest.raises(errors.BadFormat, match=f"^{SERVERS}/{name}: "):
        await member.read()


@run_in_cluster
async def test_a_restarted_server_removes_the_node_of_its_killed_process_when_it_registers(cluster):
    # Killed without closing its session: session and node exist until ZooKeeper ends them.
    dead, _ = cluster.member()
    other, _ = cluster.member()
    await dead.register(model.ServerDescriptor(3, "host-a", 8000))
    await other.register(model.ServerDescriptor(4, "host-b", 8000))
    new_member, _ = cluster.member()
    await new_member.register(model.ServerDescriptor(5, "host-a", 8000))
    assert sorted(cluster.registered()) == [4, 5]
    # A process that notices late does not remove the node of a newer process.
    await dead.register(model.ServerDescriptor(3, "host-a", 8000))
    assert 5 in cluster.registered()


# --- rule 5: outages of ZooKeeper


async def wait_for_followers(cluster):
    """Return once every follower has processed all changes."""
    for _ in range(200):
        await asyncio.sleep(0)


@run_in_cluster
async def test_servers_that_register_again_after_an_outage_keep_their_partitions(cluster):
    (one, first), (two, second) = await cluster.servers(2)
    views_of_one, views_of_two = CallbackRecorder(), CallbackRecorder()
    async with run_meanwhile(one.follow(views_of_one), two.follow(views_of_two)):
        before = owners_and_generations(
            await views_of_two.wait_for(lambda view: len(view.servers) == 2)
        )
        await views_of_one.wait_for(lambda view: len(view.servers) == 2)
        seen = len(views_of_one.values), len(views_of_two.values)
        # Both sessions have ended. The second server reconnects first, and finds no other server.
        first.suspend()
        second.suspend()
        cluster.zookeeper.advance(60_000)
        first.expire()
        second.expire()
        second.resume()
        await wait_for_followers(cluster)
        cluster.zookeeper.advance(SESSION_TIMEOUT_MS - 1)
        await wait_for_followers(cluster)
        assert cluster.registered() == [2]
        assert (len(views_of_one.values), len(views_of_two.values)) == seen
        first.resume()
        await wait_for_followers(cluster)
        view = await one.read()
        assert view.is_settled
        assert owners_and_generations(view) == before  # the generations are also unchanged
    assert {str(owners_and_generations(value)) for value in views_of_one.values[seen[0] :]} <= {
        str(before)
    }
    assert {str(owners_and_generations(value)) for value in views_of_two.values[seen[1] :]} <= {
        str(before)
    }


@contextlib.asynccontextmanager
async def two_servers(cluster):
    """Yield the first server's session, and the second server with its session and its views."""
    (one, first), (two, second) = await cluster.servers(2)
    views_of_two = CallbackRecorder()
    async with run_meanwhile(one.follow(CallbackRecorder()), two.follow(views_of_two)):
        await views_of_two.wait_for(lambda view: len(view.servers) == 2)
        yield first, two, second, views_of_two


@contextlib.asynccontextmanager
async def first_server_absent(cluster):
    """Yield two servers after an outage of ZooKeeper that only the second session has survived."""
    async with two_servers(cluster) as (first, two, second, views_of_two):
        first.suspend()
        second.suspend()
        cluster.zookeeper.advance(60_000)
        second.resume()
        first.expire()
        await wait_for_followers(cluster)
        yield first, two, views_of_two


@pytest.mark.parametrize("end", ["session timeout", "known to be dead", "replaced at its address"])
@run_in_cluster
async def test_the_leader_waits_a_limited_time_for_an_absent_server(cluster, end):
    async with first_server_absent(cluster) as (_, two, views_of_two):
        remaining_servers = [2]
        assert not (await two.read()).is_settled
        if end == "session timeout":
            cluster.zookeeper.advance(SESSION_TIMEOUT_MS)
        elif end == "known to be dead":
            # The other servers report the leader, although its node is already deleted.
            await two.remove_dead_server(server_descriptor(1))
        else:
            new_member, _ = cluster.member()
            host, port = server_descriptor(1).host, server_descriptor(1).port
            await new_member.register(model.ServerDescriptor(7, host, port))
            remaining_servers = [2, 7]
        await views_of_two.wait_for(lambda view: list(view.servers) == remaining_servers)
        assert len(owners_and_generations(views_of_two.values[-1])) == PARTITION_COUNT
        # Right after the reconnection, the leader reacts to a dead server at once.
        third, _ = cluster.member()
        await third.register(server_descriptor(3))
        await views_of_two.wait_for(lambda view: 3 in view.servers)
        await two.remove_dead_server(server_descriptor(3))
        await views_of_two.wait_for(lambda view: list(view.servers) == remaining_servers)


@run_in_cluster
async def test_a_short_loss_of_zookeeper_does_not_delay_the_reaction_to_a_dead_server(cluster):
    async with two_servers(cluster) as (first, _two, second, views_of_two):
        second.suspend()
        cluster.zookeeper.advance(100)
        second.resume()
        await wait_for_followers(cluster)
        first.expire()
        await views_of_two.wait_for(lambda view: list(view.servers) == [2])
    assert len(owners_and_generations(views_of_two.values[-1])) == PARTITION_COUNT


@run_in_cluster
async def test_a_preference_takes_effect_with_the_write_that_publishes_it(cluster):
    (first_server, _), (second_server, _) = cluster.member(), cluster.member()
    inbox = CallbackRecorder()
    async with run_meanwhile(first_server.follow(inbox), second_server.follow(CallbackRecorder())):
        await first_server.register(server_descriptor(1))
        await second_server.register(server_descriptor(2))
        await inbox.wait_for(lambda view: len(set(view.owners.values())) > 1)
        before = owners_and_generations(await first_server.read())
        await second_server.change_preferences(server_descriptor(2, preferred=[0, 1, 2]))
        view = await second_server.read()
        assert view.is_settled
        assert {
            each for each, (server, _) in owners_and_generations(view).items() if server == 2
        } >= {0, 1, 2}
        moved = [each for each in before if before[each] != owners_and_generations(view)[each]]
        assert all(owners_and_generations(view)[each][1] == before[each][1] + 1 for each in moved)
        # Both servers change preferences within one watch interval; no server loops
        # (docs/design/wire-format.md 2.6).
        await second_server.change_preferences(server_descriptor(2))
        await first_server.change_preferences(server_descriptor(1, preferred=[3]))
        view = await first_server.read()
        assert owners_and_generations(view)[3][0] == 1
        assert view.servers[2].preferred == ()


@pytest.mark.parametrize("is_sent", [False, True], ids=["before", "at the write"])
@run_in_cluster
async def test_a_preference_that_could_not_be_written_is_not_kept(cluster, is_sent):
    [(member, session)] = await cluster.servers(1)
    original_write = session.write

    def write(operations):
        session.suspend()
        return original_write(operations)

    if is_sent:
        session.write = write
    else:
        session.suspend()
    with pytest.raises(errors.CoordinatorUnavailable):
        await member.change_preferences(server_descriptor(1, preferred=[2]))
    session.write = original_write
    session.resume()
    inbox = CallbackRecorder()
    async with run_meanwhile(member.follow(inbox)):
        view = await inbox.wait_for(lambda view: view.is_settled)
    assert view.servers[1].preferred == ()


@run_in_cluster
async def test_a_change_of_preferences_waits_for_servers_that_may_register_again(cluster):
    async with (
        first_server_absent(cluster) as (first, two, views_of_two),
        asyncio.TaskGroup() as tasks,
    ):
        before = owners_and_generations(views_of_two.values[-1])
        foreign = min(each for each, (server, _) in before.items() if server == 1)
        preference_task = tasks.create_task(
            two.change_preferences(server_descriptor(2, preferred=[foreign]))
        )
        await wait_for_followers(cluster)
        cluster.zookeeper.advance(SESSION_TIMEOUT_MS - 1)
        await wait_for_followers(cluster)
        assert not preference_task.done()
        # The preference is written together with its assignment.
        assert not (await two.read()).servers[2].preferred
        first.resume()
        await preference_task
        view = await views_of_two.wait_for(lambda view: bool(view.servers[2].preferred))
        moved_partitions = {
            each for each in before if owners_and_generations(view)[each] != before[each]
        }
        # The preferred partition moves, and another one in exchange; no others move.
        assert owners_and_generations(view)[foreign] == (2, before[foreign][1] + 1)
        assert all(
            owners_and_generations(view)[moved_partition][1] <= before[moved_partition][1] + 1
            for moved_partition in moved_partitions
        )
        assert len(moved_partitions) <= 2


@run_in_cluster
async def test_a_change_of_preferences_stops_waiting_when_the_absent_server_is_found_dead(cluster):
    async with first_server_absent(cluster) as (_, two, views_of_two), asyncio.TaskGroup() as tasks:
        preference_task = tasks.create_task(
            two.change_preferences(server_descriptor(2, preferred=[3]))
        )
        await wait_for_followers(cluster)
        assert not preference_task.done()
        # Both waiting callers wake when other servers report that the owner is dead.
        await two.remove_dead_server(server_descriptor(1))
        await preference_task
        view = await views_of_two.wait_for(lambda view: list(view.servers) == [2])
    assert view.servers[2].preferred == (3,)


@run_in_cluster
async def test_a_server_that_leaves_while_it_waits_does_not_register_again(cluster):
    async def expect_rejection(request):
        with pytest.raises(errors.CoordinatorUnavailable, match="is leaving"):
            await request

    async with first_server_absent(cluster) as (_, two, _at_two), asyncio.TaskGroup() as tasks:
        preference_task = tasks.create_task(
            expect_rejection(two.change_preferences(server_descriptor(2, preferred=[3])))
        )
        await wait_for_followers(cluster)
        await two.unregister()
        cluster.zookeeper.advance(SESSION_TIMEOUT_MS)
        await preference_task
        await wait_for_followers(cluster)
        assert cluster.registered() == []


@run_in_cluster
async def test_a_server_gets_no_partition_until_another_server_has_reached_it(cluster):
    """Rule 6."""
    (first_server, session), (second_server, _) = cluster.member(), cluster.member()
    reachability = PublishedReachability(ClusterNodes(session, ROOT))
    inbox = CallbackRecorder()
    await first_server.register(server_descriptor(1))
    async with run_meanwhile(first_server.follow(inbox)):
        await inbox.wait_for(lambda view: len(view.partitions_of(1)) == 4)
        await reachability.publish(ServerId(1), ReachReport())
        await second_server.register(server_descriptor(2))
        view = await inbox.wait_for(lambda view: 2 in view.servers)
        assert len(view.partitions_of(1)) == 4
        assert view.excluded == {2}
        await second_server.change_preferences(server_descriptor(2, preferred=[3]))
        assert len((await first_server.read()).partitions_of(1)) == 4
        await reachability.publish(ServerId(1), ReachReport(frozenset({ServerId(2)})))
        view = await inbox.wait_for(lambda view: len(view.partitions_of(2)) == 2)
        assert not view.excluded
        assert 3 in view.partitions_of(2)
        await reachability.publish(ServerId(1), ReachReport(unreachable={ServerId(2): "refused"}))
        await inbox.wait_for(lambda view: len(view.partitions_of(1)) == 4)
        await session.close()
    async with run_meanwhile(second_server.follow(inbox)):
        await inbox.wait_for(lambda view: len(view.partitions_of(2)) == 4)
