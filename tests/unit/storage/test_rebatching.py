"""Batches are dropped and rebuilt; the records stay."""

from tests.unit.storage.test_recovery import content, make_segments, new_disk, path_of
from waltz_core.records.record import GENESIS_CHAIN, LineageEntry, next_chain
from waltz_core.storage.log import rebatching


def entries_of(segments):
    return list(segments.entries_from(0))


def lineage_entries(segments, bounds):
    chain, found = GENESIS_CHAIN, []
    for first, last in bounds:
        chain = next_chain(chain, first, last, 9, segments.record_crcs(first, last))
        found.append(LineageEntry(first, last, 9, 5, chain))
    return found


def test_batches_after_an_id_are_dropped_in_every_segment():
    for end, left in ((8, 4), (6, 3), (5, 2), (2, 1), (1, 0), (-1, 0)):
        segments, records, entries = make_segments(new_disk(), [3, 2], [2], [2])
        rebatching.drop_batches(segments, end)
        fitting = [entry for entry in entries if entry.last <= end]
        assert entries_of(segments) == fitting
        assert len(fitting) == {4: 4, 3: 3, 2: 2, 1: 1, 0: 0}[left]
        assert content(segments) == records
        segments.close()


def test_new_batches_replace_dropped_ones_and_chain_headers_are_rewritten():
    disk = new_disk()
    segments, records, _ = make_segments(disk, [3, 2], [2], [2])
    rebatching.drop_batches(segments, -1)
    bounds = lineage_entries(segments, [(0, 1), (2, 5), (6, 8)])
    rebatching.add_batches(segments, bounds[:1])
    rebatching.add_batches(segments, bounds[1:])
    rebatching.rewrite_chain_headers(segments)
    assert entries_of(segments) == bounds
    assert content(segments) == records
    earlier = [rebatching.chain_before(segments, position, within=False) for position in range(3)]
    assert earlier == [GENESIS_CHAIN, bounds[0].chain, bounds[1].chain]
    assert [each.lineage.chain_before for each in segments.all] == earlier
    assert rebatching.chain_before(segments, 2) == bounds[2].chain
    segments.close()
    assert disk.exists(path_of(7, ".chn"))
