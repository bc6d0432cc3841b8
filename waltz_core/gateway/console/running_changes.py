"""Runs the changes of the console, and decides who may make them.

Rules (decision 069):
    1. A change uses the gateway's user in ZooKeeper, so the gateway itself checks the permission of
       the caller. With access control, the caller's principal must have the verb `administer` for
       all partitions. Immediately before the change begins, the gateway reads the current
       permissions from ZooKeeper.
    2. Without access control, the gateway must not have a user in ZooKeeper. Reason: every caller
       could act as this user.
    3. Requests to servers and storages contain the token of the caller, as everywhere in the
       gateway.
    4. A change has an audit entry with the caller's principal, and continues when the page is
       closed. When the gateway stops, the change is interrupted. If the user starts the same change
       again, the change continues after the completed steps.
    5. While a change is running, the gateway does not start the same change again, because a
       browser may send a request twice.
    6. At shutdown, the gateway waits `INTERRUPTION_S_MAX` for the outcomes in the audit log.
       Without ZooKeeper, an interrupted change keeps the outcome "begun".
"""

import asyncio
import logging
import shlex
import socket
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from ssl import SSLContext
from typing import Any, Final, NamedTuple

from waltz_core import errors
from waltz_core.access.principals import ANONYMOUS
from waltz_core.administration import member_connections
from waltz_core.administration.change_run import ChangeRun, now_ms, record_change, time_limit
from waltz_core.cluster.change.audit import OUTCOME_BEGUN, OUTCOME_DONE, AuditEntry
from waltz_core.cluster.coordinator import Coordinator
from waltz_core.cluster.zookeeper import zookeeper_session
from waltz_core.config.connect_string import parse_connect_string
from waltz_core.gateway.console.administrators import check_administrator
from waltz_core.gateway.console.change_kinds import CHANGE_KINDS, ChangeKind

_log = logging.getLogger(__name__)

RUNNING_CHANGES_MAX: Final = 8
ENDED_CHANGES_MAX: Final = 50
HISTORY_MAX: Final = 100
TIMEOUT_S: Final = 3600.0
INTERRUPTION_S_MAX: Final = 3.0
_OUTCOME_INTERRUPTED: Final = "failed: the gateway was stopped"


class ChangeCaller(NamedTuple):
    """The caller of a change: the hash of its token, and the TLS context with the token."""

    token_hash: str  # empty without a token
    ssl: SSLContext | None


@dataclass(slots=True)
class ConsoleChange:
    """One change: its command, the user that has requested it, and its progress."""

    number: int
    kind: ChangeKind
    command: str
    user: str
    begun_ms: int
    ended_ms: int | None = None
    outcome: str = OUTCOME_BEGUN
    summary: str = ""
    run: ChangeRun | None = None

    def fields(self) -> dict[str, Any]:
        """Return the JSON fields of the change."""
        run, is_running = self.run, self.ended_ms is None
        return {
            "id": str(self.number),
            "name": self.kind.name,
            "command": self.command,
            "user": self.user,
            "begun_ms": self.begun_ms,
            "ended_ms": self.ended_ms,
            "outcome": self.outcome,
            "summary": self.summary,
            "steps": [] if run is None else list(run.steps),
            "waits_for": run.wait_reason if run is not None and is_running else "",
        }


