"""Decides which requirements a principal meets under one revision of the permissions.

Rules (decision 048, AC 7):
    1. A partition outside of the grants is denied, whether or not it exists in the cluster.
    2. For a request that names no partition, the principal must have the required verbs for at
       least one partition.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from waltz_core.access.permissions import Permissions
from waltz_core.access.requirements import AccessVerb, Requirement, Scope

# Disjoint ranges first..last of partitions, in ascending order. None stands for all partitions.
PartitionRanges: TypeAlias = tuple[tuple[int, int], ...] | None
_NO_PARTITIONS: Final[PartitionRanges] = ()


@dataclass(frozen=True, slots=True)
class PrincipalGrants:
    """The partitions that the grants of one principal and of its groups allow for each verb."""

    ranges_by_verb: Mapping[AccessVerb, PartitionRanges] = field(default_factory=dict, hash=False)

    def missing_verb(self, requirement: Requirement, partition: int | None) -> AccessVerb | None:
        """Return a required verb that is not granted; None if the grants meet the requirement.

        `partition` is a partition that the request names; None if the request names none (rule 2).
        """
        missing = None
        for verb in requirement.verbs:
            if self._has_verb(verb, requirement.scope, partition):
                if not requirement.needs_all:
                    return None
            elif requirement.needs_all:
                return verb
            else:
                missing = missing or verb
        return missing

    def _has_verb(self, verb: AccessVerb, scope: Scope, partition: int | None) -> bool:
        granted = self.ranges_by_verb.get(verb, _NO_PARTITIONS)
        if granted is None:
            return True
        if scope is Scope.ALL:
            return False
        if scope is Scope.ANY or partition is None:
            return bool(granted)
        return any(first <= partition <= last for first, last in granted)

    def partitions_to_check(
        self, requirement: Requirement, partitions: Sequence[int]
    ) -> Collection[int]:
        """Return the partitions of a request that the caller must pass to `missing_verb`.

        A request can contain four million partition numbers, most of them repeated. A check of each
        number would take seconds, so repeated numbers are removed.
        """
        if all(self.ranges_by_verb.get(verb, _NO_PARTITIONS) is None for verb in requirement.verbs):
            return partitions[:1]
        return dict.fromkeys(partitions)

    def includes(self, earlier: "PrincipalGrants") -> bool:
        """Whether these grants permit everything that the `earlier` grants permitted."""
        return all(
            _includes_ranges(self.ranges_by_verb.get(verb, _NO_PARTITIONS), partitions)
            for verb, partitions in earlier.ranges_by_verb.items()
        )


NO_GRANTS: Final = PrincipalGrants()


class Grants:
    """The grants of all principals in one revision of the permissions."""

    def __init__(self, permissions: Permissions) -> None:
        ranges_by_principal: dict[str, dict[AccessVerb, PartitionRanges]] = {}
        for grant in permissions.grants:
            grantees = permissions.groups[grant.grantee] if grant.is_group else (grant.grantee,)
            for grantee in grantees:
                verbs = ranges_by_principal.setdefault(grantee, {})
                verbs[grant.verb] = _union_of_ranges(
                    verbs.get(grant.verb, _NO_PARTITIONS), grant.partitions
                )
        self._by_principal = {
            principal: PrincipalGrants(verbs) for principal, verbs in ranges_by_principal.items()
        }

    def for_principal(self, principal: str) -> PrincipalGrants:
        """Return the grants of a principal, which are empty if it has none."""
        return self._by_principal.get(principal, NO_GRANTS)


def _union_of_ranges(ranges: PartitionRanges, other_ranges: PartitionRanges) -> PartitionRanges:
    if ranges is None or other_ranges is None:
        return None
    merged: list[tuple[int, int]] = []
    for first, last in sorted((*ranges, *other_ranges)):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(merged[-1][1], last)
        else:
            merged.append((first, last))
    return tuple(merged)


def _includes_ranges(current_ranges: PartitionRanges, earlier_ranges: PartitionRanges) -> bool:
    if current_ranges is None or earlier_ranges is None:
        return current_ranges is None
    return all(
        any(low <= first and last <= high for low, high in current_ranges)
        for first, last in earlier_ranges
    )
