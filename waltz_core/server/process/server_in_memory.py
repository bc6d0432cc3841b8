"""The server of `MemoryWaltz`: logs in memory, and faults that affect its messages.

This server runs the same code for partitions and clients as the daemon, but has no storages, no
ZooKeeper and no assignment.

Rules:
    1. Faults affect messages only, never the decisions of a state machine.
    2. Random values are drawn in the order of arrival of messages.
    3. Answers of one connection keep their order, whatever their delays.
"""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Final

from waltz_core import errors
from waltz_core.config.declarations import MIB
from waltz_core.driver import Driver
from waltz_core.metrics import Metrics
from waltz_core.records.record import BEFORE_FIRST, ClientId, Generation, PartitionId, ReqId
from waltz_core.replication.session_events import TakeOwnership
from waltz_core.server.append.large_batch_throttle import LargeBatchThrottle
from waltz_core.server.partition.served_partition import Partition
from waltz_core.server.partition_events import (
    ConnectionId,
    Effect,
    Event,
    Fetch,
    FetchAnswered,
    PartitionIdentity,
    PartitionLimits,
    RequestReceived,
    SendToClient,
    error_answer,
)
from waltz_core.server.process.append_times import AppendTime
from waltz_core.server.process.clients import ClientConnections
from waltz_core.server.process.flow_control import FlowLimits
from waltz_core.server.process.log_in_memory import MEMORY_REPLICA, MemoryLog, MemoryStore
from waltz_core.server.process.storage_links import TaskStarter
from waltz_core.server.read.cache import CacheBudget, FeedCache, TransactionCache
from waltz_core.transport.listening import Listener, listen
from waltz_core.wire.messages import (
    AppendBatch,
    AppendRequest,
    AppendResult,
    ClientMessage,
    MountRequest,
    MountWriter,
    RangeRaw,
    ReplicasResponse,
    RowOutcomeCode,
    WireProtocol,
)

if TYPE_CHECKING:
    from waltz_core.server.process.registry_requests import RegistryRequests

# A prime number, and small: a table is created for every partition of every test.
LOCK_SLOT_COUNT: Final = 65_537
GENERATION: Final = Generation(1)
# `MemoryStore` needs no checkpoints, and ends no session. With a checkpoint, a partition would wait
# forever for the end of the session.
_NO_CHECKPOINT_COUNT: Final = 1 << 62
_PACKED_NO_ID: Final = BEFORE_FIRST.to_bytes(8, "big", signed=True)
_FLOW_LIMITS: Final = FlowLimits(
    connection_in_flight_count_max=1_024,
    connection_in_flight_bytes_max=64 * MIB,
    memory_bytes_max=512 * MIB,
    range_bytes_max=4 * MIB,
)


@dataclass(slots=True)
class InjectedFailures:
    """The error with which the next `count` appends fail (`fail_next_append`)."""

    count: int
    error: errors.WaltzError
    enters_log: bool | None


