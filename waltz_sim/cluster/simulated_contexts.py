"""The complete production client; its application runs contexts with a view of its own.

`simulated_clients.py` runs only the client's stream, which is a machine. This module also runs the
coroutines outside of the stream. These coroutines decide which high-water mark a context may claim
while subscriptions are paused and resumed.

Rules:
    1. The client is the unchanged `AsyncWaltzClient`. Its event loop, sockets and ZooKeeper are
       simulated.
    2. The application's view is the high-water mark up to which it has applied the log. It may
       survive a restart.
    3. A context reads the current view. The history records this view as the author's mark, even if
       the client claims another mark.
    4. ClaimedMark: when an append is sent, its claimed mark is not higher than the view.
"""

import logging
from collections.abc import Collection, Coroutine, Mapping
from typing import TYPE_CHECKING, Final, cast

from waltz_core import errors
from waltz_core.client.api.async_client import AsyncWaltzClient
from waltz_core.client.api.subscriptions import Subscriptions
from waltz_core.client.links.connections import ServerLinks
from waltz_core.client.links.directory import ClusterInfo, Owner, OwnersChanged
from waltz_core.client.links.identities import ClientIdentitiesInMemory
from waltz_core.client.model.callbacks import AsyncCallbacks
from waltz_core.client.model.transaction import (
    AsyncTransaction,
    TransactionBuilder,
    TransactionContext,
)
from waltz_core.client.read.requests import OwnerRequests
from waltz_core.config.declarations import KIB, ClientConfig
from waltz_core.records.record import BEFORE_FIRST, PartitionId, TransactionId
from waltz_core.wire.messages import AppendRequest, ClientMessage, Message
from waltz_sim.guarantees.history import Operation, Violation
from waltz_sim.world.event_loop import create_loop
from waltz_sim.world.network import CLIENT_VERSION, NEAR, Handlers, SimLink
from waltz_sim.world.process import Process

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from waltz_core.transport import net
    from waltz_sim.cluster.simulated_cluster import SimCluster
    from waltz_sim.cluster.simulated_coordinator import Assignment
    from waltz_sim.cluster.workload import RowPlan

