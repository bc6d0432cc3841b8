"""Changes permissions: writes an audit entry, and waits until all daemons use the change.

Rules:
    1. The audit entry contains the outcome of the change. The command waits for the daemons only
       after it has completed the entry.
    2. Every registered server and every storage with replicas must use the new revision or a later
       one. If a daemon uses neither, the command names this daemon, and exits with code 1.
    3. Two kinds of daemons publish no revision: daemons without access control, and daemons without
       a ZooKeeper session. If no daemon of the cluster has ever published a revision, the command
       reports that access control is off, and exits with code 0.
    4. If ZooKeeper was restored to an earlier state, a daemon may use a later revision than the one
       in ZooKeeper. Such a daemon ignores the change, and counts as a daemon that does not use the
       change.
    5. A server that has lost its ZooKeeper session is not registered, but continues to serve. So
       the command also waits for unregistered servers of two kinds. The first kind is in the
       current assignment. The second kind was registered, or had published a revision, before the
       change.
"""

import asyncio
import functools
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from waltz_core.access.client_ids import CLIENT_KEY_BYTES
from waltz_core.access.permission_changes import check_replicate_remains
from waltz_core.access.permissions import Permissions
from waltz_core.administration.change_run import now_ms
from waltz_core.cli import shared_options as options
from waltz_core.cli.change_commands import audit_change, open_command_session, user_and_host
from waltz_core.cli.output import print_error, print_json, print_result
from waltz_core.cli.progress import ProgressLine
from waltz_core.cli.subcommands import SubcommandFunction
from waltz_core.cluster.change.stored_permissions import Author, PermissionsChange
from waltz_core.cluster.coordinator import Coordinator
from waltz_core.cluster.membership.applied_revisions import (
    SERVER_PREFIX,
    server_node_name,
    storage_node_name,
)
from waltz_core.cluster.membership.registration import ServersView
from waltz_core.errors import Unavailable

APPLY_TIMEOUT_S: Final = 10.0
# A daemon that reads the first permissions publishes their revision within this time.
ACCESS_OFF_WAIT_S: Final = 2.0
POLL_INTERVAL_S: Final = 0.1

PermissionsEdit: TypeAlias = Callable[[Permissions], Permissions]


def new_client_key() -> bytes:
    """Return a new key, with which servers sign client IDs."""
    return secrets.token_bytes(CLIENT_KEY_BYTES)


@dataclass(frozen=True, slots=True)
class AccessCommand:
    """The state of a command that changes permissions."""

    coordinator: Coordinator
    partition_count: int
    author: Author

    async def change(self, edit: PermissionsEdit, *, force: bool = False) -> PermissionsChange:
        """Change the permissions; without `force`, each partition keeps a grant of `replicate`."""

        def edit_and_check(old: Permissions) -> Permissions:
            new = edit(old)
            if not force:
                check_replicate_remains(old, new, self.partition_count)
            return new

        return await self.coordinator.permissions.change(edit_and_check, self.author)