class Faults:
    """The settings of the faults, and the random choices."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.delay_ms = (0.0, 0.0)
        self.loss_rate = 0.0
        self.loss_count = 0
        self.rejections_left = 0
        self.failures: InjectedFailures | None = None

    def draw_delay_s(self) -> float:
        """Draw the delay of an answer, in seconds."""
        low, high = self.delay_ms
        return (low if low == high else self._random.uniform(low, high)) / 1000

    def draw_loss(self) -> bool:
        """Draw whether an append or its answer is lost."""
        is_lost = self.loss_rate > 0 and self._random.random() < self.loss_rate
        self.loss_count += is_lost
        return is_lost

    def take_failure(self) -> "InjectedFailures | None":
        """Return the failure of this append, if it is one of `fail_next_append`."""
        failures = self.failures
        if failures is None or failures.count <= 0:
            return None
        failures.count -= 1
        return failures

    def draw_bool(self) -> bool:
        """Draw True or False."""
        return self._random.random() < 0.5

    def should_reject(self, message: ClientMessage) -> bool:
        """Whether this append is one of `reject_next`."""
        if not self.rejections_left or not isinstance(message, AppendRequest):
            return False
        if not (message.write_locks or message.read_locks):
            return False
        self.rejections_left -= 1
        return True


class MemoryServer:
    """A server in memory, with all partitions on one port."""

    def __init__(
        self, key: bytes, partition_count: int, faults: Faults, tasks: TaskStarter
    ) -> None:
        self.key = key
        self.partition_count = partition_count
        self.faults = faults
        self.loop = asyncio.get_running_loop()
        self.address = ""
        self.failure: Exception | None = None
        self.client_ids = itertools.count(1)
        self.registry: RegistryRequests | None = None  # there is no ZooKeeper
        # How long each client waits for an outcome.
        self.outcome_timeout_s: dict[int, float] = {}
        self.clients = ClientConnections(self, _FLOW_LIMITS, tasks, Metrics("server"))
        self.hosts: dict[PartitionId, MemoryHost] = {
            PartitionId(number): MemoryHost(PartitionId(number), self)
            for number in range(self.partition_count)
        }
        self._listener: Listener | None = None
        self._delayed: dict[ConnectionId, deque[SendToClient]] = {}
        self._due_s: dict[ConnectionId, float] = {}

    async def start(self) -> None:
        """Take ownership of all partitions, and start to listen."""
        for host in self.hosts.values():
            host.post(TakeOwnership(GENERATION, (MEMORY_REPLICA,)))
        self._listener = await listen(WireProtocol.CLIENT, "127.0.0.1", 0, self.clients.accept)
        self.address = f"127.0.0.1:{self._listener.port}"

    async def stop(self) -> None:
        """Stop serving."""
        assert self._listener is not None
        await self._listener.close("the test is over")
        for host in self.hosts.values():
            host.stop()

    def on_machine_failed(self, error: Exception) -> None:
        """A state machine has raised an exception: abort all connections."""
        self.failure = self.failure or error
        assert self._listener is not None
        for link in self._listener.links:
            link.abort("a partition has failed")

    async def next_client_id(self) -> ClientId:
        """Issue a client ID (`clients.Backend`)."""
        return ClientId(next(self.client_ids))

    def append_times(self) -> Sequence[AppendTime]:
        """Return nothing: there are no storages (`clients.Backend`)."""
        return ()

    async def check_connectivity(self) -> Sequence[tuple[str, bool]]:
        """Return nothing: there are no storages (`clients.Backend`)."""
        return ()

    async def change_preferences(
        self, added: Collection[PartitionId], removed: Collection[PartitionId]
    ) -> None:
        """Do nothing: there is only one server (`clients.Backend`)."""

    def answer(self, effect: SendToClient) -> None:
        """Send an answer after the drawn delay (rule 3)."""
        connection = effect.connection
        delay_s = self.faults.draw_delay_s()
        if not delay_s and connection not in self._delayed:
            self.clients.answer(effect)
            return
        self._delayed.setdefault(connection, deque()).append(effect)
        due_s = max(self.loop.time() + delay_s, self._due_s.get(connection, 0.0))
        self._due_s[connection] = due_s
        self.loop.call_at(due_s, self._send_delayed_answer, connection)

    def _send_delayed_answer(self, connection: ConnectionId) -> None:
        delayed_answers = self._delayed[connection]
        self.clients.answer(delayed_answers.popleft())
        if not delayed_answers:
            del self._delayed[connection], self._due_s[connection]


class MemoryHost:
    """One partition (`clients.PartitionHost`), and the faults of its messages."""

    def __init__(self, partition_id: PartitionId, server: MemoryServer) -> None:
        self.partition_id = partition_id
        self.store = MemoryStore(MemoryLog())
        self._server = server
        self._partition = Partition(
            PartitionIdentity(partition_id, server.partition_count, server.key),
            self.store,
            PartitionLimits(
                lock_slot_count=LOCK_SLOT_COUNT,
                lock_load_count_max=0,
                checkpoint_interval_count=_NO_CHECKPOINT_COUNT,
            ),
            TransactionCache(CacheBudget(4 * MIB)),
            FeedCache(MIB),
            LargeBatchThrottle(is_enabled=False),
        )
        # The requests whose answers will be lost, and until when the mounts of each client are
        # rejected.
        self._unanswered_requests: set[ReqId] = set()
        self._disconnected_until_s: dict[int, float] = {}
        self._driver: Driver[Event, Effect] = Driver(
            self._partition,
            self._perform_effect,
            on_report=lambda report: None,
            on_failure=server.on_machine_failed,
            name=f"memory-{partition_id}",
        )
        self.post, self.stop = self._driver.post, self._driver.stop

    @property
    def is_open(self) -> bool:
        """Whether the partition accepts appends."""
        return self._partition.is_open

    def receive(
        self,
        connection: ConnectionId,
        message: ClientMessage,
        cost_bytes: int,
        *,
        principal: str = "",
        over_limit: errors.Overloaded | None = None,
    ) -> None:
        """Pass a client's request to the machine, unless a fault applies."""
        assert over_limit is None, "there are no principals"
        if isinstance(message, AppendRequest | AppendBatch):
            if self._apply_faults(connection, message, cost_bytes):
                return
        elif isinstance(message, MountRequest | MountWriter):
            until_s = self._disconnected_until_s.get(message.req_id.client_id, 0.0)
            if self._server.loop.time() < until_s:
                error = errors.Overloaded("the fault keeps the outcome of an append unknown")
                self._server.answer(error_answer(connection, message.req_id, cost_bytes, error))
                return
        wall_ms = time.time_ns() // 1_000_000
        self.post(RequestReceived(connection, message, cost_bytes, wall_ms, principal))

    def _apply_faults(
        self, connection: ConnectionId, message: AppendRequest | AppendBatch, cost_bytes: int
    ) -> bool:
        """Apply the faults to an append; return True if the machine must not receive the append."""
        faults, req_id = self._server.faults, message.req_id
        failure = faults.take_failure()
        if failure is not None:
            if not isinstance(failure.error, errors.OutcomeUnknown):
                self._server.answer(error_answer(connection, req_id, cost_bytes, failure.error))
                return True
            outcome_timeout_s = self._server.outcome_timeout_s[req_id.client_id]
            now_s = self._server.loop.time()
            self._disconnected_until_s[req_id.client_id] = now_s + outcome_timeout_s
            return self._lose_message(connection, req_id, enters_log=failure.enters_log)
        if faults.should_reject(message):
            mark = self._partition.high_water_mark
            conflict = mark.to_bytes(8, "big", signed=True)
            result = AppendResult(
                req_id, mark, _PACKED_NO_ID, bytes((RowOutcomeCode.LOCK,)), conflict
            )
            self._server.answer(SendToClient(connection, result, cost_bytes))
            return True
        return faults.draw_loss() and self._lose_message(connection, req_id, enters_log=None)

    def _lose_message(
        self, connection: ConnectionId, req_id: ReqId, *, enters_log: bool | None
    ) -> bool:
        """Lose an append, or only its answer, and abort the connection.

        Return True if the append is lost. If `enters_log` is None, the choice is random.
        """
        if self._server.faults.draw_bool() if enters_log is None else enters_log:
            self._unanswered_requests.add(req_id)
            return False
        self._server.clients.disconnect(connection, "an append was lost")
        return True

    def _perform_effect(self, effect: Effect) -> None:
        match effect:
            case SendToClient():
                self._send_or_lose_answer(effect)
            case Fetch(message=RangeRaw() as message):
                fetched = FetchAnswered(effect.token, self.store.log.read(message))
                self._server.loop.call_soon(self.post, fetched)
            case _:
                raise AssertionError(f"unexpected effect: {effect!r}")

    def _send_or_lose_answer(self, effect: SendToClient) -> None:
        message = effect.message
        if message.req_id in self._unanswered_requests and isinstance(message, AppendResult):
            self._unanswered_requests.discard(message.req_id)
            self._server.clients.disconnect(effect.connection, "an answer was lost")
        elif isinstance(message, ReplicasResponse):
            # There are no storages: the server itself answers readers.
            self._server.answer(replace(effect, message=replace(message, replicas=())))
        else:
            self._server.answer(effect)
