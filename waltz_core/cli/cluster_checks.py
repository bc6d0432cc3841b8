"""`waltz-core cluster prefer | unprefer | verify | audit`: asking servers, and the record."""

import argparse
import datetime
from collections.abc import Callable
from typing import TypeAlias, TypeVar

from waltz_core import net
from waltz_core.cli.changing import Command, Result, add_common, connected, run
from waltz_core.cli.output import show, show_json, show_table
from waltz_core.cluster import changes
from waltz_core.cluster.diagnosis import diagnose
from waltz_core.errors import BadConfig, Unavailable
from waltz_core.record import ReqId
from waltz_core.wire.messages import (
    AddPreferredRequest,
    AddPreferredResponse,
    ClientMessage,
    RemovePreferredRequest,
    RemovePreferredResponse,
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
    """What the doctor finds wrong with the cluster and the chosen partitions, looked at once."""
    from waltz_core.cli.doctor_probes import gather  # noqa: PLC0415 - loads Arrow

    facts = await gather(arguments.connect, timeout_s=ANSWER_S, local=None)
    cluster = facts.cluster
    count = 0 if cluster is None else cluster.partition_count
    chosen = None if cluster is None else changes.parse_partitions(arguments.partitions, count)
    found = [
        each.sentence
        for each in diagnose(facts)
        if each.partition is None or chosen is None or each.partition in chosen
    ]
    if arguments.json:
        show_json({"passed": not found, "findings": found})
    else:
        for each in found:
            show(each)
        show("failed" if found else "passed")
    return 1 if found else 0


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
