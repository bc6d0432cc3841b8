"""`waltz-core access list | check`."""

from collections.abc import Mapping
from typing import Any

import click

from waltz_core.access import permission_changes as changes
from waltz_core.access.grants import Grants
from waltz_core.access.permission_changes import Grantee, format_ranges
from waltz_core.access.permissions import Permissions, PrincipalLimits
from waltz_core.access.requirements import AccessVerb, Requirement, Scope
from waltz_core.administration.change_run import now_ms
from waltz_core.cli import shared_options as options
from waltz_core.cli.access.access_change import describe_revision_use, read_revision_use
from waltz_core.cli.access.access_export import revision_json
from waltz_core.cli.change_commands import open_command_session
from waltz_core.cli.output import print_error, print_json, print_result, print_table, time_text
from waltz_core.cli.subcommands import subcommand
from waltz_core.errors import BadConfig

EXIT_DENIED = 1


@subcommand
@options.connect_option
@options.json_option
async def list_command(*, connect: str, as_json: bool) -> int:
    """Show the permissions, the tokens, and the revisions that the daemons use."""
    async with open_command_session(connect) as coordinator:
        await coordinator.read_cluster()
        permissions = await coordinator.permissions.read_existing()
        usage = await read_revision_use(coordinator, permissions.revision)
    if as_json:
        print_json(
            {
                **permissions_json(permissions, now_ms()),
                "applied": usage.updated_daemons,
                "late": usage.outdated_daemons,
                "without_revision": usage.daemons_without_revision,
                "unregistered": usage.unregistered_servers,
            }
        )
        return 0
    _print_permissions(permissions)
    for text in describe_revision_use(usage, permissions.revision):
        print_error(text)
    return 0


list_command.help_details = (
    "The command prints neither the hashes of tokens nor the key that signs client IDs. "
    "After ZooKeeper was restored from a backup, check the revision and its time: "
    "permissions that were revoked after the backup are valid again."
)


def permissions_json(permissions: Permissions, at_ms: int) -> dict[str, Any]:
    """Return the permissions for JSON, without secrets; `at_ms` is the time for `is_expired`."""
    return {
        **revision_json(permissions),
        "accepts_0_13": permissions.accepts_0_13,
        "groups": {name: list(members) for name, members in permissions.groups.items()},
        "grants": [
            {
                "group" if entry.is_group else "principal": entry.grantee,
                "verb": entry.verb.value,
                "partitions": format_ranges(entry.partitions),
            }
            for entry in permissions.grants
        ],
        "limits": {name: _limits_json(limits) for name, limits in permissions.limits.items()},
        "tokens": [
            {
                "id": entry.token_id,
                "principal": entry.principal,
                "expires_ms": entry.expires_ms,
                "is_expired": entry.expires_ms <= at_ms,
            }
            for entry in permissions.tokens.values()
        ],
    }


def _limits_json(limits: PrincipalLimits) -> Mapping[str, int]:
    values = {key: getattr(limits, key) for key in PrincipalLimits.__dataclass_fields__}
    return {key: value for key, value in values.items() if value is not None}


def _print_permissions(permissions: Permissions) -> None:
    print_result(
        f"revision {permissions.revision}, written at {time_text(permissions.changed_ms)} by "
        f"{permissions.changed_by}; client IDs of Waltz 0.13 clients are "
        f"{'accepted' if permissions.accepts_0_13 else 'not accepted'}"
    )
    verbs: dict[tuple[Grantee, str], list[str]] = {}
    for entry in permissions.grants:
        key = Grantee(entry.grantee, entry.is_group), format_ranges(entry.partitions)
        verbs.setdefault(key, []).append(entry.verb.value)
    print_table(
        ("grantee", "verbs", "partitions"),
        [
            (grantee, ",".join(verb_names), partitions_text)
            for (grantee, partitions_text), verb_names in verbs.items()
        ],
    )
    if permissions.groups:
        rows = [(name, ", ".join(members) or "-") for name, members in permissions.groups.items()]
        print_table(("group", "members"), rows)
    if permissions.limits:
        names = tuple(PrincipalLimits.__dataclass_fields__)
        print_table(
            ("limits of", *(name.replace("_", " ") for name in names)),
            [
                (
                    name,
                    *("-" if (entry := getattr(limits, key)) is None else entry for key in names),
                )
                for name, limits in permissions.limits.items()
            ],
        )
    if permissions.tokens:
        print_table(
            ("token", "principal", "expires"),
            [
                (token.token_id, token.principal, time_text(token.expires_ms))
                for token in permissions.tokens.values()
            ],
        )


@subcommand
@options.argument("principal", "PRINCIPAL", "the principal")
@options.argument(
    "verb",
    "VERB",
    "the verb: read, append, administer or replicate",
    type=options.SuggestingChoice([access_verb.value for access_verb in AccessVerb]),
)
@click.option(
    "--partition",
    type=int,
    metavar="P",
    help="the partition for which to check [default: all partitions]",
)
@options.connect_option
@options.json_option
async def check(
    *, principal: str, verb: str, partition: int | None, connect: str, as_json: bool
) -> int:
    """Show whether the permissions permit a verb to a principal; exit code 1 if not."""
    changes.check_principal(principal)
    async with open_command_session(connect) as coordinator:
        count = (await coordinator.read_cluster()).params.partition_count
        permissions = await coordinator.permissions.read_existing()
    if partition is not None and not 0 <= partition < count:
        raise BadConfig(f"--partition: expected a partition in 0..{count - 1}, found {partition}")
    is_all = _has_verb_for_all(permissions, principal, AccessVerb(verb))
    permitted_partitions = changes.granted_partitions(
        permissions, principal, AccessVerb(verb), count
    )
    is_permitted = is_all if partition is None else partition in permitted_partitions
    if as_json:
        print_json(
            {
                "permitted": is_permitted,
                "principal": principal,
                "verb": verb,
                "partitions": sorted(permitted_partitions),
                "revision": permissions.revision,
            }
        )
    else:
        text = "all" if is_all else format_ranges(changes.ranges_of(permitted_partitions))
        if len(permitted_partitions) == count and not is_permitted:
            text += ", but not for `all`"
        print_result(
            f"{'permitted' if is_permitted else 'denied'}: {principal} has the verb {verb} "
            f"for partitions {text}; the permissions have revision {permissions.revision}"
        )
    return 0 if is_permitted else EXIT_DENIED


def _has_verb_for_all(permissions: Permissions, principal: str, verb: AccessVerb) -> bool:
    """Whether a principal has a verb for `all`; a grant that lists all partitions is not enough."""
    required = Requirement((verb,), Scope.ALL, needs_all=True)
    return Grants(permissions).for_principal(principal).missing_verb(required, None) is None


check.help_details = (
    "The exit code is 0 if the permissions in ZooKeeper permit the verb, and 1 if they deny "
    "it. Without --partition, the verb must be granted for `all`. Requests that concern the "
    "whole cluster require such a grant. A grant that lists every partition number is not "
    "sufficient for them."
)
