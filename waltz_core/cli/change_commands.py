"""Runs commands that change a cluster, and shows their progress.

`waltz_core/administration/change_run.py` contains the rules for the audit entry and the timeout.
"""

import functools
import getpass
import os
import shlex
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import click

from waltz_core.administration import member_connections
from waltz_core.administration.change_run import (
    ChangeResult,
    ChangeRun,
    now_ms,
    record_change,
    time_limit,
)
from waltz_core.cli import shared_options as options
from waltz_core.cli.output import print_error, print_json, print_result
from waltz_core.cli.progress import ProgressLine
from waltz_core.cli.subcommands import NO_CLUSTER_SPECIFIED, SubcommandFunction
from waltz_core.cluster.change.audit import AuditEntry
from waltz_core.cluster.coordinator import Coordinator
from waltz_core.cluster.zookeeper import zookeeper_session
from waltz_core.errors import BadConfig


class ChangeCommand(ChangeRun):
    """A running command that changes a cluster; it prints its steps and its progress."""

    def __init__(
        self, coordinator: Coordinator, line: ProgressLine, *, as_json: bool = False
    ) -> None:
        super().__init__(coordinator)
        self._line, self.as_json = line, as_json

    def note_step(self, step: str) -> None:
        """Add a completed step to the result; without `--json`, also print it at once."""
        super().note_step(step)
        if not self.as_json:
            print_error(step)

    def report_wait(self, reason: str, done_count: int = 0, count: int = 1) -> None:
        """Record why the command waits, and show this reason with the progress."""
        super().report_wait(reason)
        self._line.show(done_count, count, reason)


def change_command(
    *, may_create_cluster: bool = False
) -> Callable[[Callable[..., Awaitable[ChangeResult]]], SubcommandFunction]:
    """Turn a function that changes a cluster into a subcommand.

    `may_create_cluster` is passed to `audit_change`. The option `--force` of a subcommand has the
    same effect, because with `--force`, the subcommand also accepts incomplete clusters.
    """

    def decorate(function: Callable[..., Awaitable[ChangeResult]]) -> SubcommandFunction:
        @options.connect_option
        @options.json_option
        @options.timeout_option()
        @functools.wraps(function)
        async def run(*, connect: str, as_json: bool, timeout_s: float, **arguments: Any) -> int:  # noqa: ANN401
            may_be_absent = may_create_cluster or arguments.get("force", False)
            async with open_command_session(connect) as coordinator:
                if not may_be_absent:
                    await coordinator.read_cluster()  # the audit entry needs a cluster
                with ProgressLine() as line:
                    command = ChangeCommand(coordinator, line, as_json=as_json)
                    async with (
                        audit_change(coordinator, may_create_cluster=may_be_absent),
                        time_limit(timeout_s, lambda: command.wait_reason or "ZooKeeper"),
                    ):
                        result = await function(command, **arguments) or {}
            if as_json:
                print_json({"done": True, "steps": command.steps, **result})
            else:
                print_result(str(result.get("summary", "done")))
            return 0

        return run

    return decorate


def with_cluster_argument(function: SubcommandFunction) -> SubcommandFunction:
    """Declare the connect string as an argument (`cluster create CONNECT`) or as `--connect`."""

    @options.argument(
        "connect_argument",
        "[CONNECT]",
        f"connect string, for example {options.CONNECT_EXAMPLE}",
        required=False,
    )
    @click.option(
        "--connect",
        envvar=options.CONNECT_VARIABLE,
        metavar="CONNECT",
        help=f"the connect string, if it is not an argument [default: ${options.CONNECT_VARIABLE}]",
    )
    @functools.wraps(function)
    def run(*, connect_argument: str | None, connect: str | None, **arguments: Any) -> object:  # noqa: ANN401
        connect_text = connect_argument or connect
        if connect_text is None:
            raise BadConfig(NO_CLUSTER_SPECIFIED)
        member_connections.use_settings_of(connect_text)
        return function(connect=connect_text, **arguments)

    return run


def audit_change(
    coordinator: Coordinator, *, may_create_cluster: bool = False
) -> AbstractAsyncContextManager[None]:
    """Write an audit entry of this command, with the outcome of a block (`record_change`)."""
    entry = AuditEntry(user_and_host(), now_ms(), shlex.join(sys.argv[1:]))
    return record_change(coordinator, entry, may_create_cluster=may_create_cluster)


def user_and_host() -> str:
    """Return the user and the host of this command, for the audit entry."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    sudo_user = os.environ.get("SUDO_USER")
    if sudo_user and sudo_user != user:
        user = f"{sudo_user} as {user}"
    return f"{user}@{socket.gethostname()}"


def open_command_session(
    connect: str, wait_s: float = options.CONNECT_TIMEOUT_S
) -> AbstractAsyncContextManager[Coordinator]:
    """Open a ZooKeeper session for a command; connecting takes at most `wait_s` seconds."""
    return zookeeper_session.open_session(connect, connect_timeout_ms=round(wait_s * 1000))
