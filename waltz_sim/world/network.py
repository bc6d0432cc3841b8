"""Links between processes: in order each way, slow, cut, half open, mute.

What a peer may conclude from a link, or from its silence, is the same for clients, servers and
storages; and so is what a network may do to them.

Rules:
    1. What arrives on one link arrives in the order in which it was sent.
    2. A link that one end has closed still brings the other end what was sent before; then that end
       is told, once. An end that has closed hears nothing any more.
    3. A break tells both ends, each in its time; what was on its way may still arrive at the far
       end, as it does when a request was received and not read yet.
    4. What is sent in a direction that is blocked is lost, and the link with it: both ends find out
       by keep-alives only, much later. That an end has closed is lost in the same way.
    5. In a world of bytes every message is encoded, cut off from its sender's memory, and decoded.
    6. What a dialler has sent may outlive its link, as it does on a slow way, or unread in the far
       end's socket: the dialler gives the link up, is free to dial again and to be answered on the
       new link, and only later the far end gets the rest of the old one, in order, and its end.
"""

from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from waltz_core.wire import codec
from waltz_core.wire.messages import ClientMessage, Message, StorageMessage, Surface
from waltz_sim.world.process import Process
from waltz_sim.world.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from random import Random

NEAR, FAR = 0, 1
CLIENT_VERSION: Final = 6
STORAGE_VERSION: Final = 2
KEEP_ALIVE_US: Final = (200_000, 3_000_000)
DIAL_TIMEOUT_US: Final = (100_000, 1_000_000)
TAIL_US: Final = (20_000, 1_000_000)


class Handlers(NamedTuple):
    """What an end of a link does: it hears a message, or learns that the link is gone."""

    message: "Callable[[SimLink, Message], None]"
    lost: "Callable[[SimLink, str], None]"


class HeldBytes(NamedTuple):
    """What a dialler has sent and the far end does not get yet (rule 6)."""

    messages: list[Message]
    came_late: "Callable[[], None]"  # called when the first of them reaches the far end after all


