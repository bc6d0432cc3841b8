"""The TLS settings of a command, and its connections to servers and storages.

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

_NO_TLS: Final = "", None
_SETTINGS: Final[ContextVar[tuple[str, TokenSource | None]]] = ContextVar("tls", default=_NO_TLS)


def select_settings(*, tls: str | None = None, connect: str | None = None) -> None:
    """Select the TLS settings at the start of a command (rule 1)."""
    if tls is not None:
        _SETTINGS.set((tls, None))
    else:
        use_settings_of(connect or os.environ.get("WALTZ_CONNECT") or "")


def use_settings_of(connect: str) -> None:
    """Select the TLS settings and the token that a connect string names."""
    _SETTINGS.set((tls_settings.tls_value_in(connect), token_source_in(connect)))


def ssl_context() -> SSLContext | None:
    """Return the command's TLS context, or None without TLS; raises BadConfig for invalid files."""
    place = _SETTINGS.get()
    return None if place == _NO_TLS else _cached_ssl_context(*place)


async def dial(protocol: WireProtocol, address: str, *, timeout_s: float = 5.0) -> net.Link:
    """Connect to an address with the command's TLS settings; raises the errors of `net.dial`."""
    return await net.dial(protocol, address, timeout_s=timeout_s, ssl=ssl_context())


@functools.cache
def _cached_ssl_context(place: str, token: TokenSource | None) -> SSLContext | None:
    return tls_settings.dial_context_for(place, token)
