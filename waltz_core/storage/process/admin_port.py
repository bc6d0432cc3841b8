"""The administration port: accepts connections and executes the tasks of their requests.

This code executes the effects of `admin.py`, separately from the path of transactions. It delays no
append and no read, except when a task takes a partition out of service on purpose.

Rules:
    1. Every task has one outcome. Only a bug raises an exception; then the process exits.
    2. A task that reads records of a served partition goes through the service, and takes turns
       with the partition's other work. A task that changes a partition first takes the partition
       out of service (`served_replicas.py`, rule 3).
    3. With an audit log, a request begins only after a line about it was written. A second line
       contains the outcome, even if the connection is closed before the answer.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Final, assert_never

from waltz_core import errors
from waltz_core.driver import Driver
from waltz_core.machine import Report
from waltz_core.records.record import NO_SESSION, PartitionId
from waltz_core.storage.log.scrub import ScrubState
from waltz_core.storage.process.served_replicas import ServedReplicas, ThreadRunner
from waltz_core.storage.service import admin_execution, admin_tasks, service
from waltz_core.storage.service.admin import (
    AdminDisconnected,
    AdminRequest,
    AdminService,
    AdminTaskDone,
    Effect,
    Event,
    RunAdminTask,
    SendAdminResponse,
)
from waltz_core.storage.service.admin_tasks import AdminTask
from waltz_core.storage.service.service import ADMIN_CONNECTION, StorageIdentity
from waltz_core.storage.service.storage_engine import StorageEngine
from waltz_core.storage.service.work import ConnectionId, LaneRequest, Work
from waltz_core.transport.admission.audit_log import AuditedRequest
from waltz_core.transport.admission.port_limits import LinkLimits
from waltz_core.transport.listening import Listener, listen
from waltz_core.transport.net import Link
from waltz_core.transport.tls import ListenContext
from waltz_core.wire import authentication
from waltz_core.wire.admin_messages import AdminFailure, AdminMessage, AdminRejected
from waltz_core.wire.messages import (
    Message,
    Nack,
    RangeForm,
    RangeRaw,
    StorageMessage,
    WireProtocol,
)

_log = logging.getLogger(__name__)

# An operator needs only a few links. The maximum is larger, because peers without permissions can
# occupy a quarter of it. Until an operator's token is accepted, its link counts towards this
# quarter, too.
LINKS_MAX: Final = 1_024


class AdminPort:
    """The administration port of one storage; rules refer to this module."""

    def __init__(  # noqa: PLR0913 - each is a part of the daemon
        self,
        engine: StorageEngine,
        served_replicas: ServedReplicas,
        identity: StorageIdentity,
        *,
        post: Callable[[service.Event], None],
        report: Callable[[Report], None],
        in_thread: ThreadRunner,
        tasks: asyncio.TaskGroup,
        on_failure: Callable[[Exception], None],
        scrub_states: Callable[[], Sequence[ScrubState]],
        archive_state: Callable[[], admin_tasks.ArchiveState | None],
    ) -> None:
        self._engine = engine
        self._served_replicas = served_replicas
        self._post = post
        self._in_thread = in_thread
        self._scrub_states = scrub_states
        self._archive_state = archive_state
        self._tasks = tasks
        self._storage_id = identity.storage_id
        self._numbers = count(1)
        self._links: dict[ConnectionId, Link] = {}
        # Requests with a line in the audit log, but without an outcome, by the `id` of the message.
        self._audited: dict[int, AuditedRequest] = {}
        # The futures of unanswered reads through the service, by sequence.
        self._reads: dict[int, asyncio.Future[StorageMessage]] = {}
        self._driver: Driver[Event, Effect] = Driver(
            AdminService(identity, address=served_replicas.address),
            self._perform,
            on_report=report,
            on_failure=on_failure,
            name="storage.admin",
        )

    async def listen(self, host: str, port: int, ssl: ListenContext | None) -> Listener:
        """Open the port and return its listener; raises BadConfig if that is not possible."""
        listener = await listen(
            WireProtocol.ADMIN, host, port, self._accept, ssl=ssl, limits=LinkLimits(LINKS_MAX)
        )
        _log.info("storage.admin_ready address=%s", f"{host}:{listener.port}")
        return listener

    def stop(self) -> None:
        """Stop accepting requests; requests without an outcome are logged as "unknown"."""
        self._driver.stop()
        audited, self._audited = self._audited, {}
        for audit_line in audited.values():
            audit_line.end("unknown", "the storage was shut down before it answered")

    # ---- connections

    def _accept(self, link: Link) -> None:
        connection = ConnectionId(next(self._numbers))
        self._links[connection] = link
        link.start(
            partial(self._on_messages_received, connection),
            partial(self._on_link_closed, connection),
        )

    def _on_messages_received(self, connection: ConnectionId, messages: list[Message]) -> None:
        link = self._links[connection]
        version = link.version
        assert version is not None
        for message in link.filter_permitted(messages):
            assert isinstance(message, AdminMessage)
            request, audited = (
                AdminRequest(connection, version, message),
                link.audit_request(message),
            )
            if audited is None:
                self._driver.post(request)
            else:
                self._audited[id(message)] = audited
                audited.begin(partial(self._on_audit_line_written, request))

    def _on_audit_line_written(
        self, request: AdminRequest, error: errors.WaltzError | None
    ) -> None:
        """Execute a request whose audit line was written, or reject it (rule 3)."""
        link, message = self._links.get(request.connection), request.message
        if link is None or link.is_closed or link.access is None:
            error = errors.Unavailable("the connection was closed before the request was started")
        elif link.access.may_begin(error):
            self._driver.post(request)
            return
        assert error is not None
        answer = authentication.rejected_answer(message, request.version, error)
        assert isinstance(answer, AdminMessage)
        self._send(SendAdminResponse(request.connection, answer, message))

    def _on_link_closed(self, connection: ConnectionId, _reason: str) -> None:
        link = self._links.pop(connection)
        # Without access control, requests continue, as in Waltz 0.13.
        if link.access is not None:
            self._driver.post(AdminDisconnected(connection))

    def _perform(self, effect: Effect) -> None:
        match effect:
            case SendAdminResponse():
                self._send(effect)
            case RunAdminTask():
                self._tasks.create_task(self._run(effect))
            case Report():
                pass  # the driver handles reports
            case _:
                assert_never(effect)

    def _send(self, effect: SendAdminResponse) -> None:
        audited = self._audited.pop(id(effect.request), None)
        if audited is not None:
            _write_outcome(audited, effect.message)
        link = self._links.get(effect.connection)
        if link is None:
            return
        try:
            link.send(effect.message)
        except errors.LocalProtocolError as error:
            # The answer is larger than a frame, or cannot be expressed in this version.
            if link.version == 0:
                link.close(str(error))
            else:
                sequence = effect.message.sequence
                link.send(AdminRejected(sequence, errors.TooLarge.code, str(error)))

    # ---- tasks (rule 1)

    async def _run(self, effect: RunAdminTask) -> None:
        value: object
        try:
            value = await self._carry_out(effect.task)
        except errors.WaltzError as error:
            value = error
        self._driver.post(AdminTaskDone(effect.task_id, value))

    async def _carry_out(self, task: AdminTask) -> object:
        match task:
            case (
                admin_tasks.FindHeldPartitions()
                | admin_tasks.FindDiskStatus()
                | admin_tasks.InspectReplica()
            ):
                return await self._read_local(task)
            case admin_tasks.FindArchiveState():
                return self._archive_state()
            case admin_tasks.FindZooKeeperState():
                return await self._served_replicas.zookeeper_state(task.partition_id)
            case admin_tasks.ReadRange():
                return await self._read(task)
            case admin_tasks.FindScrubState():
                return self._scrub(task)
            case _:
                call = partial(admin_execution.execute_change, self._engine, task)
                return await self._served_replicas.run_exclusively(
                    admin_execution.partition_of(task), call
                )

    async def _read_local(
        self,
        task: admin_tasks.FindHeldPartitions
        | admin_tasks.FindDiskStatus
        | admin_tasks.InspectReplica,
    ) -> object:
        if isinstance(task, admin_tasks.FindHeldPartitions):
            return admin_execution.held_partitions_of(self._engine)
        if isinstance(task, admin_tasks.FindDiskStatus):
            clock_ms = time.time_ns() // 1_000_000
            return await self._in_thread(
                partial(admin_execution.disk_status_of, self._engine, clock_ms)
            )
        is_served = task.partition_id in self._served_replicas.logs
        return admin_execution.replica_status_of(
            self._engine, task.partition_id, is_served=is_served
        )

    def _scrub(self, task: admin_tasks.FindScrubState) -> ScrubState | None:
        if task.begins:
            self._post(service.ScrubRequested(task.partition_id))
        states = (
            state for state in self._scrub_states() if state.partition_id == task.partition_id
        )
        return next(states, None)

    # ---- reading (rule 2)

    async def _read(self, task: admin_tasks.ReadRange) -> StorageMessage:
        """Read a range: if the partition is served, through the service, otherwise directly."""
        sequence = next(self._numbers)
        request = RangeRaw(
            NO_SESSION,
            sequence,
            task.partition_id,
            task.first,
            task.last,
            task.bytes_max,
            RangeForm.WHOLE,
            task.whole_batches,
            reader=False,
        )
        if task.partition_id not in self._served_replicas.logs:
            return await self._read_unserved(LaneRequest(ADMIN_CONNECTION, request))
        answer = self._reads[sequence] = asyncio.get_running_loop().create_future()
        try:
            self._post(LaneRequest(ADMIN_CONNECTION, request))
            return _raise_if_rejected(await answer)
        finally:
            del self._reads[sequence]

    async def _read_unserved(self, request: LaneRequest) -> StorageMessage:
        partition_id = PartitionId(request.message.partition_id)

        def read() -> StorageMessage:
            work = Work(self._engine.log(partition_id), (request,), self._storage_id)
            (outcome,) = work.run().outcomes
            if isinstance(outcome, errors.WaltzError):
                raise outcome
            return outcome

        return await self._served_replicas.run_exclusively(partition_id, read, ends_session=False)

    def on_answered(self, message: StorageMessage) -> None:
        """Pass the answer of the service to the read that waits for it."""
        answer = self._reads.get(message.sequence)
        if answer is not None and not answer.done():
            answer.set_result(message)


def _write_outcome(audited: AuditedRequest, answer: AdminMessage) -> None:
    match answer:
        case AdminRejected():
            audited.end("rejected", answer.text)
        case AdminFailure():
            audited.end("rejected", answer.text or "")
        case _:
            audited.end("done")


def _raise_if_rejected(answer: StorageMessage) -> StorageMessage:
    if isinstance(answer, Nack):
        raise errors.error_from_code(answer.error_code, answer.message)
    return answer
