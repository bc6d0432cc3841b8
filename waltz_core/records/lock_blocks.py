"""Lock blocks: for each batch, the locks that its transactions have written.

The owner of a partition computes lock blocks, and storages keep them without reading them. The next
owner fills its lock table from them. This module defines which blocks are valid.

    | lock hashes (4 bytes each) | distances (1 byte each) | trailer (`TRAILER_LAYOUT`) |

All integers are big-endian. A block ends with its trailer. Therefore a run of blocks can be read
from its end, where the newest blocks are.

Rules:
    1. A block contains the write and append locks of all transactions first..last. For each lock,
       the block contains the distance from the transaction that wrote the lock to `last`. A block
       with more than `DISTANCES_TRANSACTIONS_MAX` transactions has no distances ("WLB1"). Then
       `last` is used as the writer of each lock, although the real writer may have a lower ID.
    2. `chain` is the hash chain of the log after `last` (replication/window.py). It covers the
       whole log up to `last`. If this field equals the known chain of a log at `last`, the block
       belongs to this log. Then the field `chain before` is the log's chain before `first`.
    3. Blocks are validated from a known end of the log downwards, because each valid block contains
       the chain that its predecessor must have. A block that ends above the expected ID is skipped:
       its batch was lost, or the block is a duplicate. A block that ends below the expected ID
       shows that a block is missing.
    4. If a reader finds a gap, or bytes that are not a block, the reader does not use any older
       blocks.
"""

from typing import Final, NamedTuple

from waltz_core.records.byte_layout import ByteLayout, Field
from waltz_core.records.checksum import crc32
from waltz_core.records.record import Chain, TransactionId

Buffer = bytes | memoryview

HASH_BYTES: Final = 4
# A batch with more bytes of locks has no block, so that every block fits into a frame.
LOCKS_BYTES_MAX: Final = 1024 * 1024

TRAILER_LAYOUT: Final = ByteLayout(
    Field("mark", "4s", '"WLB1", or "WLB2" for a block with distances'),
    Field("first", "q"),
    Field("last", "q"),
    Field("chain before", "16s", "the chain before `first`"),
    Field("chain", "16s", "the chain at `last`"),
    Field("lock count", "I"),
    Field("CRC-32", "I", "of all bytes of the block before this field"),
)
_TRAILER_STRUCT: Final = TRAILER_LAYOUT.struct
# A block with up to this many transactions stores the writer of each lock.
DISTANCES_TRANSACTIONS_MAX: Final = 256
_MAGIC: Final = b"WLB1"
_MAGIC_WITH_DISTANCES: Final = b"WLB2"
_CRC_BYTES: Final = 4
TRAILER_BYTES: Final = _TRAILER_STRUCT.size


class LogEnd(NamedTuple):
    """The current or an earlier end of the log: the last ID of a batch, and its hash chain."""

    last: TransactionId
    chain: Chain


class LockBlock(NamedTuple):
    """The locks of one batch.

    `locks` are big-endian int32. `distances` has one byte for each lock, or is empty (rule 1).
    """

    first: TransactionId
    end: LogEnd
    chain_before: Chain
    locks: Buffer
    distances: Buffer = b""

    @property
    def end_before(self) -> LogEnd:
        """The end of the log directly before this block."""
        return LogEnd(TransactionId(self.first - 1), self.chain_before)


def encode(
    first: TransactionId, end: LogEnd, chain_before: Chain, locks: Buffer, distances: Buffer = b""
) -> bytes:
    """Return the bytes of a lock block; empty if the locks exceed `LOCKS_BYTES_MAX`."""
    if len(locks) > LOCKS_BYTES_MAX:
        return b""
    count = len(locks) // HASH_BYTES
    assert len(distances) in (0, count)
    block = bytearray(locks)
    block += distances
    mark = _MAGIC_WITH_DISTANCES if distances else _MAGIC
    block += _TRAILER_STRUCT.pack(mark, first, end.last, chain_before, end.chain, count, 0)
    block[-_CRC_BYTES:] = crc32(memoryview(block)[:-_CRC_BYTES]).to_bytes(_CRC_BYTES, "big")
    return bytes(block)


class LockBlockReader:
    """Reads a run of lock blocks from its end (rules 3 and 4)."""

    def __init__(self, data: Buffer) -> None:
        self._data = memoryview(data)
        self._end = len(self._data)
        self.is_exhausted = False  # no further block can be valid

    def block_ending_at(self, end: LogEnd, steps_max: int) -> LockBlock | None:
        """Search `steps_max` further blocks for the block that ends at `end`; None if not found."""
        for _ in range(steps_max):
            block = self._take_last_block()
            if block is None or block.end.last < end.last:
                self.is_exhausted = True
                return None
            if block.end == end:
                return block
        return None

    def _take_last_block(self) -> LockBlock | None:
        """Remove and return the last block, whichever log it belongs to; None if it is invalid."""
        start = self._end - TRAILER_BYTES
        if start < 0:
            return None
        mark, first, last, chain_before, chain, count, crc = _TRAILER_STRUCT.unpack_from(
            self._data, start
        )
        locks_bytes = count * HASH_BYTES
        start -= locks_bytes + (count if mark == _MAGIC_WITH_DISTANCES else 0)
        if mark not in (_MAGIC, _MAGIC_WITH_DISTANCES) or start < 0 or not 0 <= first <= last:
            return None
        block = self._data[start : self._end]
        if crc32(block[:-_CRC_BYTES]) != crc:
            return None
        self._end = start
        end = LogEnd(TransactionId(last), Chain(chain))
        locks, distances = block[:locks_bytes], block[locks_bytes:-TRAILER_BYTES]
        return LockBlock(TransactionId(first), end, Chain(chain_before), locks, distances)
