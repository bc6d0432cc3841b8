"""Appends with an idempotency key: each enters the log once, even if a request is repeated.

For each key, the registry of exactly-once writes contains a write with one task
(`cluster/write_registry.py`, decisions 032 and 066). So the guarantee also holds across restarts of
the gateway, and across several gateways.

Rules:
    1. Before the first append, the registry records the write and the marks of its partitions. Each
       attempt claims the task of the write, and gets the client ID of the task. From then on, the
       servers reject appends of earlier attempts.
    2. A transaction in the log must be traceable to its position in the request, even if two
       transactions are equal. So n transactions of a request in one partition get the sequence
       numbers k * n + 1 to k * n + n. The number k increases each time that these transactions are
       sent. Example: with n = 3, the second transaction has sequence number 2, then 5, then 8.
    3. A later attempt first mounts its partitions, so that all appends of earlier attempts are
       final. The attempt then finds the transactions of the request in the log, by the client ID,
       and sends only the missing ones.
    4. If a transaction is not in the log for a temporary reason, the attempt sends it again, before
       all later transactions.
    5. When the write is finished, the registry stores all outcomes, including rejections. Each
       repetition of the request gets these outcomes.
    6. The registry stores the hash of the request as the name of the run, so a key cannot be used
       for two different requests.
    7. Only the latest attempt may finish the write. Without this rule, an earlier attempt could
       store that a lock has rejected a transaction, although a later attempt has appended this
       transaction.
    8. At most `CONCURRENT_APPENDS_MAX` requests are processed at a time. At most
       `CONCURRENT_REGISTRY_CHANGES_MAX` of them change the registry at a time, because concurrent
       changes of the registry conflict, and changes that conflict must be repeated.
"""

import asyncio
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from waltz_core import errors
from waltz_core.client import AsyncWaltzClient, BatchOutcome, RangeForm, RowOutcomeCode, TaskClaim
from waltz_core.cluster.write_registry import TaskAttempt, WriteState
from waltz_core.gateway.callers import Caller, Callers
from waltz_core.gateway.http_appends import AppendReply, reply_of_outcomes
from waltz_core.gateway.request_parsing import NewTransaction, with_default_partition
from waltz_core.records import raw_records
from waltz_core.records.batches import encode_append
from waltz_core.records.checksum import crc32
from waltz_core.records.record import BEFORE_FIRST, TransactionId, partition_of_hash

CONCURRENT_APPENDS_MAX: Final = 64
CONCURRENT_REGISTRY_CHANGES_MAX: Final = 4
BATCH_BYTES_MAX: Final = 1024 * 1024
RESEND_DELAY_S: Final = 0.05
_WRITE_PREFIX: Final = "http-"
_TASK_ID: Final = 0
_MARK_ABOVE_LOG: Final = -2  # instead of a winner: the mark is above the log's last transaction
_TAKEN_OVER_TEXT: Final = (
    "another request with the same idempotency key has taken over. Hint: repeat the request. Use a "
    "client timeout that is longer than an append takes: each repetition interrupts the request "
    "before it."
)
_EXPIRED_TEXT: Final = "the idempotency key has expired during the request"
# After one of these, some transactions may be in the log.
_INTERRUPTING_ERRORS: Final = (errors.Unavailable, errors.Superseded, errors.PermissionDenied)


class _Rejection(NamedTuple):
    """A rejected transaction: the winner of its lock (or `_MARK_ABOVE_LOG`), and the log's mark."""

    winner: int
    high_water_mark: int


