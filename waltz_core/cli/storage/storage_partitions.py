"""`waltz-core storage add-partition | remove-partition | …`: what changes the replicas of storages.

Rules:
    1. One partition at a time; the first refusal ends the command, and what was done is told.
    2. What may lose data is refused by the storage, not here: tools of any age ask the same one.
    3. What is changed is on the cluster's record, where a cluster was named.
"""

import argparse
from collections.abc import Awaitable, Callable

from waltz_core.cli import own_transport
from waltz_core.cli.output import say, show, show_json, show_table
from waltz_core.cli.progress import ProgressLine
from waltz_core.cli.storage.storage_target import (
    Target,
    add_partitions,
    add_target,
    on_record,
    partitions_of,
    read_facts,
    target_of,
)
from waltz_core.client.links.storage_admin import (
    COPY_BYTES_MAX,
    StorageAdmin,
    administered,
    copy_partition,
)
from waltz_core.errors import BadConfig, BadRequest, WaltzError
from waltz_core.records.record import ReplicaId
from waltz_core.wire.admin_messages import (
    Done,
    HeldRequest,
    HeldResponse,
    MarkSuspect,
    RemovePartition,
    ReplicaRequest,
    ReplicaResponse,
    ReSeed,
    SetAssigned,
    SetAvailable,
)

FORCE = "insist, though the last session counts on this replica: read what is said without it first"


def add_add(verb: argparse.ArgumentParser) -> None:
    """Declare `add-partition`."""
    add_partitions(verb)
    add_target(verb, _add)


def add_remove(verb: argparse.ArgumentParser) -> None:
    """Declare `remove-partition`."""
    add_partitions(verb)
    verb.add_argument("--delete-files", action="store_true", help="else they stay where they are")
    verb.add_argument("--force", action="store_true", help=FORCE)
    add_target(verb, _remove)


def add_availability(verb: argparse.ArgumentParser) -> None:
    """Declare `availability`."""
    add_partitions(verb)
    verb.add_argument(
        "--online", choices=("true", "false"), required=True, help="false: no server may use them"
    )
    add_target(verb, _availability)


def add_mark_suspect(verb: argparse.ArgumentParser) -> None:
    """Declare `mark-suspect`."""
    add_partitions(verb)
    verb.add_argument("--force", action="store_true", help=FORCE)
    add_target(verb, _mark_suspect)


def add_re_seed(verb: argparse.ArgumentParser) -> None:
    """Declare `re-seed`."""
    add_partitions(verb)
    verb.add_argument("--force", action="store_true", help=FORCE)
    add_target(verb, _re_seed)


def add_recover(verb: argparse.ArgumentParser) -> None:
    """Declare `recover-partition`."""
    add_partitions(verb)
    source = verb.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--from",
        dest="source",
        metavar="HOST:PORT",
        help="the storage to copy from; needs --connect",
    )
    source.add_argument(
        "--from-admin",
        dest="source_admin",
        metavar="HOST:ADMIN_PORT",
        help="the same by its admin port",
    )
    verb.add_argument(
        "--batch-bytes",
        type=int,
        default=COPY_BYTES_MAX,
        metavar="BYTES",
        help=f"bytes that are copied at once (default {COPY_BYTES_MAX})",
    )
    add_target(verb, _recover)


def add_sync(verb: argparse.ArgumentParser) -> None:
    """Declare `sync-partitions`."""
    add_target(verb, _sync, is_cluster=True)


# ---------------------------------------------------------------------------------------------
# one storage


async def _each(
    arguments: argparse.Namespace,
    verb: str,
    one: Callable[[StorageAdmin, int], Awaitable[object]],
) -> int:
    """Do something with each partition of a storage, and tell (rule 1)."""
    partitions = partitions_of(arguments)
    target = await target_of(arguments)
    done: list[int] = []
    try:
        async with (
            on_record(arguments),
            administered(target.admin, ssl=own_transport.ssl()) as admin,
        ):
            for partition in partitions:
                await one(admin, partition)
                done.append(partition)
    finally:
        if arguments.json:
            show_json({"storage": str(target), "verb": verb, "done": done})
        elif done:
            say(f"{target}: {verb}, done for partitions {_ranges(done)}")
    return 0


