"""Permissions of peers at a listening port (decision 048, AC 2 to AC 8, AC 10).

Rules:
    1. If there is a valid token, the token alone determines the principal. Without a valid token,
       the verified certificate determines it. Without both, the principal is `anonymous`.
    2. If the node of the permissions in ZooKeeper is missing or has an older revision, the known
       permissions stay in use.
    3. A revision may take a permission or the token from a principal, or give the token to another
       principal. Then the principal's connections end, and their unsent bytes are dropped.
       Connections also end when their token or certificate expires.
    4. Before the port has read the permissions, it rejects every request with a retriable error.
       The first revision that the port reads ends all connections whose principal has no
       permission. The reason is that the port did not limit their number before (`port_limits.py`,
       rule 2).
    5. A peer whose version does not have the error `PermissionDenied` receives `BadRequest`. If a
       peer sends an answer instead of a request, its connection ends.
    6. With `access = "report"`, only an invalid token is rejected and ends a connection. A denied
       request is logged and permitted. An administrative request that cannot be written to the
       audit log is permitted, too. Principals have no quotas.
    7. A mount needs a client ID with a proof for the connection's principal (AC 9). There is one
       exception: while the permissions accept 0.13, an ID below `FIRST_ISSUED_ID` needs no proof.
       In each generation, this ID belongs to the principal that mounts it first
       (`server/append/mounts.py`). When a revision no longer accepts 0.13, connections with such
       IDs end.
    8. A connection counts towards the connection limit of its principal from its first message on
       (`register_connection`). A connection without messages counts from `UNAUTHORIZED_S_MAX`
       (`net.py`) on. If a revision lowers a limit, the connections above the limit end. If a
       revision introduces a limit of feeds, all connections of the principal end, because their
       present feeds were not counted.
"""

import asyncio
import logging
import ssl
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from waltz_core.access.grants import Grants
from waltz_core.access.permissions import Permissions, StoredToken
from waltz_core.access.principals import (
    ANONYMOUS,
    Certificate,
    compile_principal_pattern,
    principal_of,
)
from waltz_core.access.quotas import IssuedIdLimit, Quotas
from waltz_core.errors import AuthenticationFailed
from waltz_core.transport.admission.connection_access import ConnectionAccess

if TYPE_CHECKING:
    from waltz_core.transport.admission.audit_log import AuditFile

_log = logging.getLogger(__name__)

# The interval of checks: the maximum time for which an expired token or certificate stays usable.
EXPIRY_CHECK_S: Final = 0.5
# The interval between log lines for the same principal and message.
_LOG_INTERVAL_S: Final = 60.0
_LOGGED_DENIALS_MAX: Final = 1_000
# The maximum number of revoked tokens that a port remembers, so that errors can name them.
_REVOKED_TOKENS_MAX: Final = 10_000


def _wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


