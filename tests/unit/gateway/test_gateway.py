"""A gateway over real sockets, at a server in memory."""

import asyncio
import base64
import http.client
import json
from collections import defaultdict

import jsonschema
import pytest

from tests.loops import poll_until
from tests.unit.gateway.gateway_world import PARTITION_COUNT, in_gateway_world
from waltz_core.client import lock, partition_of
from waltz_core.client.api.opening import UnopenedClient
from waltz_core.errors import OutcomeUnknown
from waltz_core.gateway import http_feeds, http_routes, openapi
from waltz_core.server.process.server_in_memory import InjectedFailures

SEAT = ["seat", "12F"]
SEAT_PARTITION = partition_of(lock("seat", "12F"), PARTITION_COUNT)


def row(data, **more):
    return {"data": data, "partition": 1, **more}


def check_schema(name, value):
    """Check a response against the schema in the OpenAPI document."""
    schemas = {"components": openapi.openapi_document()["components"]}
    jsonschema.validate(value, {**schemas, "$ref": f"#/components/schemas/{name}"})


def with_gateway(scenario, **settings):
    async def play(world):
        async with world.gateway(**settings) as gateway, gateway.client() as client:
            await scenario(world, gateway, client)

    in_gateway_world(play)


# --- append


def test_transactions_are_appended_in_order():
    async def scenario(world, gateway, client):
        answer = await client.append(*(row(f"{number}") for number in range(20)))
        assert answer.status == 200
        check_schema("Outcomes", answer.body)
        outcomes = [{"partition": 1, "transaction_id": number} for number in range(20)]
        assert answer.body == {"outcomes": outcomes}
        assert world.log(1) == [b"%d" % number for number in range(20)]
        assert gateway.metrics.value("waltz_gateway_appended_transactions_total") == 20
        metric = "waltz_gateway_requests_total"
        assert gateway.metrics.value(metric, operation="append", status=200) == 1

    with_gateway(scenario)


def test_the_gateway_chooses_a_partition_for_each_request_that_names_none():
    async def scenario(_world, _gateway, client):
        found = set()
        for _ in range(PARTITION_COUNT):
            answer = await client.append({"data": "a"}, {"data": "b"})
            (partition,) = {outcome["partition"] for outcome in answer.body["outcomes"]}
            found.add(partition)
        assert found == set(range(PARTITION_COUNT))

    with_gateway(scenario)


def test_a_rejection_names_the_winning_transaction():
    async def scenario(world, _gateway, client):
        taken = {"write_locks": [SEAT], "mark": -1}
        anna = await client.append({"data": "Anna", **taken})
        boris = await client.append({"data": "Boris", **taken}, {"data": "other"})
        winner = anna.body["outcomes"][0]
        assert (anna.status, boris.status) == (200, 409)
        check_schema("Error", boris.body)
        assert winner == {"partition": SEAT_PARTITION, "transaction_id": 0}
        assert (boris.body["type"], boris.body["winner"]) == ("LockFailed", 0)
        rejected, committed = boris.body["outcomes"]
        assert (rejected["partition"], rejected["winner"]) == (SEAT_PARTITION, 0)
        assert "transaction_id" in committed
        assert world.log(SEAT_PARTITION)[:1] == [b"Anna"]
        again = await client.append({"data": "Boris", "write_locks": [SEAT], "mark": 0})
        assert again.status == 200

    with_gateway(scenario)


@pytest.mark.parametrize("key", [None, "k"])
def test_a_mark_above_the_log_is_rejected(key):
    async def scenario(world, _gateway, client):
        rows = [row("a"), row("x", write_locks=[SEAT], mark=7), row("b")]
        answer = await client.append(*rows, key=key)
        assert (answer.status, answer.body["type"]) == (409, "ClientAheadOfLog")
        assert [outcome.get("transaction_id") for outcome in answer.body["outcomes"]] == [
            0,
            None,
            1,
        ]
        assert answer.body["outcomes"][1]["type"] == "ClientAheadOfLog"
        assert world.log(1) == [b"a", b"b"]

    with_gateway(scenario)


def test_the_rejection_of_a_mark_above_the_log_is_stored_under_the_idempotency_key():
    async def scenario(world, _gateway, client):
        ahead = row("x", write_locks=[SEAT], mark=0)
        first = await client.append(ahead, key="k")
        assert (first.status, first.body["type"]) == (409, "ClientAheadOfLog")
        assert (await client.append(row("y"))).status == 200  # now the log has the mark
        assert (await client.append(ahead, key="k"))[::2] == first[::2]
        other = await client.append(row("z"), key="k")
        assert (other.status, other.body["type"]) == (422, "IdempotencyKeyReused")
        assert world.log(1) == [b"y"]

    with_gateway(scenario)


