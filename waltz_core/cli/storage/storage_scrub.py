"""`waltz-core storage scrub`: verify records on disk now, wait, and report the result.

The storage runs the scrub, which may take hours. The scrub continues after the command's timeout.
"""

import asyncio
from typing import Final

import click

from waltz_core.administration import member_connections
from waltz_core.administration.change_run import time_limit
from waltz_core.administration.member_queries import damaged_record_count
from waltz_core.cli import shared_options as options
from waltz_core.cli.output import print_error, print_json, print_table
from waltz_core.cli.progress import ProgressLine
from waltz_core.cli.storage.storage_target import (
    StorageChoice,
    find_one_storage,
    parse_partition_numbers,
    partitions_option,
    with_storage_options,
)
from waltz_core.cli.subcommands import subcommand
from waltz_core.client.links.storage_admin import StorageAdmin, admin_connection
from waltz_core.errors import BadRequest
from waltz_core.wire.admin_messages import (
    ReplicaRequest,
    ReplicaResponse,
    ScrubRequest,
    ScrubResponse,
)

POLL_INTERVAL_S: Final = 0.2
_CONTINUE_HINT: Final = "The storage continues the scrub; --status shows its progress"
_TITLES: Final = ("partition", "next ID", "last ID", "passes", "damaged", "error")


@subcommand
@partitions_option
@click.option("--status", is_flag=True, help="only show the progress of the scrub")
@options.timeout_option()
@with_storage_options(has_timeout=True)
async def scrub(choice: StorageChoice, *, partitions: str, status: bool, timeout_s: float) -> int:
    """Verify the records of partitions on disk now, and wait for the result."""
    partition_numbers = parse_partition_numbers(partitions)
    target = await find_one_storage(choice)
    with ProgressLine() as line:
        line.show(0, len(partition_numbers), f"waiting for {target} to answer")
        async with (
            time_limit(timeout_s, lambda: line.wait_reason, hint=_CONTINUE_HINT),
            admin_connection(target.admin_address, ssl=member_connections.ssl_context()) as admin,
        ):
            if not admin.is_current:
                raise BadRequest(
                    f"{target}: expected a storage that supports scrubs, found a Waltz 0.13 storage"
                )
            states = [
                await _scrub_state(admin, partition, line, is_requested=not status)
                for partition in partition_numbers
            ]
    if choice.as_json:
        print_json({"storage": str(target), "partitions": states})
    else:
        print_table(
            _TITLES, [["-" if cell is None else cell for cell in row.values()] for row in states]
        )
    damaged = [row["partition"] for row in states if row["damaged"] or row["error"]]
    if damaged:
        print_error(
            f"{target}: partitions {damaged} are damaged or were not read completely; the servers "
            "that own them repair the damage"
        )
    return 1 if damaged else 0


async def _scrub_state(
    admin: StorageAdmin, partition: int, line: ProgressLine, *, is_requested: bool
) -> dict[str, object]:
    """Return the scrub state of a partition; if requested, first run a complete scrub."""
    line.show(0, 1, f"waiting for {admin.address} to report the scrub of partition {partition}")
    state = await admin.request(ScrubResponse, ScrubRequest, partition, is_requested)
    passes_count = state.passes_count
    while is_requested and state.passes_count == passes_count:
        next_id, count = state.next_id, state.last_id + 1
        line.show(next_id, count, f"scrubbing partition {partition}: record {next_id} of {count}")
        await asyncio.sleep(POLL_INTERVAL_S)
        state = await admin.request(ScrubResponse, ScrubRequest, partition, False)  # noqa: FBT003 - the wire's
    line.show(1, 1, f"waiting for {admin.address} to report damage of partition {partition}")
    replica = await admin.request(ReplicaResponse, ReplicaRequest, partition)
    return _scrub_json(state, damaged_record_count(replica))


def _scrub_json(state: ScrubResponse, damaged: int) -> dict[str, object]:
    return {
        "partition": state.partition_id,
        "next_id": state.next_id,
        "last_id": state.last_id,
        "passes": state.passes_count,
        "damaged": damaged,
        "error": state.error,
    }
