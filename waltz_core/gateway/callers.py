"""Keeps a client for each caller, so that the servers check the permissions of the caller.

Rules (decision 066):
    1. The gateway has no permissions of its own. For a request with a token, it uses connections
       with this token. For a request without a token, it uses connections without a token, so the
       principal is `anonymous`. But if the gateway has a certificate, such a connection would have
       the principal of this certificate. Therefore a gateway with a certificate rejects requests
       without a token.
    2. The gateway keeps tokens in memory only, and finds a caller by the hash of its token.
    3. Before the first request with a token, the gateway presents the token to a server, so that an
       invalid token is rejected at once. If a server rejects the token later, or if an error ends a
       stream of the caller's client, the gateway forgets the caller. The next request of this
       caller opens a new client.
    4. The gateway closes the client of a caller after `IDLE_S_MAX` without a request. It keeps at
       most `CALLERS_MAX` callers. At this limit, it closes the client of the caller that was idle
       for the longest time.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

from waltz_core import errors
from waltz_core.access.tokens import Token, hash_of
from waltz_core.client.api.async_client import AsyncWaltzClient
from waltz_core.client.links.write_requests import WriteRequests
from waltz_core.config.declarations import ClientConfig
from waltz_core.gateway.shared_directory import SharedDirectory
from waltz_core.transport import tls
from waltz_core.transport.token_source import ForwardedToken

_log = logging.getLogger(__name__)

CALLERS_MAX: Final = 256
IDLE_S_MAX: Final = 300.0
IDLE_CHECK_INTERVAL_S: Final = 10.0
_NO_TOKEN_HASH: Final = ""


@dataclass(slots=True, eq=False)
class Caller:
    """A caller with its client, and the number of its requests in progress."""

    token_hash: str  # empty for a caller without a token
    token: ForwardedToken | None
    client: AsyncWaltzClient
    writes: WriteRequests
    request_count: int = 0
    idle_since_s: float = 0.0
    is_unusable: bool = False  # the next request must open a new client (rule 3)

    async def close(self) -> None:
        """Close the client of the caller."""
        await self.writes.close()
        await self.client.close()


class Callers:
    """Opens, finds and closes the clients of the gateway's callers (rules 1 to 4)."""

    def __init__(self, connect: str, config: ClientConfig, directory: SharedDirectory) -> None:
        self._connect = connect
        self._config = config
        self._directory = directory
        self._has_certificate = tls.has_certificate(config, connect)
        self._callers: dict[str, Caller] = {}
        self._opening_locks: dict[str, asyncio.Lock] = {}
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._callers)

    @contextlib.asynccontextmanager
    async def caller_of_request(self, authorization: str | None) -> AsyncIterator[Caller]:
        """Yield the caller of a request with this `Authorization` header.

        Raises:
            AuthenticationFailed: the token is not valid, or a necessary token is missing.
            Overloaded: there are too many callers with requests in progress.
        """
        token = self._parse_token(authorization)
        caller = await self._find_or_open(token)
        caller.request_count += 1
        try:
            yield caller
        except errors.AuthenticationFailed:
            caller.is_unusable = True
            raise
        except errors.OutcomeUnknown:
            raise  # the caller must repeat the request, whatever the reason
        except errors.Unavailable:
            await self.check_token(caller)
            raise
        finally:
            caller.request_count -= 1
            caller.idle_since_s = self._loop.time()
            if caller.is_unusable and self._callers.get(caller.token_hash) is caller:
                del self._callers[caller.token_hash]
            if not caller.request_count and self._callers.get(caller.token_hash) is not caller:
                await caller.close()

    async def check_token(self, caller: Caller) -> None:
        """Check the token of a caller whose request failed as unavailable (rule 3).

        Raises:
            AuthenticationFailed: a server rejects the token. A client does not report this
                rejection, but waits until its token is valid again.
        """
        if caller.token is None:
            return
        try:
            await _authenticate(caller.client)
        except errors.AuthenticationFailed:
            caller.is_unusable = True
            raise

    @contextlib.asynccontextmanager
    async def dedicated_client(
        self, caller: Caller, config: ClientConfig | None = None
    ) -> AsyncIterator[AsyncWaltzClient]:
        """Yield a separate client with the caller's token, not open yet; close it at the end."""
        client = self.new_client(caller.token, config)
        try:
            yield client
        finally:
            await client.close()

    def new_client(
        self, token: ForwardedToken | None, config: ClientConfig | None = None
    ) -> AsyncWaltzClient:
        """Return a new client that presents this token; it is not open yet."""
        return AsyncWaltzClient(
            self._directory.view(),
            self._connect,
            config or self._config,
            client_id=None,
            token=token,
        )

    async def close_idle_callers(self) -> None:
        """Close idle callers until cancelled (rule 4)."""
        while True:
            await asyncio.sleep(IDLE_CHECK_INTERVAL_S)
            until_s = self._loop.time() - IDLE_S_MAX
            for caller in list(self._callers.values()):
                if not caller.request_count and caller.idle_since_s < until_s:
                    del self._callers[caller.token_hash]
                    await caller.close()

    async def close(self) -> None:
        """Close the clients of all callers."""
        callers, self._callers = list(self._callers.values()), {}
        async with asyncio.TaskGroup() as group:
            for caller in callers:
                group.create_task(caller.close())

    def _parse_token(self, authorization: str | None) -> Token | None:
        if authorization is None:
            if self._has_certificate:  # rule 1
                raise errors.AuthenticationFailed(
                    "the request has no token. Hint: send the header `Authorization: Bearer "
                    "TOKEN`, with the content of a token file."
                )
            return None
        kind, _, text = authorization.partition(" ")
        try:
            if kind.lower() == "bearer":
                return Token.parse(text, "header Authorization")
        except errors.BadConfig as error:
            raise errors.AuthenticationFailed(str(error)) from None
        raise errors.AuthenticationFailed(
            f"header Authorization: expected Bearer TOKEN, found the scheme {kind[:20]!r}"
        )

    async def _find_or_open(self, token: Token | None) -> Caller:
        key = _NO_TOKEN_HASH if token is None else hash_of(token.secret)  # rule 2
        if (existing := self._callers.get(key)) is not None:
            return existing
        lock = self._opening_locks.setdefault(key, asyncio.Lock())
        try:
            async with lock:
                if (existing := self._callers.get(key)) is not None:
                    return existing
                new_caller = await self._open(key, None if token is None else ForwardedToken(token))
                try:  # only now: a wrong token must not close the client of another caller
                    await self._evict_idle_caller()
                except BaseException:
                    await new_caller.close()
                    raise
                self._callers[key] = new_caller
                return new_caller
        finally:
            self._opening_locks.pop(key, None)

    async def _open(self, key: str, token: ForwardedToken | None) -> Caller:
        try:
            client = self.new_client(token)
        except errors.BadConfig as error:  # not an error of the caller
            raise errors.Unavailable(
                f"the gateway cannot forward tokens with its setting `connect`: {error}"
            ) from error
        await client.open()
        try:
            if token is not None:
                await _authenticate(client)
        except BaseException:
            await client.close()
            raise
        caller = Caller(key, token, client, WriteRequests(self._connect, client))
        caller.idle_since_s = self._loop.time()
        return caller

    async def _evict_idle_caller(self) -> None:
        if len(self._callers) < CALLERS_MAX:
            return
        idle = [caller for caller in self._callers.values() if not caller.request_count]
        if not idle:
            raise errors.Overloaded(
                f"the gateway already processes requests of {CALLERS_MAX} callers, which is the "
                "limit. Hint: send the request again later, or use another gateway."
            )
        oldest = min(idle, key=lambda caller: caller.idle_since_s)
        del self._callers[oldest.token_hash]
        await oldest.close()


async def _authenticate(client: AsyncWaltzClient) -> None:
    """Present the token to the first server that answers (rule 3)."""
    for address in sorted({owner.address for owner in client.directory.owners.values()}):
        try:
            await client.links.get(address)
        except errors.AuthenticationFailed:
            raise
        except (errors.Unavailable, errors.ProtocolError) as error:
            _log.info("gateway.server_unreachable server=%s error=%s", address, error)
        else:
            return
