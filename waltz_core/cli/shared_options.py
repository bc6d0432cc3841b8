"""The options and arguments that several subcommands use, each declared once.

Rules:
    1. An option also accepts its name from an earlier version (`older`), but help does not show
       this name.
    2. `@gather_options(Kind)` passes the values of several options to a subcommand as one object of
       class `Kind`.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click
from click.decorators import FC

from waltz_core.cli.subcommands import SubcommandFunction
from waltz_core.config.settings import nearest_name_hint

CONNECT_EXAMPLE: Final = "zk1:2181,zk2:2181/waltz/payments"
CONNECT_VARIABLE: Final = "WALTZ_CONNECT"
COMMAND_TIMEOUT_S: Final = 600.0
CONNECT_TIMEOUT_S: Final = 10.0
PATH_TYPE: Final = click.Path(path_type=Path)


class ExplainedArgument(click.Argument):
    """An argument with a description in the help of its subcommand."""

    def __init__(self, names: list[str], *, help: str, **click_options: Any) -> None:  # noqa: A002, ANN401
        super().__init__(names, **click_options)
        self.help = help

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """Return the argument's line of help: its metavar and its description."""
        return self.make_metavar(ctx), self.help or ""


class RenamedOption(click.Option):
    """An option that also accepts its name from an earlier version (rule 1)."""

    def __init__(self, names: list[str], *, old_name: str, **click_options: Any) -> None:  # noqa: ANN401
        super().__init__([*names, old_name], **click_options)
        self.shown_names = [option_name for option_name in self.opts if option_name != old_name]

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the option's line of help, without the older name."""
        all_names, self.opts = self.opts, self.shown_names
        try:
            return super().get_help_record(ctx)
        finally:
            self.opts = all_names


class ConnectOption(click.Option):
    """A required option; its help shows the environment variable and not "[required]"."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the option's line of help."""
        record = super().get_help_record(ctx)
        return record and (record[0], record[1].removesuffix("  [required]"))


class SuggestingChoice(click.Choice[str]):
    """A choice of values whose error message suggests the most similar value."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:  # noqa: ANN401
        """Return the error message for an unknown value."""
        return f"unknown value {value!r}{nearest_name_hint(str(value), list(self.choices))}"


def argument(name: str, metavar: str, text: str, **click_options: Any) -> Callable[[FC], FC]:  # noqa: ANN401
    """Declare an argument with a description for the help."""
    return click.argument(name, cls=ExplainedArgument, metavar=metavar, help=text, **click_options)


def timeout_option(
    description: str = "maximum seconds to wait",
    *,
    default_s: float = COMMAND_TIMEOUT_S,
    old_name: str = "--timeout",
    name: str = "timeout_s",
) -> Callable[[FC], FC]:
    """Declare the timeout of a subcommand, in seconds."""
    return click.option(
        "--timeout-s",
        name,
        cls=RenamedOption,
        old_name=old_name,
        type=float,
        default=default_s,
        metavar="S",
        help=f"{description} [default: {default_s:g}]",
    )


def zookeeper_timeout_option(function: FC) -> FC:
    """Declare the timeout of a subcommand that waits only for ZooKeeper."""
    description = "seconds to wait for ZooKeeper"
    return timeout_option(
        description, default_s=CONNECT_TIMEOUT_S, old_name="--wait-s", name="wait_s"
    )(function)


json_option = click.option(
    "--json", "as_json", is_flag=True, help="print one JSON value and nothing else"
)
connect_option = click.option(
    "--connect",
    cls=ConnectOption,
    envvar=CONNECT_VARIABLE,
    required=True,
    metavar="CONNECT",
    help=f"connect string, for example {CONNECT_EXAMPLE} [default: ${CONNECT_VARIABLE}]",
)
config_option = click.option(
    "--config", type=PATH_TYPE, help="a TOML file with settings; options of the command override it"
)
exit_with_parent_option = click.option("--exit-with-parent", is_flag=True, hidden=True)
partition_option = click.option(
    "--partition", type=int, default=0, metavar="P", help="the partition [default: 0]"
)
partitions_argument = argument(
    "partitions", "PARTITIONS", "the partitions, for example 3, 0-6,9 or all"
)
server_argument = argument(
    "server", "HOST:PORT", "address of the server, as `server list` prints it"
)
storage_argument = argument(
    "address", "HOST:PORT", "address of the storage, as `cluster show` prints it"
)
tls_option = click.option(
    "--tls",
    metavar="FILE",
    help="a file with TLS settings, like ?tls=FILE in a connect string (docs/operations.md)",
)


def gather_options(kind: type[Any]) -> Callable[[SubcommandFunction], SubcommandFunction]:
    """Pass all options that are fields of `kind` to a subcommand, as one object."""

    def decorate(function: SubcommandFunction) -> SubcommandFunction:
        @functools.wraps(function)
        def run(**arguments: Any) -> object:  # noqa: ANN401 - what click has parsed
            option_values = {
                name: arguments.pop(name) for name in kind.__annotations__ if name in arguments
            }
            return function(kind(**option_values), **arguments)

        return run

    return decorate


def storage_file_options(path_help: str) -> Callable[[FC], FC]:
    """Declare the path argument, `--partition` and `--json` of a `disk` subcommand."""
    path = argument("path", "PATH", path_help, type=PATH_TYPE)
    partition_option = click.option(
        "-p",
        "--partition",
        "partitions",
        type=int,
        multiple=True,
        metavar="P",
        callback=lambda _ctx, _parameter, value: list(value) or None,
        help="only this partition of a storage directory; repeat the option for several",
    )
    return lambda function: path(partition_option(json_option(function)))
