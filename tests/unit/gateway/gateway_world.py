"""Gateways in the process of a test, with a server and a registry of writes in memory."""

import asyncio
import contextlib
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from random import Random
from typing import Any
from unittest.mock import patch

from tests.gateway_process import GatewayAnswer, GatewayClient
from tests.time_limits import TEST_TIMEOUT_S
from tests.unit.cluster.test_coordinator import with_cluster
from waltz_core.access.client_ids import FIRST_ISSUED_ID
from waltz_core.cluster.coordinator import Coordinator
from waltz_core.config.declarations import ClientConfig, GatewayConfig
from waltz_core.gateway.callers import Callers
from waltz_core.gateway.http_routes import GatewayParts, GatewayRoutes
from waltz_core.memory_waltz import _MemoryDirectory
from waltz_core.metrics import Metrics
from waltz_core.server.process import server_in_memory
from waltz_core.server.process.registry_requests import RegistryRequests
from waltz_core.server.process.server_in_memory import Faults, MemoryServer
from waltz_core.transport import net
from waltz_core.transport.http_port import serve_http
from waltz_core.transport.listening import listen
from waltz_core.transport.tls import ListenContext

KEY = b"Waltz in memory."
PARTITION_COUNT = 4
CONNECT = "memory:2181/waltz/test"


class MemoryGateway:
    """One gateway with its port and components."""

    def __init__(self, world: "GatewayWorld", settings: dict[str, Any]) -> None:
        self.config = GatewayConfig(connect=world.connect, **settings)
        client_config = ClientConfig(
            connect=world.connect,
            request_timeout_ms=self.config.request_timeout_ms,
            tls=self.config.tls,
            tls_certificate=self.config.tls_certificate,
            tls_key=self.config.tls_key,
            retry_interval_ms_min=1,
            retry_interval_ms_max=50,
        )
        self.callers = Callers(world.connect, client_config, world)
        self.metrics = Metrics("gateway")
        self.routes = GatewayRoutes(
            GatewayParts(
                self.config,
                client_config,
                self.callers,
                self.metrics,
                world.tasks,
                coordinator=lambda: world.coordinator,
            )
        )
        self.url = ""

    @contextlib.asynccontextmanager
    async def client(self, token: str | None = None) -> AsyncIterator["TestCaller"]:
        caller = TestCaller(self.url, token)
        try:
            yield caller
        finally:
            caller.close()


class TestCaller:
    """A `GatewayClient` on a thread."""

    __test__ = False

    def __init__(self, url: str, token: str | None) -> None:
        self._client = GatewayClient(url, token=token)

    async def get(self, path: str, **headers: str) -> GatewayAnswer:
        return await asyncio.to_thread(self._client.get, path, **headers)

    async def append(self, *transactions: dict[str, Any], key: str | None = None) -> GatewayAnswer:
        return await asyncio.to_thread(lambda: self._client.append(*transactions, key=key))

    async def post(self, body: bytes) -> GatewayAnswer:
        return await asyncio.to_thread(self._client.post, body)

    def exchange(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> GatewayAnswer:
        """Send any request; call it on a thread."""
        return self._client.exchange(method, path, body, headers)

    async def read_feed(self, path: str, line_count: int, **headers: str) -> list[bytes]:
        """Return the first lines of a feed, without empty ones; the connection is closed."""

        def read() -> list[bytes]:
            response = self._client.response("GET", path, **headers)
            assert response.status == 200, response.read()
            lines: list[bytes] = []
            while len(lines) < line_count:
                line = response.readline()
                assert line, lines
                lines += [line.strip()] if line.strip() else []
            self._client.close()
            return lines

        return await asyncio.to_thread(read)

    async def read_feed_until_its_end(
        self, path: str, after_first: Callable[[], None], **headers: str
    ) -> list[bytes]:
        """Return all lines of a feed; call `after_first` after the first transaction."""
        loop = asyncio.get_running_loop()

        def read() -> list[bytes]:
            response = self._client.response("GET", path, **headers)
            lines = [response.readline()]
            while b"transaction_id" not in lines[-1]:
                assert lines[-1]
                lines.append(response.readline())
            loop.call_soon_threadsafe(after_first)
            return [*lines, *response]

        return await asyncio.to_thread(read)

    def close(self) -> None:
        self._client.close()


class GatewayWorld:
    """A server in memory, which is the `SharedDirectory` of the gateways."""

    def __init__(
        self,
        server: MemoryServer,
        connect: str,
        tasks: asyncio.TaskGroup,
        coordinator: Coordinator,
    ) -> None:
        self.server = server
        self.coordinator = coordinator
        self.tasks = tasks
        self.connect = connect

    def view(self) -> _MemoryDirectory:
        return _MemoryDirectory(self.server, 1.0)

    def log(self, partition: int) -> list[bytes]:
        """Return the data of all transactions of a partition."""
        store = self.server.hosts[partition].store
        return [transaction.data for transaction in store.log.transactions()]

    def transaction_count(self) -> int:
        """Return the number of transactions in all partitions."""
        return sum(len(self.log(partition)) for partition in range(PARTITION_COUNT))

    @contextlib.asynccontextmanager
    async def gateway(self, **settings: Any) -> AsyncIterator[MemoryGateway]:
        memory_gateway = MemoryGateway(self, settings)
        served = serve_http(
            memory_gateway.routes.asgi_app(),
            host="127.0.0.1",
            port=0,
            keep_alive_connections_max=32,
        )
        try:
            async with served as port:
                memory_gateway.url = f"http://127.0.0.1:{port}"
                yield memory_gateway
        finally:
            await memory_gateway.callers.close()


def in_gateway_world(
    scenario: Callable[[GatewayWorld], Awaitable[None]],
    *,
    fault_rate: float = 0.0,
    authorities: str = "",
    context: ListenContext | None = None,
) -> None:
    """Run a scenario with a world; with a `context`, the server uses it."""

    async def main() -> None:
        async with asyncio.timeout(TEST_TIMEOUT_S), asyncio.TaskGroup() as tasks:
            faults = Faults(Random(1))
            faults.loss_rate = fault_rate
            server = MemoryServer(KEY, PARTITION_COUNT, faults, tasks)
            server.outcome_timeout_s = defaultdict(lambda: 0.05)
            server.client_ids = itertools.count(FIRST_ISSUED_ID)
            _, _, coordinator = await with_cluster()
            server.registry = RegistryRequests(
                coordinator.writes, server.next_client_id, PARTITION_COUNT, tasks
            )
            with patch.object(server_in_memory, "listen", partial(listen, ssl=context)):
                await server.start()
            try:
                connect_string = f"{CONNECT}?tls={authorities}" if authorities else CONNECT
                await scenario(GatewayWorld(server, connect_string, tasks, coordinator))
            finally:
                await server.stop()

    net.run(main())
