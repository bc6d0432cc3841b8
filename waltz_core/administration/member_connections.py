"""The TLS settings and the token of a command, and its connections to servers and storages.

A command or a request of the console works on one cluster, and opens connections in many places. So
the current context (`contextvars`) contains the settings, and all tasks of the command inherit this
context.

Rules:
    1. With the option `--tls`, the TLS settings come from this option, and there is no token.
       Without `--tls`, the connect string specifies both the TLS settings and the location of the
       token. This is the connect string of the command or, if the command has none, $WALTZ_CONNECT.
    2. For a request of the console, the gateway selects a TLS context with the token of the caller.
    3. Clients (`WaltzClient`) use their own connect string.
"""

import functools
import os
from contextvars import ContextVar
from ssl import SSLContext
from typing import Final, NamedTuple

from waltz_core.transport import net
from waltz_core.transport import tls as tls_settings
from waltz_core.transport.token_source import TokenSource, token_source_in
from waltz_core.wire.messages import WireProtocol


class _NamedSettings(NamedTuple):
    """A value of ?tls= and the source of a token; the first use creates the TLS context."""

    tls: str = ""
    token: TokenSource | None = None


_NO_TLS: Final = _NamedSettings()
_SETTINGS: Final[ContextVar[_NamedSettings | SSLContext | None]] = ContextVar(
    "tls", default=_NO_TLS
)


def select_settings(*, tls: str | None = None, connect: str | None = None) -> None:
    """Select the TLS settings at the start of a command (rule 1)."""
    if tls is not None:
        _SETTINGS.set(_NamedSettings(tls))
    else:
        use_settings_of(connect or os.environ.get("WALTZ_CONNECT") or "")


def use_settings_of(connect: str) -> None:
    """Select the TLS settings and the token that a connect string names."""
    _SETTINGS.set(_NamedSettings(tls_settings.tls_value_in(connect), token_source_in(connect)))


def use_ssl_context(context: SSLContext | None) -> None:
    """Select a TLS context, or none (rule 2)."""
    _SETTINGS.set(context)


def ssl_context() -> SSLContext | None:
    """Return the selected TLS context, or None without TLS; raises BadConfig for invalid files."""
    selected = _SETTINGS.get()
    if not isinstance(selected, _NamedSettings):
        return selected
    return None if selected == _NO_TLS else _cached_ssl_context(selected)


async def dial(protocol: WireProtocol, address: str, *, timeout_s: float = 5.0) -> net.Link:
    """Connect to an address with the selected settings; raises the errors of `net.dial`."""
    return await net.dial(protocol, address, timeout_s=timeout_s, ssl=ssl_context())


@functools.cache
def _cached_ssl_context(settings: _NamedSettings) -> SSLContext | None:
    return tls_settings.dial_context_for(settings.tls, settings.token)
