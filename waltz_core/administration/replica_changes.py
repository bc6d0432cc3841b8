"""Changes of storages, replicas and servers, for commands and for the console.

Each function determines the wanted placement of replicas, and `cluster/change/replica_steps.py`
plans the steps. A function returns the fields of its result; the field `summary` is a sentence.
"""

import asyncio
from collections.abc import Mapping

from waltz_core.administration import member_connections
from waltz_core.administration.change_run import ChangeResult, ChangeRun
from waltz_core.administration.member_queries import hello_text_at, is_answering
from waltz_core.client.links.storage_admin import admin_connection
from waltz_core.cluster.change import replica_steps as placements
from waltz_core.cluster.change.replica_steps import Placement, ReplicaPlan, ranges_of_numbers
from waltz_core.cluster.change.storage_changes import StorageLayout
from waltz_core.config.connect_string import split_address
from waltz_core.errors import BadConfig, BadRequest, Unreachable, WaltzError
from waltz_core.records.record import PartitionId, ReplicaId
from waltz_core.wire.admin_messages import Done, RemovePartition
from waltz_core.wire.messages import WireProtocol

POLL_INTERVAL_S = 0.1

# --- storages


async def add_storage(
    run: ChangeRun, *, address: str, group: int | None, admin_port: int | None
) -> ChangeResult:
    """Add an empty storage to the cluster."""
    address, port = ReplicaId(address), _admin_port_or_default(admin_port, address)
    layout_before = await run.coordinator.storages.read_layout()
    layout_before.with_storage(address, port, group)  # rejects invalid options first
    await _check_data_port(address)
    layout = await run.coordinator.storages.change_layout(
        lambda old: old.with_storage(address, port, group)
    )
    group = layout.groups[address]
    return {
        "storage": address,
        "group": group,
        "summary": f"added storage {address} to group {group}; it has no replicas yet",
    }


async def _check_data_port(address: ReplicaId) -> None:
    """Raise Unreachable if no process answers, BadConfig if the port is no data port."""
    name = await hello_text_at(WireProtocol.STORAGE, address)
    if name is None:
        raise Unreachable(
            f"storage {address} does not answer; nothing was changed. Hint: start the storage "
            "with an empty directory, then run the command again."
        )
    if name != WireProtocol.STORAGE.listener_text:
        raise BadConfig(
            f"{address}: expected the port of a storage, found a {name[:80]!r}; nothing was "
            "changed. Hint: use the address at which servers connect to the storage (`port` "
            "in storage.toml)."
        )


async def set_admin_port(run: ChangeRun, *, address: str, admin_port: int) -> ChangeResult:
    """Change the admin port of a storage in ZooKeeper."""
    storage = ReplicaId(address)
    await run.coordinator.storages.change_layout(
        lambda old: old.with_admin_port(storage, admin_port)
    )
    return {"storage": storage, "summary": f"the admin port of storage {storage} is {admin_port}"}


async def remove_storage(run: ChangeRun, *, address: str) -> ChangeResult:
    """Move a storage's replicas to other storages, then remove it from the cluster."""
    storage = ReplicaId(address)
    layout, current_replicas = await _read_layout(run)
    layout.check_storage_exists(storage)
    placement = placements.placement_without_storage(current_replicas, layout.groups, storage)
    await run.carry_out_plan(ReplicaPlan.for_placement(placement, layout.assignment))
    await _unregister_storage(run, storage)
    return {
        "storage": address,
        "moved": len(placement),
        "summary": f"storage {address} was removed from the cluster; its files were kept",
    }


async def replace_storage(
    run: ChangeRun, *, address: str, successor: str, admin_port: int | None
) -> ChangeResult:
    """Move all replicas of a storage to its replacement."""
    old, new = ReplicaId(address), ReplicaId(successor)
    layout, current_replicas = await _read_layout(run)
    layout.check_storage_exists(old)
    if old == new:
        return await _replace_in_place(run, layout, current_replicas, old)
    if new not in layout.assignment.partitions:
        port = _admin_port_or_default(admin_port, new)
        group = layout.groups.get(old)
        layout.with_storage(new, port, group)  # rejects invalid options first
        await _check_data_port(new)
        layout = await run.coordinator.storages.change_layout(
            lambda before: before.with_storage(new, port, group)
        )
        run.note_step(f"storage {new} is in group {group}")
    placement = placements.placement_with_replacement(current_replicas, old, new, current_replicas)
    await run.carry_out_plan(ReplicaPlan.for_placement(placement, layout.assignment))
    await _unregister_storage(run, old)
    return {
        "storage": new,
        "moved": len(placement),
        "summary": f"storage {new} has replaced {old}; moved replicas: {len(placement)}",
    }


