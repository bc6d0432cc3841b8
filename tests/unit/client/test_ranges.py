"""What a reader believes of an answer."""

import asyncio
from dataclasses import replace

import pytest

from tests.unit.client.stories import headers, req
from waltz_core import errors
from waltz_core.batches import decode_append, encode_append, encode_records
from waltz_core.client.ranges import RangeChunk, RangeQuery, chunk_of_server, read_chunks
from waltz_core.record import LineageEntry, PartitionId, TransactionId
from waltz_core.wire.messages import RangeData, RangeForm

P = PartitionId(3)
QUERY = RangeQuery(TransactionId(10), TransactionId(14))


def answer(**changes) -> RangeData:
    """Return records 10..14 as a server sends them."""
    none = [[]] * 5
    payload = encode_append(
        [0] * 5, [b"%d" % i for i in range(5)], write_locks=none, read_locks=none, append_locks=none
    )
    rows = decode_append(payload, rows_max=5, bytes_max=100_000)
    batch = encode_records(rows, None, TransactionId(10), req(1))
    message = RangeData(
        req(-1),
        10,
        5,
        15,
        RangeForm.WHOLE,
        batch.lengths,
        batch.records,
        1,
        20,
        (LineageEntry(8, 14, 1, 77, bytes(16)),),
    )
    return replace(message, **changes)


def flipped(place: int) -> bytes:
    records = bytearray(answer().records)
    records[place] ^= 1
    return bytes(records)


def test_a_good_answer_is_handed_on():
    chunk = chunk_of_server(P, QUERY, answer())
    assert (chunk.first, chunk.count, chunk.next) == (10, 5, 15)
    assert chunk.stamps == [(8, 14, 77)]
    assert chunk.lengths.tolist() == [41] * 5


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"records": flipped(40)}, errors.ChecksumMismatch),
        ({"records": flipped(7)}, errors.ChecksumMismatch),
        ({"records": answer().records[:-1]}, errors.BadFormat),
        ({"lengths": b"\0" * 20}, errors.BadFormat),
        ({"first": 11}, errors.RemoteProtocolError),
        ({"form": 1}, errors.RemoteProtocolError),
        ({"count": 4}, errors.RemoteProtocolError),
        ({"next": 16}, errors.DataLoss),
        ({"next": 14}, errors.DataLoss),
    ],
)
def test_whatever_is_wrong_with_an_answer_raises(changes, error):
    with pytest.raises(error):
        chunk_of_server(P, QUERY, answer(**changes))


def heads(*ids: int) -> bytes:
    return b"".join(headers(i, req(i)) for i in ids)


def test_headers_are_checked_as_well():
    query = replace(QUERY, form=RangeForm.HEADERS)
    good = answer(form=RangeForm.HEADERS, lengths=b"", records=heads(10, 11, 12, 13, 14))
    assert chunk_of_server(P, query, good).count == 5
    with pytest.raises(errors.DataLoss, match=r"10\.\.14"):
        chunk_of_server(P, query, replace(good, records=heads(10, 11, 13, 12, 14)))
    with pytest.raises(errors.BadFormat, match="28 bytes"):
        chunk_of_server(P, query, replace(good, records=good.records[:-1]))


def test_a_filter_leaves_gaps_but_no_disorder():
    query = replace(QUERY, form=RangeForm.HEADERS, header_values=(1,))
    good = answer(form=RangeForm.HEADERS, lengths=b"", records=heads(11, 13), count=2)
    assert chunk_of_server(P, query, good).next == 15
    for ids in ((13, 11), (11, 11), (9, 11), (11, 15)):
        with pytest.raises(errors.DataLoss, match="not in order"):
            chunk_of_server(P, query, replace(good, records=heads(*ids)))


def test_chunks_follow_one_another_to_the_last():
    asked = []

    async def fetch(query: RangeQuery) -> RangeChunk:
        asked.append((query.first, query.last))
        last = min(query.first + 1, 14)
        whole = chunk_of_server(P, QUERY, answer())
        return replace(whole, first=query.first, next=TransactionId(last + 1))

    async def read() -> list[RangeChunk]:
        return [chunk async for chunk in read_chunks(P, QUERY, fetch)]

    assert [chunk.first for chunk in asyncio.run(read())] == [10, 12, 14]
    assert asked == [(10, 14), (12, 14), (14, 14)]


def test_a_log_that_ends_too_early_is_a_loss():
    async def fetch(query: RangeQuery) -> RangeChunk:
        return replace(chunk_of_server(P, QUERY, answer()), next=query.first)

    async def read() -> None:
        async for _ in read_chunks(P, QUERY, fetch):
            pass

    with pytest.raises(errors.DataLoss, match=r"expected transactions 10\.\.14.*ends at 20"):
        asyncio.run(read())
