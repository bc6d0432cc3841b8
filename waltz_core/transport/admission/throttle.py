"""Applies the limits of a principal to a connection's requests, which wait or are rejected.

A throttle is placed between a link and its user (the daemon's code that processes requests). Only
connections of principals with limits have a throttle.

The quota is a token bucket. A request is *charged* for its cost, and waits until the cost is
*paid*: the bucket has refilled at the rate of the limit.

Rules (decision 048, AC 10):
    1. All requests are passed on in the order of arrival, including requests over a limit. For a
       request over a limit, `denial` returns the error. The user rejects an append over a limit in
       its partition, so that later appends do not overtake it.
    2. While a request waits, the connection is not read. After a rejection, the connection is not
       read until the quota permits further rejections.
    3. A request is charged before it waits. Timers are coarse, so a wait below `SLACK_NS` is
       skipped, and the next wait is longer by the skipped time.
    4. After an append over a limit, the partition rejects the client's further appends until its
       next mount. So the throttle rejects these appends, too, and does not charge them.
    5. A range is charged when it is sent. A range has at most the bytes that the limit permits in a
       quarter of a second, but may always have 64 KiB (`RANGE_BYTES_MIN`). Without this bound,
       concurrent ranges could use the rate of many seconds in advance.
    6. A feed counts towards the limit of feeds from its request on. The feed no longer counts when
       its mount fails, or when a later mount without a feed succeeds. Errors of other requests do
       not change the count. The peer chooses the IDs of its requests, and may use an ID twice. So
       a successful mount counts as a feed if it is not known as pending.
    7. A part of a feed is charged when it is sent: `FEED_HEADER_BYTES` for each transaction,
       including transactions that a filter leaves out. The connection's feeds pause until the part
       is paid. The part is paid in shares, and the shares take turns with requests. So all feeds of
       a principal together delay a request by at most a quarter of a second. A flood of requests
       does not stop the feeds. If the limit changes, the present share is paid within a second.
    8. If a timer fails, the connection ends. Without this rule, it would wait forever.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Final

import numpy as np

from waltz_core.access.quotas import REQUEST_BYTES_MIN, SECOND_NS, CountedFeedKey, Quota
from waltz_core.errors import Overloaded
from waltz_core.records.raw_records import FEED_HEADER_BYTES
from waltz_core.wire.messages import (
    AppendBatch,
    AppendRequest,
    ClientMessage,
    ErrorResponse,
    FeedBatch,
    Message,
    Mounted,
    MountOutcome,
    MountRequest,
    MountResponse,
    MountState,
    MountWriter,
    RangeBytes,
    RangeData,
    RangeRaw,
    RangeRequest,
    TransactionDataResponse,
)
from waltz_core.wire.record_locations import LOCATIONS

if TYPE_CHECKING:
    from waltz_core.access.permissions import PrincipalLimits
    from waltz_core.records.record import ReqId
    from waltz_core.transport.admission.connection_access import ConnectionAccess

_log = logging.getLogger(__name__)

SLACK_NS: Final = SECOND_NS // 100
REJECTED_WRITERS_MAX: Final = 1_000
MOUNTS_MAX: Final = 10_000
RANGE_SHARE: Final = 4
RANGE_BYTES_MIN: Final = 64 * 1024


class _MountKind(Enum):
    NEW = 1
    AGAIN = 2  # the feed already counts, maybe for another connection
    WITHOUT_FEED = 3


class Throttle:
    """Delays or rejects the requests and feeds of one connection.

    `pass_on` receives the requests whose turn has come, and must not call the throttle.
    `resume_feeds` is called when a pause of feeds ends.
    """

    def __init__(
        self,
        access: "ConnectionAccess",
        pass_on: Callable[[list[Message]], None],
        resume_feeds: Callable[[], None],
    ) -> None:
        self._access = access
        self._pass_on = pass_on
        self._resume_feeds = resume_feeds
        self._waiting: deque[Message] = deque()
        self._is_charged = False  # whether the first waiting request is charged (rule 3)
        self._waiting_since_ns = 0  # when the first of these requests arrived
        self._has_rejected = False
        self._rejected_writers: dict[CountedFeedKey, None] = {}  # rule 4
        self._mounts: dict[ReqId, _MountKind] = {}  # mounts without an answer (rule 6)
        self._timer: asyncio.TimerHandle | None = None
        self._unpaid_bytes = 0  # the unpaid bytes of feeds (rule 7)
        self._feed_timer: asyncio.TimerHandle | None = None
        # The last share of feeds: its quota and limits, and the time at which it is paid.
        self._last_share: tuple[Quota, PrincipalLimits, int]

    @property
    def is_pausing(self) -> bool:
        """Whether the connection must not be read (rule 2)."""
        return self._timer is not None

    @property
    def is_pausing_feeds(self) -> bool:
        """Whether the connection's feeds must not send (rule 7)."""
        return self._feed_timer is not None

    def receive(self, messages: list[Message]) -> None:
        """Queue requests that have arrived, and pass on all that need not wait."""
        if not self._waiting:
            self._waiting_since_ns = self._access.now_ns
        self._waiting.extend(messages)
        if self._timer is None:
            self._process_waiting()

    def stop(self) -> None:
        """Drop the waiting requests, because the connection is closed."""
        for timer in (self._timer, self._feed_timer):
            if timer is not None:
                timer.cancel()
        self._timer = self._feed_timer = None
        self._waiting.clear()

    def _call_after(self, pause_ns: int, call: Callable[[], None]) -> asyncio.TimerHandle:
        loop = asyncio.get_running_loop()
        return loop.call_later(pause_ns / SECOND_NS, self._call_guarded, call)

    def _call_guarded(self, call: Callable[[], None]) -> None:
        """Run a timer callback; if it raises an error, end the connection (rule 8)."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - rule 8
            _log.exception("net.throttle_failed peer=%s", self._access.peer)
            self.stop()
            self._access.end_after_failure(error)

    def _process_waiting(self) -> None:
        self._timer = None
        now_ns, pause_ns = self._access.now_ns, 0
        passed_requests: list[Message] = []
        while self._waiting:
            message = self._waiting[0]
            wait_ns = 0 if self._is_charged else self._charge_request(message, now_ns)
            self._is_charged = wait_ns > SLACK_NS
            if self._is_charged:
                pause_ns = wait_ns
                break
            passed_requests.append(self._limit_range(self._waiting.popleft()))
        quota = self._access.quota
        if self._has_rejected and not pause_ns and quota is not None:
            pause_ns = quota.rejection_wait_ns(now_ns)
        self._has_rejected = False
        if pause_ns:
            self._timer = self._call_after(pause_ns, self._process_waiting)
        self._pass_on(passed_requests)

    def _charge_request(self, message: Message, now_ns: int) -> int:
        """Charge a request, or mark it as over a limit.

        Return the nanoseconds that it must wait.
        """
        quota = self._access.quota
        if quota is None:
            return 0
        append_key = None
        if isinstance(message, AppendRequest | AppendBatch):
            append_key = _feed_key(message)
        wait_or_error = quota.begin_request(
            now_ns,
            size_bytes=_size_bytes(message),
            is_append=append_key is not None,
            waited_ns=now_ns - self._waiting_since_ns,
            has_rejected_append=append_key in self._rejected_writers,
        )
        if isinstance(wait_or_error, Overloaded):
            if append_key is not None:
                self._note_rejected_writer(append_key)
            self._reject(message, wait_or_error, quota, now_ns)
            return 0
        feed_error = self._count_feed(message, quota)
        if feed_error is not None:
            self._reject(message, feed_error, quota, now_ns)
        return wait_or_error

    def _reject(self, message: Message, error: Overloaded, quota: Quota, now_ns: int) -> None:
        self._access.mark_over_limit(message, error)
        quota.charge_rejection(_size_bytes(message), now_ns)
        self._has_rejected = True

    def _note_rejected_writer(self, key: CountedFeedKey) -> None:
        if len(self._rejected_writers) >= REJECTED_WRITERS_MAX:
            # From now on, these clients' appends are charged, although their partitions reject
            # them.
            self._rejected_writers.clear()
        self._rejected_writers[key] = None

    def _count_feed(self, message: Message, quota: Quota) -> Overloaded | None:
        if isinstance(message, MountWriter | MountRequest):
            self._rejected_writers.pop(_feed_key(message), None)
        if isinstance(message, MountWriter) and not message.wants_feed:
            self._mounts.setdefault(message.req_id, _MountKind.WITHOUT_FEED)
        elif isinstance(message, MountWriter | MountRequest):
            key, mount = _feed_key(message), _MountKind.AGAIN
            if key not in quota.feeds:
                error, mount = quota.begin_feed(key, self._access), _MountKind.NEW
                if error is not None:
                    return error
            self._mounts.setdefault(message.req_id, mount)
        if len(self._mounts) > MOUNTS_MAX:  # a mount that a 0.13 client replaces gets no answer
            self._access.end_over_limit()
        return None

    def _on_mounted(self, key: CountedFeedKey, mount: "_MountKind | None", quota: Quota) -> None:
        if mount is _MountKind.WITHOUT_FEED:
            quota.end_feed(key, self._access)
        elif quota.begin_feed(key, self._access) is not None:
            self._access.end_over_limit()  # the peer has used the request ID of another mount

    def _limit_range(self, message: Message) -> Message:
        """Return the request; if it asks for a range, limit the size of the range (rule 5)."""
        quota = self._access.quota
        if quota is None or not isinstance(message, RangeRequest | RangeRaw):
            return message
        per_s = quota.limits.bytes_per_s
        if per_s is None or self._access.is_over_limit(message):
            return message
        bytes_max = max(per_s // RANGE_SHARE, RANGE_BYTES_MIN)
        return replace(message, bytes_max=min(message.bytes_max, bytes_max))

    def on_sent(self, answer: Message) -> None:
        """Charge a range or a part of a feed (rules 5 and 7), or stop counting a failed feed."""
        quota = self._access.quota
        if quota is None:
            return
        match answer:
            case RangeBytes(form=form) if form == LOCATIONS:  # the reader opens the files
                lengths = np.frombuffer(answer.lengths, dtype=">i4")
                quota.charge_sent_bytes(int(lengths.sum(dtype=np.int64)), self._access.now_ns)
            case RangeData() | RangeBytes():
                quota.charge_sent_bytes(_range_bytes(answer), self._access.now_ns)
            case FeedBatch():
                self.on_feed_sent(answer.count * FEED_HEADER_BYTES)
            case TransactionDataResponse(result=(bytes() | memoryview() as data, _)):
                quota.charge_sent_bytes(len(data), self._access.now_ns)
            case Mounted() | MountResponse(state=MountState.READY) | MountOutcome(is_ready=True):
                mount = self._mounts.pop(answer.req_id, None)
                self._on_mounted(_feed_key(answer), mount, quota)
            case ErrorResponse() | MountResponse() | MountOutcome():
                if self._mounts.pop(answer.req_id, None) is _MountKind.NEW:
                    quota.end_feed(_feed_key(answer), self._access)
            case _:
                pass

    def on_feed_sent(self, size_bytes: int) -> None:
        """Charge the bytes of a part of a feed (rule 7)."""
        self._unpaid_bytes += size_bytes
        if self._feed_timer is None:
            self._charge_feeds()

    def _charge_feeds(self) -> None:
        """Pay for the bytes that feeds have sent, until a share must wait."""
        self._feed_timer = None
        quota = self._access.quota
        while quota is not None and self._unpaid_bytes:
            size_bytes = min(self._unpaid_bytes, self._feed_share_bytes(quota))
            self._unpaid_bytes -= size_bytes
            wait_ns = quota.charge_sent_bytes(size_bytes, self._access.now_ns)
            if wait_ns > SLACK_NS:
                self._last_share = quota, quota.limits, self._access.now_ns + wait_ns
                self._wait_for_share(wait_ns)
                return
        self._unpaid_bytes = 0

    def _wait_for_share(self, wait_ns: int) -> None:
        self._feed_timer = self._call_after(min(wait_ns, SECOND_NS), self._retry_charge)

    def _retry_charge(self) -> None:
        """Continue when the last share is paid, or when the limits have changed (rule 7)."""
        quota, limits, paid_at_ns = self._last_share
        wait_ns = paid_at_ns - self._access.now_ns
        if wait_ns > SLACK_NS and self._access.quota is quota and quota.limits == limits:
            self._wait_for_share(wait_ns)
            return
        self._charge_feeds()
        if self._feed_timer is None:
            self._resume_feeds()

    def _feed_share_bytes(self, quota: Quota) -> int:
        per_s = quota.limits.bytes_per_s
        if per_s is None:
            return self._unpaid_bytes
        return max(per_s // RANGE_SHARE // max(len(quota.connections), 1), REQUEST_BYTES_MIN)

    def on_feeds_ended(self, partition_id: int) -> None:
        """Stop counting the feeds of a partition that the daemon no longer serves."""
        quota = self._access.quota
        if quota is not None:
            for key in [feed_key for feed_key in quota.feeds if feed_key[0] == partition_id]:
                quota.end_feed(key, self._access)


def _feed_key(message: ClientMessage) -> CountedFeedKey:
    return message.req_id.partition_id, message.req_id.client_id


def _range_bytes(answer: RangeData | RangeBytes) -> int:
    """Return the bytes to charge for a range; transactions that a filter leaves out count, too."""
    size_bytes = len(answer.records) + len(answer.lengths)
    if isinstance(answer, RangeData) and answer.lineage:  # otherwise: only the client's own headers
        return max(size_bytes, (answer.next - answer.first) * FEED_HEADER_BYTES)
    return size_bytes


def _size_bytes(message: Message) -> int:
    if isinstance(message, AppendBatch):
        return len(message.payload)
    return len(message.data) if isinstance(message, AppendRequest) else 0
