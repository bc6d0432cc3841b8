"""Changes of the permissions, as pure functions: each returns the permissions after the change.

`StoredPermissions.change` writes the result to ZooKeeper, with the next revision.

Rules:
    1. This module checks all input, before `access_node` encodes the permissions. A value that no
       permissions may contain raises BadConfig. A change that does not fit the existing permissions
       raises BadRequest.
    2. After a change of a verb, the grantee has at most one grant of this verb. This grant contains
       all partitions of the verb.
    3. Without a grant of `replicate` for a partition, no server can open a session of the
       partition. So a change must not remove the last such grant, unless the caller forces the
       removal (`check_replicate_remains`).
    4. A change without an effect returns equal permissions, so no new revision is written.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, TypeAlias

from waltz_core.access.permissions import (
    DEFAULT_LIMITS_KEY,
    Grant,
    Permissions,
    PrincipalLimits,
    StoredToken,
)
from waltz_core.access.principals import (
    ANONYMOUS,
    PRINCIPAL_NAME_FORM,
    RESERVED_NAMES,
    is_principal_name,
)
from waltz_core.access.requirements import AccessVerb
from waltz_core.errors import BadConfig, BadRequest

# Ranges first..last of partitions, in ascending order. None stands for all partitions.
Ranges: TypeAlias = tuple[tuple[int, int], ...] | None

ACCESS_LIST_HINT: Final = "Hint: `access list` prints the groups, grants, limits and tokens."
AUTHOR_CHARACTERS_MAX: Final = 200
REVISION_MAX: Final = (1 << 63) - 1


class Grantee(NamedTuple):
    """The grantee of a grant: a principal, or a group."""

    name: str
    is_group: bool

    def __str__(self) -> str:
        return f"group {self.name}" if self.is_group else self.name


# --- values


def initial_permissions(client_key: bytes, *, accepts_0_13: bool) -> Permissions:
    """Return the permissions of a new cluster, without grants, author and time."""
    return Permissions(1, "", 0, client_key, accepts_0_13)


def with_revision(
    permissions: Permissions, revision: int, changed_by: str, now_ms: int
) -> Permissions:
    """Return the same permissions with another revision number, author and time.

    "?" replaces each character of `changed_by` that the access node in ZooKeeper may not contain.

    Raises BadRequest if `revision` exceeds `REVISION_MAX`, for example after an import of
    permissions with the revision `REVISION_MAX`.
    """
    author = "".join(character if character.isprintable() else "?" for character in changed_by)
    if revision > REVISION_MAX:
        raise BadRequest(
            f"cannot store the permissions: expected a revision number of at most {REVISION_MAX}, "
            f"found {revision}"
        )
    return replace(
        permissions, revision=revision, changed_by=author[:AUTHOR_CHARACTERS_MAX], changed_ms=now_ms
    )


def ranges_of(partitions: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return partitions, given in any order, as disjoint ranges in ascending order."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(set(partitions)):
        if ranges and ranges[-1][1] + 1 == number:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return tuple(ranges)


def format_ranges(ranges: Ranges) -> str:
    """Format ranges as in commands and in the access node: "0-3,7", "all", or "none"."""
    if ranges is None:
        return "all"
    parts = (f"{first}" if first == last else f"{first}-{last}" for first, last in ranges)
    return ",".join(parts) or "none"


def parse_verbs(text: str) -> tuple[AccessVerb, ...]:
    """Parse verbs such as "read,append", each returned once.

    Raises BadConfig for an unknown verb.
    """
    verbs_by_name = {verb.value: verb for verb in AccessVerb}
    verbs: dict[AccessVerb, None] = {}
    for word in text.split(","):
        if word.strip() not in verbs_by_name:
            expected = (
                f"verbs: expected one or more of {', '.join(verbs_by_name)}, separated by commas, "
                "such as 'read,append'"
            )
            raise BadConfig(f"{expected}; found {text!r}")
        verbs[verbs_by_name[word.strip()]] = None
    return tuple(verbs)


def check_principal(name: str) -> None:
    """Raise BadConfig if no principal with this name may have grants and limits."""
    if not is_principal_name(name) or (name in RESERVED_NAMES and name != ANONYMOUS):
        raise BadConfig(
            f"expected a principal name of {PRINCIPAL_NAME_FORM} that is not reserved, found "
            f"{name!r}"
        )


def granted_partitions(
    permissions: Permissions, principal: str, verb: AccessVerb, count: int
) -> set[int]:
    """Return the partitions for which a principal has a verb, by its own grants or its groups.

    `count` is the number of partitions in the cluster.
    """
    grantees = {Grantee(principal, is_group=False)}
    grantees |= {
        Grantee(name, is_group=True)
        for name, members in permissions.groups.items()
        if principal in members
    }
    return _partitions_of_grants(permissions, verb, grantees, count)


def check_replicate_remains(before: Permissions, after: Permissions, count: int) -> None:
    """Raise BadRequest if the change revokes the last `replicate` of a partition (rule 3).

    `count` is the number of partitions in the cluster.
    """
    lost_partitions = _partitions_with_replicate(before, count) - _partitions_with_replicate(
        after, count
    )
    if lost_partitions:
        raise BadRequest(
            "the change was rejected: after it, no principal would have the verb "
            f"`replicate` for partitions {format_ranges(ranges_of(lost_partitions))}, so their "
            "servers could not open store sessions. Hint: grant `replicate` to another principal "
            "first, or add --force."
        )


def _partitions_with_replicate(permissions: Permissions, count: int) -> set[int]:
    grantees = {
        Grantee(grant_entry.grantee, grant_entry.is_group)
        for grant_entry in permissions.grants
        if not grant_entry.is_group or permissions.groups[grant_entry.grantee]
    }
    return _partitions_of_grants(permissions, AccessVerb.REPLICATE, grantees, count)


def _partitions_of_grants(
    permissions: Permissions, verb: AccessVerb, grantees: set[Grantee], count: int
) -> set[int]:
    partitions: set[int] = set()
    for grant_entry in permissions.grants:
        if (
            grant_entry.verb is verb
            and Grantee(grant_entry.grantee, grant_entry.is_group) in grantees
        ):
            partitions |= _partition_numbers(grant_entry.partitions, count)
    return partitions


def _partition_numbers(ranges: Ranges, count: int) -> set[int]:
    if ranges is None:
        return set(range(count))
    return {number for first, last in ranges for number in range(first, min(last, count - 1) + 1)}


# --- grants


def grant(
    permissions: Permissions, grantee: Grantee, verbs: Sequence[AccessVerb], partitions: Ranges
) -> Permissions:
    """Grant verbs for partitions to a principal or a group (rule 2).

    Raises BadConfig for an invalid name, and BadRequest for a group that does not exist.
    """
    _check_grantee(permissions, grantee)
    grants = permissions.grants
    for verb in verbs:
        grants = _with_grant(grants, grantee, verb, partitions)
    return replace(permissions, grants=grants)


def revoke(
    permissions: Permissions,
    grantee: Grantee,
    verbs: Sequence[AccessVerb],
    partitions: Ranges,
    *,
    partition_count: int,
) -> Permissions:
    """Revoke verbs for partitions; `partition_count` is the number of partitions in the cluster.

    Raises BadConfig for an invalid name, and BadRequest if the grantee has no such grant (rule 1).
    """
    _check_grantee(permissions, grantee)
    grants = permissions.grants
    for verb in verbs:
        grants = _without_grant(grants, grantee, verb, partitions, partition_count)
    if grants == permissions.grants:
        verbs_text = ",".join(verb.value for verb in verbs)
        raise BadRequest(
            f"nothing was changed: {grantee} has no grant of {verbs_text} for partitions "
            f"{format_ranges(partitions)}. {ACCESS_LIST_HINT}"
        )
    return replace(permissions, grants=grants)


def _check_grantee(permissions: Permissions, grantee: Grantee) -> None:
    if grantee.is_group:
        _check_group(permissions, grantee.name)
    else:
        check_principal(grantee.name)


def _is_grant_of(grant: Grant, grantee: Grantee, verb: AccessVerb) -> bool:
    return (grant.grantee, grant.is_group, grant.verb) == (grantee.name, grantee.is_group, verb)


def _with_grant(
    grants: tuple[Grant, ...], grantee: Grantee, verb: AccessVerb, partitions: Ranges
) -> tuple[Grant, ...]:
    same_grants = [
        other_grant for other_grant in grants if _is_grant_of(other_grant, grantee, verb)
    ]
    merged_ranges = _merge_ranges(
        [partitions, *(other_grant.partitions for other_grant in same_grants)]
    )
    added = Grant(grantee.name, grantee.is_group, verb, merged_ranges)
    if not same_grants:
        return (*grants, added)
    grants_left = (
        other_grant
        for other_grant in grants
        if other_grant is same_grants[0] or not _is_grant_of(other_grant, grantee, verb)
    )
    return tuple(
        added if other_grant is same_grants[0] else other_grant for other_grant in grants_left
    )


def _merge_ranges(ranges_of_grants: Iterable[Ranges]) -> Ranges:
    ranges: list[tuple[int, int]] = []
    for ranges_or_all in ranges_of_grants:
        if ranges_or_all is None:
            return None
        ranges += ranges_or_all
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return tuple(merged)


def _without_grant(
    grants: tuple[Grant, ...],
    grantee: Grantee,
    verb: AccessVerb,
    partitions: Ranges,
    partition_count: int,
) -> tuple[Grant, ...]:
    grants_left: list[Grant] = []
    for grant_entry in grants:
        if not _is_grant_of(grant_entry, grantee, verb):
            grants_left.append(grant_entry)
            continue
        if partitions is None:
            continue
        before = _partition_numbers(grant_entry.partitions, partition_count)
        partitions_left = before - _partition_numbers(partitions, partition_count)
        if partitions_left:
            grants_left.append(
                grant_entry
                if partitions_left == before
                else replace(grant_entry, partitions=ranges_of(partitions_left))
            )
    return tuple(grants_left)


# --- groups, limits, tokens


def add_to_group(permissions: Permissions, group: str, members: Sequence[str]) -> Permissions:
    """Add principals to a group, and create the group if necessary; raises BadConfig."""
    if not is_principal_name(group):
        raise BadConfig(f"expected a group name of {PRINCIPAL_NAME_FORM}, found {group!r}")
    for member in members:
        check_principal(member)
    all_members = tuple(dict.fromkeys((*permissions.groups.get(group, ()), *members)))
    return replace(permissions, groups={**permissions.groups, group: all_members})


def remove_from_group(permissions: Permissions, group: str, members: Sequence[str]) -> Permissions:
    """Remove principals from a group, which may become empty.

    Raises BadRequest for a non-member.
    """
    _check_group(permissions, group)
    for member in members:
        if member not in permissions.groups[group]:
            raise BadRequest(f"{member} is not a member of group {group}. {ACCESS_LIST_HINT}")
    members_left = tuple(member for member in permissions.groups[group] if member not in members)
    return replace(permissions, groups={**permissions.groups, group: members_left})


def delete_group(permissions: Permissions, group: str) -> Permissions:
    """Delete a group and its grants; raises BadRequest if the group does not exist."""
    _check_group(permissions, group)
    return replace(
        permissions,
        groups={name: members for name, members in permissions.groups.items() if name != group},
        grants=tuple(
            grant_entry
            for grant_entry in permissions.grants
            if not (grant_entry.is_group and grant_entry.grantee == group)
        ),
    )


def _check_group(permissions: Permissions, group: str) -> None:
    if group not in permissions.groups:
        names = ", ".join(permissions.groups) or "none"
        raise BadRequest(
            f"there is no group {group!r}; the existing groups are: {names}. Hint: `access "
            "group add` creates a group."
        )


def set_limits(permissions: Permissions, name: str, limits: PrincipalLimits) -> Permissions:
    """Set limits of a principal, or the default limits "*"; None in `limits` keeps the old value.

    Raises BadConfig for a limit below 1 or above 2^63 - 1.
    """
    if name != DEFAULT_LIMITS_KEY:
        check_principal(name)
    new_limits = {
        key: value
        for key in PrincipalLimits.__dataclass_fields__
        if (value := getattr(limits, key)) is not None
    }
    for key, value in new_limits.items():
        if not 1 <= value < 1 << 63:
            raise BadConfig(f"limit {key}: expected a number from 1 to 2^63 - 1, found {value}")
    return replace(
        permissions,
        limits={
            **permissions.limits,
            name: replace(permissions.limits.get(name, PrincipalLimits()), **new_limits),
        },
    )


def remove_limits(permissions: Permissions, name: str) -> Permissions:
    """Remove all limits of a principal, or the default limits "*".

    Raises BadRequest if none exist.
    """
    if name not in permissions.limits:
        raise BadRequest(f"{name} has no limits of its own. {ACCESS_LIST_HINT}")
    return replace(
        permissions,
        limits={key: limits for key, limits in permissions.limits.items() if key != name},
    )


def set_accepts_0_13(permissions: Permissions, *, accepts: bool) -> Permissions:
    """Set whether client IDs without a proof are accepted (AC 9)."""
    return replace(permissions, accepts_0_13=accepts)


def add_token(permissions: Permissions, token_hash: str, token: StoredToken) -> Permissions:
    """Add a token under the hash of its secret; a repeated call has no effect.

    Raises BadConfig for a reserved principal, and BadRequest if another token has the ID.
    """
    check_token_principal(token.principal)
    if permissions.tokens.get(token_hash, token) != token or any(
        stored_token.token_id == token.token_id
        for key, stored_token in permissions.tokens.items()
        if key != token_hash
    ):
        raise BadRequest(
            f"a token with ID {token.token_id} exists already. Hint: repeat the command; it "
            "creates another ID."
        )
    return replace(permissions, tokens={**permissions.tokens, token_hash: token})


def check_token_principal(name: str) -> None:
    """Raise BadConfig if a token must not identify this principal, for example a reserved one."""
    check_principal(name)
    if name in RESERVED_NAMES:
        raise BadConfig(f"expected the name of a principal that is not reserved, found {name!r}")


def revoke_token(permissions: Permissions, token_id: str) -> Permissions:
    """Remove the token with an ID; raises BadRequest if no token has the ID."""
    tokens_left = {
        key: stored_token
        for key, stored_token in permissions.tokens.items()
        if stored_token.token_id != token_id
    }
    if len(tokens_left) == len(permissions.tokens):
        raise BadRequest(f"there is no token with ID {token_id!r}. {ACCESS_LIST_HINT}")
    return replace(permissions, tokens=tokens_left)


def remove_expired_tokens(permissions: Permissions, now_ms: int) -> Permissions:
    """Remove the expired tokens, which have no effect any more."""
    tokens_left = {
        key: stored_token
        for key, stored_token in permissions.tokens.items()
        if now_ms < stored_token.expires_ms
    }
    return replace(permissions, tokens=tokens_left)
