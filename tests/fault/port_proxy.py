"""A proxy in front of a port: while it is closed, it rejects and closes connections."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Self

from tests.ports import free_port, stop_listening
from tests.time_limits import TEST_TIMEOUT_S


class PortProxy:
    """Listens at its own port, and forwards bytes to and from the port behind it."""

    def __init__(
        self, target_port: Callable[[], int], *, host: str = "127.0.0.1", port: int | None = None
    ) -> None:
        self._target_port = target_port
        self._host = host
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gate")
        self._server: asyncio.Server | None = None
        self._forwarding_tasks: set[asyncio.Task[None]] = set()
        # While this event is not set, the proxy forwards no bytes, and keeps its connections.
        self._is_forwarding = asyncio.Event()
        self._is_forwarding.set()
        self._answers_left = -1
        self.port = free_port() if port is None else port

    def __enter__(self) -> Self:
        self._thread.start()
        self.open()
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def open(self) -> None:
        """Let all connections through."""
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(TEST_TIMEOUT_S)

    def close(self) -> None:
        """Close every connection, and reject new ones."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(TEST_TIMEOUT_S)

    def stall(self, *, after_answers: int) -> None:
        """Forward the given number of answers, and then no bytes until `resume`."""
        self._answers_left = after_answers

    def resume(self) -> None:
        """Forward everything again."""
        self._answers_left = -1
        self._loop.call_soon_threadsafe(self._is_forwarding.set)

    async def _open(self) -> None:
        self._server = await asyncio.start_server(self._accept, self._host, self.port)

    async def _close(self) -> None:
        assert self._server is not None
        await stop_listening(self._server)
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in self._forwarding_tasks:
                task.cancel()
            await asyncio.wait(others)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(self._forward(reader, writer))
        self._forwarding_tasks.add(task)
        task.add_done_callback(self._forwarding_tasks.discard)
        # A task that is cancelled before its first step never runs its `finally` block.
        task.add_done_callback(lambda _: writer.transport.abort())

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            target_reader, target_writer = await asyncio.open_connection(
                self._host, self._target_port()
            )
            writers.append(target_writer)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._copy(reader, target_writer))
                group.create_task(self._copy(target_reader, writer, counts_answers=True))
        except OSError:
            return
        finally:
            for each in writers:
                each.transport.abort()

    async def _copy(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        counts_answers: bool = False,
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                await self._is_forwarding.wait()
                writer.write(data)
                if counts_answers and self._answers_left > 0:
                    self._answers_left -= 1
                    if self._answers_left == 0:
                        self._is_forwarding.clear()
        writer.close()
