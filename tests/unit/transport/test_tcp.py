"""Detection of a dead host, as opposed to a slow process."""

import contextlib
import socket
import struct
import time

import pytest

from waltz_core.transport import tcp

# The field of `tcp_info` that counts how often the interval between probes has doubled.
BACKOFF = 4


def info(*, retransmits=0, probes=0, unacked=0, last_ack_ms=0):
    data = bytearray(104)
    data[2], data[3] = retransmits, probes
    struct.pack_into("=I", data, 24, unacked)
    struct.pack_into("=I", data, 56, last_ack_ms)
    return bytes(data)


@pytest.mark.parametrize(
    ("found", "silence_ms"),
    [
        (info(last_ack_ms=60_000), None),  # no data was sent
        (info(unacked=3, last_ack_ms=60_000), None),  # data was just sent
        (info(unacked=3, retransmits=5, last_ack_ms=9_000), None),
        (info(unacked=3, retransmits=5, last_ack_ms=11_000), 11_000),
        (info(probes=1, last_ack_ms=60_000), None),  # a full window; the last probe is under way
        (info(probes=3, last_ack_ms=60_000), 60_000),
        (b"", None),
    ],
)
def test_a_host_that_acknowledges_nothing_for_long_is_considered_dead(found, silence_ms):
    assert tcp.silence_in(found) == silence_ms


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="this system has no TCP_INFO")
def test_a_peer_that_reads_nothing_is_not_considered_dead():
    """The window of the peer is full, and its host answers."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as ours,
        server.accept()[0],
    ):
        tcp.set_options(ours)
        assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
        ours.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                ours.send(bytes(65_536))
        # Until the kernel has probed the full window several times and received answers.
        while ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[BACKOFF] < 3:
            time.sleep(0.01)
        assert tcp.silence_ms(ours) is None
