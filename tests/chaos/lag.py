"""The slow links between network namespaces: delays packets, and drops some.

    python -m tests.chaos.lag        in the router's namespace, by `tests/chaos/network.py`

The kernel module that delays packets (netem) is not available everywhere. Therefore the router
sends the packets of slow links to a TUN device of this process. The process returns each packet
after the delay. Each line of the standard input lists all slow links as JSON; the process ends at
the end of the input.

Rules:
    1. Packets of a link stay in their order.
    2. Packets of unlisted links are returned at once.
    3. The queue of a link is bounded, like the queue of a real link. Packets that arrive when the
       queue is full are lost.
"""

import fcntl
import heapq
import ipaddress
import itertools
import json
import os
import random
import select
import struct
import sys
import time
from typing import NamedTuple

TUN_DEVICE = "lag"
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
PACKET_BYTES_MAX = 65_536
QUEUE_S_MAX = 2.0
ADDRESS_BYTES = slice(12, 20)  # of an IPv4 header: source and target


class LinkSettings(NamedTuple):
    """The delay, loss and rate of a slow link."""

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss: float = 0.0  # a share of the packets
    bytes_per_s: int = 0  # 0: unlimited

    def __str__(self) -> str:
        parts = [f"{self.delay_ms:.0f}±{self.jitter_ms:.0f} ms"]
        parts += [f"{self.loss:.1%} lost"] if self.loss else []
        parts += [f"{self.bytes_per_s // 1024} KiB/s"] if self.bytes_per_s else []
        return ", ".join(parts)


class SlowLink:
    """One slow link: computes when each packet leaves it."""

    def __init__(self, settings: LinkSettings, rng: random.Random) -> None:
        self.settings = settings
        self._rng = rng
        self._wire_free_s = 0.0  # the time at which all sent bytes are on the wire
        self._last_departure_s = 0.0

    def departure_s(self, size: int, now_s: float) -> float | None:
        """Return when a packet leaves; None if it is lost."""
        if self._rng.random() < self.settings.loss:
            return None
        begins_s = max(now_s, self._wire_free_s)
        if begins_s - now_s > QUEUE_S_MAX:  # rule 3
            return None
        self._wire_free_s = begins_s + (
            size / self.settings.bytes_per_s if self.settings.bytes_per_s else 0.0
        )
        late_ms = self.settings.delay_ms + self._rng.random() * self.settings.jitter_ms
        self._last_departure_s = max(
            self._last_departure_s, self._wire_free_s + late_ms / 1000
        )  # rule 1
        return self._last_departure_s


def delay_packets(device: int, commands: int) -> None:
    """Delay packets until standard input ends."""
    rng = random.Random(0)
    links: dict[bytes, SlowLink] = {}
    queued_packets: list[tuple[float, int, bytes]] = []
    packet_numbers = itertools.count()
    while True:
        timeout = max(0.0, queued_packets[0][0] - time.monotonic()) if queued_packets else None
        ready, _, _ = select.select([device, commands], [], [], timeout)
        now_s = time.monotonic()
        if commands in ready:
            text = os.read(commands, 1 << 20).decode()
            if not text:
                return
            links = _parse_links(text.splitlines()[-1], links, rng)
        if device in ready:
            packet = os.read(device, PACKET_BYTES_MAX)
            link = links.get(packet[ADDRESS_BYTES])
            at_s = now_s if link is None else link.departure_s(len(packet), now_s)
            if at_s is not None:
                heapq.heappush(queued_packets, (at_s, next(packet_numbers), packet))
        while queued_packets and queued_packets[0][0] <= now_s:
            os.write(device, heapq.heappop(queued_packets)[2])


def _parse_links(
    command: str, known_links: dict[bytes, SlowLink], rng: random.Random
) -> dict[bytes, SlowLink]:
    """Return the slow links in a line of input; an unchanged link keeps its queue."""
    links = {}
    for source, target, *settings_values in json.loads(command):
        key = ipaddress.IPv4Address(source).packed + ipaddress.IPv4Address(target).packed
        settings = LinkSettings(*settings_values)
        link = known_links.get(key)
        links[key] = (
            link if link is not None and link.settings == settings else SlowLink(settings, rng)
        )
    return links


def main() -> None:
    """Create the device, print "ready", and delay packets."""
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", TUN_DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    delay_packets(device, sys.stdin.fileno())


if __name__ == "__main__":
    main()
