"""`waltz-core archive expire`: expire old transactions, so that partitions' logs begin later.

The owner of each partition executes the request. The command repeats the request until the owner
has completed it, even if the partition moves to another server meanwhile.
"""

import asyncio
import time
from datetime import datetime
from typing import Final

import click

from waltz_core.administration.change_run import time_limit
from waltz_core.cli import shared_options as options
from waltz_core.cli.change_commands import audit_change, open_command_session
from waltz_core.cli.output import print_error, print_json, print_result
from waltz_core.cli.subcommands import subcommand
from waltz_core.client import AsyncWaltzClient
from waltz_core.errors import BadConfig
from waltz_core.records.record import PartitionId

RETRY_INTERVAL_S: Final = 0.5
_PREVIEW_RESULT: Final = (
    "nothing was changed. Hint: add --yes to expire these transactions; only whole objects expire."
)


def parse_before(text: str, now_ms: int) -> tuple[int, int]:
    """Parse `--before`; return a transaction ID and a time in ms, of which one is 0.

    Raises:
        BadConfig: the text is neither an ID nor a time in the past.
    """
    if text.isdigit():
        return int(text), 0
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        raise BadConfig(
            "--before: expected a transaction ID, or a time with a time zone such as "
            f"2026-11-28T10:00:00Z, found {text!r}"
        )
    before_ms = int(time.timestamp() * 1_000)
    if not 0 < before_ms <= now_ms:
        raise BadConfig(f"--before: expected a time in the past, found {text!r}")
    return 0, before_ms


@subcommand
@options.connect_option
@click.option(
    "--before",
    required=True,
    metavar="TIME|ID",
    help="the first transaction to keep: its ID, or a commit time with a time zone",
)
@click.option(
    "--partition",
    type=int,
    metavar="P",
    help="the partition; required if --before is an ID [default: all]",
)
@click.option(
    "--yes",
    is_flag=True,
    help="expire the transactions; without --yes, only show which ones would expire",
)
@options.timeout_option()
@options.json_option
async def expire(
    *,
    connect: str,
    before: str,
    partition: int | None,
    yes: bool,
    timeout_s: float,
    as_json: bool,
) -> int:
    """Expire the archived transactions before an ID or a time."""
    bounds = parse_before(before, time.time_ns() // 1_000_000)
    if bounds[0] and partition is None:
        raise BadConfig(
            "--before: a transaction ID also needs --partition, because each partition has "
            "its own IDs. Hint: add --partition P."
        )
    rows: dict[int, dict[str, int]] = {}
    waits_for = "the servers"
    async with (
        open_command_session(connect) as coordinator,
        AsyncWaltzClient.connect(connect) as client,
        time_limit(
            timeout_s,
            lambda: f"{waits_for}; if the expiry fails, the owner logs archive.expiry_failed",
        ),
    ):
        partition_ids = None if partition is None else [partition]
        sets = await client.replica_sets(partition_ids)
        archived = {number: state.archived for number, state in sets.items() if state.archived}
        for number in sorted(sets.keys() - archived.keys()):
            print_error(f"partition {number}: no transaction is archived")
        if yes and archived:
            async with audit_change(coordinator):
                for number in sorted(archived):
                    waits_for = f"the owner of partition {number} to record the expiry"
                    await _expire_partition(client, PartitionId(number), bounds)
            sets = await client.replica_sets(archived)
        for number, archived_range in archived.items():
            new_range = sets[number].archived or archived_range
            rows[number] = {
                "first_available": new_range.first,
                "first_available_before": archived_range.first,
                "archived": new_range.last,
            }
    if as_json:
        print_json({"done": yes, "partitions": rows})
        return 0
    for number, row in rows.items():
        available = f"the archive has transactions {row['first_available']}..{row['archived']}"
        if yes:
            change = f"previously, the first available one was {row['first_available_before']}"
        elif bounds[0]:
            change = f"those before {bounds[0]} would expire"
        else:
            change = f"those committed before {before} would expire"
        print_error(f"partition {number}: {available}; {change}")
    print_result("done" if yes else _PREVIEW_RESULT)
    return 0


expire.help_details = (
    "Archived objects expire as a whole, the oldest first. An object expires if all of its "
    "transactions are before the given ID, or were committed before the given time. The log "
    "then begins after the expired objects, and reads of earlier transactions fail. The "
    "storages delete the files a day later. The command ends when the owners of the "
    "partitions have recorded the expiry."
)


async def _expire_partition(
    client: AsyncWaltzClient, partition_id: PartitionId, bounds: tuple[int, int]
) -> None:
    """Repeat the request for expiry until the owner of the partition has recorded it."""
    while True:
        if await client.requests.expire(partition_id, *bounds):
            return
        await asyncio.sleep(RETRY_INTERVAL_S)  # the owner does not report the end of the task
