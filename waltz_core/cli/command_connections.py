"""The TLS settings of a command's own connections to servers and storages.

A process runs one command, for one cluster, and many of its parts open connections.

Rules:
    1. The settings come from `--tls`, if the command has it, else from ?tls= of the command's
       connect string, else of $WALTZ_CONNECT. So does the place of a token, which `--tls` has none
       of.
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
    """Set the options of the command that begins (rule 1)."""
    if tls is not None:
        _PLACE.set((tls, None))
    else:
        use_scheme_of(connect or os.environ.get("WALTZ_CONNECT") or "")


def use_scheme_of(connect: str) -> None:
    """Set the cluster's connect string, once it is known."""
    _PLACE.set((tls_settings.place_in(connect), token_source_in(connect)))


def ssl() -> SSLContext | None:
    """Return the TLS context, None without TLS; raises BadConfig for invalid files."""
    place = _PLACE.get()
    return None if place == _NONE else _context(*place)


async def dial(protocol: WireProtocol, address: str, *, timeout_s: float = 5.0) -> net.Link:
    """Connect like `net.dial`, with the same errors."""
    return await net.dial(protocol, address, timeout_s=timeout_s, ssl=ssl())


@functools.cache
def _context(place: str, token: TokenSource | None) -> SSLContext | None:
    return tls_settings.named_dial_context(place, token)
