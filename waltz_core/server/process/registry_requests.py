"""Changes the registry of exactly-once writes for clients, with the server's own ZooKeeper session.

So a client needs no write access to ZooKeeper. `cluster/write_registry.py` has the rules of the
registry.

Rules (decision 048, AC 14):
    1. A write belongs to a principal, and no other principal learns its name. Without access
       control there are no principals, and every client may change every write.
    2. With `access = "report"`, an operation on the write of another principal is logged and
       carried out. The number of writes is not limited, because all writes without tokens belong to
       `anonymous`.
    3. ZooKeeper keeps the registry in memory, so the following is limited:
        - the size of a name, of the name of a run, and of the arguments
        - the tasks of a write (`TASKS_MAX`)
        - the time for which a write is kept (a year)
        - the operations of one principal in progress in this server (`OPERATIONS_IN_PROGRESS_MAX`)
    4. An operation may be repeated, for example after an unknown outcome in ZooKeeper.
    5. After a write was finished or removed, the server removes some expired writes. Only one such
       removal runs at a time.
    6. If a connection is closed before the turn of its operation, the operation is dropped, because
       the principal may have lost its permissions.
    7. The operation TASKS reads a node for each task, and there may be many tasks. So a principal
       has one such operation at a time, with at most `CONCURRENT_READS_MAX` concurrent reads. The
       operation keeps in memory only what the answer needs, and ends with its connection.
"""

import asyncio
import logging
import struct
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Final

from waltz_core import errors
from waltz_core.access.client_ids import NO_PROOF
from waltz_core.cluster.write_registry import (
    NAME_CHARACTERS_MAX,
    NODE_BYTES_MAX,
    TaskAttempt,
    TaskState,
    WriteRegistry,
    client_ids_of_other_runs,
)
from waltz_core.parallel import run_parallel
from waltz_core.records import strict_json
from waltz_core.records.record import BEFORE_FIRST, ClientId
from waltz_core.server.process.storage_links import TaskStarter
from waltz_core.transport.admission.connection_access import ConnectionAccess
from waltz_core.wire.messages import RegistryOperation, RegistryRequest, RegistryResponse

_log = logging.getLogger(__name__)

KEEP_MS_MAX: Final = 365 * 24 * 3_600 * 1_000
OPERATIONS_IN_PROGRESS_MAX: Final = 16
TASKS_MAX: Final = 100_000
# Enough for the largest arguments: a summary with a mark for each partition, and a few texts.
_ARGUMENTS_BYTES: Final = 16 * 1024
_ARGUMENTS_BYTES_PER_PARTITION: Final = 64
_SUMMARY_LEVELS_MAX: Final = 10
CONCURRENT_READS_MAX: Final = 16


