"""`waltz-core cluster prefer | unprefer | audit`: what servers own, and the record."""

import argparse
import asyncio
import datetime
from collections.abc import Callable, Sequence

from waltz_core.cli.asking import ask
from waltz_core.cli.changing import Command, Result, add_common, connected, run
from waltz_core.cli.output import show_json, show_table
from waltz_core.cli.parsing import Verbs
from waltz_core.cluster.change import changes
from waltz_core.cluster.membership.registration import ServersView
from waltz_core.errors import BadConfig, Unavailable, WaltzError
from waltz_core.records.record import PartitionId
from waltz_core.transport import net
from waltz_core.wire.messages import (
    AddPreferredRequest,
    AddPreferredResponse,
    PartitionsHealthRequest,
    PartitionsHealthResponse,
    RemovePreferredRequest,
    RemovePreferredResponse,
)

LOOK_AGAIN_S = 0.1


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
        command.add_argument("server", metavar="HOST:PORT", help="as `server list` has it")
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
    view = await _all_open(command, partitions)
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


async def _all_open(command: Command, partitions: Sequence[PartitionId]) -> ServersView:
    """Return the servers once those that own these partitions have them open."""
    while True:
        view = await command.coordinator.read_servers()
        owners = {each: view.owners[each].server_id for each in partitions if each in view.owners}
        asked = {key: await _open_at(view.servers[key].address) for key in set(owners.values())}
        is_open = [each for each, key in owners.items() if each in asked[key]]
        if view.is_settled and len(is_open) == len(partitions):
            return view
        waits = ", ".join(str(each) for each in partitions if each not in is_open) or "all"
        what = f"partitions to be open at their servers: {waits}"
        command.wait_for(what, len(is_open), len(partitions))
        await asyncio.sleep(LOOK_AGAIN_S)


async def _open_at(address: str) -> set[int]:
    try:
        told = await ask(address, PartitionsHealthResponse, PartitionsHealthRequest)
    except WaltzError:  # It has just gone; who comes after it is asked next time.
        return set()
    return {partition for partition, is_healthy in told.healthy if is_healthy}


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
    try:
        when = datetime.datetime.fromtimestamp(at_ms / 1000, datetime.UTC)
    except (OverflowError, ValueError):  # a damaged node: after the year 9999
        return f"{at_ms} ms"
    return when.isoformat(timespec="seconds").replace("+00:00", "Z")
