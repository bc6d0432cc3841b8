"""`waltz-core cluster prefer | unprefer | verify | audit`: asking servers, and the record."""

import argparse
import datetime
from collections.abc import Callable, Mapping
from typing import TypeAlias, TypeVar

from waltz_core import net
from waltz_core.cli.changing import Command, Result, add_common, connected, run
from waltz_core.cli.output import show, show_json, show_table
from waltz_core.cluster import changes
from waltz_core.cluster.changes import Replicas
from waltz_core.cluster.coordinator import Coordinator
from waltz_core.cluster.membership import ServersView
from waltz_core.errors import BadConfig, Unavailable, WaltzError
from waltz_core.record import PartitionId, ReqId
from waltz_core.wire.messages import (
    AddPreferredRequest,
    AddPreferredResponse,
    CheckConnectivityRequest,
    CheckConnectivityResponse,
    ClientMessage,
    PartitionsHealthRequest,
    PartitionsHealthResponse,
    RemovePreferredRequest,
    RemovePreferredResponse,
    ServerPartitionsRequest,
    ServerPartitionsResponse,
)

ANSWER_S = 10.0
# What an original's tools use where no client id is given out.
NOT_A_CLIENT = -1

AnswerT = TypeVar("AnswerT", bound=ClientMessage)
Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add(verbs: Verbs) -> None:
    """Declare the verbs."""
    for name, text, verb in (
        ("prefer", "have a server own some partitions before all others", _prefer),
        ("unprefer", "let partitions that a server was to own go anywhere", _unprefer),
    ):
        command = verbs.add_parser(name, help=text)
        command.add_argument("partitions", metavar="PARTITIONS", help="like 3 or 0-6,9 or all")
        command.add_argument("server", metavar="HOST:PORT")
        add_common(command)
        command.set_defaults(verb=_running(verb), creates=False)
    verified = verbs.add_parser("verify", help="check every partition, from ZooKeeper to storages")
    verified.add_argument("--partitions", default="all", help="like 3 or 0-6,9; else all")
    add_common(verified, changes=False)
    verified.set_defaults(verb=lambda arguments: net.run(_verify(arguments)))
    audit = verbs.add_parser("audit", help="show who has changed the cluster, when and how")
    add_common(audit, changes=False)
    audit.set_defaults(verb=lambda arguments: net.run(_audit(arguments)))


def _running(verb: object) -> Callable[[argparse.Namespace], int]:
    return lambda arguments: run(arguments, verb)  # type: ignore[arg-type]


# --- preferred partitions


async def _prefer(command: Command) -> Result:
    return await _ask_to_prefer(command, AddPreferredRequest, AddPreferredResponse)


async def _unprefer(command: Command) -> Result:
    return await _ask_to_prefer(command, RemovePreferredRequest, RemovePreferredResponse)


async def _ask_to_prefer(
    command: Command,
    request: type[AddPreferredRequest | RemovePreferredRequest],
    response: type[AddPreferredResponse | RemovePreferredResponse],
) -> Result:
    coordinator, address = command.coordinator, command.arguments.server
    count = (await coordinator.read_cluster()).params.partition_count
    partitions = changes.parse_partitions(command.arguments.partitions, count)
    view = await coordinator.read_servers()
    if address not in [each.address for each in view.servers.values()]:
        names = ", ".join(each.address for each in view.servers.values()) or "none"
        raise BadConfig(f"no server is registered at {address}; registered are {names}")
    command.wait_for(f"the server at {address}")
    answer = await _ask(address, response, lambda req_id: request(req_id, partitions))
    if not answer.is_done:
        raise Unavailable(f"the server at {address} has refused the partitions {partitions}")
    view = await coordinator.read_servers()
    owned = sorted(
        partition_id
        for partition_id, owner in view.owners.items()
        if view.servers[owner.server_id].address == address
    )
    return {
        "server": address,
        "owns": owned,
        "summary": f"{address} owns the partitions {', '.join(map(str, owned)) or 'none'} now",
    }


async def _ask(
    address: str, answer: type[AnswerT], make: Callable[[ReqId], ClientMessage]
) -> AnswerT:
    from waltz_core.client.connections import ServerLinks  # noqa: PLC0415 - loads Arrow

    links = ServerLinks(dial_timeout_s=ANSWER_S, late_answers_s=0.0)
    try:
        link = await links.get(address)
        return await link.request(
            answer, make, client_id=NOT_A_CLIENT, partition_id=0, timeout_s=ANSWER_S
        )
    finally:
        await links.close("asked")


