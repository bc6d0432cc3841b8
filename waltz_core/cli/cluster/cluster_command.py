"""`waltz-core cluster create | show | protect`, and the verbs of the files beside it."""

import argparse
import asyncio
import uuid
from typing import Any

from waltz_core.cli.changing import add_place, add_wait, place_of, recorded
from waltz_core.cli.cluster import (
    cluster_changes,
    cluster_checks,
    cluster_reach,
    cluster_rescue,
    cluster_roots,
    cluster_verify,
)
from waltz_core.cli.output import say, show, show_json, show_table
from waltz_core.cluster.change.creation import (
    NewCluster,
    NewStorage,
)
from waltz_core.cluster.coordinator import Coordinator
from waltz_core.cluster.nodes.model import (
    UNRESOLVED,
    PartitionMetadata,
)
from waltz_core.cluster.zookeeper import zookeeper_session
from waltz_core.errors import BadConfig
from waltz_core.records.record import (
    PartitionId,
)


def add(command: argparse.ArgumentParser) -> None:
    """Declare the verbs."""
    verbs = command.add_subparsers(title="verbs", metavar="VERB", required=True)
    create = verbs.add_parser("create", help="make a cluster's nodes in ZooKeeper")
    create.add_argument("--name", default="waltz", help="default waltz")
    create.add_argument("--partitions", type=int, required=True, help="fixed for ever")
    create.add_argument(
        "--storage",
        action="append",
        default=[],
        metavar="HOST:PORT:ADMIN_PORT[:GROUP]",
        help="a storage; give it once for each. Every group holds one replica of each partition; "
        "without GROUP each storage is a group of its own",
    )
    create.add_argument("--if-absent", action="store_true", help="an existing cluster is fine")
    create.set_defaults(verb=_create)
    shown = verbs.add_parser("show", help="show servers, storages and partitions")
    shown.add_argument("--json", action="store_true", help="one JSON value on standard output")
    shown.set_defaults(verb=_show)
    protect = verbs.add_parser(
        "protect", help="let only the user of the connect string's auth file at the nodes"
    )
    protect.set_defaults(verb=_protect)
    for verb in (create, shown, protect):
        add_place(verb)
        add_wait(verb)
    cluster_roots.add(verbs)
    cluster_verify.add(verbs)
    cluster_reach.add(verbs)
    cluster_changes.add(verbs)
    cluster_checks.add(verbs)
    cluster_rescue.add(verbs)


def _create(arguments: argparse.Namespace) -> int:
    storages = tuple(NewStorage.parse(text, index) for index, text in enumerate(arguments.storage))
    new = NewCluster(
        name=arguments.name,
        partition_count=arguments.partitions,
        cluster_key=uuid.uuid4(),  # noqa: TID251 - a new cluster's key is made here
        storages=storages,
    )
    return asyncio.run(_create_at(arguments, new))


async def _create_at(arguments: argparse.Namespace, new: NewCluster) -> int:
    timeout_ms, place = round(arguments.wait_s * 1000), place_of(arguments)
    async with zookeeper_session.connected(place, connect_timeout_ms=timeout_ms) as found:
        if arguments.if_absent and await _exists(found):
            say(f"there is a cluster at {place} already")
            return 0
        async with recorded(found, creates=True):
            await found.create_cluster(new)
        say(
            f"created {new.name} at {place}: {new.partition_count} partitions, "
            f"{len(new.storages)} storages, key {new.cluster_key}"
        )
    return 0


async def _exists(coordinator: Coordinator) -> bool:
    try:
        await coordinator.read_cluster()
    except BadConfig:
        return False
    return True


def _protect(arguments: argparse.Namespace) -> int:
    return asyncio.run(_protect_at(place_of(arguments), round(arguments.wait_s * 1000)))


async def _protect_at(place: str, timeout_ms: int) -> int:
    count = await zookeeper_session.protect(place, connect_timeout_ms=timeout_ms)
    if not count:
        raise BadConfig(f"no cluster at {place}: there is no such root in ZooKeeper")
    # What was just protected is written with the same credentials.
    connected = zookeeper_session.connected(place, connect_timeout_ms=timeout_ms)
    async with connected as found, recorded(found, creates=True):
        say(f"protected {count} nodes")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    return asyncio.run(_show_at(arguments))


async def _show_at(arguments: argparse.Namespace) -> int:
    timeout_ms = round(arguments.wait_s * 1000)
    async with zookeeper_session.connected(
        place_of(arguments), connect_timeout_ms=timeout_ms
    ) as found:
        cluster = await found.read_cluster()
        servers = await found.read_servers()
        layout = await found.storages.read()
        partitions = {}
        for number in range(cluster.params.partition_count):
            partition = PartitionId(number)
            view = await found.read_partition(partition)
            owner = servers.owners.get(partition)
            name = None
            if owner is not None and owner.server_id in servers.servers:
                descriptor = servers.servers[owner.server_id]
                name = f"{descriptor.host}:{descriptor.port}"
            partitions[number] = _partition(name, view.metadata)
    summary = {
        "name": cluster.params.name,
        "cluster_key": str(cluster.store.cluster_key),
        "partition_count": cluster.params.partition_count,
        "servers": {
            int(key): f"{server.host}:{server.port}" for key, server in servers.servers.items()
        },
        "storages": {
            str(address): [int(p) for p in held]
            for address, held in layout.assignment.partitions.items()
        },
        "groups": dict(layout.groups),
        "admin_ports": dict(layout.admin_ports),
        "partitions": partitions,
    }
    if arguments.json:
        show_json(summary)
    else:
        _print(summary)
    return 0


def _partition(owner: str | None, metadata: PartitionMetadata | None) -> dict[str, object]:
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


def _print(summary: dict[str, Any]) -> None:
    show(f"{summary['name']}  key {summary['cluster_key']}")
    storages = summary["storages"]
    show_table(
        ("storage", "admin port", "group", "replicas"),
        [
            (
                name,
                summary["admin_ports"].get(name, "-"),
                summary["groups"].get(name, "-"),
                len(held),
            )
            for name, held in storages.items()
        ],
    )
    show_table(
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
