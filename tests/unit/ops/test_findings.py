"""The table of findings: every row can be formatted, and no two texts are equal."""

import re

import pytest

from tests.unit.ops.printed_commands import check_understood
from waltz_core.ops.findings import FINDING_KINDS, new_finding, placeholder_names


def test_each_finding_has_a_unique_sentence():
    assert len(FINDING_KINDS) >= 20
    sentences = [finding_kind.sentence for finding_kind in FINDING_KINDS.values()]
    assert len(set(sentences)) == len(sentences)
    assert all(re.fullmatch(r"[a-z-]+", name) for name in FINDING_KINDS)


@pytest.mark.parametrize("name", list(FINDING_KINDS))
def test_a_finding_shows_the_value_of_each_field(name):
    fields = {field: f"<{field}>" for field in placeholder_names(FINDING_KINDS[name])}
    finding = new_finding(name, "it", **fields)
    assert finding.key == (name, "it")
    for field in fields.values():
        assert field in finding.sentence + finding.command
    assert "{" not in finding.sentence + finding.command
    first, *_ = finding.command.split()
    assert first in (
        *("waltz-core", "kill", "timedatectl"),
        *("<start>", "<move>", "<drain>", "<rebuild>", "<spread>"),
    )


# Values of a row's fields. The tests of the diagnosis check composed commands.
VALUES = {
    "connect": "zk1:2181/waltz/payments",
    "connect_with_tls_file": "'zk1:2181/waltz/payments?tls=FILE'",
    "connect_with_token_file": "'zk1:2181/waltz/payments?tls=ca.pem&token_file=FILE'",
    "hosts": "zk1:2181/waltz/payments",
    "partition": "3",
    "partitions": "0-3,7",
    "storage": "10.0.0.1:15280",
    "server": "10.0.1.1:15180",
    "port": "15281",
    "pid": "77",
    "usual": "3",
    "directory": "here/.waltz",
}
COMPOSED = {"start", "move", "drain", "rebuild", "spread"}


@pytest.mark.parametrize("name", list(FINDING_KINDS))
def test_a_printed_command_can_be_parsed(name):
    command = FINDING_KINDS[name].command
    if command.strip("{}") not in COMPOSED:
        check_understood(command.format_map(VALUES))


@pytest.mark.parametrize(
    "line",
    [
        "waltz-core cluster prefer 0",
        "waltz-core doctor --nothing",
        "waltz-core local down && waltz-core cluster undo",
        "rm -r there",
    ],
)
def test_a_printed_command_that_does_not_exist_is_detected(line):
    with pytest.raises(AssertionError):
        check_understood(line)


def test_a_finding_of_a_partition_names_the_partition():
    fields = {"storage": "a:1", "connect": "z:1/w", "partition": 3}
    assert new_finding("replica-offline", "3 a:1", **fields).partition == 3
    assert new_finding("no-server", "servers", start="x").partition is None
