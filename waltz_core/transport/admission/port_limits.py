"""Limits a port's connections, handshakes and memory per peer (decision 063).

Rules:
    1. One host may have at most half of the handshakes in progress. After a burst, its rate of
       handshakes is limited. The 2^64 addresses of an IPv6 network count as one host.
    2. A link is unauthorized if its principal has no permission. At most a quarter of all links may
       be unauthorized, and at most half of this quarter may come from one host. A client with a
       token is also unauthorized until the port has accepted the token. Without these limits, peers
       without permissions could keep such a client from connecting. A port without access control,
       or with "report", has no unauthorized links.
    3. A tenant is a principal without the verb `replicate` and without a limit of connections. A
       tenant may have at most a quarter of all links. Without this limit, a tenant could keep
       servers from connecting.
    4. The bytes of incomplete frames over all links are limited. Above the limit, the port selects
       the principal with the most such bytes. Among the links of this principal, the port closes
       the link with the most such bytes. So a peer with many links cannot cause the port to close
       other peers' links on which large frames arrive. Reading a link more slowly would not free
       its memory.
    5. Handshakes begin one at a time, and hosts take turns. After a handshake has begun, the next
       handshake waits for `HANDSHAKE_PAUSE_S`, so that open connections can use most of the time of
       the event loop.
"""

import ipaddress
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from waltz_core.access.quotas import REJECTED_CONNECTION_RETRY_MS
from waltz_core.errors import Overloaded

if TYPE_CHECKING:
    from asyncio import Future

LINKS_MAX: Final = 10_000
INCOMPLETE_BYTES_MAX: Final = 1024 * 1024 * 1024
UNAUTHORIZED_SHARE: Final = 4
TENANT_SHARE: Final = 4
# About 330 handshakes per second: a thousand clients reconnect within the dial timeout of 5 s.
HANDSHAKE_PAUSE_S: Final = 0.003
_HOSTS_MAX: Final = 10_000


class LimitedLink(Protocol):
    """The part of a link that this module uses."""

    @property
    def host(self) -> str:
        """The host of the peer."""

    @property
    def principal(self) -> str:
        """The principal of the peer."""

    @property
    def is_unauthorized(self) -> bool:
        """Whether the principal of the peer has no permission (rule 2)."""

    @property
    def incomplete_bytes(self) -> int:
        """The number of bytes of an incomplete frame that have arrived."""

    def abort(self, reason: str) -> None:
        """Close the link immediately."""


