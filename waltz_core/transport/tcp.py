"""Reads from the kernel whether a peer has closed a TCP connection, and whether its host answers.

The socket option `TCP_USER_TIMEOUT` is not suitable, because it also ends a connection whose peer
does not read. The peer's receive window is then full. The kernel counts the time in which data
waits for this window, although the peer's host answers every probe.
"""

import asyncio
import socket
import struct
from typing import Final, Protocol

# The layout of struct tcp_info of Linux: retransmits and probes are bytes; `unacked` and
# `last_ack_recv` are 32-bit words.
_INFO_BYTES: Final = 60
_RETRANSMITS_OFFSET, _PROBES_OFFSET = 2, 3
_UNACKED_FIELD: Final = struct.Struct("=24xI")
_LAST_ACK_MS_FIELD: Final = struct.Struct("=56xI")
SILENCE_MS_MAX: Final = 10_000
UNANSWERED_PACKETS_MIN: Final = 3
# Values of the Linux enum of TCP states: TCP_CLOSE and TCP_CLOSE_WAIT.
_CLOSED_STATES: Final = (7, 8)


class Socket(Protocol):
    """The part of the socket interface that this file uses.

    Uvloop's sockets are not `socket.socket`.
    """

    def getsockopt(self, level: int, optname: int, buflen: int, /) -> bytes:
        """Return the bytes of an option."""


def silence_ms(sock: Socket) -> int | None:
    """Return the ms since the last acknowledgement of the peer's host, if the host seems dead.

    Return None if the host answers, if no packet waits for an acknowledgement, or if the system
    does not report these values.
    """
    option = getattr(socket, "TCP_INFO", None)
    if option is None:
        return None
    try:
        return silence_in(sock.getsockopt(socket.IPPROTO_TCP, option, _INFO_BYTES))
    except OSError:
        return None


def silence_in(info: bytes) -> int | None:
    """Return the result of `silence_ms` for a `tcp_info` structure."""
    if len(info) < _INFO_BYTES:
        return None
    (unacknowledged,) = _UNACKED_FIELD.unpack_from(info)
    (last_ms,) = _LAST_ACK_MS_FIELD.unpack_from(info)
    is_unanswered = unacknowledged > 0 and info[_RETRANSMITS_OFFSET] >= UNANSWERED_PACKETS_MIN
    is_unanswered = is_unanswered or info[_PROBES_OFFSET] >= UNANSWERED_PACKETS_MIN
    return last_ms if is_unanswered and last_ms >= SILENCE_MS_MAX else None


def has_peer_closed(sock: Socket) -> bool:
    """Whether the peer has closed its side, even if not all of its bytes were read yet.

    Return False if the system does not report the state of the connection.
    """
    option = getattr(socket, "TCP_INFO", None)
    return (
        option is not None and sock.getsockopt(socket.IPPROTO_TCP, option, 1)[0] in _CLOSED_STATES
    )


def set_options(sock: socket.socket) -> None:
    """Disable send delays, and let the kernel detect within seconds that a peer's host is dead."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 3),
        ("TCP_KEEPCNT", 3),
    ):
        option = getattr(socket, name, None)  # Linux has all options, other systems only some
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def peer_address(transport: asyncio.Transport) -> str:
    """Return "host:port" of the peer, or "unknown"."""
    name = transport.get_extra_info("peername")
    return f"{name[0]}:{name[1]}" if name else "unknown"
