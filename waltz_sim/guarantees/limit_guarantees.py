"""Checks of limits: queues, bytes in flight, and rates of retries.

An unbounded queue or a retry without a delay breaks no guarantee about the log, but is a bug.

Rules:
    1. Bytes in flight are the bytes that were sent and not yet answered. Queues are measured by
       their content.
    2. Attempts are counted over windows of one virtual second.
"""

from collections import deque
from typing import TYPE_CHECKING, Final

from waltz_core.replication import session_events
from waltz_core.server.locking.lock_table_loader import FETCHES_IN_FLIGHT_MAX
from waltz_core.server.read.read_ahead import PREFETCH_BYTES_MAX
from waltz_core.storage.service.lane import REQUEST_OVERHEAD_BYTES
from waltz_core.wire.messages import AppendRaw, StorageMessage

if TYPE_CHECKING:
    from waltz_core.records.record import SessionId
    from waltz_sim.cluster.simulated_servers import SimServer
    from waltz_sim.cluster.simulated_storages import SimStorage
    from waltz_sim.guarantees.checker_state import CheckerState

SECOND_US: Final = 1_000_000
# The number of bytes by which one frame may exceed a limit.
FRAME_BYTES: Final = 16 * 1024
# Limits per virtual second, several times the usual rate: delays begin at about 20 ms and double.
CLAIMS_PER_S_MAX: Final = 20
DIALS_PER_S_MAX: Final = 50
# The limit of a storage's queue. Two sessions may exceed it, each by the bytes that it sends before
# an answer arrives.
QUEUE_BYTES_MAX: Final = 64 * 1024


class LimitGuarantees:
    """Checks all limits of one world (26 Bounded)."""

    def __init__(self, state: "CheckerState") -> None:
        self._state = state
        self._attempt_times: dict[tuple[str, str], deque[int]] = {}
        self._unanswered_bytes: dict[tuple[SessionId, str], dict[int, int]] = {}

    # ---- attempts (rule 2)

    def count_attempt(self, actor: str, action: str, limit: int) -> None:
        """Count an attempt by a component; fail after more than `limit` attempts in a second."""
        times = self._attempt_times.setdefault((actor, action), deque())
        now_us = self._state.world.now_us
        times.append(now_us)
        while times[0] <= now_us - SECOND_US:
            times.popleft()
        if len(times) > limit:
            self._state.fail("Bounded", f"{actor}: {len(times)} times {action} within a second")

    def on_dial(self, actor: str, peer: str) -> None:
        """Count an attempt to open a connection."""
        self.count_attempt(actor, f"dialing {peer}", DIALS_PER_S_MAX)

    def on_store_effect(self, server: str, effect: session_events.Effect) -> None:
        """Count reads of the metadata (one per session claim); forget closed connections."""
        if isinstance(effect, session_events.ReadMetadata):
            self.count_attempt(server, "reading the metadata", CLAIMS_PER_S_MAX)
        elif isinstance(effect, session_events.CloseReplica):
            self._unanswered_bytes.pop((effect.session_id, effect.replica), None)

    # ---- bytes (rule 1)

    def on_sent_to_replica(self, effect: session_events.SendToReplica) -> None:
        """Add the bytes of an append that is sent to a replica; check the total."""
        message = effect.message
        if not isinstance(message, AppendRaw):
            return
        key = effect.session_id, effect.replica
        unanswered = self._unanswered_bytes.setdefault(key, {})
        unanswered[message.sequence] = len(message.records)
        total = sum(unanswered.values())
        limit = self._state.cluster.store_limits.lag_bytes_max + FRAME_BYTES
        if total > limit:
            self._state.fail(
                "Bounded", f"{effect.replica} has {total} unanswered bytes, {limit} allowed"
            )

    def on_replica_response(
        self, session: "SessionId", replica: str, answer: StorageMessage
    ) -> None:
        """Subtract the bytes of an append that a replica has answered."""
        unanswered = self._unanswered_bytes.get((session, replica))
        if unanswered is not None:
            unanswered.pop(answer.sequence, None)

    def on_work_done(self, storage: "SimStorage") -> None:
        """Check the queues of a storage."""
        lag_bytes_max = self._state.cluster.store_limits.lag_bytes_max
        service = storage.service
        if service is None:
            return
        # Each of two sessions may exceed the limit of the queue by two amounts: the records that it
        # sends before an answer arrives (the lag), and one more read, because only the arrival of
        # this read pauses the connection. A read counts with the size of its answer. The queue also
        # counts `REQUEST_OVERHEAD_BYTES` for each request, which the comparison below subtracts.
        limit = QUEUE_BYTES_MAX + 2 * (lag_bytes_max + FRAME_BYTES + PREFETCH_BYTES_MAX)
        held = service.queue_limits
        for queued_bytes in (held.owner_bytes, held.reader_bytes):
            if queued_bytes - REQUEST_OVERHEAD_BYTES * service.queued_count > limit:
                self._state.fail(
                    "Bounded", f"{storage.name}: {queued_bytes} bytes queued, {limit} allowed"
                )

    def on_server_stepped(self, server: "SimServer") -> None:
        """Check the queue, the bytes in flight and the fetches of a server."""
        partition, limits = server.partition, self._state.cluster.limits
        if partition is None:
            return
        pipeline = partition.pipeline
        queued, queued_max = pipeline.queued_bytes, 2 * limits.queue_bytes_max
        in_flight_bytes, in_flight_bytes_max = (
            pipeline.in_flight_bytes,
            2 * limits.in_flight_bytes_max,
        )
        fetches, concurrent_fetches_max = (
            server.fetch_count,
            limits.concurrent_fetches_max + FETCHES_IN_FLIGHT_MAX,
        )
        if queued > queued_max:
            self._fail_over_limit(server, f"{queued} bytes queued, {queued_max} allowed")
        if in_flight_bytes > in_flight_bytes_max:
            self._fail_over_limit(
                server, f"{in_flight_bytes} bytes in flight, {in_flight_bytes_max} allowed"
            )
        if fetches > concurrent_fetches_max:
            self._fail_over_limit(server, f"{fetches} fetches, {concurrent_fetches_max} allowed")

    def _fail_over_limit(self, server: "SimServer", message: str) -> None:
        self._state.fail("Bounded", f"{server.name}: {message}")
