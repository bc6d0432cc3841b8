"""Links between processes: ordered in each direction, and slow, cut, half open or mute by faults.

Clients, servers and storages use the same kind of links, with the same network faults.

Rules:
    1. The messages of one link arrive in the order in which they were sent.
    2. After one end has closed, the other end still receives the earlier messages, and then the end
       of the link, once. An end that has closed receives nothing.
    3. A break reaches both ends, each after a delay. Messages in transit may still arrive at the
       far end, like a request that was received but not yet read.
    4. A message or a close in a blocked direction is lost. From then on, the link is mute: it drops
       all messages. Both ends detect this only by keep-alives, much later.
    5. In a world with bytes every message is encoded and decoded, so it shares no memory with its
       sender.
    6. A dialer's messages may arrive after the dialer has dropped the link. The network may have
       delayed the messages, or they were unread in the socket of the far end. Meanwhile the dialer
       opens a new link, and may receive answers on it. Later the far end receives the remaining
       messages of the old link, in order, and then the end of the old link.
"""

from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from waltz_core.wire import codec
from waltz_core.wire.messages import ClientMessage, Message, StorageMessage, WireProtocol
from waltz_sim.world.process import Process
from waltz_sim.world.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from random import Random

NEAR, FAR = 0, 1
CLIENT_VERSION: Final = 7
STORAGE_VERSION: Final = 3
KEEP_ALIVE_US: Final = (200_000, 3_000_000)
DIAL_TIMEOUT_US: Final = (100_000, 1_000_000)
SLOW_MESSAGE_US: Final = (20_000, 1_000_000)


class Handlers(NamedTuple):
    """The callbacks of one end of a link: for a message, and for the end of the link."""

    on_message: "Callable[[SimLink, Message], None]"
    on_lost: "Callable[[SimLink, str], None]"


class HeldMessages(NamedTuple):
    """Messages of a dialer that the far end does not receive yet (rule 6)."""

    messages: list[Message]
    on_late_delivery: "Callable[[], None]"  # called when the first message reaches the far end


class SimLink:
    """One connection. `ends[NEAR]` is the dialer. Each list has one entry for each end."""

    __slots__ = (
        "arrives_at_us",
        "ends",
        "handlers",
        "held",
        "incarnations",
        "is_mute",
        "is_open",
        "number",
    )

    def __init__(self, number: int, near: Process, far: Process, handlers: list[Handlers]) -> None:
        self.number = number
        self.ends = (near, far)
        self.incarnations = (near.incarnation, far.incarnation)
        self.handlers = handlers
        self.is_open = [True, True]
        self.is_mute = False
        self.held: HeldMessages | None = None  # set while messages are held back
        self.arrives_at_us = [0, 0]  # when the last message or close sent by this end arrives


