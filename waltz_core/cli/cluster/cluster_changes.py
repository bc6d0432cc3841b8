"""`waltz-core cluster add-storage | move-replica | auto-assign | ...`: replicas and storages.

Each verb says what it wants; `cluster/change/changes.py` finds the steps, `cli/changing.py` runs
them.
"""

import argparse
import asyncio
from collections.abc import Mapping

from waltz_core.cli import own_transport
from waltz_core.cli.asking import answers, name_at
from waltz_core.cli.changing import Command, Result, add_common, run
from waltz_core.cli.output import ranges_of
from waltz_core.cli.parsing import Verbs
from waltz_core.client.links.storage_admin import administered
from waltz_core.cluster.change import changes
from waltz_core.cluster.change.changes import (
    Placement,
    Plan,
)
from waltz_core.cluster.change.storages import StorageLayout
from waltz_core.config.connect_string import split_address
from waltz_core.errors import BadConfig, BadRequest, Unreachable, WaltzError
from waltz_core.records.record import (
    PartitionId,
    ReplicaId,
)
from waltz_core.wire.admin_messages import Done, RemovePartition
from waltz_core.wire.messages import Surface

LOOK_AGAIN_S = 0.1

STORAGE = "the address at which servers reach the storage"


def add(verbs: Verbs) -> None:
    """Declare the verbs."""
    _add_storage_verbs(verbs)
    _add_replica_verbs(verbs)
    evened = verbs.add_parser(
        "auto-assign", help="spread all replicas evenly over groups and storages"
    )
    evened.add_argument(
        "--replicas", type=int, metavar="N", help="how many of each partition; else as many as now"
    )
    _finish(evened, _auto_assign)
    server = verbs.add_parser("remove-server", help="take the node of a dead server out")
    server.add_argument("address", metavar="HOST:PORT", help="as `server list` has it")
    _finish(server, _remove_server)


def _add_storage_verbs(verbs: Verbs) -> None:
    added = verbs.add_parser("add-storage", help="make a storage part of the cluster, empty")
    added.add_argument("address", metavar="HOST:PORT", help=STORAGE)
    added.add_argument("--group", type=int, help="where it stands; else a group of its own")
    _add_admin_port(added)
    _finish(added, _add_storage)
    removed = verbs.add_parser("remove-storage", help="move its replicas away, then leave it out")
    removed.add_argument("address", metavar="HOST:PORT", help=STORAGE)
    _finish(removed, _remove_storage)
    moved = verbs.add_parser("set-admin-port", help="say where a storage is administered")
    moved.add_argument("address", metavar="HOST:PORT", help=STORAGE)
    moved.add_argument("admin_port", metavar="ADMIN_PORT", type=int, help="where it listens now")
    _finish(moved, _set_admin_port)
    replaced = verbs.add_parser(
        "replace-storage", help="give what a storage held to another one, or to its empty successor"
    )
    replaced.add_argument("address", metavar="OLD", help="HOST:PORT of the storage that is gone")
    replaced.add_argument("new", metavar="NEW", help="may be OLD: an empty one at its address")
    _add_admin_port(replaced)
    _finish(replaced, _replace_storage)


def _add_replica_verbs(verbs: Verbs) -> None:
    for name, also, text, verb in (
        (
            "add-replica",
            "assign-partition",
            "give a storage a replica of some partitions",
            _add_replica,
        ),
        (
            "remove-replica",
            "unassign-partition",
            "take the replica of some partitions from a storage",
            _remove_replica,
        ),
    ):
        command = verbs.add_parser(name, aliases=[also], help=text)
        _add_partitions(command)
        command.add_argument("address", metavar="HOST:PORT", nargs="+", help="the storages")
        _finish(command, verb)
    moved = verbs.add_parser("move-replica", help="move a replica from one storage to another")
    _add_partitions(moved)
    moved.add_argument("old", metavar="FROM", help="HOST:PORT of the storage that has it")
    moved.add_argument("new", metavar="TO", help="HOST:PORT of the storage that is to have it")
    _finish(moved, _move_replica)


def _add_partitions(command: argparse.ArgumentParser) -> None:
    command.add_argument("partitions", metavar="PARTITIONS", help="like 3 or 0-6,9 or all")


def _add_admin_port(command: argparse.ArgumentParser) -> None:
    command.add_argument("--admin-port", type=int, help="its admin port; else its port + 1")


def _finish(command: argparse.ArgumentParser, verb: object) -> None:
    add_common(command)
    command.set_defaults(verb=lambda arguments: run(arguments, verb), creates=False)  # type: ignore[arg-type]


# --- storages


