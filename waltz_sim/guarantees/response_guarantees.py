"""Checks of the messages from servers to clients: none is premature, stale or corrupt.

Every message from a server to a client is checked here. It does not matter which part of the server
has sent it, or whether the client will accept it.

Rules:
    1. A server sends an outcome or a high-water mark only while a store session is open and
       settled, or in the step that closed it. A server may send records of the log from any session
       that was open.
    2. A mark that was not confirmed by a quorum is no older than
       `high_water_mark_staleness_ms_max`.
    3. After a client's row was lost, none of its later rows on that connection is committed until
       the client mounts again.
    4. A server answers a flush only after it has answered every earlier request on that connection.
"""

from collections import deque
from typing import TYPE_CHECKING, Final

from waltz_core.errors import ClientAheadOfLog, LockFailed
from waltz_core.records.record import BEFORE_FIRST, NO_SESSION, RECORD_HEADER, ReqId, SessionId
from waltz_core.replication import session_events
from waltz_core.wire.messages import (
    AppendBatch,
    AppendFollowing,
    AppendRequest,
    AppendResult,
    ClientMessage,
    ErrorResponse,
    FeedBatch,
    FlushRequest,
    FlushResponse,
    HighWaterMarkRequest,
    HighWaterMarkResponse,
    LockFailure,
    Mounted,
    MountResponse,
    MountWriter,
    Predecessors,
    RangeData,
    RangeForm,
    ReplicasRequest,
    ReplicasResponse,
    RowOutcomeCode,
    TransactionDataResponse,
)
from waltz_sim.guarantees.history import data_of_record

if TYPE_CHECKING:
    from waltz_core.server.partition_events import SendToClient
    from waltz_sim.cluster.simulated_clients import SimClient
    from waltz_sim.cluster.simulated_servers import SimServer
    from waltz_sim.guarantees.checker_state import CheckerState
    from waltz_sim.guarantees.session_guarantees import SessionGuarantees
    from waltz_sim.world.network import SimLink

_SESSION_MESSAGES: Final = (
    FlushResponse,
    HighWaterMarkResponse,
    LockFailure,
    Mounted,
    Predecessors,
    ReplicasResponse,
)
_MARK_REQUESTS: Final = (FlushRequest, HighWaterMarkRequest, MountWriter, ReplicasRequest)
# Committed records are final, so a server may send them after the session of the request has ended.
_COMMITTED_DATA_MESSAGES: Final = (FeedBatch, RangeData)
_REASONS_WITHOUT_SESSION: Final = bytes(
    (RowOutcomeCode.NOT_MOUNTED, RowOutcomeCode.TOO_LARGE, RowOutcomeCode.OVERLOADED)
)
_MOUNT_READY: Final = 0
_LOST_REASONS: Final = (RowOutcomeCode.LOST, RowOutcomeCode.NO_SPACE)
_LOG_ERROR_CODES: Final = (ClientAheadOfLog.code, LockFailed.code)
_FEED_HEADER: Final = 20