class RegistryRequests:
    """Processes registry requests of clients, by the module's rules."""

    def __init__(
        self,
        writes: WriteRegistry,
        next_client_id: Callable[[], Awaitable[ClientId]],
        partition_count: int,
        tasks: TaskStarter,
    ) -> None:
        self._writes = writes
        self._next_client_id = next_client_id
        self._partition_count = partition_count
        self._tasks = tasks
        self._is_removing_expired = False
        self._arguments_bytes_max = min(
            NODE_BYTES_MAX, _ARGUMENTS_BYTES + _ARGUMENTS_BYTES_PER_PARTITION * partition_count
        )
        self._turns: dict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(OPERATIONS_IN_PROGRESS_MAX)
        )
        self._listings: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def answer(
        self,
        request: RegistryRequest,
        access: ConnectionAccess | None,
        *,
        is_closed: Callable[[], bool] = lambda: False,
    ) -> RegistryResponse:
        """Process a registry request.

        `access` is the access of the connection; None without access control. `is_closed` returns
        whether the connection was closed (rule 6).

        Raises:
            BadRequest: the request is not valid, or the principal has too many writes.
            PermissionDenied: the write belongs to another principal.
            ConnectionSuperseded: a later attempt has begun, or the write has ended.
            Unavailable: ZooKeeper does not answer, or the principal requests too many client IDs.
        """
        principal = "" if access is None else access.principal
        async with AsyncExitStack() as turn_stack:
            if request.operation == RegistryOperation.TASKS:
                await turn_stack.enter_async_context(self._listings[principal])  # rule 7
            await turn_stack.enter_async_context(self._turns[principal])
            _check_connection_open(is_closed)
            answer = await self._process_for_principal(request, access, is_closed)
        is_over = request.operation in (RegistryOperation.FINISH, RegistryOperation.FORGET)
        if is_over and not self._is_removing_expired:
            self._is_removing_expired = True
            self._tasks.create_task(self._forget_expired())
        return answer

    async def _process_for_principal(
        self,
        request: RegistryRequest,
        access: ConnectionAccess | None,
        is_closed: Callable[[], bool],
    ) -> RegistryResponse:
        if access is not None:
            own_writes = self._writes.for_principal(access.principal, is_limited=access.is_enforced)
            try:
                return await self._carry_out_operation(request, own_writes, access, is_closed)
            except errors.PermissionDenied as error:
                if not access.is_only_reported(error, request):
                    raise
        # Without a proof (rule 2), because a proof would stay valid when such requests are denied
        # later.
        return await self._carry_out_operation(request, self._writes, None, is_closed)

    async def _carry_out_operation(
        self,
        request: RegistryRequest,
        writes: WriteRegistry,
        access: ConnectionAccess | None,
        is_closed: Callable[[], bool],
    ) -> RegistryResponse:
        arguments = RegistryArguments(bytes(request.arguments), self._arguments_bytes_max)
        write = request.write
        match request.operation:
            case RegistryOperation.BEGIN:
                marks = self._starting_marks(request)
                keep_ms, in_series = arguments.keep_ms(), arguments.flag("in_series")
                new_state = await writes.begin(write, marks, keep_ms, in_series=in_series)
                return RegistryResponse(request.req_id, new_state.to_bytes())
            case RegistryOperation.READ:
                write_state = await writes.read(write)
                return RegistryResponse(
                    request.req_id, b"" if write_state is None else write_state.to_bytes()
                )
            case RegistryOperation.ENTER:
                task, run = _task_number(request), arguments.text("run")
                issue_client_id = partial(self._issue_client_id, access)
                entered_task = await writes.enter(write, task, run, issue_client_id)
                proof = NO_PROOF if access is None else access.proof_of(entered_task.client_id)
                return RegistryResponse(request.req_id, entered_task.to_bytes(), proof)
            case RegistryOperation.CHECK:
                await writes.check(write, _task_number(request), request.attempt)
            case RegistryOperation.TASKS:
                result = await _read_tasks(writes, write, arguments.text("run"), is_closed)
                return RegistryResponse(request.req_id, result)
            case RegistryOperation.FINISH:
                finished_by = (
                    TaskAttempt(_task_number(request), request.attempt) if request.attempt else None
                )
                finished_state = await writes.finish(
                    write, arguments.summary(), arguments.keep_ms(), task_attempt=finished_by
                )
                return RegistryResponse(request.req_id, finished_state.to_bytes())
            case RegistryOperation.FORGET:
                await writes.forget(write)
            case unknown:
                raise errors.BadRequest(
                    f"the registry of exactly-once writes has no operation {unknown}"
                )
        return RegistryResponse(request.req_id)

    async def _issue_client_id(self, access: ConnectionAccess | None) -> ClientId:
        if access is not None:
            access.charge_client_id()
        return await self._next_client_id()

    def _starting_marks(self, request: RegistryRequest) -> dict[int, int]:
        if len(request.partitions) > self._partition_count:
            raise errors.BadRequest(
                f"registry request: expected at most {self._partition_count} partitions, found "
                f"{len(request.partitions)}"
            )
        marks = struct.unpack(f">{len(request.marks) // 8}q", request.marks)
        if len(marks) != len(request.partitions):
            raise errors.BadRequest(
                "registry request: expected a high-water mark for each of "
                f"{len(request.partitions)} partitions, found {len(marks)}"
            )
        for partition in request.partitions:
            if not 0 <= partition < self._partition_count:
                raise errors.UnknownPartition(
                    f"there is no partition {partition}: the cluster has partitions "
                    f"0..{self._partition_count - 1}"
                )
        if min(marks, default=0) < BEFORE_FIRST:
            # NB: a node that cannot be decoded never expires, and does not count for its principal.
            raise errors.BadRequest(
                f"registry request: expected high-water marks of -1 or more, found {min(marks)}"
            )
        return dict(zip(request.partitions, marks, strict=True))

    async def _forget_expired(self) -> None:
        """Remove some expired writes (rule 5)."""
        try:
            await self._writes.forget_expired()
        except errors.WaltzError as error:
            _log.info(
                "registry.expired_writes_not_removed reason=%s", error
            )  # retried with the next request
        finally:
            self._is_removing_expired = False