async def _add_storage(command: Command) -> Result:
    arguments = command.arguments
    address = ReplicaId(arguments.address)
    port = _admin_port(arguments.admin_port, address)
    before = await command.coordinator.storages.read()
    before.with_storage(address, port, arguments.group)  # bad words are refused first
    await _check_storage(address)
    layout = await command.coordinator.storages.change(
        lambda old: old.with_storage(address, port, arguments.group)
    )
    group = layout.groups[address]
    return {
        "storage": address,
        "group": group,
        "summary": f"{address} is a storage of group {group} and holds nothing yet",
    }


async def _check_storage(address: ReplicaId) -> None:
    """Raise Unreachable where nothing listens, BadConfig where it is no storage's own port."""
    name = await name_at(Surface.STORAGE, address)
    if name is None:
        raise Unreachable(
            f"{address}: expected a storage that answers, found none; nothing was changed. "
            "Hint: start the storage with an empty directory, then give the command again."
        )
    if name != Surface.STORAGE.listener_text:
        raise BadConfig(
            f"{address}: expected a storage's port, found a {name[:80]!r}; nothing was changed. "
            "Hint: use the address at which servers reach the storage (`port` in storage.toml)."
        )


async def _set_admin_port(command: Command) -> Result:
    address, port = ReplicaId(command.arguments.address), command.arguments.admin_port
    await command.coordinator.storages.change(lambda old: old.with_admin_port(address, port))
    return {"storage": address, "summary": f"{address} is administered at port {port}"}


async def _remove_storage(command: Command) -> Result:
    address = ReplicaId(command.arguments.address)
    layout, now = await _look(command)
    layout.check_known(address)
    wanted = changes.without_storage(now, layout.groups, address)
    await command.carry_out(Plan.to(wanted, layout.assignment))
    await _leave_out(command, address)
    return {
        "storage": address,
        "moved": len(wanted),
        "summary": f"{address} is no storage of this cluster any more; its files are still there",
    }


async def _replace_storage(command: Command) -> Result:
    arguments = command.arguments
    old, new = ReplicaId(arguments.address), ReplicaId(arguments.new)
    layout, now = await _look(command)
    layout.check_known(old)
    if old == new:
        return await _replace_in_place(command, layout, now, old)
    if new not in layout.assignment.partitions:
        port = _admin_port(arguments.admin_port, new)
        group = layout.groups.get(old)
        layout.with_storage(new, port, group)  # bad words are refused first
        await _check_storage(new)
        layout = await command.coordinator.storages.change(
            lambda before: before.with_storage(new, port, group)
        )
        command.note(f"{new} is a storage of group {group}")
    wanted = changes.replaced(now, old, new, now)
    await command.carry_out(Plan.to(wanted, layout.assignment))
    await _leave_out(command, old)
    return {
        "storage": new,
        "moved": len(wanted),
        "summary": f"{new} holds every replica that {old} had: {len(wanted)}",
    }


async def _replace_in_place(
    command: Command, layout: StorageLayout, now: Placement, address: ReplicaId
) -> Result:
    """Leave a storage out, forget who it was, and let its successor begin with nothing."""
    held = {each: replicas for each, replicas in now.items() if address in replicas}
    if not held:
        return await _bring_back(command, changes.restored(now, address), address)
    alone = [each for each, replicas in held.items() if len(replicas) == 1]
    if alone:
        raise BadRequest(f"{address} has the only replica of partition {alone[0]}")
    if await answers(Surface.STORAGE, address):
        raise BadRequest(f"{address} is alive: stop it, and give its successor an empty directory")
    without = {each: tuple(its for its in held[each] if its != address) for each in held}
    await command.carry_out(Plan.to(without, layout.assignment))
    return await _bring_back(command, held, address)


async def _bring_back(command: Command, wanted: Placement, address: ReplicaId) -> Result:
    """Let an empty storage take an address, and give it its replicas."""
    if not await answers(Surface.STORAGE, address):
        await command.coordinator.storages.forget_id(address)
        command.note(f"{address} may be taken by an empty storage")
    while not await answers(Surface.STORAGE, address):
        command.wait_for(
            f"a storage with an empty directory to start at {address}, which then gets the "
            f"partitions {ranges_of(sorted(wanted))}"
        )
        await asyncio.sleep(LOOK_AGAIN_S)
    layout = await command.coordinator.storages.read()
    await command.carry_out(Plan.to(wanted, layout.assignment))
    summary = f"the new storage at {address} has every replica of the old one: {len(wanted)}"
    if not wanted:
        summary = (
            f"{address} holds nothing: no partition has fewer replicas than the others. "
            "Hint: if it held replicas before, `waltz-core cluster add-replica` gives them back."
        )
    return {"storage": address, "moved": len(wanted), "summary": summary}


