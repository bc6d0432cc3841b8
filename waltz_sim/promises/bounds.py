"""What must stay small: queues, what is in flight, and how often anything is tried again.

A queue that grows and a retry without a pause break no promise about the log, and are faults all
the same.

Rules:
    1. Bytes are counted by what was sent and what was answered; queues by what lies in them.
    2. Tries are counted over windows of one virtual second.
"""

from collections import deque
from typing import TYPE_CHECKING, Final

from waltz_core.replication import session_events
from waltz_core.server.locking.refill import UNDER_WAY_MAX
from waltz_core.storage.service.lane import REQUEST_BYTES
from waltz_core.wire.messages import AppendRaw, StorageMessage

if TYPE_CHECKING:
    from waltz_core.records.record import SessionId
    from waltz_sim.cluster.servers import SimServer
    from waltz_sim.cluster.simulated_storages import SimStorage
    from waltz_sim.promises.witness import Witness

SECOND_US: Final = 1_000_000
# What one frame may add to what was within its limit.
FRAME_BYTES: Final = 16 * 1024
# In one virtual second, several times what is usual: delays begin at about 20 ms and double.
CLAIMS_MAX: Final = 20
DIALS_MAX: Final = 50
# What a storage may have waiting: its own limit, and what two sessions have sent before it hears.
QUEUE_BYTES_MAX: Final = 64 * 1024


class Bounds:
    """All limits."""

    def __init__(self, witness: "Witness") -> None:
        self._witness = witness
        self._times: dict[tuple[str, str], deque[int]] = {}
        self._unanswered: dict[tuple[SessionId, str], dict[int, int]] = {}

    # ---- tries (rule 2)

    def tried(self, who: str, what: str, limit: int) -> None:
        """Somebody tries something; not too often."""
        times = self._times.setdefault((who, what), deque())
        now_us = self._witness.world.now_us
        times.append(now_us)
        while times[0] <= now_us - SECOND_US:
            times.popleft()
        if len(times) > limit:
            self._witness.fail("Bounded", f"{who}: {len(times)} times {what} within a second")

    def dialled(self, who: str, whom: str) -> None:
        """A connection is asked for."""
        self.tried(who, f"dialling {whom}", DIALS_MAX)

    def store_said(self, server: str, effect: session_events.Effect) -> None:
        """A first compare-and-set is asked for, or a connection ends."""
        if isinstance(effect, session_events.ReadMetadata):
            self.tried(server, "reading the metadata", CLAIMS_MAX)
        elif isinstance(effect, session_events.CloseReplica):
            self._unanswered.pop((effect.session_id, effect.replica), None)

    # ---- bytes (rule 1)

    def sent(self, effect: session_events.SendToReplica) -> None:
        """Appends are on their way to a replica."""
        message = effect.message
        if not isinstance(message, AppendRaw):
            return
        key = effect.session_id, effect.replica
        unanswered = self._unanswered.setdefault(key, {})
        unanswered[message.sequence] = len(message.records)
        total = sum(unanswered.values())
        limit = self._witness.cluster.store_limits.lag_bytes_max + FRAME_BYTES
        if total > limit:
            self._witness.fail("Bounded", f"{effect.replica} owes answers for {total} bytes")

    def heard(self, session: "SessionId", replica: str, answer: StorageMessage) -> None:
        """A replica has answered."""
        unanswered = self._unanswered.get((session, replica))
        if unanswered is not None:
            unanswered.pop(answer.sequence, None)

    def worked(self, storage: "SimStorage") -> None:
        """Look at the queue of a storage."""
        lag_bytes_max = self._witness.cluster.store_limits.lag_bytes_max
        service = storage.service
        if service is None:
            return
        # The lag is one of records; what else a request holds is counted for each.
        limit = QUEUE_BYTES_MAX + 2 * (lag_bytes_max + FRAME_BYTES)
        if service.queued_bytes - REQUEST_BYTES * service.queued_count > limit:
            self._witness.fail("Bounded", f"{storage.name}: {service.queued_bytes} bytes queued")

    def stepped(self, server: "SimServer") -> None:
        """Look at the queues of a server."""
        partition, limits = server.partition, self._witness.cluster.limits
        if partition is None:
            return
        pipeline = partition.pipeline
        queued, queued_max = pipeline.queued_bytes, 2 * limits.queue_bytes_max
        flying, flying_max = pipeline.in_flight_bytes, 2 * limits.in_flight_bytes_max
        fetches, fetches_max = server.fetch_count, limits.fetches_max + UNDER_WAY_MAX
        if queued > queued_max:
            self._too_much(server, f"{queued} bytes queued, {queued_max} allowed")
        if flying > flying_max:
            self._too_much(server, f"{flying} bytes in flight, {flying_max} allowed")
        if fetches > fetches_max:
            self._too_much(server, f"{fetches} fetches, {fetches_max} allowed")

    def _too_much(self, server: "SimServer", what: str) -> None:
        self._witness.fail("Bounded", f"{server.name}: {what}")
