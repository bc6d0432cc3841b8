"""Checks whether a text is a valid host.

Settings and connect strings reject invalid hosts. This module must not import `dns_lookup.py`,
which uses threads, because the simulator reads settings but runs without threads.
"""

import ipaddress
from typing import Final

_NAME_BYTES_MAX: Final = 253
_INVALID_NAME_CHARACTERS: Final = frozenset(" /:,[]")


def check_host(host: str) -> None:
    """Raise ValueError with the reason unless a text is an IP address or a valid host name."""
    if is_ip_address(host):
        return
    if not host or not host.isprintable() or _INVALID_NAME_CHARACTERS.intersection(host):
        raise ValueError("expected a host name, an IPv4 address or an IPv6 address")
    if len(host.encode("idna")) > _NAME_BYTES_MAX:
        raise ValueError(f"expected a host name of at most {_NAME_BYTES_MAX} bytes")


def is_ip_address(host: str) -> bool:
    """Return whether a host is an IPv4 or IPv6 address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether a host is a loopback address or "localhost", without a DNS lookup."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