def test_a_wrong_request_gets_its_error_as_json():
    async def scenario(_world, gateway, client):
        missing = await client.post(b"{}")
        assert (missing.status, missing.body["type"]) == (400, "RequestRejected")
        check_schema("Error", missing.body)
        wrong_key = await client.append(row("x"), key="a b")
        assert (wrong_key.status, wrong_key.body["found"]) == (400, "a b")
        unknown_path = await client.get("/v2/marks")
        assert (unknown_path.status, unknown_path.headers["content-type"]) == (
            404,
            "application/json",
        )
        wrong_method = await client.get("/v1/transactions")
        assert (wrong_method.status, wrong_method.headers["allow"]) == (405, "POST")
        assert (await client.get("/v1/marks/")).status == 404
        token = await client.get("/v1/marks", Authorization="Bearer x")
        assert (token.status, token.headers["www-authenticate"]) == (401, "Bearer")
        basic = await client.get("/v1/marks", Authorization="Basic eDp4")
        assert (basic.status, "expected Bearer TOKEN" in basic.body["error"]) == (401, True)
        assert "eDp4" not in json.dumps(basic.body)
        without_tls = await client.get("/v1/marks", Authorization="Bearer " + "0" * 64)
        assert (without_tls.status, without_tls.body["type"]) == (503, "Unavailable")
        assert "requires TLS" in without_tls.body["error"]
        assert len(gateway.callers) == 1

    with_gateway(scenario)


# --- idempotency keys


def test_a_repeated_request_gets_the_same_answer():
    async def scenario(world, _gateway, client):
        rows = [
            row("a", write_locks=[SEAT], mark=-1),
            row("b", write_locks=[SEAT], mark=-1),
            row("a", header=7),
            {"data": "elsewhere", "partition": 2},
        ]
        first = await client.append(*rows, key="k")
        check_schema("Error", first.body)
        assert [outcome.get("transaction_id") for outcome in first.body["outcomes"]] == [
            0,
            None,
            1,
            0,
        ]
        assert first.body["outcomes"][1]["winner"] == 0
        async with world.gateway() as other, other.client() as second:
            assert (await second.append(*rows, key="k"))[::2] == first[::2]
        assert (world.log(1), world.log(2)) == ([b"a", b"a"], [b"elsewhere"])

    with_gateway(scenario)


def test_an_idempotency_key_determines_the_partition():
    async def scenario(_world, _gateway, client):
        answers = [await client.append({"data": "a"}, key="k") for _ in range(3)]
        assert answers[0].status == 200
        assert {str(answer.body) for answer in answers} == {str(answers[0].body)}

    with_gateway(scenario)


def test_an_idempotency_key_cannot_be_used_for_two_requests():
    async def scenario(world, _gateway, client):
        assert (await client.append(row("a"), key="k")).status == 200
        for other in (row("b"), row("a", header=1), row("a", partition=2), row("a", mark=-1)):
            answer = await client.append(other, key="k")
            assert (answer.status, answer.body["type"]) == (422, "IdempotencyKeyReused")
        assert world.log(1) == [b"a"]

    with_gateway(scenario)


def test_a_gateway_completes_the_request_of_another_gateway():
    """The transactions enter the log, but the first gateway does not receive the answer."""

    async def scenario(world, _gateway, client):
        rows = [row(f"{number % 2}") for number in range(5)]
        world.server.outcome_timeout_s = defaultdict(lambda: 1.0)
        world.server.faults.failures = InjectedFailures(1, OutcomeUnknown("lost"), enters_log=True)
        first = await client.append(*rows, key="k")
        assert (first.status, first.body["type"]) == (504, "OutcomeUnknown")
        assert "same Idempotency-Key" in first.body["hint"]
        async with world.gateway() as other, other.client() as second:
            answer = await second.append(*rows, key="k")
        assert [outcome["transaction_id"] for outcome in answer.body["outcomes"]] == [0, 1, 2, 3, 4]
        assert len(world.log(1)) == 5

    with_gateway(scenario, request_timeout_ms=300)


