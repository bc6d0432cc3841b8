"""Unit tests of `waltz_core.replication.original_records`: records, lists and failures of S 0."""

import struct
import zlib

import pytest

from tests.unit.replication.model_storage import make_batch
from waltz_core import errors
from waltz_core.record import MADE_UP, RECORD_HEADER, Record, RecordHeader, ReqId, identity_chain
from waltz_core.replication import original_records
from waltz_core.replication.original_records import (
    APPEND_BYTES_MAX,
    APPEND_RECORDS_MAX,
    PageSize,
    check_dense,
    chunks_of,
    failure,
    header_bytes,
    identities_of,
    raw_record,
    reading,
    records_of,
    was_read,
)
from waltz_core.replication.repair import verify_records
from waltz_core.wire import messages, original_messages
from waltz_core.wire.messages import RangeForm

ME = (4, 9, 0)  # session, sequence, partition
GOLDEN_RECORD = (
    "0000000000000000000000010000000100000000000000020000000700000007154677bc68656c6c6f2d309afdeea8"
)


def record(at, data=b"x"):
    return Record(at, ReqId(1, 2, 0, at), 7, data)


def append_of(batch):
    fields = (batch.first, batch.lengths, batch.records, batch.records_crc, bytes(16), ())
    return messages.AppendRaw(*ME, *fields)


def asked(first, last, form=RangeForm.WHOLE):
    return messages.RangeRaw(*ME, first, last, 1 << 20, int(form), False, True)


def test_a_record_becomes_the_bytes_of_a_segment_file():
    found = raw_record(Record(0, ReqId(1, 1, 0, 2), 7, b"hello-0"))
    assert found.hex() == GOLDEN_RECORD


def test_raw_records_are_taken_apart_and_put_together():
    batch = make_batch(5, [1, 2, 3], 0)
    found = records_of(append_of(batch))
    assert [each.transaction_id for each in found] == [5, 6, 7]
    assert b"".join(map(raw_record, found)) == batch.records


def test_an_identity_is_made_of_the_header_alone():
    batch = make_batch(5, [1, 2], 0)
    found = identities_of([batch])
    assert list(found) == [5, 6]
    assert found[6] == identity_chain(header_bytes(records_of(append_of(batch))[1]))
    assert len(set(found.values())) == 2
    header = RecordHeader(5, ReqId(1, 2, 3, 4), 6)
    assert header_bytes(header) == RECORD_HEADER.pack(5, ReqId(1, 2, 3, 4).to_bytes(), 6)


def test_appends_are_bounded_by_count_and_by_bytes():
    few = [record(at) for at in range(3)]
    assert chunks_of(few) == [tuple(few)]
    many = [record(at) for at in range(2 * APPEND_RECORDS_MAX + 1)]
    assert [len(each) for each in chunks_of(many)] == [APPEND_RECORDS_MAX, APPEND_RECORDS_MAX, 1]
    large = [record(at, bytes(APPEND_BYTES_MAX // 2)) for at in range(4)]
    assert [len(each) for each in chunks_of(large)] == [1, 1, 1, 1]
    assert [each.transaction_id for chunk in chunks_of(large) for each in chunk] == [0, 1, 2, 3]
    too_large = [record(at, bytes(APPEND_BYTES_MAX + 1)) for at in range(2)]
    assert [len(each) for each in chunks_of(too_large)] == [1, 1]


def test_pages_grow_while_records_are_short():
    pages = PageSize()
    counts = []
    for _ in range(9):
        counts.append(pages.next(10_000))
        pages.learn([record(0)] * counts[-1])
    assert counts == [3, 6, 12, 24, 48, 96, 192, 256, 256]
    assert pages.next(2) == 2
    pages.learn([record(0, bytes(1 << 20))])
    assert pages.next(10_000) == 3


@pytest.mark.parametrize("found", [[], [record(1)], [record(0), record(2)], [record(0)] * 3])
def test_what_is_not_dense_is_no_answer(found):
    with pytest.raises(errors.RemoteProtocolError):
        check_dense(found, 0, 2)


def test_a_reader_gets_records_with_both_crcs():
    pages, request = PageSize(), asked(3, 9)
    sent = reading(request, pages)
    assert sent == original_messages.RecordListRequest(*ME, 3, 3)
    answer = original_messages.RecordListResponse(*ME, (record(3), record(4, b"")))
    found = was_read(request, answer, pages)
    verify_records(found, first=3, last=9)
    assert (found.first, found.count, found.form) == (3, 2, RangeForm.WHOLE)
    assert [entry[:3] for entry in found.lineage] == [(3, 4, MADE_UP)]


def test_a_reader_gets_headers():
    pages, request = PageSize(), asked(3, 9, RangeForm.HEADERS)
    assert reading(request, pages) == original_messages.RecordHeaderListRequest(*ME, 3, 7)
    headers = (RecordHeader(3, ReqId(1, 2, 0, 4), 5),)
    found = was_read(request, original_messages.RecordHeaderListResponse(*ME, headers), pages)
    assert found.lengths == b""
    assert found.records == header_bytes(headers[0])
    assert found.records_crc == zlib.crc32(found.records)
    assert reading(asked(0, 10**6, RangeForm.HEADERS), pages).count_max == 1024


def test_a_reader_is_told_what_is_not_there():
    pages, request = PageSize(), asked(3, 9)
    found = was_read(request, original_messages.RecordListResponse(*ME, ()), pages)
    assert isinstance(found, messages.Nack)
    refused = original_messages.FailureResponse(*ME, "Partition:0 is not assigned.", ())
    found = was_read(request, refused, pages)
    assert found.error_code == errors.UnknownPartition.code
    with pytest.raises(errors.RemoteProtocolError):
        was_read(request, messages.SuccessResponse(*ME), pages)
    with pytest.raises(errors.RemoteProtocolError):
        was_read(request, original_messages.RecordListResponse(*ME, (record(4),)), pages)


@pytest.mark.parametrize(
    ("text", "kind", "promised"),
    [
        ("x.ConcurrentUpdateException: session id has changed to 12, but", "SessionFenced", 12),
        ("java.lang.Exception: Partition:77 is not assigned.", "UnknownPartition", -1),
        ("read and write for partition=3 have been disabled on storage node", "Unavailable", -1),
        (
            "Provided cluster key is inconsistent with key in control file.",
            "ClusterKeyMismatch",
            -1,
        ),
        ("x.StorageException: transaction out of order", "BadRequest", -1),
        (None, "BadRequest", -1),
    ],
)
def test_a_failure_is_understood_by_its_text(text, kind, promised):
    found = failure(ME, original_messages.FailureResponse(*ME, text, ()))
    assert (found.session_id, found.sequence, found.partition_id) == ME
    assert found.error_code == getattr(errors, kind).code
    assert found.promised == promised


def test_the_lengths_are_those_of_the_records():
    found = original_records.range_bytes(ME, [record(0), record(1, b"yy")], bytes(16), ())
    assert struct.unpack(">2i", found.lengths) == (41, 42)
