"""An in-process Waltz for tests of applications: `MemoryWaltz`, with injected faults.

    with MemoryWaltz(partition_count=2) as waltz, waltz.client() as client:
        waltz.reject_next(1)
        transaction_id = client.submit(Transfer(...)).result()

The clients are `WaltzClient` and `AsyncWaltzClient`, the partitions are the server's state
machines, and the clients use real connections to this process. There are no replicas, disks or
ZooKeeper (decision 009).

Rules:
    1. A fault changes or delays messages, but never the decisions of a machine. So everything that
       a test observes may also happen in a cluster.
    2. All random choices come from the seed, in the order in which messages arrive.
    3. Faults may be set from any thread; they apply to messages that arrive afterwards.
    4. A suspended feed holds back committed transactions. A callback that is already running is not
       interrupted, even if it applies a batch.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import replace
from random import Random
from types import TracebackType
from typing import Any, Final, Self

from waltz_core import errors
from waltz_core.client.api.async_client import AsyncWaltzClient
from waltz_core.client.api.opening import UnopenedClient
from waltz_core.client.api.sync_client import WaltzClient
from waltz_core.client.links.directory import ClusterInfo, Owner, OwnersChanged
from waltz_core.client.links.identities import ClientIdentitiesInMemory
from waltz_core.client.read.feed_delivery import Consumer, DeliveryProgress, DeliveryRun
from waltz_core.client.stream.append_errors import outcome_code_of
from waltz_core.config.declarations import ClientConfig
from waltz_core.records.record import PartitionId, TransactionId
from waltz_core.server.process.log_in_memory import StoredTransaction
from waltz_core.server.process.server_in_memory import (
    GENERATION,
    Faults,
    InjectedFailures,
    MemoryServer,
)
from waltz_core.transport import net

# The default settings of clients: within one process, waits are short.
IN_MEMORY_CONFIG: Final = ClientConfig(
    request_timeout_ms=5_000, retry_interval_ms_min=1, retry_interval_ms_max=50
)
# If an append has no outcome, its client stays disconnected for the client's request timeout,
# multiplied by this factor. So even on a busy machine, the append times out before the client
# connects again.
OUTCOME_TIMEOUT_FACTOR: Final = 1.25
CLUSTER_KEY: Final = b"Waltz in memory."
assert len(CLUSTER_KEY) == 16
# The interval, in seconds, at which a suspended feed checks whether it has ended.
POLL_INTERVAL_S: Final = 0.05


class MemoryWaltz:
    """An in-process log with `partition_count` partitions and any number of clients.

    `delay_ms` is the delay of answers: a number, or a minimum and a maximum. `fault_rate` is the
    probability (0.0 to 1.0) that an append or its answer is lost together with the connection.
    Clients recover from this loss and report each outcome once, as with a cluster.
    """

    def __init__(
        self,
        partition_count: int = 4,
        *,
        seed: int = 0,
        delay_ms: float | tuple[float, float] = 0,
        fault_rate: float = 0.0,
    ) -> None:
        if partition_count < 1:
            raise errors.BadRequest(
                f"argument partition_count: expected at least 1, found {partition_count}"
            )
        self._faults = Faults(Random(seed))  # noqa: S311 - replays a test, keeps no secret
        self.delay_ms, self.fault_rate = delay_ms, fault_rate
        self._gate = _Gate()
        self._clients: list[WaltzClient] = []
        self._stop = asyncio.Event()
        ready: Future[MemoryServer] = Future()
        self._thread = threading.Thread(
            target=lambda: net.run(self._serve(partition_count, ready)),
            name="waltz-memory",
            daemon=True,
        )
        self._thread.start()
        self._server = ready.result()

    async def _serve(self, partition_count: int, ready: "Future[MemoryServer]") -> None:
        try:
            async with asyncio.TaskGroup() as group:
                server = MemoryServer(CLUSTER_KEY, partition_count, self._faults, group)
                await server.start()
                ready.set_result(server)
                await self._stop.wait()
                await server.stop()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)
            raise

    def close(self) -> None:
        """Close the clients and the server; may be called twice. Raises an error of the server."""
        if not self._thread.is_alive():
            return
        for client in self._clients:
            client.close()
        self._server.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        if self._server.failure is not None:
            raise self._server.failure

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- clients

    def client(
        self, config: ClientConfig | None = None, *, client_id: int | None = None
    ) -> WaltzClient:
        """Open a client, like `WaltzClient(connect, config)` for a cluster."""
        client = WaltzClient.wrap(lambda: self.async_client(config, client_id=client_id))
        self._clients.append(client)
        return client

    def async_client(
        self, config: ClientConfig | None = None, *, client_id: int | None = None
    ) -> UnopenedClient[AsyncWaltzClient]:
        """Open a client for asyncio; await it, or use it with `async with`."""
        # The client sends each append in its own request, because injected faults count requests.
        settings = replace(config or IN_MEMORY_CONFIG, batch_rows_max=1)
        return UnopenedClient(_MemoryClient(self._server, self._gate, settings, client_id))

    @property
    def partition_count(self) -> int:
        return self._server.partition_count

    def transactions(self, partition: int) -> list[StoredTransaction]:
        """Return all transactions in a partition's log; works after `close`, too."""
        if not 0 <= partition < self.partition_count:
            raise errors.UnknownPartition(f"there is no partition {partition}")
        log = self._server.hosts[PartitionId(partition)].store.log

        async def read() -> list[StoredTransaction]:
            return log.transactions()

        if not self._thread.is_alive():
            return log.transactions()
        return asyncio.run_coroutine_threadsafe(read(), self._server.loop).result()

    # --- knobs

    @property
    def delay_ms(self) -> float | tuple[float, float]:
        """The delay of answers from now on, in ms: a minimum and a maximum."""
        return self._faults.delay_ms

    @delay_ms.setter
    def delay_ms(self, delay_ms: float | tuple[float, float]) -> None:
        low, high = delay_ms if isinstance(delay_ms, tuple) else (delay_ms, delay_ms)
        if not 0 <= low <= high:
            raise errors.BadRequest(
                "delay_ms: expected a delay of at least 0, or a minimum and a maximum with 0 <= "
                f"minimum <= maximum, found {delay_ms}"
            )
        self._faults.delay_ms = low, high

    @property
    def fault_rate(self) -> float:
        """The probability that an append or its answer is lost from now on."""
        return self._faults.loss_rate

    @fault_rate.setter
    def fault_rate(self, rate: float) -> None:
        if not 0.0 <= rate <= 1.0:
            raise errors.BadRequest(f"fault_rate: expected a probability in 0.0..1.0, found {rate}")
        self._faults.loss_rate = rate

    @property
    def fault_count(self) -> int:
        """The number of appends or answers that the fault rate has lost."""
        return self._faults.loss_count

    def reject_next(self, count: int = 1) -> None:
        """Reject the next `count` appends with a read or write lock, as for a real conflict.

        No other client has written the lock. In a cluster, a lock table can reject a transaction
        without a conflict, with the same effect. 0 ends the rejections. Rows of `append_batch` are
        not rejected.
        """
        self._faults.rejections_left = count

    def fail_next_append(
        self, count: int, error: errors.WaltzError, *, enters_log: bool | None = None
    ) -> None:
        """Fail the next `count` appends of any client with an error; 0 ends the failures.

        With `OutcomeUnknown`, either the append or its answer is lost. `enters_log` selects whether
        the append or the answer is lost; the default is random. The client cannot learn the outcome
        before its `request_timeout_ms` has passed. With any other error, the append is not in the
        log.

        After `Overloaded`, `NoSpace` and `SessionLost`, clients send the append again. So the
        application sees these errors only if they last for `request_timeout_ms`. Raises BadRequest
        for an error that no append can have.
        """
        is_outcome = isinstance(error, errors.UsageError | errors.OutcomeUnknown)
        if not is_outcome and outcome_code_of(error) is None:
            raise errors.BadRequest(
                "argument error of fail_next_append: expected an error that an append can raise, "
                f"found {type(error).__name__}"
            )
        self._faults.failures = InjectedFailures(count, error, enters_log)

    def suspend_feed(self) -> None:
        """Hold back transactions from callbacks until `resume_feed` (rule 4); appends continue."""
        self._gate.close()

    def resume_feed(self) -> None:
        """Pass on the transactions that were held back, and all later transactions."""
        self._gate.open()


