"""The owners of partitions for all clients of one process, through one session with ZooKeeper.

A gateway has a client for each caller, for each feed, and for a moment for each idempotency key.
With a session for each of them it would load ZooKeeper, and each would take the time of a connect.
"""

import asyncio
import logging
from collections.abc import Collection, Mapping
from typing import Final

from waltz_core import errors
from waltz_core.client.links.directory import ClusterInfo, Owner, OwnersChanged, ZooKeeperDirectory
from waltz_core.config.declarations import ClientConfig
from waltz_core.records.record import PartitionId

_log = logging.getLogger(__name__)

RETRY_S: Final = 2.0


class SharedDirectory:
    """The one directory; `view` returns what a client gets."""

    def __init__(self, connect: str, config: ClientConfig) -> None:
        self._directory = ZooKeeperDirectory.from_config(connect, config)
        self._listeners: dict[DirectoryView, OwnersChanged] = {}

    async def open(self) -> None:
        """Connect and read the cluster; raises like `ZooKeeperDirectory.open`."""
        await self._directory.open(self._changed)

    async def follow(self) -> None:
        """Follow the assignment until cancelled."""
        while True:
            try:
                await self._directory.run()
            except errors.WaltzError as error:
                _log.warning("client.assignment_watch_failed error=%s", error)
                await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        """End the session."""
        await self._directory.close()

    def view(self) -> "DirectoryView":
        """Return the directory of one client."""
        return DirectoryView(self)

    @property
    def directory(self) -> ZooKeeperDirectory:
        """The directory that all views use."""
        return self._directory

    def listen(self, view: "DirectoryView", changed: OwnersChanged) -> None:
        """Call `changed` after each change, until `forget`."""
        self._listeners[view] = changed

    def forget(self, view: "DirectoryView") -> None:
        """Stop calling a view's `changed`."""
        self._listeners.pop(view, None)

    def _changed(self, owners: Mapping[PartitionId, Owner]) -> None:
        for changed in list(self._listeners.values()):
            changed(owners)


class DirectoryView:
    """A `Directory` of one client; opening and closing it costs nothing."""

    def __init__(self, shared: SharedDirectory) -> None:
        self._shared = shared

    @property
    def cluster(self) -> ClusterInfo:
        """The cluster."""
        return self._shared.directory.cluster

    @property
    def owners(self) -> Mapping[PartitionId, Owner]:
        """The known owners."""
        return self._shared.directory.owners

    async def open(self, changed: OwnersChanged) -> None:
        """Begin to report changes."""
        self._shared.listen(self, changed)

    async def run(self) -> None:
        """Wait until cancelled: the shared directory follows the changes."""
        await asyncio.Event().wait()

    async def owner(self, partition_id: PartitionId, *, after_failure: bool) -> Owner:
        """Return the partition's server; raises NotOwned while there is none."""
        return await self._shared.directory.owner(partition_id, after_failure=after_failure)

    async def owner_now(self, partition_id: PartitionId) -> Owner:
        """Return the owner in ZooKeeper, read after this call began."""
        return await self._shared.directory.owner_now(partition_id)

    def mark_suspect(self) -> None:
        """Do nothing: the watch reports every move."""

    async def groups(self, storages: Collection[str]) -> Mapping[str, int]:
        """Return the groups of storages."""
        return await self._shared.directory.groups(storages)

    async def next_client_id(self) -> int:
        """Allocate a client ID that was never used before."""
        return await self._shared.directory.next_client_id()

    async def close(self) -> None:
        """Stop reporting changes."""
        self._shared.forget(self)
