"""`client append`: the partitions of its rows."""

from contextlib import contextmanager

import pytest

from tests.commands import run_command
from waltz_core.cli.client import client_command
from waltz_core.memory_waltz import MemoryWaltz


@pytest.fixture
def waltz(monkeypatch):
    """Let the command's client use a Waltz in memory."""
    with MemoryWaltz(partition_count=4) as memory:

        @contextmanager
        def client(_connect):
            with memory.client() as opened:
                yield opened

        monkeypatch.setattr(client_command, "WaltzClient", client)
        yield memory


def append(*arguments):
    return run_command("client", "append", *arguments, "--connect", "memory:1/w")


def rows(waltz):
    return [[transaction.data for transaction in waltz.transactions(p)] for p in range(4)]


@pytest.mark.parametrize("option", ["--partition", "--partitions"])
def test_rows_go_to_the_named_partitions_only(waltz, option):
    assert append(option, "1,3", "a", "b", "c").returncode == 0
    assert append(option, "3", "--write-lock", "account:7", "d").returncode == 0
    assert rows(waltz) == [[], [b"a", b"c"], [], [b"b", b"d"]]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ("--partition", "4"),
            "partitions: expected numbers and ranges such as 0-3,7 in 0..3, or all; found '4'",
        ),
        (
            ("--partition", "1,3", "--write-lock", "account:7"),
            "--partition: expected one partition with --write-lock, found '1,3'",
        ),
    ],
)
def test_invalid_partitions_are_rejected_before_any_append(waltz, arguments, error):
    result = append(*arguments, "a")
    assert (result.returncode, rows(waltz)) == (1, [[], [], [], []])
    assert error in result.stderr
