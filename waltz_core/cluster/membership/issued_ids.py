"""Allocates the client IDs that servers issue (decision 048, AC 9).

The node `R/x/client` counts the IDs, from `FIRST_ISSUED_ID` on. No ID is allocated twice: if the
outcome of a write is unknown, the IDs of this write are skipped.
"""

from contextlib import suppress
from typing import Final

from waltz_core import errors
from waltz_core.access.client_ids import BEFORE_FIRST_ISSUED_ID
from waltz_core.cluster.znodes import model
from waltz_core.cluster.znodes.interface import CreateNode, Operation, SetNode
from waltz_core.cluster.znodes.node_access import ClusterNodes, decode_node
from waltz_core.records.record import ClientId

ATTEMPTS_MAX: Final = 1_000


class IssuedIds:
    """The counter of issued client IDs, through one session."""

    def __init__(self, nodes: ClusterNodes) -> None:
        self._nodes = nodes

    async def read_last_id(self) -> ClientId:
        """Return the last allocated client ID."""
        await self._nodes.znodes.sync()
        return ClientId((await self._read())[0])

    async def increase_to(self, client_id: ClientId) -> None:
        """Raise the counter, so that no ID up to `client_id` is allocated from now on."""
        for _ in range(ATTEMPTS_MAX):
            last, version = await self._read()
            if last >= client_id:
                return
            with suppress(errors.CoordinatorConflict, errors.CoordinatorOutcomeUnknown):
                await self._write(client_id, version)
        raise self._contention_error()

    async def allocate_id(self) -> ClientId:
        """Allocate a client ID that was never used before."""
        return ClientId((await self.allocate_ids(1))[0])

    async def allocate_ids(self, count: int) -> range:
        """Allocate up to `count` client IDs, at least one, that were never used before.

        Raises BadFormat if all IDs are allocated.
        """
        for _ in range(ATTEMPTS_MAX):
            last, version = await self._read()
            end = min(last + count, model.INT32_MAX)
            if end == last:
                raise errors.BadFormat(
                    f"cannot issue a client ID from {self._path}: all IDs up to {last} are issued"
                )
            try:
                await self._write(end, version)
            except (errors.CoordinatorConflict, errors.CoordinatorOutcomeUnknown):
                continue
            return range(last + 1, end + 1)
        raise self._contention_error()

    @property
    def _path(self) -> str:
        return self._nodes.paths.issued_client_ids

    async def _read(self) -> tuple[int, int | None]:
        """Return the last allocated ID, and the node's version (None if there is no node yet)."""
        node = await self._nodes.znodes.get(self._path)
        if node is None:
            return BEFORE_FIRST_ISSUED_ID, None
        last = decode_node(self._path, node, model.decode_id_counter)
        if last < BEFORE_FIRST_ISSUED_ID:
            raise errors.BadFormat(
                f"{self._path}: expected at least {BEFORE_FIRST_ISSUED_ID}, found {last}"
            )
        return last, node.stat.version

    async def _write(self, last: int, version: int | None) -> None:
        data = model.encode_id_counter(last)
        step: Operation = CreateNode(self._path, data)
        if version is None:
            await self._nodes.create_missing((self._nodes.paths.extensions,))
        else:
            step = SetNode(self._path, data, version)
        await self._nodes.znodes.write([step])

    def _contention_error(self) -> errors.CoordinatorUnavailable:
        return errors.CoordinatorUnavailable(
            f"cannot issue client IDs from {self._path}: other processes changed it during "
            f"each of {ATTEMPTS_MAX} attempts"
        )
