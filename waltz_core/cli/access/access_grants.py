"""`waltz-core access init | grant | revoke | limit | accept-0-13`."""

import click

from waltz_core.access import permission_changes as changes
from waltz_core.access.permission_changes import Grantee, Ranges, format_ranges
from waltz_core.access.permissions import DEFAULT_LIMITS_KEY, Permissions, PrincipalLimits
from waltz_core.access.requirements import AccessVerb
from waltz_core.cli import shared_options as options
from waltz_core.cli.access.access_change import (
    AccessCommand,
    AccessResult,
    access_change_command,
    new_client_key,
)
from waltz_core.cli.subcommands import subcommand
from waltz_core.cluster.change.replica_steps import parse_partitions
from waltz_core.cluster.change.stored_permissions import PermissionsChange
from waltz_core.errors import BadConfig

grantee_argument = options.argument(
    "grantee", "GRANTEE", "the name of the principal, or with --group of the group"
)
verbs_argument = options.argument(
    "verbs",
    "VERBS",
    "the verbs, separated by commas: read, append, administer, replicate",
)
partitions_option = click.option(
    "--partitions",
    default="all",
    metavar="PARTITIONS",
    help="the partitions, for example 3, 0-6,9 or all [default: all]",
)
group_option = click.option(
    "--group", "is_group", is_flag=True, help="treat GRANTEE as the name of a group"
)
force_option = click.option(
    "--force",
    is_flag=True,
    help="make the change even if it leaves a partition for which no principal has `replicate`",
)


def parse_ranges(text: str, partition_count: int) -> Ranges:
    """Parse the value of `--partitions`; return None for all. Raises BadConfig."""
    partitions = parse_partitions(text, partition_count)
    return None if text == "all" else changes.ranges_of(partitions)


@subcommand
@click.option(
    "--accept-0.13",
    "accepts_0_13",
    is_flag=True,
    help="also accept client IDs of Waltz 0.13 clients, which have no proof of their principal",
)
@access_change_command
async def init(command: AccessCommand, *, accepts_0_13: bool) -> AccessResult:
    """Create the permissions of a cluster, without a grant."""
    first = changes.initial_permissions(new_client_key(), accepts_0_13=accepts_0_13)
    permissions = await command.coordinator.permissions.create(first, command.author)
    return AccessResult(
        PermissionsChange(None, permissions),
        "the permissions were created; they contain no grant yet",
    )


init.help_details = (
    "Grant `replicate` to the servers before you enable access control at any daemon. The "
    "cluster key and the data stay unchanged."
)


@subcommand
@grantee_argument
@verbs_argument
@partitions_option
@group_option
@access_change_command
async def grant(
    command: AccessCommand, *, grantee: str, verbs: str, partitions: str, is_group: bool
) -> AccessResult:
    """Grant verbs to a principal or a group."""
    grantee_value, verb_set = Grantee(grantee, is_group), changes.parse_verbs(verbs)
    ranges = parse_ranges(partitions, command.partition_count)
    change = await command.change(lambda old: changes.grant(old, grantee_value, verb_set, ranges))
    return AccessResult(
        change,
        f"{grantee_value} has the verbs {_verbs_text(verb_set)} for partitions "
        f"{format_ranges(ranges)}",
    )


grant.help_details = "If the grantee already has the verb for other partitions, it keeps them."


@subcommand
@grantee_argument
@verbs_argument
@partitions_option
@group_option
@force_option
@access_change_command
async def revoke(
    command: AccessCommand,
    *,
    grantee: str,
    verbs: str,
    partitions: str,
    is_group: bool,
    force: bool,
) -> AccessResult:
    """Revoke verbs from a principal or a group."""
    grantee_value, verb_set = Grantee(grantee, is_group), changes.parse_verbs(verbs)
    ranges, count = parse_ranges(partitions, command.partition_count), command.partition_count
    change = await command.change(
        lambda old: changes.revoke(old, grantee_value, verb_set, ranges, partition_count=count),
        force=force,
    )
    summary = (
        f"{grantee_value} no longer has a grant of {_verbs_text(verb_set)} for partitions "
        f"{format_ranges(ranges)}"
    )
    numbers = parse_partitions(partitions, count)
    notes = (
        ()
        if is_group
        else _remaining_verbs_texts(change.after, grantee, verb_set, set(numbers), count)
    )
    return AccessResult(change, summary, notes)


