"""The registry of exactly-once writes for clients: through a server, or in ZooKeeper.

Rules:
    1. Any server can carry out an operation, and operations may be repeated
       (`cluster/write_registry.py`). The client first tries the server that has answered last. If
       this server does not answer, the client tries other servers, until the request timeout.
    2. A client uses ZooKeeper itself only if at least one server answers, and all servers that
       answer are too old for these requests (before L 8). The ZooKeeper session stays open until
       `close`.
"""

import asyncio
import struct
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from random import Random
from typing import Any, NamedTuple, Protocol, TypeVar

from waltz_core import errors
from waltz_core.access.client_ids import ClientIdentity
from waltz_core.client.links.connections import ServerLink, ServerLinks
from waltz_core.client.links.directory import Directory
from waltz_core.cluster.coordinator import Coordinator
from waltz_core.cluster.write_registry import (
    TaskAttempt,
    TaskState,
    WriteState,
    client_ids_of_other_runs,
)
from waltz_core.cluster.zookeeper import zookeeper_session
from waltz_core.config.declarations import ClientConfig
from waltz_core.records import strict_json
from waltz_core.records.record import PartitionId
from waltz_core.wire.messages import RegistryOperation, RegistryRequest, RegistryResponse

# Requests without appends need no client ID (docs/design/wire-format.md 2.1).
_NO_CLIENT_ID = -1

ResultT = TypeVar("ResultT")


class EnteredTask(NamedTuple):
    """The state of a task, and its client ID with the proof."""

    state: TaskState
    identity: ClientIdentity


class WriteTasks(NamedTuple):
    """The task numbers of a write, and the client IDs of the tasks that another run has begun."""

    task_numbers: tuple[int, ...]
    client_ids_of_other_runs: Mapping[int, int]


class RegistryClient(Protocol):
    """The client whose connections and timeouts `WriteRequests` uses."""

    config: ClientConfig
    directory: Directory
    links: ServerLinks
    random: Random