async def _leave_out(command: Command, address: ReplicaId) -> None:
    await command.coordinator.storages.change(lambda old: old.without_storage(address))
    await command.coordinator.storages.forget_id(address)
    command.note(f"{address} is left out")


def _admin_port(asked: int | None, address: ReplicaId) -> int:
    return split_address(address)[1] + 1 if asked is None else asked


# --- replicas


async def _add_replica(command: Command) -> Result:
    """Add to each partition one storage after the other."""
    layout, now = await _look(command)
    added = [ReplicaId(each) for each in command.arguments.address]
    return await _go(
        command,
        layout,
        {each: tuple(dict.fromkeys([*now[each], *added])) for each in await _partitions(command)},
    )


async def _remove_replica(command: Command) -> Result:
    layout, now = await _look(command)
    removed = [ReplicaId(each) for each in command.arguments.address]
    for address in removed:
        layout.check_known(address)
    wanted = {
        each: tuple(name for name in now[each] if name not in removed)
        for each in await _partitions(command)
    }
    for partition_id, replicas in wanted.items():
        if not replicas:
            raise BadRequest(f"partition {partition_id} would be left without a replica")
    return await _go(command, layout, wanted)


async def _move_replica(command: Command) -> Result:
    layout, now = await _look(command)
    old, new = ReplicaId(command.arguments.old), ReplicaId(command.arguments.new)
    chosen = await _partitions(command)
    for partition_id in chosen:
        if old not in now[partition_id] and new not in now[partition_id]:
            raise BadRequest(f"{old} has no replica of partition {partition_id}")
    return await _go(command, layout, changes.replaced(now, old, new, chosen))


async def _auto_assign(command: Command) -> Result:
    layout, now = await _look(command)
    return await _go(
        command, layout, changes.spread(now, layout.groups, command.arguments.replicas)
    )


async def _go(
    command: Command, layout: StorageLayout, wanted: Mapping[PartitionId, tuple[ReplicaId, ...]]
) -> Result:
    for replicas in wanted.values():
        for address in replicas:
            layout.check_known(address)
    moved = {
        each: replicas
        for each, replicas in wanted.items()
        if set(replicas) != set(layout.assignment.replicas_of(each))
    }
    await command.carry_out(Plan.to(wanted, layout.assignment))
    await _delete_files(command, layout, moved)
    return {
        "changed": sorted(moved),
        "summary": f"{len(moved)} of {len(wanted)} partitions have changed"
        if moved
        else "nothing had to change",
    }


async def _delete_files(command: Command, layout: StorageLayout, moved: Placement) -> None:
    """Have storages delete what they hold of partitions that are assigned to others now.

    The partition's session is open without them. A storage that does not answer keeps its files,
    and the doctor names them.
    """
    left: dict[ReplicaId, list[PartitionId]] = {}
    for partition_id, replicas in moved.items():
        for address in layout.assignment.replicas_of(partition_id):
            if address not in replicas:
                left.setdefault(address, []).append(partition_id)
    for address, partitions in left.items():
        admin = f"{split_address(address)[0]}:{layout.admin_ports[address]}"
        try:
            async with administered(admin, ssl=own_transport.ssl()) as storage:
                for partition_id in partitions:
                    await storage.ask(Done, RemovePartition, partition_id, True, False)  # noqa: FBT003 - the wire's
        except WaltzError as error:
            names = ", ".join(map(str, partitions))
            command.note(f"{address} may still have files of partitions {names}: {error}")


async def _look(command: Command) -> tuple[StorageLayout, Placement]:
    layout = await command.coordinator.storages.read()
    return layout, changes.placement_of(layout.assignment, await _partition_count(command))


async def _partitions(command: Command) -> tuple[PartitionId, ...]:
    count = await _partition_count(command)
    return changes.parse_partitions(command.arguments.partitions, count)


async def _partition_count(command: Command) -> int:
    return (await command.coordinator.read_cluster()).params.partition_count


# --- servers


async def _remove_server(command: Command) -> Result:
    address = command.arguments.address
    servers = (await command.coordinator.read_servers()).servers
    found = [each for each in servers.values() if each.address == address]
    if not found:
        names = ", ".join(each.address for each in servers.values()) or "none"
        raise BadConfig(f"no server is registered at {address}; registered are {names}")
    if await answers(Surface.CLIENT, address):
        raise BadRequest(f"the server at {address} answers: stop it, and it takes itself out")
    for each in found:
        await command.coordinator.take_out_server(each)
    return {"server": address, "summary": f"{address} is taken out; others own its partitions"}
