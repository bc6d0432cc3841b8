"""`waltz-core cluster check-connectivity`: check connections to servers and between processes.

The command itself cannot detect a firewall between a server and a storage. So the command requests
each server to connect to every storage. The request is message 13 of protocol L, which 0.13 servers
also answer.
"""

import asyncio
from collections.abc import Mapping
from typing import Final, NamedTuple

from waltz_core.administration.member_queries import query_server
from waltz_core.cli import shared_options as options
from waltz_core.cli.change_commands import open_command_session
from waltz_core.cli.output import print_json, print_table
from waltz_core.cli.progress import ProgressLine
from waltz_core.cli.subcommands import subcommand
from waltz_core.errors import WaltzError
from waltz_core.wire.messages import CheckConnectivityRequest, CheckConnectivityResponse

THIS_COMMAND: Final = "this command"


class ConnectionCheck(NamedTuple):
    """Whether one process can connect to another; `reason` is the error, if known."""

    origin: str
    target: str
    is_reached: bool
    reason: str | None = None


@subcommand
@options.connect_option
@options.json_option
async def check_connectivity(*, connect: str, as_json: bool) -> int:
    """Check that this command can connect to all servers, and each server to all storages."""
    async with open_command_session(connect) as coordinator:
        servers = [each.address for each in (await coordinator.read_servers()).servers.values()]
        storages = [
            str(each) for each in (await coordinator.storages.read_layout()).assignment.partitions
        ]
    with ProgressLine() as line:
        checks = await _check_all_servers(servers, storages, line)
    is_healthy = bool(servers) and all(each.is_reached for each in checks)
    if as_json:
        print_json({"is_healthy": is_healthy, "connections": [each._asdict() for each in checks]})
        return 0 if is_healthy else 1
    rows = [
        (each.origin, each.target, "reached" if each.is_reached else each.reason or "NOT REACHED")
        for each in checks
    ]
    print_table(("from", "to", "found"), rows or [("-", "-", "no server is registered")])
    return 0 if is_healthy else 1


async def _check_all_servers(
    servers: list[str], storages: list[str], line: ProgressLine
) -> list[ConnectionCheck]:
    """Request each server concurrently to check its connections."""
    finished_servers: list[str] = []

    async def check_server(address: str) -> list[ConnectionCheck]:
        try:
            answer = await query_server(
                address, CheckConnectivityResponse, CheckConnectivityRequest
            )
        except WaltzError as error:
            checks = [
                ConnectionCheck(
                    THIS_COMMAND, f"server {address}", is_reached=False, reason=str(error)
                )
            ]
        else:
            checks = connection_checks_of_server(address, storages, dict(answer.reachable))
        finished_servers.append(address)
        waiting_for = ", ".join(server for server in servers if server not in finished_servers)
        line.show(len(finished_servers), len(servers), f"waiting for {waiting_for}")
        return checks

    async with asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(check_server(server), name=server) for server in servers]
    return [check for task in started for check in task.result()]


def connection_checks_of_server(
    server: str, storages: list[str], reported: Mapping[str, bool]
) -> list[ConnectionCheck]:
    """Return a server's check of each storage, even of storages that it does not use yet."""
    name = f"server {server}"
    checks = [ConnectionCheck(THIS_COMMAND, name, is_reached=True)]
    for storage in dict.fromkeys([*storages, *reported]):
        reason = None if storage in reported else "the server does not connect to this storage yet"
        is_reached = reported.get(storage, False)
        checks.append(
            ConnectionCheck(name, f"storage {storage}", is_reached=is_reached, reason=reason)
        )
    return checks
