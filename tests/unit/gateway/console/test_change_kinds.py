"""The changes of the console match the functions, the commands and the findings."""

import inspect
import shlex
from dataclasses import replace
from uuid import UUID

import click
import pytest

from tests.commands import parse_command, subcommands_of
from tests.unit.ops.test_diagnosis import SPARE, A, B, C, Case, diagnose
from tests.unit.ops.test_findings import COMPOSED, VALUES
from waltz_core.cluster.znodes.model import PartitionMetadata
from waltz_core.errors import RequestRejected
from waltz_core.gateway.console.change_kinds import (
    CHANGE_KINDS,
    TEXT_CHARACTERS_MAX,
    ParameterKind,
    change_in_command,
    parse_change,
)
from waltz_core.ops.facts import DiskFacts
from waltz_core.ops.findings import FINDING_KINDS

CONNECT = "zk1:2181/waltz/payments"
VALUE_OF_KIND = {
    ParameterKind.STORAGE: "10.0.0.1:5280",
    ParameterKind.SERVER: "10.0.1.1:5180",
    ParameterKind.ADDRESS: "[::1]:5280",
    ParameterKind.PARTITIONS: "0-3,7",
    ParameterKind.INTEGER: "3",
}
EACH_KIND = pytest.mark.parametrize("kind", CHANGE_KINDS.values(), ids=list(CHANGE_KINDS))


def sample_arguments(kind, *, has_options=True):
    return {
        parameter.name: VALUE_OF_KIND[parameter.kind]
        for parameter in kind.parameters
        if parameter.is_required or has_options
    }


# --- functions and commands


@EACH_KIND
def test_parameters_match_the_keyword_arguments_of_the_function(kind):
    run, *keywords = inspect.signature(kind.function).parameters.values()
    assert run.name == "run"
    assert {keyword.name for keyword in keywords} == {
        parameter.keyword for parameter in kind.parameters
    }
    assert all(keyword.kind is inspect.Parameter.KEYWORD_ONLY for keyword in keywords)


@EACH_KIND
def test_each_change_has_the_parameters_of_its_subcommand(kind):
    command = subcommands_of("cluster")[kind.name]
    arguments = [each for each in command.params if isinstance(each, click.Argument)]
    required = [parameter for parameter in kind.parameters if parameter.is_required]
    assert [argument.name for argument in arguments] == [each.keyword for each in required]
    assert [argument.nargs == -1 for argument in arguments] == [each.is_list for each in required]
    named = {each.name: each for each in command.params}
    for parameter in kind.parameters:
        assert (parameter.kind is ParameterKind.INTEGER) == (
            named[parameter.keyword].type is click.INT
        )
        if parameter.option:
            assert parameter.option in named[parameter.keyword].opts


@EACH_KIND
@pytest.mark.parametrize("has_options", [True, False])
def test_the_command_of_a_change_calls_its_function_with_the_same_values(kind, has_options):
    arguments = sample_arguments(kind, has_options=has_options)
    assert parse_change({"name": kind.name, "arguments": arguments}) == (kind, arguments)
    values = kind.keyword_arguments(arguments)
    given = parse_command([*kind.command_words(arguments), "--connect", CONNECT])
    assert {name: given[name] for name in values} == values


# --- requests


REPLACE = {"storage": "a:1", "replacement": "b:1"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (None, "the change: expected an object with the fields name and arguments"),
        ([], "the change: expected an object"),
        ({"name": "prefer"}, "the change: expected an object"),
        ({"name": "prefer", "arguments": {}, "force": True}, "the change: expected an object"),
        ({"name": "accept-replicas", "arguments": {}}, "field name: expected replace-storage, "),
        ({"name": ["prefer"], "arguments": {}}, "field name: expected replace-storage, "),
        ({"name": "prefer", "arguments": []}, "field arguments: expected an object with partition"),
        ({"name": "prefer", "arguments": {"force": "1"}}, "field arguments: expected an object"),
    ],
)
def test_a_request_without_a_known_change_is_rejected(fields, message):
    with pytest.raises(RequestRejected, match=message):
        parse_change(fields)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("replace-storage", {"storage": "a:1"}, "replacement: expected host:port of its"),
        ("replace-storage", REPLACE | {"storage": " "}, "storage: expected the storage to replace"),
        ("replace-storage", REPLACE | {"storage": 7}, "storage: expected a short text, found 7"),
        ("replace-storage", REPLACE | {"storage": None}, "storage: expected a short text"),
        *(
            ("replace-storage", REPLACE | {"replacement": wrong}, "replacement: expected host:port")
            for wrong in ("a", ":1", "a:", "a:0", "a:65536", "a:-1", "::1:80", "[::1:80", "a/b:1")
        ),
        *(
            ("replace-storage", REPLACE | {"admin_port": wrong}, "admin_port: expected a number")
            for wrong in ("x", "-1", "1.5", "0x1", "\uff11", "9" * 10)
        ),
        *(
            ("prefer", {"partitions": wrong, "server": "a:1"}, "partitions: expected partitions")
            for wrong in ("x", "--yes", "1-", "1,,2", "all,1", "\uff11")
        ),
        ("prefer", {"partitions": "1" * (TEXT_CHARACTERS_MAX + 1)}, "expected a short text"),
        ("prefer", {"partitions": "1", "server": "a"}, "server: expected host:port, found "),
    ],
)
def test_a_missing_or_malformed_argument_is_rejected(name, arguments, message):
    with pytest.raises(RequestRejected, match=message) as error:
        parse_change({"name": name, "arguments": arguments})
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("text", ["all", "0", "0-3", "0-3, 7 , 9-11"])
def test_an_argument_for_partitions_may_be_numbers_ranges_or_the_word_all(text):
    arguments = {"partitions": f" {text} ", "server": "a:1"}
    assert parse_change({"name": "prefer", "arguments": arguments})[1]["partitions"] == text


