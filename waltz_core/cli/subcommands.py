"""Groups and subcommands as classes of click, and the error messages for wrong usage.

Click's own messages name neither the nearest subcommand nor the sources of a connect string.

Rules:
    1. A subcommand is imported when it is called; help and completion of its group import nothing.
    2. A subcommand is a function or a coroutine, takes its options as keywords and returns the exit
       code.
"""

import difflib
import inspect
import re
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, TypeAlias

import click

from waltz_core.config.settings import nearest_name_hint

USAGE_ERROR = 2
NO_CLUSTER_SPECIFIED = (
    "no cluster is given. Hint: use --connect zk1:2181,zk2:2181/waltz/payments, or set "
    "$WALTZ_CONNECT. `waltz-core local up` starts a cluster on this machine and prints its "
    "connect string"
)

SubcommandFunction: TypeAlias = Callable[..., Any]


class Subcommand(click.Command):
    """A subcommand as its module declares it (rule 2); its help is in the table of `main.py`."""

    allow_extra_args = True  # reported by `parse_args`
    details = ""  # the text of its help after that line
    examples: Sequence[str] = ()

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples."""
        _write_examples(self.examples, formatter)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse; raises UsageError."""
        words = list(args)
        try:
            rest = super().parse_args(ctx, args)
        except click.MissingParameter:
            raise click.UsageError(self._missing_text(words), ctx) from None
        if rest and not ctx.resilient_parsing:
            ctx.fail(f"unexpected argument {rest[0]!r}")
        return rest

    def _missing_text(self, words: list[str]) -> str:
        """Return the message about everything that is missing; click names the first only."""
        lenient = click.Context(self, resilient_parsing=True)
        super().parse_args(lenient, words)
        missing = [
            name_of(each)
            for each in self.params
            if each.required and lenient.params.get(each.name or "") in (None, ())
        ]
        others = [each for each in missing if each != "--connect"]
        sentences = [f"the following arguments are required: {', '.join(others)}"] if others else []
        if "--connect" in missing:
            sentences.append(NO_CLUSTER_SPECIFIED)
        return "; and ".join(sentences)

    def invoke(self, ctx: click.Context) -> int:
        """Run the subcommand; return the exit code."""
        from waltz_core.cli import command_connections  # noqa: PLC0415 - help needs no sockets
        from waltz_core.transport import net  # noqa: PLC0415 - as above

        command_connections.begin(tls=ctx.params.get("tls"), connect=ctx.params.get("connect"))
        result = super().invoke(ctx)
        if inspect.iscoroutine(result):
            result = net.run(result)
        assert isinstance(result, int)
        return result


def subcommand(function: SubcommandFunction) -> Subcommand:
    """Declare a subcommand; the decorators below it declare its options."""
    return click.command(cls=Subcommand, help="")(function)


class LazySubcommand(click.Command):
    """The name, help and module of a subcommand; the module has a function of its name (rule 1).

    If the name would shadow a builtin, the function has a name like `list_command`.
    """

    def __init__(
        self,
        name: str,
        module: str,
        text: str,
        *,
        subcommand: str = "",
        **rest: Any,  # noqa: ANN401
    ) -> None:
        self._examples = rest.pop("examples", ())
        super().__init__(name, short_help=text, **rest)
        self._module, self._text, self._subcommand = module, text, subcommand or name

    def load(self) -> Subcommand:
        """Import the subcommand."""
        module = import_module(f"waltz_core.cli.{self._module}")
        name = re.sub("[ -]", "_", self._subcommand)
        found = getattr(module, f"{name}_command", None) or getattr(module, name)
        assert isinstance(found, Subcommand)
        found.help = f"{sentence(self._text)} {found.details}"
        found.examples = self._examples
        return found

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,  # noqa: ANN401 - click's
    ) -> click.Context:
        """Parse like the subcommand itself."""
        return self.load().make_context(info_name, args, parent, **extra)


class CommandGroup(click.Group):
    """A group: subcommands and examples."""

    examples: Sequence[str] = ()

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the table."""
        return list(self.commands)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse; a group alone shows its help."""
        return super().parse_args(ctx, args or ["--help"])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a subcommand; raises UsageError with the nearest one."""
        if args[0] not in self.commands and not ctx.resilient_parsing:
            ctx.fail(
                f"unknown command {args[0]!r}{nearest_name_hint(args[0], list(self.commands))}"
            )
        return super().resolve_command(ctx, args)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples."""
        _write_examples(self.examples, formatter)


def _write_examples(examples: Sequence[str], formatter: click.HelpFormatter) -> None:
    if examples:
        with formatter.section("Examples"):
            for each in examples:
                formatter.write(f"  waltz-core {each}\n")


def sentence(text: str) -> str:
    """Return a line of a table as a sentence."""
    return f"{text[:1].upper()}{text[1:]}."


def name_of(parameter: click.Parameter) -> str:
    """Return the name of an option or argument in the usage line."""
    if isinstance(parameter, click.Argument):
        return parameter.human_readable_name.strip("[].")
    return parameter.opts[0]


def usage_error_text(error: click.UsageError) -> str:
    """Return the command, what is wrong with it, and the nearest valid name."""
    where = error.ctx.command_path if error.ctx is not None else "waltz-core"
    why = error.format_message().rstrip(".")
    match error:
        case click.NoSuchOption(option_name=name, ctx=click.Context() as ctx):
            why = f"unknown option {name!r}{_nearest_option(name, ctx.command)}"
        case click.BadParameter(param=click.Parameter() as parameter):
            why = f"{name_of(parameter)}: {error.message.rstrip('.')}"
        case _:
            pass
    return f"{where}: {why}\nSee `{where} --help`."


def _nearest_option(name: str, command: click.Command) -> str:
    if not re.match(r"--?[^\d-]", name):
        return ""
    options = {each.lstrip("-"): each for parameter in command.params for each in parameter.opts}
    found = difflib.get_close_matches(name.lstrip("-"), options, n=1)
    return f"; did you mean {options[found[0]]!r}?" if found else ""