class ResponseGuarantees:
    """Checks all messages from servers to clients."""

    def __init__(self, state: "CheckerState", sessions: "SessionGuarantees") -> None:
        self._state = state
        self._sessions = sessions
        # By server and client: the connection on which the server answered the client's last mount.
        self._mount_connection: dict[str, dict[int, int]] = {}
        self._claims: dict[ReqId, SessionId] = {}  # sessions of unanswered dependent appends
        # By server: the session that is open now, and the sessions that were open in this step.
        self._open_session: dict[str, SessionId] = {}
        self._sessions_in_step: dict[str, dict[SessionId, None]] = {}
        self._marks: dict[int, int] = {}  # connection -> the last mark sent on it
        # Client and connection -> the first row that was lost since the client mounted there.
        self._first_lost_row: dict[tuple[int, int], int] = {}
        self._committed_before_step: dict[str, int] = {}  # by server: the mark before the step
        self._committed_last: dict[str, int] = {}
        self._slowest_clock_rate: dict[str, float] = {}  # by server: its slowest clock rate so far
        # IDs acknowledged to applications, each with its time in ms. The last ID is the highest.
        self._acknowledged_ids: deque[tuple[int, int]] = deque([(0, BEFORE_FIRST)])
        # By client and link.
        self._unanswered_requests: dict[tuple[str, int], dict[object, None]] = {}
        self._requests: dict[object, tuple[ClientMessage, int, list[object]]] = {}

    # ---- when a server may answer (rule 1)

    def on_partition_created(self, server: str) -> None:
        """Record that a server has created a partition machine, which has no session yet."""
        self._open_session.pop(server, None)
        self._mount_connection.pop(server, None)
        self._sessions_in_step.pop(server, None)
        self._committed_last.pop(server, None)
        self._committed_before_step.pop(server, None)

    def on_store_effect(self, server: str, effect: session_events.Effect) -> None:
        """Track which sessions are open and settled, and the last committed ID of each server."""
        match effect:
            case session_events.SessionSettled():
                self._open_session[server] = effect.session_id
                self._sessions_in_step.setdefault(server, {})[effect.session_id] = None
            case session_events.SessionOpened():
                self._committed_last[server] = effect.high_water_mark
            case session_events.TransactionsCommitted():
                self._committed_last[server] = effect.last
            case session_events.SessionClosed():
                self._open_session.pop(server, None)
            case _:
                pass

    def on_server_stepped(self, server: "SimServer") -> None:
        """Record the end of a server's step."""
        name = server.name
        now = self._open_session.get(name)
        self._sessions_in_step[name] = {} if now is None else {now: None}
        self._committed_before_step[name] = self._committed_last.get(name, BEFORE_FIRST)
        if server.clock_rate < 1:
            self._slowest_clock_rate[name] = min(
                server.clock_rate, self._slowest_clock_rate.get(name, 1)
            )

    # ---- messages from servers

    def on_sent_to_client(self, server: "SimServer", answer: "SendToClient") -> None:
        """Check a message that a server sends to a client."""
        message, name = answer.message, server.name
        if self._depends_on_the_log(message) and not self._sessions_in_step.get(name):
            self._state.fail("GateCAS2", f"{name} sends {message} without an open session")
        session = getattr(message, "session_id", None)
        if session is not None:
            self._check_session(name, message, SessionId(session))
        mark = getattr(message, "high_water_mark", None)
        if mark is not None:
            self._check_mark(server, answer, mark)
        match message:
            case FeedBatch():
                self._check_feed(name, message)
            case RangeData():
                self._check_range(name, message)
            case TransactionDataResponse():
                self._check_data(name, message)
            case AppendResult():
                self._check_result(name, message)
                self._check_order(name, answer.connection, message)
                self._note_older_connection(name, answer.connection, message)
            case MountResponse() | Mounted():
                client_id = message.req_id.client_id
                self._first_lost_row.pop((client_id, answer.connection), None)
                if isinstance(message, Mounted) or message.state == _MOUNT_READY:
                    self._mount_connection.setdefault(name, {})[client_id] = answer.connection
            case _:
                pass

    @staticmethod
    def _depends_on_the_log(message: ClientMessage) -> bool:
        if isinstance(message, AppendResult):
            return bool(bytes(message.reasons).strip(_REASONS_WITHOUT_SESSION))
        if isinstance(message, ErrorResponse):
            return message.error_code in _LOG_ERROR_CODES
        if isinstance(message, MountResponse):
            return message.state == _MOUNT_READY
        return isinstance(message, _SESSION_MESSAGES)

    def _check_session(self, name: str, message: ClientMessage, session: SessionId) -> None:
        """7. GateCAS2: check that a server names only sessions that have opened."""
        allowed = (
            self._sessions.opened_sessions
            if isinstance(message, _COMMITTED_DATA_MESSAGES)
            else self._sessions_in_step[name]
        )
        if session not in allowed:
            self._state.fail(
                "GateCAS2", f"{name} sends {type(message).__name__} of session {session}"
            )

    def _check_mark(self, server: "SimServer", answer: "SendToClient", mark: int) -> None:
        """15. HwmMono: check that a connection's marks never go back or beyond the log; rule 2."""
        state, message = self._state, answer.message
        if mark > state.history.last:
            state.fail(
                "HwmMono",
                f"{server.name} sends mark {mark}, but the log ends at {state.history.last}",
            )
        before = self._marks.get(answer.connection, BEFORE_FIRST)
        if mark < before:
            state.fail("HwmMono", f"{server.name} sends mark {mark} after {before}")
        self._marks[answer.connection] = mark
        if isinstance(message, FlushResponse | HighWaterMarkResponse | ReplicasResponse):
            clock_rate = self._slowest_clock_rate.get(server.name, 1)
            timer_ms = int(state.cluster.limits.high_water_mark_staleness_ms_max / clock_rate)
            known = self.highest_acknowledged(state.world.now_ms - timer_ms - 1)
            if mark < known:
                state.fail(
                    "StaleMark",
                    f"{server.name} sends mark {mark}, but transaction {known} was acknowledged "
                    f"{timer_ms} ms ago",
                )

    # ---- 21. NoRotServed

    def _check_feed(self, name: str, message: FeedBatch) -> None:
        records = self._state.history.records
        first, stop = message.first, message.first + message.count
        size = RECORD_HEADER.size
        wanted = b"".join(record[8:size] for record in records[first:stop])
        if stop > len(records) or bytes(message.headers) != wanted:
            self._state.fail("NoRotServed", f"{name} feeds wrong headers in {first}..{stop - 1}")
        if message.chain_at != BEFORE_FIRST and not self._has_correct_chain(message):
            self._state.fail("NoRotServed", f"{name} feeds a wrong chain at {message.chain_at}")

    def _has_correct_chain(self, message: FeedBatch) -> bool:
        known = self._state.history.chains.get(message.chain_at)
        return known in (None, bytes(message.chain))

    def _check_range(self, name: str, message: RangeData) -> None:
        records, data = self._state.history.records, bytes(message.records)
        size, at = RECORD_HEADER.size, 0
        for _ in range(message.count):
            position = int.from_bytes(data[at : at + 8], "big")
            if not 0 <= position < len(records):
                self._state.fail(
                    "NoRotServed", f"{name} sends transaction {position}, which is not in the log"
                )
            record = records[position]
            wanted = record if message.form == RangeForm.WHOLE else record[:size]
            if data[at : at + len(wanted)] != wanted:
                self._state.fail("NoRotServed", f"{name} sends a wrong record {position}")
            at += len(wanted)
        if at != len(data):
            self._state.fail(
                "NoRotServed", f"{name} sends {len(data)} bytes of records, expected {at}"
            )
        self._state.counts["read"] += message.count

    def _check_data(self, name: str, message: TransactionDataResponse) -> None:
        position, records = message.transaction_id, self._state.history.records
        found, _ = message.result
        if found is None:
            return
        if not 0 <= position < len(records) or bytes(found) != data_of_record(records[position]):
            self._state.fail("NoRotServed", f"{name} sends wrong data of transaction {position}")
        self._state.count("single transaction read")

    def _check_result(self, name: str, message: AppendResult) -> None:
        """Check that a lock conflict is a committed transaction; a server may await its commit."""
        reasons = bytes(message.reasons)
        claimed = self._claims.pop(message.req_id, None)
        if RowOutcomeCode.LOCK not in reasons:
            return
        if claimed is not None and claimed not in self._sessions_in_step[name]:
            self._state.count("dependent append of another session rejected")
        conflicts = memoryview(message.conflicting).cast("B")
        for row, reason in enumerate(reasons):
            if reason != RowOutcomeCode.LOCK:
                continue
            conflict = int.from_bytes(conflicts[8 * row : 8 * row + 8], "big", signed=True)
            if conflict > self._state.history.last:
                self._state.fail(
                    "OutcomeTruth",
                    f"{name} rejects an append because of {conflict}, which is not committed",
                )
            if conflict > self._committed_before_step.get(name, BEFORE_FIRST):
                self._state.count("rejection delayed until the conflict committed")

    def _check_order(self, name: str, connection: int, message: AppendResult) -> None:
        """Check that no row commits after a lost row of the same mount (rule 3)."""
        req_id, reasons = message.req_id, bytes(message.reasons)
        key = req_id.client_id, connection
        lost = self._first_lost_row.get(key)
        if lost is not None and lost < req_id.sequence and RowOutcomeCode.COMMITTED in reasons:
            self._state.fail(
                "Overtaken",
                f"{name} reports {req_id} as committed, but the earlier row {lost} was lost",
            )
        rows = [row for row, reason in enumerate(reasons) if reason in _LOST_REASONS]
        if rows and lost is None:
            self._first_lost_row[key] = req_id.sequence + rows[0]

    def _note_older_connection(self, name: str, connection: int, message: AppendResult) -> None:
        """Count rejections on connections that are older than the client's current mount."""
        mounted = self._mount_connection.get(name, {}).get(message.req_id.client_id, connection)
        if connection < mounted and RowOutcomeCode.NOT_MOUNTED in bytes(message.reasons):
            self._state.count("append on an older connection")

    # ---- messages of clients

    def on_acknowledged(self, transaction_id: int) -> None:
        """Record that an application has received the acknowledgement of an ID."""
        if transaction_id > self._acknowledged_ids[-1][1]:
            self._acknowledged_ids.append((self._state.world.now_ms, transaction_id))

    def highest_acknowledged(self, at_ms: int) -> int:
        """Return the highest ID acknowledged up to `at_ms`; `at_ms` must never decrease."""
        known = self._acknowledged_ids
        while len(known) > 1 and known[1][0] <= at_ms:
            known.popleft()
        return known[0][1] if known[0][0] <= at_ms else BEFORE_FIRST

    def on_client_sent(self, client: "SimClient", link: "SimLink", message: ClientMessage) -> None:
        """Record a message that a client sends to a server."""
        server = link.ends[1].name
        if (
            isinstance(message, _MARK_REQUESTS)
            and server in self._open_session
            and self._committed_last[server] < self._state.history.last
        ):
            self._state.count("mark requested from an old owner")
        unanswered = self._unanswered_requests.setdefault((client.name, link.number), {})
        if isinstance(message, AppendFollowing) and message.session_id != NO_SESSION:
            self._claims[message.req_id] = SessionId(message.session_id)
        if isinstance(message, AppendBatch | AppendRequest):
            unanswered[message.req_id] = None
        elif isinstance(message, FlushRequest | ReplicasRequest):
            known = self._acknowledged_ids[-1][1]
            self._requests[message.req_id] = message, known, list(unanswered)

    def on_client_received(
        self, client: "SimClient", link: "SimLink", message: ClientMessage
    ) -> None:
        """Check the order of flushes, and the age of marks that a quorum has confirmed (rule 4)."""
        unanswered = self._unanswered_requests.get((client.name, link.number), {})
        if isinstance(message, AppendResult | ErrorResponse | Predecessors):
            unanswered.pop(message.req_id, None)
        found = self._requests.pop(message.req_id, None)
        if found is None:
            return
        request, known, before = found
        if isinstance(message, FlushResponse):
            self._state.count("flushed")
            left = [each for each in before if each in unanswered]
            if left:
                self._state.fail(
                    "Flush", f"the flush of {client.name} is answered before the appends {left}"
                )
        elif isinstance(message, ReplicasResponse):
            assert isinstance(request, ReplicasRequest)
            if request.linearizable:
                self._state.count("mark confirmed by a quorum")
                if message.high_water_mark < known:
                    self._state.fail(
                        "StaleMark",
                        f"{client.name} receives mark {message.high_water_mark}, but transaction "
                        f"{known} was acknowledged before its request",
                    )

    def on_link_lost(self, client: "SimClient", link: "SimLink") -> None:
        """Forget the requests on a link, because no more messages arrive on it."""
        self._unanswered_requests.pop((client.name, link.number), None)