# ---------------------------------------------------------------------------------------------
# the client's side


class _MemoryClient(AsyncWaltzClient):
    """A client whose feed passes through a gate."""

    def __init__(
        self, server: "MemoryServer", gate: "_Gate", config: ClientConfig, client_id: int | None
    ) -> None:
        outcome_timeout_s = OUTCOME_TIMEOUT_FACTOR * config.request_timeout_ms / 1000
        directory = _MemoryDirectory(server, outcome_timeout_s)
        if client_id is not None:
            directory.take(client_id)
        super().__init__(directory, f"{server.address}/memory", config, client_id=client_id)
        self._gate = gate
        self.ids = ClientIdentitiesInMemory(
            directory, self.links, timeout_s=1.0, fixed_identity=self.ids.current
        )

    async def subscribe_consumer(self, consumer: Consumer, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - passed on
        """Apply the feed to a consumer, except while feeds are suspended."""
        await super().subscribe_consumer(_GatedConsumer(consumer, self._gate), *args, **kwargs)


class _MemoryDirectory:
    """A `client.directory.Directory` in which this process owns all partitions."""

    def __init__(self, server: "MemoryServer", outcome_timeout_s: float) -> None:
        self._server = server
        self._outcome_timeout_s = outcome_timeout_s
        self.cluster = ClusterInfo("memory", server.key, server.partition_count)
        owner = Owner(server.address, GENERATION)
        self.owners: Mapping[PartitionId, Owner] = dict.fromkeys(server.hosts, owner)

    async def open(self, on_change: OwnersChanged) -> None:
        """Do nothing: owners never change."""

    async def run(self) -> None:
        """Return at once: owners never change."""

    async def owner(self, partition_id: PartitionId, *, after_failure: bool) -> Owner:
        """Return the server of this process, which owns all partitions."""
        return self.owners[partition_id]

    async def read_current_owner(self, partition_id: PartitionId) -> Owner:
        """Return the server of this process, which owns all partitions."""
        return self.owners[partition_id]

    def mark_suspect(self) -> None:
        """Do nothing: partitions never move."""

    async def groups(self, storages: Collection[str]) -> Mapping[str, int]:
        """Return group 0 for each of `storages`; there are no storages in memory."""
        return dict.fromkeys(storages, 0)

    async def next_client_id(self) -> int:
        """Allocate a client ID that was never used before."""
        client_id = next(self._server.client_ids)
        self.take(client_id)
        return client_id

    def take(self, client_id: int) -> None:
        """Store how long this client stays disconnected if an append has no outcome."""
        self._server.outcome_timeout_s[client_id] = self._outcome_timeout_s

    async def close(self) -> None:
        """Do nothing: this directory has no connection."""


class _Gate:
    """A gate at which suspended feeds wait; the feeds may run on several event loops."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_open = True
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def wait_open(self, is_running: Callable[[], bool]) -> bool:
        """Wait until the gate is open; return False if the waiting feed ends earlier."""
        while is_running():
            with self._lock:
                if self._is_open:
                    return True
                event = asyncio.Event()
                self._waiting.append((asyncio.get_running_loop(), event))
            with contextlib.suppress(TimeoutError):
                # The timeout is needed because the end of a feed does not wake up this wait.
                async with asyncio.timeout(POLL_INTERVAL_S):
                    await event.wait()
        return False

    @property
    def is_open(self) -> bool:
        """Whether feeds may pass the gate."""
        return self._is_open

    def close(self) -> None:
        """Close the gate: all feeds wait."""
        with self._lock:
            self._is_open = False

    def open(self) -> None:
        """Open the gate: all feeds continue."""
        with self._lock:
            self._is_open = True
            waiting, self._waiting = self._waiting, []
        for loop, event in waiting:
            with contextlib.suppress(RuntimeError):  # that client was closed meanwhile
                loop.call_soon_threadsafe(event.set)


class _GatedConsumer:
    """Passes transactions on while the gate is open (rule 4)."""

    def __init__(self, consumer: Consumer, gate: _Gate) -> None:
        self._gate = gate
        self._consumer = consumer
        self.is_batched = consumer.is_batched
        self.start_mark = consumer.start_mark
        self.on_uncaught_exception = consumer.on_uncaught_exception

    async def apply(
        self,
        partition_id: PartitionId,
        run: DeliveryRun,
        last: TransactionId,
        is_running: Callable[[], bool],
    ) -> DeliveryProgress:
        if not await self._gate.wait_open(is_running):
            return DeliveryProgress(0, None)
        gate = self._gate
        return await self._consumer.apply(
            partition_id, run, last, lambda: gate.is_open and is_running()
        )
