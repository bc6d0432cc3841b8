"""`waltz-core cluster prefer | unprefer | audit`: what servers own, and the record."""

import argparse
import datetime
from collections.abc import Callable
from typing import TypeAlias

from waltz_core import net
from waltz_core.cli.asking import ask
from waltz_core.cli.changing import Command, Result, add_common, connected, run
from waltz_core.cli.output import show_json, show_table
from waltz_core.cluster import changes
from waltz_core.errors import BadConfig, Unavailable
from waltz_core.wire.messages import (
    AddPreferredRequest,
    AddPreferredResponse,
    RemovePreferredRequest,
    RemovePreferredResponse,
)

Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add(verbs: Verbs) -> None:
    """Declare the verbs."""
    add_preferring(verbs, "prefer", "unprefer")
    audit = verbs.add_parser("audit", help="show who has changed the cluster, when and how")
    add_common(audit, changes=False)
    audit.set_defaults(verb=lambda arguments: net.run(_audit(arguments)))


def add_preferring(verbs: Verbs, prefer: str, unprefer: str) -> None:
    """Declare the two verbs of preferred partitions; `server` has them under other names."""
    for name, text, verb in (
        (prefer, "have a server own some partitions before all others", _prefer),
        (unprefer, "let partitions that a server was to own go anywhere", _unprefer),
    ):
        command = verbs.add_parser(name, help=text)
        command.add_argument("partitions", metavar="PARTITIONS", help="like 3 or 0-6,9 or all")
        command.add_argument("server", metavar="HOST:PORT")
        add_common(command)
        command.set_defaults(verb=_running(verb), creates=False)


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
    answer = await ask(address, response, lambda req_id: request(req_id, partitions))
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