revoke.help_details = (
    "A principal keeps the verbs that its groups have; the command lists them. The last "
    "grant of `replicate` for a partition is only revoked with --force."
)


def _remaining_verbs_texts(
    after: Permissions,
    principal: str,
    verbs: tuple[AccessVerb, ...],
    numbers: set[int],
    count: int,
) -> tuple[str, ...]:
    """Return sentences about the verbs that a principal still has from its groups."""
    lines = []
    for verb in verbs:
        remaining = changes.granted_partitions(after, principal, verb, count) & numbers
        if remaining:
            text = format_ranges(changes.ranges_of(remaining))
            lines.append(
                f"{principal} still has the verb {verb.value} for partitions {text}, because "
                "its group has it"
            )
    return tuple(lines)


def _verbs_text(verbs: tuple[AccessVerb, ...]) -> str:
    return ",".join(verb.value for verb in verbs)


@subcommand
@options.argument(
    "principal",
    "PRINCIPAL",
    f'the principal, or "{DEFAULT_LIMITS_KEY}" to set the default for principals without limits '
    "of their own",
)
@click.option(
    "--bytes-per-s", type=int, metavar="N", help="maximum bytes of appends and reads per second"
)
@click.option("--appends-per-s", type=int, metavar="N", help="maximum append requests per second")
@click.option("--connections", type=int, metavar="N", help="maximum number of open connections")
@click.option("--feeds", type=int, metavar="N", help="maximum number of open feeds")
@click.option("--remove", is_flag=True, help="remove all limits of the principal")
@access_change_command
async def limit(
    command: AccessCommand, *, principal: str, remove: bool, **limit_options: int | None
) -> AccessResult:
    """Set or remove the limits of a principal."""
    limits = PrincipalLimits(**limit_options)
    if remove == (limits != PrincipalLimits()):
        options_text = ", ".join(f"--{key.replace('_', '-')}" for key in limit_options)
        raise BadConfig(f"expected one or more limits ({options_text}), or --remove; found neither")
    if remove:
        change = await command.change(lambda old: changes.remove_limits(old, principal))
        return AccessResult(change, f"{principal} has no limits of its own")
    change = await command.change(lambda old: changes.set_limits(old, principal, limits))
    limits_text = ", ".join(
        f"{key} {value}" for key, value in limit_options.items() if value is not None
    )
    notes = (
        ()
        if _is_known_principal(change.after, principal)
        else (_unknown_principal_text(change.after, principal),)
    )
    return AccessResult(change, f"the limits of {principal} are {limits_text}", notes)


def _unknown_principal_text(permissions: Permissions, principal: str) -> str:
    """Return a note if no grant, group or token names a principal."""
    hint = f". Hint: {principal} is a group, but only principals can have limits."
    is_group = principal in permissions.groups
    return f"no permission or token names {principal} yet{hint if is_group else ''}"


def _is_known_principal(permissions: Permissions, principal: str) -> bool:
    """Whether a grant, a group or a token names a principal."""
    return principal in {
        DEFAULT_LIMITS_KEY,
        *(entry.grantee for entry in permissions.grants if not entry.is_group),
        *(member for members in permissions.groups.values() for member in members),
        *(entry.principal for entry in permissions.tokens.values()),
    }


limit.help_details = (
    "A limit applies to the sum of all connections of the principal at one daemon. A limit "
    "that the command does not name stays unchanged. Principals with `replicate` have no "
    "limits."
)


@subcommand
@options.argument(
    "state",
    "on|off",
    "on: the daemons accept these client IDs; off: they reject them",
    type=options.SuggestingChoice(["on", "off"]),
)
@access_change_command
async def accept_0_13(command: AccessCommand, *, state: str) -> AccessResult:
    """Set whether daemons accept the client IDs of Waltz 0.13 clients."""
    accepts = state == "on"
    change = await command.change(lambda old: changes.set_accepts_0_13(old, accepts=accepts))
    state_text = "accepted" if accepts else "not accepted"
    return AccessResult(
        change,
        f"client IDs without a proof of their principal are {state_text}",
    )
