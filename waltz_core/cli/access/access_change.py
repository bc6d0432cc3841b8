"""Runs the changes of `waltz-core access`: writes an audit entry, and waits for the daemons.

Rules:
    1. The audit entry contains the outcome of the change. The wait for the daemons comes after the
       entry.
    2. Every registered server and every storage with replicas must use the new revision, or a later
       one. The command names the daemons that do not, and exits with code 1.
    3. A daemon without access control publishes no revision; neither does a daemon without a
       ZooKeeper session. If no daemon of the cluster has ever published a revision, the command
       reports that access control is off, and exits with code 0.
    4. A daemon whose revision is above that of ZooKeeper ignores the change: its ZooKeeper was
       restored to an earlier state.
    5. A server that has lost ZooKeeper is not registered, but continues to serve. So some servers
       that are not registered count as servers that do not use the change: those that the
       assignment names, and those that were registered or had a revision before the change.
"""

import asyncio
import functools
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from waltz_core.access.client_ids import KEY_BYTES
from waltz_core.access.permission_changes import check_replicate
from waltz_core.access.permissions import Permissions
from waltz_core.cli import shared_options as options
from waltz_core.cli.change_commands import audit_change, now_ms, open_command_session, user_name
from waltz_core.cli.output import print_error, print_json, print_result
from waltz_core.cli.progress import ProgressLine
from waltz_core.cli.subcommands import SubcommandFunction
from waltz_core.cluster.change.stored_permissions import Author, PermissionsChange
from waltz_core.cluster.coordinator import Coordinator
from waltz_core.cluster.membership.applied_revisions import SERVER_PREFIX, server_name, storage_name
from waltz_core.cluster.membership.registration import ServersView
from waltz_core.errors import Unavailable

APPLY_TIMEOUT_S: Final = 10.0
# A daemon that reads the first permissions publishes their revision within this time.
ACCESS_OFF_AFTER_S: Final = 2.0
POLL_INTERVAL_S: Final = 0.1

PermissionsEdit: TypeAlias = Callable[[Permissions], Permissions]


def new_client_key() -> bytes:
    """Return a new key that signs client IDs, as a proof of their principals."""
    return secrets.token_bytes(KEY_BYTES)


@dataclass(frozen=True, slots=True)
class AccessCommand:
    """One run of a command that changes permissions."""

    coordinator: Coordinator
    partition_count: int
    author: Author

    async def change(self, change: PermissionsEdit, *, force: bool = False) -> PermissionsChange:
        """Change the permissions; without `force`, each partition keeps a grant of `replicate`."""

        def checked(old: Permissions) -> Permissions:
            new = change(old)
            if not force:
                check_replicate(old, new, self.partition_count)
            return new

        return await self.coordinator.permissions.change(checked, self.author)