@pytest.mark.parametrize("gateway_count", [1, 2])
def test_retries_neither_lose_nor_duplicate_transactions(gateway_count):
    async def scenario(world):
        reported = {}
        async with (
            world.gateway(request_timeout_ms=500) as first,
            world.gateway(request_timeout_ms=500) as second,
            asyncio.TaskGroup() as group,
        ):
            for number in range(4):
                gateways = [first, second][:gateway_count]
                group.create_task(_write(gateways, number, reported))
        assert len(reported) == 4 * 5 * 3
        for (partition, transaction_id), data in reported.items():
            assert world.log(partition)[transaction_id] == data
        assert world.transaction_count() == len(reported)
        assert world.server.faults.loss_count > 5

    in_gateway_world(scenario, fault_rate=0.3)


async def _write(gateways, writer, reported):
    for number in range(5):
        rows = [{"data": f"{writer}.{number}.{each}", "partition": each} for each in (1, 2, 1)]
        for attempt in range(1_000):
            async with gateways[attempt % len(gateways)].client() as client:
                answer = await client.append(*rows, key=f"{writer}-{number}")
            if answer.status == 200:
                break
            assert answer.status in (503, 504), answer
        for each, outcome in zip(rows, answer.body["outcomes"], strict=True):
            partition_and_id = (outcome["partition"], outcome["transaction_id"])
            assert partition_and_id not in reported
            reported[partition_and_id] = each["data"].encode()


def test_the_registry_stores_all_outcomes_of_a_request_with_the_most_rows():
    async def scenario(_world, _gateway, client):
        rows = [row("", write_locks=[["a", 0]], mark=-1) for _ in range(256)]
        answer = await client.append(*rows, key="k")
        assert [outcome.get("transaction_id") for outcome in answer.body["outcomes"][:2]] == [
            0,
            None,
        ]
        assert (await client.append(*rows, key="k")).body == answer.body

    with_gateway(scenario)


# --- marks and ranges


def test_the_marks_of_all_or_some_partitions_are_returned():
    async def scenario(_world, _gateway, client):
        await client.append(row("a"))
        answer = await client.get("/v1/marks")
        check_schema("Marks", answer.body)
        assert answer.body == {
            "partition_count": 4,
            "marks": {"0": -1, "1": 0, "2": -1, "3": -1},
        }
        some = await client.get("/v1/marks?partition=1,3&linearizable=true")
        assert some.body["marks"] == {"1": 0, "3": -1}
        assert (await client.get("/v1/marks?partition=4")).status == 404

    with_gateway(scenario)


def test_a_range_is_read_in_pieces():
    async def scenario(_world, _gateway, client):
        rows = [row("x" * 300_000, header=number % 2) for number in range(8)]
        for part in (rows[:4], rows[4:]):
            await client.append(*part)
        found, first = [], 0
        while True:
            answer = await client.get(f"/v1/partitions/1/transactions?first={first}&last=6")
            check_schema("Range", answer.body)
            assert answer.body["high_water_mark"] == 7
            if not answer.body["transactions"]:
                break
            found += [transaction["transaction_id"] for transaction in answer.body["transactions"]]
            assert answer.body["next"] > first
            first = answer.body["next"]
        assert found == list(range(7))
        filtered = await client.get("/v1/partitions/1/transactions?first=0&last=1&header=1,5")
        (only,) = filtered.body["transactions"]
        assert (only["transaction_id"], only["header"], filtered.body["next"]) == (1, 1, 2)
        assert base64.b64decode(only["data"]) == b"x" * 300_000

    with_gateway(scenario)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/partitions/1/transactions", 400),
        ("/v1/partitions/1/transactions?first=-1", 400),
        ("/v1/partitions/1/transactions?first=0&start=1", 400),
        ("/v1/partitions/4/transactions?first=0", 404),
        ("/v1/partitions/x/transactions?first=0", 400),
        ("/v1/partitions/--1/transactions?first=0", 400),
        ("/v1/partitions/%D9%A1/transactions?first=0", 400),
        ("/v1/partitions/1/feed", 400),
        ("/v1/partitions/1/feed?from=-2", 400),
        ("/v1/partitions/1/feed?from=0", 409),
        ("/v1/partitions/9/feed?from=0", 404),
    ],
)
def test_wrong_reads_are_rejected(path, status):
    async def scenario(_world, _gateway, client):
        answer = await client.get(path)
        assert answer.status == status
        check_schema("Error", answer.body)

    with_gateway(scenario)


# --- the feed

LINES = {"Accept": http_feeds.JSON_LINES_TYPE}