async def _replace_in_place(
    run: ChangeRun, layout: StorageLayout, placement: Placement, address: ReplicaId
) -> ChangeResult:
    """Replace a lost storage by an empty one at the same address."""
    replicas_by_partition = {
        partition_id: replicas
        for partition_id, replicas in placement.items()
        if address in replicas
    }
    if not replicas_by_partition:
        return await _add_replacement(
            run, placements.placement_with_missing_replicas(placement, address), address
        )
    single_replica_partitions = [
        partition_id
        for partition_id, replicas in replicas_by_partition.items()
        if len(replicas) == 1
    ]
    if single_replica_partitions:
        raise BadRequest(
            f"nothing was changed, because storage {address} has the only replica of partition "
            f"{single_replica_partitions[0]}. Hint: add another replica first (`cluster "
            "add-replica`)."
        )
    if await is_answering(WireProtocol.STORAGE, address):
        raise BadRequest(
            f"storage {address} still runs and answers. Hint: stop it, and repeat this change. "
            "Start the replacement, with an empty directory, when the change reports that an empty "
            "storage may start."
        )
    remaining_replicas = {
        partition_id: tuple(
            replica for replica in replicas_by_partition[partition_id] if replica != address
        )
        for partition_id in replicas_by_partition
    }
    await run.carry_out_plan(ReplicaPlan.for_placement(remaining_replicas, layout.assignment))
    return await _add_replacement(run, replicas_by_partition, address)


async def _add_replacement(
    run: ChangeRun, placement: Placement, address: ReplicaId
) -> ChangeResult:
    """Wait for the empty storage at an address, and give it the missing replicas."""
    if not await is_answering(WireProtocol.STORAGE, address):
        await run.coordinator.storages.forget_storage_id(address)
        run.note_step(f"an empty storage may now start at {address}")
    while not await is_answering(WireProtocol.STORAGE, address):
        run.report_wait(
            f"the start of an empty storage at {address}, which then gets replicas of partitions "
            f"{ranges_of_numbers(sorted(placement))}"
        )
        await asyncio.sleep(POLL_INTERVAL_S)
    layout = await run.coordinator.storages.read_layout()
    await run.carry_out_plan(ReplicaPlan.for_placement(placement, layout.assignment))
    summary = (
        f"the new storage at {address} has replaced the old one; copied replicas: {len(placement)}"
    )
    if not placement:
        summary = (
            f"storage {address} has no replicas, and every partition has the usual number of "
            "replicas. Hint: if the storage had replicas before, add them with `waltz-core "
            "cluster add-replica`."
        )
    return {"storage": address, "moved": len(placement), "summary": summary}


async def _unregister_storage(run: ChangeRun, address: ReplicaId) -> None:
    """Remove a storage and its ID from ZooKeeper."""
    await run.coordinator.storages.change_layout(lambda old: old.without_storage(address))
    await run.coordinator.storages.forget_storage_id(address)
    run.note_step(f"storage {address} is no longer registered in ZooKeeper")


def _admin_port_or_default(admin_port: int | None, address: str) -> int:
    return split_address(address)[1] + 1 if admin_port is None else admin_port


# --- replicas


async def add_replica(
    run: ChangeRun, *, partitions: str, addresses: tuple[str, ...]
) -> ChangeResult:
    """Add storages to the replicas of each partition, one storage after the other."""
    layout, current_replicas = await _read_layout(run)
    partition_ids = await _parse_partitions(run, partitions)
    new_replicas = [ReplicaId(each) for each in addresses]
    placement = {
        each: tuple(dict.fromkeys([*current_replicas[each], *new_replicas]))
        for each in partition_ids
    }
    return await _change_replicas(run, layout, placement)


async def remove_replica(
    run: ChangeRun, *, partitions: str, addresses: tuple[str, ...]
) -> ChangeResult:
    """Remove the replicas of partitions from storages."""
    layout, current_replicas = await _read_layout(run)
    removed = [ReplicaId(each) for each in addresses]
    for address in removed:
        layout.check_storage_exists(address)
    placement = {
        each: tuple(name for name in current_replicas[each] if name not in removed)
        for each in await _parse_partitions(run, partitions)
    }
    for partition_id, replicas in placement.items():
        if not replicas:
            raise BadRequest(
                "nothing was changed, because the command would remove all replicas of partition "
                f"{partition_id}"
            )
    return await _change_replicas(run, layout, placement)


