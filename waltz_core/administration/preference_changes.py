"""Changes of the preferred servers of partitions, for commands and for the console."""

import asyncio
from collections.abc import Sequence

from waltz_core.administration.change_run import ChangeResult, ChangeRun
from waltz_core.administration.member_queries import query_server
from waltz_core.cluster.change.replica_steps import parse_partitions, ranges_of_numbers
from waltz_core.cluster.membership.registration import ServersView
from waltz_core.errors import BadConfig, Unavailable, WaltzError
from waltz_core.records.record import PartitionId
from waltz_core.wire.messages import (
    AddPreferredRequest,
    AddPreferredResponse,
    PartitionsHealthRequest,
    PartitionsHealthResponse,
    RemovePreferredRequest,
    RemovePreferredResponse,
)

POLL_INTERVAL_S = 0.1


async def prefer(run: ChangeRun, *, partitions: str, server: str) -> ChangeResult:
    """Make a server the preferred owner of partitions."""
    return await _change_preference(
        run, partitions, server, (AddPreferredRequest, AddPreferredResponse)
    )


async def unprefer(run: ChangeRun, *, partitions: str, server: str) -> ChangeResult:
    """Remove a server's preference for partitions."""
    return await _change_preference(
        run, partitions, server, (RemovePreferredRequest, RemovePreferredResponse)
    )


async def _change_preference(
    run: ChangeRun,
    partitions_text: str,
    address: str,
    message_types: tuple[
        type[AddPreferredRequest | RemovePreferredRequest],
        type[AddPreferredResponse | RemovePreferredResponse],
    ],
) -> ChangeResult:
    coordinator, (request, response) = run.coordinator, message_types
    count = (await coordinator.read_cluster()).params.partition_count
    partitions = parse_partitions(partitions_text, count)
    view = await coordinator.read_servers()
    if address not in [descriptor.address for descriptor in view.servers.values()]:
        names = ", ".join(descriptor.address for descriptor in view.servers.values()) or "none"
        raise BadConfig(f"no server is registered at {address}; registered servers: {names}")
    run.report_wait(f"the server at {address}")
    answer = await query_server(address, response, lambda req_id: request(req_id, partitions))
    if not answer.is_done:
        raise Unavailable(
            f"the server at {address} has not made the change for partitions "
            f"{ranges_of_numbers(list(partitions))}. Hint: read the server's log, then run the "
            "command again."
        )
    view = await _wait_until_open(run, partitions)
    owned_partitions = sorted(
        partition_id
        for partition_id, owner in view.owners.items()
        if view.servers[owner.server_id].address == address
    )
    return {
        "server": address,
        "owns": owned_partitions,
        "summary": f"server {address} owns partitions "
        f"{', '.join(map(str, owned_partitions)) or 'none'}",
    }


async def _wait_until_open(run: ChangeRun, partitions: Sequence[PartitionId]) -> ServersView:
    """Wait until the owners of the partitions have opened them; return the servers."""
    while True:
        view = await run.coordinator.read_servers()
        owners = {
            partition_id: view.owners[partition_id].server_id
            for partition_id in partitions
            if partition_id in view.owners
        }
        queried = {
            key: await _query_open_partitions(view.servers[key].address)
            for key in set(owners.values())
        }
        is_open = [
            partition_id for partition_id, key in owners.items() if partition_id in queried[key]
        ]
        if view.is_settled and len(is_open) == len(partitions):
            return view
        waiting_for = (
            ", ".join(
                str(partition_id) for partition_id in partitions if partition_id not in is_open
            )
            or "all"
        )
        reason = f"the servers to open these partitions: {waiting_for}"
        run.report_wait(reason, len(is_open), len(partitions))
        await asyncio.sleep(POLL_INTERVAL_S)


async def _query_open_partitions(address: str) -> set[int]:
    """Return the partitions for which a server has an open store session."""
    try:
        response = await query_server(address, PartitionsHealthResponse, PartitionsHealthRequest)
    except WaltzError:  # the server has just exited; the next check queries its successor
        return set()
    return {partition for partition, is_healthy in response.healthy if is_healthy}
