"""The registry of exactly-once writes: each row enters the log once, even if Spark repeats tasks.

A write has many tasks, which run in separate processes, and several processes may run the same
task. Through the registry, these processes agree on:

    - the high-water marks at the start of the write
    - the client ID and the latest attempt of each task
    - whether the write is done

Rules (docs/spark.md, "Exactly once"):
    1. The first process stores the starting marks, which never change.
    2. A task keeps its client ID forever. Each attempt increments the task's attempt number by
       compare-and-set. If the outcome of this compare-and-set is unknown, the attempt increments
       the number again.
    3. An attempt may continue while it is the latest attempt of its task, and the write is neither
       done nor removed. `check` tests this with data that is not older than the call.
    4. If a process only enters a write, it never begins a removed write again. In a series of
       writes, such as `X-6` and `X-7`, a write does not start if a later write of the series
       exists.
    5. A write expires a given time after its node was last written, that is, after its start or its
       end. ZooKeeper's clock measures this time, because a driver's clock may be days off. The
       removal first marks the write as done, with an empty summary. Therefore no task enters the
       write while the nodes of its tasks are deleted.
    6. A run is one execution of the whole Spark job. The node of a task records its runs, because
       another run may have distributed the rows over the tasks differently.
    7. The version of the parent node of all writes is a fence. To begin or remove a write, a
       process first reads this version. The atomic write that begins or removes the write then also
       writes the parent node, at this version. So a process that was paused cannot begin a write
       that was removed meanwhile, and cannot remove a write that was started again. Other changes
       of existing nodes only check the version of the parent node. The version of the changed node
       is not sufficient: a node that is deleted and created again starts with the same versions.
    8. A registry of one principal (`WriteRegistry.for_principal`) rejects the writes of other
       principals. A write belongs to the principal that began it. If the write was begun without a
       principal or by `anonymous`, it belongs to the first other principal that enters it. Then the
       owner never changes again (decision 048, AC 14). `enter` checks the owner a second time after
       it has written the task. Between the two checks, the write may have been removed, and
       started again by another principal. In this case, `enter` must not return the client ID of
       the other principal's task.
    9. A principal has at most `WRITES_PER_PRINCIPAL_MAX` writes. Concurrent calls may exceed this
       limit slightly.
    10. `finish` with a `TaskAttempt` succeeds only while this attempt is the latest attempt of its
        task. Without this rule, an attempt that was paused could finish the write with outdated
        outcomes. For example, a later attempt may have appended a row that was rejected in the
        paused attempt.
"""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from waltz_core import errors
from waltz_core.access.principals import ANONYMOUS
from waltz_core.cluster.znodes.interface import (
    CheckVersion,
    CreateNode,
    DeleteNode,
    Node,
    Operation,
    SetNode,
)
from waltz_core.cluster.znodes.node_access import ClusterNodes, decode_node, is_number
from waltz_core.records import strict_json
from waltz_core.records.record import ClientId

_WRITE_STATE = "state of an exactly-once write"
_TASK_STATE = "state of a task of an exactly-once write"
ATTEMPTS_MAX = 100
# The maximum number of recorded runs of a task. Two would be enough to detect another run. The list
# is short because each attempt writes it again.
RUNS_MAX = 10
TASK_REMOVALS_MAX = 500
EXAMINED_WRITES_MAX = 50
NAME_CHARACTERS_MAX = 200
WRITES_PER_PRINCIPAL_MAX = 10_000
# A node of ZooKeeper has at most 1 MiB.
NODE_BYTES_MAX = 900 * 1024
_UNOWNED_PRINCIPALS = ("", ANONYMOUS)
# The retention of writes in format 1. Such a node contains only a time of a driver's clock.
KEEP_MS_OF_FORMAT_1 = 365 * 24 * 3_600 * 1_000
_FORMAT_OF_WRITES, _FORMAT_OF_TASKS = 2, 1


