"""`waltz-core archive unpin`: remove the pin of a restored cluster from an archive."""

import asyncio
from uuid import UUID

import click

from waltz_core.archive.pins import unpin_objects
from waltz_core.archive.store import ArchiveStore
from waltz_core.cli import shared_options as options
from waltz_core.cli.archive.archive_status import archive_option, query_archive_url
from waltz_core.cli.change_commands import audit_change, open_command_session
from waltz_core.cli.output import print_json, print_result
from waltz_core.cli.subcommands import subcommand
from waltz_core.errors import BadRequest


@subcommand
@options.argument(
    "restored_key",
    "KEY",
    "the cluster key (a UUID) of the restored cluster, as `archive status` prints it",
    type=click.UUID,
)
@options.connect_option
@archive_option
@options.json_option
async def unpin(*, restored_key: UUID, connect: str, archive: str | None, as_json: bool) -> int:
    """Remove the pin of a restored cluster from an archive."""
    async with open_command_session(connect) as coordinator:
        source = (await coordinator.read_cluster()).store.cluster_key
        root = await coordinator.root_of(restored_key)
        if root is not None:
            raise BadRequest(
                f"cannot remove the pin: the cluster at {root} in this ZooKeeper has the key "
                f"{restored_key}, and needs the pinned objects. Hint: delete that cluster "
                "first."
            )
        store = ArchiveStore(archive or await query_archive_url(coordinator))
        async with audit_change(coordinator):
            await asyncio.to_thread(unpin_objects, store, source.bytes, restored_key.bytes)
    if as_json:
        print_json({"done": True, "cluster_key": str(restored_key)})
    else:
        print_result(f"cluster {restored_key} no longer pins objects of cluster {source}")
    return 0


unpin.help_details = (
    "A restored cluster uses the archived objects of the cluster that was backed up. A pin, a file "
    "in the archive, prevents the storages from deleting these objects. `archive status` lists the "
    "pins. Use the command only if the restored cluster will never run again, or if its restore "
    "was interrupted: without its pin, a restored cluster can lose transactions. If the restored "
    "cluster exists in the same ZooKeeper, the command does not remove its pin; other ZooKeepers "
    "are not checked."
)
