"""The reference history of a run, independent of the machines under test.

If a checker read committed data from the machines, it would inherit their bugs. So the history is
built from the batches that are sent to replicas, and from the results that are sent to
applications. The checkers compare the machines with this history.

Rules:
    1. A batch is identified by its hash chain, which covers all batches before it. The history is a
       tree of batches. The log is the path to the last chain that any component exposed.
    2. The path only grows. A chain that does not lead back to the end of the path is reported as a
       fork or a loss.
    3. A row is identified by its author's request ID, and carries a number that identifies the
       operation.
    4. Commit stamps never go back along the path, even when the partition's owner changes.
"""

import struct
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from waltz_core.records.record import (
    BEFORE_FIRST,
    GENESIS_CHAIN,
    NO_SESSION,
    Chain,
    SessionId,
    TransactionId,
    next_chain,
)
from waltz_core.replication.session_events import Batch

_OPERATION_NUMBER: Final = struct.Struct(">Q")
NUMBER_BYTES: Final = _OPERATION_NUMBER.size
# Transaction ID, request ID (client, generation, partition, sequence), header, length, data CRC.
_RECORD_PREFIX: Final = struct.Struct(">qiiiiiiI")


class Violation(Exception):
    """A violated guarantee; `rule` is the name of the guarantee."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule


class HistoryRow(NamedTuple):
    """One transaction as it was sent to replicas."""

    key: tuple[int, int]  # client ID, sequence number
    number: int  # the number of the operation


class BatchNode(NamedTuple):
    """One batch in the tree: the chain before it, and its content."""

    chain_before: Chain
    first: TransactionId
    last: TransactionId
    session_id: SessionId
    rows: tuple[HistoryRow, ...]
    record_crcs: bytes
    records: bytes
    ends: tuple[int, ...]  # the end offset of each record in `records`
    stamp_ms: int = 0  # the commit stamp, which no chain covers

    def cut_to(self, last: int) -> "BatchNode":
        """Return a copy of this batch without the rows after an ID."""
        count = last - self.first + 1
        return self._replace(
            last=TransactionId(last),
            rows=self.rows[:count],
            record_crcs=self.record_crcs[: 4 * count],
            records=self.records[: self.ends[count - 1]],
            ends=self.ends[:count],
        )

    @property
    def chain(self) -> Chain:
        """The hash chain after this batch."""
        return next_chain(
            self.chain_before, self.first, self.last, self.session_id, self.record_crcs
        )


@dataclass(slots=True)
class Operation:
    """One row that an application appended, and the outcome that the application received."""

    number: int
    client: str
    row: Any  # as the application appended it, for a retry
    write_locks: tuple[int, ...]
    read_locks: tuple[int, ...]
    append_locks: tuple[int, ...]
    mark: int  # the last ID that its author had really seen
    requested_us: int
    data: bytes = b""
    # The in-flight rows that this row depends on (IDs and keys), and their session. If there are
    # such rows, the mark of this row is higher than `state_mark`, the mark of the state from which
    # this row was computed.
    predecessors: tuple[tuple[int, tuple[int, int]], ...] = ()
    state_mark: int = BEFORE_FIRST
    session_id: SessionId = NO_SESSION
    outcome: str = ""  # "ok", "no", "unknown", or "gone" if its client died; empty while pending
    transaction_id: int = -1


@dataclass(slots=True)
class History:
    """The history: `log[i]` is the row of transaction i, `chains[i]` the chain at a batch's end."""

    log: list[HistoryRow] = field(default_factory=list)
    records: list[bytes] = field(default_factory=list)  # as each disk must store them
    sessions: list[SessionId] = field(default_factory=list)  # the session of each row of the log
    chains: dict[int, Chain] = field(default_factory=lambda: {BEFORE_FIRST: GENESIS_CHAIN})
    nodes: dict[Chain, BatchNode] = field(default_factory=dict)
    operations: dict[int, Operation] = field(default_factory=dict)
    id_of_key: dict[tuple[int, int], int] = field(default_factory=dict)  # key -> ID in the log
    stamp_ms: int = 0  # the commit stamp of the last batch in the log

    @property
    def last(self) -> int:
        """The last ID that any component ever exposed as committed."""
        return len(self.log) - 1

    def add_batch(self, before: Chain, session_id: SessionId, batch: Batch) -> Chain:
        """Add a batch to the tree; return the hash chain after it."""
        chain = next_chain(before, batch.first, batch.last, session_id, batch.record_crcs)
        records = bytes(batch.records)
        rows, ends = rows_of(records, batch.lengths)
        content = rows, batch.record_crcs, records, ends
        node = BatchNode(before, batch.first, batch.last, session_id, *content, batch.stamp_ms)
        known = self.nodes.setdefault(chain, node)
        if known.records != records:
            raise Violation(
                "LogMatching",
                f"two batches from {batch.first} on have the same chain, but different records",
            )
        return chain

    def extend_log(self, last: int, chain: Chain) -> range:
        """Extend the log to the ID `last`, where the chain is `chain`; return the new IDs (rule 2).

        Raises Violation if that log does not extend the known log.
        """
        if last <= self.last:
            known = self.chains.get(last)
            if known is None:
                known = self._chain_within_batch(last)
            if known != chain:
                raise Violation(
                    "Fork", f"transaction {last} was already committed with another chain"
                )
            return range(0)
        path: list[BatchNode] = []
        at, end = chain, last
        while end > self.last:
            node = self._known_batch(at, end)
            path.append(node)
            at, end = node.chain_before, node.first - 1
        if end != self.last or self.chains.get(end) != at:
            raise Violation(
                "Fork", f"the log up to {last} does not extend the log up to {self.last}"
            )
        first_new = len(self.log)
        for node in reversed(path):
            self._append_batch(node)
        self.chains[last] = chain
        return range(first_new, last + 1)

    def row_on_path(self, chain: Chain, transaction_id: int) -> HistoryRow | None:
        """Return the row with an ID on the path up to and including a batch; None if absent."""
        while (node := self.nodes.get(chain)) is not None:
            if node.first <= transaction_id:
                return (
                    node.rows[transaction_id - node.first] if transaction_id <= node.last else None
                )
            chain = node.chain_before
        return self.log[transaction_id] if 0 <= transaction_id < len(self.log) else None

    def batch_at(self, chain: Chain, last: int) -> BatchNode | None:
        """Return the batch that ends at an ID with this chain; None if no server wrote it."""
        node = self.nodes.get(chain)
        if node is not None and node.last == last:
            return node
        # A batch that was truncated in its middle gets an entry of its own.
        for whole in list(self.nodes.values()):
            if whole.first <= last < whole.last:
                cut = whole.cut_to(last)
                if cut.chain == chain:
                    self.nodes[chain] = cut
                    return cut
        return None

    def _known_batch(self, chain: Chain, last: int) -> BatchNode:
        node = self.batch_at(chain, last)
        if node is None:
            raise Violation("LogMatching", f"no server has written the batch that ends at {last}")
        return node

    def _chain_within_batch(self, last: int) -> Chain:
        """Return the chain at an ID in the middle of a batch of the log."""
        end = min(batch_end for batch_end in self.chains if batch_end > last)
        return self.nodes[self.chains[end]].cut_to(last).chain

    def _append_batch(self, node: BatchNode) -> None:
        if node.stamp_ms < self.stamp_ms:
            raise Violation(
                "StampMono",
                f"batch {node.first}..{node.last} has commit stamp {node.stamp_ms} after "
                f"{self.stamp_ms}",
            )
        self.stamp_ms = node.stamp_ms
        for position, row in enumerate(node.rows, node.first):
            if row.key in self.id_of_key:
                raise Violation(
                    "AtMostOnce",
                    f"row {row.key} is in the log twice, as transaction {self.id_of_key[row.key]} "
                    f"and as {position}",
                )
            self.id_of_key[row.key] = position
            self.log.append(row)
            self.sessions.append(node.session_id)
        start = 0
        for end in node.ends:
            self.records.append(node.records[start:end])
            start = end
        self.chains[node.last] = node.chain


def rows_of(
    records: bytes | memoryview, lengths: bytes | memoryview
) -> tuple[tuple[HistoryRow, ...], tuple[int, ...]]:
    """Return the rows in concatenated records, and the end offset of each record.

    `lengths` has one big-endian int32 for each record.
    """
    rows: list[HistoryRow] = []
    ends: list[int] = []
    offset = 0
    for (length,) in struct.iter_unpack(">i", lengths):
        _, client_id, _, _, sequence, _, data_bytes, _ = _RECORD_PREFIX.unpack_from(records, offset)
        number = 0
        if data_bytes >= NUMBER_BYTES:
            (number,) = _OPERATION_NUMBER.unpack_from(records, offset + _RECORD_PREFIX.size)
        rows.append(HistoryRow((client_id, sequence), number))
        offset += length
        ends.append(offset)
    return tuple(rows), tuple(ends)


def data_of_record(record: bytes) -> bytes:
    """Return the application's data in a record."""
    return record[_RECORD_PREFIX.size : -4]


def make_data(number: int, size: int) -> bytes:
    """Return the data of an operation: its number, and padding that is never zero."""
    return _OPERATION_NUMBER.pack(number) + bytes((1 + number % 255,)) * (size - NUMBER_BYTES)
