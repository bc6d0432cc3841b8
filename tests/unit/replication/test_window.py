"""Unit tests of `waltz_core.replication.window`."""

from tests.unit.replication.model_storage import make_batch
from waltz_core.records.lock_blocks import LockBlockReader, LogEnd
from waltz_core.records.record import GENESIS_CHAIN
from waltz_core.replication.window import SessionWindow


def filled_window(*sizes, start=-1):
    window = SessionWindow(start, GENESIS_CHAIN)
    for size in sizes:
        window.add(make_batch(window.last + 1, list(range(size)), 7), 3, 100)
    return window


def test_a_batch_with_known_locks_has_a_lock_block():
    window = filled_window(2)
    assert window.batch_at(0).lock_block == b""
    before = window.chain
    window_batch = window.add(make_batch(2, [1, 2], 7)._replace(locks=b"lock"), 3, 100)
    block = LockBlockReader(window_batch.lock_block).block_ending_at(LogEnd(3, window.chain), 1)
    assert (block.first, block.chain_before, bytes(block.locks)) == (2, before, b"lock")


def test_batches_for_late_replicas_are_kept_up_to_the_limit():
    window = filled_window(1, 1, 1)
    size = window.batch_at(0).size_bytes
    window.commit(2)
    window.trim(1, 10 * size, 9)
    assert window.first == 1
    window.trim(0, size, 9)
    assert window.first == 2
    window.trim(3, size, 9)
    assert window.first == 3 == window.last + 1


def test_the_window_limits_the_number_of_batches_and_their_bytes_with_lock_blocks():
    """A batch of one small record needs a hundred times its bytes in memory."""
    window = filled_window(1, 1)
    window_batch = window.add(make_batch(2, [1], 7)._replace(locks=bytes(400)), 3, 100)
    window.commit(2)
    size_bytes = (
        window.batch_at(0).size_bytes + window.batch_at(1).size_bytes + window_batch.size_bytes
    )
    window.trim(0, size_bytes + len(window_batch.lock_block), 3)
    assert window.first == 0
    window.trim(0, size_bytes + len(window_batch.lock_block) - 1, 3)
    assert window.first == 1
    window = filled_window(*[1] * 10)
    window.commit(8)
    window.trim(0, 1 << 20, 4)
    assert window.first == 6
    window.trim(0, 1 << 20, 0)
    assert window.first == 9, "nothing in flight is dropped"
