"""Which requirements one revision of the permissions meets for a principal.

Rules (decision 048, AC 7):
    1. A partition outside of the grants is denied, whether or not the cluster has it.
    2. A request for no partition must have its verbs for at least one.
"""

from typing import Final, TypeAlias

from waltz_core.access.permissions import Permissions
from waltz_core.access.requirements import AccessVerb, Requirement, Scope

# Ranges first..last of partitions; None: all partitions.
Partitions: TypeAlias = tuple[tuple[int, int], ...] | None
_NOTHING: Final[Partitions] = ()


class Grants:
    """The grants of all principals, those of their groups included."""

    def __init__(self, permissions: Permissions) -> None:
        self._partitions: dict[tuple[str, AccessVerb], Partitions] = {}
        for grant in permissions.grants:
            holders = permissions.groups[grant.holder] if grant.is_group else (grant.holder,)
            for holder in holders:
                key = holder, grant.verb
                known = self._partitions.get(key, _NOTHING)
                is_all = known is None or grant.partitions is None
                self._partitions[key] = (
                    None if is_all else (*(known or ()), *(grant.partitions or ()))
                )

    def missing(
        self, principal: str, requirement: Requirement, partition: int | None
    ) -> AccessVerb | None:
        """Return a verb that the principal lacks; None: the requirement is met.

        `partition` is one of the request; None if the request names none (rule 2).
        """
        lacking = [
            verb
            for verb in requirement.verbs
            if not self._has(principal, verb, requirement.scope, partition)
        ]
        is_met = not lacking if requirement.is_all else len(lacking) < len(requirement.verbs)
        return None if is_met else lacking[0]

    def _has(self, principal: str, verb: AccessVerb, scope: Scope, partition: int | None) -> bool:
        granted = self._partitions.get((principal, verb), _NOTHING)
        if granted is None:
            return True
        if scope is Scope.ALL:
            return False
        if partition is None:
            return bool(granted)
        return any(first <= partition <= last for first, last in granted)
