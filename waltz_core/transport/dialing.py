"""Parts of opening a connection: the client's token, the TCP connection, and log lines."""

import asyncio
import logging
from collections.abc import Callable
from ssl import SSLContext, SSLError
from typing import TYPE_CHECKING, Final

from waltz_core.access.tokens import Token
from waltz_core.errors import (
    AuthenticationFailed,
    BadConfig,
    Overloaded,
    RemoteProtocolError,
    TlsFailed,
)
from waltz_core.transport import dns_lookup, tls
from waltz_core.wire import authentication

if TYPE_CHECKING:
    from waltz_core.transport.net import Link

_log = logging.getLogger(__name__)

TLS_HINT: Final = (
    "Hint: the peer expects TLS; add ?tls=FILE to the connect string, where FILE names the "
    "trusted authorities."
)


async def read_token(address: str, ssl: SSLContext | None) -> Token | None:
    """Read the token for a new connection; return None if there is none.

    Raises AuthenticationFailed if it cannot be read.
    """
    token_source = ssl.token if isinstance(ssl, tls.DialContext) else None
    if token_source is None:
        return None
    try:
        return await asyncio.to_thread(token_source.read)
    except BadConfig as error:  # it was readable when the context was created
        raise AuthenticationFailed(f"{address}: {error}") from None


async def connect(
    make_protocol: Callable[[], asyncio.BaseProtocol], host: str, port: int, ssl: SSLContext | None
) -> None:
    """Connect to the first address of a host that accepts TCP; TLS verifies the host's name.

    Raises OSError, with the errors of all addresses if there are several.
    """
    loop, errors = asyncio.get_running_loop(), dict[str, OSError]()
    for address in await dns_lookup.addresses_of(host):
        try:
            await loop.create_connection(
                make_protocol, address, port, ssl=ssl, server_hostname=host if ssl else None
            )
        except SSLError:
            raise
        except OSError as error:
            errors[address] = error
        else:
            return
    if len(errors) == 1:
        raise next(iter(errors.values()))
    failures = (f"{address}: {tls.failure_text(error)}" for address, error in errors.items())
    raise OSError("; ".join(failures))


async def send_token(link: "Link", token: Token) -> None:
    """Send the token as the first message, and wait for the peer's answer.

    Does nothing if the agreed version has no access control. Raises AuthenticationFailed,
    Overloaded or RemoteProtocolError.
    """
    version = link.version
    assert version is not None
    credential = authentication.credential_message(link.protocol, version, token.secret)
    if credential is None:
        return
    link.send(credential)
    answer, *more = await link.receive()
    error = authentication.error_in_answer(answer)
    if isinstance(error, Overloaded):
        raise Overloaded(f"{link.address}: {error}", error.retry_after_ms)
    if error is not None:
        raise AuthenticationFailed(f"{link.address}: {error}")
    if more:
        raise RemoteProtocolError(f"{link.address}: expected one answer to the token, found more")


def log_rejection(address: str, error: BaseException) -> None:
    """Log why a peer rejects the connection, at most once a minute for each reason.

    The log line is necessary: the caller retries, and a timeout further up may hide the reason.
    """
    reason = str(error).removeprefix(f"{address}: ")
    if isinstance(error, TlsFailed):
        tls.log_failure(address, reason)
        return
    is_rejection = isinstance(error, AuthenticationFailed | Overloaded)
    if is_rejection and tls.is_new_failure(address, tls.error_kind(reason)):
        _log.warning("access.rejected_by_peer peer=%s error=%s", address, reason)
