"""The commands, from the click commands in `waltz_core/cli/`."""

import re
import textwrap
from collections.abc import Iterator, Sequence

import click

from scripts.reference.markdown import cell, code, table
from waltz_core.cli.main import COMMAND_GROUPS, PROGRAM_NAME, program
from waltz_core.cli.subcommands import CommandGroup, LazySubcommand, Subcommand

WIDTH = 100
# Commands whose options are the settings of a kind of process.
DAEMONS = {"storage run": "storage", "server run": "server", "gateway run": "gateway"}
DEFAULT = re.compile(r" *\[default: ([^]]*)\]| *\[(required)\]")


def sections() -> dict[str, str]:
    """Return the sections of all commands."""
    return {"commands": "\n\n".join(part for group in COMMAND_GROUPS for part in _group(group))}


def _group(name: str) -> Iterator[str]:
    found = program.commands[name]
    yield f"## {name}"
    if isinstance(found, LazySubcommand):
        yield from _subcommand(name, found.load())
        return
    assert isinstance(found, CommandGroup)
    yield _markdown_text(found.help)
    if COMMAND_GROUPS[name].examples:
        yield _lines(COMMAND_GROUPS[name].examples)
    for subcommand, command in _subcommands(found):
        if not command.hidden:
            assert isinstance(command, LazySubcommand)
            yield f"### {name} {subcommand}"
            yield from _subcommand(f"{name} {subcommand}", command.load())


def _subcommands(group: CommandGroup) -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, CommandGroup):  # a subcommand of two words
            yield from (
                (f"{name} {subcommand}", each) for subcommand, each in command.commands.items()
            )
        else:
            yield name, command


def _subcommand(name: str, subcommand: Subcommand) -> Iterator[str]:
    yield _markdown_text(subcommand.help)
    context = click.Context(subcommand, info_name=f"{PROGRAM_NAME} {name}")
    yield _lines([" ".join([name, *subcommand.collect_usage_pieces(context)])])
    if subcommand.examples:
        yield _lines(subcommand.examples)
    if name in DAEMONS:
        kind = DAEMONS[name]
        yield _markdown_text(
            f"`--config FILE` names a TOML file with settings. Each setting of a {kind}, of "
            "ZooKeeper and of TLS is also an option that overrides the file: `--port` for `port`. "
            f"docs/reference/settings.md#{kind} lists them."
        )
        return
    arguments_first = sorted(subcommand.params, key=lambda each: isinstance(each, click.Option))
    records = (each.get_help_record(context) for each in arguments_first)
    rows = [_row(*record) for record in records if record is not None]
    if rows:
        yield table(("argument or option", "default", "meaning"), rows)


def _row(names: str, text: str) -> tuple[str, str, str]:
    """Return a row; the default is at the end of the text."""
    matches = ["".join(each) for each in DEFAULT.findall(text)]
    default = matches[0] if matches else ""
    if names.startswith("-"):
        return code(names), cell(default), cell(DEFAULT.sub("", text))
    optional = default or ("" if names.startswith("[") else "required")
    return code(names), cell(optional), cell(DEFAULT.sub("", text))


def _lines(commands: Sequence[str]) -> str:
    return "\n".join(["```", *(f"{PROGRAM_NAME} {command}" for command in commands), "```"])


def _markdown_text(text: str | None) -> str:
    return textwrap.fill(cell(text or ""), WIDTH, break_long_words=False, break_on_hyphens=False)
