"""The permissions as ZooKeeper stores them: grants, groups, limits and tokens of principals.

`cluster/znodes/access_node.py` encodes and decodes them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from waltz_core.access.requirements import AccessVerb

# The key of the default limits in `limits`. A default limit applies if a principal does not have
# this limit itself.
DEFAULT_LIMITS_KEY: Final = "*"


@dataclass(frozen=True, slots=True)
class Grant:
    """A grant of one verb to a principal or, if `is_group`, to all members of a group.

    `partitions` are disjoint ranges first..last, in ascending order; None grants all partitions.
    """

    grantee: str
    is_group: bool
    verb: AccessVerb
    partitions: tuple[tuple[int, int], ...] | None


@dataclass(frozen=True, slots=True)
class PrincipalLimits:
    """The limits of one principal at one daemon; None for a limit that is not set.

    `bytes_per_s` counts the bytes of requests and of the ranges in answers. `appends_per_s` counts
    an append as one request, even if it has many rows.
    """

    bytes_per_s: int | None = None
    appends_per_s: int | None = None
    connections: int | None = None
    feeds: int | None = None


@dataclass(frozen=True, slots=True)
class StoredToken:
    """The stored part of a token: public ID, principal, and time of expiry in UTC milliseconds."""

    token_id: str
    principal: str
    expires_ms: int


@dataclass(frozen=True, slots=True)
class Permissions:
    """One revision of the permissions.

    The keys of `tokens` are hashes of secrets (`tokens.hash_of`).

    `client_key` signs client IDs, and `accepts_0_13` allows IDs that are not signed (AC 9).
    """

    revision: int
    changed_by: str
    changed_ms: int
    client_key: bytes = field(repr=False)
    accepts_0_13: bool = False
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    grants: tuple[Grant, ...] = ()
    limits: Mapping[str, PrincipalLimits] = field(default_factory=dict, hash=False)
    tokens: Mapping[str, StoredToken] = field(default_factory=dict, hash=False)

    def valid_token(self, token_hash: str, now_ms: int) -> StoredToken | None:
        """Return the token with this hash; None if it is unknown, revoked or expired."""
        token = self.tokens.get(token_hash)
        return None if token is None or now_ms >= token.expires_ms else token
