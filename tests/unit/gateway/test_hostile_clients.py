"""Clients that are slow, disconnect or send too much, and a gateway that ends before it answers."""

import asyncio
import json
import logging

import pytest

from tests.gateway_process import append_body
from tests.loops import poll_until
from tests.unit.gateway.gateway_world import in_gateway_world
from waltz_core.client.links.write_requests import WriteRequests
from waltz_core.errors import CoordinatorUnavailable
from waltz_core.gateway.idempotent_appends import _PartitionAppend
from waltz_core.transport import http_port

HEAD = b"POST /v1/transactions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
MIB = 1024 * 1024


def row(data, **more):
    return {"data": data, "partition": 1, **more}


def with_gateway(scenario, **settings):
    async def play(world):
        async with world.gateway(**settings) as gateway:
            await scenario(world, gateway)

    in_gateway_world(play)


async def connect_to(gateway):
    return await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))


async def read_answer(reader):
    """Return the status and the JSON of a response."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    size = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return int(head.split()[1]), json.loads(await reader.readexactly(size))


def request_with(body, *, key=""):
    named = f"Idempotency-Key: {key}\r\n" if key else ""
    return HEAD + f"{named}Content-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.fixture
def no_error_is_logged(caplog):
    """Check that the log has no error: a client could fill it."""
    yield
    assert [
        get_record
        for get_record in caplog.get_records("call")
        if get_record.levelno >= logging.ERROR
    ] == []


@pytest.mark.usefixtures("no_error_is_logged")
@pytest.mark.parametrize("disconnects", [False, True])
def test_an_incomplete_body_is_abandoned(monkeypatch, disconnects):
    if not disconnects:
        monkeypatch.setattr(http_port, "RECEIVE_S_MAX", 0.2)
        monkeypatch.setattr(http_port, "CHECK_INTERVAL_S", 0.01)

    async def scenario(world, gateway):
        reader, writer = await connect_to(gateway)
        writer.write(HEAD + b"Content-Length: 1000\r\n\r\n" + bytes(500))
        await poll_until(lambda: gateway.routes._body_memory._bytes_in_memory == 500)
        if disconnects:
            writer.transport.abort()
        else:
            assert await reader.read() == b""
        await poll_until(lambda: not gateway.routes._body_memory._bytes_in_memory)
        metric = "waltz_gateway_requests_total"
        await poll_until(lambda: gateway.metrics.value(metric, operation="append", status=400))
        assert world.transaction_count() == 0
        writer.close()

    with_gateway(scenario)


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_client_that_sends_a_huge_body_before_it_reads_still_gets_the_answer(is_chunked):
    async def scenario(world, gateway):
        reader, writer = await connect_to(gateway)
        if is_chunked:
            writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
            for _ in range(64):
                writer.write(b"%x\r\n" % MIB + bytes(MIB) + b"\r\n")
                await writer.drain()
            writer.write(b"0\r\n\r\n")
        else:
            writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % (64 * MIB))
            for _ in range(64):
                writer.write(bytes(MIB))
                await writer.drain()
        status, fields = await read_answer(reader)
        assert (status, fields["type"]) == (413, "TooLarge")
        assert not gateway.routes._body_memory._bytes_in_memory
        writer.write(request_with(append_body(row("a"))))
        status, fields = await read_answer(reader)
        assert (status, world.log(1)) == (200, [b"a"])
        writer.close()

    with_gateway(scenario, body_bytes_max=MIB)


@pytest.mark.usefixtures("no_error_is_logged")
def test_the_rest_of_a_rejected_request_is_not_parsed_as_a_request():
    """The gateway answers before the body has arrived. After that, an invalid chunk arrives."""

    async def scenario(_world, gateway):
        reader, writer = await connect_to(gateway)
        writer.write(HEAD + b"Authorization: Bearer x\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert (await read_answer(reader))[0] == 401
        writer.write(b"no chunk\r\n" * 10)
        assert b"HTTP/1.1 2" not in await reader.read()
        writer.close()
        async with gateway.client() as client:
            assert (await client.append(row("a"))).status == 200

    with_gateway(scenario)


@pytest.mark.usefixtures("no_error_is_logged")
def test_a_disconnected_client_gets_its_outcome_by_idempotency_key():
    async def scenario(world, gateway):
        body = append_body(row("a"), row("b"))
        _, writer = await connect_to(gateway)
        writer.write(request_with(body, key="k"))
        await writer.drain()
        await poll_until(lambda: world.log(1))
        writer.transport.abort()
        reader, writer = await connect_to(gateway)
        writer.write(request_with(body, key="k"))
        status, fields = await read_answer(reader)
        assert status == 200
        assert [outcome["transaction_id"] for outcome in fields["outcomes"]] == [0, 1]
        assert world.log(1) == [b"a", b"b"]
        writer.close()

    with_gateway(scenario)


def test_a_second_gateway_returns_the_outcome_after_the_first_ends_without_an_answer(monkeypatch):
    finish, is_in_log = WriteRequests.finish, asyncio.Event()

    async def never_finish(*_arguments, **_named):
        is_in_log.set()
        await asyncio.Event().wait()

    async def scenario(world, gateway):
        body = append_body(row("a"), row("b"))
        async with world.gateway() as ends:
            monkeypatch.setattr(WriteRequests, "finish", never_finish)
            reader, writer = await connect_to(ends)
            writer.write(request_with(body, key="k"))
            await is_in_log.wait()
            assert world.log(1) == [b"a", b"b"]
        assert await reader.read() == b""
        writer.close()
        monkeypatch.setattr(WriteRequests, "finish", finish)
        async with gateway.client() as client:
            other = await client.append(row("a"), row("c"), key="k")
            assert (other.status, other.body["type"]) == (422, "IdempotencyKeyReused")
            answer = await client.append(row("a"), row("b"), key="k")
            assert [outcome["transaction_id"] for outcome in answer.body["outcomes"]] == [0, 1]
        assert world.log(1) == [b"a", b"b"]

    with_gateway(scenario)


@pytest.mark.parametrize("texts", [("a", "a"), ("a", "b")])
def test_concurrent_requests_at_two_gateways_with_the_same_idempotency_key_append_once(texts):
    async def append(gateway, text):
        async with gateway.client() as client:
            while True:
                answer = await client.append(row(text), row(text), key="k")
                if answer.status not in (503, 504):
                    return answer

    async def scenario(world, first):
        async with world.gateway() as second, asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(append(gateway, text))
                for gateway, text in zip((first, second), texts, strict=True)
            ]
        answers = [task.result() for task in tasks]
        if texts[0] == texts[1]:
            assert [each.status for each in answers] == [200, 200]
            assert answers[0].body == answers[1].body
        else:
            assert sorted(each.status for each in answers) == [200, 422]
        winner = next(number for number in range(2) if answers[number].status == 200)
        assert world.log(1) == [texts[winner].encode()] * 2

    with_gateway(scenario)


def test_a_repeated_request_takes_over_from_the_earlier_request(monkeypatch):
    append, is_waiting, may_continue = _PartitionAppend.append, asyncio.Event(), asyncio.Event()

    async def wait_then_append(task):
        if not is_waiting.is_set():
            is_waiting.set()
            await may_continue.wait()
        return await append(task)

    monkeypatch.setattr(_PartitionAppend, "append", wait_then_append)

    async def scenario(world, gateway):
        async with gateway.client() as client, gateway.client() as other:
            first = world.tasks.create_task(client.append(row("a"), key="k"))
            await is_waiting.wait()
            assert (await other.append(row("a"), key="k")).status == 200
            may_continue.set()
            answer = await first
        assert (answer.status, answer.body["type"]) == (504, "OutcomeUnknown")
        assert answer.body["error"] == (
            "another request with the same idempotency key has taken over."
        )
        assert answer.body["hint"].startswith("Repeat the request.")
        assert world.log(1) == [b"a"]

    with_gateway(scenario)


def test_without_zookeeper_an_idempotency_key_is_rejected(monkeypatch):
    async def begin(*_arguments, **_named):
        raise CoordinatorUnavailable("no connection")

    monkeypatch.setattr(WriteRequests, "begin", begin)

    async def scenario(_world, gateway):
        async with gateway.client() as client:
            answer = await client.append(row("a"), key="k")
            assert (await client.append(row("a"))).status == 200
        assert (answer.status, answer.body["type"]) == (503, "CoordinatorUnavailable")
        assert answer.body["error"] == (
            "an append with an idempotency key needs ZooKeeper: no connection"
        )

    with_gateway(scenario)


@pytest.mark.usefixtures("no_error_is_logged")
def test_a_feed_ends_when_its_client_disconnects():
    async def scenario(_world, gateway):
        _, writer = await connect_to(gateway)
        writer.write(b"GET /v1/partitions/1/feed?from=-1 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await poll_until(lambda: gateway.routes.feed_count)
        writer.transport.abort()
        await poll_until(lambda: not gateway.routes.feed_count)
        assert len(gateway.callers) == 1

    with_gateway(scenario)


@pytest.mark.parametrize(
    ("named", "status"),
    [
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
        ({"Content-Type": "Application/JSON", "Content-Encoding": "identity"}, 200),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": ""}, 415),
        ({"Content-Encoding": "gzip"}, 415),
        ({"Host": "localhost:80"}, 200),
        ({"Host": "LOCALHOST"}, 200),
        ({"Host": "[::1]:80"}, 200),
        ({"Host": "10.0.0.1"}, 200),
        ({"Host": "attacker.example:80"}, 400),
        ({"Host": "localhost.attacker.example"}, 400),
    ],
)
def test_a_web_page_of_another_origin_cannot_append(named, status):
    async def scenario(world, gateway):
        async with gateway.client() as client:
            append = ("POST", "/v1/transactions", append_body(row("a")))
            answer = await asyncio.to_thread(client.exchange, *append, named)
            preflight = await asyncio.to_thread(client.exchange, "OPTIONS", append[1], None, named)
        assert answer.status == status
        assert world.transaction_count() == (status == 200)
        assert preflight.status == 405
        assert not [header for header in preflight.headers if header.startswith("access-control")]

    with_gateway(scenario)


def test_a_read_through_dns_rebinding_is_rejected():
    async def scenario(_world, gateway):
        async with gateway.client() as client:
            answer = await client.get("/v1/marks", Host="attacker.example")
        assert (answer.status, "header Host" in answer.body["error"]) == (400, True)

    with_gateway(scenario)


def test_a_gateway_with_a_network_address_accepts_reads_with_any_host_header():
    async def scenario(_world, gateway):
        async with gateway.client() as client:
            assert (await client.get("/v1/marks", Host="gateway.example")).status == 200

    with_gateway(scenario, listen_host="10.0.0.1", insecure_network=True)


def test_a_request_with_two_idempotency_keys_is_rejected():
    async def scenario(world, gateway):
        reader, writer = await connect_to(gateway)
        two = HEAD + b"Idempotency-Key: l\r\n"
        writer.write(request_with(append_body(row("a")), key="k").replace(HEAD, two))
        status, fields = await read_answer(reader)
        assert (status, "Idempotency-Key" in fields["error"]) == (400, True)
        assert world.transaction_count() == 0
        writer.close()

    with_gateway(scenario)


def test_a_large_content_length_is_rejected_before_the_body_arrives():
    async def scenario(_world, gateway):
        reader, writer = await connect_to(gateway)
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % (64 * MIB))
        assert (await read_answer(reader))[0] == 413
        writer.close()

    with_gateway(scenario)
