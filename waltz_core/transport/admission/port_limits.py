"""Limits a port's connections, handshakes and memory per peer (decision 063).

Rules:
    1. A host has at most half of the handshakes in progress. After a burst, its rate of handshakes
       is limited. The 2^64 addresses of an IPv6 network count as one host.
    2. A link is unauthorized if its principal has no permission. Such links have at most a quarter
       of all links, and those of one host at most half of that. Otherwise clients with tokens could
       not connect, which are unauthorized, too, until the port has accepted their token. A port
       without access control, or with "report", has no unauthorized links.
    3. A principal without `replicate` and without a limit of connections (a tenant) has at most a
       quarter of all links. Otherwise it could keep servers from connecting.
    4. The bytes of incomplete frames over all links are limited. Above the limit, the port selects
       the principal with the most such bytes, and closes its link with the most. So a peer with
       many links cannot cause the links of others with large frames to be closed. Reading a link
       more slowly would not help, because the peer would keep the memory.
    5. One handshake begins at a time, and after it none for `HANDSHAKE_PAUSE_S`, so that open
       connections have most of the event loop. Hosts take turns.
"""

import ipaddress
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from waltz_core.access.quotas import COUNT_RETRY_MS
from waltz_core.errors import Overloaded

if TYPE_CHECKING:
    from asyncio import Future

LINKS_MAX: Final = 10_000
INCOMPLETE_BYTES_MAX: Final = 1024 * 1024 * 1024
UNAUTHORIZED_SHARE: Final = 4
TENANT_SHARE: Final = 4
# About 330 per second: a thousand clients are connected again within the 5 s of a dial.
HANDSHAKE_PAUSE_S: Final = 0.003
_HOSTS_MAX: Final = 10_000


class LimitedLink(Protocol):
    """What is used of a link here."""

    @property
    def host(self) -> str:
        """The host of the peer."""

    @property
    def principal(self) -> str:
        """The principal of the peer."""

    @property
    def is_unauthorized(self) -> bool:
        """Rule 2."""

    @property
    def incomplete_bytes(self) -> int:
        """The bytes of its incomplete frame that have arrived."""

    def abort(self, reason: str) -> None:
        """Close it now."""


class HandshakeLimits:
    """Rule 1; a port calls `begin` and `end` for each handshake."""

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
        # The handshakes that a host may begin, and when that was computed; absent: a burst.
        self._tokens: dict[str, tuple[float, float]] = {}

    def begin(self, address: str) -> str:
        """Count a handshake, and return ""; or return why it must be rejected."""
        host = network_of(address)
        if self._count >= self._count_max or self._in_progress[host] >= self._count_max // 2:
            return (
                f"{self._in_progress[host]} handshakes of this host are in progress; the limit "
                f"is {self._count}"
            )
        if not self._take(host):
            return f"this host begins more than {self._per_s} handshakes per second"
        self._count += 1
        self._in_progress[host] += 1
        return ""

    def end(self, address: str) -> None:
        """Count a handshake no more; `begin` has returned ""."""
        host = network_of(address)
        self._count -= 1
        self._in_progress[host] -= 1
        if not self._in_progress[host]:
            del self._in_progress[host]

    def _take(self, host: str) -> bool:
        now_s = self._clock_s()
        left = self._tokens_left(host, now_s)
        if left < 1:
            return False
        if len(self._tokens) >= _HOSTS_MAX and host not in self._tokens:
            self._forget_idle(now_s)
        self._tokens[host] = left - 1, now_s
        return True

    def _tokens_left(self, host: str, now_s: float) -> float:
        left, at_s = self._tokens.get(host, (float(self._burst), now_s))
        return min(self._burst, left + (now_s - at_s) * self._per_s)

    def _forget_idle(self, now_s: float) -> None:
        """Forget hosts that may begin a burst; if there are none, forget all."""
        self._tokens = {
            host: each
            for host, each in self._tokens.items()
            if self._tokens_left(host, now_s) < self._burst
        }
        if len(self._tokens) >= _HOSTS_MAX:
            self._tokens.clear()


class HandshakeQueue:
    """Rule 5; a port calls `add` for each handshake, `call_later` is the loop's."""

    def __init__(self, call_later: Callable[[float, Callable[[], None]], object]) -> None:
        self._call_later = call_later
        self._is_scheduled = False
        # By host; the first one has the next turn.
        self._waiting: dict[str, deque[tuple[Future[None], Callable[[], bool]]]] = {}

    def add(self, address: str, turn: "Future[None]", has_closed: Callable[[], bool]) -> None:
        """Set the result of `turn` when it is the turn of a handshake of this host.

        No pause follows if the peer `has_closed` then: a port that cannot keep up with a mass of
        dialing clients would otherwise spend its turns on those that have closed.
        """
        self._waiting.setdefault(network_of(address), deque()).append((turn, has_closed))
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
            turn, has_closed = turns.popleft()
            if turns:
                self._waiting[host] = turns
            if not turn.done():  # it was not cancelled meanwhile
                turn.set_result(None)
                # Also if none waits: the next one to come has to wait for the rest of the pause.
                self._schedule(0 if has_closed() else HANDSHAKE_PAUSE_S)
                return


