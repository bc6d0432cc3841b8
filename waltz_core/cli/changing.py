"""How every command that changes a cluster runs: under a time limit, with progress, on the record.

A change that is not written down, or that ends in silence while it waits for something, must not be
possible for any of them.

Rules:
    1. The change is on record before it begins, with its outcome when it has ended.
    2. Out of time, the error says what was waited for; what was done stays done, and the same
       command goes on from there.
"""

import argparse
import asyncio
import getpass
import os
import shlex
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

from waltz_core.cli.output import say, show, show_json
from waltz_core.cli.parsing import WHICH_CLUSTER
from waltz_core.cli.progress import ProgressLine
from waltz_core.cluster.change.audit import (
    DONE,
    AuditEntry,
)
from waltz_core.cluster.change.changes import Plan
from waltz_core.cluster.change.storages import Progress
from waltz_core.cluster.coordinator import Coordinator
from waltz_core.cluster.zookeeper import zookeeper_session
from waltz_core.errors import BadConfig, Unavailable, WaltzError
from waltz_core.transport import net

TIMEOUT_S = 600.0
BROKEN_OFF = "failed: broken off"
GOES_ON = "What was done stays done; the same command goes on from there"
CONNECT_WAIT_S = 10.0

Result = Mapping[str, object]


@dataclass(slots=True)
class Command:
    """One run of a changing command."""

    arguments: argparse.Namespace
    coordinator: Coordinator
    line: ProgressLine
    steps: list[str] = field(default_factory=list)
    waits_for: str = ""

    def note(self, step: str) -> None:
        """A step was taken: it is part of the result, and told at once."""
        self.steps.append(step)
        if not self.arguments.json:
            say(step)

    def wait_for(self, what: str, done_count: int = 0, count: int = 1) -> None:
        """Say what is waited for from now on."""
        self.waits_for = what
        self.line.show(done_count, count, what)

    async def carry_out(self, plan: Plan) -> None:
        """Bring the replicas to where they are wanted."""
        await self.coordinator.storages.carry_out(plan, self._tell)

    def _tell(self, progress: Progress) -> None:
        for step in progress.step:
            self.note(str(step))
        what = "; ".join(map(str, progress.step or progress.waits))
        self.wait_for(what, progress.done_count, progress.count)


def add_common(verb: argparse.ArgumentParser, *, changes: bool = True) -> None:
    """Declare what all of these commands take."""
    verb.add_argument(
        "--connect",
        default=os.environ.get("WALTZ_CONNECT"),
        required="WALTZ_CONNECT" not in os.environ,
        help="zk1:2181,zk2:2181/waltz/payments (default $WALTZ_CONNECT)",
    )
    verb.add_argument("--json", action="store_true", help="one JSON value on standard output")
    if changes:
        add_timeout(verb)


def add_timeout(
    verb: argparse.ArgumentParser,
    what: str = "give up waiting after so many seconds",
    *,
    default_s: float = TIMEOUT_S,
    older: str = "--timeout",
    dest: str = "timeout_s",
) -> None:
    """Declare for how long a command may wait; `older` is the option's name in earlier versions."""
    verb.add_argument(
        "--timeout-s",
        dest=dest,
        type=float,
        default=default_s,
        metavar="S",
        help=f"{what} (default {default_s:.0f})",
    )
    verb.add_argument(
        older, dest=dest, type=float, default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )


def add_wait(verb: argparse.ArgumentParser) -> None:
    """Declare for how long a command may wait that waits for ZooKeeper only."""
    what = "wait so many seconds for ZooKeeper"
    add_timeout(verb, what, default_s=CONNECT_WAIT_S, older="--wait-s", dest="wait_s")


def add_place(verb: argparse.ArgumentParser) -> None:
    """Declare the cluster as an argument, too: `cluster create CONNECT` and its like."""
    verb.add_argument(
        "connect",
        nargs="?",
        default=argparse.SUPPRESS,
        metavar="CONNECT",
        help="the cluster, zk1:2181,zk2:2181/waltz/payments",
    )
    verb.add_argument(
        "--connect",
        metavar="CONNECT",
        default=os.environ.get("WALTZ_CONNECT"),
        help="the same as an option (default $WALTZ_CONNECT)",
    )


def place_of(arguments: argparse.Namespace) -> str:
    """Return the cluster that `add_place` was told; raises BadConfig for none."""
    place: str | None = arguments.connect
    if place is None:
        raise BadConfig(WHICH_CLUSTER)
    return place


def run(arguments: argparse.Namespace, work: Callable[[Command], Awaitable[Result | None]]) -> int:
    """Run a command that changes the cluster; see the module's rules."""
    return net.run(_run(arguments, work))


async def _run(
    arguments: argparse.Namespace, work: Callable[[Command], Awaitable[Result | None]]
) -> int:
    async with connected(arguments.connect) as coordinator:
        if not arguments.creates:
            await coordinator.read_cluster()  # or there is nothing to write the record into
        with ProgressLine() as line:
            command = Command(arguments, coordinator, line)
            result = await _on_record(command, work)
    if arguments.json:
        show_json({"done": True, "steps": command.steps, **(result or {})})
    else:
        show(str((result or {}).get("summary", "done")))
    return 0


async def _on_record(
    command: Command, work: Callable[[Command], Awaitable[Result | None]]
) -> Result | None:
    async with (
        recorded(command.coordinator, creates=command.arguments.creates),
        in_time(command.arguments.timeout_s, lambda: command.waits_for or "ZooKeeper"),
    ):
        return await work(command)


@asynccontextmanager
async def recorded(coordinator: Coordinator, *, creates: bool = False) -> AsyncIterator[None]:
    """Have the block on record (rule 1).

    `creates`: it makes the cluster's nodes, or deletes them, so they may be there only before or
    after it; the record is made when it is over, where there is a cluster then.
    """
    audit, entry, outcome = coordinator.audit, _entry(), BROKEN_OFF
    path = None if creates else await audit.begin(entry)
    try:
        yield
        outcome = DONE
    except WaltzError as error:
        outcome = f"failed: {error}"
        raise
    finally:
        if path is None and await _has_cluster(coordinator):
            path = await audit.begin(entry)
        if path is not None:
            await audit.end(path, entry, outcome, _now_ms())


async def _has_cluster(coordinator: Coordinator) -> bool:
    try:
        await coordinator.read_cluster()
    except WaltzError:
        return False
    return True


@asynccontextmanager
async def in_time(
    timeout_s: float, waits_for: Callable[[], str], *, afterwards: str = GOES_ON
) -> AsyncIterator[None]:
    """Give a block so much time (rule 2); raises Unavailable, which says what it still awaits."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise Unavailable(
            f"not done within {timeout_s:g} s, still waiting: {waits_for()}. {afterwards}"
        ) from None


def _entry() -> AuditEntry:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    sudoer = os.environ.get("SUDO_USER")
    if sudoer and sudoer != user:
        user = f"{sudoer} as {user}"
    return AuditEntry(f"{user}@{socket.gethostname()}", _now_ms(), shlex.join(sys.argv[1:]))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def connected(connect: str) -> AbstractAsyncContextManager[Coordinator]:
    """Open a session for a command."""
    return zookeeper_session.connected(connect, connect_timeout_ms=round(CONNECT_WAIT_S * 1000))
