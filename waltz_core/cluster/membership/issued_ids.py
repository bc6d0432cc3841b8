"""The client IDs that servers issue, counted in `R/x/client` from `FIRST_ISSUED` on (AC 9).

Rules:
    1. An ID is issued once. Those that a write with unknown outcome may have allocated are skipped.
    2. Requests of one process that wait at the same time share a write, so that a client that asks
       for many IDs causes few writes.
"""

import asyncio
from collections import deque
from contextlib import suppress
from typing import Final

from waltz_core import errors
from waltz_core.access.client_ids import FIRST_ISSUED
from waltz_core.cluster.znodes import model
from waltz_core.cluster.znodes.interface import CreateNode, Operation, Set
from waltz_core.cluster.znodes.node_access import ClusterNodes, decode_node
from waltz_core.records.record import ClientId

ATTEMPTS_MAX: Final = 1_000
NONE_ISSUED: Final = ClientId(FIRST_ISSUED - 1)


class IssuedIds:
    """The counter, through one session."""

    def __init__(self, nodes: ClusterNodes) -> None:
        self._nodes = nodes
        self._lock = asyncio.Lock()
        self._waiting = 0
        self._allocated: deque[int] = deque()

    async def next(self) -> ClientId:
        """Allocate an ID that was never used before."""
        self._waiting += 1
        try:
            async with self._lock:
                if not self._allocated:
                    self._allocated.extend(await self._allocate(self._waiting))
                return ClientId(self._allocated.popleft())
        finally:
            self._waiting -= 1

    async def last(self) -> ClientId:
        """Return the last allocated ID."""
        await self._nodes.znodes.sync()
        return ClientId((await self._read())[0])

    async def raise_to(self, client_id: ClientId) -> None:
        """Allocate no ID up to `client_id` from now on."""
        for _ in range(ATTEMPTS_MAX):
            last, version = await self._read()
            if last >= client_id:
                return
            with suppress(errors.CoordinatorConflict, errors.CoordinatorOutcomeUnknown):
                await self._write(client_id, version)
        raise self._contended()

    async def _allocate(self, count: int) -> range:
        for _ in range(ATTEMPTS_MAX):
            last, version = await self._read()
            end = min(last + count, model.INT32_MAX)
            if end == last:
                raise errors.BadFormat(f"{self._path}: all IDs up to {last} are allocated")
            try:
                await self._write(end, version)
            except (errors.CoordinatorConflict, errors.CoordinatorOutcomeUnknown):
                continue  # rule 1
            return range(last + 1, end + 1)
        raise self._contended()

    @property
    def _path(self) -> str:
        return self._nodes.paths.issued_client_ids

    async def _read(self) -> tuple[int, int | None]:
        """Return the last allocated ID and the node's version; None: there is no node yet."""
        node = await self._nodes.znodes.get(self._path)
        if node is None:
            return NONE_ISSUED, None
        last = decode_node(self._path, node, model.decode_id)
        if last < NONE_ISSUED:
            raise errors.BadFormat(f"{self._path}: expected {NONE_ISSUED} or more, found {last}")
        return last, node.stat.version

    async def _write(self, last: int, version: int | None) -> None:
        data = model.encode_id(last)
        step: Operation = CreateNode(self._path, data)
        if version is None:
            await self._nodes.ensure((self._nodes.paths.extensions,))
        else:
            step = Set(self._path, data, version)
        await self._nodes.znodes.write([step])

    def _contended(self) -> errors.CoordinatorUnavailable:
        return errors.CoordinatorUnavailable(
            f"{self._path} was changed by others in {ATTEMPTS_MAX} attempts"
        )
