"""One storage in one store session: its connection, unanswered requests, stage and synced log.

This module has all state of the connection, and drops this state when the connection ends. It makes
no decisions about the partition.

Rules:
    1. There is one connection at a time. An answer is matched to its request by sequence number and
       type.
    2. Appends are pipelined in ID order, up to a limit of bytes.
    3. A replica does not return to the session if its log may have changed in an unknown way. The
       first case: its connection was lost while a request that changes the storage was unanswered.
       This request may still arrive later. The second case: the replica was marked, so its log may
       have grown beyond the mark.
    4. Records count as synced when the storage reports the sync, never when the records are sent.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from waltz_core.errors import RemoteProtocolError
from waltz_core.machine import Report
from waltz_core.records.record import (
    BEFORE_FIRST,
    GENESIS_CHAIN,
    Chain,
    PartitionId,
    ReplicaId,
    SessionId,
    TransactionId,
)
from waltz_core.replication.limits import SessionLimits
from waltz_core.replication.session_events import CloseReplica, Effect, OpenReplica, SendToReplica
from waltz_core.replication.window import WindowBatch
from waltz_core.wire import messages
from waltz_core.wire.append_ids import SlowAppends
from waltz_core.wire.messages import StorageMessage

if TYPE_CHECKING:
    from random import Random

    from waltz_core.replication.replica_repair import ReplicaRepair

NO_CORRELATION_ID: Final = -1
# The maximum number of append latencies that are kept. Every second, the metrics take them.
LATENCIES_MAX: Final = 4_096
# A stalled replica answers hundreds of late appends at once; one report per second is enough.
SLOW_APPEND_REPORT_INTERVAL_MS: Final = 1_000

_ANSWER_TYPES: Final[dict[type[StorageMessage], type[StorageMessage]]] = {
    messages.Prepare: messages.Prepared,
    messages.LineageRequest: messages.LineageResponse,
    messages.Truncate: messages.ReplicaEnd,
    messages.RangeRaw: messages.RangeBytes,
    messages.AppendRaw: messages.Appended,
    messages.Repair: messages.ReplicaEnd,
    messages.ResetLog: messages.ReplicaEnd,
    messages.SetLowWaterMark: messages.ReplicaEnd,
    messages.Engage: messages.ReplicaEnd,
    messages.Heartbeat: messages.HeartbeatResponse,
    messages.ArchiveRange: messages.SuccessResponse,
    messages.SetArchived: messages.SuccessResponse,
    messages.CollectGarbage: messages.SuccessResponse,
    messages.ExpireObjects: messages.SuccessResponse,
    messages.ReplaceObject: messages.SuccessResponse,
}
_LOG_CHANGING_REQUESTS: Final = (
    messages.Truncate,
    messages.ResetLog,
    messages.AppendRaw,
    messages.Repair,
    messages.SetLowWaterMark,
    messages.Engage,
)


class ReplicaStage(Enum):
    """The stages of a replica in the session."""

    ABSENT = auto()  # no connection; the next dial is at `redial_at_ms`
    DIALING = auto()
    PREPARING = auto()  # PREPARE was sent
    REPAIRING = auto()  # The replica has answered; its log is not yet equal to the decided log.
    READY = auto()  # The mark is set; ZooKeeper does not record the replica as engaged.
    ENGAGED = auto()  # ZooKeeper records the replica as engaged, so it gets live appends.


MARK_SET_STAGES: Final = (ReplicaStage.READY, ReplicaStage.ENGAGED)
_UNCONNECTED_STAGES: Final = (ReplicaStage.ABSENT, ReplicaStage.DIALING)


@dataclass(slots=True)
class SessionRequest:
    """A request without an answer; the sender defines the meaning of `correlation_id`."""

    message: StorageMessage
    sent_ms: int
    correlation_id: int


class ReplicaSession:
    """One replica in one session, by the rules above; the store session reads its fields."""

    def __init__(
        self,
        replica: ReplicaId,
        session_id: SessionId,
        partition_id: PartitionId,
        *,
        outbox: list[Effect],
        limits: SessionLimits,
    ) -> None:
        self.replica = replica
        self.stage = ReplicaStage.ABSENT
        self.repair: ReplicaRepair | None = None
        self.correlation_id = NO_CORRELATION_ID  # the one repair or copy step in progress
        self.is_broken = False  # The connection is known to be lost.
        self.cannot_rejoin = False  # rule 3
        self.supports_archiving = False  # as PREPARED shows
        self.redial_at_ms = 0
        # The live log at this replica: the last synced ID, and the next ID to send.
        self.synced_last = BEFORE_FIRST
        self.next_id = TransactionId(0)
        self.next_chain: Chain = GENESIS_CHAIN
        self.unanswered_bytes = 0
        # The append latencies while engaged, from sending to answer, until the metrics take them.
        self.append_latencies_ms: deque[int] = deque(maxlen=LATENCIES_MAX)
        self._slow_appends = SlowAppends()  # since the last report
        self.slow_report_at_ms: int | None = None  # when to report the slow appends, if any
        self._next_slow_report_ms = 0
        self._session_id = session_id
        self._partition_id = partition_id
        self._outbox = outbox
        self._limits = limits
        self._redial_ms = limits.redial_ms_min
        self._sequence = 0
        self._requests: dict[int, SessionRequest] = {}

    @property
    def is_connected(self) -> bool:
        """Whether requests can be sent."""
        return self.stage not in _UNCONNECTED_STAGES

    @property
    def is_mark_set(self) -> bool:
        """Whether the session's low-water mark is set in the replica's log."""
        return self.stage in MARK_SET_STAGES

    @property
    def unanswered_count(self) -> int:
        """The number of requests without an answer."""
        return len(self._requests)

    @property
    def is_lagging(self) -> bool:
        """Whether unanswered requests exceed a limit, so that no more appends are sent."""
        limits = self._limits
        is_over = self.unanswered_bytes >= limits.lag_bytes_max
        return is_over or len(self._requests) >= limits.lag_count_max

    @property
    def oldest_request_sent_ms(self) -> int | None:
        """When the oldest request without an answer was sent; None without such a request."""
        first = next(iter(self._requests.values()), None)
        return None if first is None else first.sent_ms

    # -----------------------------------------------------------------------------------------
    # the connection

    def dial(self) -> None:
        """Request a connection to the storage."""
        assert self.stage is ReplicaStage.ABSENT
        self.stage, self.is_broken = ReplicaStage.DIALING, False
        self._outbox.append(OpenReplica(self._session_id, self.replica))

    def close(self) -> None:
        """Close the connection, or stop dialing; report the slow appends not reported yet."""
        if self.slow_report_at_ms is not None:
            self.report_slow_appends(self.slow_report_at_ms)
        if self.stage is not ReplicaStage.ABSENT:
            if not self.is_broken:
                self._outbox.append(CloseReplica(self._session_id, self.replica))
            self._reset_connection_state()

    def on_connection_lost(self, now_ms: int, rng: "Random", *, wait_ms: int = 0) -> None:
        """The connection was lost: dial again after a random pause of at least `wait_ms` / 2."""
        self._reset_connection_state()
        wait_ms = max(wait_ms, self._redial_ms)
        self.redial_at_ms = now_ms + rng.randint(wait_ms // 2, wait_ms)
        self._redial_ms = min(2 * self._redial_ms, self._limits.redial_ms_max)

    def _reset_connection_state(self) -> None:
        unanswered = (type(request.message) for request in self._requests.values())
        may_change = any(kind in _LOG_CHANGING_REQUESTS for kind in unanswered)
        self.cannot_rejoin = self.cannot_rejoin or self.is_mark_set or may_change
        self.stage = ReplicaStage.ABSENT
        self.repair = None
        self.correlation_id = NO_CORRELATION_ID
        self.unanswered_bytes = 0
        self._requests.clear()

    # -----------------------------------------------------------------------------------------
    # requests and answers

    def send_request(
        self,
        kind: Callable[..., StorageMessage],
        *fields: object,
        now_ms: int,
        correlation_id: int = NO_CORRELATION_ID,
    ) -> None:
        """Send a request of type `kind`; `fields` are its fields after the prefix."""
        assert self.is_connected
        self._sequence += 1
        message = kind(self._session_id, self._sequence, self._partition_id, *fields)
        assert type(message) in _ANSWER_TYPES
        if isinstance(message, messages.AppendRaw):
            self.unanswered_bytes += len(message.records) + len(message.locks)
        self._requests[self._sequence] = SessionRequest(message, now_ms, correlation_id)
        self._outbox.append(SendToReplica(self._session_id, self.replica, message))

    def take_request(self, answer: StorageMessage) -> SessionRequest:
        """Remove and return the request that a message answers (rule 1).

        Raises:
            RemoteProtocolError: no request has this sequence number, or the message is of the wrong
                type for the request.
        """
        request = self._requests.pop(answer.sequence, None)
        if request is None:
            raise RemoteProtocolError(
                f"storage {self.replica}: {type(answer).__name__} answers request "
                f"{answer.sequence}, which was not sent"
            )
        expected = _ANSWER_TYPES[type(request.message)]
        if not isinstance(answer, expected | messages.Nack):
            raise RemoteProtocolError(
                f"storage {self.replica}: expected {expected.__name__}, "
                f"found {type(answer).__name__}"
            )
        if isinstance(request.message, messages.AppendRaw):
            self.unanswered_bytes -= len(request.message.records) + len(request.message.locks)
        return request

    # -----------------------------------------------------------------------------------------
    # the log

    def on_mark_written(self, mark: TransactionId, chain: Chain) -> None:
        """The session and the mark are durable: appends continue after the mark."""
        assert self.stage is ReplicaStage.REPAIRING
        self.stage = ReplicaStage.READY
        self.synced_last = mark
        self.next_id = TransactionId(mark + 1)
        self.next_chain = chain
        self._redial_ms = self._limits.redial_ms_min

    def append_from_window(self, window_batch: WindowBatch, now_ms: int) -> None:
        """Send a batch from memory."""
        assert window_batch.chain_before == self.next_chain
        batch = window_batch.batch
        self._send_append(
            (batch.first, batch.lengths, batch.records, batch.records_crc),
            (window_batch.chain_before, (window_batch.entry,), window_batch.lock_block),
            now_ms,
        )
        self.next_id = TransactionId(batch.last + 1)
        self.next_chain = window_batch.entry.chain

    def append_range(self, answer: messages.RangeBytes, chain: Chain, now_ms: int) -> None:
        """Send copied batches; `chain` is the hash chain of the log after them."""
        assert answer.first == self.next_id
        self._send_append(
            (answer.first, answer.lengths, answer.records, answer.records_crc),
            (answer.chain_before, answer.lineage),
            now_ms,
        )
        self.next_id = TransactionId(answer.first + answer.count)
        self.next_chain = chain

    def _send_append(
        self, records: tuple[object, ...], lineage: tuple[object, ...], now_ms: int
    ) -> None:
        assert self.is_mark_set
        self.send_request(messages.AppendRaw, *records, *lineage, now_ms=now_ms)

    def record_latency(self, append: messages.AppendRaw, latency_ms: int, now_ms: int) -> None:
        """Record an append's latency; report slow appends together, at most once per interval."""
        self.append_latencies_ms.append(latency_ms)
        if not 0 < self._limits.slow_append_ms <= latency_ms:
            return
        self._slow_appends.add(append, latency_ms)
        if self.slow_report_at_ms is None:
            self.slow_report_at_ms = max(now_ms, self._next_slow_report_ms)
        self.report_slow_appends(now_ms)

    def report_slow_appends(self, now_ms: int) -> None:
        """Report the slow appends since the last report, if the report is due."""
        if self.slow_report_at_ms is None or now_ms < self.slow_report_at_ms:
            return
        origin_fields = (("session", self._session_id), ("replica", self.replica))
        self._outbox.append(Report("append.slow", (*origin_fields, *self._slow_appends.fields())))
        self._slow_appends, self.slow_report_at_ms = SlowAppends(), None
        self._next_slow_report_ms = now_ms + SLOW_APPEND_REPORT_INTERVAL_MS

    def on_append_synced(self, request: messages.AppendRaw, answer: messages.Appended) -> None:
        """The storage has synced an append (rule 4).

        Raises:
            RemoteProtocolError: the synced ID is below this append, or above all IDs ever sent.
        """
        last = request.lineage[-1].last
        if not last <= answer.synced_max < self.next_id:
            raise RemoteProtocolError(
                f"storage {self.replica}: expected a log that is synced up to a transaction "
                f"in {last}..{self.next_id - 1}, found {answer.synced_max}"
            )
        self.synced_last = max(self.synced_last, TransactionId(answer.synced_max))
