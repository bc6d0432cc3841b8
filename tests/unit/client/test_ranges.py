"""The checks of a reader on the answers to range requests."""

import asyncio
from collections.abc import Collection
from dataclasses import replace

import numpy as np
import pytest

from tests.loops import run_in_virtual_time
from tests.unit.client.scenarios import headers, req
from waltz_core import errors
from waltz_core.client.read.ranges import (
    RangeChunk,
    RangeQuery,
    ReaderConnection,
    ReplicaReader,
    ReplicaSet,
    chunk_from_server,
    read_chunks,
)
from waltz_core.records.batches import decode_append, encode_append, encode_records
from waltz_core.records.checksum import crc32
from waltz_core.records.record import LineageEntry, PartitionId, SessionId, TransactionId
from waltz_core.wire.messages import FILTER_HEADERS_MAX, RangeBytes, RangeData, RangeForm, RangeRaw
from waltz_core.wire.record_locations import LOCATIONS

PARTITION = PartitionId(3)
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


def corrupt_records(position: int) -> bytes:
    records = bytearray(answer().records)
    records[position] ^= 1
    return bytes(records)


def test_a_valid_answer_is_returned():
    chunk = chunk_from_server(PARTITION, QUERY, answer())
    assert (chunk.first, chunk.count, chunk.next) == (10, 5, 15)
    assert chunk.stamps == [(8, 14, 77)]
    assert chunk.lengths.tolist() == [41] * 5


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"records": corrupt_records(40)}, errors.ChecksumMismatch),
        ({"records": corrupt_records(7)}, errors.ChecksumMismatch),
        ({"records": answer().records[:-1]}, errors.BadFormat),
        ({"lengths": b"\0" * 20}, errors.BadFormat),
        ({"first": 11}, errors.RemoteProtocolError),
        ({"form": 1}, errors.RemoteProtocolError),
        ({"count": 4}, errors.RemoteProtocolError),
        ({"next": 16}, errors.RemoteProtocolError),
        ({"next": 14}, errors.DataLoss),
    ],
)
def test_every_malformed_answer_raises_an_error(changes, error):
    with pytest.raises(error):
        chunk_from_server(PARTITION, QUERY, answer(**changes))


class Storage:
    """A connection to a storage that gives one answer to every request."""

    address = "s1:6001"
    is_closed = False

    def __init__(self, count: int) -> None:
        whole = answer()
        lengths = np.frombuffer(whole.lengths, dtype=">i4")[:count]
        records = bytes(whole.records)[: int(lengths.sum())]
        self.answer = RangeBytes(
            SessionId(1),
            1,
            PARTITION,
            10,
            count,
            RangeForm.WHOLE,
            lengths.tobytes(),
            records,
            crc32(records),
            bytes(16),
            (),
        )

    def send(self, message: object) -> None:
        assert isinstance(message, RangeRaw)
        assert (message.first, message.last) == (10, 13)
        # A reader has no session, and accepts a part of a batch.
        assert message.reader
        assert not message.whole_batches

    async def receive(self) -> tuple[RangeBytes, int]:
        return self.answer, 0


def fetch_from_storage(storage: Storage, form: RangeForm = RangeForm.WHOLE) -> RangeChunk:
    """Request 10..13 from a storage."""
    query = replace(QUERY, last=TransactionId(13), form=form)
    link, mark = ReaderConnection(storage), TransactionId(13)
    return run_in_virtual_time(
        link.fetch(PARTITION, query, session_id=SessionId(1), high_water_mark=mark, timeout_s=5)
    )


@pytest.mark.parametrize("changes", [{"first": 11}, {"form": RangeForm.HEADERS}, {"count": 0}])
def test_an_answer_of_a_replica_to_another_request_is_a_protocol_error(changes):
    storage = Storage(4)
    storage.answer = replace(storage.answer, **changes)
    with pytest.raises(errors.RemoteProtocolError, match="found form"):
        fetch_from_storage(storage)


@pytest.mark.parametrize("size", [3, 4, 15, 17, 20])
def test_a_wrong_number_of_lengths_in_an_answer_with_locations_is_a_protocol_error(size: int):
    storage = Storage(4)
    storage.answer = replace(
        storage.answer, form=LOCATIONS, lengths=bytes(size), records=b"", records_crc=0
    )
    link, query = ReaderConnection(storage), replace(QUERY, last=TransactionId(13))
    with pytest.raises(errors.RemoteProtocolError, match="expected 4 lengths, found"):
        run_in_virtual_time(
            link.request_locations(PARTITION, query, session_id=SessionId(1), timeout_s=5)
        )


