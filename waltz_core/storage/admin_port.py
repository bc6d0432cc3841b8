"""The port for administration: connections in, errands carried out.

Why it stands alone: it is the shell of `admin.py`, off the path of transactions: nobody who appends
or reads waits for what goes on here, but where a partition is taken from them on purpose.

Rules:
    1. Every errand has one outcome; only our own bugs escape, and end the process.
    2. What is served is read through the service, in turn with its other work; nothing else is done
       to it without taking it away first (`serving.py`, rule 3).
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Final, assert_never

from waltz_core import errors, net
from waltz_core.driver import Driver
from waltz_core.machine import Report
from waltz_core.net import Link, Listener
from waltz_core.record import BEFORE_FIRST, NO_SESSION, PartitionId
from waltz_core.storage import errands, service
from waltz_core.storage.admin import AdminRequest, AdminService, Effect, Event, Outcome, Run, Tell
from waltz_core.storage.engine import Engine
from waltz_core.storage.errands import Errand, Held, LogFacts, ReplicaFacts
from waltz_core.storage.format import FLAG_ASSIGNED, FLAG_AVAILABLE
from waltz_core.storage.partition_log import PartitionLog
from waltz_core.storage.service import ADMINISTRATION, Identity
from waltz_core.storage.serving import InThread, Serving
from waltz_core.storage.work import ConnectionId, Request, Work
from waltz_core.wire.admin_messages import AdminMessage, Refused
from waltz_core.wire.messages import Message, Nack, RangeForm, RangeRaw, StorageMessage, Surface

_log = logging.getLogger(__name__)

LINKS_MAX: Final = 64


class AdminPort:
    """The administration of one storage; see the module's rules."""

    def __init__(  # noqa: PLR0913 - what it needs of the daemon, one by one
        self,
        engine: Engine,
        serving: Serving,
        identity: Identity,
        *,
        post: Callable[[service.Event], None],
        report: Callable[[Report], None],
        in_thread: InThread,
        tasks: asyncio.TaskGroup,
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._engine = engine
        self._serving = serving
        self._post = post
        self._in_thread = in_thread
        self._tasks = tasks
        self._storage_id = identity.storage_id
        self._numbers = count(1)
        self._links: dict[ConnectionId, Link] = {}
        # Reads through the service that are not answered yet, by sequence.
        self._reads: dict[int, asyncio.Future[StorageMessage]] = {}
        self._driver: Driver[Event, Effect] = Driver(
            AdminService(identity, address=serving.address),
            self._perform,
            on_report=report,
            on_failure=on_failure,
            name="storage.admin",
        )

    async def listen(self, host: str, port: int) -> Listener:
        """Open the port; raises BadConfig when it cannot be."""
        listener = await net.listen(Surface.ADMIN, host, port, self._accept, links_max=LINKS_MAX)
        _log.info("storage.admin_port address=%s:%d", host, listener.port)
        return listener

    def stop(self) -> None:
        """Take nothing more in."""
        self._driver.stop()

    # ---- connections

    def _accept(self, link: Link) -> None:
        connection = ConnectionId(next(self._numbers))
        self._links[connection] = link
        link.start(partial(self._received, connection), partial(self._closed, connection))

    def _received(self, connection: ConnectionId, messages: list[Message]) -> None:
        version = self._links[connection].version
        assert version is not None
        for message in messages:
            assert isinstance(message, AdminMessage)
            self._driver.post(AdminRequest(connection, version, message))

    def _closed(self, connection: ConnectionId, _reason: str) -> None:
        del self._links[connection]

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Tell():
                self._tell(effect)
            case Run():
                self._tasks.create_task(self._run(effect))
            case Report():
                pass  # the driver hands them on
            case _:
                assert_never(effect)

    def _tell(self, effect: Tell) -> None:
        link = self._links.get(effect.connection)
        if link is None:
            return
        try:
            link.send(effect.message)
        except errors.LocalProtocolError as error:
            # More than fits into a frame, or than this version can say.
            if link.version == 0:
                link.close(str(error))
            else:
                sequence = effect.message.sequence
                link.send(Refused(sequence, errors.TooLarge.code, str(error)))

    # ---- errands (rule 1)

    async def _run(self, effect: Run) -> None:
        value: object
        try:
            value = await self._carry_out(effect.errand)
        except errors.WaltzError as error:
            value = error
        self._driver.post(Outcome(effect.ticket, value))

    async def _carry_out(self, errand: Errand) -> object:
        match errand:
            case errands.FindHeld():
                return self._held()
            case errands.LookAt():
                return self._facts(errand.partition_id)
            case errands.FindStanding():
                return await self._serving.standing(errand.partition_id)
            case errands.ReadRange():
                return await self._read(errand)
            case errands.PutCopy():
                partition_id = PartitionId(errand.batches.partition_id)
                return await self._serving.alone(partition_id, self._call_of(errand))
            case _:
                call = partial(self._change, errand.partition_id, self._call_of(errand))
                return await self._serving.alone(errand.partition_id, call)

    def _change(self, partition_id: PartitionId, call: Callable[[], object]) -> None:
        """Change what is held, on a thread; open the log again, so that it can be asked about."""
        call()
        if partition_id in self._engine.assigned():
            with suppress(
                errors.WaltzError
            ):  # What was changed is durable; this is told elsewhere.
                self._engine.assign(partition_id)

    def _call_of(self, errand: errands.Change) -> Callable[[], object]:
        """Return the call of the engine that a change is."""
        engine = self._engine
        match errand:
            case errands.Hold():
                call: Callable[[], object] = partial(engine.assign, errand.partition_id)
            case errands.GiveUp():
                call = partial(
                    engine.unassign, errand.partition_id, deletes_files=errand.deletes_files
                )
            case errands.Switch():
                call = partial(
                    engine.set_available, errand.partition_id, is_available=errand.is_available
                )
            case errands.Doubt():
                call = partial(engine.mark_suspect, errand.partition_id)
            case errands.Empty():
                call = partial(engine.re_seed, errand.partition_id)
            case errands.PutCopy():
                call = partial(engine.put_copy, errand.batches)
            case _:
                assert_never(errand)
        return call

    # ---- questions

    def _held(self) -> tuple[Held, ...]:
        found = []
        for partition_id in self._engine.assigned():
            info, log = self._engine.info(partition_id), self._engine.logs.get(partition_id)
            synced_max = BEFORE_FIRST if log is None else log.synced_max
            is_available = self._engine.is_available(partition_id)
            found.append(Held(partition_id, info, synced_max, is_available))
        return tuple(found)

    def _facts(self, partition_id: PartitionId) -> ReplicaFacts:
        engine = self._engine
        info = engine.info(partition_id)
        log, error = engine.logs.get(partition_id), engine.failed.get(partition_id)
        why_not = "" if log is not None else "its log is not open"
        return ReplicaFacts(
            is_held=bool(info.flags & FLAG_ASSIGNED),
            is_available=bool(info.flags & FLAG_AVAILABLE),
            is_served=partition_id in self._serving.logs,
            info=info,
            log=None if log is None else _facts_of(log),
            why_not=why_not if error is None else str(error),
        )

    async def _read(self, errand: errands.ReadRange) -> StorageMessage:
        """Read through the service what is served, and by ourselves what is not (rule 2)."""
        number = next(self._numbers)
        request = RangeRaw(
            NO_SESSION,
            number,
            errand.partition_id,
            errand.first,
            errand.last,
            errand.bytes_max,
            RangeForm.WHOLE,
            errand.whole_batches,
            reader=False,
        )
        if errand.partition_id not in self._serving.logs:
            return await self._read_unserved(Request(ADMINISTRATION, request))
        answer = self._reads[number] = asyncio.get_running_loop().create_future()
        try:
            self._post(Request(ADMINISTRATION, request))
            return _or_raise(await answer)
        finally:
            del self._reads[number]

    async def _read_unserved(self, request: Request) -> StorageMessage:
        partition_id = PartitionId(request.message.partition_id)

        def read() -> StorageMessage:
            work = Work(self._engine.log(partition_id), (request,), self._storage_id)
            (outcome,) = work.run().outcomes
            if isinstance(outcome, errors.WaltzError):
                raise outcome
            return outcome

        return await self._serving.alone(partition_id, read, ends_session=False)

    def answered(self, message: StorageMessage) -> None:
        """The service has answered a read."""
        answer = self._reads.get(message.sequence)
        if answer is not None and not answer.done():
            answer.set_result(message)


def _facts_of(log: PartitionLog) -> LogFacts:
    # NB: another thread may append meanwhile; what is told of a log that is served is a moment's.
    state = log.state()
    return LogFacts(
        is_suspect=log.suspect,
        promised=log.promised,
        last_session=log.last_session,
        low_water_mark=log.confirmed_low_water_mark,
        synced_max=state.synced_max,
        chain=state.chain,
        damaged=log.damaged,
    )


def _or_raise(answer: StorageMessage) -> StorageMessage:
    if isinstance(answer, Nack):
        raise errors.from_code(answer.error_code, answer.message)
    return answer