class PortAccess:
    """Applies the newest permissions that a daemon has read to the connections of its ports."""

    def __init__(
        self,
        pattern: str,
        *,
        is_enforced: bool,
        clock_ms: Callable[[], int] = _wall_clock_ms,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Raises BadConfig for an invalid `principal_pattern`; `clock_ms` returns UTC milliseconds.

        `is_enforced` states `access = "on"`; otherwise rule 6 applies.
        """
        self.is_enforced = is_enforced
        self.permissions: Permissions | None = None
        self.grants: Grants | None = None
        self.quotas = Quotas()
        self.issued_ids = IssuedIdLimit()
        self.clock_ns = clock_ns
        self.audit: AuditFile | None = None  # set by the daemon, like the next attribute
        self.on_denied: Callable[[], None] = lambda: None
        self._pattern = compile_principal_pattern(pattern)
        self._clock_ms = clock_ms
        self._connections: dict[ConnectionAccess, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._last_log_s: dict[tuple[str, str], float] = {}
        # Tokens of earlier revisions, by hash; the oldest one is first.
        self._revoked_tokens: dict[str, StoredToken] = {}

    def apply(self, permissions: Permissions | None) -> None:
        """Apply the permissions that ZooKeeper has now (rules 2 and 3).

        `permissions` is None if ZooKeeper has none.
        """
        previous = self.permissions
        if permissions is None:
            _log.warning(
                "access.permissions_missing revision=%d", previous.revision if previous else 0
            )
            return
        if previous is not None and permissions.revision < previous.revision:
            _log.error(
                "access.older_revision_ignored revision=%d known=%d",
                permissions.revision,
                previous.revision,
            )
            return
        self._note_revoked(permissions)
        self.permissions, self.grants = permissions, Grants(permissions)
        if self.is_enforced:  # rule 6
            self.quotas.apply_permissions(permissions, self.grants)
        for connection in list(self._connections):
            connection.apply_revision(is_first=previous is None)
        for connection_access in self.quotas.connections_over_limit():
            assert isinstance(connection_access, ConnectionAccess)
            connection_access.end_over_limit()
        _log.info("access.revision_applied revision=%d", permissions.revision)
        if self.audit is not None and (
            previous is None or previous.revision < permissions.revision
        ):
            self.audit.log_revision(permissions)

    def add_connection(
        self, certificate: Certificate | None, peer: str, end: Callable[[str], None]
    ) -> "ConnectionAccess":
        """Register a connection and return its access; `end` aborts the connection, with a reason.

        `certificate` is the verified certificate of the peer, if it has one.
        """
        principal = principal_of(certificate, self._pattern) or ANONYMOUS
        connection_access = ConnectionAccess(self, principal, peer, end)
        if certificate and self.is_enforced:
            connection_access.expires_ms = int(
                1000 * ssl.cert_time_to_seconds(certificate["notAfter"])
            )
            self.watch_expiry()
        self._connections[connection_access] = None
        return connection_access

    def remove_connection(self, connection: "ConnectionAccess") -> None:
        """Remove a connection, which has closed."""
        self._connections.pop(connection, None)
        connection.unregister_connection()

    @property
    def accepts_0_13(self) -> bool:
        """Whether client IDs that ZooKeeper issued need no proof (rule 7)."""
        return self.permissions is not None and self.permissions.accepts_0_13

    def valid_token(self, token_hash: str) -> StoredToken:
        """Return a token that is valid now; raises AuthenticationFailed."""
        if self.permissions is None:
            raise AuthenticationFailed(
                "the token cannot be checked, because this process has no permissions yet"
            )
        token = self.permissions.valid_token(token_hash, self._clock_ms())
        if token is None:
            raise AuthenticationFailed(self.invalid_token_reason(token_hash))
        return token

    def _note_revoked(self, permissions: Permissions) -> None:
        for token_hash, token in self.permissions.tokens.items() if self.permissions else ():
            if token_hash not in permissions.tokens:
                self._revoked_tokens[token_hash] = token
        while len(self._revoked_tokens) > _REVOKED_TOKENS_MAX:
            del self._revoked_tokens[next(iter(self._revoked_tokens))]

    def find_token(self, token_hash: str) -> StoredToken | None:
        """Return a token, even if it has expired, or was revoked while the port was open."""
        token = self.permissions.tokens.get(token_hash) if self.permissions else None
        return token or self._revoked_tokens.get(token_hash)

    def invalid_token_reason(self, token_hash: str) -> str:
        """Return why a token is not valid.

        The text may contain the token's ID, because only a peer that has the token receives the
        text.
        """
        token = self.find_token(token_hash)
        if token is None:
            return "the token is unknown, or was revoked"
        is_listed = self.permissions is not None and token_hash in self.permissions.tokens
        state = "has expired" if is_listed else "is revoked"
        return f"token {token.token_id} of {token.principal} {state}"

    def watch_expiry(self) -> None:
        """Check every `EXPIRY_CHECK_S` which credentials have expired, while any can expire."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(EXPIRY_CHECK_S, self._check_expiry)

    def _check_expiry(self) -> None:
        self._timer = None
        now_ms = self._clock_ms()
        expiring = [
            connection_access
            for connection_access in self._connections
            if connection_access.expires_ms is not None
        ]
        for connection in expiring:
            connection.check_expiry(now_ms)
        if expiring:
            self.watch_expiry()

    def must_log(self, principal: str, message: str) -> bool:
        """Whether to log a denial: at most once a minute for the same principal and message."""
        key, now_s = (principal, message), time.monotonic()
        if now_s < self._last_log_s.get(key, -_LOG_INTERVAL_S) + _LOG_INTERVAL_S:
            return False
        if len(self._last_log_s) >= _LOGGED_DENIALS_MAX:
            self._last_log_s.clear()
        self._last_log_s[key] = now_s
        return True
