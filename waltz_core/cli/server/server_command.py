"""`waltz-core server list`: list the servers of a cluster, their partitions and states."""

import asyncio
from typing import NamedTuple

from waltz_core.administration.member_queries import query_server
from waltz_core.cli import shared_options as options
from waltz_core.cli.change_commands import open_command_session
from waltz_core.cli.output import print_json, print_table
from waltz_core.cli.progress import ProgressLine
from waltz_core.cli.subcommands import subcommand
from waltz_core.cluster.change.replica_steps import ranges_of_numbers
from waltz_core.errors import WaltzError
from waltz_core.wire.messages import PartitionsHealthRequest, PartitionsHealthResponse

STATE_OK = "ok"


class ServerRow(NamedTuple):
    """A registered server; `state` is OK, or a description of the problem."""

    server: int
    address: str
    state: str
    partitions: list[int]
    preferred: list[int]


@subcommand
@options.connect_option
@options.json_option
async def list_command(*, connect: str, as_json: bool) -> int:
    """List the servers; exit code 1 if one has a problem."""
    async with open_command_session(connect) as coordinator:
        await coordinator.read_cluster()
        view = await coordinator.read_servers()
    with ProgressLine() as line:
        async with asyncio.TaskGroup() as tasks:
            answers = {
                key: tasks.create_task(_query_state(descriptor.address), name=descriptor.address)
                for key, descriptor in view.servers.items()
            }
            line.show(0, len(answers), "waiting for the servers to answer")
    rows = [
        ServerRow(
            int(key),
            descriptor.address,
            answers[key].result(),
            sorted(map(int, view.partitions_of(key))),
            sorted(map(int, descriptor.preferred)),
        )
        for key, descriptor in view.servers.items()
    ]
    if as_json:
        entries = [row._asdict() for row in rows]
        print_json({"is_settled": view.is_settled, "servers": entries})
    else:
        print_table(
            ("server", "address", "owns", "partitions", "preferred", "state"),
            [
                (
                    row.server,
                    row.address,
                    len(row.partitions),
                    ranges_of_numbers(row.partitions),
                    ranges_of_numbers(row.preferred),
                    row.state,
                )
                for row in rows
            ],
        )
    return 0 if all(row.state == STATE_OK for row in rows) else 1


async def _query_state(address: str) -> str:
    """Return the state of a server: `STATE_OK`, or a description of its problem."""
    try:
        response = await query_server(address, PartitionsHealthResponse, PartitionsHealthRequest)
    except WaltzError as error:
        return f"does not answer: {error}"
    unhealthy = [partition for partition, is_healthy in response.healthy if not is_healthy]
    return (
        f"has no open store session for partitions {ranges_of_numbers(unhealthy)}"
        if unhealthy
        else STATE_OK
    )