@dataclass(frozen=True, slots=True)
class WriteState:
    """The state of an exactly-once write.

    Node `R/x/writes/W` contains JSON with `format` 2 and these fields.

    `marks` are the log's high-water marks by partition when the write started. `keep_ms` is the
    time from the last change of the node until the write expires. `summary` is the result of the
    write: None while the write runs, and empty while it is being removed. `principal` is the owner
    of the write; the node of a write without an owner lacks this field.
    """

    marks: Mapping[int, int]
    keep_ms: int
    summary: Mapping[str, Any] | None = None
    principal: str = ""

    @property
    def is_done(self) -> bool:
        """Whether the write is done. If it is done, no task may append rows any more."""
        return self.summary is not None

    def to_bytes(self) -> bytes:
        """Return the node's bytes."""
        marks = {str(partition): mark for partition, mark in sorted(self.marks.items())}
        fields = {"marks": marks, "keep_ms": self.keep_ms, "summary": self.summary}
        owner = {"principal": self.principal} if self.principal else {}
        return strict_json.to_json({"format": _FORMAT_OF_WRITES, **fields, **owner})

    @staticmethod
    def from_bytes(data: bytes) -> "WriteState":
        """Decode a node of format 1 or 2; raises BadFormat."""
        values = _decode_object(data, _WRITE_STATE, (1, _FORMAT_OF_WRITES))
        if values["format"] == 1:
            values["keep_ms"] = KEEP_MS_OF_FORMAT_1
        _check_kinds(values, _WRITE_STATE, {"marks": dict, "keep_ms": int})
        _check_kinds({"principal": "", **values}, _WRITE_STATE, {"principal": str})
        marks, summary = values["marks"], values.get("summary")
        if not all(is_number(name) and _is_whole_number(mark) for name, mark in marks.items()):
            raise errors.BadFormat(
                "state of an exactly-once write: expected high-water marks by partition, found "
                f"{marks!r:.200}"
            )
        if summary is not None and not isinstance(summary, dict):
            raise errors.BadFormat(
                "state of an exactly-once write: expected an object in field summary, found "
                f"{summary!r:.200}"
            )
        return WriteState(
            {int(name): mark for name, mark in marks.items()},
            values["keep_ms"],
            summary,
            values.get("principal", ""),
        )


@dataclass(frozen=True, slots=True)
class TaskState:
    """The state of a task: JSON with `format` 1 in node `R/x/writes/W/T`."""

    client_id: ClientId
    attempt: int
    runs: tuple[str, ...] = field(default=())

    def to_bytes(self) -> bytes:
        """Return the node's bytes."""
        fields = {"client_id": self.client_id, "attempt": self.attempt, "runs": list(self.runs)}
        return strict_json.to_json({"format": _FORMAT_OF_TASKS, **fields})

    @staticmethod
    def from_bytes(data: bytes) -> "TaskState":
        """Decode the node's bytes; raises BadFormat."""
        values = _decode_object(data, _TASK_STATE, (_FORMAT_OF_TASKS,))
        _check_kinds(values, _TASK_STATE, {"client_id": int, "attempt": int, "runs": list})
        if not all(isinstance(run, str) for run in values["runs"]):
            raise errors.BadFormat(
                "state of a task of an exactly-once write: expected only texts in field runs, "
                f"found {data!r:.200}"
            )
        return TaskState(ClientId(values["client_id"]), values["attempt"], tuple(values["runs"]))


class TaskAttempt(NamedTuple):
    """One attempt of one task."""

    task: int
    attempt: int


class WriteWithTasks(NamedTuple):
    """A write and its started tasks, by task number."""

    state: WriteState
    tasks: Mapping[int, TaskState]


