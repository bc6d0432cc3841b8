"""The checks of requests, and errors as JSON."""

import json
import re

import pytest

from tests.loops import run_on_virtual_loop
from waltz_core import errors
from waltz_core.client import lock, partition_of
from waltz_core.gateway.json_errors import error_fields, error_headers, http_status_of
from waltz_core.gateway.request_headers import check_idempotency_key
from waltz_core.gateway.request_parsing import (
    TRANSACTIONS_MAX,
    BodyReader,
    UrlParameters,
    parse_transactions,
    with_default_partition,
)

COUNT = 4
HELLO = "aGVsbG8="


def parse(*rows):
    return parse_transactions(json.dumps({"transactions": rows}).encode(), COUNT)


def rejection(call):
    with pytest.raises(errors.UsageError) as caught:
        call()
    return caught.value


def test_a_transaction_with_only_data_gets_default_values():
    (row,) = parse({"data": HELLO})
    assert row == (b"hello", 0, -1, (), (), (), None)


def test_locks_are_hashed_and_the_first_one_determines_the_partition():
    (row,) = parse(
        {
            "data": "",
            "header": -7,
            "write_locks": [["seat", "12F"]],
            "read_locks": [["price", 9]],
            "append_locks": [["log", 0]],
            "mark": -1,
        }
    )
    seat = lock("seat", "12F")
    locks = ((seat,), (lock("price", 9),), (lock("log", 0),))
    assert row == (b"", -7, partition_of(seat, COUNT), *locks, -1)


def test_a_given_partition_takes_precedence_over_the_lock():
    (row,) = parse({"data": "", "partition": 3, "append_locks": [["a", 1]]})
    assert row.partition == 3


def test_transactions_inherit_the_partition_of_the_request():
    rows = parse({"data": ""}, {"data": "", "partition": 0})
    assert [row.partition for row in with_default_partition(rows, 2)] == [2, 0]


@pytest.mark.parametrize(
    ("row", "message", "status"),
    [
        ({}, r"transactions\[0\].data: expected bytes in canonical Base64", 400),
        ({"data": "a"}, 'Base64 with padding, found "a"', 400),
        ({"data": "aGVs\nbG8="}, "Base64 with padding", 400),
        ({"data": 1}, "Base64 with padding", 400),
        ({"data": "QQ"}, "Base64 with padding", 400),
        ({"data": "QR=="}, "Base64 with padding", 400),
        ({"data": "", "dat": 1}, 'has an unknown field: expected data, .*, found "dat"', 400),
        ({"data": "", "header": 1 << 31}, "header: expected an integer from -2147483648", 400),
        ({"data": "", "header": True}, "header: expected an integer", 400),
        ({"data": "", "partition": 4}, "there is no partition 4: expected 0 to 3", 404),
        (
            {"data": "", "partition": -1},
            "partition: expected an integer from 0 to 3, found -1",
            400,
        ),
        ({"data": "", "partition": "1"}, "partition: expected an integer from 0 to 3", 400),
        ({"data": "", "write_locks": [["a", 1]]}, "mark is missing", 400),
        ({"data": "", "read_locks": [["a", 1]]}, "mark is missing", 400),
        ({"data": "", "mark": -2}, "mark: expected an integer from -1", 400),
        ({"data": "", "append_locks": "a"}, "expected a list of at most 65536 locks", 400),
        ({"data": "", "append_locks": [["a"]]}, r"append_locks\[0\]: expected \[name, key\]", 400),
        ({"data": "", "append_locks": [["a", 1 << 63]]}, r"expected \[name, key\]", 400),
        ({"data": "", "append_locks": [["a", True]]}, r"expected \[name, key\]", 400),
        ([], r"transactions\[0\]: expected an object", 400),
        ({"data": "A" * (6 << 20)}, "expected at most 4194304 bytes, found 4718592", 413),
    ],
)
def test_the_error_for_an_invalid_transaction_has_its_json_path(row, message, status):
    error = rejection(lambda: parse(row))
    assert http_status_of(error) == status
    assert re.search(message, str(error))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"transactions": {}}',
        b'{"transactions": []}',
        b'{"transactions": [], "more": 1}',
        b'{"transactions": [{"data": "", "": 1}]}',
        b'{"transactions": [{"data": "", "data": ""}]}',
        b'{"transactions": [{"data": ""}], "transactions": [{"data": ""}]}',
        b"[" * 100_000,
        b"\xff",
        b'{"transactions": [' + b"0," * 200_000 + b"NaN]}",
        b'{"transactions": [' + b"0," * 200_000 + b'"\\ud800"]}',
        b'{"transactions": [{"data": "", "header": NaN}]}',
        json.dumps({"transactions": [{"data": ""}] * (TRANSACTIONS_MAX + 1)}).encode(),
    ],
)
def test_an_invalid_body_is_rejected(body):
    assert http_status_of(rejection(lambda: parse_transactions(body, COUNT))) == 400


def test_the_locks_of_a_request_are_limited():
    locks = [["a", 0]] * 40_000
    error = rejection(lambda: parse(*({"data": "", "append_locks": locks} for _ in range(2))))
    assert (type(error), "more than 65536 locks" in str(error)) == (errors.TooLarge, True)


@pytest.mark.parametrize("key", ["", "a b", "ä", "x" * 129, "a/b"])
def test_an_invalid_idempotency_key_is_rejected(key):
    assert "Idempotency-Key" in error_fields(rejection(lambda: check_idempotency_key(key)))["error"]


