"""`waltz-core access export | import`: copy the permissions, with secrets, to a file and back."""

from pathlib import Path

import click

from waltz_core.access.permission_changes import check_replicate_remains
from waltz_core.access.permissions import Permissions
from waltz_core.cli import shared_options as options
from waltz_core.cli.access.access_change import (
    AccessCommand,
    AccessResult,
    new_client_key,
    run_access_change,
    with_wait_options,
)
from waltz_core.cli.access.access_grants import force_option
from waltz_core.cli.access.private_files import read_private_file, write_private_file
from waltz_core.cli.change_commands import audit_change, open_command_session
from waltz_core.cli.output import print_json, print_result, time_text
from waltz_core.cli.subcommands import subcommand
from waltz_core.cluster.znodes import access_node
from waltz_core.errors import BadFormat


def read_export(path: Path) -> Permissions:
    """Read a file that `access export` has written; raises BadConfig or BadFormat."""
    data = read_private_file(path, access_node.NODE_BYTES_MAX)
    try:
        return access_node.decode_permissions(data)
    except BadFormat as error:
        raise BadFormat(
            f"{path} is not a file of exported permissions: {error}. Hint: `access export` writes "
            "such a file."
        ) from error


def describe_permissions(permissions: Permissions) -> str:
    """Return a text with the revision, the time and the number of grants, groups and tokens."""
    return (
        f"permissions of revision {permissions.revision}, written at "
        f"{time_text(permissions.changed_ms)} "
        f"by {permissions.changed_by} (grants: {len(permissions.grants)}, "
        f"groups: {len(permissions.groups)}, tokens: {len(permissions.tokens)})"
    )


def revision_json(permissions: Permissions) -> dict[str, object]:
    """Return the revision of permissions, its author and its time, for JSON."""
    return {
        "revision": permissions.revision,
        "changed_by": permissions.changed_by,
        "changed_ms": permissions.changed_ms,
    }


@subcommand
@click.option(
    "--file",
    "file",
    type=options.PATH_TYPE,
    required=True,
    metavar="FILE",
    help="the file to create",
)
@options.connect_option
@options.json_option
async def export(*, file: Path, connect: str, as_json: bool) -> int:
    """Write the permissions of a cluster, including secrets, to a new file."""
    async with open_command_session(connect) as coordinator:
        await coordinator.read_cluster()
        async with audit_change(coordinator):
            permissions = await coordinator.permissions.read_existing()
            write_private_file(file, access_node.encode_permissions(permissions))
    if as_json:
        print_json({"done": True, "file": str(file), **revision_json(permissions)})
    else:
        print_result(f"wrote the {describe_permissions(permissions)} to {file}")
    return 0


export.help_details = (
    "The file contains the key that signs client IDs, and the hashes of all tokens. Its mode "
    "is 600; protect it like ZooKeeper's data."
)


@subcommand
@click.option(
    "--file",
    "file",
    type=options.PATH_TYPE,
    required=True,
    metavar="FILE",
    help="a file that `access export` has written",
)
@click.option(
    "--yes",
    is_flag=True,
    help="replace the permissions; without --yes, only show the permissions of the file and of "
    "the cluster",
)
@force_option
@with_wait_options
async def import_command(
    *, file: Path, yes: bool, force: bool, connect: str, as_json: bool, timeout_s: float
) -> int:
    """Replace the permissions of a cluster with the permissions in a file."""
    exported = read_export(file)
    if not yes:
        return await _show_preview(exported, connect, as_json=as_json)

    async def import_permissions(command: AccessCommand) -> AccessResult:
        def check(before: Permissions, after: Permissions) -> None:
            if not force:
                check_replicate_remains(before, after, command.partition_count)

        permissions = command.coordinator.permissions
        change = await permissions.replace(
            exported, command.author, check, new_key=new_client_key()
        )
        return AccessResult(change, f"the cluster now has the {describe_permissions(exported)}")

    return await run_access_change(
        import_permissions, connect=connect, as_json=as_json, timeout_s=timeout_s
    )


import_command.help_details = (
    "The command replaces all grants, groups, limits and tokens, and the key that signs "
    "client IDs. If the cluster has no permissions, it gets a new key instead of the exported one. "
    "Permissions and tokens that were revoked after the export are valid again. The new revision "
    "number is higher than those of the file and of the cluster."
)


async def _show_preview(exported: Permissions, connect: str, *, as_json: bool) -> int:
    """Print the permissions of the file and of the cluster, without a change."""
    async with open_command_session(connect) as coordinator:
        await coordinator.read_cluster()
        try:
            current = await coordinator.permissions.read()
            current_text = "no permissions" if current is None else describe_permissions(current)
        except BadFormat as error:
            current_text = f"permissions that cannot be read: {error}"
    if as_json:
        print_json({"done": False, "file": describe_permissions(exported), "cluster": current_text})
    else:
        print_result(f"the file has {describe_permissions(exported)}")
        print_result(f"the cluster has {current_text}")
        print_result(
            "nothing was changed. Hint: add --yes to replace the permissions of the cluster."
        )
    return 0
