"""A simulated client: the production stream, and an application that uses it.

It replaces `client/stream/client_partition.py` and `client/links/connections.py`. It has links to
servers, sends requests to ZooKeeper, and calls back the application.

Rules:
    1. The stream is the unchanged production machine.
    2. Every effect of the stream for its application goes to the checkers first.
    3. A client that dies loses its state. After a restart it has another client ID.
"""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from waltz_core.client.stream import stream_events
from waltz_core.client.stream.outcome_tracker import Submission
from waltz_core.client.stream.partition_stream import PartitionStream
from waltz_core.client.stream.stream_events import StreamSettings
from waltz_core.errors import Unreachable, WaltzError
from waltz_core.machine import Report, Wakeup
from waltz_core.records.record import (
    BEFORE_FIRST,
    ClientId,
    Generation,
    PartitionId,
    ReqId,
    TransactionId,
)
from waltz_core.wire.messages import ClientMessage, ErrorResponse, Message
from waltz_sim.cluster.simulated_coordinator import Assignment
from waltz_sim.cluster.simulated_servers import describe_message
from waltz_sim.world.network import NEAR, Handlers, SimLink
from waltz_sim.world.process import Process

if TYPE_CHECKING:
    from waltz_sim.cluster.simulated_cluster import SimCluster

STREAM_SETTINGS: Final = StreamSettings(
    request_timeout_ms=4_000,
    mount_timeout_ms=1_500,
    retry_interval_ms_min=20,
    retry_interval_ms_max=400,
    range_bytes_max=2_048,
    in_flight_bytes_max=64 * 1024,
    feed_ahead_max=40,
)
# Below the sequence numbers of all requests by the stream itself.
_SEQUENCE_MAX: Final = -(1 << 30)

AnswerCallback = Callable[[ClientMessage | None], None]


def _ignore_answer(_: ClientMessage | None) -> None:
    """Ignore the answer: only the checkers need it."""


