"""A Waltz in this process, for the tests of applications: `MemoryWaltz`, with faults on request.

    with MemoryWaltz(partition_count=2) as waltz, waltz.client() as client:
        waltz.refuse_next(1)
        transaction_id = client.submit(Transfer(...)).result()

It is the one place where client and server meet other than by the wire's messages. Nothing here is
a second Waltz: the clients are `WaltzClient` and `AsyncWaltzClient`, the partitions are the
server's machines, and they speak over a real connection to this process. What is not there is what
lies below and beside: replicas, disks, ZooKeeper (decision 009).

Rules:
    1. A knob changes what happens to messages, never what a machine decides: whatever a test sees,
       a cluster may show it as well.
    2. Everything drawn comes from the seed, in the order in which messages arrive.
    3. Knobs may be turned from any thread; they hold for what arrives afterwards.
    4. A suspended feed holds back what was committed; what is being applied is finished, a batch as
       well as a transaction.
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
from waltz_core.client.api.opening import Opening
from waltz_core.client.api.sync_client import WaltzClient
from waltz_core.client.links.directory import Changed, ClusterInfo, Owner
from waltz_core.client.read.feed_delivery import Consumer, DeliveryProgress, DeliveryRun
from waltz_core.client.stream.verdicts import reason_of
from waltz_core.config.declarations import ClientConfig
from waltz_core.records.record import PartitionId, TransactionId
from waltz_core.server.process.in_process import GENERATION, Failures, Faults, MemoryServer
from waltz_core.server.process.log_in_memory import StoredTransaction
from waltz_core.transport import net

# What clients are given unless a test says otherwise: a process waits for nobody long.
QUICK: Final = ClientConfig(
    request_timeout_ms=5_000, retry_interval_ms_min=1, retry_interval_ms_max=50
)
KEY: Final = b"Waltz in memory."
assert len(KEY) == 16
# How often a suspended feed looks whether it has ended.
LOOK_S: Final = 0.05


class MemoryWaltz:
    """A log of some partitions in this process, and any number of clients of it.

    `delay_ms` is how long answers take: a number, or a least and a most of which each one draws its
    own. `fault_rate` is how often (0.0 to 1.0) an append or its answer is lost with its connection;
    clients mend that by themselves, and tell each outcome once, as they do with a cluster.
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
            raise errors.BadRequest(f"expected at least one partition, found {partition_count}")
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
                server = MemoryServer(KEY, partition_count, self._faults, group)
                await server.start()
                ready.set_result(server)
                await self._stop.wait()
                await server.stop()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)
            raise

    def close(self) -> None:
        """End its clients and itself; may be called twice. Raises what has failed in it."""
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

    # --- who uses it

    def client(
        self, config: ClientConfig | None = None, *, client_id: int | None = None
    ) -> WaltzClient:
        """Open a client, as `WaltzClient(connect, config)` does of a cluster."""
        client = WaltzClient.over(lambda: self.async_client(config, client_id=client_id))
        self._clients.append(client)
        return client

    def async_client(
        self, config: ClientConfig | None = None, *, client_id: int | None = None
    ) -> Opening[AsyncWaltzClient]:
        """Open a client for asyncio; to be awaited, or used as `async with`."""
        # One request for each append, so that knobs can count them.
        settings = replace(config or QUICK, batch_rows_max=1)
        return Opening(_MemoryClient(self._server, self._gate, settings, client_id))

    @property
    def partition_count(self) -> int:
        return self._server.partition_count

    def transactions(self, partition: int) -> list[StoredTransaction]:
        """Return everything that a partition's log holds; after `close` as well."""
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
        """How long answers take from now on."""
        return self._faults.delay_ms

    @delay_ms.setter
    def delay_ms(self, delay_ms: float | tuple[float, float]) -> None:
        low, high = delay_ms if isinstance(delay_ms, tuple) else (delay_ms, delay_ms)
        if not 0 <= low <= high:
            raise errors.BadRequest(f"delay: expected 0 <= least <= most, found {delay_ms}")
        self._faults.delay_ms = low, high

    @property
    def fault_rate(self) -> float:
        """How often an append or its answer is lost from now on."""
        return self._faults.rate

    @fault_rate.setter
    def fault_rate(self, rate: float) -> None:
        if not 0.0 <= rate <= 1.0:
            raise errors.BadRequest(f"fault rate: expected 0.0 to 1.0, found {rate}")
        self._faults.rate = rate

    @property
    def fault_count(self) -> int:
        """How many appends or answers the fault rate has lost until now."""
        return self._faults.count

    def refuse_next(self, count: int = 1) -> None:
        """Refuse the next appends that check a lock, as if somebody had just been faster.

        Nobody was: a lock table that errs, which it may to the safe side, does the same. 0 for no
        more; what `append_batch` sends is not counted.
        """
        self._faults.refusals = count

    def fail_next_append(
        self, count: int, error: errors.WaltzError, *, enters_log: bool | None = None
    ) -> None:
        """Fail the next `count` appends with an error, whoever makes them; 0 for no more.

        With `OutcomeUnknown` the append is lost, or its answer (`enters_log` says which; drawn if
        not), and its client cannot find out which before its `request_timeout_ms` is over. With any
        other error it is not in the log. What clients mend by sending it again (`Overloaded`,
        `NoSpace`, `SessionLost`) they mend here too: the application hears of it when it has gone
        on for `request_timeout_ms`. Raises BadRequest for an error that no append ends in.
        """
        is_told = isinstance(error, errors.UsageError | errors.OutcomeUnknown)
        if not is_told and reason_of(error) is None:
            raise errors.BadRequest(f"no append ends in {type(error).__name__}")
        self._faults.failures = Failures(count, error, enters_log)

    def suspend_feed(self) -> None:
        """Hand nothing to any callbacks until `resume_feed` (rule 4); appends go on."""
        self._gate.close()

    def resume_feed(self) -> None:
        """Hand over what has waited, and what comes."""
        self._gate.open()


