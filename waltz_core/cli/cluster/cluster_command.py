"""`waltz-core cluster create | show | protect`."""

import uuid
from typing import Any

import click

from waltz_core.cli import shared_options as options
from waltz_core.cli.change_commands import audit_change, open_command_session, with_cluster_argument
from waltz_core.cli.output import print_error, print_json, print_result, print_table
from waltz_core.cli.subcommands import subcommand
from waltz_core.cluster.change.creation import NewCluster, NewStorage
from waltz_core.cluster.coordinator import Coordinator
from waltz_core.cluster.znodes.model import UNRESOLVED, PartitionMetadata
from waltz_core.cluster.zookeeper import zookeeper_session
from waltz_core.errors import BadConfig
from waltz_core.records.record import PartitionId


@subcommand
@click.option("--name", default="waltz", help="the name of the cluster [default: waltz]")
@click.option(
    "--partitions",
    type=int,
    required=True,
    help="the number of partitions, which cannot be changed later",
)
@click.option(
    "--storage",
    multiple=True,
    metavar="HOST:PORT:ADMIN_PORT[:GROUP]",
    help="a storage; repeat the option for each. Each group of storages gets one replica of each "
    "partition; a storage without GROUP gets a separate group",
)
@click.option("--if-absent", is_flag=True, help="exit successfully if the cluster already exists")
@with_cluster_argument
@options.zookeeper_timeout_option
async def create(
    *,
    name: str,
    partitions: int,
    storage: tuple[str, ...],
    if_absent: bool,
    connect: str,
    wait_s: float,
) -> int:
    """Create the znodes of a new cluster in ZooKeeper."""
    storages = tuple(NewStorage.parse(text, index) for index, text in enumerate(storage))
    new = NewCluster(
        name=name,
        partition_count=partitions,
        cluster_key=uuid.uuid4(),  # noqa: TID251 - the only place that generates a key
        storages=storages,
    )
    async with open_command_session(connect, wait_s) as coordinator:
        if if_absent and await _cluster_exists(coordinator):
            print_error(f"a cluster exists already at {connect}")
            return 0
        async with audit_change(coordinator, may_create_cluster=True):
            await coordinator.create_cluster(new)
        print_error(
            f"created cluster {new.name} at {connect}: {new.partition_count} partitions, "
            f"{len(new.storages)} storages, cluster key {new.cluster_key}"
        )
    return 0


async def _cluster_exists(coordinator: Coordinator) -> bool:
    try:
        await coordinator.read_cluster()
    except BadConfig:
        return False
    return True


@subcommand
@with_cluster_argument
@options.zookeeper_timeout_option
async def protect(*, connect: str, wait_s: float) -> int:
    """Restrict access to the cluster's znodes to the users in the auth file."""
    count = await zookeeper_session.protect(connect, connect_timeout_ms=round(wait_s * 1000))
    if not count:
        raise BadConfig(f"there is no cluster at {connect}: ZooKeeper has no such znode")
    # The audit entry is written with the same credentials.
    async with (
        open_command_session(connect, wait_s) as coordinator,
        audit_change(coordinator, may_create_cluster=True),
    ):
        print_error(f"restricted the access to {count} znodes")
    return 0


@subcommand
@options.json_option
@with_cluster_argument
@options.zookeeper_timeout_option
async def show_command(*, as_json: bool, connect: str, wait_s: float) -> int:
    """Show the servers, storages and partitions of a cluster."""
    async with open_command_session(connect, wait_s) as coordinator:
        cluster = await coordinator.read_cluster()
        servers = await coordinator.read_servers()
        layout = await coordinator.storages.read_layout()
        partitions = {}
        for number in range(cluster.params.partition_count):
            partition = PartitionId(number)
            view = await coordinator.read_partition(partition)
            owner = servers.owners.get(partition)
            name = None
            if owner is not None and owner.server_id in servers.servers:
                descriptor = servers.servers[owner.server_id]
                name = f"{descriptor.host}:{descriptor.port}"
            partitions[number] = _partition_json(name, view.metadata)
    summary = {
        "name": cluster.params.name,
        "cluster_key": str(cluster.store.cluster_key),
        "partition_count": cluster.params.partition_count,
        "servers": {
            int(key): f"{server.host}:{server.port}" for key, server in servers.servers.items()
        },
        "storages": {
            str(address): [int(p) for p in partition_ids]
            for address, partition_ids in layout.assignment.partitions.items()
        },
        "groups": dict(layout.groups),
        "admin_ports": dict(layout.admin_ports),
        "partitions": partitions,
    }
    if as_json:
        print_json(summary)
    else:
        _print_cluster(summary)
    return 0


def _partition_json(owner: str | None, metadata: PartitionMetadata | None) -> dict[str, object]:
    if metadata is None:
        return {"server": owner, "generation": None, "session": None, "engaged": []}
    engaged = [
        str(replica)
        for replica, state in metadata.states.items()
        if state.closing_high_water_mark == UNRESOLVED
    ]
    return {
        "server": owner,
        "generation": int(metadata.generation),
        "session": int(metadata.session_id),
        "engaged": engaged,
    }


def _print_cluster(summary: dict[str, Any]) -> None:
    print_result(f"{summary['name']}  cluster key {summary['cluster_key']}")
    storages = summary["storages"]
    print_table(
        ("storage", "admin port", "group", "replicas"),
        [
            (
                name,
                summary["admin_ports"].get(name, "-"),
                summary["groups"].get(name, "-"),
                len(partition_ids),
            )
            for name, partition_ids in storages.items()
        ],
    )
    print_table(
        ("partition", "server", "generation", "session", "engaged replicas"),
        [
            (
                number,
                part["server"] or "-",
                "-" if part["generation"] is None else part["generation"],
                "-" if part["session"] is None else part["session"],
                " ".join(part["engaged"]) or "-",
            )
            for number, part in summary["partitions"].items()
        ],
    )