def test_a_feed_of_server_sent_events_continues_at_the_last_event_id():
    async def scenario(world, _gateway, client):
        await client.append(*(row(f"{number}") for number in range(4)))
        path = "/v1/partitions/1/feed?from=-1"
        lines = await client.read_feed(path, 8)
        assert lines[:2] == [b": heartbeat", b"id: -1"]
        assert lines[2:5] == [
            b"id: 0",
            b"event: transaction",
            b'data: {"transaction_id":0,"header":0,"data":"MA=="}',
        ]
        async with world.gateway() as other, other.client() as second:
            again = await second.read_feed(path, 3, Last_Event_ID="2")
            assert again == [b": heartbeat", b"id: 2", b"id: 3"]
            for wrong in ("x", "-2", "--5", "9" * 5_000):
                answer = await second.get(path, Last_Event_ID=wrong)
                assert (answer.status, "header Last-Event-ID" in answer.body["error"]) == (
                    400,
                    True,
                )
            later = await second.get(path, Last_Event_ID="4")
            assert (later.status, later.body["type"]) == (409, "ClientAheadOfLog")

    with_gateway(scenario)


def test_a_feed_of_json_lines_has_past_and_new_transactions():
    async def scenario(_world, gateway, client):
        await client.append(row("old"))
        async with gateway.client() as reader, asyncio.TaskGroup() as group:
            reading = group.create_task(
                reader.read_feed("/v1/partitions/1/feed?from=-1", 4, **LINES)
            )
            await poll_until(lambda: gateway.routes.feed_count)
            await client.append(row("new"), row("newer"))
        events = [json.loads(each) for each in reading.result()]
        assert events[0] == {"mark": -1}
        data = [base64.b64decode(event["data"]) for event in events[1:]]
        assert data == [b"old", b"new", b"newer"]
        for event in events[1:]:
            check_schema("Transaction", event)

    with_gateway(scenario)


def test_a_filtered_feed_sends_heartbeats_with_its_mark(monkeypatch):
    monkeypatch.setattr(http_feeds, "HEARTBEAT_S", 0.05)

    async def scenario(_world, _gateway, client):
        await client.append(*(row("x", header=number) for number in range(9)))
        path = "/v1/partitions/1/feed?from=-1&header=3,4"
        while True:
            lines = await client.read_feed(path, 5, **LINES)
            events = [json.loads(line) for line in lines]
            found = [event["transaction_id"] for event in events if "transaction_id" in event]
            assert set(found) <= {3, 4}
            if found == [3, 4] and events[-1] == {"mark": 8}:
                break

    with_gateway(scenario)


def test_an_exception_in_a_feed_is_logged(monkeypatch, caplog):
    def fail(_mark, _fields):
        raise ZeroDivisionError

    monkeypatch.setattr(http_routes, "as_json_line", fail)

    async def scenario(_world, gateway, client):
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            await client.get("/v1/partitions/1/feed?from=-1", **LINES)
        await poll_until(lambda: not gateway.routes.feed_count)

    with_gateway(scenario)
    assert "gateway.request_failed operation=feed" in caplog.text


def test_the_number_of_feeds_is_limited():
    async def scenario(_world, gateway, client):
        gateway.routes.feed_count += 1
        answer = await client.get("/v1/partitions/1/feed?from=-1")
        assert (answer.status, "retry-after" in answer.headers) == (429, True)
        gateway.routes.feed_count -= 1
        await client.read_feed("/v1/partitions/1/feed?from=-1", 2)
        await poll_until(lambda: not gateway.routes.feed_count)

    with_gateway(scenario, feeds_max=1)


def test_a_feed_waits_for_a_slow_reader(monkeypatch):
    """The feed requests at most two batches of data until the reader takes one."""
    monkeypatch.setattr(http_feeds, "BATCH_BYTES_MAX", 20_000)

    async def scenario(_world, gateway, client):
        await client.append(*(row("x" * 10_000) for _ in range(60)))
        async with UnopenedClient(gateway.callers.new_client(None)) as own:
            reader = http_feeds.HttpFeed(own, 1, -1)
            events = reader.events((), http_feeds.as_json_line)
            assert await anext(events) == b'{"mark":-1}\n'
            lines = (await anext(events)).splitlines()
            await poll_until(reader._event_batches.full)
            assert own._partitions[1].mark < 10
            while len(lines) < 60:
                lines += (await anext(events)).splitlines()
            await events.aclose()
        assert [json.loads(line)["transaction_id"] for line in lines] == list(range(60))

    with_gateway(scenario)


# --- the description


def test_the_gateway_serves_its_openapi_document():
    async def scenario(_world, _gateway, client):
        answer = await client.get(openapi.DOCUMENT_PATH)
        assert (answer.status, answer.body) == (200, openapi.openapi_document())

    with_gateway(scenario)
