"""Loads the lock table after a partition has moved, from the lock blocks that storages keep.

A new owner does not know which transaction has written a lock last. The new owner knows only that
the ID of this transaction is not above the high-water mark. Without lock blocks, the new owner
would reject every client below this mark once. But the storages keep lock blocks: recent locks and
their writers (`lock_blocks.py`). This module requests the lock blocks and checks them, piece by
piece. The table uses only blocks that match the log's hash chain.

Rules:
    1. The *floor* is an ID in the log. The table knows every writer above the floor; all other
       locks count as written at the floor. The floor starts at the session's high-water mark and
       then only decreases. This process is called the *descent*.
    2. A block lowers the floor only if it ends at the floor and contains the log's hash chain at
       the floor. If the next block is missing, old, torn or incomplete, the descent stops. A
       stopped descent causes only additional rejections.
    3. One replica is queried at a time. If the descent stops at one replica, it continues with the
       next replica, which may have the missing blocks. The floor is kept for later sessions of this
       owner, if no other owner came in between.
    4. The first appends after a move are from clients below the mark. So no append is validated
       until the descent has ended, or `HOLD_APPENDS_MS_MAX` have passed. Blocks that arrive later
       are used as well.
    5. A turn processes only a part of the blocks, because a whole table of locks would block
       everything else for too long.
    6. A checkpoint must not fetch the same blocks (up to 8 MiB) again. A replica without a block
       that ends at the floor will never have one, because later blocks are newer. So this replica
       is queried again in two cases only: another replica has lowered the floor, or this replica
       sent nothing at all, for example after a disk error.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from waltz_core.machine import Report, earliest
from waltz_core.records.lock_blocks import HASH_BYTES, LockBlock, LockBlockReader, LogEnd
from waltz_core.records.record import (
    BEFORE_FIRST,
    GENESIS_CHAIN,
    NO_SESSION,
    PartitionId,
    ReplicaId,
    SessionId,
    TransactionId,
)
from waltz_core.server.locking.lock_table import I64, LockTable
from waltz_core.server.partition_events import Fetch, PartitionLimits
from waltz_core.wire.messages import LockBlocks, LockBlocksRequest

HOLD_APPENDS_MS_MAX: Final = 150
RETRY_MS: Final = 10
SLICE_BLOCKS_MAX: Final = 1_024
SLICE_LOCKS_MAX: Final = 65_536
# The maximum number of requests without an answer, including those of sessions that have ended.
FETCHES_IN_FLIGHT_MAX: Final = 4
# The number of fetch tokens for each session. These tokens are negative, so that they differ from
# those of `reads.py`.
_TOKENS_PER_SESSION: Final = 1 << 16


class LockTableLoader:
    """Fills the lock table of one partition from lock blocks, by the module's rules."""

    def __init__(self, partition_id: PartitionId, limits: PartitionLimits) -> None:
        self._partition_id = partition_id
        self._limits = limits
        self._table: LockTable | None = None
        self._floor = LogEnd(BEFORE_FIRST, GENESIS_CHAIN)
        self._target_floor = BEFORE_FIRST  # the lowest floor that is useful
        self._mark = BEFORE_FIRST  # the mark at which the descent began
        self._session_id = NO_SESSION
        self._replicas_left: list[ReplicaId] = []
        self._failed: list[ReplicaId] = []
        # The floor at which each replica had no block (rule 6).
        self._floors_without_block: dict[ReplicaId, TransactionId] = {}
        self._sender: ReplicaId | None = None  # the replica that has sent `_blocks`
        self._fetch: Fetch | None = None
        self._fetch_count = 0
        self._fetches_in_progress: set[int] = set()
        self._blocks: LockBlockReader | None = None
        self._retry_at_ms: int | None = None
        self._held_until_ms: int | None = None

    @property
    def floor(self) -> TransactionId:
        """The floor: the table knows every writer above this ID (rule 1)."""
        return self._floor.last

    # -----------------------------------------------------------------------------------------
    # the session

    def begin(self, table: LockTable, mark: LogEnd) -> None:
        """Start to load a table in which all locks count as written at `mark`."""
        self._table, self._floor, self._mark = table, mark, mark.last
        self._floors_without_block.clear()
        self._target_floor = TransactionId(
            max(BEFORE_FIRST, mark.last - self._limits.lock_load_count_max)
        )

    def query_locks(
        self,
        session_id: SessionId,
        replicas: Sequence[ReplicaId],
        now_ms: int,
        *,
        must_hold_appends: bool,
    ) -> list[Fetch | Report]:
        """A session has opened: query its replicas for missing locks (rules 3 and 4)."""
        self.stop()
        replicas_left = [
            replica for replica in replicas if self._floors_without_block.get(replica) != self.floor
        ]
        if self._is_done or not replicas_left:
            return []
        self._session_id, self._fetch_count = session_id, 0
        self._replicas_left = replicas_left
        self._held_until_ms = now_ms + HOLD_APPENDS_MS_MAX if must_hold_appends else None
        return self._fetch_next(now_ms)

    def stop(self) -> None:
        """Stop because the session or the descent has ended; keep the floor."""
        self._replicas_left, self._failed = [], []
        self._fetch = self._blocks = None
        self._retry_at_ms = self._held_until_ms = None

    def is_holding_appends(self, now_ms: int) -> bool:
        """Whether appends must not be validated yet (rule 4)."""
        return self._held_until_ms is not None and now_ms < self._held_until_ms

    def due_ms(self, now_ms: int) -> int | None:
        """When `load_slice` has work next, or when appends may be validated again."""
        if self._blocks is not None:
            return now_ms
        return earliest(
            self._retry_at_ms, self._held_until_ms if self.is_holding_appends(now_ms) else None
        )

    # -----------------------------------------------------------------------------------------
    # answers

    def on_blocks_fetched(self, token: int, message: LockBlocks) -> None:
        """A replica has sent its newest lock blocks; the next turns process them."""
        self._fetches_in_progress.discard(token)
        if self._fetch is not None and token == self._fetch.token:
            self._sender = self._fetch.replica if message.blocks else None
            self._fetch = None
            self._blocks = LockBlockReader(message.blocks)

    def on_fetch_failed(self, token: int, now_ms: int) -> list[Fetch | Report]:
        """A replica has not sent its lock blocks: query the next one."""
        self._fetches_in_progress.discard(token)
        if self._fetch is None or token != self._fetch.token:
            return []
        self._failed.append(self._fetch.replica)
        self._fetch = None
        return self._fetch_next(now_ms)

    def load_slice(self, now_ms: int) -> list[Fetch | Report]:
        """Process a slice of the blocks (rule 5), or query the next replica."""
        if self._blocks is not None:
            has_more = self._take_slice(self._blocks)
            if self._is_done:
                return self._finish("locks.loaded")
            if not has_more:
                self._blocks = None
                if self._sender is not None:
                    self._floors_without_block[self._sender] = self.floor
                return self._fetch_next(now_ms)
        elif self._retry_at_ms is not None and self._retry_at_ms <= now_ms:
            self._retry_at_ms = None
            return self._fetch_next(now_ms)
        return []

    # -----------------------------------------------------------------------------------------
    # implementation

    @property
    def _is_done(self) -> bool:
        return self._table is None or self._floor.last <= self._target_floor

    def _fetch_next(self, now_ms: int) -> list[Fetch | Report]:
        """Query the next replica.

        After the last replica, wait for `RETRY_MS`, then query the failed replicas again.
        """
        if not self._replicas_left:
            if self._failed and self.is_holding_appends(now_ms):
                self._replicas_left, self._failed = self._failed, []
                self._retry_at_ms = now_ms + RETRY_MS
                return []
            return self._finish("locks.partially_loaded")
        if len(self._fetches_in_progress) >= FETCHES_IN_FLIGHT_MAX:
            return self._finish("locks.partially_loaded")
        self._fetch_count += 1
        token = -(self._session_id * _TOKENS_PER_SESSION + self._fetch_count)
        prefix = self._session_id, token, self._partition_id
        message = LockBlocksRequest(*prefix, self._limits.lock_tail_bytes_max)
        self._fetch = Fetch(token, self._replicas_left.pop(0), message)
        self._fetches_in_progress.add(token)
        return [self._fetch]

    def _finish(self, name: str) -> list[Fetch | Report]:
        """Stop; report the mark, and the first ID above the floor."""
        self.stop()
        return [Report(name, (("known_from", self._floor.last + 1), ("mark", self._mark)))]

    def _take_slice(self, blocks: LockBlockReader) -> bool:
        """Lower the floor by one slice of blocks (rule 2); return whether blocks may be left."""
        assert self._table is not None
        taken_blocks: list[LockBlock] = []
        bytes_left, floor = SLICE_LOCKS_MAX * HASH_BYTES, self._floor
        steps_left = SLICE_BLOCKS_MAX
        while steps_left > 0 and bytes_left > 0 and floor.last > self._target_floor:
            block = blocks.block_ending_at(floor, SLICE_BLOCKS_MAX)
            steps_left -= 1
            if block is None:
                break
            taken_blocks.append(block)
            bytes_left -= len(block.locks)
            floor = block.end_before
        if taken_blocks:
            locks = np.frombuffer(b"".join(block.locks for block in taken_blocks), dtype=">i4")
            ids = np.concatenate([_writer_ids(block) for block in taken_blocks])
            self._table.enter_older_locks(self._floor.last, floor.last, locks.astype(np.int32), ids)
            self._floor = floor
        return not blocks.is_exhausted


def _writer_ids(block: LockBlock) -> I64:
    """Return the writer of each lock in a block.

    If the block has no distances, return the block's last ID, which is not below any writer.
    """
    last = np.full(len(block.locks) // HASH_BYTES, block.end.last, dtype=np.int64)
    return last - np.frombuffer(block.distances, dtype=np.uint8) if block.distances else last