# --- verify


async def _verify(arguments: argparse.Namespace) -> int:
    async with connected(arguments.connect) as coordinator:
        found = await _findings(coordinator, arguments.partitions)
    if arguments.json:
        show_json({"passed": not found, "findings": found})
    else:
        for each in found:
            show(each)
        show("failed" if found else "passed")
    return 1 if found else 0


async def _findings(coordinator: Coordinator, text: str) -> list[str]:
    """Return a sentence for everything that is not as it should be."""
    count = (await coordinator.read_cluster()).params.partition_count
    chosen = changes.parse_partitions(text, count)
    view = await coordinator.read_servers()
    layout = await coordinator.storages.read()
    found = _of_assignment(view, chosen)
    registered = await coordinator.read_storage_ids()
    found += [
        f"storage {each} has never started: nothing is registered for it"
        for each in layout.assignment.partitions
        if each not in registered
    ]
    for server in view.servers.values():
        owned = {
            each: None for each, its in view.owners.items() if its.server_id == server.server_id
        }
        found += await _of_server(server.address, [each for each in owned if each in chosen])
    replicas = await coordinator.storages.read_replicas(layout.assignment, chosen)
    found += _of_replicas(replicas)
    placement = changes.placement_of(layout.assignment, count)
    found += [
        f"partition {each}: its replicas are in fewer groups than they could be: "
        "`waltz-core cluster auto-assign` spreads them"
        for each in changes.crowded(placement, layout.groups)
        if each in chosen
    ]
    return found


def _of_assignment(view: ServersView, chosen: tuple[PartitionId, ...]) -> list[str]:
    found = [] if view.is_settled else ["the assignment is not that of the live servers (yet)"]
    if not view.servers:
        return [*found, "no server is registered: start one"]
    return found + [f"partition {each} has no server" for each in chosen if each not in view.owners]


async def _of_server(address: str, owned: list[PartitionId]) -> list[str]:
    try:
        partitions = await _ask(address, ServerPartitionsResponse, ServerPartitionsRequest)
        health = await _ask(address, PartitionsHealthResponse, PartitionsHealthRequest)
        storages = await _ask(address, CheckConnectivityResponse, CheckConnectivityRequest)
    except WaltzError as error:
        return [f"server {address} does not answer: {error}"]
    healthy: Mapping[int, bool] = dict(health.healthy)
    return [
        *(
            f"partition {each}: server {address} does not serve it, though it is assigned to it"
            for each in owned
            if each not in partitions.partitions
        ),
        *(
            f"partition {each}: server {address} has no open session with a quorum of replicas"
            for each in owned
            if each in healthy and not healthy[each]
        ),
        *(
            f"server {address} cannot reach storage {name}"
            for name, is_reachable in storages.reachable
            if not is_reachable
        ),
    ]


def _of_replicas(replicas: Mapping[PartitionId, Replicas]) -> list[str]:
    found: list[str] = []
    for partition_id, now in replicas.items():
        if not now.assigned:
            found.append(f"partition {partition_id} has no replicas: `cluster auto-assign`")
            continue
        if now.metadata is None or not now.was_opened:
            found.append(f"partition {partition_id} was never opened")
            continue
        if set(now.metadata.states) != set(now.assigned):
            names = ", ".join(now.assigned)
            found.append(f"partition {partition_id}: no session yet with its replicas {names}")
        behind = [each for each in now.assigned if each not in now.level]
        if len(now.level) <= len(now.assigned) // 2:
            found.append(f"partition {partition_id} has no quorum of engaged replicas")
        elif behind:
            found.append(f"partition {partition_id}: {', '.join(behind)} is not engaged")
    return found


# --- audit


async def _audit(arguments: argparse.Namespace) -> int:
    async with connected(arguments.connect) as coordinator:
        await coordinator.read_cluster()
        entries = await coordinator.audit.read()
    if arguments.json:
        show_json(
            [
                {
                    "who": each.who,
                    "begun_ms": each.begun_ms,
                    "ended_ms": each.ended_ms,
                    "what": each.what,
                    "outcome": each.outcome,
                }
                for each in entries
            ]
        )
        return 0
    rows = [(_time(each.begun_ms), each.who, each.what, each.outcome) for each in entries]
    show_table(("when", "who", "what", "outcome"), rows)
    return 0


def _time(at_ms: int) -> str:
    when = datetime.datetime.fromtimestamp(at_ms / 1000, datetime.UTC)
    return when.isoformat(timespec="seconds").replace("+00:00", "Z")