class RegistryArguments:
    """The JSON arguments of a request, with checks; all methods raise BadRequest."""

    def __init__(self, data: bytes, bytes_max: int = NODE_BYTES_MAX) -> None:
        """Decode the arguments; raises BadRequest or TooLarge."""
        self._values: Mapping[str, Any] = {}
        if not data:
            return
        if len(data) > bytes_max:
            raise errors.TooLarge(
                f"arguments of a registry request: expected at most {bytes_max} bytes, found "
                f"{len(data)}"
            )
        try:
            self._values = strict_json.from_json(data)
            strict_json.to_json(self._values)  # a lone surrogate can be read, but not written
        except ValueError as error:
            raise errors.BadRequest(
                f"arguments of a registry request are not valid JSON: {error!s:.200}"
            ) from error
        if not isinstance(self._values, dict):
            raise errors.BadRequest(
                f"arguments of a registry request: expected an object, found {data!r:.200}"
            )

    def keep_ms(self) -> int:
        """Return how long the registry must keep the write, in ms."""
        value = self._values.get("keep_ms")
        if type(value) is not int or not 0 <= value <= KEEP_MS_MAX:
            raise self._bad_argument_error("keep_ms", f"0 to {KEEP_MS_MAX} (a year)")
        return value

    def flag(self, name: str) -> bool:
        """Return the boolean argument `name`; False if it is absent."""
        value = self._values.get(name, False)
        if type(value) is not bool:
            raise self._bad_argument_error(name, "true or false")
        return value

    def text(self, name: str) -> str:
        """Return the text argument `name`, of at most `NAME_CHARACTERS_MAX` characters."""
        value = self._values.get(name)
        if type(value) is not str or len(value) > NAME_CHARACTERS_MAX:
            raise self._bad_argument_error(
                name, f"a text of at most {NAME_CHARACTERS_MAX} characters"
            )
        return value

    def summary(self) -> dict[str, Any]:
        """Return the summary of a write."""
        value = self._values.get("summary")
        if not isinstance(value, dict) or not _has_at_most_levels(value, _SUMMARY_LEVELS_MAX):
            # NB: whether Python can decode many levels depends on the depth of its stack.
            raise self._bad_argument_error(
                "summary", f"an object with at most {_SUMMARY_LEVELS_MAX} levels"
            )
        return value

    def _bad_argument_error(self, name: str, expected: str) -> errors.BadRequest:
        return errors.BadRequest(
            f"argument {name} of a registry request: expected {expected}, found "
            f"{self._values.get(name)!r:.200}"
        )


async def _read_tasks(
    writes: WriteRegistry, write: str, run: str, is_closed: Callable[[], bool]
) -> bytes:
    """Return the JSON result of TASKS (rule 7).

    There may be a hundred thousand tasks, so the nodes are read in groups.
    """
    await writes.read(write)  # raises if the write belongs to another principal
    numbers = await writes.read_task_numbers(write)
    task_numbers: list[int] = []
    others: dict[str, int] = {}
    for start in range(0, len(numbers), CONCURRENT_READS_MAX):
        _check_connection_open(is_closed)
        tasks = await _read_task_states(
            writes, write, numbers[start : start + CONCURRENT_READS_MAX]
        )
        task_numbers += tasks
        others |= {
            str(number): state for number, state in client_ids_of_other_runs(run, tasks).items()
        }
    return strict_json.to_json({"tasks": task_numbers, "others": others})


async def _read_task_states(
    writes: WriteRegistry, write: str, numbers: Sequence[int]
) -> dict[int, TaskState]:
    """Read the states of the given tasks concurrently."""
    states = await run_parallel(
        writes.read_task_state(write, task_number) for task_number in numbers
    )
    numbered_states = zip(numbers, states, strict=True)
    return {number: state for number, state in numbered_states if state is not None}


def _check_connection_open(is_closed: Callable[[], bool]) -> None:
    if is_closed():
        raise errors.Unreachable("the connection was closed before its request was processed")


def _has_at_most_levels(value: object, levels_max: int) -> bool:
    """Whether at most `levels_max` JSON objects and lists are nested in one another."""
    if not isinstance(value, dict | list):
        return True
    children = value.values() if isinstance(value, dict) else value
    return levels_max > 0 and all(_has_at_most_levels(child, levels_max - 1) for child in children)


def _task_number(request: RegistryRequest) -> int:
    if not 0 <= request.task < TASKS_MAX:
        raise errors.BadRequest(
            f"task number of a write: expected 0 to {TASKS_MAX - 1}, found {request.task}"
        )
    return request.task