class IdempotentAppends:
    """Appends the transactions of a request once for each idempotency key (rules 1 to 8).

    Args:
        callers: creates the clients of the attempts.
        connect: the connect string of the cluster.
        retention_ms: how long the registry keeps a key.
        timeout_ms: the limit for the appends of one request.
    """

    def __init__(
        self, callers: Callers, connect: str, *, retention_ms: int, timeout_ms: int
    ) -> None:
        self._callers = callers
        self._connect = connect
        self._retention_ms = retention_ms
        self._timeout_s = timeout_ms / 1000
        self._attempt_slots = asyncio.Semaphore(CONCURRENT_APPENDS_MAX)
        self._registry_slots = asyncio.Semaphore(CONCURRENT_REGISTRY_CHANGES_MAX)

    async def append(self, caller: Caller, key: str, rows: Sequence[NewTransaction]) -> AppendReply:
        """Append the transactions once; return the same answer each time.

        Raises:
            IdempotencyKeyReused: the key was used for another request.
            WaltzError: the outcome is not known yet. If the application sends the request again, it
                gets the outcome.
        """
        write, count = _WRITE_PREFIX + key, caller.client.partition_count
        rows = with_default_partition(rows, partition_of_hash(crc32(key.encode()), count))
        request_hash = _request_hash(rows)
        async with self._attempt_slots:
            try:
                state = await self._begin_write(caller, write, rows)
                if not state.is_done:
                    state = await self._run_attempt(caller, write, rows, request_hash)
            except errors.ConnectionSuperseded as error:  # rule 1
                raise errors.OutcomeUnknown(_TAKEN_OVER_TEXT) from error
        return _reply_of_write(state, rows, request_hash)

    async def _begin_write(
        self, caller: Caller, write: str, rows: Sequence[NewTransaction]
    ) -> WriteState:
        partitions = sorted({row.partition for row in rows})
        marks = await caller.client.high_water_marks(partitions)
        async with self._registry_slots:
            try:
                return await caller.writes.begin(write, marks, self._retention_ms)
            except errors.CoordinatorUnavailable as error:
                raise errors.CoordinatorUnavailable(
                    f"an append with an idempotency key needs ZooKeeper: {error}"
                ) from error

    async def _run_attempt(
        self, caller: Caller, write: str, rows: Sequence[NewTransaction], request_hash: str
    ) -> WriteState:
        claim = TaskClaim(self._connect, write, _TASK_ID, run=request_hash)
        async with self._callers.dedicated_client(caller) as client:
            client.claim = claim
            await client.open()
            if claim.is_done:
                return await self._read_finished_write(caller, write)
            if claim.state.runs[0] != request_hash:  # rule 6
                raise _key_reused_error()
            try:
                outcomes = await self._append_by_partition(client, claim, rows)
                summary, task_attempt = (
                    _registry_summary(outcomes, request_hash),
                    TaskAttempt(_TASK_ID, claim.state.attempt),
                )
                async with self._registry_slots:  # rules 7 and 8
                    return await caller.writes.finish(
                        write, summary, self._retention_ms, task_attempt=task_attempt
                    )
            except errors.ConnectionSuperseded:
                raise
            except _INTERRUPTING_ERRORS as error:
                raise errors.OutcomeUnknown(f"the append was interrupted: {error}") from error

    async def _append_by_partition(
        self, client: AsyncWaltzClient, claim: TaskClaim, rows: Sequence[NewTransaction]
    ) -> dict[int, TransactionId | _Rejection]:
        """Append the transactions of each partition; return the outcomes by position."""
        outcomes: dict[int, TransactionId | _Rejection] = {}
        try:
            async with asyncio.timeout(self._timeout_s):
                for partition in sorted({row.partition for row in rows}):
                    positions = [
                        position for position, row in enumerate(rows) if row.partition == partition
                    ]
                    task = _PartitionAppend(
                        client, claim, partition, [rows[position] for position in positions]
                    )
                    partition_outcomes = await task.append()
                    outcomes |= {
                        positions[position]: outcome
                        for position, outcome in partition_outcomes.items()
                    }
        except TimeoutError:
            raise errors.OutcomeUnknown(f"no outcome within {self._timeout_s:g} s") from None
        return outcomes

    async def _read_finished_write(self, caller: Caller, write: str) -> WriteState:
        state = await caller.writes.read(write)
        if state is None:
            raise errors.Unavailable(_EXPIRED_TEXT)
        return state


