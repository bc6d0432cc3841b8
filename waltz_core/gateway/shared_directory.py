"""Gives all clients of a process the owners of partitions, through one session with ZooKeeper.

A gateway has a client for each caller and for each feed, and a short-lived client for each request
with an idempotency key. If each client had a session with ZooKeeper, the load on ZooKeeper would be
high, and each client would have to wait until its session is open.
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

RETRY_INTERVAL_S: Final = 2.0


class SharedDirectory:
    """Reads the owners of partitions once for all clients; each client uses a `DirectoryView`."""

    def __init__(self, connect: str, config: ClientConfig) -> None:
        self._directory = ZooKeeperDirectory.from_config(connect, config)
        self._listeners: dict[DirectoryView, OwnersChanged] = {}

    async def open(self) -> None:
        """Connect and read the cluster; raises like `ZooKeeperDirectory.open`."""
        await self._directory.open(self._on_owners_changed)

    async def watch_assignment(self) -> None:
        """Watch the assignment of partitions in ZooKeeper until cancelled."""
        while True:
            try:
                await self._directory.run()
            except errors.WaltzError as error:
                _log.warning("client.assignment_watch_failed error=%s", error)
                await asyncio.sleep(RETRY_INTERVAL_S)

    async def close(self) -> None:
        """End the session with ZooKeeper."""
        await self._directory.close()

    def view(self) -> "DirectoryView":
        """Return a directory for one client."""
        return DirectoryView(self)

    @property
    def directory(self) -> ZooKeeperDirectory:
        """The directory that all views use."""
        return self._directory

    def add_listener(self, view: "DirectoryView", on_change: OwnersChanged) -> None:
        """Call `on_change` after each change of owners, until `remove_listener`."""
        self._listeners[view] = on_change

    def remove_listener(self, view: "DirectoryView") -> None:
        """Stop reporting changes of owners to a view."""
        self._listeners.pop(view, None)

    def _on_owners_changed(self, owners: Mapping[PartitionId, Owner]) -> None:
        for on_change in list(self._listeners.values()):
            on_change(owners)


class DirectoryView:
    """The directory of one client; it uses the session of the `SharedDirectory`."""

    def __init__(self, shared: SharedDirectory) -> None:
        self._shared = shared

    @property
    def cluster(self) -> ClusterInfo:
        """The constants of the cluster: name, cluster key, number of partitions."""
        return self._shared.directory.cluster

    @property
    def owners(self) -> Mapping[PartitionId, Owner]:
        """The last known owner of each partition."""
        return self._shared.directory.owners

    async def open(self, on_change: OwnersChanged) -> None:
        """Call `on_change` after each change of owners, until `close`."""
        self._shared.add_listener(self, on_change)

    async def run(self) -> None:
        """Wait until cancelled: the shared directory watches the assignment."""
        await asyncio.Event().wait()

    async def owner(self, partition_id: PartitionId, *, after_failure: bool) -> Owner:
        """Return the partition's server; raises NotOwned while there is none."""
        return await self._shared.directory.owner(partition_id, after_failure=after_failure)

    async def read_current_owner(self, partition_id: PartitionId) -> Owner:
        """Return the owner in ZooKeeper, read after this call began."""
        return await self._shared.directory.read_current_owner(partition_id)

    def mark_suspect(self) -> None:
        """Do nothing: the shared directory's watch reports every change of owner."""

    async def groups(self, storages: Collection[str]) -> Mapping[str, int]:
        """Return the groups of storages."""
        return await self._shared.directory.groups(storages)

    async def next_client_id(self) -> int:
        """Allocate a client ID that was never used before."""
        return await self._shared.directory.next_client_id()

    async def close(self) -> None:
        """Stop reporting changes."""
        self._shared.remove_listener(self)
