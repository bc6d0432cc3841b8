"""Iteration over a segment's records, also across damage."""

from random import Random

import pytest

from tests.storage_model import encode_record
from waltz_core.offline import records
from waltz_core.offline.records import Gap, RecordRun, has_valid_crc, record_fields, walk_records


class CountingFile:
    """A file in memory that records the size of the largest read."""

    def __init__(self, content):
        self.content = bytes(128) + content
        self.largest_read = 0

    def pread(self, size, offset):
        data = self.content[offset : offset + size]
        self.largest_read = max(self.largest_read, len(data))
        return data

    def size(self):
        return len(self.content)


def sample_records(count, first=0, seed=1):
    rng = Random(seed)
    return [
        encode_record(first + number, rng.randbytes(rng.randint(0, 90))) for number in range(count)
    ]


def ids(parts):
    """IDs of readable records, in order, and the gaps."""
    parts = list(parts)
    runs = [one for one in parts if isinstance(one, RecordRun)]
    found = [one.first + position for one in runs for position in range(one.length)]
    return found, [one for one in parts if isinstance(one, Gap)]


def test_all_records_are_returned_in_order_with_their_bytes():
    samples = sample_records(50, first=7)
    (run,) = walk_records(CountingFile(b"".join(samples)), 7)
    assert (run.first, run.offset, run.length) == (7, 128, 50)
    taken = [run.data[a:b] for a, b in zip(run.bounds, run.bounds[1:], strict=False)]
    assert taken == samples
    assert all(has_valid_crc(one) for one in taken)
    assert [record_fields(one).transaction_id for one in taken] == list(range(7, 57))


def test_a_run_of_records_can_be_sliced_by_id():
    (run,) = walk_records(CountingFile(b"".join(sample_records(10))), 0)
    part = run.starting_at(3).up_to(5)
    assert (part.first, part.length) == (3, 3)
    assert record_fields(part.data[part.bounds[0] :]).transaction_id == 3
    assert run.starting_at(12).length == 0
    assert run.up_to(-1).length == 0


def test_reads_are_limited_to_a_block_or_one_larger_record(monkeypatch):
    monkeypatch.setattr(records, "BLOCK_BYTES", 300)
    file = CountingFile(b"".join(sample_records(40)))
    parts = list(walk_records(file, 0))
    assert ids(parts) == (list(range(40)), [])
    assert len(parts) > 5
    assert file.largest_read == 300
    encoded_records = [
        encode_record(0, b"a" * 10),
        encode_record(1, b"b" * 5000),
        encode_record(2, b"c"),
    ]
    assert ids(walk_records(CountingFile(b"".join(encoded_records)), 0)) == ([0, 1, 2], [])


@pytest.mark.parametrize("block", [200, 1 << 20])
@pytest.mark.parametrize("seed", range(10))
def test_a_gap_ends_at_the_next_valid_record(monkeypatch, seed, block):
    monkeypatch.setattr(records, "BLOCK_BYTES", block)
    rng = Random(seed)
    samples = sample_records(30, seed=seed)
    low = rng.randrange(29)
    high = rng.randrange(low, 29)
    damaged = [
        *samples[:low],
        *(bytes(len(one)) for one in samples[low : high + 1]),
        *samples[high + 1 :],
    ]
    found, gaps = ids(walk_records(CountingFile(b"".join(damaged)), 0))
    assert found == [*range(low), *range(high + 1, 30)]
    start = 128 + len(b"".join(samples[:low]))
    end = start + len(b"".join(samples[low : high + 1]))
    assert [one[:4] for one in gaps] == [(low, high + 1, start, end)]


def test_a_torn_end_is_a_gap_without_a_next_record():
    samples = sample_records(5)
    whole = b"".join(samples)
    found, gaps = ids(walk_records(CountingFile(whole[:-1]), 0))
    assert found == [0, 1, 2, 3]
    assert gaps[0][:2] == (4, None)
    assert gaps[0].end == 128 + len(whole) - 1


def test_a_wrong_crc_alone_does_not_end_a_run_of_records():
    samples = sample_records(5)
    damaged = bytearray(b"".join(samples))
    damaged[len(samples[0]) + 36] ^= 1
    (run,) = walk_records(CountingFile(bytes(damaged)), 0)
    assert run.length == 5
    assert not has_valid_crc(run.data[run.bounds[1] : run.bounds[2]])


def test_a_valid_record_inside_the_data_of_another_record_is_not_returned():
    """The inner record is valid, but the outer record is intact, so no search starts there."""
    encoded_records = [encode_record(0, encode_record(1, b"bait")), encode_record(1, b"true")]
    (run,) = walk_records(CountingFile(b"".join(encoded_records)), 0)
    assert run.length == 2
    assert run.data[run.bounds[1] + 36 : -4] == b"true"
