"""Changes of the permissions whose answer from ZooKeeper is lost."""

import asyncio
from dataclasses import replace

import pytest

from tests.cluster_contract import CLUSTER_KEY
from tests.loops import run_on_virtual_loop
from waltz_core.access.permissions import Permissions, PrincipalLimits
from waltz_core.cluster.change.creation import NewCluster
from waltz_core.cluster.change.stored_permissions import Author
from waltz_core.cluster.znodes import access_node
from waltz_core.cluster.znodes.interface import SetNode
from waltz_core.cluster.zookeeper.zookeeper_in_memory import MemoryZooKeeper, WriteFault

FIRST_REVISION = Permissions(1, "ops", 0, bytes(32))
AUTHOR = Author("ann", 7)


def with_limits(old):
    return replace(old, limits={**old.limits, f"p{len(old.limits)}": PrincipalLimits(feeds=1)})


async def cluster():
    coordinator = MemoryZooKeeper(asyncio.Event).coordinator("/w")
    await coordinator.create_cluster(NewCluster("w", 1, CLUSTER_KEY))
    return coordinator


@pytest.mark.parametrize("fault", WriteFault)
@run_on_virtual_loop
async def test_a_change_with_a_lost_answer_is_made_once(fault):
    coordinator = await cluster()
    faults = coordinator._znodes.faults
    faults.append(fault)
    version = await coordinator.permissions.create(FIRST_REVISION, AUTHOR)
    assert version == replace(FIRST_REVISION, changed_by="ann", changed_ms=7)
    assert not faults
    faults.append(fault)
    changed = await coordinator.permissions.change(with_limits, AUTHOR)
    assert (changed.before, changed.after.revision, len(changed.after.limits)) == (version, 2, 1)
    assert not faults
    assert await coordinator.permissions.read_existing() == changed.after


@run_on_virtual_loop
async def test_a_change_is_computed_again_after_a_concurrent_change():
    coordinator = await cluster()
    version = await coordinator.permissions.create(FIRST_REVISION, AUTHOR)
    seen = []

    def with_rival(old):
        seen.append(old.revision)
        if len(seen) == 1:
            znodes, path = coordinator._znodes._zookeeper, coordinator.paths.access
            rival = replace(with_limits(version), revision=2)
            znodes.apply_operations([SetNode(path, access_node.encode_permissions(rival), 0)], 0)
        return with_limits(old)

    changed = await coordinator.permissions.change(with_rival, AUTHOR)
    assert seen == [1, 2]
    assert (changed.after.revision, sorted(changed.after.limits)) == (3, ["p0", "p1"])
    assert await coordinator.permissions.read_existing() == changed.after
