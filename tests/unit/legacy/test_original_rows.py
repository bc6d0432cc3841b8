"""An append of ours taken apart, its outcome put together, and stretches of a feed."""

import struct

import pytest

from waltz_core import errors
from waltz_core.legacy.legacy_server_rows import FeedRun, LegacyRow, ParcelRows, rows_of
from waltz_core.records.checksum import crc32
from waltz_core.records.record import ReqId
from waltz_core.wire.messages import AppendBatch, AppendRequest, FeedData, MountWriter, Reason

FIRST = ReqId(7, 1, 0, 4)


def test_a_single_append_stays_what_it_is():
    request = AppendRequest(FIRST, 3, (1,), (2,), (3,), 9, b"x", crc32(b"x"))
    (row,) = rows_of(request)
    assert row.request is request
    assert row.mark == 3


def test_a_batch_that_cannot_be_read_raises():
    with pytest.raises(errors.BadRequest):
        rows_of(AppendBatch(FIRST, -1, b"no batch", 0))


def test_a_parcel_is_answered_with_its_last_row():
    parcel = ParcelRows(FIRST, 3)
    rows = [LegacyRow(parcel, place, None) for place in range(3)]
    assert not rows[2].committed(11)
    rows[1].estimate = 8
    assert not rows[1].rejected(Reason.NOT_MOUNTED)
    assert rows[0].rejected(Reason.LOST)
    result = parcel.result(12)
    assert result.high_water_mark == 12
    assert struct.unpack(">3q", result.transaction_ids) == (-1, -1, 11)
    assert list(result.reasons) == [Reason.LOST, Reason.LOCK, Reason.COMMITTED]
    assert struct.unpack(">3q", result.conflicting) == (-1, 8, -1)


def test_a_stretch_is_taken_once():
    run = FeedRun(MountWriter(ReqId(7, 1, 0, -1), 0, 3, wants_feed=True))
    assert run.take() is None
    run.add(FeedData(FIRST, 4, 6))
    batch = run.take()
    assert (batch.first, batch.count, bytes(batch.headers)) == (4, 1, struct.pack(">5i", *FIRST, 6))
    assert run.take() is None