class WriteRegistry:
    """The exactly-once writes of one principal (rule 8) or of all, through one session."""

    def __init__(
        self, nodes: ClusterNodes, principal: str | None = None, *, is_limited: bool = True
    ) -> None:
        self._nodes = nodes
        self._znodes = nodes.znodes
        self._principal = principal
        self._is_limited = is_limited
        self._owners: dict[str, str] = {}  # the owners of known writes, for rule 9

    def for_principal(self, principal: str, *, is_limited: bool = True) -> "WriteRegistry":
        """Return the registry of a principal (rule 8); `is_limited` applies the limit of rule 9."""
        registry = WriteRegistry(self._nodes, principal, is_limited=is_limited)
        registry._owners = self._owners
        return registry

    async def read(self, write: str) -> WriteState | None:
        """Return the state of a write; None if it was never started, or was removed."""
        path = self._path(write)
        await self._znodes.sync()
        node = await self._znodes.get(path)
        return None if node is None else self._decode_state(path, node)

    def _decode_state(self, path: str, node: Node) -> WriteState:
        """Decode a write; raises PermissionDenied (rule 8)."""
        state = decode_node(path, node, WriteState.from_bytes)
        if self._principal is None or state.principal in (*_UNOWNED_PRINCIPALS, self._principal):
            return state
        raise errors.PermissionDenied(
            f"write {path.rpartition('/')[2]} belongs to another principal than "
            f"{self._principal}. Hint: choose another writeId."
        )

    async def read_all(self) -> dict[str, WriteWithTasks]:
        """Return all writes with their tasks, by name."""
        await self._znodes.sync()
        listing = await self._znodes.children(self._nodes.paths.writes)
        writes: dict[str, WriteWithTasks] = {}
        for name in () if listing is None else listing.names:
            state = await self.read(name)
            if state is not None:
                writes[name] = WriteWithTasks(state, await self.read_tasks(name))
        return writes

    async def begin(
        self, write: str, marks: Mapping[int, int], keep_ms: int, *, in_series: bool = False
    ) -> WriteState:
        """Begin a write with these marks unless it has started already; return its state (rule 1).

        Raises:
            ConnectionSuperseded: a later write of its series exists (rule 4).
            PermissionDenied: the write belongs to another principal (rule 8).
            BadRequest: the principal has too many writes (rule 9).
            TooLarge: the marks do not fit into a node.
        """
        path = self._path(write)
        new_state = WriteState(dict(marks), keep_ms, principal=self._principal or "")
        for _ in range(ATTEMPTS_MAX):
            existing = await self.read(write)
            if existing is not None:
                return existing
            with suppress(errors.CoordinatorOutcomeUnknown):
                await self._nodes.create_missing(
                    (self._nodes.paths.extensions, self._nodes.paths.writes)
                )
            fence = await self._fence_operations()
            if in_series:
                await self._check_latest_of_series(write)
            if self._principal is not None and self._is_limited:
                await self._check_write_count(self._principal)
            if await self._try_write([CreateNode(path, _encode_checked(new_state)), *fence]):
                return new_state
        raise errors.CoordinatorUnavailable(
            f"cannot create znode {path}: other processes changed the registry of writes during "
            f"each of {ATTEMPTS_MAX} attempts. Hint: start the write again."
        )

    async def _check_write_count(self, principal: str) -> None:
        """Raise BadRequest if the principal has too many unexpired writes (rule 9)."""
        if await self._count_writes(principal) < WRITES_PER_PRINCIPAL_MAX:
            return
        await WriteRegistry(self._nodes).forget_expired()
        if await self._count_writes(principal) >= WRITES_PER_PRINCIPAL_MAX:
            raise errors.BadRequest(
                f"principal {principal} already has {WRITES_PER_PRINCIPAL_MAX} exactly-once writes "
                "in ZooKeeper, which is the limit. Hint: finished writes are removed after their "
                "retention; shorten it (option 'writeRetention')."
            )

    async def _count_writes(self, principal: str) -> int:
        """Return the number of a principal's writes.

        Return 0 if the writes of all principals together are below the limit.
        """
        listing = await self._znodes.children(self._nodes.paths.writes)
        names = () if listing is None else listing.names
        if len(names) < WRITES_PER_PRINCIPAL_MAX:
            return 0
        existing, owners = frozenset(names), self._owners
        for removed_name in [name for name in owners if name not in existing]:
            del owners[removed_name]
        for name in names:
            if name not in owners:
                node = await self._znodes.get(f"{self._nodes.paths.writes}/{name}")
                if node is not None:
                    owners[name] = _owner_in(node)
        return sum(owner == principal for owner in owners.values())

    async def _check_latest_of_series(self, write: str) -> None:
        series, _, number = write.rpartition("-")
        if not is_number(number):
            return
        listing = await self._znodes.children(self._nodes.paths.writes)
        for name in () if listing is None else listing.names:
            other, _, later = name.rpartition("-")
            if other == series and is_number(later) and int(later) > int(number):
                raise _superseded_error(
                    write,
                    None,
                    f"a later write, {name}, has started, so the state of this write was removed",
                )

    async def _fence_operations(self) -> list[Operation]:
        """Return the operation that writes the fence, to begin or remove a write (rule 7)."""
        path = self._nodes.paths.writes
        node = await self._znodes.get(path)
        return [] if node is None else [SetNode(path, b"", node.stat.version)]

    async def _fence_check_operations(self) -> list[Operation]:
        """Return the check of the fence for other changes of existing nodes (rule 7)."""
        path = self._nodes.paths.writes
        node = await self._znodes.get(path)
        return [] if node is None else [CheckVersion(path, node.stat.version)]

    async def enter(
        self, write: str, task: int, run: str, next_client_id: Callable[[], Awaitable[ClientId]]
    ) -> TaskState:
        """Begin an attempt of a task, and return the task's state (rule 2).

        Raises:
            ConnectionSuperseded: the write is done or was removed.
            PermissionDenied: the write belongs to another principal (rule 8).
        """
        path = self._path(write, task)
        client_id: ClientId | None = None
        for _ in range(ATTEMPTS_MAX):
            await self._check_write_is_running(write, task)
            if not await self._take_ownership(write):
                continue
            fence_check = await self._fence_check_operations()
            node = await self._znodes.get(path)
            if node is None:
                client_id = await next_client_id() if client_id is None else client_id
                first = TaskState(client_id, 1, (run,))
                is_written = await self._try_write([CreateNode(path, first.to_bytes())])
                if is_written and await self._take_ownership(write):
                    return first
                continue
            old = decode_node(path, node, TaskState.from_bytes)
            runs = old.runs if run in old.runs else (*old.runs, run)[-RUNS_MAX:]
            new = replace(old, attempt=old.attempt + 1, runs=runs)
            change = SetNode(path, new.to_bytes(), node.stat.version)
            is_written = await self._try_write([change, *fence_check])
            if is_written and await self._take_ownership(write):
                return new
        raise errors.CoordinatorUnavailable(
            f"cannot change {path}: other processes changed it during each attempt"
        )

    async def _take_ownership(self, write: str) -> bool:
        """Make the principal the owner of an unowned write (rule 8).

        Return False if the caller must try again.
        """
        if self._principal is None or self._principal in _UNOWNED_PRINCIPALS:
            return True
        path = self._path(write)
        node = await self._znodes.get(path)
        if node is None:
            return False
        state = self._decode_state(path, node)
        if state.principal not in _UNOWNED_PRINCIPALS:
            return True
        fence_check = await self._fence_check_operations()
        if await self._znodes.get(path) != node:
            return False
        owned_state = replace(state, principal=self._principal)
        self._owners.pop(write, None)
        return await self._try_write(
            [SetNode(path, owned_state.to_bytes(), node.stat.version), *fence_check]
        )

    async def _check_write_is_running(self, write: str, task: int) -> None:
        state = await self.read(write)
        if state is None:
            raise _superseded_error(
                write,
                task,
                "another run has completed this write or taken it over, and the state of the "
                "write was removed",
            )
        if state.is_done:
            raise _superseded_error(write, task, "the write has already finished")

    async def check(self, write: str, task: int, attempt: int) -> None:
        """Check that this attempt may continue (rule 3).

        Raises:
            ConnectionSuperseded: the attempt may not continue; the message states the reason.
        """
        await self._check_write_is_running(write, task)
        path = self._path(write, task)
        node = await self._znodes.get(path)
        latest_attempt = (
            None if node is None else decode_node(path, node, TaskState.from_bytes).attempt
        )
        if latest_attempt != attempt:
            raise _later_attempt_error(write, TaskAttempt(task, attempt), latest_attempt)

    async def read_tasks(self, write: str) -> dict[int, TaskState]:
        """Return the tasks that have started, by task number."""
        tasks: dict[int, TaskState] = {}
        for task in await self.read_task_numbers(write):
            state = await self.read_task_state(write, task)
            if state is not None:
                tasks[task] = state
        return tasks

    async def read_task_state(self, write: str, task: int) -> TaskState | None:
        """Return the state of a task; None if it was never started, or was removed."""
        path = self._path(write, task)
        node = await self._znodes.get(path)
        return None if node is None else decode_node(path, node, TaskState.from_bytes)

    async def read_task_numbers(self, write: str) -> list[int]:
        """Return the numbers of the tasks that have started, in order."""
        listing = await self._znodes.children(self._path(write))
        names = () if listing is None else listing.names
        return sorted(int(name) for name in names if is_number(name))

    async def finish(
        self,
        write: str,
        summary: Mapping[str, Any],
        keep_ms: int,
        *,
        task_attempt: TaskAttempt | None = None,
    ) -> WriteState:
        """Mark a write as done; return its state, with the summary of the first caller.

        Raises:
            ConnectionSuperseded: the write was removed, or `task_attempt` is not the latest attempt
                of its task (rule 10).
            PermissionDenied: the write belongs to another principal (rule 8).
            TooLarge: the summary does not fit into a node.
        """
        path, marks = self._path(write), None
        for _ in range(ATTEMPTS_MAX):
            await self._znodes.sync()
            checks = await self._fence_check_operations()
            node = await self._znodes.get(path)
            if node is None:
                raise _superseded_error(
                    write,
                    None,
                    "another run has completed this write or taken it over, and the state of the "
                    "write was removed",
                )
            state = self._decode_state(path, node)
            if marks not in (None, state.marks):
                raise _superseded_error(
                    write,
                    None,
                    "the state of the write was removed, and another run has started it again",
                )
            if state.is_done:
                return state
            marks = state.marks
            if task_attempt is not None:
                checks.append(await self._attempt_check_operation(write, task_attempt))
            new_state = replace(state, summary=dict(summary), keep_ms=keep_ms)
            if await self._try_write(
                [SetNode(path, _encode_checked(new_state), node.stat.version), *checks]
            ):
                return new_state
        raise errors.CoordinatorUnavailable(
            f"cannot change {path}: other processes changed it during each attempt"
        )

    async def _attempt_check_operation(self, write: str, task_attempt: TaskAttempt) -> Operation:
        """Return a check that fails if a later attempt has started (rule 10)."""
        path = self._path(write, task_attempt.task)
        node = await self._znodes.get(path)
        latest_attempt = (
            None if node is None else decode_node(path, node, TaskState.from_bytes).attempt
        )
        if node is None or latest_attempt != task_attempt.attempt:
            raise _later_attempt_error(write, task_attempt, latest_attempt)
        return CheckVersion(path, node.stat.version)

    async def forget(self, write: str, *, expired_ms: int | None = None) -> bool:
        """Remove a write; a task that still runs ends at its next mount (rule 5).

        The write is removed only if it had expired at `expired_ms`, a time of ZooKeeper's clock.
        Reason: another process may have removed the write and started it again since. Returns
        whether the write was removed.
        """
        failure_count = 0
        while failure_count < ATTEMPTS_MAX:
            steps = await self._next_removal_operations(self._path(write), expired_ms)
            if isinstance(steps, bool):
                return steps
            failure_count += not await self._try_write(steps)
        raise errors.CoordinatorUnavailable(f"{self._path(write)} could not be removed")

    async def _next_removal_operations(
        self, path: str, expired_ms: int | None
    ) -> list[Operation] | bool:
        """Return the next operations of a removal.

        Return True if the write is already removed, and False if it must stay.
        """
        fence = await self._fence_operations()
        node = await self._znodes.get(path)
        if node is None:
            return True
        state = self._decode_state(path, node)
        is_removing = state.is_done and not state.keep_ms
        if expired_ms is not None and not is_removing and not _is_expired(node, expired_ms):
            return False
        if not state.is_done:
            expired_state = replace(state, summary={}, keep_ms=0)
            return [SetNode(path, expired_state.to_bytes(), node.stat.version), *fence]
        tasks = await self._task_deletions(path)
        return [*(tasks or [DeleteNode(path, node.stat.version)]), *fence]

    async def _task_deletions(self, path: str) -> list[Operation]:
        """Return deletions of tasks, as many as fit into one request of at most 1 MiB."""
        listing = await self._znodes.children(path)
        removals: list[Operation] = []
        for name in () if listing is None else listing.names[:TASK_REMOVALS_MAX]:
            child = await self._znodes.get(f"{path}/{name}")
            if child is not None:
                removals.append(DeleteNode(f"{path}/{name}", child.stat.version))
        return removals

    async def forget_expired(self) -> list[str]:
        """Check a few writes, and remove the expired ones; return their names."""
        now_ms, names = await self._find_expired()
        return [name for name in names if await self.forget(name, expired_ms=now_ms)]

    async def _find_expired(self) -> tuple[int, list[str]]:
        """Check a few writes; return ZooKeeper's time and the expired writes' names (rule 5)."""
        now_ms = await self._read_zookeeper_time_ms()
        listing = await self._znodes.children(self._nodes.paths.writes)
        names = () if listing is None else listing.names
        start = now_ms % len(names) if names else 0  # begins at another write each time
        expired_names: list[str] = []
        for name in (*names[start:], *names[:start])[:EXAMINED_WRITES_MAX]:
            node = await self._znodes.get(f"{self._nodes.paths.writes}/{name}")
            if node is not None and _is_expired(node, now_ms):
                expired_names.append(name)
        return now_ms, expired_names

    async def _read_zookeeper_time_ms(self) -> int:
        """Return ZooKeeper's time in ms, from a node that was written just now."""
        path = self._nodes.paths.writes
        node = await self._znodes.get(path)
        if node is not None:
            # If this write fails, another driver has just written the node. The time of that write
            # can be used as well.
            await self._try_write([SetNode(path, b"", node.stat.version)])
            node = await self._znodes.get(path)
        return 0 if node is None else node.stat.mtime_ms

    def _path(self, write: str, task: int | None = None) -> str:
        check_write_name(write)
        return self._nodes.paths.write(write) + ("" if task is None else f"/{task}")

    async def _try_write(self, operations: list[Operation]) -> bool:
        """Write; return False if the write failed, or if its outcome is unknown."""
        try:
            await self._znodes.write(operations)
        except (errors.CoordinatorConflict, errors.CoordinatorOutcomeUnknown):
            await self._znodes.sync()
            return False
        return True