async def move_replica(
    run: ChangeRun, *, partitions: str, origin: str, target: str
) -> ChangeResult:
    """Move replicas of partitions from one storage to another."""
    layout, current_replicas = await _read_layout(run)
    old, new = ReplicaId(origin), ReplicaId(target)
    partition_ids = await _parse_partitions(run, partitions)
    for partition_id in partition_ids:
        if old not in current_replicas[partition_id] and new not in current_replicas[partition_id]:
            raise BadRequest(
                f"nothing was changed, because storage {old} has no replica of partition "
                f"{partition_id}"
            )
    return await _change_replicas(
        run,
        layout,
        placements.placement_with_replacement(current_replicas, old, new, partition_ids),
    )


async def auto_assign(run: ChangeRun, *, replicas: int | None) -> ChangeResult:
    """Distribute all replicas evenly over groups and storages."""
    layout, current_replicas = await _read_layout(run)
    return await _change_replicas(
        run, layout, placements.spread_replicas(current_replicas, layout.groups, replicas)
    )


async def _change_replicas(
    run: ChangeRun,
    layout: StorageLayout,
    placement: Mapping[PartitionId, tuple[ReplicaId, ...]],
) -> ChangeResult:
    """Add and remove replicas until each partition has the wanted ones."""
    for replicas in placement.values():
        for address in replicas:
            layout.check_storage_exists(address)
    changed = {
        partition_id: replicas
        for partition_id, replicas in placement.items()
        if set(replicas) != set(layout.assignment.replicas_of(partition_id))
    }
    await run.carry_out_plan(ReplicaPlan.for_placement(placement, layout.assignment))
    await _delete_replica_files(run, layout, changed)
    return {
        "changed": sorted(changed),
        "summary": f"{len(changed)} of {len(placement)} partitions were changed"
        if changed
        else "nothing to change",
    }


async def _delete_replica_files(
    run: ChangeRun, layout: StorageLayout, old_placement: Placement
) -> None:
    """Delete the files of partitions on storages from which these partitions were removed.

    This is safe because the store sessions of the partitions are open without these storages. If a
    storage does not answer, its files remain, and the doctor reports them.
    """
    files_by_storage: dict[ReplicaId, list[PartitionId]] = {}
    for partition_id, replicas in old_placement.items():
        for address in layout.assignment.replicas_of(partition_id):
            if address not in replicas:
                files_by_storage.setdefault(address, []).append(partition_id)
    for address, partitions in files_by_storage.items():
        admin = f"{split_address(address)[0]}:{layout.admin_ports[address]}"
        try:
            async with admin_connection(admin, ssl=member_connections.ssl_context()) as storage:
                for partition_id in partitions:
                    await storage.request(Done, RemovePartition, partition_id, True, False)  # noqa: FBT003 - the wire's
        except WaltzError as error:
            names = ", ".join(map(str, partitions))
            run.note_step(f"storage {address} may still have files of partitions {names}: {error}")


async def _read_layout(run: ChangeRun) -> tuple[StorageLayout, Placement]:
    layout = await run.coordinator.storages.read_layout()
    return layout, placements.placement_of(layout.assignment, await _partition_count(run))


async def _parse_partitions(run: ChangeRun, partitions: str) -> tuple[PartitionId, ...]:
    return placements.parse_partitions(partitions, await _partition_count(run))


async def _partition_count(run: ChangeRun) -> int:
    return (await run.coordinator.read_cluster()).params.partition_count


# --- servers


async def remove_server(run: ChangeRun, *, server: str) -> ChangeResult:
    """Remove a stopped server from ZooKeeper."""
    servers = (await run.coordinator.read_servers()).servers
    matching = [descriptor for descriptor in servers.values() if descriptor.address == server]
    if not matching:
        names = ", ".join(descriptor.address for descriptor in servers.values()) or "none"
        raise BadConfig(f"no server is registered at {server}; registered servers: {names}")
    if await is_answering(WireProtocol.CLIENT, server):
        raise BadRequest(
            f"the server at {server} still runs and answers. Hint: stop it; it then unregisters "
            "itself."
        )
    for descriptor in matching:
        await run.coordinator.remove_dead_server(descriptor)
    return {
        "server": server,
        "summary": f"server {server} was removed; other servers own its partitions now",
    }
