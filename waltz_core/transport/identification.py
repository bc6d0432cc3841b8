"""How a listening port determines the principal of a connection (decision 048, AC 2 and AC 3).

Rules:
    1. A valid token decides alone; without one, the verified certificate decides. Without either
       the principal is `anonymous`.
    2. A missing node, or one with an older revision, changes nothing: the known permissions stay.
"""

import logging
import time
from collections.abc import Callable

from waltz_core.access.permissions import Permissions
from waltz_core.access.principals import ANONYMOUS, Certificate, compiled_pattern, principal_of
from waltz_core.access.tokens import hash_of
from waltz_core.errors import AuthenticationFailed

_log = logging.getLogger(__name__)


def _wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


class Identification:
    """The rule of a daemon's ports, with the newest permissions that it has read."""

    def __init__(self, pattern: str, clock_ms: Callable[[], int] = _wall_clock_ms) -> None:
        """Raises BadConfig for an invalid `principal_pattern`; the clock is in UTC milliseconds."""
        self._pattern = compiled_pattern(pattern)
        self._clock_ms = clock_ms
        self._permissions: Permissions | None = None

    def learn(self, permissions: Permissions | None) -> None:
        """Take what ZooKeeper has now; None: it has no permissions (rule 2)."""
        known = self._permissions
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
        self._permissions = permissions
        _log.info("access.revision revision=%d", permissions.revision)

    def by_certificate(self, certificate: Certificate | None) -> str:
        """Return the principal of a connection with this verified certificate, if any."""
        return principal_of(certificate, self._pattern) or ANONYMOUS

    def by_token(self, secret: bytes) -> str:
        """Return the principal of a token; raises AuthenticationFailed."""
        if self._permissions is None:
            raise AuthenticationFailed("the token cannot be checked: there are no permissions yet")
        principal = self._permissions.token_principal(hash_of(secret), self._clock_ms())
        if principal is None:
            raise AuthenticationFailed("the token is unknown, revoked or expired")
        return principal