class WriteRequests:
    """Requests to the registry; see the module's rules.

    The methods raise the errors of `WriteRegistry`. `connect` is the connect string of the cluster,
    for rule 2.
    """

    def __init__(self, connect: str, user: RegistryClient) -> None:
        self._connect = connect
        self._directory, self._links = user.directory, user.links
        self._config, self._random = user.config, user.random
        self._last_address = ""
        self._coordinator: Coordinator | None = None
        self._connecting = asyncio.Lock()
        self._is_closed = False

    async def close(self) -> None:
        """End the session with ZooKeeper if there is one."""
        self._is_closed = True
        coordinator, self._coordinator = self._coordinator, None
        if coordinator is not None:
            await coordinator.close()

    # --- operations

    async def begin(
        self, write: str, marks: Mapping[int, int], keep_ms: int, *, in_series: bool = False
    ) -> WriteState:
        """Begin a write unless it has begun already; see `WriteRegistry.begin`."""

        async def use_zookeeper(coordinator: Coordinator) -> WriteState:
            return await coordinator.writes.begin(write, marks, keep_ms, in_series=in_series)

        make_request = partial(
            RegistryRequest,
            operation=RegistryOperation.BEGIN,
            write=write,
            partitions=tuple(marks),
            marks=struct.pack(f">{len(marks)}q", *marks.values()),
            arguments=_encode_arguments(keep_ms=keep_ms, in_series=in_series),
        )
        return await self._carry_out_operation(make_request, _decode_write, use_zookeeper)

    async def read(self, write: str) -> WriteState | None:
        """Return the state of a write; None if the write was never begun, or was removed."""

        async def use_zookeeper(coordinator: Coordinator) -> WriteState | None:
            return await coordinator.writes.read(write)

        def decode(answer: RegistryResponse) -> WriteState | None:
            return _decode_write(answer) if answer.result else None

        make_request = partial(RegistryRequest, operation=RegistryOperation.READ, write=write)
        return await self._carry_out_operation(make_request, decode, use_zookeeper)

    async def enter(self, write: str, task: int, run: str) -> EnteredTask:
        """Begin an attempt of a task; see `WriteRegistry.enter`."""

        async def use_zookeeper(coordinator: Coordinator) -> EnteredTask:
            state = await coordinator.writes.enter(write, task, run, coordinator.next_client_id)
            return EnteredTask(state, ClientIdentity(state.client_id))

        def decode(answer: RegistryResponse) -> EnteredTask:
            state = TaskState.from_bytes(bytes(answer.result))
            return EnteredTask(state, ClientIdentity(state.client_id, bytes(answer.proof)))

        make_request = partial(
            RegistryRequest,
            operation=RegistryOperation.ENTER,
            write=write,
            task=task,
            arguments=_encode_arguments(run=run),
        )
        return await self._carry_out_operation(make_request, decode, use_zookeeper)

    async def check(self, write: str, task: int, attempt: int) -> None:
        """Check that an attempt may continue; see `WriteRegistry.check`."""

        async def use_zookeeper(coordinator: Coordinator) -> None:
            await coordinator.writes.check(write, task, attempt)

        make_request = partial(
            RegistryRequest,
            operation=RegistryOperation.CHECK,
            write=write,
            task=task,
            attempt=attempt,
        )
        await self._carry_out_operation(make_request, lambda _: None, use_zookeeper)

    async def tasks(self, write: str, run: str = "") -> WriteTasks:
        """Return the tasks that were begun; `client_ids_of_other_runs` leaves out `run`."""

        async def use_zookeeper(coordinator: Coordinator) -> WriteTasks:
            states_by_number = await coordinator.writes.read_tasks(write)
            return WriteTasks(
                tuple(states_by_number), client_ids_of_other_runs(run, states_by_number)
            )

        def decode(answer: RegistryResponse) -> WriteTasks:
            values = strict_json.from_json(bytes(answer.result))
            others = {int(number): state for number, state in values["others"].items()}
            return WriteTasks(tuple(values["tasks"]), others)

        make_request = partial(
            RegistryRequest,
            operation=RegistryOperation.TASKS,
            write=write,
            arguments=_encode_arguments(run=run),
        )
        return await self._carry_out_operation(make_request, decode, use_zookeeper)

    async def finish(
        self,
        write: str,
        summary: Mapping[str, Any],
        keep_ms: int,
        *,
        task_attempt: TaskAttempt | None = None,
    ) -> WriteState:
        """Mark a write as done; see `WriteRegistry.finish`."""

        async def use_zookeeper(coordinator: Coordinator) -> WriteState:
            return await coordinator.writes.finish(
                write, summary, keep_ms, task_attempt=task_attempt
            )

        make_request = partial(
            RegistryRequest,
            operation=RegistryOperation.FINISH,
            write=write,
            task=0 if task_attempt is None else task_attempt.task,
            attempt=0 if task_attempt is None else task_attempt.attempt,
            arguments=_encode_arguments(summary=dict(summary), keep_ms=keep_ms),
        )
        return await self._carry_out_operation(make_request, _decode_write, use_zookeeper)

    async def forget(self, write: str) -> None:
        """Remove a write; servers also remove some expired writes."""

        async def use_zookeeper(coordinator: Coordinator) -> None:
            await coordinator.writes.forget(write)
            await coordinator.writes.forget_expired()

        make_request = partial(RegistryRequest, operation=RegistryOperation.FORGET, write=write)
        await self._carry_out_operation(make_request, lambda _: None, use_zookeeper)

    # --- sending requests

    async def _carry_out_operation(
        self,
        make_request: Callable[..., RegistryRequest],
        decode: Callable[[RegistryResponse], ResultT],
        use_zookeeper: Callable[[Coordinator], Awaitable[ResultT]],
    ) -> ResultT:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._config.request_timeout_ms / 1000
        pause_s = self._config.retry_interval_ms_min / 1000
        while True:
            try:
                answer = await self._request(make_request, deadline_s)
                if answer is not None:
                    return decode(answer)
                break
            except errors.Unavailable as error:
                if loop.time() + pause_s >= deadline_s:
                    raise errors.error_from_code(
                        error.code,
                        "the servers did not answer a request about an exactly-once write "
                        f"within {self._config.request_timeout_ms} ms: {error}",
                    ) from error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._config.retry_interval_ms_max / 1000)
            await self._find_servers()
        return await use_zookeeper(await self._open_zookeeper_session())

    async def _request(
        self, make_request: Callable[..., RegistryRequest], deadline_s: float
    ) -> RegistryResponse | None:
        """Return the answer of a server; None if the client must use ZooKeeper (rule 2)."""
        is_old = False
        last = errors.Unavailable(
            "no server can process the request, because no partition has an owner"
        )
        for address in self._addresses():
            try:
                link = await self._links.get(address)
                if link.supports_registry:
                    answer = await self._request_from(link, make_request, deadline_s)
                    self._last_address = address
                    return answer
                is_old = True
            except errors.Unavailable as error:
                last = error
            except errors.ProtocolError as error:  # another program uses the address now
                last = errors.Unreachable(str(error))
        self._last_address = ""
        if is_old:
            return None
        raise last

    async def _request_from(
        self, link: ServerLink, make_request: Callable[..., RegistryRequest], deadline_s: float
    ) -> RegistryResponse:
        left_s = deadline_s - asyncio.get_running_loop().time()
        return await link.request(
            RegistryResponse,
            make_request,
            client_id=_NO_CLIENT_ID,
            partition_id=_NO_CLIENT_ID,
            timeout_s=max(0.001, min(left_s, self._config.mount_timeout_ms / 1000)),
        )

    def _addresses(self) -> list[str]:
        addresses = sorted({owner.address for owner in self._directory.owners.values()})
        self._random.shuffle(addresses)  # clients must not all use the same server
        return sorted(addresses, key=lambda address: address != self._last_address)

    async def _find_servers(self) -> None:
        """Read the owners again, because the known servers do not answer."""
        try:
            await self._directory.owner(PartitionId(0), after_failure=True)
        except errors.Unavailable:
            return  # the next attempt tries the known servers again

    async def _open_zookeeper_session(self) -> Coordinator:
        """Return the session with ZooKeeper (rule 2)."""
        async with self._connecting:
            if self._is_closed:
                raise errors.UsageError("the client is closed")
            if self._coordinator is None:
                self._coordinator = await zookeeper_session.connect(
                    self._connect,
                    connect_timeout_ms=self._config.zookeeper_connect_timeout_ms,
                    session_timeout_ms=self._config.zookeeper_session_timeout_ms,
                )
            return self._coordinator


def _decode_write(answer: RegistryResponse) -> WriteState:
    return WriteState.from_bytes(bytes(answer.result))


def _encode_arguments(**arguments: object) -> bytes:
    return strict_json.to_json(arguments)