def test_the_idempotency_key_is_optional():
    assert check_idempotency_key(None) is None
    assert check_idempotency_key("8e03978e-40d5-43dd-bc93-6894a57f9324") is not None


def test_query_parameters_are_checked():
    query = UrlParameters([("first", "7"), ("header", "-1,8"), ("linearizable", "true")], QUERY)
    assert query.integer("first") == 7
    assert query.integer("last") is None
    assert query.headers() == (-1, 8)
    assert query.flag("linearizable")


QUERY = ("first", "last", "header", "linearizable")


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ([("start", "7")], lambda query: query),
        ([("first", "7"), ("first", "8")], lambda query: query),
        ([("first", "x")], lambda query: query.integer("first")),
        ([("first", "-1")], lambda query: query.integer("first")),
        ([("first", "9" * 30)], lambda query: query.integer("first")),
        ([("header", "1,")], lambda query: query.headers()),
        ([("header", "1_0")], lambda query: query.headers()),
        ([("header", "--1")], lambda query: query.headers()),
        ([("header", ",".join("1" * 65))], lambda query: query.headers()),
        ([("linearizable", "1")], lambda query: query.flag("linearizable")),
    ],
)
def test_an_invalid_query_is_rejected(given, read):
    assert http_status_of(rejection(lambda: read(UrlParameters(given, QUERY)))) == 400


async def chunks(*found):
    for each in found:
        yield each


@run_on_virtual_loop
async def test_the_bodies_of_all_requests_share_a_memory_limit():
    memory = BodyReader(body_bytes_max=10, memory_bytes_max=15)
    async with memory.body(chunks(b"12345", b"67890")) as first:
        assert first == b"1234567890"
        with pytest.raises(errors.Unavailable, match="more than 15 bytes"):
            async with memory.body(chunks(b"123456")):
                pass
        async with memory.body(chunks(b"12345")) as second:
            assert second == b"12345"
    async with memory.body(chunks(b"1234567890")) as third:
        assert third == b"1234567890"
    with pytest.raises(errors.TooLarge, match="more than 10 bytes"):
        async with memory.body(chunks(b"1234567890", b"1")):
            pass


def lock_failed():
    failed = errors.LockFailed("a lock conflict")
    failed.conflicting, failed.high_water_mark = 7, 9
    return failed


@pytest.mark.parametrize(
    ("error", "status", "more"),
    [
        (lock_failed(), 409, {"winner": 7, "high_water_mark": 9}),
        (errors.ClientAheadOfLog("x. Hint: check it"), 409, {"hint": "Check it"}),
        (errors.BeforeLogStart("x", 5), 410, {"first_available": 5}),
        (errors.PermissionDenied("x"), 403, {}),
        (errors.ClientIdDenied("x"), 403, {}),
        (errors.AuthenticationFailed("x"), 401, {}),
        (errors.TooLarge("x"), 413, {}),
        (errors.UnknownPartition("x"), 404, {}),
        (errors.BadRequest("x"), 400, {}),
        (errors.IdempotencyKeyReused("x"), 422, {}),
        (errors.Overloaded("x", 1_500), 429, {}),
        (errors.NoSpace("x"), 503, {}),
        (errors.ConnectionSuperseded("x"), 503, {}),
        (errors.DataLoss("x"), 500, {}),
    ],
)
def test_each_error_has_an_http_status_and_json_fields(error, status, more):
    text = "a lock conflict" if status == 409 and "winner" in more else "x"
    assert http_status_of(error) == status
    expected = {"type": type(error).__name__, "error": text, **more}
    found = error_fields(error)
    found["error"] = found["error"].removesuffix(".")
    assert found == expected


def test_an_unknown_outcome_has_a_hint():
    fields = error_fields(errors.OutcomeUnknown("x"))
    assert http_status_of(errors.OutcomeUnknown("x")) == 504
    assert "same Idempotency-Key" in fields["hint"]


def test_the_error_states_when_to_retry():
    assert error_headers(errors.Overloaded("x", 1_500)) == {"Retry-After": "2"}
    assert error_headers(errors.NoSpace("x")) == {"Retry-After": "1"}
    assert error_headers(errors.AuthenticationFailed("x")) == {"WWW-Authenticate": "Bearer"}
    assert error_headers(errors.LockFailed("x")) == {}


def test_the_error_for_an_invalid_request_has_expected_and_found_values():
    named = {"expected": "a number", "hint": "Use 7."}
    error = errors.RequestRejected("field a", found=[1] * 500, **named)
    fields = error_fields(error)
    assert fields.pop("found").startswith("[1, 1, ")
    assert fields.pop("error").startswith("field a: expected a number, found [1, 1, ")
    assert fields == {"type": "RequestRejected", **named}


@pytest.mark.parametrize(
    ("found", "shown"),
    [
        (None, None),
        (True, True),
        (7, 7),
        ("x" * 200, "x" * 200),
        ("x" * 300, '"' + "x" * 199 + "..."),
        ({"a": 1}, "an object"),
        (["a", True, None, {"b": [1]}], '["a", true, null, {"b": [1]}]'),
        ([[1] * 100] * 1_000, json.dumps([[1] * 100])[:200] + "..."),
    ],
)
def test_a_large_value_is_shortened(found, shown):
    assert errors.RequestRejected("x", expected="y", found=found).found == shown
