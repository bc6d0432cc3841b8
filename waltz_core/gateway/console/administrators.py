"""Checks whether the caller of a request is an administrator of the cluster.

Normally, servers and storages (the members of the cluster) check the token and the permissions of
the caller. The gateway checks the token and the permissions itself in two cases: if a change uses
the gateway's user in ZooKeeper, and if no member answers.
"""

from typing import Final

from waltz_core import errors
from waltz_core.access.grants import Grants
from waltz_core.access.permissions import Permissions
from waltz_core.access.principals import ANONYMOUS
from waltz_core.access.requirements import ADMINISTER, Requirement, Scope
from waltz_core.administration.change_run import now_ms

_REQUIRED_PERMISSION: Final = Requirement((ADMINISTER,), Scope.ALL, needs_all=True)


def check_administrator(permissions: Permissions, token_hash: str, action: str) -> str:
    """Return the principal of a token; a caller without a token has an empty hash.

    Raises:
        AuthenticationFailed: the token is not valid.
        PermissionDenied: the principal does not have the verb `administer` for all partitions.
    """
    principal = _principal_of(permissions, token_hash)
    if (
        Grants(permissions).for_principal(principal).missing_verb(_REQUIRED_PERMISSION, None)
        is not None
    ):
        raise errors.PermissionDenied(
            f"principal {principal!r} may not {action}: it needs the verb administer for all "
            "partitions. Hint: `waltz-core access grant` grants it."
        )
    return principal


def _principal_of(permissions: Permissions, token_hash: str) -> str:
    if not token_hash:
        return ANONYMOUS
    token = permissions.valid_token(token_hash, now_ms())
    if token is None:
        raise errors.AuthenticationFailed("the token is not known, or it has expired")
    return token.principal
