"""Pages of a partition's log, read by a real client from a server in memory."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import pytest

from waltz_core import errors
from waltz_core.client import BYTES, AsyncWaltzClient, Zstd
from waltz_core.client.read.ranges import ArchivedRange
from waltz_core.gateway.console import transaction_pages
from waltz_core.gateway.console.transaction_pages import (
    COUNT_MAX,
    FETCHES_MAX,
    PAGE_BYTES_MAX,
    first_transaction_at,
    read_page_from,
    read_page_until,
)
from waltz_core.memory_waltz import MemoryWaltz
from waltz_core.records.batches import encode_append
from waltz_core.records.record import TransactionId
from waltz_core.server.process import server_in_memory
from waltz_core.transport import net

Scenario = Callable[[AsyncWaltzClient], Awaitable[None]]
P = 1
FIELDS = {
    "transaction_id",
    "header",
    "time_ms",
    "client_id",
    "request_id",
    "size",
    "format",
    "text",
    "is_shortened",
}
UNTIL_FIELDS = {"transactions", "next", "previous", "first_available", "high_water_mark"}


def run(scenario: Scenario) -> None:
    async def main(waltz: MemoryWaltz) -> None:
        async with waltz.async_client() as client:
            await scenario(client)

    with MemoryWaltz(partition_count=2) as waltz:
        net.run(main(waltz))


async def write(client, rows):
    """Append (header, data) pairs, in batches of at most 4,096."""
    for start in range(0, len(rows), 4096):
        part = rows[start : start + 4096]
        none = [[]] * len(part)
        headers, data = [each[0] for each in part], [each[1] for each in part]
        batch = encode_append(headers, data, write_locks=none, read_locks=none, append_locks=none)
        outcome = await client.append_batch(P, batch, len(part), client_high_water_mark=-1)
        await outcome


def ids(page):
    return [transaction["transaction_id"] for transaction in page["transactions"]]


class Fetches:
    """Counts the queries of a client for ranges, and the bytes of the answers."""

    def __init__(self, client, monkeypatch):
        self.queries = []
        self.bytes = 0
        fetch_range = client.requests.fetch_range

        async def fetch(partition_id, query):
            self.queries.append(query)
            chunk = await fetch_range(partition_id, query)
            self.bytes += len(chunk.records)
            return chunk

        monkeypatch.setattr(client.requests, "fetch_range", fetch)


def expire(client, monkeypatch, first, *, archive_first=None):
    """Let the log begin at `first`; the replicas report that it begins at `archive_first`."""
    fetch_range, replicas = client.requests.fetch_range, client.replicas

    async def fetch(partition_id, query):
        if query.first < first:
            raise errors.BeforeLogStart(f"the log begins at {first}", first)
        return await fetch_range(partition_id, query)

    async def read_replicas(partition):
        begin = TransactionId(first if archive_first is None else archive_first)
        archived = ArchivedRange(begin, TransactionId(first), "m", 0)
        return replace(await replicas(partition), archived=archived)

    monkeypatch.setattr(client.requests, "fetch_range", fetch)
    monkeypatch.setattr(client, "replicas", read_replicas)


# --- forwards


def test_a_page_has_the_fields_of_the_console():
    async def scenario(client):
        await write(client, [(7, b'{"a":1}'), (-1, b"\xff"), (0, b"")])
        page = await read_page_from(client, P, 0, 50)
        assert set(page) == UNTIL_FIELDS - {"previous"}
        assert (page["next"], page["first_available"], page["high_water_mark"]) == (3, 0, 2)
        first, second, third = page["transactions"]
        assert set(first) == FIELDS
        assert (first["header"], first["size"], first["format"]) == (7, 7, "json")
        assert (first["text"], first["is_shortened"]) == ('{"a":1}', False)
        assert (second["header"], second["format"], third["format"]) == (-1, "binary", "empty")
        assert first["client_id"] == client.client_id
        client_id, _generation, partition, sequence = map(int, first["request_id"].split("."))
        assert (client_id, partition) == (client.client_id, P)
        assert second["request_id"].endswith(f".{P}.{sequence + 1}")
        assert first["time_ms"] == third["time_ms"] > 1_700_000_000_000
        assert json.loads(json.dumps(page)) == page

    run(scenario)


def test_paging_forward_shows_each_transaction_once():
    async def scenario(client):
        await write(client, [(0, b"%d" % number) for number in range(130)])
        first, found = 0, []
        while first <= 129:
            page = await read_page_from(client, P, first, 50)
            found += page["transactions"]
            assert page["next"] == min(first + 50, 130)
            first = page["next"]
        assert [each["text"] for each in found] == [f"{number}" for number in range(130)]

    run(scenario)


def test_a_filter_selects_transactions_forwards():
    async def scenario(client):
        await write(client, [(number % 10, b"%d" % number) for number in range(1000)])
        page = await read_page_from(client, P, 5, 30, (3, 4))
        assert ids(page) == [number for number in range(5, 1000) if number % 10 in (3, 4)][:30]
        assert page["next"] == ids(page)[-1] + 1
        rare = await read_page_from(client, P, 0, 50, (77,))
        assert (ids(rare), rare["next"]) == ([], 1000)

    run(scenario)


def test_pages_of_an_empty_partition_are_empty():
    async def scenario(client):
        for headers in ((), (7,)):
            page = await read_page_from(client, P, 0, 50, headers)
            assert page == {
                "transactions": [],
                "next": 0,
                "first_available": 0,
                "high_water_mark": -1,
            }
            newest = await read_page_until(client, P, None, 50, headers)
            assert newest == {**page, "previous": -1}
        first = await first_transaction_at(client, P, 5)
        assert first == {"transaction_id": 0, "high_water_mark": -1}

    run(scenario)


def test_a_page_after_the_end_is_empty_and_does_not_wait():
    async def scenario(client):
        await write(client, [(0, b"a")] * 3)
        for first in (3, 10, 2**62):
            page = await read_page_from(client, P, first, 50)
            assert (ids(page), page["next"]) == ([], first)
        await write(client, [(0, b"b")])
        assert ids(await read_page_from(client, P, 3, 50)) == [3]

    run(scenario)


def test_arguments_out_of_range_are_rejected():
    async def scenario(client):
        for first, count in ((-1, 50), (2**63, 50), (0, 0), (0, COUNT_MAX + 1), (0, -1)):
            with pytest.raises(errors.RequestRejected):
                await read_page_from(client, P, first, count)
        for last, count in ((-2, 50), (2**63, 50), (None, 0), (5, COUNT_MAX + 1)):
            with pytest.raises(errors.RequestRejected):
                await read_page_until(client, P, last, count)
        with pytest.raises(errors.RequestRejected):
            await first_transaction_at(client, P, -1)
        for read in (read_page_from, read_page_until):
            with pytest.raises(errors.UnknownPartition):
                await read(client, 2, 0, 50)

    run(scenario)


def test_a_page_of_large_transactions_is_bounded(monkeypatch):
    async def scenario(client):
        for _ in range(6):
            await write(client, [(7, bytes(400_000))] * 2)
        for headers in ((), (7,)):
            fetches = Fetches(client, monkeypatch)
            page = await read_page_from(client, P, 0, 200, headers)
            assert 2 <= len(ids(page)) <= 6
            assert page["next"] == len(ids(page))
            assert fetches.bytes < 3 * PAGE_BYTES_MAX
            assert page["transactions"][0]["is_shortened"]
            newest = await read_page_until(client, P, None, 200, headers)
            assert ids(newest) == list(range(newest["previous"] + 1, 12))
            assert 1 <= len(ids(newest)) <= 6
            assert fetches.bytes < 6 * PAGE_BYTES_MAX

    run(scenario)


# --- backwards


def test_the_newest_page_ends_at_the_high_water_mark(monkeypatch):
    async def scenario(client):
        await write(client, [(0, b"%d" % number) for number in range(130)])
        fetches = Fetches(client, monkeypatch)
        page = await read_page_until(client, P, None, 50)
        assert set(page) == UNTIL_FIELDS
        assert ids(page) == list(range(80, 130))
        assert (page["next"], page["previous"], page["high_water_mark"]) == (130, 79, 129)
        assert len(fetches.queries) == 3
        assert fetches.bytes == sum(
            40 + len(transaction["text"]) for transaction in page["transactions"]
        )
        older = await read_page_until(client, P, page["previous"], 50)
        assert ids(older) == list(range(30, 80))
        assert (older["next"], older["previous"]) == (80, 29)
        oldest = await read_page_until(client, P, older["previous"], 50)
        assert ids(oldest) == list(range(30))
        assert (oldest["next"], oldest["previous"]) == (30, -1)

    run(scenario)


def test_a_page_that_is_requested_up_to_an_id_ends_with_this_id():
    async def scenario(client):
        await write(client, [(0, b"a")] * 10)
        for last, expected in ((9, 9), (10, 9), (2**62, 9), (4, 4), (0, 0)):
            page = await read_page_until(client, P, last, 3)
            assert ids(page) == list(range(max(0, expected - 2), expected + 1))
            assert page["next"] == expected + 1
        page = await read_page_until(client, P, -1, 3)
        assert (ids(page), page["next"], page["previous"]) == ([], 0, -1)

    run(scenario)


def test_a_filter_selects_transactions_backwards(monkeypatch):
    async def scenario(client):
        await write(client, [(number % 10, b"%d" % number) for number in range(5000)])
        matching = [number for number in range(5000) if number % 10 in (3, 4)]
        fetches = Fetches(client, monkeypatch)
        page = await read_page_until(client, P, None, 200, (3, 4))
        assert ids(page) == matching[-200:]
        assert (page["next"], page["previous"]) == (5000, matching[-200] - 1)
        assert len(fetches.queries) <= 3

    run(scenario)


def test_a_rare_header_is_found_backwards_in_several_requests(monkeypatch):
    monkeypatch.setattr(transaction_pages, "PAGE_BYTES_MAX", 64 * 1024)

    async def scenario(client):
        rows = [(0, bytes(260))] * 20_000
        rows[3] = (7, b"rare")
        await write(client, rows)
        last, pages, found = None, 0, []
        while last != -1:
            fetches = Fetches(client, monkeypatch)
            page = await read_page_until(client, P, last, 50, (7,))
            assert len(fetches.queries) <= FETCHES_MAX
            assert page["previous"] < (20_000 if last is None else last)
            last, found, pages = page["previous"], ids(page) + found, pages + 1
        assert found == [3]
        assert 5 < pages < 40  # one request reads at most 512 KiB of 6 MB

    run(scenario)


def test_a_rare_header_is_found_forwards_in_several_requests(monkeypatch):
    monkeypatch.setattr(transaction_pages, "PAGE_BYTES_MAX", 64 * 1024)

    async def scenario(client):
        rows = [(0, bytes(260))] * 20_000
        rows[19_990] = (7, b"rare")
        await write(client, rows)
        first, found = 0, []
        while first <= 19_999:
            fetches = Fetches(client, monkeypatch)
            page = await read_page_from(client, P, first, 50, (7,))
            assert len(fetches.queries) <= FETCHES_MAX
            assert page["next"] > first
            first, found = page["next"], found + ids(page)
        assert found == [19_990]

    run(scenario)


@pytest.mark.parametrize("seed", range(4))
def test_paging_forward_or_backward_shows_each_match_once(monkeypatch, seed):
    random = Random(seed)
    monkeypatch.setattr(transaction_pages, "PAGE_BYTES_MAX", random.choice([1, 500, 5000, 50_000]))

    async def scenario(client):
        rows = []
        while len(rows) < 150:
            sizes = random.choice([(0, 20), (0, 3000), (2000, 20_000)])
            run_of_rows = random.randint(1, 40)
            rows += [
                (random.choice([0, 0, 0, 0, 7]), bytes(random.randint(*sizes)))
                for _ in range(run_of_rows)
            ]
        for start in range(0, len(rows), 100):
            await write(client, rows[start : start + 100])
        for headers in ((), (7,)):
            expected = [index for index, row in enumerate(rows) if not headers or row[0] == 7]
            count = random.choice([1, 7, 50, 60])
            first, found = 0, []
            while first < len(rows):
                page = await read_page_from(client, P, first, count, headers)
                assert len(ids(page)) <= count
                assert page["next"] > first
                first, found = page["next"], found + ids(page)
            assert found == expected
            last, found = len(rows) - 1, []
            while last != -1:
                page = await read_page_until(client, P, last, count, headers)
                assert len(ids(page)) <= count
                assert page["next"] == last + 1
                assert page["previous"] < last
                last, found = page["previous"], ids(page) + found
            assert found == expected

    run(scenario)


# --- expired transactions


@pytest.mark.parametrize("known", [40, 0])
def test_a_page_that_begins_at_an_expired_transaction_raises_an_error(monkeypatch, known):
    async def scenario(client):
        await write(client, [(0, b"a")] * 100)
        expire(client, monkeypatch, 40, archive_first=known)
        with pytest.raises(errors.BeforeLogStart) as caught:
            await read_page_from(client, P, 39, 50)
        assert caught.value.first_available == 40
        page = await read_page_from(client, P, 40, 50)
        assert (ids(page), page["first_available"]) == (list(range(40, 90)), known)

    run(scenario)


@pytest.mark.parametrize("known", [40, 0])
@pytest.mark.parametrize("headers", [(), (0,)])
def test_a_page_backwards_ends_at_the_first_available_transaction(monkeypatch, known, headers):
    """This also holds if transactions expire after the replicas have reported their start."""

    async def scenario(client):
        await write(client, [(0, b"a")] * 100)
        expire(client, monkeypatch, 40, archive_first=known)
        page = await read_page_until(client, P, None, 200, headers)
        assert (ids(page), page["previous"]) == (list(range(40, 100)), -1)
        assert (page["next"], page["first_available"]) == (100, 40)
        at_start = await read_page_until(client, P, 40, 200, headers)
        assert (ids(at_start), at_start["previous"]) == ([40], -1)
        for last in (39, 0):
            before = await read_page_until(client, P, last, 200, headers)
            assert (ids(before), before["previous"], before["next"]) == ([], -1, 40)
        first = await first_transaction_at(client, P, 0)
        assert first["transaction_id"] == 40

    run(scenario)


def test_an_error_that_states_no_first_available_id_is_raised_again(monkeypatch):
    async def scenario(client):
        await write(client, [(0, b"a")] * 10)

        async def fetch(_partition_id, _query):
            raise errors.BeforeLogStart("the log begins later", -1)

        monkeypatch.setattr(client.requests, "fetch_range", fetch)
        with pytest.raises(errors.BeforeLogStart):
            await read_page_until(client, P, None, 50)
        with pytest.raises(errors.BeforeLogStart):
            await first_transaction_at(client, P, 7)

    run(scenario)


def test_existing_transactions_are_shown_although_the_log_ends_below_the_reported_mark(monkeypatch):
    """A server that has lost the partition may report a mark that is not in the log."""

    async def scenario(client):
        await write(client, [(0, b"a")] * 100)
        replicas = client.replicas

        async def read_replicas(partition):
            return replace(await replicas(partition), high_water_mark=120)

        monkeypatch.setattr(client, "replicas", read_replicas)
        page = await read_page_from(client, P, 90, 50)
        assert (ids(page), page["next"]) == (list(range(90, 100)), 100)
        found, last = [], None
        while last != -1:
            page = await read_page_until(client, P, last, 50)
            found, last = ids(page) + found, page["previous"]
        assert found == list(range(100))

    run(scenario)


# --- times


def with_clock(monkeypatch):
    """Let the server stamp transactions with the time of the returned clock."""
    clock = SimpleNamespace(now_ms=1_000)
    times = SimpleNamespace(time_ns=lambda: clock.now_ms * 1_000_000)
    monkeypatch.setattr(server_in_memory, "time", times)
    return clock


def test_the_first_transaction_at_a_time_is_found(monkeypatch):
    clock = with_clock(monkeypatch)

    async def scenario(client):
        for number in range(50):
            clock.now_ms = 1_000 + 10 * number
            await write(client, [(0, b"a")] * 3)
        for time_ms, expected in (
            (0, 0),
            (1_000, 0),
            (1_001, 3),
            (1_009, 3),
            (1_010, 3),
            (1_011, 6),
            (1_490, 147),
            (1_491, 150),
            (2**62, 150),
        ):
            first = await first_transaction_at(client, P, time_ms)
            assert first == {"transaction_id": expected, "high_water_mark": 149}, time_ms
        fetches = Fetches(client, monkeypatch)
        await first_transaction_at(client, P, 1_234)
        assert len(fetches.queries) <= 8
        page = await read_page_from(client, P, 6, 50, ())
        assert [transaction["time_ms"] for transaction in page["transactions"][:4]] == [
            1_020
        ] * 3 + [1_030]

    run(scenario)


def test_transactions_without_a_stamp_have_no_time(monkeypatch):
    clock = with_clock(monkeypatch)

    async def scenario(client):
        clock.now_ms = 0
        await write(client, [(0, b"a")] * 2)
        clock.now_ms = 5_000
        await write(client, [(7, b"b")] * 2)
        page = await read_page_until(client, P, None, 50)
        assert [transaction["time_ms"] for transaction in page["transactions"]] == [
            None,
            None,
            5_000,
            5_000,
        ]
        page = await read_page_until(client, P, None, 50, (7,))
        assert [transaction["time_ms"] for transaction in page["transactions"]] == [5_000, 5_000]
        for time_ms, expected in ((5_000, 0), (5_001, 4)):
            first = await first_transaction_at(client, P, time_ms)
            assert first["transaction_id"] == expected

    run(scenario)


# --- bounded work


def test_the_texts_of_a_page_are_bounded():
    """The text of a compressed payload may be much longer than the payload."""

    async def scenario(client):
        packed = Zstd(BYTES).serialize(b"a" * 100_000)
        await write(client, [(0, packed)] * 200)
        page = await read_page_from(client, P, 0, 200)
        texts = [transaction["text"] for transaction in page["transactions"]]
        lengths = [16_384] * 32 + [512] * 168
        assert [len(text) for text in texts] == lengths
        assert all(transaction["is_shortened"] for transaction in page["transactions"])
        last = await read_page_from(client, P, 199, 1)
        assert len(last["transactions"][0]["text"]) == 16_384

    run(scenario)


def test_reading_a_page_does_not_block_other_tasks(monkeypatch):
    async def scenario(client):
        await write(client, [(0, b"[]")] * 100)
        turns = 0

        async def count_turns():
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        async with asyncio.TaskGroup() as group:
            counting = group.create_task(count_turns())
            await read_page_until(client, P, None, 100)
            counting.cancel()
        assert turns >= 100

    run(scenario)