class LinkLimits:
    """Rules 2 to 4."""

    def __init__(
        self, links_max: int = LINKS_MAX, incomplete_bytes_max: int = INCOMPLETE_BYTES_MAX
    ) -> None:
        self._links_max = links_max
        self._incomplete_bytes_max = incomplete_bytes_max
        self._incomplete_bytes = 0
        self._links: dict[LimitedLink, int] = {}  # with its incomplete bytes
        # Those that were unauthorized when they were made, by host.
        self._unauthorized: dict[str, dict[LimitedLink, None]] = {}
        self._tenants: dict[LimitedLink, str] = {}
        self._of_tenants: Counter[str] = Counter()

    def add(self, link: LimitedLink) -> str:
        """Take a new link, and return ""; or return why it must be rejected."""
        if len(self._links) >= self._links_max:
            return "the limit of connections is reached"
        if link.is_unauthorized:
            host = network_of(link.host)
            if self._is_full(host):
                self._recount()
                if self._is_full(host):
                    return "the limit of connections of principals without permissions is reached"
            self._unauthorized.setdefault(host, {})[link] = None
        self._links[link] = 0
        return ""

    def enter(self, link: LimitedLink, tenant: str) -> None:
        """Count a link for its tenant, also again; "": it has none. Raises Overloaded (rule 3)."""
        self._leave(link)
        if not tenant:
            return
        count_max = self._links_max // TENANT_SHARE
        if self._of_tenants[tenant] >= count_max:
            raise Overloaded(
                f"{tenant} exceeds the limit of {count_max} connections at this port, which "
                "applies to principals without a limit of their own. Hint: set one with "
                "`waltz-core access limit --connections`.",
                COUNT_RETRY_MS,
            )
        self._tenants[link] = tenant
        self._of_tenants[tenant] += 1

    def _leave(self, link: LimitedLink) -> None:
        tenant = self._tenants.pop(link, "")
        if tenant:
            self._of_tenants[tenant] -= 1
            if not self._of_tenants[tenant]:
                del self._of_tenants[tenant]

    def remove(self, link: LimitedLink) -> None:
        """Forget a link."""
        self._leave(link)
        self._incomplete_bytes -= self._links.pop(link, 0)
        host = network_of(link.host)
        of_host = self._unauthorized.get(host, {})
        of_host.pop(link, None)
        if not of_host:
            self._unauthorized.pop(host, None)

    def _is_full(self, host: str) -> bool:
        count_max = self._links_max // UNAUTHORIZED_SHARE
        of_host = len(self._unauthorized.get(host, ()))
        return of_host >= count_max // 2 or sum(map(len, self._unauthorized.values())) >= count_max

    def _recount(self) -> None:
        """Forget those that have got a permission."""
        for host, links in list(self._unauthorized.items()):
            self._unauthorized[host] = {each: None for each in links if each.is_unauthorized}
            if not self._unauthorized[host]:
                del self._unauthorized[host]

    def note_incomplete(self, link: LimitedLink) -> None:
        """Note how many bytes of an incomplete frame a link has (rule 4)."""
        if link not in self._links:
            return
        self._incomplete_bytes += link.incomplete_bytes - self._links[link]
        self._links[link] = link.incomplete_bytes
        if self._incomplete_bytes > self._incomplete_bytes_max:
            largest = self._largest()
            self._incomplete_bytes -= self._links[largest]
            self._links[largest] = 0
            largest.abort(
                "the incomplete messages of all connections exceed "
                f"{self._incomplete_bytes_max} bytes, and this connection has the largest "
                "part among those of its principal"
            )

    def _largest(self) -> LimitedLink:
        of_principals: Counter[str] = Counter()
        for link, size_bytes in self._links.items():
            of_principals[link.principal] += size_bytes
        return max(self._links, key=lambda link: (of_principals[link.principal], self._links[link]))


def network_of(address: str) -> str:
    """Return the first half of an IPv6 address, whose owner has the rest; others unchanged."""
    if ":" not in address:
        return address
    try:
        number = int(ipaddress.IPv6Address(address.partition("%")[0]))
    except ValueError:
        return address
    return f"{number >> 64:x}"
