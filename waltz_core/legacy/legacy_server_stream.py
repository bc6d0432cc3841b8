"""One partition at a 0.13 server: translates between a stream and protocol version 3 or 4.

A 0.13 server does not acknowledge appends, and never answers some requests. Therefore this module
and `legacy_server_appends.py` infer the outcome of an append from the feed. No other module depends
on these inferences (docs/design/wire-format.md 2, decision 022).

Rules (1 to 3 and 7: `legacy_server_appends.py`):
    4. All other rows are settled by a flush:
       - The server answers the flush with its high-water mark. If the feed reaches this mark
         without the row, the row is not in the log.
       - A server that has lost the partition without noticing may answer with an old mark. So the
         owner is read from ZooKeeper afterwards (`CheckOwnership`). The row is settled only if the
         server is still the owner.
       - Each mount also sends a flush, which settles the rows of earlier connections.
    5. All mounts of one connection have the connection sequence of the first mount, because the
       server stores this sequence as long as the connection exists. If the server does not answer a
       mount, it has dropped this mount, and would drop all later mounts of the connection.
       Therefore this module closes the connection.
    6. A 0.13 server does not check that the high-water mark of a row exists in its log. So if the
       mark of a row is above all known transactions, this module first requests the server's mark.
       The row is sent if the server's mark has reached the row's mark, and is rejected otherwise.
    8. While rows are in flight, this module requests the feed continuously, because the feed shows
       their outcomes. At other times, this module requests only the part of the feed that the
       stream requests.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Final, TypeAlias

from waltz_core import errors
from waltz_core.legacy.legacy_server_appends import LegacyAppends
from waltz_core.legacy.legacy_server_rows import FeedRun, LegacyRow, SubmissionRows, split_into_rows
from waltz_core.records.record import (
    BEFORE_FIRST,
    NO_SESSION,
    RECORD_HEADER,
    PartitionId,
    ReqId,
    TransactionId,
)
from waltz_core.values import value
from waltz_core.wire import messages
from waltz_core.wire.messages import (
    LATEST_MARK,
    ClientMessage,
    MountState,
    RangeForm,
    RowOutcomeCode,
)

VERSION_MAX: Final = 4  # the last version of the client protocol of 0.13
# If rows are in flight without an outcome for this time, a flush is sent. The 0.13 client has
# the same limit.
FLUSH_AFTER_MS: Final = 5_000
# The interval at which the mark is requested. The interval is needed because a server that does not
# own the partition does not answer.
RETRY_MS: Final = 500
# The limits for the stream, because a 0.13 server states none. Only few bytes may be in flight.
# Further appends wait in the client's outbox, because they can be withdrawn from there
# (`outbox.py`).
BATCH_ROWS_MAX: Final = 10_000
BATCH_BYTES_MAX: Final = 8 * 1024 * 1024
IN_FLIGHT_BYTES_MAX: Final = 1024 * 1024


@value(frozen=True, slots=True)
class SendToServer:
    """Send these messages to the server."""

    messages: list[ClientMessage]


@value(frozen=True, slots=True)
class SendToStream:
    """Pass this message to the partition's stream."""

    message: ClientMessage


@value(frozen=True, slots=True)
class CheckOwnership:
    """Read the partition's owner from ZooKeeper.

    The answer is `OwnershipChecked` with the same number.
    """

    partition_id: PartitionId
    number: int


@value(frozen=True, slots=True)
class CloseLink:
    """Close the connection, because the server drops all messages that are sent on it."""

    reason: str


Effect: TypeAlias = SendToServer | SendToStream | CheckOwnership | CloseLink


class _Phase(Enum):
    IDLE = auto()
    REQUESTING = auto()  # waiting for the server's high-water mark
    MOUNTING = auto()
    FLUSHING = auto()
    CHECKING_OWNER = auto()
    MOUNTED = auto()
    READING = auto()  # mounted once more, to receive the same range again


@dataclass(slots=True)
class _Readback:
    """A range of headers that the stream reads again (`readback.py`)."""

    request: messages.RangeRequest
    next_id: int
    records: bytearray = field(default_factory=bytearray)


@dataclass(slots=True)
class _Flush:
    """A flush for rows that have been in flight for too long."""

    req_id: ReqId
    number: int  # the number of the last row that was sent before the flush
    mark: TransactionId | None = None  # known once the server has answered
    is_checking_owner: bool = False