# --- commands of findings


def commands_of_findings():
    """Return the commands of all findings with a fixed text, and examples of composed commands."""
    rows = [finding_kind.command for finding_kind in FINDING_KINDS.values()]
    commands = [row.format_map(VALUES) for row in rows if row.strip("{}") not in COMPOSED]
    moving = Case()
    moving.storage(A, disk=DiskFacts(5 << 20, True))
    adding = Case()
    adding.storage(A, disk=DiskFacts(5 << 20, True))
    adding.storage(SPARE, disk=DiskFacts(5 << 20, True))
    spreading = Case()
    spreading.cluster(storage_groups={A: 0, B: 0, C: 2, SPARE: 3})
    quoted = Case()
    quoted.storage(A, storage_id="bb")
    quoted.facts = replace(quoted.facts, connect=f"{CONNECT}?auth=/etc/my file")
    not_open = Case()
    not_open.server(1, served_partitions={0: False})
    lost = Case()
    lost.cluster(cluster_key=str(UUID(int=7)), name="pay")
    lost.partition(metadata=PartitionMetadata())
    composed = [each.facts for each in (moving, adding, spreading, quoted, not_open, lost)]
    return commands + [finding.command for facts in composed for finding in diagnose(facts)]


COMMANDS = sorted(set(commands_of_findings()))


@pytest.mark.parametrize("command", COMMANDS)
def test_the_change_of_a_finding_has_the_arguments_of_its_command(command):
    change = change_in_command(command)
    if change is None:
        return
    kind = CHANGE_KINDS[change["name"]]
    empty = [name for name, value in change["arguments"].items() if not value]
    filled = change["arguments"] | {
        parameter.name: VALUE_OF_KIND[parameter.kind]
        for parameter in kind.parameters
        if parameter.name in empty
    }
    _, arguments = parse_change({"name": kind.name, "arguments": filled})
    keywords = kind.keyword_arguments(arguments)
    arguments_of_command = shlex.split(command)[1:]
    for name in empty:  # `parse_command` rejects a placeholder where a number is expected
        arguments_of_command = [
            filled[name] if word == "ADMIN_PORT" else word for word in arguments_of_command
        ]
    given = parse_command(arguments_of_command)
    for parameter in kind.parameters:
        assert parameter.name in empty or given[parameter.keyword] == keywords[parameter.keyword]


def test_the_findings_have_changes_of_several_kinds():
    changes = [each for each in map(change_in_command, COMMANDS) if each is not None]
    assert {change["name"] for change in changes} >= {
        *("add-storage", "auto-assign", "move-replica", "prefer", "unprefer"),
        *("remove-server", "replace-storage", "set-admin-port"),
    }


@pytest.mark.parametrize(
    ("arguments_of_command", "change"),
    [
        ("replace-storage a:1 HOST:PORT", {"storage": "a:1", "replacement": ""}),
        ("set-admin-port a:1 ADMIN_PORT", {"storage": "a:1", "admin_port": ""}),
        ("add-storage HOST:PORT --group 3", {"storage": "", "group": "3"}),
        ("auto-assign --replicas COUNT", {"replicas": ""}),
        ("auto-assign", {}),
        # Commands that lose data, or need the machine of a process.
        ("accept-replicas 0 --yes", None),
        ("rebuild-metadata --name pay --cluster-key K --partitions 2", None),
        ("delete pay", None),
        # Commands with other words than the change, and several commands.
        ("remove-storage a:1 --yes", None),
        ("remove-storage", None),
        ("remove-storage a:1 b:1", None),
        ("auto-assign && waltz-core cluster delete pay", None),
        ("remove-server 'a:1", None),
    ],
)
def test_only_a_complete_command_becomes_a_change(arguments_of_command, change):
    command = f"waltz-core cluster {arguments_of_command} --connect '{CONNECT}?auth=FILE'"
    expected = (
        None if change is None else {"name": arguments_of_command.split()[0], "arguments": change}
    )
    assert change_in_command(command) == expected


@pytest.mark.parametrize("command", ["", "waltz-core", "waltz-core cluster", "kill -9 7", "'"])
def test_other_commands_do_not_become_changes(command):
    assert change_in_command(command) is None


@pytest.mark.parametrize("host", ["a\u202eb", "a\nb", "a b"])
def test_an_address_has_a_valid_host(host):
    """The audit log, and commands that users copy, contain the address."""
    with pytest.raises(RequestRejected, match="storage"):
        parse_change({"name": "add-storage", "arguments": {"storage": f"{host}:15280"}})
