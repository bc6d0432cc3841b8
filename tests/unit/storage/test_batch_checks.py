"""Checks of batches: complete, in place and chained; otherwise they are reported."""

import pytest

from tests.unit.storage.logs import KEY, ROOT, make_batches, make_run, make_segments, new_disk
from waltz_core.errors import BadRequest, ChecksumMismatch
from waltz_core.records.record import GENESIS_CHAIN, RECONSTRUCTED, next_chain
from waltz_core.storage.files.batch_checks import (
    check_batches,
    check_chain,
    check_repaired_batches,
    entry_before,
)
from waltz_core.storage.files.format import (
    LINEAGE_ENTRY_BYTES,
    LINEAGE_HEADER_BYTES,
    IdRange,
    segment_name,
)

RECORD_BYTES = 60


def test_the_chain_check_stops_at_the_first_batch_that_does_not_match():
    records, lengths, entries = make_batches(4, [3, 2, 1], KEY)
    check_batches(4, lengths, records, KEY, entries)
    segments, _, whole = make_segments(new_disk(), [3, 2, 1])
    crcs = segments.record_crcs(0, 5)
    assert check_chain(whole, 0, GENESIS_CHAIN, crcs) is None
    assert check_chain(whole, 0, KEY, crcs) == 0
    assert check_chain([whole[0], whole[2]], 0, GENESIS_CHAIN, crcs) == 1
    assert check_chain(whole, 0, GENESIS_CHAIN, crcs[:-4]) == 2
    chain = next_chain(whole[0].chain, 4, 4, whole[1].session_id, crcs[16:20])
    leaves_one_out = [whole[0], whole[1]._replace(first=4, last=4, chain=chain)]
    assert check_chain(leaves_one_out, 0, GENESIS_CHAIN, crcs) == 1
    changed = [whole[0], whole[1]._replace(session_id=7), whole[2]]
    assert check_chain(changed, 0, GENESIS_CHAIN, crcs) == 1


def test_a_batch_that_differs_from_its_header_is_rejected():
    records, lengths, entries = make_batches(4, [3, 2], KEY)
    bad = bytearray(records)
    bad[2 * RECORD_BYTES + 44] ^= 1
    with pytest.raises(
        ChecksumMismatch,
        match="append from transaction 4 on: the CRC or the length of record 6 is wrong",
    ):
        check_batches(4, lengths, bytes(bad), KEY, entries)
    other = records[:RECORD_BYTES] + make_run(9, [20])[0] + records[2 * RECORD_BYTES :]
    with pytest.raises(
        BadRequest, match="append from transaction 4 on: expected transaction ID 5, found 9"
    ):
        check_batches(4, lengths, other, KEY, entries)
    rejected = [
        (5, lengths, records, KEY, entries),
        (4, lengths, records, KEY, []),
        (4, lengths[:-1], records, KEY, entries),
        (4, lengths, records, KEY, entries[:1]),
        (4, lengths, records, KEY, [entries[0], entries[1]._replace(chain=KEY)]),
        (4, lengths, records, KEY, [entries[0], entries[1]._replace(last=7)]),
        (4, lengths, records, GENESIS_CHAIN, entries),
        (4, lengths[:0], b"", KEY, entries),
    ]
    for first, sizes, run, chain, batches in rejected:
        with pytest.raises(BadRequest, match="append from"):
            check_batches(first, sizes, run, chain, batches)


def test_repaired_records_need_not_match_the_following_batch():
    disk = new_disk()
    segments, _, entries = make_segments(disk, [3], [4], [2])
    segments.all[1].lineage.truncate(0)
    segments.all[2].rewrite_lineage_header(entries[0].chain)
    check_repaired_batches(segments, IdRange(3, 6), ())
    with pytest.raises(ChecksumMismatch):
        check_repaired_batches(segments, IdRange(3, 7), ())


def test_a_reconstructed_chain_does_not_prove_records():
    segments, _, entries = make_segments(new_disk(), [3, 4, 2])
    segments.current.lineage.rewrite(0, [entries[0]._replace(chain=KEY)])
    with pytest.raises(ChecksumMismatch, match=r"records 0\.\.4 do not match .* batch 0\.\.2"):
        check_repaired_batches(segments, IdRange(0, 4), ())
    segments.current.lineage.rewrite(0, [entries[0]._replace(chain=KEY, session_id=RECONSTRUCTED)])
    check_repaired_batches(segments, IdRange(0, 4), ())


@pytest.mark.parametrize("is_unreadable", [False, True])
def test_damage_found_during_a_repair_is_repaired_separately(is_unreadable):
    disk = new_disk()
    segments, _, _ = make_segments(disk, [3, 40])
    path, position = ROOT / segment_name(0, ".seg"), 128 + 36 * RECORD_BYTES + 44
    if is_unreadable:
        disk.make_unreadable(path, position, position)
    else:
        disk.flip_bits(path, position)
    found = check_repaired_batches(segments, IdRange(3, 4), ())
    assert IdRange(36, 36) in found
    assert all(30 < one.first == one.last < 43 for one in found)


def test_the_batch_before_an_id_ends_directly_before_this_id():
    disk = new_disk()
    segments, _, entries = make_segments(disk, [3, 2], [4])
    assert entry_before(segments, 0) is None
    assert entry_before(segments, 3) == entries[0]
    assert entry_before(segments, 5) == entries[1]
    assert entry_before(segments, 4) is None, "no batch ends at 3"
    position = LINEAGE_HEADER_BYTES + LINEAGE_ENTRY_BYTES
    disk.flip_bits(ROOT / segment_name(0, ".chn"), position)
    assert entry_before(segments, 5) is None, "the batch entry is unreadable"
