"""Groups and subcommands as classes of click, with clearer error messages.

Click's own messages do not suggest a similar subcommand, and do not state where the connect string
can be set.

Rules:
    1. A subcommand is imported only when it is called. The help and the completion of a group
       import no subcommand.
    2. A subcommand is a function or a coroutine. It receives its options as keyword arguments and
       returns the exit code.
"""

import difflib
import inspect
import re
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, TypeAlias

import click

from waltz_core.config.settings import nearest_name_hint

EXIT_USAGE_ERROR = 2
NO_CLUSTER_SPECIFIED = (
    "no cluster is given. Hint: use --connect zk1:2181,zk2:2181/waltz/payments, or set "
    "$WALTZ_CONNECT. `waltz-core local up` starts a cluster on this machine and prints its "
    "connect string"
)

SubcommandFunction: TypeAlias = Callable[..., Any]


class Subcommand(click.Command):
    """A subcommand (rule 2); the table in `main.py` contains its line of help."""

    allow_extra_args = True  # `parse_args` reports extra arguments
    help_details = ""  # help text after the line of help
    examples: Sequence[str] = ()

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples at the end of the help."""
        _write_examples(self.examples, formatter)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; raises UsageError."""
        arguments = list(args)
        try:
            extra_arguments = super().parse_args(ctx, args)
        except click.MissingParameter:
            raise click.UsageError(self._missing_parameters_text(arguments), ctx) from None
        if extra_arguments and not ctx.resilient_parsing:
            ctx.fail(f"unexpected argument {extra_arguments[0]!r}")
        return extra_arguments

    def _missing_parameters_text(self, arguments: list[str]) -> str:
        """Return a message that names all missing parameters; click names only the first."""
        lenient_context = click.Context(self, resilient_parsing=True)
        super().parse_args(lenient_context, arguments)
        missing = [
            parameter_name(parameter)
            for parameter in self.params
            if parameter.required and lenient_context.params.get(parameter.name or "") in (None, ())
        ]
        missing_others = [parameter for parameter in missing if parameter != "--connect"]
        sentences = (
            [f"the following arguments are required: {', '.join(missing_others)}"]
            if missing_others
            else []
        )
        if "--connect" in missing:
            sentences.append(NO_CLUSTER_SPECIFIED)
        return "; and ".join(sentences)

    def invoke(self, ctx: click.Context) -> int:
        """Run the subcommand, in an event loop if it is a coroutine; return the exit code."""
        from waltz_core.administration import member_connections  # noqa: PLC0415 - help needs no sockets
        from waltz_core.transport import net  # noqa: PLC0415 - as above

        member_connections.select_settings(
            tls=ctx.params.get("tls"), connect=ctx.params.get("connect")
        )
        result = super().invoke(ctx)
        if inspect.iscoroutine(result):
            result = net.run(result)
        assert isinstance(result, int)
        return result


def subcommand(function: SubcommandFunction) -> Subcommand:
    """Turn a function into a `Subcommand`; other decorators declare its options."""
    return click.command(cls=Subcommand, help="")(function)


class LazySubcommand(click.Command):
    """A subcommand whose module is imported when it is called (rule 1).

    The function in the module has the name of the subcommand. If this name would hide a builtin,
    the function has a name such as `list_command`.
    """

    def __init__(
        self,
        name: str,
        module: str,
        help_line: str,
        *,
        subcommand: str = "",
        **click_options: Any,  # noqa: ANN401
    ) -> None:
        self._examples = click_options.pop("examples", ())
        super().__init__(name, short_help=help_line, **click_options)
        self._module, self._help_line, self._subcommand = module, help_line, subcommand or name

    def load(self) -> Subcommand:
        """Import the subcommand, and add its help."""
        module = import_module(f"waltz_core.cli.{self._module}")
        name = re.sub("[ -]", "_", self._subcommand)
        subcommand = getattr(module, f"{name}_command", None) or getattr(module, name)
        assert isinstance(subcommand, Subcommand)
        subcommand.help = f"{as_sentence(self._help_line)} {subcommand.help_details}"
        subcommand.examples = self._examples
        return subcommand

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,  # noqa: ANN401 - click's
    ) -> click.Context:
        """Import the subcommand, and parse the arguments with it."""
        return self.load().make_context(info_name, args, parent, **extra)


class CommandGroup(click.Group):
    """A group of subcommands, with examples."""

    examples: Sequence[str] = ()

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the subcommands, in the order of the table in `main.py`."""
        return list(self.commands)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; without arguments, show the help of the group."""
        return super().parse_args(ctx, args or ["--help"])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a subcommand; raises UsageError that suggests the nearest name."""
        if args[0] not in self.commands and not ctx.resilient_parsing:
            ctx.fail(
                f"unknown command {args[0]!r}{nearest_name_hint(args[0], list(self.commands))}"
            )
        return super().resolve_command(ctx, args)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples at the end of the help."""
        _write_examples(self.examples, formatter)


def _write_examples(examples: Sequence[str], formatter: click.HelpFormatter) -> None:
    if examples:
        with formatter.section("Examples"):
            for example in examples:
                formatter.write(f"  waltz-core {example}\n")


def as_sentence(text: str) -> str:
    """Return a line of help as a sentence: with a capital letter and a period."""
    return f"{text[:1].upper()}{text[1:]}."


def parameter_name(parameter: click.Parameter) -> str:
    """Return the name of an option or argument as in the usage line."""
    if isinstance(parameter, click.Argument):
        return parameter.human_readable_name.strip("[].")
    return parameter.opts[0]


def usage_error_text(error: click.UsageError) -> str:
    """Return the error text for wrong usage: command, reason, and a suggestion."""
    command_path = error.ctx.command_path if error.ctx is not None else "waltz-core"
    reason = error.format_message().rstrip(".")
    match error:
        case click.NoSuchOption(option_name=name, ctx=click.Context() as ctx):
            reason = f"unknown option {name!r}{_nearest_option(name, ctx.command)}"
        case click.BadParameter(param=click.Parameter() as parameter):
            reason = f"{parameter_name(parameter)}: {error.message.rstrip('.')}"
        case _:
            pass
    return f"{command_path}: {reason}\nSee `{command_path} --help`."


def _nearest_option(name: str, command: click.Command) -> str:
    if not re.match(r"--?[^\d-]", name):
        return ""
    options = {
        option_name.lstrip("-"): option_name
        for parameter in command.params
        for option_name in parameter.opts
    }
    matches = difflib.get_close_matches(name.lstrip("-"), options, n=1)
    return f"; did you mean {options[matches[0]]!r}?" if matches else ""
