"""`waltz-core server`: run a server daemon, list servers, choose what they own."""

import argparse
import asyncio
from typing import NamedTuple

from waltz_core.cli import http_pages
from waltz_core.cli.asking import ask
from waltz_core.cli.changing import add_common, connected
from waltz_core.cli.cluster import cluster_checks
from waltz_core.cli.output import ranges_of, show_json, show_table
from waltz_core.cli.progress import ProgressLine
from waltz_core.cli.server import server_run
from waltz_core.errors import WaltzError
from waltz_core.transport import net
from waltz_core.wire.messages import PartitionsHealthRequest, PartitionsHealthResponse

WELL = "well"


class ServerRow(NamedTuple):
    """A registered server; `state` is WELL, or what is wrong with it."""

    server: int
    address: str
    state: str
    partitions: list[int]
    preferred: list[int]


def add(command: argparse.ArgumentParser) -> None:
    """Declare the verbs."""
    verbs = command.add_subparsers(title="verbs", metavar="VERB", required=True)
    server_run.add(verbs)
    listed = verbs.add_parser(
        "list", help="list the servers of a cluster, what each owns, and whether it can serve it"
    )
    add_common(listed, changes=False)
    listed.set_defaults(verb=lambda arguments: net.run(_list(arguments)))
    http_pages.add_metrics(verbs.add_parser("metrics", help="show the numbers of one server"))
    cluster_checks.add_preferring(verbs, "add-preferred-partition", "remove-preferred-partition")


async def _list(arguments: argparse.Namespace) -> int:
    async with connected(arguments.connect) as coordinator:
        await coordinator.read_cluster()
        view = await coordinator.read_servers()
    with ProgressLine() as line:
        async with asyncio.TaskGroup() as tasks:
            asked = {
                key: tasks.create_task(_state_of(its.address), name=its.address)
                for key, its in view.servers.items()
            }
            line.show(0, len(asked), "waiting for the servers to answer")
    rows = [
        ServerRow(
            int(key),
            its.address,
            asked[key].result(),
            sorted(map(int, view.partitions_of(key))),
            sorted(map(int, its.preferred)),
        )
        for key, its in view.servers.items()
    ]
    if arguments.json:
        told = [each._asdict() for each in rows]
        show_json({"is_settled": view.is_settled, "servers": told})
    else:
        show_table(
            ("server", "address", "owns", "partitions", "preferred", "state"),
            [
                (
                    each.server,
                    each.address,
                    len(each.partitions),
                    ranges_of(each.partitions),
                    ranges_of(each.preferred),
                    each.state,
                )
                for each in rows
            ],
        )
    return 0 if all(each.state == WELL for each in rows) else 1


async def _state_of(address: str) -> str:
    try:
        told = await ask(address, PartitionsHealthResponse, PartitionsHealthRequest)
    except WaltzError as error:
        return f"does not answer: {error}"
    ill = [partition for partition, is_healthy in told.healthy if not is_healthy]
    return f"no open session: partitions {ranges_of(ill)}" if ill else WELL