def client_ids_of_other_runs(run: str, tasks: Mapping[int, TaskState]) -> dict[int, int]:
    """Return the client IDs, by task number, of the tasks that a run other than `run` started."""
    return {
        number: int(task.client_id)
        for number, task in tasks.items()
        if any(task_run != run for task_run in task.runs)
    }


def check_write_name(write: str) -> None:
    """Raise BadRequest unless the name of a write is valid."""
    is_good = 0 < len(write) <= NAME_CHARACTERS_MAX and write not in {".", ".."}
    if not is_good or any(
        not (character.isalnum() or character in "-_.~") or ord(character) > 127
        for character in write
    ):
        raise errors.BadRequest(
            f"name of an exactly-once write: expected 1 to {NAME_CHARACTERS_MAX} letters, "
            f"digits, '-', '_', '.' and '~', found {write!r:.250}"
        )


def _encode_checked(state: WriteState) -> bytes:
    data = state.to_bytes()
    if len(data) > NODE_BYTES_MAX:
        raise errors.TooLarge(
            f"state of an exactly-once write: expected at most {NODE_BYTES_MAX} bytes, found "
            f"{len(data)}"
        )
    return data


def _owner_in(node: Node) -> str:
    try:
        return WriteState.from_bytes(node.data).principal
    except errors.BadFormat:
        return ""


