"""A storage of the original at the other end: what a session asks in S 1, said in S 0.

Why it stands alone: the machines of this package ask for what an original cannot tell, above all
for a chain. All that is made up for it stands here, and nothing of it is believed of our storages.

What an original's log is known by (decision 023)
    By ZooKeeper's word on the replica, as among originals: one that was engaged in the last session
    has the log as far as it goes, one that was closed at a mark up to there (`trusted`). And by the
    identity of records: an owner appends to a replica only where its log is the owner's, so two
    logs with the same append at one id are the same up to there. The chain that is told here for an
    id is a hash over that record's header (`record.identity_chain`): it is read from the replica
    each time, and needs no memory. Both have to agree: tasks that write once and for all may use
    the request id of an append that was lost for another one.

Rules:
    1. One script for each S 1 request: what it asks the storage, step by step, and its answer. The
       first failure that the storage tells is the answer.
    2. Answers are known by their sequence number, counted from 0 on each connection.
    3. Nothing is cut below the storage's low-water mark, unless ZooKeeper knows nothing of the
       session that has set it, or has closed the replica below it; no cut where the log is not what
       the owner takes it for, and no mark unless the log ends there. The original would do all of
       that.
    4. Batches of the running session have the chain that the owner gave them: it is kept here, as
       the storage does not keep it (`LiveBatches`).
    5. A log that ends below its own low-water mark has lost something: suspect.
    6. What ZooKeeper does not vouch for is cut and copied anew, whatever its records look like.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias, TypeVar

from waltz_core.cluster.model import UNRESOLVED, ReplicaState
from waltz_core.errors import BadRequest, ChecksumMismatch, RemoteProtocolError, WaltzError
from waltz_core.record import (
    BEFORE_FIRST,
    CHAIN_BYTES,
    GENESIS_CHAIN,
    NO_SESSION,
    ORIGINAL,
    Chain,
    LineageEntry,
    PartitionId,
    Record,
    RecordHeader,
    ReplicaId,
    SessionId,
    TransactionId,
    identity_chain,
)
from waltz_core.replication.original_records import (
    HEADERS_MAX,
    PageSize,
    Prefix,
    check_dense,
    chunks_of,
    failure,
    header_bytes,
    range_bytes,
    records_of,
)
from waltz_core.replication.quorum import quorum_size
from waltz_core.wire import messages, original_messages
from waltz_core.wire.messages import StorageMessage

_T = TypeVar("_T")
_Script: TypeAlias = Generator[list[StorageMessage], list[StorageMessage], StorageMessage]
_Step: TypeAlias = Generator[list[StorageMessage], list[StorageMessage], _T]

_NOBODY: Final = -1
_NO_STORAGE_ID: Final = bytes(16)
_ONLINE: Final = False  # "used by offline recovery" is for the original's own tools

MIXED: Final = (
    "storages of the original and of ours in one replica set: those that are no majority of it "
    "take no part (decision 023)"
)

_ANSWERS: Final[dict[type[StorageMessage], type[StorageMessage]]] = {
    messages.OpenRequest: messages.SuccessResponse,
    original_messages.LastSessionInfoRequest: original_messages.LastSessionInfoResponse,
    original_messages.MaxTransactionIdRequest: original_messages.MaxTransactionIdResponse,
    original_messages.TruncateRequest: original_messages.MaxTransactionIdResponse,
    original_messages.SetLowWaterMarkRequest: messages.SuccessResponse,
    original_messages.AppendRecordsRequest: messages.SuccessResponse,
    original_messages.RecordHeaderRequest: original_messages.RecordHeaderResponse,
    original_messages.RecordHeaderListRequest: original_messages.RecordHeaderListResponse,
    original_messages.RecordListRequest: original_messages.RecordListResponse,
}


# ---------------------------------------------------------------------------------------------
# a session's own


class LiveBatches:
    """The batches of the running session, and the chain after each (rule 4); 24 bytes a batch."""

    def __init__(self, session_id: SessionId) -> None:
        self._session_id = session_id
        self._before = BEFORE_FIRST  # the last id before the first batch
        self._chain_before = GENESIS_CHAIN
        self._lasts = array("q")
        self._chains = bytearray()
        self._taken_apart: tuple[messages.Buffer, list[tuple[Record, ...]]] = (b"", [])

    def chunks(self, message: messages.AppendRaw) -> list[tuple[Record, ...]]:
        """Return its records in appends of a bounded size; made once for all replicas."""
        if self._taken_apart[0] is not message.records:
            self._taken_apart = message.records, chunks_of(records_of(message))
        return self._taken_apart[1]

    def add(self, chain_before: Chain, lineage: Sequence[LineageEntry]) -> None:
        """Take in what is sent; each replica is sent the same, some later than others."""
        for entry in lineage:
            if entry.session_id == self._session_id and (
                not self._lasts or entry.last > self._lasts[-1]
            ):
                if not self._lasts:
                    self._before = TransactionId(entry.first - 1)
                    self._chain_before = chain_before
                assert entry.first == (self._lasts[-1] if self._lasts else self._before) + 1
                self._lasts.append(entry.last)
                self._chains += entry.chain
            chain_before = entry.chain

    def begin_at(self, first: int) -> bool:
        """Whether a batch begins there."""
        if not self._lasts or first <= self._before:
            return False
        at = bisect_left(self._lasts, first - 1)
        return first == self._before + 1 or (at < len(self._lasts) and self._lasts[at] == first - 1)

    def between(self, first: int, last: int) -> tuple[Chain, tuple[LineageEntry, ...]]:
        """Return the chain before `first`, where a batch begins, and batches from there on.

        They end at `last` at the latest, and soon, but there is one at least.
        """
        assert self.begin_at(first)
        at = 0 if first == self._before + 1 else bisect_left(self._lasts, first - 1) + 1
        found: list[LineageEntry] = []
        chain_before = self._chain_at(at - 1)
        last = max(min(last, first + HEADERS_MAX), self._lasts[at])
        while at < len(self._lasts) and self._lasts[at] <= last:
            end, chain = TransactionId(self._lasts[at]), self._chain_at(at)
            found.append(LineageEntry(TransactionId(first), end, self._session_id, 0, chain))
            first, at = end + 1, at + 1
        return chain_before, tuple(found)

    def _chain_at(self, at: int) -> Chain:
        if at < 0:
            return self._chain_before
        return Chain(bytes(self._chains[at * CHAIN_BYTES : (at + 1) * CHAIN_BYTES]))


class Kinds:
    """Whose storages keep the partition in one session: the original's, or ours, never both.

    One cannot prove to the other what its log is. Ours are registered in ZooKeeper, and where they
    are a majority of the assigned replicas, originals take no part; elsewhere the first original
    that is met makes it a session of originals, and ours take no part.
    """

    def __init__(
        self,
        session_id: SessionId,
        partition_id: PartitionId,
        assigned: Sequence[ReplicaId],
        registered: Mapping[ReplicaId, bytes],
    ) -> None:
        self.are_originals = False
        # Until then all that were engaged are heard: what one has marked cannot be taken back.
        self.decides_at_ms = 0
        self._ids = session_id, partition_id
        self._live = LiveBatches(session_id)
        self._assigned = assigned
        self._registered = registered

    def refuses(self, *, is_original: bool, has_begun: bool) -> bool:
        """Tell whether a storage that is met takes no part.

        `has_begun`: the log of one that was met has its mark set.
        """
        if not is_original:
            return self.are_originals
        ours = sum(replica in self._registered for replica in self._assigned)
        if ours >= quorum_size(len(self._assigned)) or (has_begun and not self.are_originals):
            return True
        self.are_originals = True
        return False

    def translator(self, state: ReplicaState | None) -> "OriginalStorage":
        """Return what translates for a replica with this state in ZooKeeper."""
        return OriginalStorage(*self._ids, live=self._live, state=state)


@dataclass(slots=True)
class _Job:
    """A request under way: its script, and the answers to the step that was asked last."""

    request: StorageMessage
    script: _Script
    asked: list[StorageMessage] = field(default_factory=list)
    answers: dict[int, StorageMessage] = field(default_factory=dict)
    is_over: bool = False


class OriginalStorage:
    """One connection to a storage of the original, in one session. See the module's rules."""

    def __init__(
        self,
        session_id: SessionId,
        partition_id: PartitionId,
        *,
        live: LiveBatches,
        state: ReplicaState | None,
    ) -> None:
        self._session_id = session_id
        self._partition_id = partition_id
        self._live = live
        self._state = state
        self.trusted = BEFORE_FIRST  # known with PREPARED
        self._floor = BEFORE_FIRST
        self._sequence = 0
        self._jobs: dict[int, _Job] = {}
        self._pages = PageSize()

    def ask(self, request: StorageMessage) -> list[StorageMessage]:
        """Return what to send for a request."""
        job = _Job(request, self._script(request))
        return self._take_up(job, next(job.script))

    def take(self, answer: StorageMessage) -> tuple[list[StorageMessage], StorageMessage | None]:
        """Take an answer in; return what to send next, and the answer in S 1 when it is there.

        Raises:
            RemoteProtocolError: it answers nothing that was asked, or cannot be.
        """
        job = self._jobs.pop(answer.sequence, None)
        if job is None:
            raise RemoteProtocolError(
                f"{type(answer).__name__} answers sequence {answer.sequence}, which nothing was "
                "asked under"
            )
        if job.is_over:
            return [], None
        if isinstance(answer, original_messages.FailureResponse):
            job.is_over = True
            return [], failure(self._prefix(job.request), answer)
        job.answers[answer.sequence] = answer
        if len(job.answers) < len(job.asked):
            return [], None
        answers = [job.answers[asked.sequence] for asked in job.asked]
        for asked, found in zip(job.asked, answers, strict=True):
            if type(found) is not _ANSWERS[type(asked)]:
                raise RemoteProtocolError(
                    f"{type(asked).__name__}: expected {_ANSWERS[type(asked)].__name__}, "
                    f"found {type(found).__name__}"
                )
        try:
            return self._take_up(job, job.script.send(answers)), None
        except StopIteration as stop:
            done: StorageMessage = stop.value
            return [], done

    def _take_up(self, job: _Job, asked: list[StorageMessage]) -> list[StorageMessage]:
        assert asked
        job.asked, job.answers = asked, {}
        self._jobs.update((each.sequence, job) for each in asked)
        return asked

    def _prefix(self, request: StorageMessage) -> Prefix:
        return request.session_id, request.sequence, request.partition_id

    def _make(self, kind: Callable[..., StorageMessage], *fields: object) -> StorageMessage:
        self._sequence += 1
        return kind(self._session_id, self._sequence - 1, self._partition_id, *fields)

    # -----------------------------------------------------------------------------------------
    # the scripts

    def _script(self, request: StorageMessage) -> _Script:
        scripts: dict[type[StorageMessage], Callable[..., _Script]] = {
            messages.Prepare: self._prepare,
            messages.Truncate: self._truncate,
            messages.SetLowWaterMark: self._mark,
            messages.Engage: self._stay,
            messages.AppendRaw: self._append,
            messages.RangeRaw: self._range,
            messages.LineageRequest: self._lineage,
            messages.Heartbeat: self._stay,
        }
        made = scripts.get(type(request))
        if made is None:
            return self._refuse(request, BadRequest, "an original has no such request")
        return made(request)

    def _refuse(self, request: StorageMessage, kind: type[WaltzError], text: str) -> _Script:
        yield [self._make(original_messages.MaxTransactionIdRequest, _ONLINE)]
        return messages.Nack(*self._prefix(request), kind.code, _NOBODY, text)

    def _prepare(self, request: messages.Prepare) -> _Script:
        # Not before the storage is known to be of this cluster: what follows raises its session.
        yield [
            messages.OpenRequest(
                _NOBODY, _NOBODY, _NOBODY, request.cluster_key, request.partition_count
            )
        ]
        info, top = yield [
            self._make(original_messages.LastSessionInfoRequest, _ONLINE),
            self._make(original_messages.MaxTransactionIdRequest, _ONLINE),
        ]
        assert isinstance(info, original_messages.LastSessionInfoResponse)
        assert isinstance(top, original_messages.MaxTransactionIdResponse)
        chain = yield from self._chain_at(top.transaction_id)
        mark = info.low_water_mark
        self.trusted = self._trusted(info, TransactionId(top.transaction_id))
        is_confirmed = self._is_confirmed(SessionId(info.last_session), TransactionId(mark))
        self._floor = TransactionId(mark) if is_confirmed else BEFORE_FIRST
        return messages.Prepared(
            *self._prefix(request),
            storage_id=_NO_STORAGE_ID,
            last_session=info.last_session,
            low_water_mark=mark,
            mark_confirmed=is_confirmed,
            synced_max=top.transaction_id,
            chain=chain,
            suspect=top.transaction_id < mark,
            damaged=b"",
        )

    def _trusted(
        self, info: original_messages.LastSessionInfoResponse, last: TransactionId
    ) -> TransactionId:
        """Return how far the log is the partition's by what ZooKeeper tells (rule 6)."""
        state, mark = self._state, TransactionId(min(info.low_water_mark, last))
        if state is None or info.last_session < state.session_id or state.session_id == NO_SESSION:
            return mark
        if state.closing_high_water_mark == UNRESOLVED:
            return last
        return TransactionId(min(state.closing_high_water_mark, last))

    def _is_confirmed(self, last_session: SessionId, mark: TransactionId) -> bool:
        """Whether the session that has set the mark was opened, as far as ZooKeeper tells."""
        if self._state is None:
            return True
        closing = self._state.closing_high_water_mark
        return last_session <= self._state.session_id and (closing == UNRESOLVED or closing >= mark)

    def _truncate(self, request: messages.Truncate) -> _Script:
        last = request.last_to_keep
        if last < self._floor:
            text = f"nothing is cut below the low-water mark {self._floor}, asked for {last}"
            return (yield from self._refuse(request, BadRequest, text))
        chain = yield from self._chain_at(request.base)
        if chain != request.base_chain:
            text = f"the log is another one at {request.base}"
            return messages.Nack(*self._prefix(request), ChecksumMismatch.code, _NOBODY, text)
        (top,) = yield [self._make(original_messages.TruncateRequest, last, _ONLINE)]
        assert isinstance(top, original_messages.MaxTransactionIdResponse)
        chain = yield from self._chain_at(top.transaction_id)
        return messages.ReplicaState(*self._prefix(request), top.transaction_id, chain)

    def _mark(self, request: messages.SetLowWaterMark) -> _Script:
        (top,) = yield [self._make(original_messages.MaxTransactionIdRequest, _ONLINE)]
        assert isinstance(top, original_messages.MaxTransactionIdResponse)
        chain = yield from self._chain_at(top.transaction_id)
        if (top.transaction_id, chain) != (request.mark, request.chain):
            text = f"no mark {request.mark} on a log that ends at {top.transaction_id}, or elsewise"
            return messages.Nack(*self._prefix(request), BadRequest.code, _NOBODY, text)
        yield [self._make(original_messages.SetLowWaterMarkRequest, request.mark, _ONLINE)]
        return messages.ReplicaState(*self._prefix(request), request.mark, chain)

    def _stay(self, request: messages.Engage | messages.Heartbeat) -> _Script:
        """Ask for what is refused once a later session was there."""
        yield [self._make(original_messages.MaxTransactionIdRequest, _ONLINE)]
        if isinstance(request, messages.Heartbeat):
            return messages.HeartbeatAnswer(*self._prefix(request))
        self._floor = TransactionId(request.mark)
        return messages.ReplicaState(*self._prefix(request), request.mark, GENESIS_CHAIN)

    def _append(self, request: messages.AppendRaw) -> _Script:
        self._live.add(Chain(bytes(request.chain_before)), request.lineage)
        yield [
            self._make(original_messages.AppendRecordsRequest, chunk, _ONLINE)
            for chunk in self._live.chunks(request)
        ]
        return messages.Appended(*self._prefix(request), request.lineage[-1].last)

    def _lineage(self, request: messages.LineageRequest) -> _Script:
        """Tell the newest ids, each as a batch of its own."""
        first = max(request.first, request.last - HEADERS_MAX + 1)
        before = yield from self._headers(max(first - 1, 0), request.last)
        chain, entries = GENESIS_CHAIN, []
        for header in before:
            at = header.transaction_id
            identity = identity_chain(header_bytes(header))
            if at < first:
                chain = identity
            else:
                entries.append(LineageEntry(at, at, ORIGINAL, 0, identity))
        return messages.LineageResponse(*self._prefix(request), chain, tuple(entries))

    def _range(self, request: messages.RangeRaw) -> _Script:
        """Whole batches of the running session; of what was before it, as much as comes."""
        first, last, prefix = request.first, request.last, self._prefix(request)
        if not self._live.begin_at(first):
            chain = yield from self._chain_at(first - 1)
            records = yield from self._records(first, last)
            identity = identity_chain(header_bytes(records[-1]))
            end = records[-1].transaction_id
            entry = LineageEntry(TransactionId(first), end, ORIGINAL, 0, identity)
            return range_bytes(prefix, records, chain, (entry,))
        chain, lineage = self._live.between(first, last)
        records = yield from self._records(first, last)
        while records[-1].transaction_id < lineage[0].last:
            records += yield from self._records(records[-1].transaction_id + 1, lineage[0].last)
        whole = tuple(entry for entry in lineage if entry.last <= records[-1].transaction_id)
        return range_bytes(prefix, records[: whole[-1].last - first + 1], chain, whole)

    # -----------------------------------------------------------------------------------------
    # their parts

    def _chain_at(self, at: int) -> _Step[Chain]:
        if at == BEFORE_FIRST:
            return GENESIS_CHAIN
        (header,) = yield from self._headers(at, at)
        return identity_chain(header_bytes(header))

    def _headers(self, first: int, last: int) -> _Step[list[RecordHeader]]:
        found: list[RecordHeader] = []
        while first <= last:
            count = last - first + 1
            (answer,) = yield [self._make(original_messages.RecordHeaderListRequest, first, count)]
            assert isinstance(answer, original_messages.RecordHeaderListResponse)
            check_dense(answer.headers, first, count)
            found += answer.headers
            first += len(answer.headers)
        return found

    def _records(self, first: int, last: int) -> _Step[list[Record]]:
        count = self._pages.next(last - first + 1)
        (answer,) = yield [self._make(original_messages.RecordListRequest, first, count)]
        assert isinstance(answer, original_messages.RecordListResponse)
        check_dense(answer.records, first, count)
        self._pages.learn(answer.records)
        return list(answer.records)
