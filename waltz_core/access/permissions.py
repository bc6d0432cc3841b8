"""What ZooKeeper stores about principals: their grants, groups, limits and tokens.

`cluster/znodes/access_node.py` has the bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from waltz_core.access.requirements import AccessVerb

# `limits` for each limit that a principal does not have itself.
DEFAULT_LIMITS: Final = "*"


@dataclass(frozen=True, slots=True)
class Grant:
    """A verb for partitions, to a principal or, if `is_group`, to all members of a group.

    `partitions` are ranges first..last, ascending and apart; None: all partitions.
    """

    grantee: str
    is_group: bool
    verb: AccessVerb
    partitions: tuple[tuple[int, int], ...] | None


@dataclass(frozen=True, slots=True)
class PrincipalLimits:
    """The limits of one principal at one daemon; None: no limit of its own.

    Bytes are those of requests, and of the ranges in answers. An append is one request, even with
    many rows.
    """

    bytes_per_s: int | None = None
    appends_per_s: int | None = None
    connections: int | None = None
    feeds: int | None = None


@dataclass(frozen=True, slots=True)
class KnownToken:
    """A token: its public name, its principal, and its end in UTC milliseconds."""

    token_id: str
    principal: str
    expires_ms: int


@dataclass(frozen=True, slots=True)
class Permissions:
    """One revision; `tokens` are by the hash of their secret (`tokens.hash_of`).

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
    tokens: Mapping[str, KnownToken] = field(default_factory=dict, hash=False)

    def valid_token(self, token_hash: str, now_ms: int) -> KnownToken | None:
        """Return a token; None if it is unknown, revoked or expired."""
        known = self.tokens.get(token_hash)
        return None if known is None or now_ms >= known.expires_ms else known