def test_records_of_a_replica_beyond_the_requested_range_are_not_trusted():
    assert [fetch_from_storage(Storage(count)).next for count in (1, 4)] == [11, 14]
    expected = r"s1:6001 .*: expected no transaction after 13, found transactions 10\.\.14"
    with pytest.raises(errors.RemoteProtocolError, match=expected):
        fetch_from_storage(Storage(5))


def headers_from_replica(records: bytes, records_crc: int) -> RangeChunk:
    storage = Storage(4)
    fields = {"form": RangeForm.HEADERS, "lengths": b"", "records": records}
    storage.answer = replace(storage.answer, records_crc=records_crc, **fields)
    return fetch_from_storage(storage, RangeForm.HEADERS)


@pytest.mark.parametrize("at", [9, 20, 27])  # in the request's ID and in the header
def test_headers_with_a_wrong_crc_in_the_answer_of_a_replica_are_not_trusted(at: int):
    good = heads(10, 11, 12, 13)
    assert headers_from_replica(good, crc32(good)).next == 14
    bad = bytearray(good)
    bad[at] ^= 1
    with pytest.raises(errors.ChecksumMismatch, match=r"s1:6001 .*: the CRC of the answer"):
        headers_from_replica(bytes(bad), crc32(good))


def test_headers_of_a_server_beyond_the_requested_range_are_not_trusted():
    query = replace(QUERY, last=TransactionId(13), form=RangeForm.HEADERS, header_values=(1,))
    found = answer(form=RangeForm.HEADERS, lengths=b"", records=heads(11, 14), count=2)
    with pytest.raises(errors.RemoteProtocolError, match="transaction after 13"):
        chunk_from_server(PARTITION, query, found)


def heads(*ids: int) -> bytes:
    return b"".join(headers(i, req(i)) for i in ids)


def test_invalid_headers_are_rejected():
    query = replace(QUERY, form=RangeForm.HEADERS)
    good = answer(form=RangeForm.HEADERS, lengths=b"", records=heads(10, 11, 12, 13, 14))
    assert chunk_from_server(PARTITION, query, good).count == 5
    with pytest.raises(errors.DataLoss, match=r"10\.\.14"):
        chunk_from_server(PARTITION, query, replace(good, records=heads(10, 11, 13, 12, 14)))
    with pytest.raises(errors.BadFormat, match="28 bytes"):
        chunk_from_server(PARTITION, query, replace(good, records=good.records[:-1]))


def test_a_filtered_range_may_have_gaps_but_must_be_in_order():
    query = replace(QUERY, form=RangeForm.HEADERS, header_values=(1,))
    good = answer(form=RangeForm.HEADERS, lengths=b"", records=heads(11, 13), count=2)
    assert chunk_from_server(PARTITION, query, good).next == 15
    for ids in ((13, 11), (11, 11), (9, 11), (11, 15)):
        with pytest.raises(errors.DataLoss, match="are not ascending"):
            chunk_from_server(PARTITION, query, replace(good, records=heads(*ids)))


def test_a_chunk_is_split_into_transactions():
    chunk = chunk_from_server(PARTITION, QUERY, answer())
    expected = [(TransactionId(10 + i), 0, b"%d" % i) for i in range(5)]
    assert list(chunk.rows()) == expected
    near = replace(chunk, records=memoryview(chunk.records))
    assert [row.data for row in near.rows()] == [data for _, _, data in expected]
    assert {type(row.data) for row in near.rows()} == {bytes}
    with pytest.raises(
        errors.UsageError, match=r"a range that was read with form=RangeForm\.WHOLE"
    ):
        list(replace(chunk, form=RangeForm.HEADERS).rows())


def test_chunks_are_consecutive_up_to_the_last_chunk():
    requests = []

    async def fetch(query: RangeQuery) -> RangeChunk:
        requests.append((query.first, query.last))
        last = min(query.first + 1, 14)
        whole = chunk_from_server(PARTITION, QUERY, answer())
        return replace(whole, first=query.first, next=TransactionId(last + 1))

    async def read() -> list[RangeChunk]:
        return [chunk async for chunk in read_chunks(PARTITION, QUERY, fetch)]

    assert [chunk.first for chunk in run_in_virtual_time(read())] == [10, 12, 14]
    assert requests == [(10, 14), (12, 14), (14, 14)]


def test_a_log_that_ends_before_the_range_is_reported_as_data_loss():
    async def fetch(query: RangeQuery) -> RangeChunk:
        return replace(chunk_from_server(PARTITION, QUERY, answer()), next=query.first)

    async def read() -> None:
        async for _ in read_chunks(PARTITION, QUERY, fetch):
            pass

    with pytest.raises(errors.DataLoss, match=r"expected transactions 10\.\.14.*ends at 20"):
        run_in_virtual_time(read())


REPLICAS = ("s1:1", "s2:1", "s3:1", "s4:1")