class Network:
    """All links of a world, and the network faults between machines."""

    def __init__(self, world: World, *, is_bytes: bool) -> None:
        self._world = world
        self._rng: Random = world.stream("network")
        self._chance = self._rng.random
        self._is_bytes = is_bytes
        self._count = 0
        self.links: dict[int, SimLink] = {}
        self.blocked: set[tuple[str, str]] = set()  # (sender, receiver); never iterated
        self.extra_delay_us = 0
        self.slow_message_share = 0.0  # the share of very slow messages
        self.mute_count = 0

    # ---- opening

    def dial(
        self,
        near: Process,
        far: Process,
        near_handlers: Handlers,
        *,
        on_opened: "Callable[[SimLink], None]",
        on_failed: "Callable[[str], None]",
        accept: "Callable[[SimLink], Handlers]",
    ) -> None:
        """Open a link; call either `on_opened` or `on_failed` in the near process."""
        incarnation = near.incarnation

        def arrive() -> None:
            if near.incarnation != incarnation:
                return
            if self._is_blocked(near, far) or (far.is_up and far.is_paused):
                wait_us = self._rng.randint(*DIAL_TIMEOUT_US)
                self._world.call_after_us(
                    wait_us, lambda: near.process_input(incarnation, on_timeout)
                )
                return
            if not far.is_up:
                near.process_input(incarnation, lambda: on_failed("connection refused"))
                return
            self._count += 1
            link = SimLink(self._count, near, far, [near_handlers, near_handlers])
            link.handlers[FAR] = accept(link)
            self.links[link.number] = link
            near.links[link.number] = far.links[link.number] = link
            near.process_input(incarnation, lambda: on_opened(link))

        def on_timeout() -> None:
            on_failed("timed out")

        self._world.call_after_us(self._delay_us() + self._delay_us(), arrive)

    # ---- sending

    def send(self, link: SimLink, end: int, message: Message) -> None:
        """Send a message from one end; do nothing if that end has closed the link."""
        if not link.is_open[end] or link.is_mute:
            return
        sender, receiver = link.ends[end], link.ends[1 - end]
        if self.blocked and (sender.name, receiver.name) in self.blocked:
            self.mute(link)
            return
        if self._is_bytes:
            message = encode_and_decode(message)
        arrive = partial(self._arrive, link, 1 - end, message)
        self._world.call_after_us(self._next_delay_us(link, end), arrive)

    def _next_delay_us(self, link: SimLink, end: int) -> int:
        """Return the delay in µs of a message that is sent now (rule 1)."""
        now_us = self._world.now_us
        at_us = now_us + self._delay_us()
        if at_us <= link.arrives_at_us[end]:
            at_us = link.arrives_at_us[end] + 1
        link.arrives_at_us[end] = at_us
        return at_us - now_us

    def _delay_us(self) -> int:
        if self.slow_message_share and self._chance() < self.slow_message_share:
            return self._rng.randint(*SLOW_MESSAGE_US)
        roll = self._chance()
        if roll > 0.99:
            return int(800 + (roll - 0.99) * 2_000_000) + self.extra_delay_us
        return int(50 + roll * 500) + self.extra_delay_us

    def _arrive(self, link: SimLink, end: int, message: Message) -> None:
        if link.is_open[end]:
            if link.held is not None and end == FAR:
                link.held.messages.append(message)
                return
            receiver, incarnation = link.ends[end], link.incarnations[end]
            if receiver.can_process_now(incarnation):
                link.handlers[end].on_message(link, message)
            else:
                receiver.process_input(incarnation, partial(self._receive, link, end, message))

    def _receive(self, link: SimLink, end: int, message: Message) -> None:
        # The receiver may have been paused when the message arrived, and may have closed the link
        # since.
        if link.is_open[end]:
            link.handlers[end].on_message(link, message)

    # ---- ending

    def close(self, link: SimLink, end: int, reason: str = "closed by the other end") -> None:
        """Close one end; the other end receives messages in transit, then the close (rule 2)."""
        if not link.is_open[end]:
            return
        link.is_open[end] = False
        closer, other = link.ends[end], link.ends[1 - end]
        del closer.links[link.number]
        if self.blocked and (closer.name, other.name) in self.blocked:
            self.mute(link)
        elif not link.is_mute and link.is_open[1 - end]:
            receive_end = partial(self._receive_end, link, 1 - end, reason)
            self._world.call_after_us(self._next_delay_us(link, end), receive_end)
        self._remove_if_closed(link)

    def _receive_end(self, link: SimLink, end: int, reason: str) -> None:
        if link.held is None or end == NEAR:  # Otherwise the end follows the held messages.
            self._end_link_at(link, end, reason)

    def break_link(self, link: SimLink, reason: str) -> None:
        """Break the link for both ends (rule 3)."""
        if link.is_mute:
            return
        if link.is_open[NEAR]:
            self._world.call_after_us(
                self._delay_us(), lambda: self._end_link_at(link, NEAR, reason)
            )
        if link.is_open[FAR]:
            delay_us = self._next_delay_us(link, NEAR) if self._chance() < 0.5 else self._delay_us()
            self._world.call_after_us(delay_us, lambda: self._end_link_at(link, FAR, reason))

    def break_in_transfer(self, link: SimLink, end: int, rng: "Random") -> None:
        """Break the link during a transfer; the receiver receives only the first messages."""
        rest_us = link.arrives_at_us[1 - end] - self._world.now_us
        assert rest_us > 0
        self._world.call_after_us(
            rng.randrange(rest_us), lambda: self._end_link_at(link, end, "cut")
        )
        self._world.call_after_us(self._delay_us(), lambda: self._end_link_at(link, 1 - end, "cut"))

    def mute(self, link: SimLink) -> None:
        """Drop all messages from now on; the ends detect it later (rule 4)."""
        if link.is_mute:
            return
        link.is_mute = True
        self.mute_count += 1
        for end in (NEAR, FAR):
            if link.is_open[end]:
                wait_us = self._rng.randint(*KEEP_ALIVE_US)
                self._world.call_after_us(
                    wait_us, partial(self._end_link_at, link, end, "no answer to pings")
                )

    def end_links(self, process: Process, *, is_silent: bool) -> None:
        """End the links of a dead process; if `is_silent`, its peers detect it only later."""
        for link in list(process.links.values()):
            end = NEAR if link.ends[NEAR] is process else FAR
            if is_silent:
                self.mute(link)
                link.is_open[end] = False
            else:
                self.close(link, end, "reset")
        process.links.clear()

    def _end_link_at(self, link: SimLink, end: int, reason: str) -> None:
        if not link.is_open[end]:
            return
        link.is_open[end] = False
        process = link.ends[end]
        process.links.pop(link.number, None)
        self._remove_if_closed(link)
        process.process_input(
            link.incarnations[end], lambda: link.handlers[end].on_lost(link, reason)
        )

    def _remove_if_closed(self, link: SimLink) -> None:
        if not link.is_open[NEAR] and not link.is_open[FAR]:
            self.links.pop(link.number, None)

    # ---- late messages (rule 6)

    def hold(self, link: SimLink, on_late_delivery: "Callable[[], None]") -> None:
        """Hold back messages to the far end until `release`."""
        link.held = HeldMessages([], on_late_delivery)

    def abandon(self, link: SimLink, reason: str) -> None:
        """End a held link for its near end only."""
        if link.held is not None:
            self._end_link_at(link, NEAR, reason)

    def release(self, link: SimLink, reason: str, end_us: int = 0) -> None:
        """Deliver held messages to the far end, and the end of the link `end_us` later.

        Messages in transit follow the held messages (rule 1). Does nothing if the link is no longer
        held.
        """
        if link.held is None:
            return
        self._end_link_at(link, NEAR, reason)
        deliver_held = partial(self._deliver_held, link, reason, end_us)
        rest_us = link.arrives_at_us[NEAR] - self._world.now_us
        if rest_us < 0:
            deliver_held()
        else:
            self._world.call_after_us(rest_us, deliver_held)

    def _deliver_held(self, link: SimLink, reason: str, end_us: int) -> None:
        held, link.held = link.held, None
        if held is None:
            return  # `repair` has released the link before
        for number, message in enumerate(held.messages):
            arrive = partial(self._arrive, link, FAR, message)
            if not number:
                arrive = partial(self._arrive_late, arrive, link, held)
            self._world.call_after_us(self._next_delay_us(link, NEAR), arrive)
        delay_us = self._next_delay_us(link, NEAR) + end_us
        self._world.call_after_us(delay_us, partial(self._end_link_at, link, FAR, reason))

    @staticmethod
    def _arrive_late(arrive: "Callable[[], None]", link: SimLink, held: HeldMessages) -> None:
        if link.is_open[FAR]:
            held.on_late_delivery()
        arrive()

    # ---- faults between machines

    def block(self, sender: str, receiver: str) -> None:
        """Drop all messages in one direction between two processes."""
        self.blocked.add((sender, receiver))

    def unblock(self, directions: "Iterable[tuple[str, str]]") -> None:
        """Unblock these directions."""
        self.blocked.difference_update(directions)

    def repair(self) -> None:
        """Unblock all directions, and release held messages; mute links stay mute."""
        self.blocked.clear()
        self.extra_delay_us, self.slow_message_share = 0, 0.0
        for link in list(self.links.values()):
            self.release(link, "abandoned")

    def _is_blocked(self, near: Process, far: Process) -> bool:
        blocked = self.blocked
        return (near.name, far.name) in blocked or (far.name, near.name) in blocked


def encode_and_decode(message: Message) -> Message:
    """Return a message after encoding and decoding it (rule 5)."""
    if isinstance(message, ClientMessage):
        protocol, version = WireProtocol.CLIENT, CLIENT_VERSION
    else:
        assert isinstance(message, StorageMessage)
        protocol, version = WireProtocol.STORAGE, STORAGE_VERSION
    frame = b"".join(codec.encode(message, version))
    return codec.decode(protocol, version, memoryview(frame)[codec.FRAME_HEADER.size :])