def _ranges(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


async def _add(arguments: argparse.Namespace) -> int:
    async def one(admin: StorageAdmin, partition: int) -> None:
        await admin.ask(Done, SetAssigned, (partition,), True, False)  # noqa: FBT003 - the wire's

    return await _each(arguments, "add-partition", one)


async def _remove(arguments: argparse.Namespace) -> int:
    async def one(admin: StorageAdmin, partition: int) -> None:
        if admin.is_ours:
            fields = (arguments.delete_files, arguments.force)
            await admin.ask(Done, RemovePartition, partition, *fields)
        else:
            await admin.ask(Done, SetAssigned, (partition,), False, arguments.delete_files)  # noqa: FBT003 - the wire's

    return await _each(arguments, "remove-partition", one)


async def _availability(arguments: argparse.Namespace) -> int:
    async def one(admin: StorageAdmin, partition: int) -> None:
        await admin.ask(Done, SetAvailable, (partition,), arguments.online == "true")

    return await _each(arguments, f"availability {arguments.online}", one)


async def _mark_suspect(arguments: argparse.Namespace) -> int:
    async def one(admin: StorageAdmin, partition: int) -> None:
        await admin.ask(Done, MarkSuspect, partition, arguments.force)

    return await _each(arguments, "mark-suspect", one)


async def _re_seed(arguments: argparse.Namespace) -> int:
    async def one(admin: StorageAdmin, partition: int) -> None:
        await admin.ask(Done, ReSeed, partition, arguments.force)

    return await _each(arguments, "re-seed", one)


# ---------------------------------------------------------------------------------------------
# recover-partition


async def _recover(arguments: argparse.Namespace) -> int:
    partitions = partitions_of(arguments)
    target = await target_of(arguments)
    source = await _source_of(arguments)
    if source.admin == target.admin:
        raise BadConfig(f"expected another storage to copy from, found {target} itself")
    if arguments.batch_bytes < 1:
        raise BadConfig(f"--batch-bytes: expected at least 1, found {arguments.batch_bytes}")
    results: list[tuple[int, int, int]] = []
    async with (
        on_record(arguments),
        administered(source.admin, ssl=own_transport.ssl()) as giver,
        administered(target.admin, ssl=own_transport.ssl()) as taker,
    ):
        with ProgressLine() as line:
            for partition in partitions:
                line.show(len(results), len(partitions), f"copying partition {partition}")
                before = await _last_of(taker, target, partition)
                after = await copy_partition(
                    giver, taker, partition, before + 1, bytes_max=arguments.batch_bytes
                )
                results.append((partition, before, after))
    titles = ("partition", "last before", "last after")
    if arguments.json:
        show_json([dict(zip(titles, row, strict=True)) for row in results])
    else:
        show_table(titles, results)
    return 0


async def _source_of(arguments: argparse.Namespace) -> Target:
    if arguments.source_admin is not None:
        return Target(arguments.source_admin, None)
    if arguments.connect is None:
        raise BadConfig("--from needs --connect; or give --from-admin HOST:ADMIN_PORT")
    facts = await read_facts(arguments)
    return Target(facts.admin_address(arguments.source), arguments.source)


async def _last_of(admin: StorageAdmin, target: Target, partition: int) -> int:
    replica = await admin.ask(ReplicaResponse, ReplicaRequest, partition)
    if not replica.is_held:
        raise BadRequest(f"{target}: partition {partition} is not held there")
    if replica.is_available:
        raise BadRequest(
            f"{target}: expected partition {partition} to be offline while it is copied to, found "
            "it online (availability)"
        )
    if replica.why_not:
        raise BadRequest(f"{target}: partition {partition} cannot be used: {replica.why_not}")
    return replica.synced_max


# ---------------------------------------------------------------------------------------------
# sync-partitions


async def _sync(arguments: argparse.Namespace) -> int:
    facts = await read_facts(arguments)
    names = facts.admin_ports if arguments.storage is None else (arguments.storage,)
    rows: list[tuple[str, str, object, str]] = []
    async with on_record(arguments):
        with ProgressLine() as line:
            for at, name in enumerate(names):
                target = Target(facts.admin_address(name), str(name))
                line.show(at, len(names), f"storage {target}")
                wanted = facts.assignments.partitions.get(ReplicaId(name), ())
                try:
                    async with administered(target.admin, ssl=own_transport.ssl()) as admin:
                        rows += await _synced(admin, target, [int(each) for each in wanted])
                except WaltzError as error:
                    rows.append((str(target), "reach", "-", str(error)))
        failed_count = sum(outcome != "done" for *_, outcome in rows)
        _tell_synced(arguments, rows, is_done=not failed_count)
        if failed_count:
            raise WaltzError(f"{failed_count} of {len(rows)} steps have failed, see their outcome")
    return 0


def _tell_synced(
    arguments: argparse.Namespace, rows: list[tuple[str, str, object, str]], *, is_done: bool
) -> None:
    titles = ("storage", "step", "partition", "outcome")
    if arguments.json:
        show_json({"is_done": is_done, "steps": [dict(zip(titles, r, strict=True)) for r in rows]})
    elif rows:
        show_table(titles, rows)
    else:
        show("nothing to do: every storage holds what ZooKeeper assigns to it")


async def _synced(
    admin: StorageAdmin, target: Target, wanted: list[int]
) -> list[tuple[str, str, object, str]]:
    """Have a storage hold what it should and nothing else; files are never deleted by this."""
    held = [partition for partition, _ in (await admin.ask(HeldResponse, HeldRequest)).available]
    steps = [(partition, True) for partition in wanted if partition not in held]
    steps += [(partition, False) for partition in held if partition not in wanted]
    rows: list[tuple[str, str, object, str]] = []
    for partition, is_assigned in steps:
        outcome = "done"
        try:
            await admin.ask(Done, SetAssigned, (partition,), is_assigned, False)  # noqa: FBT003 - the wire's
        except WaltzError as error:
            outcome = str(error)
        rows.append((str(target), "add" if is_assigned else "give up", partition, outcome))
    return rows
