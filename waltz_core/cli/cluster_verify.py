"""`waltz-core cluster verify`: seven checks of every partition, from ZooKeeper to storages.

Why it stands alone: nothing is changed here, and what is found is told twice, as sentences for
people and by partition and check for programs.

Rules:
    1. A finding names its check and the partitions that it is about.
    2. Whoever does not answer is a finding, never an error: the others are still looked at.
"""

import argparse
import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from waltz_core import net
from waltz_core.cli.asking import ask
from waltz_core.cli.changing import add_common, connected
from waltz_core.cli.output import show, show_json, show_table
from waltz_core.cli.progress import ProgressLine
from waltz_core.cluster import changes
from waltz_core.cluster.changes import Replicas
from waltz_core.cluster.connect_string import split_address
from waltz_core.cluster.coordinator import Coordinator
from waltz_core.cluster.membership import ServersView
from waltz_core.cluster.storages import Layout
from waltz_core.errors import WaltzError
from waltz_core.record import PartitionId, ReplicaId
from waltz_core.wire.admin_messages import HeldRequest, HeldResponse
from waltz_core.wire.messages import (
    CheckConnectivityRequest,
    CheckConnectivityResponse,
    PartitionsHealthRequest,
    PartitionsHealthResponse,
    ServerPartitionsRequest,
    ServerPartitionsResponse,
)

# check -> what it looks at, in the order of the original's `verify`
CHECKS = {
    "assignment": "ZooKeeper has a server and replicas for it, spread over groups",
    "server": "its server serves it",
    "connectivity": "its server reaches its storages",
    "storage": "its storages answer for themselves and hold it",
    "quorum": "a quorum of its replicas is engaged",
    "recovery": "every replica is engaged in the newest session",
    "health": "its server has an open session",
}

Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


class Finding(NamedTuple):
    """Something that is not as it should be (rule 1)."""

    check: str
    text: str
    partitions: tuple[PartitionId, ...]


def add(verbs: Verbs) -> None:
    """Declare the verb."""
    verified = verbs.add_parser("verify", help="check every partition, from ZooKeeper to storages")
    verified.add_argument("--partitions", default="all", help="like 3 or 0-6,9 (default all)")
    verified.add_argument(
        "--by-partition",
        action="store_true",
        help=f"show each check of each partition, too: {', '.join(CHECKS)}",
    )
    add_common(verified, changes=False)
    verified.set_defaults(verb=lambda arguments: net.run(_verify(arguments)))


async def _verify(arguments: argparse.Namespace) -> int:
    async with connected(arguments.connect) as coordinator:
        count = (await coordinator.read_cluster()).params.partition_count
        chosen = changes.parse_partitions(arguments.partitions, count)
        with ProgressLine() as line:
            found = await _findings(coordinator, chosen, count, line)
    by_partition = {each: failed_checks(found, each) for each in chosen}
    if arguments.json:
        told: dict[str, object] = {"passed": not found, "findings": [each.text for each in found]}
        if arguments.by_partition:
            told["partitions"] = {
                int(each): {check: check not in failed for check in CHECKS}
                for each, failed in by_partition.items()
            }
        show_json(told)
        return 1 if found else 0
    if arguments.by_partition:
        rows = [
            (int(each), *("FAILED" if check in failed else "ok" for check in CHECKS))
            for each, failed in by_partition.items()
        ]
        show_table(("partition", *CHECKS), rows)
    for finding in found:
        show(finding.text)
    show("failed" if found else "passed")
    return 1 if found else 0


def failed_checks(found: Sequence[Finding], partition_id: PartitionId) -> set[str]:
    """Return the checks that a partition has not passed."""
    return {each.check for each in found if partition_id in each.partitions}


async def _findings(
    coordinator: Coordinator, chosen: tuple[PartitionId, ...], count: int, line: ProgressLine
) -> list[Finding]:
    """Return a sentence for everything that is not as it should be."""
    view = await coordinator.read_servers()
    layout = await coordinator.storages.read()
    found = of_assignment(view, chosen)
    registered = await coordinator.read_storage_ids()
    found += [
        Finding("storage", f"storage {each} has never started: nothing is registered for it", held)
        for each, held in layout.assignment.partitions.items()
        if each not in registered
    ]
    whom: dict[str, Coroutine[Any, Any, list[Finding]]] = {
        f"server {each.address}": _of_server(
            each.address, tuple(its for its in view.partitions_of(key) if its in chosen), layout
        )
        for key, each in view.servers.items()
    }
    whom |= {
        f"storage {each}": _of_storage(each, tuple(its for its in held if its in chosen), layout)
        for each, held in layout.assignment.partitions.items()
    }
    found += await _all_of(whom, line)
    replicas = await coordinator.storages.read_replicas(layout.assignment, chosen)
    found += of_replicas(replicas)
    placement = changes.placement_of(layout.assignment, count)
    return found + [
        Finding(
            "assignment",
            f"partition {each}: its replicas are in fewer groups than they could be: "
            "`waltz-core cluster auto-assign` spreads them",
            (each,),
        )
        for each in changes.crowded(placement, layout.groups)
        if each in chosen
    ]


