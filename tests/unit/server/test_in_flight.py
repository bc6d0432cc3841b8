"""Rows in flight: rows that are validated, but have no outcome yet."""

from waltz_core.records.batches import EncodedBatch
from waltz_core.records.lock_blocks import DISTANCES_TRANSACTIONS_MAX
from waltz_core.server.append.in_flight import BatchDraft


def test_each_lock_distance_is_from_the_writer_of_the_lock_to_the_end_of_the_batch():
    draft = BatchDraft()
    for first, last, lock_rows in ((7, 9, b"\0\2\2"), (10, 10, b""), (11, 12, b"\1\0")):
        part = EncodedBatch(first, last, b"", memoryview(b""), b"", 0)
        draft.add(part, bytes(4 * len(lock_rows)), lock_rows)
    assert list(draft.distances()) == [12 - 7, 12 - 9, 12 - 9, 0, 1]
    draft.add(
        EncodedBatch(13, 7 + DISTANCES_TRANSACTIONS_MAX, b"", memoryview(b""), b"", 0), b"", b""
    )
    assert draft.distances() == b""
