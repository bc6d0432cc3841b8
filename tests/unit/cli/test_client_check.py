"""`client validate`, `producer` and `consumer` find errors in a Waltz in this process."""

import json
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.cli.client import client_check
from waltz_core.cli.client.client_check import NumberedContext, errors_in_transaction, expected_data
from waltz_core.cli.main import main
from waltz_core.memory_waltz import MemoryWaltz

LARGE_NUMBERS = st.integers(0, 2**62)


@pytest.fixture
def in_memory(monkeypatch):
    """Let the clients of all commands use one Waltz in memory."""

    @contextmanager
    def run(**options):
        with MemoryWaltz(partition_count=2, **options) as waltz:
            connect = lambda _place: waltz.async_client()  # noqa: E731
            monkeypatch.setattr(client_check.AsyncWaltzClient, "connect", connect)
            yield waltz

    return run


def run_command_json(capsys, *arguments):
    code = main(
        [
            "client",
            *arguments,
            "--connect",
            "memory:1/w",
            "--json",
            "--timeout-s",
            str(TEST_TIMEOUT_S),
        ]
    )
    return code, json.loads(capsys.readouterr().out)


def test_many_clients_with_the_same_lock_leave_a_valid_log(capsys, in_memory):
    with in_memory() as waltz:
        arguments = ("--clients", "3", "--transactions", "8", "--partitions", "2")
        code, found = run_command_json(capsys, "validate", *arguments)
        assert code == 0
        assert found["is_valid"]
        assert (found["clients"], found["written"], found["checked"]) == (3, 24, 72)
        assert found["attempts"] > 24, "no append was rejected, so the test is without effect"
        assert found["ids"] == {"0": [0, 11], "1": [0, 11]}
        data = [[transaction.data for transaction in waltz.transactions(p)] for p in (0, 1)]
        assert data == [[expected_data(number) for number in range(12)]] * 2


def test_lost_answers_do_not_change_the_result(capsys, in_memory):
    with in_memory(fault_rate=0.1, seed=1) as waltz:
        code, found = run_command_json(capsys, "validate", "--clients", "2", "--transactions", "30")
        assert waltz.fault_count > 0
    assert (code, found["written"], found["checked"]) == (0, 60, 120)


def test_a_log_that_does_not_reject_conflicts_is_detected(capsys, in_memory, monkeypatch):
    def unlocked(context, builder):
        context.attempts += 1
        builder.data = expected_data(builder.client_high_water_mark + 1)
        return True

    monkeypatch.setattr(NumberedContext, "execute", unlocked)
    with in_memory():
        code, found = run_command_json(capsys, "validate", "--clients", "3", "--transactions", "20")
    assert code == 1
    assert not found["is_valid"]
    assert "expected the transaction's own ID as data" in found["wrong"][0]


def test_transactions_of_another_client_are_detected(capsys, in_memory):
    with in_memory() as waltz:
        with waltz.client() as client:
            client.append(b"not a number", partition=0).result()
        code, found = run_command_json(capsys, "consume", "--first", "0", "--transactions", "1")
    assert code == 1
    assert found["wrong"] == [
        (
            "partition 0, transaction 0: expected the transaction's own ID as data, "
            "found b'not a number'"
        )
    ]


def test_producer_and_consumer_may_be_separate_commands(capsys, in_memory):
    with in_memory():
        _, report = run_command_json(
            capsys, "create-producer", "--transactions", "9", "--partitions", "2"
        )
        assert report == {"written": 9, "attempts": 9, "ids": {"0": [0, 4], "1": [0, 3]}}
        arguments = ("--first", "0", "--partitions", "2", "--transactions", "9")
        code, found = run_command_json(capsys, "create-consumer", *arguments)
        assert (code, found["is_valid"], found["checked"]) == (0, True, 9)
        code, found = run_command_json(capsys, "consume", "--first", "1", "--transactions", "2")
        assert (code, found["checked"], found["ids"]) == (0, 2, {"0": [1, 2]})
        assert main(["client", "consume", "--connect", "x:1/w", "--timeout-s", "0.2"]) == 1
        assert (
            "the command did not finish within 0 s: 0 of 100 transactions were checked"
            in capsys.readouterr().err
        )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["validate", "--clients", "0"], "--clients: expected 1 or more, found 0"),
        (["validate", "--transactions", "0"], "--transactions: expected 1 or more, found 0"),
        (["validate", "--partitions", "3"], "--partitions: expected at most 2, the partition"),
        (["produce", "--interval-ms", "-1"], "--interval-ms: expected 0 or more, found -1"),
        (["consume", "--first", "-1"], "--first: expected a transaction ID, 0 or more, found -1"),
    ],
)
def test_invalid_arguments_are_reported_in_one_sentence(capsys, in_memory, arguments, sentence):
    with in_memory():
        assert main(["client", *arguments, "--connect", "memory:1/w"]) == 1
    assert sentence in capsys.readouterr().err


@given(LARGE_NUMBERS, st.sampled_from([0, 1, -7]), st.sampled_from([0, 1, -7]))
def test_a_record_after_a_gap_or_with_data_other_than_its_id_is_an_error(number, gap, difference):
    errors = errors_in_transaction(7, number - 1 - gap, number, expected_data(number + difference))
    assert len(errors) == (gap != 0) + (difference != 0)
    assert all(
        error.startswith(f"partition 7, transaction {number}: expected ") for error in errors
    )
