"""`waltz-core storage add-partition | remove-partition | …`: change the replicas of storages.

Rules:
    1. Partitions are changed one at a time. At the first error, the command ends and reports the
       completed partitions.
    2. The storage itself rejects a change that may lose data, so that no tool can make this change.
    3. If the options name a cluster, changes are recorded in its audit log.
"""

from collections.abc import Awaitable, Callable

import click

from waltz_core.administration import member_connections
from waltz_core.cli import shared_options as options
from waltz_core.cli.output import print_error, print_json, print_result, print_table
from waltz_core.cli.progress import ProgressLine
from waltz_core.cli.storage.storage_target import (
    StorageChoice,
    StorageTarget,
    audit_storage_change,
    choose_storages,
    find_one_storage,
    parse_partition_numbers,
    partitions_option,
    read_cluster_storages,
    with_storage_options,
)
from waltz_core.cli.subcommands import subcommand
from waltz_core.client.links.storage_admin import (
    COPY_BYTES_MAX,
    StorageAdmin,
    admin_connection,
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

_force_option = click.option(
    "--force",
    is_flag=True,
    help=(
        "proceed even if the replica is in sync, that is, even if its acknowledgements count in "
        "the current store session; first run the command without --force and read the error"
    ),
)


# ---------------------------------------------------------------------------------------------
# Changes of one storage


async def _change_partitions(
    choice: StorageChoice,
    partitions: str,
    subcommand_name: str,
    change: Callable[[StorageAdmin, int], Awaitable[object]],
) -> int:
    """Apply a change to each partition of a storage, and report the completed ones (rule 1)."""
    partition_numbers = parse_partition_numbers(partitions)
    target = await find_one_storage(choice)
    completed: list[int] = []
    try:
        async with (
            audit_storage_change(choice),
            admin_connection(target.admin_address, ssl=member_connections.ssl_context()) as admin,
        ):
            for partition in partition_numbers:
                await change(admin, partition)
                completed.append(partition)
    finally:
        if choice.as_json:
            print_json({"storage": str(target), "subcommand": subcommand_name, "done": completed})
        elif completed:
            print_error(
                f"{target}: {subcommand_name} completed for partitions {_join_numbers(completed)}"
            )
    return 0


def _join_numbers(numbers: list[int]) -> str:
    """Return the numbers, separated by commas."""
    return ", ".join(map(str, numbers))


@subcommand
@partitions_option
@with_storage_options()
async def add_partition(choice: StorageChoice, *, partitions: str) -> int:
    """Assign partitions to a storage."""

    async def change(admin: StorageAdmin, partition: int) -> None:
        await admin.request(Done, SetAssigned, (partition,), True, False)  # noqa: FBT003 - the wire's

    return await _change_partitions(choice, partitions, "add-partition", change)


@subcommand
@partitions_option
@click.option("--delete-files", is_flag=True, help="also delete the files of the partitions")
@_force_option
@with_storage_options()
async def remove_partition(
    choice: StorageChoice, *, partitions: str, delete_files: bool, force: bool
) -> int:
    """Remove partitions from a storage."""

    async def change(admin: StorageAdmin, partition: int) -> None:
        if admin.is_current:
            await admin.request(Done, RemovePartition, partition, delete_files, force)
        else:
            await admin.request(Done, SetAssigned, (partition,), False, delete_files)  # noqa: FBT003 - the wire's

    return await _change_partitions(choice, partitions, "remove-partition", change)


@subcommand
@partitions_option
@click.option(
    "--online",
    type=options.SuggestingChoice(("true", "false")),
    required=True,
    help="true: servers use the replica (online); false: they do not (offline)",
)
@with_storage_options()
async def availability(choice: StorageChoice, *, partitions: str, online: str) -> int:
    """Take replicas online or offline."""

    async def change(admin: StorageAdmin, partition: int) -> None:
        await admin.request(Done, SetAvailable, (partition,), online == "true")

    return await _change_partitions(choice, partitions, f"availability {online}", change)


@subcommand
@partitions_option
@_force_option
@with_storage_options()
async def mark_suspect(choice: StorageChoice, *, partitions: str, force: bool) -> int:
    """Mark replicas as suspect."""

    async def change(admin: StorageAdmin, partition: int) -> None:
        await admin.request(Done, MarkSuspect, partition, force)

    return await _change_partitions(choice, partitions, "mark-suspect", change)


@subcommand
@partitions_option
@_force_option
@with_storage_options()
async def re_seed(choice: StorageChoice, *, partitions: str, force: bool) -> int:
    """Delete the logs of replicas, and copy them from the other replicas."""

    async def change(admin: StorageAdmin, partition: int) -> None:
        await admin.request(Done, ReSeed, partition, force)

    return await _change_partitions(choice, partitions, "re-seed", change)


# ---------------------------------------------------------------------------------------------
# recover-partition


@subcommand
@partitions_option
@click.option(
    "--from",
    "source",
    metavar="HOST:PORT",
    help="the storage to copy from, by its address; needs --connect",
)
@click.option(
    "--from-admin", metavar="HOST:ADMIN_PORT", help="the storage to copy from, by its admin port"
)
@click.option(
    "--batch-bytes",
    type=int,
    default=COPY_BYTES_MAX,
    metavar="BYTES",
    help=f"bytes of one copy request [default: {COPY_BYTES_MAX}]",
)
@with_storage_options()
async def recover_partition(
    choice: StorageChoice,
    *,
    partitions: str,
    source: str | None,
    from_admin: str | None,
    batch_bytes: int,
) -> int:
    """Copy committed transactions from another storage to a replica that is offline."""
    if (source is None) == (from_admin is None):
        raise click.UsageError(
            "expected either --from or --from-admin, found both or neither",
            click.get_current_context(),
        )
    partition_numbers = parse_partition_numbers(partitions)
    target = await find_one_storage(choice)
    source_target = await _copy_source(choice, source, from_admin)
    if source_target.admin_address == target.admin_address:
        raise BadConfig(
            f"expected another storage as the source of the copy, found {target} itself"
        )
    if batch_bytes < 1:
        raise BadConfig(f"--batch-bytes: expected at least 1, found {batch_bytes}")
    results: list[tuple[int, int, int]] = []
    async with (
        audit_storage_change(choice),
        admin_connection(
            source_target.admin_address, ssl=member_connections.ssl_context()
        ) as source_admin,
        admin_connection(
            target.admin_address, ssl=member_connections.ssl_context()
        ) as target_admin,
    ):
        with ProgressLine() as line:
            for partition in partition_numbers:
                line.show(len(results), len(partition_numbers), f"copying partition {partition}")
                last_id_before = await _query_last_id(target_admin, target, partition)
                last_id_after = await copy_partition(
                    source_admin, target_admin, partition, last_id_before + 1, bytes_max=batch_bytes
                )
                results.append((partition, last_id_before, last_id_after))
    titles = ("partition", "last before", "last after")
    if choice.as_json:
        print_json([dict(zip(titles, row, strict=True)) for row in results])
    else:
        print_table(titles, results)
    return 0


async def _copy_source(
    choice: StorageChoice, source: str | None, from_admin: str | None
) -> StorageTarget:
    """Return the storage from which to copy."""
    if from_admin is not None:
        return StorageTarget(from_admin, None)
    if choice.cluster_connect is None or source is None:
        raise BadConfig(
            "--from needs --connect. Hint: without --connect, use --from-admin HOST:ADMIN_PORT."
        )
    facts = await read_cluster_storages(choice)
    return StorageTarget(facts.admin_address(source), source)


async def _query_last_id(admin: StorageAdmin, target: StorageTarget, partition: int) -> int:
    """Return the last ID of an offline replica; raises BadRequest if it is not offline."""
    replica = await admin.request(ReplicaResponse, ReplicaRequest, partition)
    if not replica.is_held:
        raise BadRequest(f"{target}: partition {partition} is not assigned to this storage")
    if replica.is_available:
        raise BadRequest(
            f"{target}: expected partition {partition} to be offline, found it online. Hint: run "
            "`waltz-core storage availability` first."
        )
    if replica.reason:
        raise BadRequest(
            f"{target}: the log of partition {partition} cannot be used ({replica.reason})"
        )
    return replica.synced_max


# ---------------------------------------------------------------------------------------------
# sync-partitions


@subcommand
@with_storage_options(works_on_cluster=True)
async def sync_partitions(choice: StorageChoice) -> int:
    """Add and remove partitions of storages, so that they match the assignment in ZooKeeper."""
    facts = await read_cluster_storages(choice)
    targets = choose_storages(facts, choice)
    rows: list[tuple[str, str, object, str]] = []
    async with audit_storage_change(choice):
        with ProgressLine() as line:
            for index, target in enumerate(targets):
                line.show(index, len(targets), f"storage {target}")
                assigned = facts.assignments.partitions.get(ReplicaId(str(target)), ())
                try:
                    async with admin_connection(
                        target.admin_address, ssl=member_connections.ssl_context()
                    ) as admin:
                        rows += await _sync_storage(
                            admin, target, [int(partition_id) for partition_id in assigned]
                        )
                except WaltzError as error:
                    rows.append((str(target), "reach", "-", str(error)))
        failed_count = sum(outcome != "done" for *_, outcome in rows)
        _print_synced(rows, is_done=not failed_count, as_json=choice.as_json)
        if failed_count:
            raise WaltzError(
                f"{failed_count} of {len(rows)} steps failed; the column `outcome` has the reasons"
            )
    return 0


def _print_synced(
    rows: list[tuple[str, str, object, str]], *, is_done: bool, as_json: bool
) -> None:
    titles = ("storage", "step", "partition", "outcome")
    if as_json:
        print_json(
            {"is_done": is_done, "steps": [dict(zip(titles, row, strict=True)) for row in rows]}
        )
    elif rows:
        print_table(titles, rows)
    else:
        print_result("nothing to do: all storages match the assignment in ZooKeeper")


async def _sync_storage(
    admin: StorageAdmin, target: StorageTarget, assigned: list[int]
) -> list[tuple[str, str, object, str]]:
    """Add and remove partitions of a storage as ZooKeeper assigns them; never delete files."""
    present_partitions = [
        partition for partition, _ in (await admin.request(HeldResponse, HeldRequest)).available
    ]
    steps = [(partition, True) for partition in assigned if partition not in present_partitions]
    steps += [(partition, False) for partition in present_partitions if partition not in assigned]
    rows: list[tuple[str, str, object, str]] = []
    for partition, is_assigned in steps:
        outcome = "done"
        try:
            await admin.request(Done, SetAssigned, (partition,), is_assigned, False)  # noqa: FBT003 - the wire's
        except WaltzError as error:
            outcome = str(error)
        rows.append((str(target), "add" if is_assigned else "release", partition, outcome))
    return rows
