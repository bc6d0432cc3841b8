"""One partition of a client: its stream, its appends, its feed.

The stream is a state machine without futures, sockets or ZooKeeper. This driver performs the
effects of the stream. Each partition has its own driver.

Rules:
    1. Effects are performed in order and never wait. An effect that takes time becomes a task. The
       task posts its outcome as an event.
    2. When a stream ends, every caller that waits for the stream gets the stream's error.
    3. The mark that the application has applied is kept as long as the client exists, even while
       the partition is paused or unsubscribed. During this time the application's state does not
       change. A transaction with the log's mark would claim that the application has seen newer
       transactions.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterator, MutableMapping
from random import Random
from typing import TYPE_CHECKING, Any, Protocol, assert_never

from waltz_core import errors
from waltz_core.access.client_ids import NO_PROOF, ClientIdentity
from waltz_core.client.links.connections import ServerLink, ServerLinks
from waltz_core.client.links.directory import Directory, Owner
from waltz_core.client.links.identities import ClientIdentities
from waltz_core.client.links.outage_log import LOG_AFTER_S, OutageLog
from waltz_core.client.stream import append_errors, stream_events
from waltz_core.client.stream.appends import Appends, AppendWindow
from waltz_core.client.stream.outcome_tracker import Submission
from waltz_core.client.stream.partition_stream import PartitionStream
from waltz_core.client.stream.stream_events import Phase, StreamSettings
from waltz_core.client.stream.write_claim import TaskClaim
from waltz_core.config.declarations import ClientConfig
from waltz_core.driver import Driver, loop_clock_ms
from waltz_core.legacy import legacy_server_stream
from waltz_core.machine import Report
from waltz_core.records.record import Generation, PartitionId, TransactionId
from waltz_core.spans import WaltzTracer
from waltz_core.wire.append_ids import committed_ids_text
from waltz_core.wire.messages import AppendBatch, AppendRequest, AppendResult, ClientMessage

if TYPE_CHECKING:
    from waltz_core.client.read.feed_delivery import Applier

_log = logging.getLogger(__name__)

FetchFeed = Callable[[TransactionId, TransactionId], Coroutine[Any, Any, None]]

# A submission of single appends is sent when it reaches this size, or when the event loop turns.
SUBMISSION_ROWS = 1_000
SUBMISSION_BYTES = 512 * 1024


class ClientServices(Protocol):
    """The parts of a client that a partition uses."""

    config: ClientConfig
    directory: Directory
    ids: ClientIdentities
    links: ServerLinks
    random: Random
    tracer: WaltzTracer | None
    claim: TaskClaim | None

    def spawn(self, task: Coroutine[Any, Any, None], name: str) -> None:
        """Run a task until it ends or the client is closed."""

    def next_connection_sequence(self) -> int:
        """Return the connection sequence of the next mount, higher than all earlier ones."""


class ClientPartition:
    """One partition of a client."""

    def __init__(self, partition_id: PartitionId, services: ClientServices) -> None:
        config = services.config
        self.partition_id = partition_id
        self._services = services
        self.settings = stream_settings(config)
        identity = services.ids.current
        self.stream = PartitionStream(
            None if identity is None else identity.client_id,
            partition_id,
            self.settings,
            services.random,
            NO_PROOF if identity is None else identity.proof,
        )
        self._driver: Driver[stream_events.Event, stream_events.Effect] = Driver(
            self.stream,
            self._perform_effect,
            on_failure=self._on_machine_failed,
            name=f"stream-{partition_id}",
        )
        self.tracer = services.tracer
        self.window = AppendWindow(
            rows_max=config.in_flight_count_max, bytes_max=config.in_flight_bytes_max
        )
        self.appends = Appends(
            partition_id,
            self.window,
            self._post_submission,
            batch_rows=min(SUBMISSION_ROWS, config.batch_rows_max),
            batch_bytes=min(SUBMISSION_BYTES, config.batch_bytes_max),
            tracer=self.tracer,
        )
        self._applier: Applier | None = None
        self._applied_mark: TransactionId | None = None
        self._applier_changed = asyncio.Event()
        self._starting_feed_count = 0
        # Fetches the feed from the first mark to about the second, then calls `on_feed_caught_up`.
        self.fetch: FetchFeed | None = None
        self._link: ServerLink | None = None
        self._outage = OutageLog(partition_id, "server", log_after_s=LOG_AFTER_S)
        # A cancelled caller removes its future from these dicts, because the next event may come
        # late.
        self._mount_waiters: dict[asyncio.Future[None], None] = {}
        self._mark_waiters: dict[asyncio.Future[None], TransactionId] = {}
        self._stop_error: errors.WaltzError | None = None

    # --- the feed's receiver

    @property
    def applier(self) -> "Applier | None":
        """The applier of the feed; None if there is no feed."""
        return self._applier

    @applier.setter
    def applier(self, applier: "Applier | None") -> None:
        self._applier = applier
        self._notify_applier_changed()

    def _notify_applier_changed(self) -> None:
        self._applier_changed.set()
        self._applier_changed = asyncio.Event()

    @property
    def is_starting(self) -> bool:
        """Whether a feed starts, and the application has not returned its mark yet."""
        return self._starting_feed_count > 0

    @contextlib.contextmanager
    def count_starting_feed(self) -> Iterator[None]:
        """Count a feed as starting while the application's mark is requested."""
        self._starting_feed_count += 1
        try:
            yield
        finally:
            self._starting_feed_count -= 1
            self._notify_applier_changed()

    @property
    def has_view(self) -> bool:
        """Whether the application has a view of this partition: it has or had a feed (rule 3)."""
        return self.is_starting or self._applied_mark is not None or self._applier is not None

    @property
    def has_feed(self) -> bool:
        """Whether there is a feed that the application has not paused."""
        return self._applier is not None and not self._applier.is_paused_by_application

    async def wait_for_feed(self) -> "Applier | None":
        """Wait for a feed that the application has not paused; return its applier.

        The result is None if the first feed of the partition could not be started, so that the
        application has no view of the partition. Raises the error that has ended the stream.
        """
        while self._applier is None or self._applier.is_paused_by_application:
            if not self.has_view:
                return None
            if self._stop_error is not None:
                raise self._stop_error
            await self._applier_changed.wait()
        return self._applier

    # --- for the client

    @property
    def is_ready(self) -> bool:
        """Whether appends can be sent; always False for a failed stream."""
        return self.stream.phase is Phase.READY and self._stop_error is None

    @property
    def mark(self) -> TransactionId:
        """The high-water mark for a transaction that the application computes now.

        If the application ever had a feed, this is the mark that the application has applied (rule
        3). If it never had a feed, this is the highest known mark of the log.
        """
        return self.stream.high_water_mark if self._applied_mark is None else self._applied_mark

    async def ensure_mounted(self) -> None:
        """Mount the partition if necessary; raises Unavailable after `request_timeout_ms`."""
        if self.is_ready:
            return
        if self._stop_error is not None:
            raise self._stop_error
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._mount_waiters[future] = None
        self._driver.post(stream_events.MountPartition())
        timeout_ms = self._services.config.request_timeout_ms
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await future
        except TimeoutError as error:
            raise append_errors.timeout_error(
                f"the client could not mount partition {self.partition_id} within "
                f"{timeout_ms} ms: {self.stream.failure}",
                self.stream.pause_ms(loop_clock_ms()),
            ) from error
        finally:
            self._mount_waiters.pop(future, None)

    async def wait_until_known(self, mark: TransactionId) -> None:
        """Wait until the high-water mark of the log is known to be at least `mark`."""
        while self.stream.high_water_mark < mark and self._stop_error is None:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._mark_waiters[future] = mark
            try:
                await future
            finally:
                self._mark_waiters.pop(future, None)

    def subscribe(self, mark: TransactionId, header_values: tuple[int, ...]) -> None:
        """Start the feed of the applier after `mark`."""
        assert self.applier is not None
        self._driver.post(stream_events.Subscribe(mark, header_values))
        if self._stop_error is not None:
            self._spawn(self.applier.stop(self._stop_error), "feed-stop")

    def unsubscribe(self) -> None:
        """End the feed; the applier of the feed has ended already."""
        self.applier = None
        self.fetch = None
        self._driver.post(stream_events.Unsubscribe())

    def on_feed_caught_up(self, mark: TransactionId) -> None:
        """Start the feed from the server: the driver has fetched the transactions up to `mark`."""
        self._driver.post(stream_events.ResumeFeed(mark))

    def on_feed_applied(self, mark: TransactionId) -> None:
        """Note that the application has applied the feed up to `mark`."""
        self._applied_mark = mark
        if self.stream.has_feed:
            self._driver.post(stream_events.FeedApplied(mark))

    def on_generation_changed(self, generation: Generation) -> None:
        """Note that the assignment has another generation for this partition."""
        self._driver.post(stream_events.GenerationChanged(generation))

    def begin_sequences(self, sequence: int) -> None:
        """Number requests from `sequence` on, unless the next number is higher already."""
        assert not self.stream.has_pending
        self.stream.next_sequence = max(self.stream.next_sequence, sequence)

    def close(self) -> None:
        """Abandon all appends that are not final, and stop the feed."""
        if self.applier is not None:
            self.applier.end(errors.Unreachable("the client was closed"))
        self._driver.post(stream_events.CloseStream())
        self._driver.stop()
        # Rows that were waiting to be sent (for the first time, or again) are not in the log.
        self.appends.abandon(errors.Unreachable("the client was closed before the append was sent"))
        if self._link is not None:
            self._link.detach_stream(self.partition_id)

    def _post_submission(self, submission: Submission) -> None:
        if self._driver.is_stopped:  # the submission would never get an outcome
            error = self._stop_error or errors.Unreachable(
                "the client was closed before the append was sent"
            )
            self.appends.on_rejected(submission.token, error)
            return
        self._driver.post(stream_events.SendAppends(submission))

    # --- the stream's effects

    def _perform_effect(self, effect: stream_events.Effect) -> None:  # noqa: C901, PLR0912
        match effect:
            case stream_events.SendOnLink():
                if self._link is not None and self._link.number == effect.link:
                    self._send_message(self._link, effect.message)
            case stream_events.SubmissionSettled():
                self.appends.on_submission_settled(effect.token, effect.outcome)
            case stream_events.SubmissionRejected():
                self.appends.on_rejected(effect.token, effect.error)
            case stream_events.MarkAdvanced():
                self._on_mark_advanced(effect.high_water_mark)
            case stream_events.FeedAdvanced():
                if self.applier is not None:
                    self.applier.queue_range(effect.ids, effect.headers, effect.last)
            case stream_events.FeedLagging():
                if self.fetch is not None:
                    self._spawn(self.fetch(effect.feed_mark, effect.high_water_mark), "catch-up")
            case stream_events.OpenLink():
                if self.stream.has_feed:
                    self._outage.note_failure(self.stream.failure)
                self._spawn(self._open_link(effect), "link")
            case stream_events.StreamReady():
                self._outage.note_success()
                _complete_futures(self._mount_waiters)
            case stream_events.RequestClientId():
                self._spawn(self._renew_client_id(), "client-id")
            case stream_events.StreamStopped():
                self._on_stream_stopped(effect.error)
            case Report():
                raise AssertionError("the driver handles reports")
            case _:
                assert_never(effect)

    def _send_message(self, link: ServerLink, message: ClientMessage) -> None:
        if isinstance(message, AppendRequest | AppendBatch) and _log.isEnabledFor(logging.DEBUG):
            _log.debug("client.append_sent request=%s", message.req_id)
        link.send(message)

    def _spawn(self, task: Coroutine[Any, Any, None], name: str) -> None:
        self._services.spawn(task, f"{name}-{self.partition_id}")

    async def _open_link(self, effect: stream_events.OpenLink) -> None:
        services, attempt = self._services, effect.attempt
        try:
            owner = await services.directory.owner(self.partition_id, after_failure=attempt > 1)
            if services.claim is not None:
                await (
                    services.claim.check()
                )  # check after the generation was read (write_claim.py, rule 2)
            link = await services.links.get(owner.address, excluded=effect.avoided_links)
            self._check_claim(link)
            identity: ClientIdentity | None = None
            if self.stream.needs_client_id:
                identity = await services.ids.get(link, replaced_id=self.stream.client_id)
        except Exception as error:  # noqa: BLE001 - the stream waits for exactly one outcome
            self._driver.post(stream_events.LinkFailed(attempt, _as_retriable_error(error)))
            return
        if attempt != self.stream.attempt:
            return  # a later attempt has begun meanwhile
        if self._link is not None and self._link is not link:
            self._link.release_stream(self.partition_id)

        def check_ownership(on_result: Callable[[bool], None]) -> None:
            self._spawn(self._verify_owner(owner, on_result), "owner")

        link.attach_stream(
            self.partition_id,
            self._on_message_received,
            self._on_link_lost,
            self._is_waiting,
            check_ownership,
        )
        self._link = link
        if identity is not None:
            self._driver.post(stream_events.ClientIdRenewed(*identity))
        sequence = services.next_connection_sequence()
        self._driver.post(
            stream_events.LinkOpened(
                attempt,
                link.number,
                owner.generation,
                sequence,
                link.supports_pipelining,
                link.issues_client_ids,
            )
        )

    def _check_claim(self, link: ServerLink) -> None:
        if link.is_legacy_server and self._services.claim is not None:
            raise legacy_server_stream.exactly_once_error(link.address)

    async def _verify_owner(self, expected_owner: Owner, on_result: Callable[[bool], None]) -> None:
        """Report whether the owner is unchanged, because a 0.13 server cannot prove this itself."""
        current_owner: Owner | None = None
        try:
            current_owner = await self._services.directory.read_current_owner(self.partition_id)
        except errors.WaltzError as error:
            _log.info("client.owner_read_failed partition=%d error=%s", self.partition_id, error)
        on_result(current_owner == expected_owner)

    async def _renew_client_id(self) -> None:
        if self._services.claim is not None:
            self._on_machine_failed(
                errors.TooLarge(
                    "a task of an exactly-once write has used all sequence numbers of its "
                    "request IDs. Hint: use more tasks."
                )
            )
            return
        pause_s = self._services.config.retry_interval_ms_min / 1000
        while self._stop_error is None:
            assert self._link is not None  # appends were sent on it
            try:
                identity = await self._services.ids.get(
                    self._link, replaced_id=self.stream.client_id, is_used_up=True
                )
            except errors.Unavailable as error:
                _log.warning(
                    "client.id_request_failed partition=%d error=%s", self.partition_id, error
                )
                await asyncio.sleep(pause_s)
                continue
            except errors.WaltzError as error:
                self._on_machine_failed(error)
                return
            self._driver.post(stream_events.ClientIdRenewed(*identity))
            return

    def _is_waiting(self) -> bool:
        """Whether the partition waits for its server; False after a failure."""
        if self._stop_error is not None:
            return False
        return self.stream.phase in (Phase.MOUNTING, Phase.SETTLING) or self.stream.has_pending

    def _on_message_received(self, link: int, message: ClientMessage) -> None:
        if isinstance(message, AppendResult) and _log.isEnabledFor(logging.DEBUG):
            _log.debug(
                "client.append_answered request=%s rows=%d committed=%s",
                message.req_id,
                len(message.reasons),
                committed_ids_text(message),
            )
        self._driver.post(stream_events.MessageReceived(link, message))

    def _on_link_lost(self, link: int, reason: str) -> None:
        self._driver.post(stream_events.LinkLost(link, reason))

    def _on_mark_advanced(self, mark: TransactionId) -> None:
        for future in [
            waiter for waiter, awaited_mark in self._mark_waiters.items() if awaited_mark <= mark
        ]:
            del self._mark_waiters[future]
            if not future.done():
                future.set_result(None)

    def _on_stream_stopped(self, error: errors.WaltzError) -> None:
        self._stop_error = error
        self._applier_changed.set()
        waiting, self._mount_waiters = self._mount_waiters, {}
        for future in waiting:
            if not future.done():
                future.set_exception(error)
        _complete_futures(self._mark_waiters)
        if self.applier is not None:
            self._spawn(self.applier.stop(error), "feed-stop")

    def _on_machine_failed(self, error: Exception) -> None:
        """Process an error that the machine raised: a bug, or a log that contradicts itself."""
        known_error = error if isinstance(error, errors.WaltzError) else None
        cause = (
            f"the client's state machine for partition {self.partition_id} has failed: "
            f"{known_error or repr(error)}"
        )
        self._on_stream_stopped(known_error or errors.WaltzError(cause))
        self.appends.abandon(errors.OutcomeUnknown(cause))


def stream_settings(config: ClientConfig) -> StreamSettings:
    """Return the settings of a stream, from those of its client."""
    return StreamSettings(
        request_timeout_ms=config.request_timeout_ms,
        mount_timeout_ms=config.mount_timeout_ms,
        retry_interval_ms_min=config.retry_interval_ms_min,
        retry_interval_ms_max=config.retry_interval_ms_max,
        range_bytes_max=config.range_bytes_max,
        in_flight_bytes_max=config.in_flight_bytes_max,
        feed_ahead_max=config.feed_prefetch_count_max,
    )


def _as_retriable_error(error: Exception) -> errors.WaltzError:
    """Convert a protocol error (the peer is no Waltz server) to Unreachable, for a retry."""
    if isinstance(error, errors.WaltzError) and not isinstance(error, errors.ProtocolError):
        return error
    return errors.Unreachable(
        f"the client is not connected to the server of the partition: {error!r}"
    )


def _complete_futures(waiting: MutableMapping[asyncio.Future[None], Any]) -> None:
    for future in waiting:
        if not future.done():
            future.set_result(None)
    waiting.clear()
