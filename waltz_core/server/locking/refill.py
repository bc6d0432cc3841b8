"""The lock table after a move: what the owners before have kept of their locks on the storages.

A new owner knows of the locks only that all were written at or below the mark that it begins with,
so it would have to refuse everybody who is behind that mark. What was written when is in the lock
files of the storages (`lock_blocks.py`); here it is asked for and judged, piece by piece, and the
table learns nothing that the log has not proven.

Rules:
    1. The floor is a place in the log above which the table knows every writer; of what is at or
       below it, it knows no more than that. It begins at the session's mark and only goes down.
    2. Only a block that ends at the floor, with the log's chain there, lets it go down. A tail that
       is missing, old, torn or full of holes ends the way down where it stands, and costs refusals.
    3. One replica is asked at a time. What the first one lacks the next one may have: the way down
       goes on where it was. The floor outlives a session that nobody else has come between.
    4. Nothing is judged until the way down has ended, but for no longer than `HELD_MS_MAX`: the
       first to be judged are those who were behind when the partition moved. What comes later is
       used all the same.
    5. A turn takes a slice: a whole table's worth of locks would stop everything else for too long.
    6. A replica that had no block at the floor will never have one there: what it gets later is
       newer. It is asked again only when another one has let the floor go down, or when it sent
       nothing at all, as it does after an error of its disk. A checkpoint costs no 8 MiB then.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from waltz_core.machine import Report, earliest
from waltz_core.records.lock_blocks import HASH_BYTES, Block, Blocks, LogEnd
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

HELD_MS_MAX: Final = 150
RETRY_MS: Final = 10
SLICE_BLOCKS_MAX: Final = 1_024
SLICE_LOCKS_MAX: Final = 65_536
# What was asked in sessions that are over counts too, until its answer has come.
UNDER_WAY_MAX: Final = 4
# So many tokens for each session; they are negative, those of `reads.py` are not.
_TOKENS: Final = 1 << 16


class Refill:
    """See the module's rules."""

    def __init__(self, partition_id: PartitionId, limits: PartitionLimits) -> None:
        self._partition_id = partition_id
        self._limits = limits
        self._table: LockTable | None = None
        self._floor = LogEnd(BEFORE_FIRST, GENESIS_CHAIN)
        self._wanted = BEFORE_FIRST  # how far down the floor may go
        self._mark = BEFORE_FIRST  # where it began
        self._session_id = NO_SESSION
        self._left: list[ReplicaId] = []
        self._failed: list[ReplicaId] = []
        # For rule 6: who had nothing at which floor.
        self._lacking: dict[ReplicaId, TransactionId] = {}
        self._sender: ReplicaId | None = None  # whose blocks are looked at
        self._asked: Fetch | None = None
        self._asked_count = 0
        self._under_way: set[int] = set()
        self._blocks: Blocks | None = None
        self._retry_at_ms: int | None = None
        self._held_until_ms: int | None = None

    @property
    def floor(self) -> TransactionId:
        """Of the locks written up to here only that is known (rule 1)."""
        return self._floor.last

    # -----------------------------------------------------------------------------------------
    # the session

    def begin(self, table: LockTable, mark: LogEnd) -> None:
        """A table knows nothing but the mark."""
        self._table, self._floor, self._mark = table, mark, mark.last
        self._lacking.clear()
        self._wanted = TransactionId(
            max(BEFORE_FIRST, mark.last - self._limits.lock_refill_count_max)
        )

    def ask(
        self, session_id: SessionId, replicas: Sequence[ReplicaId], now_ms: int, *, holds: bool
    ) -> list[Fetch | Report]:
        """A session has opened: ask its replicas for what the table lacks (rules 3 and 4)."""
        self.stop()
        left = [each for each in replicas if self._lacking.get(each) != self.floor]
        if self._is_done or not left:
            return []
        self._session_id, self._asked_count = session_id, 0
        self._left = left
        self._held_until_ms = now_ms + HELD_MS_MAX if holds else None
        return self._ask_next(now_ms)

    def stop(self) -> None:
        """The session is over, or all is known; the floor stays where it is."""
        self._left, self._failed = [], []
        self._asked = self._blocks = None
        self._retry_at_ms = self._held_until_ms = None

    def holds(self, now_ms: int) -> bool:
        """Whether nothing is to be judged yet (rule 4)."""
        return self._held_until_ms is not None and now_ms < self._held_until_ms

    def turn_at_ms(self, now_ms: int) -> int | None:
        """When there is something to do here, or something held to go on."""
        if self._blocks is not None:
            return now_ms
        return earliest(self._retry_at_ms, self._held_until_ms if self.holds(now_ms) else None)

    # -----------------------------------------------------------------------------------------
    # answers

    def fetched(self, token: int, message: LockBlocks) -> None:
        """A replica has sent its newest blocks; the turns take them in."""
        self._under_way.discard(token)
        if self._asked is not None and token == self._asked.token:
            self._sender = self._asked.replica if message.blocks else None
            self._asked = None
            self._blocks = Blocks(message.blocks)

    def failed(self, token: int, now_ms: int) -> list[Fetch | Report]:
        """A replica has not sent them."""
        self._under_way.discard(token)
        if self._asked is None or token != self._asked.token:
            return []
        self._failed.append(self._asked.replica)
        self._asked = None
        return self._ask_next(now_ms)

    def turn(self, now_ms: int) -> list[Fetch | Report]:
        """Take in a slice of what has come (rule 5), or ask again."""
        if self._blocks is not None:
            has_more = self._take_slice(self._blocks)
            if self._is_done:
                return self._finish("locks.refilled")
            if not has_more:
                self._blocks = None
                if self._sender is not None:
                    self._lacking[self._sender] = self.floor
                return self._ask_next(now_ms)
        elif self._retry_at_ms is not None and self._retry_at_ms <= now_ms:
            self._retry_at_ms = None
            return self._ask_next(now_ms)
        return []

    # -----------------------------------------------------------------------------------------
    # inside

    @property
    def _is_done(self) -> bool:
        return self._table is None or self._floor.last <= self._wanted

    def _ask_next(self, now_ms: int) -> list[Fetch | Report]:
        """Ask a replica that was not asked; those that failed a while later, if all others had."""
        if not self._left:
            if self._failed and self.holds(now_ms):
                self._left, self._failed = self._failed, []
                self._retry_at_ms = now_ms + RETRY_MS
                return []
            return self._finish("locks.refilled_in_part")
        if len(self._under_way) >= UNDER_WAY_MAX:
            return self._finish("locks.refilled_in_part")
        self._asked_count += 1
        token = -(self._session_id * _TOKENS + self._asked_count)
        prefix = self._session_id, token, self._partition_id
        message = LockBlocksRequest(*prefix, self._limits.lock_tail_bytes_max)
        self._asked = Fetch(token, self._left.pop(0), message)
        self._under_way.add(token)
        return [self._asked]

    def _finish(self, name: str) -> list[Fetch | Report]:
        """Tell how far down the table knows all locks."""
        self.stop()
        return [Report(name, (("known_from", self._floor.last + 1), ("mark", self._mark)))]

    def _take_slice(self, blocks: Blocks) -> bool:
        """Let the floor go down some way (rule 2); return whether there may be more."""
        assert self._table is not None
        found: list[Block] = []
        bytes_left, floor = SLICE_LOCKS_MAX * HASH_BYTES, self._floor
        steps_left = SLICE_BLOCKS_MAX
        while steps_left > 0 and bytes_left > 0 and floor.last > self._wanted:
            block = blocks.below(floor, SLICE_BLOCKS_MAX)
            steps_left -= 1
            if block is None:
                break
            found.append(block)
            bytes_left -= len(block.locks)
            floor = block.before
        if found:
            locks = np.frombuffer(b"".join(block.locks for block in found), dtype=">i4")
            ids = np.concatenate([_writers(block) for block in found])
            self._table.refine(self._floor.last, floor.last, locks.astype(np.int32), ids)
            self._floor = floor
        return not blocks.is_spent


def _writers(block: Block) -> I64:
    """Return by whom each of the locks was written, or the last that may have done it."""
    last = np.full(len(block.locks) // HASH_BYTES, block.end.last, dtype=np.int64)
    return last - np.frombuffer(block.behind, dtype=np.uint8) if block.behind else last
