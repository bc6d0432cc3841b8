"""Reads from the kernel whether the peer has closed a TCP connection, or its host still answers.

`TCP_USER_TIMEOUT` cannot be used for this: it also ends a connection whose peer does not read. The
kernel counts the time in which data waits for a full receive window, although the peer's host
answers every probe.
"""

import asyncio
import socket
import struct
from typing import Final, Protocol

# Linux, struct tcp_info: retransmits and probes are bytes; `unacked` and `last_ack_recv` are words.
_BYTES: Final = 60
_RETRANSMITS, _PROBES = 2, 3
_UNACKED: Final = struct.Struct("=24xI")
_LAST_ACK_MS: Final = struct.Struct("=56xI")
SILENCE_MS_MAX: Final = 10_000
UNANSWERED_MIN: Final = 3
# Linux, enum of tcp_states: TCP_CLOSE and TCP_CLOSE_WAIT.
_CLOSED: Final = (7, 8)


class Socket(Protocol):
    """The interface of a socket that is used here; uvloop's sockets are not `socket.socket`."""

    def getsockopt(self, level: int, optname: int, buflen: int, /) -> bytes:
        """Return an option's bytes."""


def silence_ms(sock: Socket) -> int | None:
    """Return how long the peer's host has acknowledged nothing, if that means that it is dead.

    None if it answers, if nothing waits for an answer, and if the system does not report it.
    """
    option = getattr(socket, "TCP_INFO", None)
    if option is None:
        return None
    try:
        return silence_of(sock.getsockopt(socket.IPPROTO_TCP, option, _BYTES))
    except OSError:
        return None


def silence_of(info: bytes) -> int | None:
    """Return the same of a `tcp_info`."""
    if len(info) < _BYTES:
        return None
    (unacknowledged,) = _UNACKED.unpack_from(info)
    (last_ms,) = _LAST_ACK_MS.unpack_from(info)
    is_unanswered = unacknowledged > 0 and info[_RETRANSMITS] >= UNANSWERED_MIN
    is_unanswered = is_unanswered or info[_PROBES] >= UNANSWERED_MIN
    return last_ms if is_unanswered and last_ms >= SILENCE_MS_MAX else None


def has_closed(sock: Socket) -> bool:
    """Whether the peer has closed its side, even if not all of its bytes were read yet.

    False if the system does not report it.
    """
    option = getattr(socket, "TCP_INFO", None)
    return option is not None and sock.getsockopt(socket.IPPROTO_TCP, option, 1)[0] in _CLOSED


def set_options(sock: socket.socket) -> None:
    """Disable delays, and detect within seconds that a peer's host is dead."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 3),
        ("TCP_KEEPCNT", 3),
    ):
        option = getattr(socket, name, None)  # Linux has all of them, other systems some
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def peer_address(transport: asyncio.Transport) -> str:
    """Return "host:port" of the peer."""
    name = transport.get_extra_info("peername")
    return f"{name[0]}:{name[1]}" if name else "unknown"
