"""Every command and option in the docs exists; each 0.13 command has an equivalent."""

import re
import shlex
from pathlib import Path

import pytest

from tests.commands import is_subcommand, option_names, parse_command, shown_options, subcommands_of
from waltz_core.cli.main import COMMAND_GROUPS, OVERVIEW

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "ARCHITECTURE.md"])
COMMANDS_OF_0_13 = {
    "ZooKeeperCli": "create delete list show-cluster-key add-storage-node remove-storage-node "
    "assign-partition unassign-partition auto-assign",
    "StorageCli": "list add-partition remove-partition availability recover-partition "
    "sync-partitions validate max-transaction-id",
    "ServerCli": "list add-preferred-partition remove-preferred-partition",
    "ClusterCli": "check-connectivity verify",
    "ClientCli": "validate high-water-mark create-producer create-consumer",
    "PerformanceCli": "test-producers test-consumers",
    "DiskCli": "verify-segment segment-statistic dump-segment dump-control-file",
}
# A complete command, up to a character that ends it in a shell or a table.
FULL_COMMAND = re.compile(r"waltz-core ((?:[a-z]+)(?:(?!waltz-core|[`|;#]|&&|\s\s\s).)*)")
# A command by group and subcommand alone, as a span of code.
SHORT_COMMAND = re.compile(rf"`((?:{'|'.join(COMMAND_GROUPS)}) [a-z][a-z-]*(?: [^`]*)?)`")
OPTION = re.compile(r"(?<![\w-])--[a-z](?:[a-z0-9.-]*[a-z0-9])?")


def faults(text: str) -> list[str]:
    """Return the errors of a command, which is given without `waltz-core`."""
    group, *rest = text.split()
    if group not in COMMAND_GROUPS:
        return [f"no group {group!r}"]
    subcommands, known = subcommands_of(group), {"--help"}
    if is_subcommand(group):
        known = option_names(subcommands[group])
    elif rest and not rest[0].startswith(("-", "GROUP", "SUBCOMMAND", "[")):
        subcommand = rest[0].rstrip(".,:)")
        if subcommand in COMMAND_GROUPS[group].groups and len(rest) > 1:
            subcommand += " " + rest[1].rstrip(".,:)")
        if subcommand not in subcommands:
            return [f"no subcommand {subcommand!r} of {group!r}"]
        known = option_names(subcommands[subcommand])
    return [f"no option {each} of it" for each in OPTION.findall(text) if each not in known]


def commands_in(text: str) -> list[str]:
    joined = re.sub(r"\\\n\s*", "", text)
    return [*FULL_COMMAND.findall(joined), *SHORT_COMMAND.findall(joined)]


def test_every_command_of_a_page_exists():
    found = {page.name: commands_in(page.read_text(encoding="utf-8")) for page in PAGES}
    assert sum(map(len, found.values())) > 100
    wrong = [
        f"{name}: {text}: {fault}"
        for name, texts in found.items()
        for text in texts
        for fault in faults(text)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("cluster creat x", "no subcommand 'creat' of 'cluster'"),
        ("cluster create x --partition 3", "no option --partition of it"),
        ("bench append-one --second 3", "no option --second of it"),
        ("disc verify x", "no group 'disc'"),
    ],
)
def test_errors_in_the_commands_of_a_page_are_detected(text, fault):
    assert faults(text) == [fault]
    assert commands_in(f"say `{text}`, or\n$ waltz-core {text}  # so")[0].split() == text.split()


@pytest.mark.parametrize(
    "text", [example for group in COMMAND_GROUPS.values() for example in group.examples]
)
def test_every_example_of_a_help_page_is_a_valid_command(text, monkeypatch):
    monkeypatch.delenv("WALTZ_CONNECT", raising=False)
    assert parse_command(shlex.split(text))


def test_the_overview_names_five_commands_that_exist():
    commands = commands_in(OVERVIEW.split("\n\n")[1].replace(")", "   "))
    assert len(commands) == 5
    assert [fault for command in commands for fault in faults(command)] == []


def test_each_command_of_waltz_0_13_has_a_row_with_its_equivalent():
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    table = page[page.index("## The 32 commands") :]
    rows = [line.split("|")[1:4] for line in table.splitlines() if line.startswith("| `")]
    wanted = [
        f"`{tool} {subcommand}`"
        for tool, subcommands in COMMANDS_OF_0_13.items()
        for subcommand in subcommands.split()
    ]
    assert [old_command.strip() for old_command, _, _ in rows] == wanted
    assert len(wanted) == 32
    for old_command, new_command, difference in rows:
        assert SHORT_COMMAND.findall(new_command), old_command
        assert difference.strip(), old_command


def test_every_command_group_has_a_row_and_every_command_a_help_text():
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    for group in COMMAND_GROUPS:
        assert f"`{group}`" in page
        for name, subcommand in subcommands_of(group).items():
            assert len(subcommand.help) > 10, f"{group} {name} has no help"


@pytest.mark.parametrize("group", COMMAND_GROUPS)
def test_timeout_options_have_the_same_name_everywhere(group):
    shown = {
        each for subcommand in subcommands_of(group).values() for each in shown_options(subcommand)
    }
    assert not {each for each in shown if each.startswith(("--wait", "--timeout"))} - {
        "--timeout-s"
    }


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("cluster create zk:1/w --partitions 1 --storage s:1:2 --wait-s 3", {"wait_s": 3}),
        ("cluster create zk:1/w --partitions 1 --storage s:1:2 --timeout-s 3", {"wait_s": 3}),
        ("cluster show zk:1/w", {"wait_s": 10}),
        ("cluster add-replica 0 s4:15280 --connect zk:1/w --timeout 3", {"timeout_s": 3}),
        ("client validate --connect zk:1/w --timeout 3", {"timeout_s": 3}),
        ("client validate --connect zk:1/w", {"timeout_s": 600}),
        ("storage list --admin s:1 --wait-s 3", {"wait_s": 3}),
        (
            "storage scrub --admin s:1 --partition 0 --wait-s 3 --timeout 4",
            {"wait_s": 3, "timeout_s": 4},
        ),
        ("storage scrub --admin s:1 --partition 0 --timeout-s 4", {"wait_s": 10, "timeout_s": 4}),
    ],
)
def test_timeout_options_of_earlier_versions_are_accepted(text, found):
    arguments = parse_command(shlex.split(text))
    assert {name: arguments[name] for name in found} == found