@dataclass(slots=True)
class ConsoleChanges:
    """The changes of one gateway: the running changes, and the latest finished changes."""

    connect: str
    coordinator: Callable[[], Coordinator]  # of the gateway's session, for reads
    tasks: asyncio.TaskGroup
    _changes: deque[ConsoleChange] = field(default_factory=deque)
    _change_tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _last_number: int = 0

    async def check_permitted(self, caller: ChangeCaller) -> str:
        """Return the principal of a caller that may change the cluster (rules 1 and 2).

        Raises:
            PermissionDenied: the caller may not change the cluster.
            BadConfig: the gateway's user in ZooKeeper may not change the cluster.
        """
        coordinator = self.coordinator()
        permissions = await coordinator.permissions.read()
        if permissions is None:
            if parse_connect_string(self.connect).auth_file:
                raise errors.PermissionDenied(
                    "the cluster has no access control, so each caller could use the ZooKeeper "
                    "user of the gateway. Hint: set up access control (docs/access.md)."
                )
            principal = ANONYMOUS
        else:
            principal = check_administrator(permissions, caller.token_hash, "change the cluster")
        # This check is the last one, because only administrators may see an error about the
        # gateway's user in ZooKeeper.
        await coordinator.check_administrator()
        return principal

    async def start(
        self, caller: ChangeCaller, kind: ChangeKind, arguments: Mapping[str, str]
    ) -> ConsoleChange:
        """Start a change, and return it at once.

        Raises:
            Overloaded: too many changes are running.
            BadRequest: the same change is running.
            PermissionDenied, BadConfig: as for `check_permitted`.
        """
        principal = await self.check_permitted(caller)
        # Checked after the wait, because other changes can start meanwhile.
        if len(self._change_tasks) >= RUNNING_CHANGES_MAX:
            raise errors.Overloaded(
                f"{RUNNING_CHANGES_MAX} changes already run at this gateway, which is the limit. "
                "Hint: wait until one of them ends."
            )
        command = shlex.join(kind.command_words(arguments))
        same_changes = [
            other_change
            for other_change in self._changes
            if other_change.ended_ms is None and other_change.command == command
        ]
        if same_changes:  # rule 5
            raise errors.BadRequest(
                "nothing was changed, because the same change runs as number "
                f"{same_changes[0].number} at this gateway. Hint: wait until it ends."
            )
        self._last_number += 1
        change = ConsoleChange(
            self._last_number,
            kind,
            command,
            f"{principal} via gateway@{socket.gethostname()}",
            now_ms(),
        )
        self._changes.appendleft(change)
        self._forget_oldest_changes()
        executing = self._execute(change, caller.ssl, kind.keyword_arguments(arguments))
        task = self.tasks.create_task(executing, name="console_change")
        self._change_tasks.add(task)
        task.add_done_callback(partial(self._on_ended, change))
        return change

    def _forget_oldest_changes(self) -> None:
        ended = [change for change in self._changes if change.ended_ms is not None]
        for change in ended[ENDED_CHANGES_MAX:]:
            self._changes.remove(change)

    def _on_ended(self, change: ConsoleChange, task: asyncio.Task[None]) -> None:
        self._change_tasks.discard(task)
        if change.ended_ms is None:  # the task was cancelled before its first step
            change.outcome, change.ended_ms = _OUTCOME_INTERRUPTED, now_ms()

    async def interrupt(self) -> None:
        """Interrupt the running changes, because the gateway stops (rules 4 and 6)."""
        running = list(self._change_tasks)
        for task in running:
            task.cancel()
        if running:
            _, pending = await asyncio.wait(running, timeout=INTERRUPTION_S_MAX)
            for task in pending:  # cancel again, because the task waits for ZooKeeper
                task.cancel()

    async def fields(self) -> dict[str, Any]:
        """Return the kinds, the changes of this gateway and the audit log (newest first) as JSON.

        Raises CoordinatorUnavailable if ZooKeeper does not answer.
        """
        entries = await self.coordinator().audit.read(HISTORY_MAX)
        return {
            "kinds": [_kind_fields(each) for each in CHANGE_KINDS.values()],
            "running": [each.fields() for each in self._changes],
            "history": [_history_fields(each) for each in reversed(entries)],
        }

    async def _execute(
        self, change: ConsoleChange, ssl: SSLContext | None, keywords: Mapping[str, Any]
    ) -> None:
        """Run a change to its end; an error becomes the outcome of the change."""
        member_connections.use_ssl_context(ssl)  # applies to this task only
        _log.info("console.change_begun command=%r user=%r", change.command, change.user)
        try:
            change.summary = await self._run(change, keywords)
            change.outcome = OUTCOME_DONE
        except asyncio.CancelledError:
            change.outcome = _OUTCOME_INTERRUPTED
            raise
        except errors.WaltzError as error:
            change.outcome = f"failed: {error}"
        except Exception:  # noqa: BLE001 - the top of a task
            _log.exception("console.change_failed command=%r", change.command)
            change.outcome = "failed: internal error; the log of the gateway has the details"
        finally:
            change.ended_ms = now_ms()
            _log.info("console.change_ended command=%r outcome=%r", change.command, change.outcome)

    async def _run(self, change: ConsoleChange, keywords: Mapping[str, Any]) -> str:
        entry = AuditEntry(change.user, change.begun_ms, change.command)
        async with zookeeper_session.open_session(self.connect) as coordinator:
            run = change.run = ChangeRun(coordinator)
            async with (
                record_change(coordinator, entry),
                time_limit(TIMEOUT_S, lambda: run.wait_reason or "ZooKeeper"),
            ):
                result = await change.kind.function(run, **keywords) or {}
        return str(result.get("summary", "done"))


def _kind_fields(kind: ChangeKind) -> dict[str, Any]:
    return {
        "name": kind.name,
        "summary": kind.summary,
        "is_disruptive": kind.is_disruptive,
        "parameters": [
            {
                "name": parameter.name,
                "kind": parameter.kind.value,
                "text": parameter.text,
                "option": parameter.option,
                "is_required": parameter.is_required,
            }
            for parameter in kind.parameters
        ],
    }


def _history_fields(entry: AuditEntry) -> dict[str, Any]:
    return {
        "user": entry.user,
        "begun_ms": entry.begun_ms,
        "ended_ms": entry.ended_ms,
        "command": entry.command,
        "outcome": entry.outcome,
    }
