"""The counts of a segment's statistics."""

from collections import Counter

import numpy as np
import pytest

from tests.offline_storage import flip_byte, overwrite_bytes, sample_storage, segment_files
from waltz_core.offline.statistic import percentile, statistic_of


def test_the_records_and_batches_of_a_segment_are_counted(tmp_path):
    directory, world = sample_storage(tmp_path)
    found = [statistic_of(path) for path in segment_files(directory)]
    assert [(one.record_count, one.last) for one in found] == [(11, 10), (13, 23), (12, 35)]
    assert sum(one.file_bytes for one in found) == 3 * 128 + sum(map(len, world.records))
    sizes = Counter(len(one) - 40 for one in world.records)
    assert sum((one.sizes for one in found), Counter()) == sizes
    assert sum(one.data_bytes for one in found) == sum(sizes.elements())
    assert [one.batch_count for one in found] == [3, 2, 2]
    batches = [sorted(one.batch_records.elements()) for one in found]
    assert batches == [[1, 3, 5], [2, 12], [4, 9]]
    assert [(one.first_stamp_ms, one.last_stamp_ms) for one in found] == [
        (1002, 1008),
        (1020, 1022),
        (1031, 1035),
    ]
    session = found[1].sessions[1]
    assert (session.first, session.last, session.batch_count) == (9, 22, 2)
    assert [one.index_density for one in found] == [1.0, 1.0, 1.0]


def test_unreadable_records_are_counted_in_bytes(tmp_path):
    directory, world = sample_storage(tmp_path)
    path = segment_files(directory)[0]
    start = 128 + sum(map(len, world.records[:3]))
    overwrite_bytes(path, start, bytes(len(world.records[3])))
    flip_byte(segment_files(directory, ".chn")[0], 70)
    segment_files(directory, ".idx")[0].unlink()
    statistic = statistic_of(path)
    assert (statistic.record_count, statistic.unreadable_bytes) == (10, len(world.records[3]))
    assert (statistic.batch_count, statistic.invalid_batch_count) == (2, 1)
    assert statistic.index_density is None


@pytest.mark.parametrize("percent", [1, 50, 90, 99, 100])
def test_percentiles_use_the_nearest_rank(percent):
    values = [3, 3, 5, 9, 20, 21, 21, 21, 400, 7000, 7001]
    expected = np.percentile(values, percent, method="inverted_cdf")
    assert percentile(Counter(values), percent) == expected
    assert percentile(Counter(), percent) == 0
