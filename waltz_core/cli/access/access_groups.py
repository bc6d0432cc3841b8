"""`waltz-core access group add | remove | delete`."""

from waltz_core.access import permission_changes as changes
from waltz_core.cli import shared_options as options
from waltz_core.cli.access.access_change import AccessCommand, AccessResult, access_change_command
from waltz_core.cli.access.access_grants import force_option
from waltz_core.cli.subcommands import subcommand

group_argument = options.argument("group", "GROUP", "the group")
members_argument = options.argument(
    "members",
    "PRINCIPAL...",
    "the principals; a group cannot contain other groups",
    nargs=-1,
    required=True,
)


@subcommand
@group_argument
@members_argument
@access_change_command
async def group_add(
    command: AccessCommand, *, group: str, members: tuple[str, ...]
) -> AccessResult:
    change = await command.change(lambda old: changes.add_to_group(old, group, members))
    return AccessResult(
        change, f"the members of group {group} are {', '.join(change.after.groups[group])}"
    )


@subcommand
@group_argument
@members_argument
@force_option
@access_change_command
async def group_remove(
    command: AccessCommand, *, group: str, members: tuple[str, ...], force: bool
) -> AccessResult:
    change = await command.change(
        lambda old: changes.remove_from_group(old, group, members), force=force
    )
    members_text = ", ".join(change.after.groups[group]) or "no principal"
    return AccessResult(change, f"the members of group {group} are {members_text}")


@subcommand
@group_argument
@force_option
@access_change_command
async def group_delete(command: AccessCommand, *, group: str, force: bool) -> AccessResult:
    change = await command.change(lambda old: changes.delete_group(old, group), force=force)
    return AccessResult(change, f"group {group} and its grants were deleted")
