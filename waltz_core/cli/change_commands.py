"""Runs commands that change a cluster: with a timeout, progress and an audit entry.

Rules:
    1. The audit entry is written before the change begins. The outcome is added to the entry when
       the change has ended.
    2. At the timeout, the error states what the command was waiting for. Completed steps are kept,
       and the same command continues after them.
"""

import asyncio
import functools
import getpass
import os
import shlex
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import click

from waltz_core.cli import command_connections
from waltz_core.cli import shared_options as options
from waltz_core.cli.output import print_error, print_json, print_result
from waltz_core.cli.progress import ProgressLine
from waltz_core.cli.subcommands import NO_CLUSTER_SPECIFIED, SubcommandFunction
from waltz_core.cluster.change.audit import OUTCOME_DONE, AuditEntry
from waltz_core.cluster.change.replica_steps import ReplicaPlan
from waltz_core.cluster.change.storage_changes import PlanProgress
from waltz_core.cluster.coordinator import Coordinator
from waltz_core.cluster.zookeeper import zookeeper_session
from waltz_core.errors import BadConfig, Unavailable, WaltzError

OUTCOME_INTERRUPTED = "failed: interrupted"
CONTINUE_HINT = "Completed steps are kept. Run the same command again to continue"

ChangeResult: TypeAlias = Mapping[str, object] | None


@dataclass(slots=True)
class ChangeCommand:
    """The state of a running command that changes a cluster: its progress and completed steps."""

    coordinator: Coordinator
    line: ProgressLine
    as_json: bool = False
    steps: list[str] = field(default_factory=list)
    awaited: str = ""

    def note_step(self, step: str) -> None:
        """Add a completed step to the result; without `--json`, also print it at once."""
        self.steps.append(step)
        if not self.as_json:
            print_error(step)

    def report_wait(self, what: str, done_count: int = 0, count: int = 1) -> None:
        """Record the reason for which the command waits, and show it with the progress."""
        self.awaited = what
        self.line.show(done_count, count, what)

    async def carry_out_plan(self, plan: ReplicaPlan) -> None:
        """Carry out a plan that moves replicas, and report its steps."""
        await self.coordinator.storages.execute_plan(plan, self._show_progress)

    def _show_progress(self, progress: PlanProgress) -> None:
        for step in progress.steps:
            self.note_step(str(step))
        what = "; ".join(map(str, progress.steps or progress.waits))
        self.report_wait(what, progress.done_count, progress.partition_count)


def change_command(
    *, may_create_cluster: bool = False
) -> Callable[[Callable[..., Awaitable[ChangeResult]]], SubcommandFunction]:
    """Turn a function that changes a cluster into a subcommand (rules 1 and 2).

    The rules of the module apply. `creates` is passed to `audit_change`. A subcommand's option
    `force` has the same effect, because the subcommand then also works on incomplete clusters.
    """

    def decorate(work: Callable[..., Awaitable[ChangeResult]]) -> SubcommandFunction:
        @options.connect_option
        @options.json_option
        @options.timeout_option()
        @functools.wraps(work)
        async def run(*, connect: str, as_json: bool, timeout_s: float, **words: Any) -> int:  # noqa: ANN401
            may_be_absent = may_create_cluster or words.get("force", False)
            async with open_command_session(connect) as coordinator:
                if not may_be_absent:
                    await coordinator.read_cluster()  # the audit entry needs a cluster
                with ProgressLine() as line:
                    command = ChangeCommand(coordinator, line, as_json)
                    async with (
                        audit_change(coordinator, may_create_cluster=may_be_absent),
                        time_limit(timeout_s, lambda: command.awaited or "ZooKeeper"),
                    ):
                        result = await work(command, **words) or {}
            if as_json:
                print_json({"done": True, "steps": command.steps, **result})
            else:
                print_result(str(result.get("summary", "done")))
            return 0

        return run

    return decorate


def with_cluster_argument(function: SubcommandFunction) -> SubcommandFunction:
    """Declare the connect string as an argument or as `--connect` (`cluster create CONNECT`)."""

    @options.argument(
        "place",
        "[CONNECT]",
        f"connect string, for example {options.CONNECT_EXAMPLE}",
        required=False,
    )
    @click.option(
        "--connect",
        envvar=options.CONNECT_VARIABLE,
        metavar="CONNECT",
        help="the connect string, if it is not an argument [default:  "
        f"${options.CONNECT_VARIABLE}]",
    )
    @functools.wraps(function)
    def run(*, place: str | None, connect: str | None, **words: Any) -> object:  # noqa: ANN401
        chosen = place or connect
        if chosen is None:
            raise BadConfig(NO_CLUSTER_SPECIFIED)
        command_connections.use_settings_of(chosen)
        return function(connect=chosen, **words)

    return run


@asynccontextmanager
async def audit_change(
    coordinator: Coordinator, *, may_create_cluster: bool = False
) -> AsyncIterator[None]:
    """Write an audit entry for the block (rule 1); raises BadConfig without permission.

    If `creates` is true, the block creates or deletes the cluster's znodes, so they may exist only
    before the block or only after it. In this case, the entry is written at the end if a cluster
    exists.
    """
    await coordinator.check_administrator()
    audit, entry, outcome = coordinator.audit, _audit_entry(), OUTCOME_INTERRUPTED
    path = None if may_create_cluster else await audit.begin(entry)
    try:
        yield
        outcome = OUTCOME_DONE
    except WaltzError as error:
        outcome = f"failed: {error}"
        raise
    finally:
        if path is None and await _has_cluster(coordinator):
            path = await audit.begin(entry)
        if path is not None:
            await audit.end(path, entry, outcome, now_ms())


async def _has_cluster(coordinator: Coordinator) -> bool:
    try:
        await coordinator.read_cluster()
    except WaltzError:
        return False
    return True


@asynccontextmanager
async def time_limit(
    timeout_s: float, awaited: Callable[[], str], *, hint: str = CONTINUE_HINT
) -> AsyncIterator[None]:
    """Limit the time of a block; at the timeout, raise Unavailable with `awaited()` (rule 2)."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise Unavailable(
            f"the command did not finish within {timeout_s:g} s. It still waits for: "
            f"{awaited()}. {hint}"
        ) from None


def user_and_host() -> str:
    """Return the user and the host of this command, for the audit entry."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    sudoer = os.environ.get("SUDO_USER")
    if sudoer and sudoer != user:
        user = f"{sudoer} as {user}"
    return f"{user}@{socket.gethostname()}"


def _audit_entry() -> AuditEntry:
    return AuditEntry(user_and_host(), now_ms(), shlex.join(sys.argv[1:]))


def now_ms() -> int:
    """Return the wall-clock time in milliseconds since 1970 (UTC)."""
    return time.time_ns() // 1_000_000


def open_command_session(
    connect: str, wait_s: float = options.CONNECT_TIMEOUT_S
) -> AbstractAsyncContextManager[Coordinator]:
    """Open a ZooKeeper session for a command; connecting takes at most `wait_s` seconds."""
    return zookeeper_session.open_session(connect, connect_timeout_ms=round(wait_s * 1000))