class HandshakeLimits:
    """Limits the number and rate of handshakes (rule 1).

    A port calls `begin` and `end` for each handshake.
    """

    def __init__(
        self,
        *,
        count_max: int,
        burst: int,
        per_s: int,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._count_max = count_max
        self._burst = burst
        self._per_s = per_s
        self._clock_s = clock_s
        self._in_progress: Counter[str] = Counter()
        self._count = 0
        # For each host: how many handshakes it may begin, and when this number was computed. A host
        # that is not listed may begin a full burst.
        self._tokens: dict[str, tuple[float, float]] = {}

    def begin_handshake(self, address: str) -> str:
        """Count a handshake and return ""; or return the reason why it must be rejected."""
        host = network_of(address)
        if self._count >= self._count_max or self._in_progress[host] >= self._count_max // 2:
            return (
                f"{self._in_progress[host]} handshakes of this host are in progress; the limit "
                f"is {self._count}"
            )
        if not self._take_handshake_token(host):
            return f"this host begins more than {self._per_s} handshakes per second"
        self._count += 1
        self._in_progress[host] += 1
        return ""

    def end_handshake(self, address: str) -> None:
        """Stop counting a handshake, for which `begin` has returned ""."""
        host = network_of(address)
        self._count -= 1
        self._in_progress[host] -= 1
        if not self._in_progress[host]:
            del self._in_progress[host]

    def _take_handshake_token(self, host: str) -> bool:
        now_s = self._clock_s()
        tokens_left = self._tokens_left(host, now_s)
        if tokens_left < 1:
            return False
        if len(self._tokens) >= _HOSTS_MAX and host not in self._tokens:
            self._forget_idle(now_s)
        self._tokens[host] = tokens_left - 1, now_s
        return True

    def _tokens_left(self, host: str, now_s: float) -> float:
        tokens_left, at_s = self._tokens.get(host, (float(self._burst), now_s))
        return min(self._burst, tokens_left + (now_s - at_s) * self._per_s)

    def _forget_idle(self, now_s: float) -> None:
        """Forget the hosts that may begin a full burst; if too many hosts remain, forget all."""
        self._tokens = {
            host: tokens_entry
            for host, tokens_entry in self._tokens.items()
            if self._tokens_left(host, now_s) < self._burst
        }
        if len(self._tokens) >= _HOSTS_MAX:
            self._tokens.clear()


class HandshakeQueue:
    """Starts handshakes one at a time (rule 5).

    A port calls `add` for each handshake; `call_later` is the method of the event loop.
    """

    def __init__(self, call_later: Callable[[float, Callable[[], None]], object]) -> None:
        self._call_later = call_later
        self._is_scheduled = False
        # The waiting handshakes by host; the first host has the next turn.
        self._waiting: dict[str, deque[tuple[Future[None], Callable[[], bool]]]] = {}

    def add(
        self, address: str, turn_future: "Future[None]", has_closed: Callable[[], bool]
    ) -> None:
        """Queue a handshake of a host, and set the result of `turn_future` at its turn.

        A pause follows each turn, unless `has_closed` returns True. Without this exception, a port
        with too many dialing clients would lose its time to connections that are already closed.
        """
        self._waiting.setdefault(network_of(address), deque()).append((turn_future, has_closed))
        if not self._is_scheduled:
            self._schedule(0)

    def _schedule(self, pause_s: float) -> None:
        self._is_scheduled = True
        self._call_later(pause_s, self._begin_one)

    def _begin_one(self) -> None:
        self._is_scheduled = False
        while self._waiting:
            host = next(iter(self._waiting))
            turns = self._waiting.pop(host)
            turn_future, has_closed = turns.popleft()
            if turns:
                self._waiting[host] = turns
            if not turn_future.done():  # it was not cancelled meanwhile
                turn_future.set_result(None)
                # Schedule this even if no handshake waits: the next one must wait until the pause
                # ends.
                self._schedule(0 if has_closed() else HANDSHAKE_PAUSE_S)
                return


class LinkLimits:
    """Limits the links of a port and the bytes of their incomplete frames (rules 2 to 4)."""

    def __init__(
        self, links_max: int = LINKS_MAX, incomplete_bytes_max: int = INCOMPLETE_BYTES_MAX
    ) -> None:
        self._links_max = links_max
        self._incomplete_bytes_max = incomplete_bytes_max
        self._incomplete_bytes = 0
        self._links: dict[LimitedLink, int] = {}  # the incomplete bytes of each link
        # The links that were unauthorized when they were opened, by host.
        self._unauthorized_links: dict[str, dict[LimitedLink, None]] = {}
        self._tenants: dict[LimitedLink, str] = {}
        self._links_per_tenant: Counter[str] = Counter()

    def add_link(self, link: LimitedLink) -> str:
        """Register a new link and return ""; or return the reason why it must be rejected."""
        if len(self._links) >= self._links_max:
            return "the limit of connections is reached"
        if link.is_unauthorized:
            host = network_of(link.host)
            if self._is_full(host):
                self._update_counts()
                if self._is_full(host):
                    return "the limit of connections of principals without permissions is reached"
            self._unauthorized_links.setdefault(host, {})[link] = None
        self._links[link] = 0
        return ""

    def set_tenant(self, link: LimitedLink, tenant: str) -> None:
        """Count a link for its tenant, after removing it from its earlier tenant.

        `tenant` is "" if the principal is not a tenant. Raises Overloaded (rule 3).
        """
        self._leave_tenant(link)
        if not tenant:
            return
        count_max = self._links_max // TENANT_SHARE
        if self._links_per_tenant[tenant] >= count_max:
            raise Overloaded(
                f"{tenant} exceeds the limit of {count_max} connections at this port, which "
                "applies to principals without a limit of their own. Hint: set one with "
                "`waltz-core access limit --connections`.",
                REJECTED_CONNECTION_RETRY_MS,
            )
        self._tenants[link] = tenant
        self._links_per_tenant[tenant] += 1

    def _leave_tenant(self, link: LimitedLink) -> None:
        tenant = self._tenants.pop(link, "")
        if tenant:
            self._links_per_tenant[tenant] -= 1
            if not self._links_per_tenant[tenant]:
                del self._links_per_tenant[tenant]

    def remove_link(self, link: LimitedLink) -> None:
        """Remove a link from all counts."""
        self._leave_tenant(link)
        self._incomplete_bytes -= self._links.pop(link, 0)
        host = network_of(link.host)
        of_host = self._unauthorized_links.get(host, {})
        of_host.pop(link, None)
        if not of_host:
            self._unauthorized_links.pop(host, None)

    def _is_full(self, host: str) -> bool:
        count_max = self._links_max // UNAUTHORIZED_SHARE
        of_host = len(self._unauthorized_links.get(host, ()))
        return (
            of_host >= count_max // 2
            or sum(map(len, self._unauthorized_links.values())) >= count_max
        )

    def _update_counts(self) -> None:
        """Stop counting a link as unauthorized if its principal has a permission by now."""
        for host, links in list(self._unauthorized_links.items()):
            self._unauthorized_links[host] = {link: None for link in links if link.is_unauthorized}
            if not self._unauthorized_links[host]:
                del self._unauthorized_links[host]

    def note_incomplete(self, link: LimitedLink) -> None:
        """Update the byte count of a link's incomplete frame, and enforce the limit (rule 4)."""
        if link not in self._links:
            return
        self._incomplete_bytes += link.incomplete_bytes - self._links[link]
        self._links[link] = link.incomplete_bytes
        if self._incomplete_bytes > self._incomplete_bytes_max:
            largest = self._find_largest()
            self._incomplete_bytes -= self._links[largest]
            self._links[largest] = 0
            largest.abort(
                "the incomplete messages of all connections exceed "
                f"{self._incomplete_bytes_max} bytes, and this connection has the most of "
                "these bytes among the connections of its principal"
            )

    def _find_largest(self) -> LimitedLink:
        of_principals: Counter[str] = Counter()
        for link, size_bytes in self._links.items():
            of_principals[link.principal] += size_bytes
        return max(self._links, key=lambda link: (of_principals[link.principal], self._links[link]))


def network_of(address: str) -> str:
    """Return the network half of an IPv6 address; return any other address unchanged.

    The owner of a network controls all addresses in it.
    """
    if ":" not in address:
        return address
    try:
        number = int(ipaddress.IPv6Address(address.partition("%")[0]))
    except ValueError:
        return address
    return f"{number >> 64:x}"
