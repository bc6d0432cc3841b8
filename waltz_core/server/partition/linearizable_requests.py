"""Answers that must not be stale: the high-water mark, and the error that a client is ahead.

A server that was paused or partitioned does not know that another server has replaced it, so its
high-water mark may be stale. Therefore the server answers a request for the mark only after a
*proof*: a quorum of storages confirms that it knows of no later session. If the last proof is fresh
enough for the request, the server answers at once. If not, the server waits for a proof that begins
after the request has arrived.

Rules (docs/design/correctness.md 2.4, row 16, and 2.3, "ZooKeeper unavailable"):
    1. A proof that began before a request arrived is sufficient only for requests that accept an
       older mark. For these requests, the proof may be at most `high_water_mark_staleness_ms_max`
       old.
    2. One proof is in progress at a time. Requests that arrive meanwhile share the next proof.
    3. If a client has a mark above this server's mark, it may have received the mark from a later
       owner. A client treats the error that it is ahead of the log as final. So the server reports
       this error only after a proof that began after the request arrived (row 25), however fresh
       the last proof is. Without the proof the error is retriable.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from waltz_core.records.record import BEFORE_FIRST
from waltz_core.replication.session_events import ProveMark
from waltz_core.server.append.mounts import requested_mark_of
from waltz_core.wire.messages import (
    ClientMessage,
    FeedRequest,
    MountRequest,
    MountWriter,
    RangeRequest,
    TransactionDataRequest,
)

RequestT = TypeVar("RequestT")


class LinearizableRequests(Generic[RequestT]):
    """Requests that wait for proofs: confirmations by a quorum that there is no later session."""

    __slots__ = (
        "_is_proof_running",
        "_mark_staleness_ms_max",
        "_requested_ms",
        "_requests_for_next_proof",
        "_requests_in_proof",
        "_token",
        "proved_ms",
    )

    def __init__(self, high_water_mark_staleness_ms_max: int) -> None:
        self._mark_staleness_ms_max = high_water_mark_staleness_ms_max
        self._requests_for_next_proof: list[RequestT] = []
        self._requests_in_proof: list[RequestT] = []
        self._requested_ms = 0
        self._is_proof_running = False
        self._token = 0
        # When the last confirmed request was sent to the quorum; None without a confirmation.
        self.proved_ms: int | None = None

    def is_proof_fresh(self, now_ms: int) -> bool:
        """Whether the last proof is recent enough to answer a request without another proof."""
        return self.proved_ms is not None and now_ms - self.proved_ms <= self._mark_staleness_ms_max

    def note_confirmation(self, at_ms: int) -> None:
        """Record that a quorum has answered a request sent at `at_ms`, which is also a proof."""
        if self.proved_ms is None or at_ms > self.proved_ms:
            self.proved_ms = at_ms

    def wait_for_proof(self, request: RequestT, now_ms: int) -> list[ProveMark]:
        """Queue a request for the next proof; return the proof to start now, if any (rule 2)."""
        self._requests_for_next_proof.append(request)
        return self._begin(now_ms)

    def on_proof_succeeded(
        self, token: int, now_ms: int
    ) -> tuple[Sequence[RequestT], list[ProveMark]]:
        """A proof has succeeded: return its requests, and the next proof to start."""
        if token != self._token or not self._is_proof_running:
            return (), []
        answered, self._requests_in_proof, self._is_proof_running = (
            self._requests_in_proof,
            [],
            False,
        )
        self.note_confirmation(self._requested_ms)
        return answered, self._begin(now_ms)

    def on_proof_failed(
        self, token: int, now_ms: int
    ) -> tuple[Sequence[RequestT], list[ProveMark]]:
        """A proof has failed: return its requests, and the next proof to start."""
        if token != self._token or not self._is_proof_running:
            return (), []
        unanswered, self._requests_in_proof, self._is_proof_running = (
            self._requests_in_proof,
            [],
            False,
        )
        return unanswered, self._begin(now_ms)

    def drop(self, is_dropped: Callable[[RequestT], bool]) -> None:
        """Drop the requests for which `is_dropped` returns True: their connection was closed."""
        self._requests_in_proof = [
            request for request in self._requests_in_proof if not is_dropped(request)
        ]
        self._requests_for_next_proof = [
            request for request in self._requests_for_next_proof if not is_dropped(request)
        ]

    def reset(self) -> Sequence[RequestT]:
        """The session has ended: discard all proofs, and return all waiting requests."""
        requests = [*self._requests_in_proof, *self._requests_for_next_proof]
        self._requests_in_proof, self._requests_for_next_proof, self._is_proof_running = (
            [],
            [],
            False,
        )
        self.proved_ms = None
        return requests

    def _begin(self, now_ms: int) -> list[ProveMark]:
        if self._is_proof_running or not self._requests_for_next_proof:
            return []
        self._requests_in_proof, self._requests_for_next_proof, self._is_proof_running = (
            self._requests_for_next_proof,
            [],
            True,
        )
        self._requested_ms = now_ms
        self._token += 1
        return [ProveMark(self._token)]


def assumed_id_of(message: ClientMessage) -> int:
    """Return the highest ID that a request other than an append assumes to be in the log (rule 3).

    Return `BEFORE_FIRST` if it assumes none.
    """
    match message:
        case MountRequest() | MountWriter():
            return requested_mark_of(message)
        case FeedRequest():
            return message.client_high_water_mark
        case RangeRequest():
            return message.first
        case TransactionDataRequest():
            return message.transaction_id
        case _:
            return BEFORE_FIRST
