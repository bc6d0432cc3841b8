"""`waltz-core cluster prefer | unprefer | audit`: preferred servers, and the audit log."""

from waltz_core.administration import preference_changes
from waltz_core.administration.change_run import ChangeResult
from waltz_core.cli import shared_options as options
from waltz_core.cli.change_commands import ChangeCommand, change_command, open_command_session
from waltz_core.cli.output import print_json, print_table, time_text
from waltz_core.cli.subcommands import subcommand

POLL_INTERVAL_S = 0.1


# --- preferred partitions; group `server` contains these subcommands under other names


@subcommand
@options.partitions_argument
@options.server_argument
@change_command()
async def prefer(command: ChangeCommand, *, partitions: str, server: str) -> ChangeResult:
    """Make a server the preferred owner of partitions."""
    return await preference_changes.prefer(command, partitions=partitions, server=server)


@subcommand
@options.partitions_argument
@options.server_argument
@change_command()
async def unprefer(command: ChangeCommand, *, partitions: str, server: str) -> ChangeResult:
    """Remove a server's preference for partitions."""
    return await preference_changes.unprefer(command, partitions=partitions, server=server)


add_preferred_partition, remove_preferred_partition = prefer, unprefer


# --- audit


@subcommand
@options.connect_option
@options.json_option
async def audit(*, connect: str, as_json: bool) -> int:
    """List the changes that commands have made to the cluster."""
    async with open_command_session(connect) as coordinator:
        await coordinator.read_cluster()
        entries = await coordinator.audit.read()
    if as_json:
        print_json(
            [
                {
                    "user": audit_entry.user,
                    "begun_ms": audit_entry.begun_ms,
                    "ended_ms": audit_entry.ended_ms,
                    "command": audit_entry.command,
                    "outcome": audit_entry.outcome,
                }
                for audit_entry in entries
            ]
        )
        return 0
    rows = [
        (
            time_text(audit_entry.begun_ms),
            audit_entry.user,
            audit_entry.command,
            audit_entry.outcome,
        )
        for audit_entry in entries
    ]
    print_table(("when", "user", "command", "outcome"), rows)
    return 0