def _superseded_error(write: str, task: int | None, reason: str) -> errors.ConnectionSuperseded:
    task_text = "" if task is None else f", task {task}"
    return errors.ConnectionSuperseded(f"write {write}{task_text}: {reason}")


def _later_attempt_error(
    write: str, task_attempt: TaskAttempt, latest_attempt: int | None
) -> errors.ConnectionSuperseded:
    reason = (
        f"attempt {latest_attempt} of the task has taken over from attempt {task_attempt.attempt}"
    )
    return _superseded_error(write, task_attempt.task, reason)


def _is_expired(node: Node, now_ms: int) -> bool:
    try:
        return node.stat.mtime_ms + WriteState.from_bytes(node.data).keep_ms <= now_ms
    except errors.BadFormat:
        return False


def _is_whole_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63


def _decode_object(data: bytes, what: str, formats: tuple[int, ...]) -> dict[str, Any]:
    try:
        values = strict_json.from_json(data)
    except ValueError as error:
        raise errors.BadFormat(f"{what} is not valid JSON: {error!s:.200}") from error
    if not isinstance(values, dict) or values.get("format") not in formats:
        expected = " or ".join(map(str, formats))
        raise errors.BadFormat(
            f"{what}: expected an object of format {expected}, found {data!r:.200}"
        )
    return values


def _check_kinds(values: Mapping[str, Any], what: str, kinds: Mapping[str, type]) -> None:
    for name, kind in kinds.items():
        value = values.get(name)
        if not isinstance(value, kind) or (kind is int and not _is_whole_number(value)):
            raise errors.BadFormat(
                f"{what}: expected field {name} of type {kind.__name__}, found {value!r:.200}"
            )