class LegacyServerPartition:
    """One partition on one connection to a 0.13 server, by the module's rules."""

    def __init__(self, partition_id: PartitionId) -> None:
        self._partition_id = partition_id
        self._phase = _Phase.IDLE
        self._mount: messages.MountWriter | None = None
        self._feed_run: FeedRun | None = None  # None for a mount without a feed
        # The request ID of the newest mount, by which the server identifies its feed.
        self._feed_req_id: ReqId | None = None
        self._mark = BEFORE_FIRST  # the last ID of the feed
        self._last_request_ms = 0
        self._server_mark = BEFORE_FIRST  # the server's mark in its last answer
        self._flush_mark: TransactionId | None = None  # the mark in the answer to the mount's flush
        self._last_check_number = 0
        # The continuations of `CheckOwnership`, by its number (rule 4).
        self._ownership_callbacks: dict[int, Callable[[bool], None]] = {}
        self._is_feed_suspended = False  # The server has sent the requested part of the feed.
        self._is_feed_requested = False  # The stream has requested more of the feed.
        self._readback: _Readback | None = None
        self._appends = LegacyAppends()
        # The row for which the server's mark was requested (rule 6).
        self._mark_req_id: ReqId | None = None
        self._row_awaiting_mark: LegacyRow | None = None
        self._flush: _Flush | None = None
        self._last_flush_ms = 0
        self._effects: list[Effect] = []

    @property
    def wake_at_ms(self) -> int | None:
        """When to call `wake` next; None for never."""
        request_at_ms, flush_at_ms = self._repeat_at_ms, self._flush_at_ms
        if request_at_ms is None or flush_at_ms is None:
            return flush_at_ms if request_at_ms is None else request_at_ms
        return min(request_at_ms, flush_at_ms)

    @property
    def _repeat_at_ms(self) -> int | None:
        is_requested = self._phase is _Phase.REQUESTING or self._mark_req_id is not None
        return self._last_request_ms + RETRY_MS if is_requested else None

    @property
    def _flush_at_ms(self) -> int | None:
        oldest_sent_ms = self._appends.oldest_sent_ms
        if self._flush is not None or oldest_sent_ms is None:
            return None
        return max(oldest_sent_ms, self._last_flush_ms) + FLUSH_AFTER_MS

    # --- events

    def send(self, message: ClientMessage, connection_sequence: int, now_ms: int) -> list[Effect]:
        """Process a message of the stream.

        `connection_sequence` is the sequence of the connection (rule 5). Raises LocalProtocolError
        for a request that 0.13 does not have.
        """
        match message:
            case messages.MountWriter():
                self._request_mount(message, now_ms)
            case messages.RangeRequest():
                self._read_back(message, connection_sequence)
            case messages.FeedRequest():
                self._is_feed_requested = True
                self._request_feed()
            case messages.AppendRequest() | messages.AppendBatch():
                self._append(message, now_ms)
            case _:
                name = type(message).__name__
                raise errors.LocalProtocolError(
                    f"{name}: the protocol of Waltz 0.13 has no such request"
                )
        return self._take_effects()

    def receive(
        self, received: Iterable[ClientMessage], connection_sequence: int, now_ms: int
    ) -> list[Effect]:
        """Process messages from the server for this partition."""
        for message in received:
            match message:
                case messages.FeedData():
                    self._on_feed_received(message)
                case messages.LockFailure():
                    estimate = TransactionId(message.transaction_id)
                    self._appends.on_row_lock_failed(message.req_id, estimate)
                case messages.FeedSuspended():
                    self._on_feed_suspended(message.req_id)
                case messages.MountResponse():
                    self._on_mount_answered(message)
                case messages.FlushResponse():
                    self._on_flush_answered(message, now_ms)
                case messages.HighWaterMarkResponse():
                    self._on_mark_answered(message, connection_sequence)
                case _:
                    pass  # a late answer, which has no effect any more
        self._settle_rows()
        self._send_waiting(now_ms)
        return self._take_effects()

    def on_ownership_checked(self, number: int, *, is_owner: bool, now_ms: int) -> list[Effect]:
        """Continue with ZooKeeper's answer whether the server is still the owner (rule 4)."""
        continuation = self._ownership_callbacks.pop(number, None)
        if continuation is not None:
            self._last_flush_ms = now_ms
            continuation(is_owner)
            self._send_waiting(now_ms)
        return self._take_effects()

    def wake(self, now_ms: int) -> list[Effect]:
        """Request the mark again, if due; send a flush if a row was in flight for too long."""
        repeat_at_ms, flush_at_ms = self._repeat_at_ms, self._flush_at_ms
        if repeat_at_ms is not None and repeat_at_ms <= now_ms:
            self._request_mark(now_ms)
        if flush_at_ms is not None and flush_at_ms <= now_ms:
            req_id = self._appends.newest_request_id
            self._flush = _Flush(req_id, self._appends.sent_count)
            self._send_to_server(messages.FlushRequest(req_id))
        return self._take_effects()

    # --- the mount

    def _request_mount(self, mount: messages.MountWriter, now_ms: int) -> None:
        if self._phase is _Phase.MOUNTING:  # rule 5
            self._effects.append(
                CloseLink(
                    f"the server did not answer the mount of partition {self._partition_id}. "
                    "It may have another connection of this client ID"
                )
            )
            return
        # When a partition is mounted again, no row is in flight on the connection
        # (partition_stream.py, invariant 4).
        self._appends.clear()
        self._ownership_callbacks.clear()
        self._flush = self._readback = self._mark_req_id = self._row_awaiting_mark = (
            self._flush_mark
        ) = None
        self._is_feed_requested = False
        self._mount = mount
        self._feed_run = FeedRun(mount) if mount.wants_feed else None
        self._phase = _Phase.REQUESTING
        self._request_mark(now_ms)

    def _request_mark(self, now_ms: int) -> None:
        req_id = self._mark_req_id
        if req_id is None:
            assert self._mount is not None
            req_id = self._mount.req_id
        self._last_request_ms = now_ms
        self._send_to_server(messages.HighWaterMarkRequest(req_id))

    def _on_mark_answered(
        self, message: messages.HighWaterMarkResponse, connection_sequence: int
    ) -> None:
        mark = TransactionId(message.high_water_mark)
        mount = self._mount
        if (
            mount is not None
            and self._phase is _Phase.REQUESTING
            and message.req_id == mount.req_id
        ):
            if mark < BEFORE_FIRST:
                self._fail_mount("the server has no store session for the partition yet")
                return
            self._server_mark = mark
            is_latest = mount.high_water_mark == LATEST_MARK
            self._mark = mark if is_latest else TransactionId(mount.high_water_mark)
            self._phase = _Phase.MOUNTING
            self._send_mount(mount.req_id, self._mark, connection_sequence)
        elif message.req_id == self._mark_req_id:
            self._mark_req_id = None
            self._server_mark = max(self._server_mark, mark)
            if self._appends.waiting[0].mark > max(self._server_mark, self._mark):  # rule 6
                self._row_awaiting_mark = self._appends.waiting.popleft()
                self._check_ownership(partial(self._on_owner_checked_for_row, mark))

    def _send_mount(self, req_id: ReqId, mark: int, connection_sequence: int) -> None:
        self._feed_req_id = req_id
        self._is_feed_suspended = False
        self._send_to_server(messages.MountRequest(req_id, mark, connection_sequence))

    def _on_mount_answered(self, message: messages.MountResponse) -> None:
        if message.req_id != self._feed_req_id:
            return
        if self._phase is _Phase.READING:
            self._finish_read_back(is_ready=message.state == MountState.READY)
        elif self._phase is not _Phase.MOUNTING:
            return
        elif message.state == MountState.READY:
            self._phase = _Phase.FLUSHING
            self._send_to_server(messages.FeedRequest(message.req_id, self._mark))
            self._send_to_server(messages.FlushRequest(message.req_id))
        elif message.state == MountState.CLIENT_AHEAD and self._mark > self._server_mark:
            text = (
                f"the client's high-water mark {self._mark} is above the log's high-water mark "
                f"{self._server_mark}"
            )
            self._fail_mount(text, errors.ClientAheadOfLog)
        else:
            self._fail_mount("the server is not ready for the partition")

    def _on_mount_owner_checked(self, is_owner: bool) -> None:  # noqa: FBT001 - as `_check_ownership` takes it
        assert self._mount is not None
        if not is_owner:
            self._fail_mount("the partition moved to another server during the mount")
            return
        self._phase = _Phase.MOUNTED
        limits = (BATCH_ROWS_MAX, BATCH_BYTES_MAX, IN_FLIGHT_BYTES_MAX)
        self._pass_to_stream(messages.Mounted(self._mount.req_id, NO_SESSION, self._mark, *limits))

    def _fail_mount(self, text: str, kind: type[errors.WaltzError] = errors.NotOwned) -> None:
        assert self._mount is not None
        self._phase = _Phase.IDLE
        self._reject(self._mount.req_id, text, kind)

    def _reject(self, req_id: ReqId, text: str, kind: type[errors.WaltzError]) -> None:
        text = f"partition {self._partition_id}: {text}"
        self._pass_to_stream(messages.ErrorResponse(req_id, kind.code, kind.retriable, text))

    # --- reading back

    def _read_back(self, request: messages.RangeRequest, connection_sequence: int) -> None:
        if self._phase is not _Phase.MOUNTED or request.form != RangeForm.HEADERS:
            self._reject(request.req_id, "not mounted", errors.NotMounted)
            return
        self._readback = _Readback(request, request.first)
        self._phase = _Phase.READING
        self._send_mount(request.req_id, request.first - 1, connection_sequence)

    def _finish_read_back(self, *, is_ready: bool) -> None:
        """Answer the stream after the server has sent the range again."""
        readback, self._readback = self._readback, None
        assert readback is not None
        request = readback.request
        if not is_ready or readback.next_id <= request.last:
            self._phase = _Phase.IDLE
            self._reject(
                request.req_id, "the server is not ready for the partition", errors.NotOwned
            )
            return
        self._phase = _Phase.MOUNTED
        self._send_to_server(messages.FeedRequest(request.req_id, self._mark))
        self._pass_to_stream(
            messages.RangeData(
                request.req_id,
                request.first,
                readback.next_id - request.first,
                readback.next_id,
                RangeForm.HEADERS,
                b"",
                bytes(readback.records),
                NO_SESSION,
                self._mark,
                (),
            )
        )

    # --- the feed

    def _on_feed_received(self, message: messages.FeedData) -> None:
        transaction_id = TransactionId(message.transaction_id)
        readback = self._readback
        if readback is not None and transaction_id == readback.next_id <= readback.request.last:
            readback.next_id += 1
            req_id = message.req_id.to_bytes()
            readback.records += RECORD_HEADER.pack(transaction_id, req_id, message.header)
        # NB: after a second mount, some transactions arrive twice, because the requested parts of
        # the feed overlap.
        if transaction_id != self._mark + 1 or self._phase in (_Phase.IDLE, _Phase.REQUESTING):
            return
        self._mark = transaction_id
        if self._feed_run is not None:
            self._feed_run.add(message)
        self._answer_submissions(self._appends.on_committed(message.req_id, transaction_id))

    def _on_feed_suspended(self, req_id: ReqId) -> None:
        if req_id != self._feed_req_id:
            return
        self._is_feed_suspended = True
        # Rule 8.
        if self._feed_run is None or self._appends.in_flight or self._phase is not _Phase.MOUNTED:
            self._request_feed()
        if self._is_feed_requested:
            assert self._mount is not None
            self._is_feed_requested = False
            self._pass_to_stream(messages.FeedSuspended(self._mount.req_id))

    def _request_feed(self) -> None:
        if self._is_feed_suspended and self._feed_req_id is not None:
            self._is_feed_suspended = False
            self._send_to_server(messages.FeedRequest(self._feed_req_id, self._mark))

    # --- appends

    def _append(self, message: messages.AppendRequest | messages.AppendBatch, now_ms: int) -> None:
        try:
            self._appends.waiting += split_into_rows(message)
        except errors.UsageError as error:  # as a current server rejects it
            self._reject(message.req_id, str(error), type(error))
        self._send_waiting(now_ms)

    def _send_waiting(self, now_ms: int) -> None:
        appends = self._appends
        while (
            appends.can_send
            and self._phase is _Phase.MOUNTED
            and self._mark_req_id is None
            and self._row_awaiting_mark is None
        ):
            row = appends.waiting[0]
            if row.mark > max(self._mark, self._server_mark):
                self._mark_req_id = row.request.req_id
                self._request_mark(now_ms)
                break
            self._send_to_server(appends.send(now_ms))
        if appends.in_flight:
            self._request_feed()

    def _on_flush_answered(self, message: messages.FlushResponse, now_ms: int) -> None:
        mark = TransactionId(message.high_water_mark)
        if self._phase is _Phase.FLUSHING and message.req_id == self._feed_req_id:
            if mark < BEFORE_FIRST:
                self._fail_mount("the server no longer has a store session for the partition")
            else:
                self._flush_mark = mark
        elif self._flush is None or message.req_id != self._flush.req_id:
            return
        elif mark < BEFORE_FIRST:
            self._flush, self._last_flush_ms = None, now_ms
        else:
            self._flush.mark = mark

    def _on_flush_owner_checked(self, is_owner: bool) -> None:  # noqa: FBT001 - as `_check_ownership` takes it
        flush, self._flush = self._flush, None
        assert flush is not None
        if is_owner:
            # The server has dropped the rows, or has lost them with a store session. A new mount
            # shows whether the client may write.
            self._answer_submissions(
                self._appends.end_rows_up_to(flush.number, RowOutcomeCode.NOT_MOUNTED)
            )

    def _on_owner_checked_for_row(self, mark: TransactionId, is_owner: bool) -> None:  # noqa: FBT001
        row, self._row_awaiting_mark = self._row_awaiting_mark, None
        assert row is not None
        # The mark is valid only from an owner with a store session. A server that has lost the
        # partition reports an old mark, and a server without a session reports none.
        is_known = is_owner and mark >= BEFORE_FIRST
        if row.on_rejected(RowOutcomeCode.AHEAD if is_known else RowOutcomeCode.NOT_MOUNTED):
            self._answer_submissions([row.submission])

    def _settle_rows(self) -> None:
        """Settle the rows whose outcome follows from the feed's position (rules 3 and 4)."""
        self._answer_submissions(self._appends.end_rejected_rows(self._mark))
        if self._phase is _Phase.FLUSHING and _has_reached(self._flush_mark, self._mark):
            self._phase = _Phase.CHECKING_OWNER
            self._check_ownership(self._on_mount_owner_checked)
        flush = self._flush
        if (
            flush is not None
            and not flush.is_checking_owner
            and _has_reached(flush.mark, self._mark)
        ):
            flush.is_checking_owner = True
            self._check_ownership(self._on_flush_owner_checked)

    def _check_ownership(self, continuation: Callable[[bool], None]) -> None:
        self._last_check_number += 1
        self._ownership_callbacks[self._last_check_number] = continuation
        self._effects.append(CheckOwnership(self._partition_id, self._last_check_number))

    def _answer_submissions(self, submissions: Iterable[SubmissionRows]) -> None:
        for submission in submissions:
            # All estimates are IDs of transactions in the log, even if the feed has not reached
            # them.
            mark = max(self._mark, *submission.conflicting)
            self._pass_to_stream(submission.result(TransactionId(mark)))

    # --- out

    def _send_to_server(self, message: ClientMessage) -> None:
        last = self._effects[-1] if self._effects else None
        if isinstance(last, SendToServer):  # sent with one system call
            last.messages.append(message)
        else:
            self._effects.append(SendToServer([message]))

    def _pass_to_stream(self, message: ClientMessage) -> None:
        """Pass a message to the stream, after all transactions that arrived before the message."""
        self._pass_feed_run()
        self._effects.append(SendToStream(message))

    def _pass_feed_run(self) -> None:
        batch = None if self._feed_run is None else self._feed_run.take()
        if batch is not None:
            self._effects.append(SendToStream(batch))

    def _take_effects(self) -> list[Effect]:
        self._pass_feed_run()
        effects, self._effects = self._effects, []
        return effects


def exactly_once_error(address: str) -> errors.UsageError:
    """Return the error of an exactly-once write at a 0.13 server."""
    return errors.UsageError(
        f"server {address} runs Waltz 0.13, which does not support exactly-once writes"
    )


def _has_reached(target: TransactionId | None, mark: TransactionId) -> bool:
    return target is not None and target <= mark