def requested_addresses(
    monkeypatch: pytest.MonkeyPatch,
    replicas_in_group: tuple[str, ...],
    *,
    unreachable: Collection[str] = (),
    first: int = 10,
    order: tuple[str, ...] = REPLICAS,
) -> list[str]:
    """Return the addresses that got a request for 10..14, in order; "server" for the server."""
    requests: list[str] = []

    class Link:
        is_closed = False

        def __init__(self, address: str) -> None:
            self.address = address

        async def fetch(self, *_: object, **__: object) -> RangeChunk:
            return chunk_from_server(PARTITION, QUERY, answer())

        def close(self) -> None:
            """Nothing is held."""

    async def open_link(address: str, _: ReplicaSet, *, timeout_s: float, ssl: None) -> Link:
        assert timeout_s == 5
        requests.append(address)
        if address in unreachable:
            raise errors.Unreachable(f"{address} is down")
        return Link(address)

    async def read_from_server(query: RangeQuery) -> RangeChunk:
        requests.append("server")
        return chunk_from_server(PARTITION, query, answer())

    async def read() -> None:
        replicas = ReplicaSet(bytes(16), 4, 1, 20, order, replicas_in_group)
        reader = ReplicaReader(PARTITION, replicas, read_from_server, first=first, timeout_s=5)
        for _ in range(2):
            assert (await reader.fetch(QUERY)).next == 15

    monkeypatch.setattr(ReaderConnection, "open", open_link)
    run_in_virtual_time(read())
    return requests


def test_a_nearby_replica_is_queried_before_other_replicas(monkeypatch: pytest.MonkeyPatch):
    for first in range(5):
        assert requested_addresses(monkeypatch, ("s3:1",), first=first) == ["s3:1"]
    near = ("s1:1", "s3:1")
    both = {requested_addresses(monkeypatch, near, first=first)[0] for first in range(10)}
    assert both == set(near)  # readers with different starts use different replicas
    addresses = {requested_addresses(monkeypatch, (), first=first)[0] for first in range(20)}
    assert addresses == set(REPLICAS)


def test_a_repeated_read_uses_the_same_replica(monkeypatch: pytest.MonkeyPatch):
    for first in range(3):
        once = requested_addresses(monkeypatch, (), first=first)
        # Independent of the order in the server's answer, which changes with each append.
        for order in (REPLICAS[::-1], REPLICAS[1:] + REPLICAS[:1], REPLICAS[2:] + REPLICAS[:2]):
            assert requested_addresses(monkeypatch, (), first=first, order=order) == once


def test_other_replicas_and_then_the_server_are_queried_if_nearby_replicas_fail(
    monkeypatch: pytest.MonkeyPatch,
):
    near = ("s1:1", "s3:1")
    one, two, three = requested_addresses(monkeypatch, near, unreachable=near)
    assert {one, two} == set(near)
    assert three in {"s2:1", "s4:1"}
    all_of_them = requested_addresses(monkeypatch, near, unreachable=REPLICAS)
    assert set(all_of_them[:2]) == set(near)
    assert set(all_of_them[2:4]) == {"s2:1", "s4:1"}
    assert all_of_them[4:] == ["server", "server"]


def test_a_nearby_storage_that_is_not_engaged_gets_no_request(monkeypatch: pytest.MonkeyPatch):
    addresses = requested_addresses(monkeypatch, ("s9:1",), unreachable=REPLICAS)
    assert sorted(addresses[:4]) == sorted(REPLICAS)
    assert addresses[4:] == ["server", "server"]


def test_a_storage_that_sends_no_hello_is_skipped_soon_unless_it_is_the_last_replica(
    monkeypatch: pytest.MonkeyPatch,
):
    """The operating system accepts connections also for a stopped process."""
    monkeypatch.setattr("waltz_core.client.read.ranges.HANDSHAKE_TIMEOUT_S", 0.01)
    waited_s: dict[str, float] = {}

    async def open_link(
        address: str, _: ReplicaSet, *, timeout_s: float, ssl: None
    ) -> ReaderConnection:
        clock = asyncio.get_running_loop()
        began_s = clock.time()
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.Event().wait()
        except TimeoutError as error:
            raise errors.Unreachable(f"{address} is frozen") from error
        finally:
            waited_s[address] = clock.time() - began_s
        raise AssertionError

    async def read_from_server(query: RangeQuery) -> RangeChunk:
        return chunk_from_server(PARTITION, query, answer())

    async def read() -> None:
        replicas = ReplicaSet(bytes(16), 4, 1, 20, REPLICAS)
        reader = ReplicaReader(PARTITION, replicas, read_from_server, first=10, timeout_s=2)
        assert (await reader.fetch(QUERY)).next == 15

    monkeypatch.setattr(ReaderConnection, "open", open_link)
    run_in_virtual_time(read())
    *soon_s, last_s = waited_s.values()
    assert len(soon_s) == len(REPLICAS) - 1
    assert max(soon_s) < 1.9
    assert last_s >= 1.9