async def _all_of(
    whom: Mapping[str, Coroutine[Any, Any, list[Finding]]], line: ProgressLine
) -> list[Finding]:
    """Ask all of them at once; what they say comes in their order."""
    done: list[str] = []

    async def asked(name: str, asking: Coroutine[Any, Any, list[Finding]]) -> list[Finding]:
        found = await asking
        done.append(name)
        waits = ", ".join(each for each in whom if each not in done)
        line.show(len(done), len(whom), f"waiting for {waits}" if waits else "all have answered")
        return found

    async with asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(asked(*each), name=each[0]) for each in whom.items()]
    return [finding for task in started for finding in task.result()]


def of_assignment(view: ServersView, chosen: tuple[PartitionId, ...]) -> list[Finding]:
    """Return what is wrong with the assignment of partitions to servers."""
    found = []
    if not view.is_settled:
        text = "the assignment is not that of the live servers (yet)"
        found.append(Finding("assignment", text, chosen))
    if not view.servers:
        return [*found, Finding("assignment", "no server is registered: start one", chosen)]
    return found + [
        Finding("assignment", f"partition {each} has no server", (each,))
        for each in chosen
        if each not in view.owners
    ]


async def _of_server(address: str, owned: tuple[PartitionId, ...], layout: Layout) -> list[Finding]:
    try:
        partitions = await ask(address, ServerPartitionsResponse, ServerPartitionsRequest)
        health = await ask(address, PartitionsHealthResponse, PartitionsHealthRequest)
        storages = await ask(address, CheckConnectivityResponse, CheckConnectivityRequest)
    except WaltzError as error:
        text = f"server {address} does not answer: {error}"
        return [Finding("server", text, owned)]
    healthy: Mapping[int, bool] = dict(health.healthy)
    return [
        *(
            Finding(
                "server",
                f"partition {each}: server {address} does not serve it, though it is assigned "
                "to it",
                (each,),
            )
            for each in owned
            if each not in partitions.partitions
        ),
        *(
            Finding(
                "health",
                f"partition {each}: server {address} has no open session with a quorum of replicas",
                (each,),
            )
            for each in owned
            if each in healthy and not healthy[each]
        ),
        *(
            Finding(
                "connectivity",
                f"server {address} cannot reach storage {name}",
                tuple(
                    each for each in owned if ReplicaId(name) in layout.assignment.replicas_of(each)
                ),
            )
            for name, is_reachable in storages.reachable
            if not is_reachable
        ),
    ]


async def _of_storage(
    address: ReplicaId, wanted: tuple[PartitionId, ...], layout: Layout
) -> list[Finding]:
    from waltz_core.client.storage_admin import administered  # noqa: PLC0415 - loads Arrow

    admin = f"{split_address(address)[0]}:{layout.admin_ports.get(address, 0)}"
    try:
        async with administered(admin) as storage:
            told = dict((await storage.ask(HeldResponse, HeldRequest)).available)
    except WaltzError as error:
        text = f"storage {address} does not answer at its admin port: {error}"
        return [Finding("storage", text, wanted)]
    return of_held(address, wanted, told)


def of_held(
    address: ReplicaId, wanted: tuple[PartitionId, ...], held: Mapping[int, bool]
) -> list[Finding]:
    """Return what a storage should hold and does not, or does not serve."""
    found = []
    for each in wanted:
        where = f"partition {each}: storage {address}"
        if each not in held:
            text = f"{where} does not hold it, though it is assigned to it: `waltz-core storage "
            found.append(Finding("storage", f"{text}sync-partitions`", (each,)))
        elif not held[each]:
            text = f"{where} has it offline: `waltz-core storage availability --storage {address} "
            found.append(Finding("storage", f"{text}--partition {each} --online true`", (each,)))
    return found


def of_replicas(replicas: Mapping[PartitionId, Replicas]) -> list[Finding]:
    """Return what the newest sessions say of replicas that are behind, or too few."""
    found: list[Finding] = []
    for partition_id, now in replicas.items():

        def add_finding(check: str, text: str, its: PartitionId = partition_id) -> None:
            found.append(Finding(check, f"partition {its}{text}", (its,)))

        if not now.assigned:
            add_finding("assignment", " has no replicas: `waltz-core cluster auto-assign`")
            continue
        if now.metadata is None or not now.was_opened:
            add_finding("recovery", " was never opened")
            continue
        if set(now.metadata.states) != set(now.assigned):
            names = ", ".join(now.assigned)
            add_finding("recovery", f": no session yet with its replicas {names}")
        behind = [each for each in now.assigned if each not in now.level]
        if len(now.level) <= len(now.assigned) // 2:
            add_finding("quorum", " has no quorum of engaged replicas")
        elif behind:
            are = "is" if len(behind) == 1 else "are"
            add_finding("recovery", f": {', '.join(behind)} {are} not engaged")
    return found