class SimClient(Process):
    """One client process. The workload controls it, and receives results through callbacks."""

    def __init__(self, cluster: "SimCluster", name: str) -> None:
        super().__init__(cluster.world, name)
        self.cluster = cluster
        self.client_id = 0
        self.stream: PartitionStream | None = None
        self.fed_last = BEFORE_FIRST  # the last transaction that the application has applied
        self.apply_us_max = 3_000  # the longest time to apply a transaction
        self._links: dict[int, SimLink] = {}  # open links to servers, by number
        self._waiting_requests: dict[ReqId, tuple[SimLink, AnswerCallback]] = {}
        self._request_count = 0
        self._inbox: deque[stream_events.Event] = deque()
        self._is_stepping = False
        # The application's callbacks.
        self.on_settled: Callable[[stream_events.SubmissionSettled], None] = lambda _: None
        self.on_rejected: Callable[[stream_events.SubmissionRejected], None] = lambda _: None
        self.on_ready: Callable[[], None] = lambda: None
        self.on_stopped: Callable[[WaltzError], None] = lambda _: None

    # ---- life

    def on_started(self) -> None:
        """Start with an unused client ID (rule 3)."""
        cluster = self.cluster
        self.client_id = cluster.coordinator.next_client_id()
        self.fed_last = BEFORE_FIRST
        self.stream = PartitionStream(
            self.client_id, PartitionId(cluster.partition_id), STREAM_SETTINGS, self.rng
        )
        cluster.checks.on_client_started(self)

    def on_died(self) -> None:
        """Drop all state."""
        self.stream = None
        self._inbox.clear()
        self._links.clear()
        self._waiting_requests.clear()

    def kill(self, *, is_silent: bool = False) -> None:
        """Kill the process; if `is_silent`, its peers do not notice at once."""
        if not self.is_up:
            return
        self.world.note(f"{self.name} is killed")
        self.cluster.checks.on_client_died(self)
        self.die()
        self.cluster.network.end_links(self, is_silent=is_silent)

    # ---- actions of the application

    def append(self, submission: Submission) -> None:
        """Append rows; exactly one of `on_settled` and `on_rejected` follows."""
        self.step(stream_events.SendAppends(submission))

    def subscribe(self, mark: TransactionId) -> None:
        """Subscribe to the feed after a high-water mark."""
        self.fed_last = mark
        self.cluster.checks.on_client_subscribed(self)
        self.step(stream_events.Subscribe(mark))

    @property
    def mark(self) -> TransactionId:
        """The high-water mark that a transaction may claim if it is computed now."""
        assert self.stream is not None
        return self.stream.high_water_mark

    def request(
        self, make: Callable[[ReqId], ClientMessage], on_answer: AnswerCallback = _ignore_answer
    ) -> None:
        """Send a request outside of the stream; `on_answer` receives None if the link breaks."""
        if not self._links:
            on_answer(None)
            return
        link = next(reversed(self._links.values()))
        self._request_count += 1
        req_id = ReqId(
            ClientId(self.client_id),
            Generation(0),
            PartitionId(self.cluster.partition_id),
            _SEQUENCE_MAX - self._request_count,
        )
        self._waiting_requests[req_id] = link, on_answer
        self._send(link, make(req_id))

    def _send(self, link: SimLink, message: ClientMessage) -> None:
        self.cluster.checks.on_client_sent(self, link, message)
        self.cluster.network.send(link, NEAR, message)

    # ---- the stream

    def step(self, event: stream_events.Event) -> None:
        """Pass an event to the stream; an event during a step waits, as in the driver."""
        self._inbox.append(event)
        if self._is_stepping:
            return
        self._is_stepping = True
        while self._inbox and self.stream is not None:
            for effect in self.stream.step(self._inbox.popleft(), self.now_ms):
                self._perform(effect)
        self._is_stepping = False
        self._inbox.clear()
        if self.stream is not None:
            self.set_timer(self.stream.wake_at_ms)

    def on_timer(self) -> None:
        """Wake the stream."""
        if self.stream is not None:
            self.step(Wakeup())

    def _perform(self, effect: stream_events.Effect) -> None:  # noqa: C901 - one case for each
        checks = self.cluster.checks
        match effect:
            case stream_events.SendOnLink():
                link = self._links.get(effect.link)
                if link is not None:
                    self._send(link, effect.message)
            case stream_events.SubmissionSettled():
                checks.on_submission_settled(self, effect)
                self.on_settled(effect)
            case stream_events.SubmissionRejected():
                checks.on_submission_rejected(self, effect)
                self.on_rejected(effect)
            case stream_events.OpenLink():
                self._open_link(effect)
            case stream_events.FeedAdvanced():
                checks.on_feed_received(self, effect)
                self.fed_last = TransactionId(effect.first + effect.count - 1)
                self._apply_later(self.fed_last)
            case stream_events.MarkAdvanced():
                checks.on_client_mark_moved(self, effect.high_water_mark)
            case stream_events.StreamReady():
                self.on_ready()
            case stream_events.RequestClientId():
                client_id = self.cluster.coordinator.next_client_id()
                self.call_after_us(1_000, lambda: self._renew_client_id(client_id))
            case stream_events.FeedLagging():
                # The logs are small, so the missed range is requested from the server at once.
                mark = effect.feed_mark
                self.call_after_us(1_000, lambda: self.step(stream_events.ResumeFeed(mark)))
            case stream_events.StreamStopped():
                self.world.note(f"{self.name} stopped: {effect.error}")
                checks.on_client_stopped(self, effect.error)
                self.on_stopped(effect.error)
            case Report():
                checks.on_report(self.name, effect)

    def _renew_client_id(self, client_id: int) -> None:
        self.client_id = client_id
        self.step(stream_events.ClientIdRenewed(client_id))

    def _apply_later(self, mark: TransactionId) -> None:
        delay_us = int(200 + self.chance() * self.apply_us_max)
        self.call_after_us(delay_us, lambda: self.step(stream_events.FeedApplied(mark)))

    # ---- links

    def _open_link(self, effect: stream_events.OpenLink) -> None:
        def on_owner_found(assignment: Assignment) -> None:
            server = self.cluster.server_named(assignment.owner)
            if server is None:
                fail("the partition has no owner")
                return
            self.cluster.checks.on_dial(self.name, server.name)
            for link in self._links.values():
                if link.ends[1] is server and link.number not in effect.avoided_links:
                    self._on_linked(effect, link, assignment)
                    return
            self.cluster.network.dial(
                self,
                server,
                Handlers(self._on_message, self._on_link_lost),
                on_opened=lambda link: self._on_linked(effect, link, assignment),
                on_failed=fail,
                accept=server.accept,
            )

        def fail(reason: str) -> None:
            self.step(stream_events.LinkFailed(effect.attempt, Unreachable(reason)))

        self.cluster.coordinator.owner_for(self, on_owner_found)

    def _on_linked(
        self, effect: stream_events.OpenLink, link: SimLink, assignment: Assignment
    ) -> None:
        assert self.stream is not None
        if effect.attempt != self.stream.attempt:
            if link.number not in self._links:
                self.cluster.network.close(link, NEAR)
            return
        for other in list(self._links.values()):
            if other is not link:
                del self._links[other.number]
                self.cluster.network.close(other, NEAR)
                self._fail_requests(other)
                self.step(stream_events.LinkLost(other.number, "replaced by another link"))
        self._links[link.number] = link
        sequence = self.cluster.coordinator.next_connection_sequence()
        attempt, generation = effect.attempt, assignment.generation
        self.step(
            stream_events.LinkOpened(
                attempt,
                link.number,
                generation,
                sequence,
                supports_pipelining=True,
                supports_own_ranges=bool(
                    self.client_id % 2
                ),  # as with a server with L 8, or an older one
            )
        )

    def _on_link_lost(self, link: SimLink, reason: str) -> None:
        self._links.pop(link.number, None)
        self._fail_requests(link)
        self.step(stream_events.LinkLost(link.number, reason))

    def _fail_requests(self, link: SimLink) -> None:
        for req_id, (requested_on, on_answer) in list(self._waiting_requests.items()):
            if requested_on is link:
                del self._waiting_requests[req_id]
                on_answer(None)

    def _on_message(self, link: SimLink, message: Message) -> None:
        assert isinstance(message, ClientMessage)
        if self.world.is_traced:
            self.world.note(f"{self.name} < {describe_message(message)}")
        self.cluster.checks.on_client_received(self, link, message)
        found = self._waiting_requests.pop(message.req_id, None)
        if found is not None:
            found[1](None if isinstance(message, ErrorResponse) else message)
            return
        self.step(stream_events.MessageReceived(link.number, message))
