"""`waltz-core cluster add-storage | move-replica | ...`: change storages, replicas and servers.

`administration/replica_changes.py` implements the changes, and `cli/change_commands.py` runs them.
"""

import click

from waltz_core.administration import replica_changes
from waltz_core.administration.change_run import ChangeResult
from waltz_core.cli import shared_options as options
from waltz_core.cli.change_commands import ChangeCommand, change_command
from waltz_core.cli.subcommands import subcommand

_admin_port_option = click.option(
    "--admin-port", type=int, help="the admin port of the storage [default: its port + 1]"
)
_storages_argument = options.argument(
    "addresses", "HOST:PORT...", "the storages", nargs=-1, required=True
)


# --- storages


@subcommand
@options.storage_argument
@click.option("--group", type=int, help="the number of the storage's group [default: a new group]")
@_admin_port_option
@change_command()
async def add_storage(
    command: ChangeCommand, *, address: str, group: int | None, admin_port: int | None
) -> ChangeResult:
    """Add an empty storage to the cluster."""
    return await replica_changes.add_storage(
        command, address=address, group=group, admin_port=admin_port
    )


@subcommand
@options.storage_argument
@options.argument(
    "admin_port",
    "ADMIN_PORT",
    "the port at which the storage accepts administration requests",
    type=int,
)
@change_command()
async def set_admin_port(command: ChangeCommand, *, address: str, admin_port: int) -> ChangeResult:
    """Change the admin port of a storage in ZooKeeper."""
    return await replica_changes.set_admin_port(command, address=address, admin_port=admin_port)


@subcommand
@options.storage_argument
@change_command()
async def remove_storage(command: ChangeCommand, *, address: str) -> ChangeResult:
    """Move a storage's replicas to other storages, then remove it from the cluster."""
    return await replica_changes.remove_storage(command, address=address)


@subcommand
@options.argument("address", "OLD", "HOST:PORT of the storage to replace")
@options.argument(
    "successor",
    "NEW",
    "HOST:PORT of its replacement; the same as OLD for an empty storage at the same address",
)
@_admin_port_option
@change_command()
async def replace_storage(
    command: ChangeCommand, *, address: str, successor: str, admin_port: int | None
) -> ChangeResult:
    """Move all replicas of a storage to its replacement."""
    return await replica_changes.replace_storage(
        command, address=address, successor=successor, admin_port=admin_port
    )


# --- replicas


@subcommand
@options.partitions_argument
@_storages_argument
@change_command()
async def add_replica(
    command: ChangeCommand, *, partitions: str, addresses: tuple[str, ...]
) -> ChangeResult:
    """Add storages to the replicas of each partition, one storage after the other."""
    return await replica_changes.add_replica(command, partitions=partitions, addresses=addresses)


@subcommand
@options.partitions_argument
@_storages_argument
@change_command()
async def remove_replica(
    command: ChangeCommand, *, partitions: str, addresses: tuple[str, ...]
) -> ChangeResult:
    """Remove the replicas of partitions from storages."""
    return await replica_changes.remove_replica(command, partitions=partitions, addresses=addresses)


@subcommand
@options.partitions_argument
@options.argument("origin", "FROM", "HOST:PORT of the storage that has the replicas")
@options.argument("target", "TO", "HOST:PORT of the storage that should get them")
@change_command()
async def move_replica(
    command: ChangeCommand, *, partitions: str, origin: str, target: str
) -> ChangeResult:
    """Move replicas of partitions from one storage to another."""
    return await replica_changes.move_replica(
        command, partitions=partitions, origin=origin, target=target
    )


@subcommand
@click.option(
    "--replicas",
    type=int,
    metavar="N",
    help="number of replicas of each partition [default: unchanged]",
)
@change_command()
async def auto_assign(command: ChangeCommand, *, replicas: int | None) -> ChangeResult:
    """Distribute all replicas evenly over groups and storages."""
    return await replica_changes.auto_assign(command, replicas=replicas)


# --- servers


@subcommand
@options.server_argument
@change_command()
async def remove_server(command: ChangeCommand, *, server: str) -> ChangeResult:
    """Remove a stopped server from ZooKeeper."""
    return await replica_changes.remove_server(command, server=server)
