"""Quotas: the rates and counts that limit each principal at one daemon (decision 048, AC 10).

`transport/admission/throttle.py` charges the requests of principals that have limits. Principals
without limits have no `Quota`. Callers pass the time, in nanoseconds of a monotonic clock.

Rules:
    1. All connections of a principal share its quota. A principal with `replicate` has no quota.
    2. A quota is a token bucket. A request may begin when all earlier requests are paid for, and is
       charged as a whole when it begins. So a request can begin even if it costs more than the
       limit permits in one second. Later requests wait until this request is paid for.
    3. After an idle time, a bucket permits a burst: the amount that the limit permits in
       `BURST_NS`.
    4. A request that would wait longer than `WAIT_NS_MAX` is rejected, and is not charged.
       Rejections are charged to a separate bucket. So a few rejected requests of a client are
       answered fast, but a flood of rejected requests is slowed down.
    5. If a principal does not have a limit of its own, the limit of "*" applies. If a new revision
       of the permissions changes a limit, the bucket of this limit is replaced; other buckets keep
       their amounts.
    6. Metrics have a label for each of the first `METRIC_LABELS_MAX` principals with a grant, in
       the order of the permissions. All others share a label.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from waltz_core.access.grants import Grants
from waltz_core.access.permissions import DEFAULT_LIMITS_KEY, Permissions, PrincipalLimits
from waltz_core.access.requirements import AccessVerb
from waltz_core.errors import Overloaded

SECOND_NS: Final = 1_000_000_000
BURST_NS: Final = SECOND_NS
WAIT_NS_MAX: Final = SECOND_NS
REQUEST_BYTES_MIN: Final = 512
METRIC_LABELS_MAX: Final = 100
# The rate limit for client IDs of one principal at one server. A Spark job requests one ID for each
# task, and sends all these requests at the same time.
IDS_PER_S: Final = 100
IDS_PER_BURST: Final = 20_000
_IDS_BURST_NS: Final = IDS_PER_BURST * SECOND_NS // IDS_PER_S
OTHER_LABEL: Final = "other"
# At this number, quotas without connections and with full buckets are dropped.
QUOTAS_MAX: Final = 1_000
REJECTIONS_PER_S: Final = 2_000
# The daemon has received the bytes of each rejected request. So a large rejected request counts as
# several rejections: one, and one more for each multiple of this size.
BYTES_PER_REJECTION: Final = 32 * 1024
# The retry delay that a rejected connection or feed receives.
REJECTED_CONNECTION_RETRY_MS: Final = 1_000
# The maximum delay in answers. With a large request and a small limit, the delay could otherwise
# exceed the 32 bits of its field.
RETRY_MS_MAX: Final = 24 * 3_600 * 1_000
_LIMIT_HINT: Final = "Hint: `waltz-core access limit` changes the limit."

# The partition and the client ID of a feed.
CountedFeedKey: TypeAlias = tuple[int, int]


class TokenBucket:
    """A token bucket, stored as the time at which all charges are paid for."""

    __slots__ = ("_burst_ns", "_paid_at_ns", "per_s")

    def __init__(self, per_s: int, burst_ns: int = BURST_NS) -> None:
        assert per_s > 0
        self.per_s = per_s
        self._burst_ns = burst_ns
        self._paid_at_ns = -burst_ns

    def wait_ns(self, now_ns: int) -> int:
        """Return the nanoseconds until a request may begin (rule 2)."""
        return max(0, self._paid_at_ns - now_ns)

    def is_full(self, now_ns: int) -> bool:
        """Whether the bucket holds the full burst amount."""
        return self._paid_at_ns <= now_ns - self._burst_ns

    def take(self, amount: int, now_ns: int) -> None:
        """Charge an amount, even if it exceeds the amount in the bucket."""
        assert amount >= 0
        start_ns = max(self._paid_at_ns, now_ns - self._burst_ns)
        self._paid_at_ns = start_ns + -(-amount * SECOND_NS // self.per_s)


@dataclass(slots=True)
class Usage:
    """The counts under one metric label since the last call of `take`."""

    bytes: int = 0
    appends: int = 0
    delayed: int = 0
    rejected: int = 0

    def take(self) -> "Usage":
        """Return a copy of the counts, and reset them to 0."""
        usage = replace(self)
        self.bytes = self.appends = self.delayed = self.rejected = 0
        return usage


class IssuedIdLimit:
    """Limits the rate of client IDs that each principal receives from one server.

    All principals share 2**30 IDs. Therefore this limit also applies to principals without other
    limits. At `IDS_PER_S`, one principal would need months to use up all IDs.
    """

    def __init__(self) -> None:
        self._buckets: dict[str, TokenBucket] = {}

    def take(self, principal: str, now_ns: int) -> None:
        """Charge one ID to a principal.

        Raises Overloaded, with the retry delay, if it is over the rate.
        """
        bucket = self._buckets.get(principal)
        if bucket is None:
            if len(self._buckets) >= QUOTAS_MAX:
                for name in [
                    name
                    for name, token_bucket in self._buckets.items()
                    if token_bucket.is_full(now_ns)
                ]:
                    del self._buckets[name]
            bucket = self._buckets[principal] = TokenBucket(IDS_PER_S, _IDS_BURST_NS)
        wait_ns = bucket.wait_ns(now_ns)
        if wait_ns:
            raise Overloaded(
                f"{principal} requests client IDs faster than this server permits: "
                f"{IDS_PER_BURST} IDs in a burst, and {IDS_PER_S} per second on average. Hint: "
                "open fewer clients, or write with fewer Spark tasks.",
                -(-wait_ns // 1_000_000),
            )
        bucket.take(1, now_ns)


class Quota:
    """The quota of one principal; it follows the rules of this module."""

    def __init__(self, principal: str, limits: PrincipalLimits, usage: Usage) -> None:
        self.principal = principal
        self.limits = PrincipalLimits()
        self.usage = usage
        self.connections: dict[Hashable, None] = {}  # in the order of arrival
        self.feeds: dict[CountedFeedKey, Hashable] = {}  # the connection of each feed
        self._byte_bucket: TokenBucket | None = None
        self._append_bucket: TokenBucket | None = None
        self._rejection_bucket = TokenBucket(REJECTIONS_PER_S)
        self.set_limits(limits)

    def set_limits(self, limits: PrincipalLimits) -> None:
        """Apply the limits of a permissions revision (rule 5)."""
        if limits.bytes_per_s != self.limits.bytes_per_s:
            self._byte_bucket = _bucket_for_rate(limits.bytes_per_s)
        if limits.appends_per_s != self.limits.appends_per_s:
            self._append_bucket = _bucket_for_rate(limits.appends_per_s)
        self.limits = limits

    def is_idle(self, now_ns: int) -> bool:
        """Whether the quota may be dropped, because a new one would be equal."""
        buckets = (self._byte_bucket, self._append_bucket)
        return not self.connections and all(
            not bucket or bucket.is_full(now_ns) for bucket in buckets
        )

    # ---- requests

    def begin_request(
        self,
        now_ns: int,
        *,
        size_bytes: int,
        is_append: bool,
        waited_ns: int,
        has_rejected_append: bool = False,
    ) -> int | Overloaded:
        """Charge a request and return its delay in nanoseconds, or return the rejection (rule 4).

        `waited_ns` is the time that the request has already waited. If `has_rejected_append` is
        true, an earlier append of the same partition was rejected. In this case, this append must
        also be rejected.
        """
        size_bytes = max(size_bytes, REQUEST_BYTES_MIN)
        byte_wait_ns = 0 if self._byte_bucket is None else self._byte_bucket.wait_ns(now_ns)
        append_wait_ns = 0
        if is_append and self._append_bucket is not None:
            append_wait_ns = self._append_bucket.wait_ns(now_ns)
        wait_ns = max(byte_wait_ns, append_wait_ns)
        if has_rejected_append or (wait_ns and waited_ns + wait_ns > WAIT_NS_MAX):
            is_by_bytes = self._append_bucket is None or (
                self._byte_bucket is not None and byte_wait_ns >= append_wait_ns
            )
            return self._over_limit_error(
                f"{self.limits.bytes_per_s} bytes per second"
                if is_by_bytes
                else f"{self.limits.appends_per_s} appends per second",
                max(1, -(-wait_ns // 1_000_000)),
            )
        if self._byte_bucket is not None:
            self._byte_bucket.take(size_bytes, now_ns)
        if is_append and self._append_bucket is not None:
            self._append_bucket.take(1, now_ns)
        self.usage.bytes += size_bytes
        self.usage.appends += is_append
        self.usage.delayed += wait_ns > 0
        return wait_ns

    def charge_rejection(self, size_bytes: int, now_ns: int) -> None:
        """Charge a rejected request of any kind to the bucket of rejections (rule 4)."""
        self._rejection_bucket.take(1 + size_bytes // BYTES_PER_REJECTION, now_ns)

    def rejection_wait_ns(self, now_ns: int) -> int:
        """Return the nanoseconds until a connection with a rejection may be read again (rule 4)."""
        return self._rejection_bucket.wait_ns(now_ns)

    def charge_sent_bytes(self, size_bytes: int, now_ns: int) -> int:
        """Charge the bytes of an answer or a feed.

        Return the nanoseconds until they are paid for.
        """
        self.usage.bytes += size_bytes
        if self._byte_bucket is None:
            return 0
        self._byte_bucket.take(size_bytes, now_ns)
        return self._byte_bucket.wait_ns(now_ns)

    def _over_limit_error(self, limit: str, retry_after_ms: int) -> Overloaded:
        self.usage.rejected += 1
        return Overloaded(
            f"{self.principal} exceeds its limit of {limit} at this daemon. {_LIMIT_HINT}",
            min(retry_after_ms, RETRY_MS_MAX),
        )

    # ---- connections and feeds

    def add_connection(self, connection: Hashable) -> None:
        """Count a connection; raises Overloaded if the principal has reached its limit."""
        limit = self.limits.connections
        if limit is not None and len(self.connections) >= limit:
            raise self._over_limit_error(
                f"{limit} connection{'s' * (limit != 1)}", REJECTED_CONNECTION_RETRY_MS
            )
        self.connections[connection] = None

    def remove_connection(self, connection: Hashable) -> None:
        """Remove a connection and its feeds."""
        self.connections.pop(connection, None)
        for key in [key for key, owner in self.feeds.items() if owner == connection]:
            del self.feeds[key]

    def begin_feed(self, key: CountedFeedKey, connection: Hashable) -> Overloaded | None:
        """Count a feed, or move it to another connection.

        Return Overloaded if it exceeds the limit.
        """
        limit = self.limits.feeds
        if limit is not None and len(self.feeds) >= limit and key not in self.feeds:
            return self._over_limit_error(
                f"{limit} feed{'s' * (limit != 1)}", REJECTED_CONNECTION_RETRY_MS
            )
        self.feeds[key] = connection
        return None

    def end_feed(self, key: CountedFeedKey, connection: Hashable) -> None:
        """Stop counting a feed, unless it has moved to another connection."""
        if self.feeds.get(key) == connection:
            del self.feeds[key]

    def connections_over_limit(self) -> Iterable[Hashable]:
        """Return the connections to close, so that all limits hold.

        These are the newest connections, and the connections of the newest feeds.
        """
        connections: dict[Hashable, None] = {}
        if self.limits.connections is not None:
            connections.update(dict.fromkeys(list(self.connections)[self.limits.connections :]))
        if self.limits.feeds is not None:
            connections.update(dict.fromkeys(list(self.feeds.values())[self.limits.feeds :]))
        return connections


class Quotas:
    """The quotas of all principals at one daemon."""

    def __init__(self) -> None:
        self._quotas: dict[str, Quota] = {}
        self._limits: dict[str, PrincipalLimits] = {}
        self._grants: Grants | None = None
        self._labels: dict[str, None] = {}
        self.usage: dict[str, Usage] = {}  # by label

    def apply_permissions(self, permissions: Permissions, grants: Grants) -> None:
        """Apply a revision of the permissions to limits and metric labels (rules 5 and 6)."""
        self._limits, self._grants = dict(permissions.limits), grants
        self._labels = _metric_labels(permissions)
        labels = (*self._labels, OTHER_LABEL)
        self.usage = {label: self.usage[label] for label in labels if label in self.usage}
        for principal, quota in list(self._quotas.items()):
            limits = self._limits_of(principal)
            if limits is None:
                del self._quotas[principal]
            else:
                quota.set_limits(limits)
                quota.usage = self._usage_of(principal)

    def quota_of(self, principal: str, now_ns: int) -> Quota | None:
        """Return the quota of a principal; None if it has no limits (rule 1)."""
        quota = self._quotas.get(principal)
        if quota is not None:
            return quota
        limits = self._limits_of(principal)
        if limits is None:
            return None
        if len(self._quotas) >= QUOTAS_MAX:
            for name in [
                name for name, other_quota in self._quotas.items() if other_quota.is_idle(now_ns)
            ]:
                del self._quotas[name]
        quota = self._quotas[principal] = Quota(principal, limits, self._usage_of(principal))
        return quota

    def connections_over_limit(self) -> list[Hashable]:
        """Return the connections that exceed the limits of their principals."""
        return [
            connection
            for quota in self._quotas.values()
            for connection in quota.connections_over_limit()
        ]

    def connection_and_feed_counts(self) -> dict[str, tuple[int, int]]:
        """Return the numbers of connections and feeds for each metric label."""
        counts = dict.fromkeys(self.usage, (0, 0))
        for quota in self._quotas.values():
            label = self.label_of(quota.principal)
            connections, feeds = counts[label]
            counts[label] = connections + len(quota.connections), feeds + len(quota.feeds)
        return counts

    def label_of(self, principal: str) -> str:
        """Return the metric label of a principal (rule 6)."""
        return principal if principal in self._labels else OTHER_LABEL

    def _usage_of(self, principal: str) -> Usage:
        return self.usage.setdefault(self.label_of(principal), Usage())

    def _limits_of(self, principal: str) -> PrincipalLimits | None:
        if self._grants is None:
            return None
        if AccessVerb.REPLICATE in self._grants.for_principal(principal).ranges_by_verb:
            return None
        own_limits = self._limits.get(principal, PrincipalLimits())
        default = self._limits.get(DEFAULT_LIMITS_KEY, PrincipalLimits())
        limits = PrincipalLimits(
            own_limits.bytes_per_s or default.bytes_per_s,
            own_limits.appends_per_s or default.appends_per_s,
            own_limits.connections or default.connections,
            own_limits.feeds or default.feeds,
        )
        return None if limits == PrincipalLimits() else limits


def _bucket_for_rate(per_s: int | None) -> TokenBucket | None:
    return None if per_s is None else TokenBucket(per_s)


def _metric_labels(permissions: Permissions) -> dict[str, None]:
    labels: dict[str, None] = {}
    for grant in permissions.grants:
        grantees = permissions.groups[grant.grantee] if grant.is_group else (grant.grantee,)
        for principal in grantees:
            if len(labels) == METRIC_LABELS_MAX:
                return labels
            labels[principal] = None
    return labels
