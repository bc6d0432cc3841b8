"""Repeats the steps of a daemon's start while ZooKeeper does not answer, and logs the reason.

Servers and storages use this module. After the start, they wait for ZooKeeper without a limit
(`node_access.py`, `follow`).

Rules:
    1. If ZooKeeper does not answer a step, the step is repeated until
       `zookeeper_connect_timeout_ms` after its first failure. A permanent error, such as a missing
       cluster or permission, ends the start at once.
    2. While a step waits, the daemon logs `zookeeper.waiting` every `LOG_INTERVAL_S` seconds.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Final, TypeVar

from waltz_core.cluster.coordinator import Coordinator
from waltz_core.cluster.zookeeper import zookeeper_session
from waltz_core.config.declarations import ServerConfig, StorageConfig
from waltz_core.errors import Unavailable

_log = logging.getLogger(__name__)

LOG_INTERVAL_S: Final = 3.0
RETRY_S: Final = 0.2
ResultT = TypeVar("ResultT")


@contextlib.asynccontextmanager
async def connect_daemon(config: ServerConfig | StorageConfig) -> AsyncIterator[Coordinator]:
    """Connect with a daemon's settings, and close the session at the end of the block.

    Raises like `zookeeper_session.connect`.
    """
    async with contextlib.AsyncExitStack() as stack:
        session = zookeeper_session.open_session(
            config.connect,
            connect_timeout_ms=config.zookeeper_connect_timeout_ms,
            session_timeout_ms=config.zookeeper_session_timeout_ms,
            request_timeout_ms=config.zookeeper_request_timeout_ms,
        )
        with _log_while_waiting("a connection", [""]):
            coordinator = await stack.enter_async_context(session)
        yield coordinator


async def retry_start_step(
    what: str, step: Callable[[], Awaitable[ResultT]], *, timeout_ms: int
) -> ResultT:
    """Run a step of the start, and repeat it if necessary (rules 1 and 2); return its result.

    Raises Unavailable if ZooKeeper does not answer until `timeout_ms` after the first failure.
    """
    last_error, deadline_s, clock_s = [""], None, asyncio.get_running_loop().time
    with _log_while_waiting(what, last_error):
        while True:
            try:
                return await step()
            except Unavailable as error:
                if deadline_s is None:
                    deadline_s = clock_s() + timeout_ms / 1000
                if clock_s() >= deadline_s:
                    raise
                if not last_error[0]:
                    _log.warning("zookeeper.waiting for=%r error=%s", what, error)
                last_error[0] = str(error)
            await asyncio.sleep(RETRY_S)


@contextlib.contextmanager
def _log_while_waiting(what: str, last_error: list[str]) -> Iterator[None]:
    """Log every `LOG_INTERVAL_S` that the block still waits, with the error in `last_error[0]`."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def log_waiting() -> None:
        nonlocal timer
        _log.warning("zookeeper.waiting for=%r error=%s", what, last_error[0] or "no answer yet")
        timer = loop.call_later(LOG_INTERVAL_S, log_waiting)

    timer = loop.call_later(LOG_INTERVAL_S, log_waiting)
    try:
        yield
    finally:
        timer.cancel()
