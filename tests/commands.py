"""Lists the commands of the CLI from click, and runs a command in the process of the test."""

import contextlib
import inspect
import io
import subprocess
import sys
from collections.abc import Iterator
from unittest.mock import patch

import click

from waltz_core.cli.main import COMMAND_GROUPS, PROGRAM_NAME, main, program
from waltz_core.cli.subcommands import CommandGroup, LazySubcommand, Subcommand


def run_command(*words: str) -> subprocess.CompletedProcess[str]:
    """Run `waltz-core WORDS` in this process, which takes a tenth of the time of a new process.

    The command's output is not a terminal. Its log lines are those of the test's process.
    """
    out, error = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(error),
        patch.object(sys, "argv", [PROGRAM_NAME, *words]),  # the command that the audit log records
    ):
        code = main()
    return subprocess.CompletedProcess(
        [PROGRAM_NAME, *words], code, out.getvalue(), error.getvalue()
    )


def subcommands_of(group: str) -> dict[str, Subcommand]:
    """Return the subcommands of a group with aliases; of a plain command, the command itself."""
    found = program.commands[group]
    stubs = found.commands if isinstance(found, CommandGroup) else {group: found}
    loaded = {name: stub.load() for name, stub in stubs.items() if isinstance(stub, LazySubcommand)}
    for word, inner in stubs.items():
        if isinstance(inner, CommandGroup):  # a subcommand of two words
            loaded |= {f"{word} {name}": stub.load() for name, stub in inner.commands.items()}
    return loaded


def is_subcommand(group: str) -> bool:
    """Whether a group is a command itself, without subcommands."""
    return isinstance(COMMAND_GROUPS[group].subcommands, str)


def parse_command(words: list[str]) -> dict[str, object]:
    """Return the arguments with which a command's subcommand would be called; raises UsageError."""
    with (
        patch.object(Subcommand, "invoke", lambda _subcommand, context: context.params),
        program.make_context(PROGRAM_NAME, list(words)) as context,
    ):
        return program.invoke(context)


def function_of(subcommand: Subcommand) -> object:
    """Return the function of a subcommand below the decorators that declare its options."""
    return inspect.unwrap(subcommand.callback)


def option_names(command: click.Command) -> set[str]:
    """Return every option of a command, hidden ones and older names included."""
    return {"--help", *(name for each in command.params for name in each.opts if name[0] == "-")}


def shown_options(command: click.Command) -> Iterator[str]:
    """Yield each option of a command that its help shows."""
    for each in command.params:
        if isinstance(each, click.Option) and not each.hidden:
            yield from getattr(each, "shown_names", each.opts)
