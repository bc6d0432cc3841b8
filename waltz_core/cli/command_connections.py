"""The TLS settings for a command's own connections to servers and storages.

A process runs one command for one cluster, and many parts of the command open connections.

Rules:
    1. If the command has `--tls`, the settings come from it; otherwise from ?tls= in the command's
       connect string; otherwise from $WALTZ_CONNECT. The location of a token comes from the same
       connect string; `--tls` specifies none.
    2. Clients (`WaltzClient`) use their own connect string.
"""

import functools
import os
from contextvars import ContextVar
from ssl import SSLContext
from typing import Final

from waltz_core.transport import net
from waltz_core.transport import tls as tls_settings
from waltz_core.transport.token_source import TokenSource, token_source_in
from waltz_core.wire.messages import WireProtocol

_NONE: Final = "", None
_PLACE: Final[ContextVar[tuple[str, TokenSource | None]]] = ContextVar("tls", default=_NONE)


def begin(*, tls: str | None = None, connect: str | None = None) -> None:
    """Select the settings for the command that begins (rule 1)."""
    if tls is not None:
        _PLACE.set((tls, None))
    else:
        use_scheme_of(connect or os.environ.get("WALTZ_CONNECT") or "")


def use_scheme_of(connect: str) -> None:
    """Select the settings of a connect string, when the command knows it."""
    _PLACE.set((tls_settings.tls_value_in(connect), token_source_in(connect)))


def ssl() -> SSLContext | None:
    """Return the TLS context; None without TLS. Raises BadConfig if the files are not valid."""
    place = _PLACE.get()
    return None if place == _NONE else _context(*place)


async def dial(protocol: WireProtocol, address: str, *, timeout_s: float = 5.0) -> net.Link:
    """Connect to an address with the settings of the command; raises the errors of `net.dial`."""
    return await net.dial(protocol, address, timeout_s=timeout_s, ssl=ssl())


@functools.cache
def _context(place: str, token: TokenSource | None) -> SSLContext | None:
    return tls_settings.dial_context_for(place, token)