# ---------------------------------------------------------------------------------------------
# the client's side


class _MemoryClient(AsyncWaltzClient):
    """The client, but that its feed goes through a gate."""

    def __init__(
        self, server: "MemoryServer", gate: "_Gate", config: ClientConfig, client_id: int | None
    ) -> None:
        directory = _MemoryDirectory(server, config.request_timeout_ms / 1000)
        if client_id is not None:
            directory.take(client_id)
        super().__init__(directory, f"{server.address}/memory", config, client_id=client_id)
        self._gate = gate

    async def subscribe_consumer(self, consumer: Consumer, *rest: Any, **named: Any) -> None:  # noqa: ANN401 - handed on
        """Apply the feed to any consumer, while it is not suspended."""
        await super().subscribe_consumer(_GatedConsumer(consumer, self._gate), *rest, **named)


class _MemoryDirectory:
    """Where the partitions are: here (`client.directory.Directory`)."""

    def __init__(self, server: "MemoryServer", patience_s: float) -> None:
        self._server = server
        self._patience_s = patience_s
        self.cluster = ClusterInfo("memory", server.key, server.partition_count)
        owner = Owner(server.address, GENERATION)
        self.owners: Mapping[PartitionId, Owner] = dict.fromkeys(server.hosts, owner)

    async def open(self, changed: Changed) -> None:
        """Nothing will change."""

    async def run(self) -> None:
        """Nothing is watched."""

    async def owner(self, partition_id: PartitionId, *, after_failure: bool) -> Owner:
        """Return the partition's server."""
        return self.owners[partition_id]

    async def owner_now(self, partition_id: PartitionId) -> Owner:
        """Return the partition's server."""
        return self.owners[partition_id]

    def doubt(self) -> None:
        """Nothing moves."""

    async def groups(self, storages: Collection[str]) -> Mapping[str, int]:
        """There are no storages, and no groups."""
        return dict.fromkeys(storages, 0)

    async def next_client_id(self) -> int:
        """Take a client id that nobody had before."""
        client_id = next(self._server.client_ids)
        self.take(client_id)
        return client_id

    def take(self, client_id: int) -> None:
        """Remember how long a client waits for an outcome."""
        self._server.patience_s[client_id] = self._patience_s

    async def close(self) -> None:
        """Nothing is held."""


class _Gate:
    """What a suspended feed waits at, on whatever event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_open = True
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def passed(self, goes_on: Callable[[], bool]) -> bool:
        """Wait until it is open; False when the feed that wants through has ended before."""
        while goes_on():
            with self._lock:
                if self._is_open:
                    return True
                event = asyncio.Event()
                self._waiting.append((asyncio.get_running_loop(), event))
            with contextlib.suppress(TimeoutError):
                # A feed that ends tells nobody here.
                async with asyncio.timeout(LOOK_S):
                    await event.wait()
        return False

    @property
    def is_open(self) -> bool:
        """Whether everybody is let through."""
        return self._is_open

    def close(self) -> None:
        """Let nobody through."""
        with self._lock:
            self._is_open = False

    def open(self) -> None:
        """Let everybody through."""
        with self._lock:
            self._is_open = True
            waiting, self._waiting = self._waiting, []
        for loop, event in waiting:
            with contextlib.suppress(RuntimeError):  # that client was closed meanwhile
                loop.call_soon_threadsafe(event.set)


class _GatedConsumer:
    """Hands transactions on while the gate is open (rule 4)."""

    def __init__(self, consumer: Consumer, gate: _Gate) -> None:
        self._gate = gate
        self._consumer = consumer
        self.is_batched = consumer.is_batched
        self.start_mark = consumer.start_mark
        self.uncaught = consumer.uncaught

    async def apply(
        self,
        partition_id: PartitionId,
        run: DeliveryRun,
        last: TransactionId,
        goes_on: Callable[[], bool],
    ) -> DeliveryProgress:
        if not await self._gate.passed(goes_on):
            return DeliveryProgress(0, None)
        gate = self._gate
        return await self._consumer.apply(
            partition_id, run, last, lambda: gate.is_open and goes_on()
        )
