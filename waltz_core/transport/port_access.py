"""What a listening port permits to the principal of a connection (decision 048, AC 2 to AC 8).

Rules:
    1. A valid token decides alone; without one, the verified certificate decides. Without either
       the principal is `anonymous`.
    2. A missing node, or one with an older revision, changes nothing: the known permissions stay.
    3. A connection remembers what was permitted to it. Each revision, and the end of its token,
       checks all of that again with its credential, and ends the connection if something is denied
       now: its unsent bytes are dropped.
    4. Before the port has read the permissions, it rejects every request with an error that can be
       retried.
    5. A peer whose version does not have the error `PermissionDenied` gets `BadRequest`; a
       connection that sends an answer instead of a request is ended.
    6. With `access = "report"` a denied request is logged, and permitted.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from waltz_core.access.grants import Grants
from waltz_core.access.permissions import Permissions
from waltz_core.access.principals import ANONYMOUS, Certificate, compiled_pattern, principal_of
from waltz_core.access.requirements import AccessVerb, ByField, Exempt, Requirement, Scope
from waltz_core.access.tokens import hash_of
from waltz_core.errors import (
    AuthenticationFailed,
    BadRequest,
    PermissionDenied,
    RemoteProtocolError,
    Unavailable,
    WaltzError,
)
from waltz_core.wire.admin_messages import AuthenticateForAdmin
from waltz_core.wire.messages import Authenticate, AuthenticateAtStorage, Message, WireProtocol

_log = logging.getLogger(__name__)

# How long a connection may be used at most after its token has expired.
EXPIRY_CHECK_S: Final = 0.5
# Lines for the same principal and message.
_LOG_INTERVAL_S: Final = 60.0
_LOGGED_MAX: Final = 1_000
# The first versions that have the error; 0.13 has an adapter for clients, up to L 4 (rule 5).
_KNOWN_SINCE: Final = {
    WireProtocol.CLIENT: Authenticate.since,
    WireProtocol.STORAGE: AuthenticateAtStorage.since,
    WireProtocol.ADMIN: AuthenticateForAdmin.since,
}
_ADAPTED_MAX: Final = 4
# The partitions of a request that names none.
_NO_PARTITION: Final = (None,)


def _wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


class PortAccess:
    """The rules of a daemon's ports, with the newest permissions that it has read."""

    def __init__(
        self,
        pattern: str,
        *,
        is_enforced: bool,
        clock_ms: Callable[[], int] = _wall_clock_ms,
    ) -> None:
        """Raises BadConfig for an invalid `principal_pattern`; the clock is in UTC milliseconds.

        `is_enforced` is `access = "on"`; otherwise rule 6.
        """
        self.is_enforced = is_enforced
        self.permissions: Permissions | None = None
        self.grants: Grants | None = None
        self._pattern = compiled_pattern(pattern)
        self._clock_ms = clock_ms
        self._connections: dict[ConnectionAccess, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._logged_s: dict[tuple[str, str], float] = {}

    def learn(self, permissions: Permissions | None) -> None:
        """Take what ZooKeeper has now; None: it has no permissions (rules 2 and 3)."""
        known = self.permissions
        if permissions is None:
            _log.warning("access.missing revision=%d", known.revision if known else 0)
            return
        if known is not None and permissions.revision < known.revision:
            _log.error(
                "access.revision_ignored revision=%d known=%d",
                permissions.revision,
                known.revision,
            )
            return
        self.permissions, self.grants = permissions, Grants(permissions)
        for connection in list(self._connections):
            connection.check_again()
        _log.info("access.revision revision=%d", permissions.revision)

    def opened(
        self, certificate: Certificate | None, peer: str, end: Callable[[str], None]
    ) -> "ConnectionAccess":
        """Return the access of a new connection; `end` ends it now, with a reason.

        `certificate` is the peer's verified one, if any.
        """
        principal = principal_of(certificate, self._pattern) or ANONYMOUS
        made = ConnectionAccess(self, principal, peer, end)
        self._connections[made] = None
        return made

    def closed(self, connection: "ConnectionAccess") -> None:
        """Forget a connection."""
        self._connections.pop(connection, None)

    def token_principal(self, token_hash: str) -> str:
        """Return the principal of a token now; raises AuthenticationFailed."""
        if self.permissions is None:
            raise AuthenticationFailed("the token cannot be checked: there are no permissions yet")
        principal = self.permissions.token_principal(token_hash, self._clock_ms())
        if principal is None:
            raise AuthenticationFailed("the token is unknown, revoked or expired")
        return principal

    def watch_expiry(self) -> None:
        """Check the connections with tokens every `EXPIRY_CHECK_S` while there are any."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(EXPIRY_CHECK_S, self._check_tokens)

    def _check_tokens(self) -> None:
        self._timer = None
        with_tokens = [each for each in self._connections if each.has_token]
        for connection in with_tokens:
            connection.check_token()
        if with_tokens:
            self.watch_expiry()

    def log_denial(self, connection: "ConnectionAccess", message: str, error: WaltzError) -> None:
        """Log a denied request, at most once a minute for the same principal and message."""
        key, now_s = (connection.principal, message), time.monotonic()
        if now_s < self._logged_s.get(key, -_LOG_INTERVAL_S) + _LOG_INTERVAL_S:
            return
        if len(self._logged_s) >= _LOGGED_MAX:
            self._logged_s.clear()
        self._logged_s[key] = now_s
        if self.is_enforced:
            _log.warning("access.denied peer=%s error=%s", connection.peer, error)
        else:
            _log.warning("access.would_deny peer=%s error=%s", connection.peer, error)


class ConnectionAccess:
    """What one connection is permitted to do; see the module's rules."""

    __slots__ = ("_end", "_permitted", "_port", "_token_hash", "peer", "principal")

    def __init__(
        self, port: PortAccess, principal: str, peer: str, end: Callable[[str], None]
    ) -> None:
        self.principal = principal
        self.peer = peer
        self._port = port
        self._end = end
        self._token_hash: str | None = None
        self._permitted: set[tuple[Requirement, int | None]] = set()

    @property
    def has_token(self) -> bool:
        """Whether a token decides (rule 1)."""
        return self._token_hash is not None

    def take_token(self, secret: bytes) -> None:
        """Take the principal of a token; raises AuthenticationFailed."""
        token_hash = hash_of(secret)
        self.principal = self._port.token_principal(token_hash)
        self._token_hash = token_hash
        self._port.watch_expiry()

    def check_token(self) -> bool:
        """Determine the principal again; end the connection if the token is not valid now."""
        if self._token_hash is None:
            return True
        try:
            self.principal = self._port.token_principal(self._token_hash)
        except AuthenticationFailed as error:
            self._end(str(error))
            return False
        return True

    def check_again(self) -> None:
        """Check the credential, and all that was permitted to it, by the newest revision."""
        if not self.check_token():
            return
        for requirement, partition in self._permitted:
            if self._missing(requirement, partition) is not None:
                self._permitted.clear()
                self._end(f"the permissions of {self.principal} have changed")
                return

    def denial(self, message: Message, version: int | None) -> WaltzError | None:
        """Return the error for a request that is denied; None: it is permitted.

        `version` is that of the connection's protocol.
        """
        declared = message.requires
        if isinstance(declared, ByField):
            declared = declared.requirements[getattr(message, declared.field)]
        if isinstance(declared, Exempt):
            return self._not_a_request(message)
        named = message.own_partitions() if declared.scope is Scope.OWN else ()
        for partition in named or _NO_PARTITION:
            if (declared, partition) in self._permitted:
                continue
            error = self._check(declared, partition, message)
            if error is not None:
                return self._as_known(error, message.protocol, version)
        return None

    def _check(
        self, requirement: Requirement, partition: int | None, message: Message
    ) -> WaltzError | None:
        if self._port.grants is None:
            if not self._port.is_enforced:
                return None
            return Unavailable("the permissions have not been read yet")
        missing = self._missing(requirement, partition)
        if missing is None:
            self._permitted.add((requirement, partition))
            return None
        text = _denied_text(self.principal, requirement, missing, partition, message)
        error = PermissionDenied(text)
        self._port.log_denial(self, type(message).__name__, error)
        return error if self._port.is_enforced else None

    def _missing(self, requirement: Requirement, partition: int | None) -> AccessVerb | None:
        assert self._port.grants is not None
        return self._port.grants.missing(self.principal, requirement, partition)

    def _not_a_request(self, message: Message) -> WaltzError | None:
        if not self._port.is_enforced:
            return None
        error = RemoteProtocolError(f"expected a request, found {type(message).__name__}")
        self._end(str(error))
        return error

    def _as_known(
        self, error: WaltzError, protocol: WireProtocol, version: int | None
    ) -> WaltzError:
        """Rule 5."""
        is_adapted = protocol is WireProtocol.CLIENT and (version or 0) <= _ADAPTED_MAX
        if not isinstance(error, PermissionDenied) or is_adapted:
            return error
        return error if (version or 0) >= _KNOWN_SINCE[protocol] else BadRequest(str(error))


def _denied_text(
    principal: str,
    requirement: Requirement,
    missing: AccessVerb,
    partition: int | None,
    message: Message,
) -> str:
    where = "all partitions" if requirement.scope is Scope.ALL else "any partition"
    if partition is not None:
        where = f"partition {partition}"
    joined = (" and " if requirement.is_all else " or ").join(
        each.value for each in requirement.verbs
    )
    lacking = missing.value if requirement.is_all else joined
    return (
        f"{type(message).__name__} requires {joined} for {where}, and {principal} is not granted "
        f"{lacking} there. Hint: `waltz-core access grant` grants it."
    )
