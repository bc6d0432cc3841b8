"""The order of waiting work of one partition."""

from dataclasses import replace
from types import SimpleNamespace

from tests.storage_owner import OwnerSession
from waltz_core.storage.files.format import Promise
from waltz_core.storage.log.scrub import ScrubPiece
from waltz_core.storage.service import lane as lanes
from waltz_core.storage.service.lane import Lane, queue_bytes
from waltz_core.storage.service.work import BATCHES_BYTES_MAX, RANGE_BYTES_MAX, LaneRequest
from waltz_core.wire.messages import Engage, Heartbeat, RangeForm, RangeRaw, Repair
from waltz_core.wire.record_locations import LOCATIONS

OWNER = OwnerSession(1)


def lane(*, writes=(), reads=(), piece=None):
    new_lane = Lane(SimpleNamespace(), Promise(5, b"n" * 16))
    new_lane.writes.extend(LaneRequest(1, write) for write in writes)
    new_lane.reads.extend(LaneRequest(1, each) for each in reads)
    new_lane.scrub_piece = piece
    return new_lane


def kinds(work):
    requests, piece = work
    return [type(request.message).__name__ for request in requests] + (
        [] if piece is None else [piece]
    )


def a_read():
    return OWNER.make(RangeRaw, 0, 9, 100, RangeForm.WHOLE, False, False)


def test_reads_and_writes_alternate_and_appends_are_grouped():
    owner = OwnerSession(1)
    writes = [owner.append(), owner.append(), owner.make(Engage, 1), owner.append()]
    one = lane(writes=writes, reads=[a_read() for _ in range(3)])
    work = [kinds(one.take_next()) for _ in range(7)]
    assert work == [
        ["RangeRaw"],
        ["AppendRaw", "AppendRaw"],
        ["RangeRaw"],
        ["Engage"],
        ["RangeRaw"],
        ["AppendRaw"],
        [],
    ]


def test_a_scrub_piece_runs_before_other_requests_and_only_once():
    one = lane(writes=[OWNER.make(Engage, 1)], reads=[a_read()], piece=ScrubPiece(7, 100))
    assert [kinds(one.take_next()) for _ in range(3)] == [
        [ScrubPiece(7, 100)],
        ["RangeRaw"],
        ["Engage"],
    ]


def test_a_group_of_appends_has_a_limited_number_of_bytes(monkeypatch):
    owner = OwnerSession(1)
    appends = [owner.append(data=bytes(400)) for _ in range(5)]
    monkeypatch.setattr(lanes, "GROUP_BYTES_MAX", 2 * queue_bytes(appends[0]))
    one = lane(writes=appends)
    assert [len(one.take_next()[0]) for _ in range(4)] == [2, 2, 1, 0]


def test_requests_are_charged_for_sent_or_requested_bytes():
    least = queue_bytes(OWNER.make(Heartbeat))
    assert queue_bytes(a_read()) == least + 100
    # Answers have a limited size, whatever a peer requests, and locations are small.
    most = replace(a_read(), bytes_max=(1 << 31) - 1)
    assert queue_bytes(most) == least + RANGE_BYTES_MAX
    assert queue_bytes(replace(most, whole_batches=True)) == least + BATCHES_BYTES_MAX
    assert queue_bytes(replace(most, form=LOCATIONS)) == least
    assert queue_bytes(OWNER.make(Repair, 0, bytes(8), bytes(70), 0)) == least + 78
    append = OwnerSession(1).append()
    assert queue_bytes(append) == least + len(append.records) + len(append.lengths)
    more = replace(append, locks=bytes(1_000), lineage=append.lineage * 3)
    assert queue_bytes(more) == queue_bytes(append) + 1_000 + 2 * 256