class _PartitionAppend:
    """Appends the transactions of one request in one partition (rules 2 to 4)."""

    def __init__(
        self,
        client: AsyncWaltzClient,
        claim: TaskClaim,
        partition: int,
        rows: Sequence[NewTransaction],
    ) -> None:
        self._client = client
        self._claim = claim
        self._partition = partition
        self._rows = rows
        self._outcomes: dict[int, TransactionId | _Rejection] = {}
        self._sequence_base = 0  # k * n of rule 2

    async def append(self) -> Mapping[int, TransactionId | _Rejection]:
        """Append the missing transactions; return the outcomes of all by position."""
        if self._claim.state.attempt > 1:
            await self._find_committed()
        while not await self._send_missing():
            self._sequence_base += len(self._rows)
            await asyncio.sleep(RESEND_DELAY_S)
        return self._outcomes

    async def _find_committed(self) -> None:
        """Find the transactions that earlier attempts have committed (rule 3)."""
        last = (await self._client.mount([self._partition]))[self._partition]
        first = self._claim.marks[self._partition] + 1
        if last < first:
            return
        count, highest_sequence = len(self._rows), 0
        async for chunk in self._client.read_range(
            self._partition, first, last, form=RangeForm.HEADERS
        ):
            headers = np.frombuffer(chunk.records, raw_records.HEADER_DTYPE)
            own_headers = headers[headers["req_id"]["client_id"] == self._claim.state.client_id]
            for header in own_headers:
                sequence = int(header["req_id"]["sequence"])
                self._outcomes[(sequence - 1) % count] = TransactionId(
                    int(header["transaction_id"])
                )
                highest_sequence = max(highest_sequence, sequence)
        self._sequence_base = -(-highest_sequence // count) * count

    async def _send_missing(self) -> bool:
        """Send the transactions without an outcome, in order; return whether all are final now."""
        for first, last in self._runs_to_send():
            rows = self._rows[first : last + 1]
            sequences = {self._partition: self._sequence_base + first + 1}
            await self._client.begin_sequences(sequences)
            future = await self._client.append_batch(
                self._partition,
                _payload_of(rows),
                len(rows),
                client_high_water_mark=BEFORE_FIRST,  # each row has its own mark
            )
            if not self._record_outcomes(first, await future):
                return False
        return True

    def _runs_to_send(self) -> Iterator[tuple[int, int]]:
        """Yield the first and the last position of rows to send together."""
        first, size = -1, 0
        for position, row in enumerate(self._rows):
            is_known = position in self._outcomes
            if first >= 0 and (is_known or size + len(row.data) > BATCH_BYTES_MAX):
                yield first, position - 1
                first = -1
            if not is_known:
                first, size = (
                    (position, len(row.data)) if first < 0 else (first, size + len(row.data))
                )
        if first >= 0:
            yield first, len(self._rows) - 1

    def _record_outcomes(self, first: int, outcome: BatchOutcome) -> bool:
        """Store the final outcomes of sent rows; return whether all are final (rule 4)."""
        ids, reasons = outcome.transaction_ids.tolist(), outcome.reasons.tolist()
        conflicting_ids, mark = outcome.conflicting.tolist(), int(outcome.high_water_mark)
        is_final = True
        for offset, reason in enumerate(reasons):
            if reason == RowOutcomeCode.COMMITTED:
                self._outcomes[first + offset] = TransactionId(ids[offset])
            elif reason == RowOutcomeCode.LOCK:
                self._outcomes[first + offset] = _Rejection(conflicting_ids[offset], mark)
            elif reason == RowOutcomeCode.AHEAD:
                self._outcomes[first + offset] = _Rejection(_MARK_ABOVE_LOG, mark)
            elif reason == RowOutcomeCode.TOO_LARGE:
                raise errors.TooLarge(
                    f"partition {self._partition}: the server rejects a transaction: "
                    f"{RowOutcomeCode(reason).name} {outcome.detail}"
                )
            else:
                is_final = False
        return is_final


def _payload_of(rows: Sequence[NewTransaction]) -> bytes:
    return encode_append(
        [row.header for row in rows],
        [row.data for row in rows],
        write_locks=[row.write_locks for row in rows],
        read_locks=[row.read_locks for row in rows],
        append_locks=[row.append_locks for row in rows],
        marks=[BEFORE_FIRST if row.mark is None else row.mark for row in rows],
    )


def _request_hash(rows: Sequence[NewTransaction]) -> str:
    """Return a hash of the transactions of a request (rule 6)."""
    hasher = hashlib.sha256()
    for row in rows:
        hasher.update(repr((len(row.data), *row[1:])).encode())
        hasher.update(row.data)
    return hasher.hexdigest()


def _registry_summary(
    outcomes: Mapping[int, TransactionId | _Rejection], request_hash: str
) -> dict[str, Any]:
    """Return the summary that the registry stores: about 40 bytes for each transaction."""
    ordered = [outcomes[position] for position in range(len(outcomes))]
    return {
        "request": request_hash,
        "ids": [
            BEFORE_FIRST if isinstance(outcome, _Rejection) else outcome for outcome in ordered
        ],
        "rejections": [list(outcome) for outcome in ordered if isinstance(outcome, _Rejection)],
    }


def _reply_of_write(
    state: WriteState, rows: Sequence[NewTransaction], request_hash: str
) -> AppendReply:
    """Return the answer to a request from the summary of its finished write."""
    summary = state.summary
    if not summary:
        raise errors.Unavailable(_EXPIRED_TEXT)
    if summary["request"] != request_hash:
        raise _key_reused_error()
    rejections = iter(summary["rejections"])
    outcomes: list[tuple[int, TransactionId | errors.WaltzError]] = []
    for row, transaction_id in zip(rows, summary["ids"], strict=True):
        if transaction_id != BEFORE_FIRST:
            outcomes.append((row.partition, TransactionId(transaction_id)))
            continue
        outcomes.append((row.partition, _rejection_error(row, _Rejection(*next(rejections)))))
    return reply_of_outcomes(outcomes)


def _rejection_error(row: NewTransaction, rejection: _Rejection) -> errors.WaltzError:
    winner, mark = rejection
    if winner == _MARK_ABOVE_LOG:
        return errors.ClientAheadOfLog(
            f"partition {row.partition}: the mark {row.mark} is above the log's "
            f"high-water mark {mark}. Hint: the mark may come from another cluster."
        )
    failed = errors.LockFailed(
        f"partition {row.partition}: lock conflict: transaction {winner} (or an earlier one) "
        f"has written a lock of this transaction after the mark {row.mark}"
    )
    failed.conflicting, failed.high_water_mark = winner, mark
    return failed


def _key_reused_error() -> errors.IdempotencyKeyReused:
    return errors.IdempotencyKeyReused(
        "the idempotency key was used for another request",
        expected="the same transactions as in the first request with this key",
        found="other transactions",
        hint="Use a new key for each request.",
    )
