"""The permissions of one connection, by the rules of `port_access.py`."""

import logging
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Final

from waltz_core.access.client_ids import FIRST_ISSUED_ID, NO_PROOF, is_valid_proof, proof_of
from waltz_core.access.grants import NO_GRANTS, PrincipalGrants
from waltz_core.access.requirements import (
    AccessVerb,
    Exemption,
    Requirement,
    RequirementByField,
    Scope,
)
from waltz_core.access.tokens import hash_of
from waltz_core.errors import (
    AuthenticationFailed,
    BadRequest,
    ClientIdDenied,
    Overloaded,
    PermissionDenied,
    PermissionsNotLoaded,
    RemoteProtocolError,
    WaltzError,
)
from waltz_core.transport.admission.audit_log import AuditedRequest, Peer, is_administrative
from waltz_core.wire.admin_messages import AuthenticateForAdmin
from waltz_core.wire.authentication import Credential
from waltz_core.wire.messages import (
    Authenticate,
    AuthenticateAtStorage,
    Message,
    MountRequest,
    MountWriter,
    WireProtocol,
)

if TYPE_CHECKING:
    from waltz_core.access.quotas import Quota
    from waltz_core.transport.admission.port_access import PortAccess

_log = logging.getLogger(__name__)

# The first versions that have the error `PermissionDenied`. For 0.13 clients (up to L 4), an
# adapter translates the error (rule 5).
_PERMISSION_DENIED_SINCE: Final = {
    WireProtocol.CLIENT: Authenticate.since,
    WireProtocol.STORAGE: AuthenticateAtStorage.since,
    WireProtocol.ADMIN: AuthenticateForAdmin.since,
}
_ADAPTED_VERSION_MAX: Final = 4
# The partitions of a request that names no partition.
_NO_PARTITION: Final = (None,)


