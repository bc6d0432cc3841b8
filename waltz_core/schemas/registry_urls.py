"""Parses the URLs of schema registries.

Rules:
    1. A URL contains no user and no password, because settings, plans and logs show it.
"""

from typing import Final, NamedTuple
from urllib.parse import urlsplit

from waltz_core.errors import BadConfig

_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


class RegistryAddress(NamedTuple):
    """The address of a schema registry; `path` has no slash at its end."""

    scheme: str
    host: str
    port: int
    path: str

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"


def addresses_of(urls: str) -> tuple[RegistryAddress, ...]:
    """Parse a list of URLs, such as `http://r1:8081,http://r2:8081`, into addresses.

    Raises:
        BadConfig: a URL is not an HTTP URL, or contains a user or a password.
    """
    if not isinstance(urls, str):
        raise BadConfig(f"schema registry: expected a URL, found {type(urls).__name__}")
    addresses = tuple(_parse_address(url.strip()) for url in urls.split(",") if url.strip())
    if not addresses:
        raise BadConfig("schema registry: expected a URL like http://registry:8081, found none")
    return addresses


def _parse_address(url: str) -> RegistryAddress:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.username is not None or parts.password is not None:
        # NB: the message must not contain the URL.
        raise BadConfig(
            "schema registry: expected a URL without a user and a password, because query plans "
            "and logs would show them. Hint: write user:password into a file, and name the file."
        )
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname or parts.query or parts.fragment:
        raise BadConfig(
            f"schema registry: expected a URL like http://registry:8081, found {url[:200]!r}"
        )
    if not url.isascii() or not url.isprintable() or " " in url:
        raise BadConfig(f"schema registry: expected a URL of ASCII characters, found {url[:200]!r}")
    return RegistryAddress(
        parts.scheme, parts.hostname, port or _DEFAULT_PORTS[parts.scheme], parts.path.rstrip("/")
    )