class SimLink:
    """One connection; `ends[NEAR]` has dialled it. Each list has a place for either end."""

    __slots__ = (
        "at_us",
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
        self.held: HeldBytes | None = None  # while something is held back
        self.at_us = [0, 0]  # when the last thing sent by this end arrives


class Network:
    """All links, and what is wrong with the ways between machines."""

    def __init__(self, world: World, *, is_bytes: bool) -> None:
        self._world = world
        self._rng: Random = world.stream("network")
        self._chance = self._rng.random
        self._is_bytes = is_bytes
        self._count = 0
        self.links: dict[int, SimLink] = {}
        self.blocked: set[tuple[str, str]] = set()  # never iterated
        self.slow_us = 0
        self.tail_share = 0.0  # of the messages that take very long
        self.mute_count = 0

    # ---- opening

    def dial(
        self,
        near: Process,
        far: Process,
        near_handlers: Handlers,
        *,
        opened: "Callable[[SimLink], None]",
        failed: "Callable[[str], None]",
        accept: "Callable[[SimLink], Handlers]",
    ) -> None:
        """Connect; either `opened` or `failed` is called, in the near process."""
        incarnation = near.incarnation

        def arrive() -> None:
            if near.incarnation != incarnation:
                return
            if self._is_blocked(near, far) or (far.is_up and far.is_paused):
                wait_us = self._rng.randint(*DIAL_TIMEOUT_US)
                self._world.after(wait_us, lambda: near.take(incarnation, timed_out))
                return
            if not far.is_up:
                near.take(incarnation, lambda: failed("connection refused"))
                return
            self._count += 1
            link = SimLink(self._count, near, far, [near_handlers, near_handlers])
            link.handlers[FAR] = accept(link)
            self.links[link.number] = link
            near.links[link.number] = far.links[link.number] = link
            near.take(incarnation, lambda: opened(link))

        def timed_out() -> None:
            failed("timed out")

        self._world.after(self._delay_us() + self._delay_us(), arrive)

    # ---- sending

    def send(self, link: SimLink, end: int, message: Message) -> None:
        """Send from an end; nothing when it has closed the link."""
        if not link.is_open[end] or link.is_mute:
            return
        sender, receiver = link.ends[end], link.ends[1 - end]
        if self.blocked and (sender.name, receiver.name) in self.blocked:
            self.mute(link)
            return
        if self._is_bytes:
            message = through_bytes(message)
        arrive = partial(self._arrive, link, 1 - end, message)
        self._world.after(self._in_order(link, end), arrive)

    def _in_order(self, link: SimLink, end: int) -> int:
        """Return after how long something sent now arrives (rule 1)."""
        now_us = self._world.now_us
        at_us = now_us + self._delay_us()
        if at_us <= link.at_us[end]:
            at_us = link.at_us[end] + 1
        link.at_us[end] = at_us
        return at_us - now_us

    def _delay_us(self) -> int:
        if self.tail_share and self._chance() < self.tail_share:
            return self._rng.randint(*TAIL_US)
        roll = self._chance()
        if roll > 0.99:
            return int(800 + (roll - 0.99) * 2_000_000) + self.slow_us
        return int(50 + roll * 500) + self.slow_us

    def _arrive(self, link: SimLink, end: int, message: Message) -> None:
        if link.is_open[end]:
            if link.held is not None and end == FAR:
                link.held.messages.append(message)
                return
            receiver, incarnation = link.ends[end], link.incarnations[end]
            if receiver.takes_at_once(incarnation):
                link.handlers[end].message(link, message)
            else:
                receiver.take(incarnation, partial(self._hear, link, end, message))

    def _hear(self, link: SimLink, end: int, message: Message) -> None:
        # It may have stood still when the message came, and have closed the link since.
        if link.is_open[end]:
            link.handlers[end].message(link, message)

    # ---- ending

    def close(self, link: SimLink, end: int, reason: str = "closed by the other end") -> None:
        """Close one end; the other is told behind what is on its way (rule 2)."""
        if not link.is_open[end]:
            return
        link.is_open[end] = False
        closer, other = link.ends[end], link.ends[1 - end]
        del closer.links[link.number]
        if self.blocked and (closer.name, other.name) in self.blocked:
            self.mute(link)
        elif not link.is_mute and link.is_open[1 - end]:
            told = partial(self._hear_end, link, 1 - end, reason)
            self._world.after(self._in_order(link, end), told)
        self._forget(link)

    def _hear_end(self, link: SimLink, end: int, reason: str) -> None:
        if link.held is None or end == NEAR:  # Else it comes behind what is held back.
            self._lose(link, end, reason)

    def break_link(self, link: SimLink, reason: str) -> None:
        """End it for both (rule 3)."""
        if link.is_mute:
            return
        if link.is_open[NEAR]:
            self._world.after(self._delay_us(), lambda: self._lose(link, NEAR, reason))
        if link.is_open[FAR]:
            delay_us = self._in_order(link, NEAR) if self._chance() < 0.5 else self._delay_us()
            self._world.after(delay_us, lambda: self._lose(link, FAR, reason))

    def cut_within(self, link: SimLink, end: int, rng: "Random") -> None:
        """End it while something is on its way to an end, which hears the first part of that."""
        rest_us = link.at_us[1 - end] - self._world.now_us
        assert rest_us > 0
        self._world.after(rng.randrange(rest_us), lambda: self._lose(link, end, "cut"))
        self._world.after(self._delay_us(), lambda: self._lose(link, 1 - end, "cut"))

    def mute(self, link: SimLink) -> None:
        """Let nothing through any more, and tell nobody for a while (rule 4)."""
        if link.is_mute:
            return
        link.is_mute = True
        self.mute_count += 1
        for end in (NEAR, FAR):
            if link.is_open[end]:
                wait_us = self._rng.randint(*KEEP_ALIVE_US)
                self._world.after(wait_us, partial(self._lose, link, end, "no answer to pings"))

    def died(self, process: Process, *, is_silent: bool) -> None:
        """A process is gone: its peers are told, or find out by themselves."""
        for link in list(process.links.values()):
            end = NEAR if link.ends[NEAR] is process else FAR
            if is_silent:
                self.mute(link)
                link.is_open[end] = False
            else:
                self.close(link, end, "reset")
        process.links.clear()

    def _lose(self, link: SimLink, end: int, reason: str) -> None:
        if not link.is_open[end]:
            return
        link.is_open[end] = False
        process = link.ends[end]
        process.links.pop(link.number, None)
        self._forget(link)
        process.take(link.incarnations[end], lambda: link.handlers[end].lost(link, reason))

    def _forget(self, link: SimLink) -> None:
        if not link.is_open[NEAR] and not link.is_open[FAR]:
            self.links.pop(link.number, None)

    # ---- outliving (rule 6)

    def hold(self, link: SimLink, came_late: "Callable[[], None]") -> None:
        """Keep from the far end what arrives there, until `release`."""
        link.held = HeldBytes([], came_late)

    def give_up(self, link: SimLink, reason: str) -> None:
        """Tell the near end of a link that is held back, and nobody else, that it is gone."""
        if link.held is not None:
            self._lose(link, NEAR, reason)

    def release(self, link: SimLink, reason: str, end_us: int = 0) -> None:
        """Let the far end have what was held back, and the end of the link `end_us` behind it.

        What is on its way comes behind it, too (rule 1). Nothing for a link that is not held back
        any more.
        """
        if link.held is None:
            return
        self._lose(link, NEAR, reason)
        let_go = partial(self._let_go, link, reason, end_us)
        rest_us = link.at_us[NEAR] - self._world.now_us
        if rest_us < 0:
            let_go()
        else:
            self._world.after(rest_us, let_go)

    def _let_go(self, link: SimLink, reason: str, end_us: int) -> None:
        held, link.held = link.held, None
        if held is None:
            return  # `heal` came before
        for number, message in enumerate(held.messages):
            arrive = partial(self._arrive, link, FAR, message)
            if not number:
                arrive = partial(self._arrive_late, arrive, link, held)
            self._world.after(self._in_order(link, NEAR), arrive)
        delay_us = self._in_order(link, NEAR) + end_us
        self._world.after(delay_us, partial(self._lose, link, FAR, reason))

    @staticmethod
    def _arrive_late(arrive: "Callable[[], None]", link: SimLink, held: HeldBytes) -> None:
        if link.is_open[FAR]:
            held.came_late()
        arrive()

    # ---- what is wrong between machines

    def block(self, sender: str, receiver: str) -> None:
        """Let nothing through in one direction."""
        self.blocked.add((sender, receiver))

    def unblock(self, ways: "Iterable[tuple[str, str]]") -> None:
        """Let everything through again in these directions."""
        self.blocked.difference_update(ways)

    def heal(self) -> None:
        """Let everything through again; links that were mute stay so until they are given up."""
        self.blocked.clear()
        self.slow_us, self.tail_share = 0, 0.0
        for link in list(self.links.values()):
            self.release(link, "given up")

    def _is_blocked(self, near: Process, far: Process) -> bool:
        blocked = self.blocked
        return (near.name, far.name) in blocked or (far.name, near.name) in blocked


def through_bytes(message: Message) -> Message:
    """Return what the other end of a socket makes of a message (rule 5)."""
    if isinstance(message, ClientMessage):
        surface, version = Surface.CLIENT, CLIENT_VERSION
    else:
        assert isinstance(message, StorageMessage)
        surface, version = Surface.STORAGE, STORAGE_VERSION
    frame = b"".join(codec.encode(message, version))
    return codec.decode(surface, version, memoryview(frame)[codec.FRAME_HEADER.size :])