CLIENT_CONFIG: Final = ClientConfig(
    request_timeout_ms=4_000,
    mount_timeout_ms=1_500,
    server_connect_timeout_ms=1_500,
    retry_interval_ms_min=20,
    retry_interval_ms_max=400,
    range_bytes_max=64 * KIB,
)
# The client logs warnings about faults for operators. The simulator causes too many of them.
logging.getLogger("waltz_core.client").addHandler(logging.NullHandler())
HEADER: Final = 7
RUNNING_CONTEXTS_MAX: Final = 3  # the number of contexts at the same time
CONTEXTS_BEFORE_VIEW_MAX: Final = 2  # the number of contexts before the application has a view
_ROW_BEFORE_VIEW: Final[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = ((), (), (1,))


class ContextClient(Process):
    """One application with its client; see the module's rules."""

    def __init__(self, cluster: "SimCluster", name: str) -> None:
        super().__init__(cluster.world, name)
        self.cluster = cluster
        self.loop = create_loop(self)
        self.view_mark = BEFORE_FIRST  # rule 2
        self.has_view = False  # whether the first `subscribe` since the start has returned
        self.running_count = 0
        self._connections: dict[int, _SimConnection] = {}
        self._is_restarting = False

    # ---- life

    def on_started(self) -> None:
        """Open a client, and start its tasks."""
        self.loop = create_loop(self)
        self.has_view, self.running_count = False, 0
        self.loop.run_inside(lambda: self.loop.create_task(self._run_application(), name=self.name))

    def kill(self) -> None:
        """Kill the process: close its event loop and its links."""
        self.world.note(f"{self.name} ends")
        self.is_up = False  # from now on the client sends nothing
        self.loop.close()
        self._connections.clear()
        self.die()
        self.cluster.network.end_links(self, is_silent=self.chance() < 0.3)
        self.cluster.checks.outcomes.on_client_died(self)

    def _restart(self) -> None:
        """Kill the process, and start it again after a while, with its view or without."""
        if self.cluster.is_recovering:
            return
        self.kill()
        if self.chance() < 0.5:
            self.view_mark = BEFORE_FIRST
        self.cluster.checks.count("context client restarted")
        self.world.call_after_us(self.rng.randrange(1_000, 300_000), self.start)

    # ---- the application

    async def _run_application(self) -> None:
        client = _SimulatedClient(self)
        await client.open()
        for _ in range(int(self.chance() * (CONTEXTS_BEFORE_VIEW_MAX + 1))):
            await self._count_while_running(self._run_context(client))
        await client.subscribe(_View(self), [0])
        self.has_view = True
        self.loop.create_task(self._change_feeds(client), name="feeds")
        while not self.cluster.workload.is_over:
            await self._sleep_us(self.cluster.workload.think_us(self))
            if self.running_count < RUNNING_CONTEXTS_MAX and not self.cluster.workload.is_over:
                action = self._run_context if self.chance() < 0.8 else self._append
                self.loop.create_task(self._count_while_running(action(client)), name="context")

    async def _count_while_running(self, coroutine: Coroutine[object, object, None]) -> None:
        self.running_count += 1
        try:
            await coroutine
        finally:
            self.running_count -= 1

    async def _change_feeds(self, client: AsyncWaltzClient) -> None:
        """Pause and resume the subscription repeatedly; sometimes pause or restart the process."""
        while True:
            await self._sleep_us(self.rng.randrange(2_000, 200_000))
            if self.cluster.is_recovering:
                return
            roll = self.chance()
            if roll < 0.1:
                self.world.call_after_us(0, self._restart)
                return
            if roll < 0.2:
                self.pause()
                self.world.call_after_us(self.rng.randrange(1_000, 500_000), self.resume)
                continue
            await client.set_partitions([])
            self.cluster.checks.count("feed unsubscribed")
            await self._sleep_us(self.rng.choice((0, 1_000, 50_000, 500_000)))
            await client.set_partitions([0])

    async def _run_context(self, client: AsyncWaltzClient) -> None:
        context = _SimulatedContext(self)
        result: TransactionId | errors.WaltzError | None
        try:
            result = await (await client.submit(context))
        except errors.WaltzError as error:
            result = error
        if context.operation is not None:
            self.check_outcome(context.operation, result)

    async def _append(self, client: AsyncWaltzClient) -> None:
        """Append a row without a mark, so that the client claims its own mark."""
        position = int(self.chance() * self.cluster.setup.keys)
        operation = self.record_row(((position,), (), ()), self.view_mark)
        result: TransactionId | errors.WaltzError
        try:
            future = await client.append(
                operation.data, partition=0, header=HEADER, write_locks=operation.write_locks
            )
            # The append may have waited, and is not sent before the next turn of the loop.
            operation.mark = self.view_mark
            result = await future
        except errors.WaltzError as error:
            result = error
        self.check_outcome(operation, result)

    def record_row(self, row: "RowPlan", mark: int) -> Operation:
        """Record a row that was computed at a high-water mark."""
        return self.cluster.workload.record_row(self.name, row, mark)

    def check_outcome(
        self, operation: Operation, result: "TransactionId | Exception | None"
    ) -> None:
        """Compare the reported outcome of a row with the log."""
        try:
            self.cluster.checks.outcomes.on_context_ended(operation, result)
        except Violation as violation:
            self.loop.keep_error(violation)

    async def _sleep_us(self, delay_us: int) -> None:
        future = self.loop.create_future()
        timer = self.loop.call_later(delay_us / 1_000_000, future.set_result, None)
        try:
            await future
        finally:
            timer.cancel()

    async def apply(self, transaction: AsyncTransaction) -> None:
        """Apply the next transaction; check 13. Dense and 14. ClientPrefix."""
        if self.chance() < 0.3:
            await self._sleep_us(int(self.chance() * 5_000))
        log, position = self.cluster.checks.history.log, transaction.transaction_id
        if position != self.view_mark + 1:
            self.loop.keep_error(
                Violation("Dense", f"{self.name} applies {position} after {self.view_mark}")
            )
        elif position >= len(log) or log[position].key != transaction.req_id[::3]:
            self.loop.keep_error(
                Violation("ClientPrefix", f"{self.name} was fed another transaction at {position}")
            )
        self.view_mark = position

    # ---- the client's connections

    def check_claimed_mark(self, message: ClientMessage) -> None:
        """ClaimedMark: check the mark of an append that the client sends (rule 4)."""
        if isinstance(message, AppendRequest) and self.has_view:
            mark = message.client_high_water_mark
            if mark > self.view_mark:
                text = f"{self.name} claims {mark} and has applied {self.view_mark}"
                self.loop.keep_error(Violation("ClaimedMark", text))

    async def dial(self, address: str) -> "_SimConnection":
        """Connect to a server; raise Unreachable if that fails."""
        network, server = self.cluster.network, self.cluster.server_named(address)
        if server is None:
            raise errors.Unreachable(f"{address}: no such server")
        dialed: asyncio.Future[SimLink] = self.loop.create_future()

        def on_opened(link: SimLink) -> None:
            if dialed.done():  # the caller has cancelled the dial
                network.close(link, NEAR)
                return
            self._connections[link.number] = _SimConnection(self, link)
            self.loop.run_inside(lambda: dialed.set_result(link))

        def on_failed(reason: str) -> None:
            if not dialed.done():
                error = errors.Unreachable(f"{address}: {reason}")
                self.loop.run_inside(lambda: dialed.set_exception(error))

        network.dial(
            self,
            server,
            Handlers(self._on_message, self._on_link_lost),
            on_opened=on_opened,
            on_failed=on_failed,
            accept=server.accept,
        )
        return self._connections[(await dialed).number]

    def _on_message(self, link: SimLink, message: Message) -> None:
        connection = self._connections.get(link.number)
        if connection is not None:
            self.loop.run_inside(lambda: connection.on_messages([message]))

    def _on_link_lost(self, link: SimLink, reason: str) -> None:
        connection = self._connections.pop(link.number, None)
        if connection is not None:
            self.loop.run_inside(lambda: connection.on_closed(reason))


class _SimulatedContext(TransactionContext):
    """Moves money, appends to a list, or leaves a guard (`ledger.py`), based on the view."""

    def __init__(self, author: ContextClient) -> None:
        super().__init__()
        self._author = author
        self.timeout_ms = author.rng.choice((100, 1_000, 3_000))
        self.retries_max = author.rng.choice((None, 0, 3))
        self.operation: Operation | None = None  # the operation of the last attempt
        self._row = (
            author.cluster.workload.checked_transaction_of(author)
            if author.has_view
            else _ROW_BEFORE_VIEW
        )

    def partition_id(self, partition_count: int) -> int:
        """Return the only partition."""
        return 0

    def execute(self, builder: TransactionBuilder) -> bool:
        """Read the view, and compute the row from it (rule 3)."""
        author, mark = self._author, builder.client_high_water_mark
        if self.operation is not None:
            author.check_outcome(self.operation, errors.LockFailed("retried"))
        # The context may claim less than it has read, and never more.
        mark = min(mark, author.view_mark) if author.has_view else mark
        self.operation = operation = author.record_row(self._row, mark)
        builder.set_header(HEADER)
        builder.data = operation.data
        builder.set_write_locks(operation.write_locks)
        builder.set_read_locks(operation.read_locks)
        builder.set_append_locks(operation.append_locks)
        return True


class _View(AsyncCallbacks):
    """Applies the log to the application's view."""

    def __init__(self, author: ContextClient) -> None:
        self._author = author

    async def client_high_water_mark(self, partition: int) -> int:
        """Return the view, after a delay as for a read from a database."""
        await self._author._sleep_us(int(self._author.chance() * 20_000))
        return self._author.view_mark

    async def apply_transaction(self, transaction: AsyncTransaction) -> None:
        """Apply the next transaction; see `ContextClient.apply`."""
        await self._author.apply(transaction)


class _SimulatedClient(AsyncWaltzClient):
    """The production client with simulated sockets and ZooKeeper (rule 1)."""

    def __init__(self, author: ContextClient) -> None:
        directory = _Directory(author)
        super().__init__(directory, "simulation", CLIENT_CONFIG, client_id=None)
        self.random = author.rng
        self.links = _Links(author)
        self.ids = ClientIdentitiesInMemory(directory, self.links, timeout_s=1.0)
        self.requests = OwnerRequests(directory, self.links, CLIENT_CONFIG, author.rng)
        self.subscriptions = Subscriptions(
            self._partition, self.spawn, self.requests, CLIENT_CONFIG, None
        )


class _Links(ServerLinks):
    """The client's connections, over the simulated network."""

    def __init__(self, author: ContextClient) -> None:
        super().__init__(
            dial_timeout_s=CLIENT_CONFIG.server_connect_timeout_ms / 1000,
            late_answers_s=CLIENT_CONFIG.request_timeout_ms / 1000,
        )
        self._author = author

    async def dial_unshared(self, address: str) -> "net.Link":
        """Open a simulated connection; see `ServerLinks`."""
        return cast("net.Link", await self._author.dial(address))


class _SimConnection:
    """A simulated connection: the part of `net.Link` that `ServerLink` uses."""

    version = CLIENT_VERSION

    def __init__(self, author: ContextClient, link: SimLink) -> None:
        self._author = author
        self._link = link
        self.address = link.ends[1].name
        self.closed_reason = ""
        self.on_messages: Callable[[list[Message]], None]
        self._on_closed: Callable[[str], None]

    def start(
        self, on_messages: "Callable[[list[Message]], None]", on_closed: "Callable[[str], None]"
    ) -> None:
        """Deliver messages from now on."""
        self.on_messages, self._on_closed = on_messages, on_closed

    @property
    def is_closed(self) -> bool:
        """Whether the connection is closed for sending."""
        return bool(self.closed_reason)

    def send(self, message: Message) -> None:
        """Send a message; do nothing if the process has died or the connection is closed."""
        if self._author.is_up and not self.is_closed:
            assert isinstance(message, ClientMessage)
            self._author.check_claimed_mark(message)
            self._author.cluster.network.send(self._link, NEAR, message)

    def close(self, reason: str) -> None:
        """Close the connection."""
        if not self.is_closed:
            self._author.cluster.network.close(self._link, NEAR)
            self._author.loop.call_soon(self._author._on_link_lost, self._link, reason)
            self.closed_reason = reason

    def on_closed(self, reason: str) -> None:
        """Handle the end of the connection."""
        self.closed_reason = self.closed_reason or reason or "lost"
        self._on_closed(reason)

    async def wait_closed(self) -> None:
        """Return at once, because one end can close the connection alone."""


class _Directory:
    """The owner of the partition according to the simulated ZooKeeper; see `Directory`."""

    def __init__(self, author: ContextClient) -> None:
        self._author = author

    @property
    def cluster(self) -> ClusterInfo:
        """The simulated cluster."""
        return ClusterInfo("simulation", self._author.cluster.key, 1)

    @property
    def owners(self) -> Mapping[PartitionId, Owner]:
        """No cached owners: each request reads ZooKeeper."""
        return {}

    async def open(self, on_change: OwnersChanged) -> None:
        """Report no changes of owners: a client may always learn of them too late."""

    async def run(self) -> None:
        """Wait forever."""
        await self._author.loop.create_future()

    async def owner(self, partition_id: PartitionId, *, after_failure: bool) -> Owner:
        """Return the owner in ZooKeeper, perhaps a former one; raise NotOwned if there is none."""
        assigned: asyncio.Future[Assignment] = self._author.loop.create_future()

        def on_owner_found(assignment: "Assignment") -> None:
            if not assigned.done():
                self._author.loop.run_inside(lambda: assigned.set_result(assignment))

        self._author.cluster.coordinator.owner_for(self._author, on_owner_found)
        assignment = await assigned
        if assignment.owner is None:
            raise errors.NotOwned(f"partition {partition_id} has no owner")
        return Owner(assignment.owner, assignment.generation)

    async def read_current_owner(self, partition_id: PartitionId) -> Owner:
        """Return the owner in ZooKeeper, perhaps a former one."""
        return await self.owner(partition_id, after_failure=True)

    def mark_suspect(self) -> None:
        """Do nothing, because no owner is cached."""

    async def groups(self, storages: Collection[str]) -> Mapping[str, int]:
        """Return no groups."""
        return {}

    async def next_client_id(self) -> int:
        """Return an unused client ID."""
        return self._author.cluster.coordinator.next_client_id()

    async def close(self) -> None:
        """Do nothing."""