@dataclass(frozen=True, slots=True)
class AccessResult:
    """A completed change: a sentence about it, further lines, and values for JSON."""

    change: PermissionsChange
    summary: str
    notes: tuple[str, ...] = ()
    values: Mapping[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class RevisionUse:
    """The daemons that use a revision, and those that do not, with reasons; daemons are texts."""

    using: list[str] = field(default_factory=list)
    late: dict[str, str] = field(default_factory=dict)
    silent: list[str] = field(default_factory=list)  # daemons that publish no revision
    unregistered: list[str] = field(default_factory=list)  # servers; they publish none either
    was_revision_published: bool = False  # whether any daemon has ever published a revision

    @property
    def count(self) -> int:
        """The number of daemons, whether they use the revision or not."""
        return len(self.using) + len(self.missing)

    @property
    def missing(self) -> list[str]:
        """The daemons that do not use the revision, as far as the command can determine."""
        return [*self.late, *self.silent, *self.unregistered]

    @property
    def is_complete(self) -> bool:
        """Whether every daemon uses the revision."""
        return not self.missing

    @property
    def is_off(self) -> bool:
        """Whether no daemon has ever published a revision (rule 3)."""
        return bool(self.count) and not (self.was_revision_published or self.using or self.late)


AccessWork: TypeAlias = Callable[[AccessCommand], Awaitable[AccessResult]]


def access_change_command(work: Callable[..., Awaitable[AccessResult]]) -> SubcommandFunction:
    """Make a subcommand of a function that changes permissions; the module's rules apply."""

    @with_wait
    @functools.wraps(work)
    async def run(*, connect: str, as_json: bool, timeout_s: float, **words: Any) -> int:  # noqa: ANN401
        return await run_change(
            lambda command: work(command, **words),
            connect=connect,
            as_json=as_json,
            timeout_s=timeout_s,
        )

    return run


def with_wait(function: SubcommandFunction) -> SubcommandFunction:
    """Declare the options that every change has: `--connect`, `--json` and `--timeout-s`."""
    what = "seconds to wait until all daemons use the change"
    with_timeout = options.timeout_option(what, default_s=APPLY_TIMEOUT_S)(function)
    return options.connect(options.as_json(with_timeout))


async def run_change(work: AccessWork, *, connect: str, as_json: bool, timeout_s: float) -> int:
    """Change the permissions, wait for the daemons, and print the results; return the exit code."""
    async with open_command_session(connect) as coordinator:
        cluster = await coordinator.read_cluster()
        author = Author(user_name(), now_ms())
        known = await _known_servers(coordinator)
        async with audit_change(coordinator):
            result = await work(AccessCommand(coordinator, cluster.params.partition_count, author))
        if not as_json:
            _print_change(result)  # before the wait: the result may contain the ID of a new token
        applied = await _wait_for_daemons(coordinator, result, known, timeout_s)
    if as_json:
        _print_json(result, applied)
    else:
        for text in applied_lines(applied, result.change.after.revision):
            print_error(text)
    return 0 if applied.is_complete or applied.is_off else 1


async def _wait_for_daemons(
    coordinator: Coordinator, result: AccessResult, known: Mapping[str, str], timeout_s: float
) -> RevisionUse:
    """Wait for the daemons; raises Unavailable with a text that names the change."""
    revision = result.change.after.revision
    try:
        with ProgressLine() as line:
            return await wait_until_applied(coordinator, revision, known, timeout_s, line)
    except Unavailable as error:
        raise Unavailable(
            f"{result.summary}, as revision {revision}, but the command could not check which "
            f"daemons use it: {error}. Hint: `access list` prints the revision that each "
            "daemon uses."
        ) from error


async def wait_until_applied(
    coordinator: Coordinator,
    revision: int,
    known: Mapping[str, str],
    timeout_s: float,
    line: ProgressLine,
) -> RevisionUse:
    """Wait until all daemons use a revision, or the timeout; return their state (rules 2 to 5).

    `known` has the servers before the change: their texts by name.
    """
    begun_s = time.monotonic()
    while True:
        found = await read_applied(coordinator, revision, known)
        took_s = time.monotonic() - begun_s
        is_off = found.is_off and took_s >= ACCESS_OFF_AFTER_S
        if found.is_complete or is_off or took_s >= timeout_s:
            return found
        line.show(
            len(found.using),
            found.count,
            f"waiting until these daemons use the change: {', '.join(found.missing)}",
        )
        await asyncio.sleep(POLL_INTERVAL_S)


async def read_applied(
    coordinator: Coordinator, revision: int, known: Mapping[str, str] | None = None
) -> RevisionUse:
    """Return which daemons use a revision now; `known` are servers before a change (rule 5)."""
    published = await coordinator.read_applied()
    # This is read after `published`, so it is not below a revision that the znode had.
    stored = await coordinator.permissions.read()
    newest = 0 if stored is None else stored.revision
    found = RevisionUse(
        was_revision_published=await coordinator.permissions.was_revision_published()
    )
    servers = await coordinator.read_servers_now()
    daemons = {**_servers(servers), **await _storages(coordinator)}
    absent = {server_name(each): f"server {each}" for each in servers.absent}
    for name, text in {**absent, **(known or {}), **daemons}.items():
        used = published.get(name)
        if used is None and name not in daemons:
            found.unregistered.append(text)
        elif used is None:
            found.silent.append(text)
        elif used > newest:
            found.late[text] = f"it uses revision {used}, and ignores older revisions"
        elif used < revision:
            found.late[text] = f"it uses revision {used}"
        else:
            found.using.append(text)
    return found


async def _known_servers(coordinator: Coordinator) -> dict[str, str]:
    """Return the texts, by name, of registered servers and of servers with a revision (rule 5)."""
    published = {
        name: f"server {name.removeprefix(SERVER_PREFIX)}"
        for name in await coordinator.read_applied()
        if name.startswith(SERVER_PREFIX)
    }
    return {**published, **_servers(await coordinator.read_servers_now())}


def _servers(found: ServersView) -> dict[str, str]:
    return {server_name(key): f"server {each.address}" for key, each in found.servers.items()}


async def _storages(coordinator: Coordinator) -> dict[str, str]:
    """Return the texts, by name, of the storages that have replicas."""
    held = (await coordinator.read_replica_assignment()).partitions
    return {storage_name(each): f"storage {each}" for each, its in held.items() if its}


def _print_change(result: AccessResult) -> None:
    change = result.change
    for each in result.notes:
        print_error(each)
    if change.before is not None and change.before.revision == change.after.revision:
        print_result(f"nothing to change; the permissions stay at revision {change.after.revision}")
    else:
        print_result(f"{result.summary}; the permissions have revision {change.after.revision}")


def applied_lines(applied: RevisionUse, revision: int) -> list[str]:
    """Return lines of text that state which daemons use a revision."""
    if not applied.count:
        return ["no server is registered, and no storage has replicas"]
    if applied.is_off:
        where = f"at all {applied.count} daemons, or they are not connected to ZooKeeper"
        return [
            f"access control is off {where}: no daemon has ever published the revision that it uses"
        ]
    if applied.is_complete:
        return [f"all {applied.count} daemons use revision {revision}"]
    lines = [f"{each}: {reason}" for each, reason in applied.late.items()]
    lines += [
        f"{each} publishes no revision: access control is off there, or it is not connected "
        "to ZooKeeper"
        for each in applied.silent
    ]
    lines += [
        f"{each} is not registered in ZooKeeper: it may still use older permissions"
        for each in applied.unregistered
    ]
    hint = (
        "Hint: check the logs and /health of these daemons; `access list` prints the revision "
        "that each one uses."
    )
    if any("ignores" in each for each in applied.late.values()):
        hint += " Restart each daemon that ignores older revisions."
    lines.append(
        f"revision {revision} is stored, but {len(applied.missing)} of {applied.count} "
        f"daemons do not use it. {hint}"
    )
    return lines


def _print_json(result: AccessResult, applied: RevisionUse) -> None:
    change = result.change
    is_changed = change.before is None or change.before.revision != change.after.revision
    print_json(
        {
            "done": True,
            "changed": is_changed,
            "revision": change.after.revision,
            **result.values,
            "applied": applied.using,
            "late": applied.late,
            "without_revision": applied.silent,
            "unregistered": applied.unregistered,
        }
    )