@dataclass(frozen=True, slots=True)
class AccessResult:
    """A completed change of permissions: its summary, further lines, and values for JSON."""

    change: PermissionsChange
    summary: str
    notes: tuple[str, ...] = ()
    values: Mapping[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class RevisionUse:
    """The daemons that use a revision of the permissions, and the daemons that do not."""

    updated_daemons: list[str] = field(default_factory=list)
    outdated_daemons: dict[str, str] = field(default_factory=dict)
    daemons_without_revision: list[str] = field(
        default_factory=list
    )  # registered servers and storages that publish no revision
    unregistered_servers: list[str] = field(
        default_factory=list
    )  # unregistered servers that publish no revision
    was_revision_published: bool = False  # whether any daemon has ever published a revision

    @property
    def daemon_count(self) -> int:
        """The number of all daemons."""
        return len(self.updated_daemons) + len(self.not_updated_daemons)

    @property
    def not_updated_daemons(self) -> list[str]:
        """The daemons that do not use the revision, as far as the command can determine."""
        return [*self.outdated_daemons, *self.daemons_without_revision, *self.unregistered_servers]

    @property
    def is_used_by_all(self) -> bool:
        """Whether every daemon uses the revision."""
        return not self.not_updated_daemons

    @property
    def is_access_control_off(self) -> bool:
        """Whether no daemon has ever published a revision (rule 3)."""
        return bool(self.daemon_count) and not (
            self.was_revision_published or self.updated_daemons or self.outdated_daemons
        )


AccessChangeFunction: TypeAlias = Callable[[AccessCommand], Awaitable[AccessResult]]


def access_change_command(function: Callable[..., Awaitable[AccessResult]]) -> SubcommandFunction:
    """Turn a function that changes permissions into a subcommand (rules 1 and 2)."""

    @with_wait_options
    @functools.wraps(function)
    async def run(*, connect: str, as_json: bool, timeout_s: float, **arguments: Any) -> int:  # noqa: ANN401
        return await run_access_change(
            lambda command: function(command, **arguments),
            connect=connect,
            as_json=as_json,
            timeout_s=timeout_s,
        )

    return run


def with_wait_options(function: SubcommandFunction) -> SubcommandFunction:
    """Declare the options that every change has: `--connect`, `--json` and `--timeout-s`."""
    timeout_help = "seconds to wait until all daemons use the change"
    with_timeout = options.timeout_option(timeout_help, default_s=APPLY_TIMEOUT_S)(function)
    return options.connect_option(options.json_option(with_timeout))


async def run_access_change(
    change_function: AccessChangeFunction, *, connect: str, as_json: bool, timeout_s: float
) -> int:
    """Change the permissions, wait for the daemons, and print the result; return the exit code."""
    async with open_command_session(connect) as coordinator:
        cluster = await coordinator.read_cluster()
        author = Author(user_and_host(), now_ms())
        servers_before = await _servers_before_change(coordinator)
        async with audit_change(coordinator):
            result = await change_function(
                AccessCommand(coordinator, cluster.params.partition_count, author)
            )
        if not as_json:
            _print_change(result)  # before the wait: the result may contain the ID of a new token
        usage = await _wait_for_daemons(coordinator, result, servers_before, timeout_s)
    if as_json:
        _print_json(result, usage)
    else:
        for text in describe_revision_use(usage, result.change.after.revision):
            print_error(text)
    return 0 if usage.is_used_by_all or usage.is_access_control_off else 1


async def _wait_for_daemons(
    coordinator: Coordinator,
    result: AccessResult,
    servers_before: Mapping[str, str],
    timeout_s: float,
) -> RevisionUse:
    """Wait for the daemons; raises Unavailable with a text that names the change."""
    revision = result.change.after.revision
    try:
        with ProgressLine() as line:
            return await wait_until_applied(coordinator, revision, servers_before, timeout_s, line)
    except Unavailable as error:
        raise Unavailable(
            f"{result.summary}, as revision {revision}, but the command could not check which "
            f"daemons use this revision: {error}. Hint: `access list` prints the revision that "
            "each daemon uses."
        ) from error


async def wait_until_applied(
    coordinator: Coordinator,
    revision: int,
    servers_before: Mapping[str, str],
    timeout_s: float,
    line: ProgressLine,
) -> RevisionUse:
    """Wait until all daemons use a revision, or until the timeout (rules 2 to 5).

    `servers_before` are the servers before the change: their texts, by name.
    """
    start_s = time.monotonic()
    while True:
        usage = await read_revision_use(coordinator, revision, servers_before)
        elapsed_s = time.monotonic() - start_s
        is_off = usage.is_access_control_off and elapsed_s >= ACCESS_OFF_WAIT_S
        if usage.is_used_by_all or is_off or elapsed_s >= timeout_s:
            return usage
        line.show(
            len(usage.updated_daemons),
            usage.daemon_count,
            f"waiting until these daemons use the change: {', '.join(usage.not_updated_daemons)}",
        )
        await asyncio.sleep(POLL_INTERVAL_S)


async def read_revision_use(
    coordinator: Coordinator, revision: int, servers_before: Mapping[str, str] | None = None
) -> RevisionUse:
    """Return the daemons that use a revision now, and the daemons that do not (rule 5)."""
    published = await coordinator.read_applied_revisions()
    # The stored revision is read after the published ones. So if a published revision is above the
    # stored revision, ZooKeeper was restored (rule 4).
    stored = await coordinator.permissions.read()
    newest = 0 if stored is None else stored.revision
    usage = RevisionUse(
        was_revision_published=await coordinator.permissions.was_revision_published()
    )
    servers = await coordinator.read_latest_servers()
    daemons = {**_registered_server_texts(servers), **await _storage_texts(coordinator)}
    unregistered = {
        server_node_name(server_id): f"server {server_id}" for server_id in servers.unregistered
    }
    for name, text in {**unregistered, **(servers_before or {}), **daemons}.items():
        used_revision = published.get(name)
        if used_revision is None and name not in daemons:
            usage.unregistered_servers.append(text)
        elif used_revision is None:
            usage.daemons_without_revision.append(text)
        elif used_revision > newest:
            usage.outdated_daemons[text] = (
                f"it uses revision {used_revision}, and ignores older revisions"
            )
        elif used_revision < revision:
            usage.outdated_daemons[text] = f"it uses revision {used_revision}"
        else:
            usage.updated_daemons.append(text)
    return usage


async def _servers_before_change(coordinator: Coordinator) -> dict[str, str]:
    """Return the servers that are registered or have published a revision (rule 5)."""
    published = {
        name: f"server {name.removeprefix(SERVER_PREFIX)}"
        for name in await coordinator.read_applied_revisions()
        if name.startswith(SERVER_PREFIX)
    }
    return {**published, **_registered_server_texts(await coordinator.read_latest_servers())}


def _registered_server_texts(view: ServersView) -> dict[str, str]:
    """Describe the registered servers; the keys name their applied revisions."""
    return {
        server_node_name(key): f"server {descriptor.address}"
        for key, descriptor in view.servers.items()
    }


async def _storage_texts(coordinator: Coordinator) -> dict[str, str]:
    """Describe the storages that have replicas; the keys name their applied revisions."""
    partitions_by_storage = (await coordinator.read_replica_assignment()).partitions
    return {
        storage_node_name(address): f"storage {address}"
        for address, partitions in partitions_by_storage.items()
        if partitions
    }


def _print_change(result: AccessResult) -> None:
    change = result.change
    for note in result.notes:
        print_error(note)
    if change.before is not None and change.before.revision == change.after.revision:
        print_result(f"nothing to change; the permissions stay at revision {change.after.revision}")
    else:
        print_result(f"{result.summary}; the permissions have revision {change.after.revision}")


def describe_revision_use(use: RevisionUse, revision: int) -> list[str]:
    """Return lines of text about the daemons that use a revision."""
    if not use.daemon_count:
        return ["no server is registered, and no storage has replicas"]
    if use.is_access_control_off:
        daemons_text = f"at all {use.daemon_count} daemons, or they are not connected to ZooKeeper"
        return [
            (
                f"access control is off {daemons_text}: none of them has ever published the "
                "revision that it uses"
            )
        ]
    if use.is_used_by_all:
        return [f"all {use.daemon_count} daemons use revision {revision}"]
    lines = [f"{daemon}: {reason}" for daemon, reason in use.outdated_daemons.items()]
    lines += [
        f"{daemon} publishes no revision: access control is off there, or the daemon is not "
        "connected to ZooKeeper"
        for daemon in use.daemons_without_revision
    ]
    lines += [
        f"{daemon} is not registered in ZooKeeper: it may still use older permissions"
        for daemon in use.unregistered_servers
    ]
    hint = (
        "Hint: check the logs and /health of these daemons; `access list` prints the revision "
        "that each one uses."
    )
    if any("ignores" in daemon for daemon in use.outdated_daemons.values()):
        hint += " Restart each daemon that ignores older revisions."
    lines.append(
        f"revision {revision} is stored, but {len(use.not_updated_daemons)} of {use.daemon_count} "
        f"daemons do not use it. {hint}"
    )
    return lines


def _print_json(result: AccessResult, use: RevisionUse) -> None:
    change = result.change
    is_changed = change.before is None or change.before.revision != change.after.revision
    print_json(
        {
            "done": True,
            "changed": is_changed,
            "revision": change.after.revision,
            **result.values,
            "applied": use.updated_daemons,
            "late": use.outdated_daemons,
            "without_revision": use.daemons_without_revision,
            "unregistered": use.unregistered_servers,
        }
    )
