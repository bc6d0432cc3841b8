"""One request of S 0 in, its answer out."""

import pytest

from tests.unit.storage.test_replica_log import World, records
from waltz_core.errors import BadRequest, ChecksumMismatch, ReplicaSuspect
from waltz_core.record import RecordHeader
from waltz_core.storage import original_work
from waltz_core.wire.messages import ENTRIES_MAX, SuccessResponse
from waltz_core.wire.original_messages import (
    AppendRecordsRequest,
    LastSessionInfoRequest,
    LastSessionInfoResponse,
    MaxTransactionIdRequest,
    MaxTransactionIdResponse,
    RecordHeaderListRequest,
    RecordHeaderListResponse,
    RecordHeaderRequest,
    RecordHeaderResponse,
    RecordListRequest,
    RecordListResponse,
    RecordRequest,
    RecordResponse,
    SetLowWaterMarkRequest,
    TruncateRequest,
)

PREFIX = (3, 8, 0)


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    yield made
    made.log.abandon()
    made.control.close()


def ask(world, kind, *fields):
    return original_work.serve(world.log, kind(*PREFIX, *fields))


def append(world, made):
    message = AppendRecordsRequest(*PREFIX, tuple(made), False)
    original_work.append(world.log, message)
    world.log.sync_records()
    return original_work.disk_bytes(message)


def test_what_a_server_asks_of_a_replica(world):
    assert ask(world, LastSessionInfoRequest, False) == LastSessionInfoResponse(*PREFIX, -1, -1, -1)
    assert world.log.promised == 3
    assert append(world, records(0, 5)) == 5 * 44
    assert ask(world, MaxTransactionIdRequest, False) == MaxTransactionIdResponse(*PREFIX, 4)
    assert ask(world, TruncateRequest, 2, False) == MaxTransactionIdResponse(*PREFIX, 2)
    assert ask(world, TruncateRequest, 9, False) == MaxTransactionIdResponse(*PREFIX, 2)
    assert ask(world, SetLowWaterMarkRequest, 2, False) == SuccessResponse(*PREFIX)
    assert ask(world, LastSessionInfoRequest, False) == LastSessionInfoResponse(*PREFIX, 3, 2, 2)
    with pytest.raises(BadRequest):
        ask(world, AppendRecordsRequest, (), False)


def test_what_there_is_of_records_is_read(world):
    made = tuple(records(0, 5))
    headers = tuple(RecordHeader(*each[:3]) for each in made)
    append(world, made)
    for kind, of, content in (
        (RecordRequest, RecordResponse, made),
        (RecordHeaderRequest, RecordHeaderResponse, headers),
    ):
        assert ask(world, kind, 3) == of(*PREFIX, content[3])
        for absent in (5, 1 << 40, -1):
            answer = ask(world, kind, absent)
            assert answer == of(*PREFIX, None)
            assert original_work.read_count(answer) == 0
        assert original_work.read_count(ask(world, kind, 3)) == 1
    for kind, of, content in (
        (RecordListRequest, RecordListResponse, made),
        (RecordHeaderListRequest, RecordHeaderListResponse, headers),
    ):
        for first, count, expected in (
            (0, (1 << 31) - 1, content),
            (1, 2, content[1:3]),
            (4, 9, content[4:]),
            (5, 1, ()),
            (-1, 3, ()),
            (0, 0, ()),
            (0, -5, ()),
        ):
            answer = ask(world, kind, first, count)
            assert answer == of(*PREFIX, expected)
            assert original_work.read_count(answer) == len(expected)
    assert original_work.read_count(ask(world, MaxTransactionIdRequest, False)) == 0


def test_a_list_keeps_to_bytes_and_to_records(world, monkeypatch):
    append(world, records(0, 20, bytes(1_000)))
    monkeypatch.setattr(original_work, "LIST_BYTES_MAX", 5 * 1_040)
    assert len(ask(world, RecordListRequest, 2, 100).records) == 5
    monkeypatch.setattr(original_work, "LIST_BYTES_MAX", 1)
    assert len(ask(world, RecordListRequest, 2, 100).records) == 1
    monkeypatch.setattr(original_work, "LIST_BYTES_MAX", 1 << 30)
    monkeypatch.setattr(original_work, "ENTRIES_MAX", 3)
    assert len(ask(world, RecordListRequest, 2, 100).records) == 3
    assert len(ask(world, RecordHeaderListRequest, 2, 100).headers) == 3
    assert ENTRIES_MAX > 3


def test_a_record_that_has_rotted_is_an_error_and_never_served(world):
    append(world, records(0, 3))
    path = world.directory / "0" / f"{0:019d}.seg"
    data = bytearray(path.read_bytes())
    data[128 + 44 + 40] ^= 1
    path.write_bytes(data)
    assert len(ask(world, RecordListRequest, 0, 9).records) == 1
    for kind in (RecordRequest, RecordHeaderRequest):
        with pytest.raises(ChecksumMismatch):
            ask(world, kind, 1)
    assert world.log.damaged == ((1, 1),)
    assert ask(world, RecordRequest, 2).record.transaction_id == 2


def test_a_suspect_replica_tells_no_session_and_no_end_and_is_read(world, monkeypatch):
    append(world, records(0, 3))
    monkeypatch.setattr(type(world.log), "suspect", property(lambda _: True))
    for kind in (LastSessionInfoRequest, MaxTransactionIdRequest):
        with pytest.raises(ReplicaSuspect):
            ask(world, kind, False)
    assert ask(world, RecordRequest, 2).record.transaction_id == 2