def test_a_reader_that_is_closed_while_it_dials_leaves_no_connection(
    monkeypatch: pytest.MonkeyPatch,
):
    """For example, a caller stops after a chunk while the reader fetches the next one."""
    closed: list[str] = []

    class Link:
        is_closed = False

        def __init__(self, address: str) -> None:
            self._address = address

        def close(self) -> None:
            closed.append(self._address)

    async def read() -> None:
        may_greet = asyncio.Event()

        async def open_link(address: str, *_: object, **__: object) -> Link:
            await may_greet.wait()
            return Link(address)

        async def read_from_server(query: RangeQuery) -> RangeChunk:
            return chunk_from_server(PARTITION, query, answer())

        monkeypatch.setattr(ReaderConnection, "open", open_link)
        replicas = ReplicaSet(bytes(16), 4, 1, 20, ("s1:1",))
        reader = ReplicaReader(PARTITION, replicas, read_from_server, first=10, timeout_s=2)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(reader.fetch(QUERY))
            await asyncio.sleep(0)
            reader.close()
            may_greet.set()
        assert closed == ["s1:1"]

    run_in_virtual_time(read())


def read_below_start(monkeypatch: pytest.MonkeyPatch, first_available: int) -> list[str]:
    """Let each storage report a first available ID; return the storages that got requests."""
    requests: list[str] = []

    class Link:
        is_closed = False

        async def fetch(self, *_: object, **__: object) -> RangeChunk:
            raise errors.BeforeLogStart("expected IDs from there on", first_available)

        def close(self) -> None:
            """Nothing is held."""

    async def open_link(address: str, *_: object, **__: object) -> Link:
        requests.append(address)
        return Link()

    async def read_from_server(query: RangeQuery) -> RangeChunk:
        requests.append("server")
        return chunk_from_server(PARTITION, query, answer())

    async def read() -> None:
        replicas = ReplicaSet(bytes(16), 4, 1, 20, REPLICAS)
        await ReplicaReader(PARTITION, replicas, read_from_server, first=10, timeout_s=5).fetch(
            QUERY
        )

    monkeypatch.setattr(ReaderConnection, "open", open_link)
    run_in_virtual_time(read())
    return requests


def read_over_a_limit(monkeypatch: pytest.MonkeyPatch, retry_after_ms: int) -> list[str]:
    """Let each storage request a pause twice; return the storages that got requests, in order."""
    requests: list[str] = []

    class Link:
        is_closed = False

        def __init__(self, address: str) -> None:
            self._address = address

        async def fetch(self, *_: object, **__: object) -> RangeChunk:
            requests.append(self._address)
            if requests.count(self._address) < 3:
                raise errors.Overloaded("over a limit", retry_after_ms)
            return chunk_from_server(PARTITION, QUERY, answer())

        def close(self) -> None:
            """Nothing is held."""

    async def open_link(address: str, *_: object, **__: object) -> Link:
        return Link(address)

    async def read_from_server(query: RangeQuery) -> RangeChunk:
        requests.append("server")
        return chunk_from_server(PARTITION, query, answer())

    async def read() -> None:
        replicas = ReplicaSet(bytes(16), 4, 1, 20, REPLICAS)
        await ReplicaReader(PARTITION, replicas, read_from_server, first=10, timeout_s=5).fetch(
            QUERY
        )

    monkeypatch.setattr(ReaderConnection, "open", open_link)
    run_in_virtual_time(read())
    return requests


def test_a_reader_repeats_a_request_after_the_pause_that_the_replica_names(
    monkeypatch: pytest.MonkeyPatch,
):
    requests = read_over_a_limit(monkeypatch, 2_000)
    assert len(requests) == 3
    assert len(set(requests)) == 1
    # For a pause above the timeout the reader tries the other replicas, then the server.
    requests = read_over_a_limit(monkeypatch, 6_000)
    assert sorted(requests) == sorted([*REPLICAS, "server"])


def test_no_further_replica_is_queried_if_the_log_begins_after_the_range(
    monkeypatch: pytest.MonkeyPatch,
):
    with pytest.raises(errors.BeforeLogStart) as caught:
        read_below_start(monkeypatch, 12)
    assert caught.value.first_available == 12
    for first_available in (-1, 10):
        assert len(read_below_start(monkeypatch, first_available)) == 5, (
            "other replicas may have it"
        )


def test_a_filter_over_the_header_limit_is_rejected_before_the_first_read():
    most = tuple(range(FILTER_HEADERS_MAX))
    replace(QUERY, header_values=most)
    with pytest.raises(errors.BadRequest, match="at most 1000 headers, found 1001"):
        replace(QUERY, header_values=(*most, -1))