class ConnectionAccess:
    """The permissions and limits of one connection; rules refer to `port_access.py`."""

    __slots__ = (
        "_current_grants",
        "_end",
        "_has_id_without_proof",
        "_is_registered",
        "_over_limit_errors",
        "_port",
        "_token_hash",
        "expires_ms",
        "peer",
        "principal",
        "quota",
    )

    def __init__(
        self, port: "PortAccess", principal: str, peer: str, end: Callable[[str], None]
    ) -> None:
        self.principal = principal
        self.peer = peer
        self.expires_ms: int | None = None  # the end of the credential's validity
        self.quota: Quota | None = None  # None without limits
        self._is_registered = False
        self._has_id_without_proof = False
        # Requests over a limit, by `id`, with the errors that `denial` returns for them.
        self._over_limit_errors: dict[int, tuple[Message, Overloaded]] = {}
        self._port = port
        self._end = end
        self._token_hash: str | None = None
        self._current_grants = self._read_grants()

    def _read_grants(self) -> PrincipalGrants:
        grants = self._port.grants
        return NO_GRANTS if grants is None else grants.for_principal(self.principal)

    @property
    def has_permission(self) -> bool:
        """Whether the principal has any permission.

        Also True before the port has read the permissions, and with `access = "report"` (rule 6).
        """
        port = self._port
        return (
            not port.is_enforced or port.grants is None or bool(self._current_grants.ranges_by_verb)
        )

    def take_token(self, secret: bytes) -> None:
        """Set the principal from a token; raises AuthenticationFailed."""
        token_hash = hash_of(secret)
        token = self._port.valid_token(token_hash)
        self.principal, self.expires_ms = token.principal, token.expires_ms
        self._token_hash = token_hash
        self._current_grants = self._read_grants()
        self._port.watch_expiry()

    def register_connection(self, count: Callable[[str], None]) -> None:
        """Count the connection for its current principal (rule 8); raises Overloaded.

        The method can be called again. `count` counts the connection for a tenant of the port
        (`port_limits.py`, rule 3).
        """
        self.unregister_connection()  # a token may have changed the principal
        self._is_registered = True
        quota = self._port.quotas.quota_of(self.principal, self.now_ns)
        try:
            if quota is not None:
                quota.add_connection(self)
                self.quota = quota
            count(self._tenant())
        except Overloaded as error:
            if self._port.must_log(self.principal, "connection"):
                _log.warning("access.limit_exceeded peer=%s error=%s", self.peer, error)
            raise

    def _tenant(self) -> str:
        is_limited = self.quota is not None and self.quota.limits.connections is not None
        is_server = AccessVerb.REPLICATE in self._current_grants.ranges_by_verb
        is_tenant = self._port.is_enforced and self._port.grants is not None
        return self.principal if is_tenant and not is_server and not is_limited else ""

    def unregister_connection(self) -> None:
        """Stop counting the connection for its principal."""
        if self.quota is not None:
            self.quota.remove_connection(self)
            self.quota = None

    def end_over_limit(self) -> None:
        """End the connection, because a revision has lowered a limit (rule 8)."""
        self._end(f"the limits of {self.principal} were changed")

    def end_after_failure(self, error: Exception) -> None:
        """End the connection: requests that waited because of a limit could not be processed."""
        self._end(
            "the daemon could not process requests that had waited because of a limit: "
            f"{error!r:.200}"
        )

    @property
    def now_ns(self) -> int:
        """The monotonic time in nanoseconds, for `quota`."""
        return self._port.clock_ns()

    def mark_over_limit(self, message: Message, error: Overloaded) -> None:
        """Make `denial` return this error for a request, and log the error."""
        self._over_limit_errors[id(message)] = message, error
        if self._port.must_log(self.principal, type(message).__name__):
            _log.warning("access.limit_exceeded peer=%s error=%s", self.peer, error)

    def is_over_limit(self, message: Message) -> bool:
        """Whether `denial` will return the error of a limit for this request."""
        return id(message) in self._over_limit_errors

    def check_expiry(self, now_ms: int) -> None:
        """End the connection if its credential has expired."""
        if self.expires_ms is not None and now_ms >= self.expires_ms:
            token_hash, reason = self._token_hash, "the certificate of the peer has expired"
            self._end(reason if token_hash is None else self._port.invalid_token_reason(token_hash))

    def apply_revision(self, *, is_first: bool = False) -> None:
        """Apply a new revision of the permissions; end the connection by rules 3, 4 and 7."""
        principal = self.principal
        if self._token_hash is not None:
            try:
                token = self._port.valid_token(self._token_hash)
            except AuthenticationFailed as error:
                self._end(str(error))
                return
            self.principal, self.expires_ms = token.principal, token.expires_ms
        earlier_grants, self._current_grants = self._current_grants, self._read_grants()
        # The client IDs of the mounts belong to the earlier principal (rule 7).
        is_changed = self.principal != principal or not self._current_grants.includes(
            earlier_grants
        )
        if self._port.is_enforced and is_changed:
            self._end(f"the permissions of {self.principal} were changed")
        elif is_first and not self.has_permission:
            self._end(f"{self.principal} has no permission")
        elif self._has_id_without_proof and not self._port.accepts_0_13:
            self._end("client IDs without a proof of their principal are no longer accepted")
        elif self._is_registered:
            self._change_quota()

    def _change_quota(self) -> None:
        quota = self._port.quotas.quota_of(self.principal, self.now_ns)
        if quota is self.quota:
            return
        self.unregister_connection()
        if quota is not None:
            quota.connections[self] = None
            self.quota = quota
            if quota.limits.feeds is not None:
                self.end_over_limit()

    def denial(self, message: Message, version: int | None) -> WaltzError | None:
        """Return the error for a request that is denied or over a limit; None if it is permitted.

        `version` is the version of the connection's protocol.
        """
        over_limit = (
            self._over_limit_errors.pop(id(message), None) if self._over_limit_errors else None
        )
        try:
            requirement = _requirement_of(message)
        except BadRequest as requirement_error:
            return requirement_error
        if isinstance(requirement, Exemption):
            return self._not_a_request_error(message)
        partitions_to_check: Collection[int] = ()
        if requirement.scope is Scope.NAMED:
            partitions_to_check = named_partitions = message.named_partitions()
            if len(named_partitions) > 1:
                partitions_to_check = self._current_grants.partitions_to_check(
                    requirement, named_partitions
                )
        for partition in partitions_to_check or _NO_PARTITION:
            missing = self._current_grants.missing_verb(requirement, partition)
            if missing is not None:
                error = self._denial_error(requirement, missing, partition, message)
                if error is not None:
                    return self._error_for_version(error, message.protocol, version)
                break
        if isinstance(message, MountRequest | MountWriter) and not self._is_own_id(message):
            error = self._report_denial(
                requirement, message, lambda: ClientIdDenied(self._id_text(message))
            )
            if error is not None:
                return self._error_for_version(error, message.protocol, version)
        return None if over_limit is None else over_limit[1]

    def proof_of(self, client_id: int) -> bytes:
        """Return the proof of a client ID that this server issues to the principal."""
        permissions = self._port.permissions
        return (
            NO_PROOF
            if permissions is None
            else proof_of(permissions.client_key, client_id, self.principal)
        )

    @property
    def is_enforced(self) -> bool:
        """Whether denied requests are rejected; otherwise they are only reported (rule 6)."""
        return self._port.is_enforced

    def charge_client_id(self) -> None:
        """Charge the issue of a client ID to the principal; raises Overloaded."""
        if not self.is_enforced:
            return
        try:
            self._port.issued_ids.take(self.principal, self.now_ns)
        except Overloaded as error:
            if self._port.must_log(self.principal, "client ID"):
                _log.warning("access.limit_exceeded peer=%s error=%s", self.peer, error)
            raise

    def bound_principal(self, message: MountRequest | MountWriter) -> str:
        """Return the principal to which a mount binds a client ID of ZooKeeper (rule 7).

        Return "" if a server has issued the ID, or if denials are only reported.
        """
        is_bound = self._port.is_enforced and message.req_id.client_id < FIRST_ISSUED_ID
        self._has_id_without_proof |= is_bound and _proof_in(message) == NO_PROOF
        return self.principal if is_bound else ""

    def _is_own_id(self, message: MountRequest | MountWriter) -> bool:
        """Whether a mount's client ID may belong to the principal (rule 7).

        For an ID without a proof, `server/append/mounts.py` decides.
        """
        permissions, client_id = self._port.permissions, message.req_id.client_id
        if permissions is None:
            return True
        proof = _proof_in(message)
        if permissions.accepts_0_13 and client_id < FIRST_ISSUED_ID and proof == NO_PROOF:
            return True
        return is_valid_proof(proof, permissions.client_key, client_id, self.principal)

    def _id_text(self, message: MountRequest | MountWriter) -> str:
        client_id = message.req_id.client_id
        hint = (
            ""
            if client_id >= FIRST_ISSUED_ID
            else (
                " Hint: after `waltz-core access accept-0-13 on`, servers also accept client IDs "
                "below 2^30, which Waltz 0.13 clients take from ZooKeeper without a proof."
            )
        )
        return (
            f"partition {message.req_id.partition_id}: expected a client ID with a proof "
            f"that it belongs to {self.principal}, found ID {client_id} without a proof.{hint}"
        )

    def on_token_rejected(self, message: Credential, error: str) -> None:
        """Write to the audit log that a token was not accepted, even with `access = "report"`.

        The line names the token if the port knows it, because only a peer with the token's secret
        can send it.
        """
        known_token = self._port.find_token(hash_of(message.token))
        peer, name = Peer(self.principal, self.peer), "unknown token"
        if known_token is not None:
            peer, name = Peer(known_token.principal, self.peer), f"token {known_token.token_id}"
        self._audit_denial(peer, name, message, error, is_enforced=True)

    def audit_request(self, request: Message) -> AuditedRequest | None:
        """Return the audit entry of a request; None if the request is not audited."""
        audit, requirement = self._port.audit, _requirement_of(request)
        if (
            audit is None
            or isinstance(requirement, Exemption)
            or not is_administrative(requirement)
        ):
            return None
        return audit.request(Peer(self.principal, self.peer), requirement, request)

    def may_begin(self, error: WaltzError | None) -> bool:
        """Whether a request may begin, given the error of writing its audit line (rule 6)."""
        return error is None or not self._port.is_enforced

    def _audit_denial(
        self,
        peer: Peer,
        requirement: Requirement | str,
        message: Message,
        error: str,
        *,
        is_enforced: bool,
    ) -> None:
        if self._port.audit is not None:
            self._port.audit.deny(peer, requirement, message, error=error, is_enforced=is_enforced)

    def _denial_error(
        self,
        requirement: Requirement,
        missing: AccessVerb,
        partition: int | None,
        message: Message,
    ) -> WaltzError | None:
        if self._port.grants is None:
            is_enforced = self._port.is_enforced
            return (
                PermissionsNotLoaded("this process has not read the permissions from ZooKeeper yet")
                if is_enforced
                else None
            )
        return self._report_denial(
            requirement,
            message,
            lambda: PermissionDenied(self._denied_text(requirement, missing, partition, message)),
        )

    def _denied_text(
        self, requirement: Requirement, missing: AccessVerb, partition: int | None, message: Message
    ) -> str:
        scope_text = "all partitions" if requirement.scope is Scope.ALL else "any partition"
        hint = "Hint: `waltz-core access grant` grants the verb"
        if partition is not None:
            scope_text = f"partition {partition}"
            if any(self._current_grants.ranges_by_verb.get(verb) for verb in requirement.verbs):
                hint += (
                    "; a client with permissions for only some partitions must name them in its "
                    "requests (docs/access.md)"
                )
        verbs_text = (" and " if requirement.needs_all else " or ").join(
            verb.value for verb in requirement.verbs
        )
        missing_text = missing.value if requirement.needs_all else verbs_text
        return (
            f"{type(message).__name__} requires the verb {verbs_text} for {scope_text}, but "
            f"{self.principal} has no grant of {missing_text} there. {hint}."
        )

    def _report_denial(
        self, requirement: Requirement, message: Message, make: Callable[[], WaltzError]
    ) -> WaltzError | None:
        """Log a denial and return its error; return None if denials are only reported (rule 6)."""
        is_enforced = self._port.is_enforced
        self._port.on_denied()
        must_log = self._port.must_log(self.principal, type(message).__name__)
        if not (is_enforced or must_log or self._port.audit):
            return None
        error = make()
        peer = Peer(self.principal, self.peer)
        self._audit_denial(peer, requirement, message, str(error), is_enforced=is_enforced)
        if must_log and is_enforced:
            _log.warning("access.denied peer=%s error=%s", self.peer, error)
        elif must_log:
            _log.warning("access.violation_reported peer=%s error=%s", self.peer, error)
        return error if is_enforced else None

    def is_only_reported(self, error: PermissionDenied, message: Message) -> bool:
        """Whether rule 6 permits a request although its object belongs to another principal.

        This method logs the denial.
        """
        requirement = _requirement_of(message)
        assert isinstance(requirement, Requirement)
        return self._report_denial(requirement, message, lambda: error) is None

    def _not_a_request_error(self, message: Message) -> WaltzError | None:
        if not self._port.is_enforced:
            return None
        error = RemoteProtocolError(f"expected a request, found {type(message).__name__}")
        self._end(str(error))
        return error

    def _error_for_version(
        self, error: WaltzError, protocol: WireProtocol, version: int | None
    ) -> WaltzError:
        """Return the error, or a BadRequest if the peer's version does not have it (rule 5)."""
        is_adapted = protocol is WireProtocol.CLIENT and (version or 0) <= _ADAPTED_VERSION_MAX
        if not isinstance(error, PermissionDenied) or is_adapted:
            return error
        return (
            error
            if (version or 0) >= _PERMISSION_DENIED_SINCE[protocol]
            else BadRequest(str(error))
        )


def _proof_in(message: MountRequest | MountWriter) -> bytes:
    return bytes(message.proof) if isinstance(message, MountWriter) else NO_PROOF


def _requirement_of(message: Message) -> Requirement | Exemption:
    """Return the requirement of a message; raises BadRequest for an unknown value of its field."""
    requirement = message.requires
    if not isinstance(requirement, RequirementByField):
        return requirement
    value = getattr(message, requirement.field)
    if value not in requirement.requirements:
        expected = ", ".join(map(str, requirement.requirements))
        raise BadRequest(
            f"{type(message).__name__}: expected one of {expected} in field {requirement.field}, "
            f"found {value}"
        )
    return requirement.requirements[value]
