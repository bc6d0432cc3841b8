"""The directory of partitions: each partition's owner, with address and generation.

There are two kinds of directories, with the same interface. A service reads ZooKeeper and watches
it. A Spark executor gets the owners from the driver (a *fixed* directory), and reads ZooKeeper only
when these owners may be outdated.

Rules:
    1. Owners are used only if the assignment was written for exactly those servers that are live
       now.
    2. `on_change` is called after each change, on the event loop.
    3. A fixed directory reads ZooKeeper when a known owner has failed or has become suspect, never
       before. From then on it watches ZooKeeper.
    4. Callers with the same query share one answer. If the caller that has sent the query is
       cancelled, one of the waiting callers sends the query again. The ZooKeeper session of a fixed
       directory is independent of callers: it stays open until `close`.
    5. Groups of storages are read once, and again when a storage without a known group appears.
    6. A fixed directory accepts owners from any source, but only newer owners of the same cluster.
       Each change creates a new mapping, because another thread may iterate over the old mapping.
    7. A query after `close` fails and opens no session.
    8. If the cluster's nodes disappear after `open`, an operator may be rebuilding them, so this is
       treated as an outage of ZooKeeper. The owners are used again only when the cluster key proves
       that the cluster is the same.
    9. If a node cannot be decoded after `open`, this is also treated as an outage. So streams and
       feeds continue when the node is repaired.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self, TypeVar

from waltz_core import errors
from waltz_core.cluster.coordinator import Coordinator
from waltz_core.cluster.membership.registration import ServersView
from waltz_core.cluster.znodes.restore_sources import NO_RESTORE_SOURCES, RestoreSources
from waltz_core.cluster.znodes.shared_request import SharedRequest
from waltz_core.cluster.zookeeper import zookeeper_session
from waltz_core.config.connect_string import parse_connect_string
from waltz_core.config.declarations import ClientConfig
from waltz_core.records.record import Generation, PartitionId

T = TypeVar("T")

_CLOSED_TEXT = "the client is closed"


class ClusterInfo(NamedTuple):
    """The constants of a cluster; `restore_sources` are the clusters whose logs it continues."""

    name: str
    key: bytes
    partition_count: int
    restore_sources: RestoreSources = NO_RESTORE_SOURCES


class Owner(NamedTuple):
    """The server that owns one partition: its address, and the generation of its ownership."""

    address: str
    generation: Generation


@dataclass(frozen=True, slots=True)
class ClusterLayout:
    """The known owners as plain values, for processes that do not read ZooKeeper.

    `owners` has the address of the server and the generation, for each partition with an owner.
    """

    connect: str
    cluster: ClusterInfo
    owners: dict[int, tuple[str, int]]

    def for_partition(self, partition: int) -> "ClusterLayout":
        """Return this layout with the owner of only one partition."""
        owners = {partition: self.owners[partition]} if partition in self.owners else {}
        return ClusterLayout(self.connect, self.cluster, owners)


OwnersChanged = Callable[[Mapping[PartitionId, Owner]], None]


class Directory(Protocol):
    """Finds the owners of partitions."""

    @property
    def cluster(self) -> ClusterInfo:
        """The constants of the cluster; known once `open` has returned."""

    async def open(self, on_change: OwnersChanged) -> None:
        """Open the directory; from now on it calls `on_change` after each change of owners."""

    @property
    def owners(self) -> Mapping[PartitionId, Owner]:
        """The known owners, by partition."""

    async def run(self) -> None:
        """Follow changes of the assignment until cancelled."""

    async def owner(self, partition_id: PartitionId, *, after_failure: bool) -> Owner:
        """Return the owner of a partition; raises NotOwned while the partition has no owner.

        With `after_failure`, the owner that was returned before has failed.
        """

    async def read_current_owner(self, partition_id: PartitionId) -> Owner:
        """Return the owner in ZooKeeper, read after this call began.

        Raises NotOwned while the partition has no owner, or while the assignment is being rebuilt.
        """

    def mark_suspect(self) -> None:
        """Mark the owners as suspect: a server is silent, so its partitions may have moved."""

    async def groups(self, storages: Collection[str]) -> Mapping[str, int]:
        """Return the groups of these storages, by address, and perhaps of other storages.

        A storage without a group is missing in the answer.
        """

    async def next_client_id(self) -> int:
        """Allocate a client ID that was never used before."""

    async def close(self) -> None:
        """Close the directory."""


class ZooKeeperDirectory:
    """The directory of a process that watches ZooKeeper."""

    def __init__(
        self,
        connect: str,
        *,
        connect_timeout_ms: int,
        session_timeout_ms: int = zookeeper_session.SESSION_TIMEOUT_MS,
        coordinator: Coordinator | None = None,
    ) -> None:
        self._connect_string = parse_connect_string(connect)
        self._connect_timeout_ms = connect_timeout_ms
        self._session_timeout_ms = session_timeout_ms
        self._coordinator = coordinator
        self._cluster: ClusterInfo | None = None
        self._owners: dict[PartitionId, Owner] = {}
        self._groups: Mapping[str, int] = {}
        self._on_change: OwnersChanged | None = None
        self._refreshing: asyncio.Future[None] | None = None
        self._was_missing = False  # rule 8

    @classmethod
    def from_config(cls, connect: str, config: ClientConfig) -> Self:
        """Return the directory for a client; raises BadConfig for an invalid connect string."""
        return cls(
            connect,
            connect_timeout_ms=config.zookeeper_connect_timeout_ms,
            session_timeout_ms=config.zookeeper_session_timeout_ms,
        )

    @property
    def cluster(self) -> ClusterInfo:
        assert self._cluster is not None
        return self._cluster

    @property
    def owners(self) -> Mapping[PartitionId, Owner]:
        """The owners in the last assignment that was usable by rule 1."""
        return self._owners

    @property
    def coordinator(self) -> Coordinator:
        """The session with ZooKeeper; raises UsageError if the directory is closed (rule 7)."""
        if self._coordinator is None:
            raise errors.UsageError(_CLOSED_TEXT)
        return self._coordinator

    async def open(self, on_change: OwnersChanged) -> None:
        """Connect and read the cluster; raises CoordinatorUnavailable or BadConfig."""
        self._on_change = on_change
        self._owners, self._groups = {}, {}  # remove those of an earlier session
        self._cluster, self._was_missing = None, False
        if self._coordinator is None:
            self._coordinator = await zookeeper_session.connect(
                self._connect_string,
                connect_timeout_ms=self._connect_timeout_ms,
                session_timeout_ms=self._session_timeout_ms,
            )
        try:
            view = await self._with_timeout(self._coordinator.read_cluster())
            servers = await self._with_timeout(self._coordinator.read_servers())
            restore_sources = await self._with_timeout(self._coordinator.read_restore_sources())
        except BaseException:
            await self.close()
            raise
        self._cluster = ClusterInfo(
            view.params.name,
            view.store.cluster_key.bytes,
            view.params.partition_count,
            restore_sources,
        )
        if servers.is_settled:
            self._on_servers_changed(servers)

    async def run(self) -> None:
        """Follow the assignment until cancelled."""
        try:
            await self._check_cluster_key()
            await self.coordinator.follow_servers(self._on_servers_changed)
        except errors.ClusterNotFound as error:
            raise self._missing_cluster_error(error) from error

    async def owner(self, partition_id: PartitionId, *, after_failure: bool) -> Owner:
        """Return the owner of a partition; raises NotOwned while the partition has no owner."""
        if after_failure or partition_id not in self._owners:
            # The watch may be late, in particular after a server has died.
            await self._refresh_owners()
        owner = self._owners.get(partition_id)
        if owner is None:
            raise errors.NotOwned(
                f"partition {partition_id} of {self.coordinator.connect_string} has no owner: no "
                "running "
                "server is assigned to it"
            )
        return owner

    async def read_current_owner(self, partition_id: PartitionId) -> Owner:
        """Return the owner in ZooKeeper, read after this call began."""
        servers = await self._with_timeout(self.coordinator.read_latest_servers())
        owner = _owners_in(servers).get(partition_id) if servers.is_settled else None
        if owner is None:
            raise errors.NotOwned(
                f"partition {partition_id} of {self.coordinator.connect_string} has no owner yet: "
                "ZooKeeper assigns it to no server, or to one that does not run"
            )
        return owner

    def mark_suspect(self) -> None:
        """Do nothing: the ZooKeeper watch reports every move."""

    async def groups(self, storages: Collection[str]) -> Mapping[str, int]:
        """Return the groups of storages by address (rule 5)."""
        if not all(storage in self._groups for storage in storages):
            groups_view = await self._with_timeout(self.coordinator.read_groups())
            self._groups = {str(storage): group for storage, group in groups_view.groups.items()}
        return self._groups

    async def next_client_id(self) -> int:
        """Allocate a client ID that was never used before."""
        return await self._with_timeout(self.coordinator.next_client_id())

    async def close(self) -> None:
        """End the session with ZooKeeper; `open` may begin another one."""
        coordinator, self._coordinator = self._coordinator, None
        if coordinator is not None:
            await coordinator.close()

    async def _refresh_owners(self) -> None:
        """Read the servers; callers that need them in the meantime share the answer (rule 4)."""
        while (under_way := self._refreshing) is not None:
            # NB: if a task that awaits a future is cancelled, the future is cancelled, too; `wait`
            # prevents this.
            await asyncio.wait([under_way])
            if not under_way.cancelled():
                return under_way.result()
        outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._refreshing = outcome
        try:
            await self._check_cluster_key()
            servers = await self._with_timeout(self.coordinator.read_servers())
            if servers.is_settled:
                self._on_servers_changed(servers)
            outcome.set_result(None)
        except errors.WaltzError as error:
            outcome.set_exception(error)
            outcome.exception()  # retrieved here, as there may be no waiting caller
            raise
        finally:
            self._refreshing = None
            outcome.cancel()  # no effect if it is done; otherwise the query was cancelled

    async def _with_timeout(self, answer: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._connect_timeout_ms / 1000):
                return await answer
        except errors.ClusterNotFound as error:
            if self._cluster is None:
                raise
            raise self._missing_cluster_error(error) from error
        except errors.BadFormat as error:
            if self._cluster is None:
                raise
            raise errors.CoordinatorUnavailable(
                f"a znode of the cluster is damaged: {error}"
            ) from error
        except TimeoutError as error:
            raise errors.CoordinatorUnavailable(
                f"ZooKeeper at {','.join(self._connect_string.hosts)} did not answer within "
                f"{self._connect_timeout_ms} ms"
            ) from error

    def _missing_cluster_error(
        self, error: errors.ClusterNotFound
    ) -> errors.CoordinatorUnavailable:
        """Return the error for a cluster that existed when the directory was opened (rule 8)."""
        self._was_missing = True
        return errors.CoordinatorUnavailable(
            f"the cluster of this client does not exist any more: {error}"
        )

    async def _check_cluster_key(self) -> None:
        """Check the key of a cluster that was missing; raises ClusterKeyMismatch (rule 8)."""
        if not self._was_missing:
            return
        key = (await self._with_timeout(self.coordinator.read_cluster())).store.cluster_key.bytes
        if key != self.cluster.key:
            raise _other_cluster_error(self.cluster.key, key, self.coordinator.connect_string)
        self._was_missing = False

    def _on_servers_changed(self, view: ServersView) -> None:
        owners = _owners_in(view)
        if owners != self._owners:
            self._owners = owners
            if self._on_change is not None:
                self._on_change(owners)


class FixedDirectory:
    """The directory of a process that got the owners from another process (rule 3)."""

    def __init__(
        self,
        layout: ClusterLayout,
        *,
        connect_timeout_ms: int,
        session_timeout_ms: int = zookeeper_session.SESSION_TIMEOUT_MS,
    ) -> None:
        self._known_owners: dict[PartitionId, Owner] = {}
        self._cluster = layout.cluster
        self._on_change: OwnersChanged | None = None
        self.add_owners(layout)
        self._fallback = ZooKeeperDirectory(
            layout.connect,
            connect_timeout_ms=connect_timeout_ms,
            session_timeout_ms=session_timeout_ms,
        )
        self._is_open = False
        self._is_closed = False
        self._open_request = SharedRequest(self._open_fallback)
        self._request_timeout: asyncio.Timeout | None = None
        self._is_suspect = asyncio.Event()

    @classmethod
    def from_config(cls, layout: ClusterLayout, config: ClientConfig) -> Self:
        """Return the directory for a client with these settings."""
        return cls(
            layout,
            connect_timeout_ms=config.zookeeper_connect_timeout_ms,
            session_timeout_ms=config.zookeeper_session_timeout_ms,
        )

    def add_owners(self, layout: ClusterLayout) -> None:
        """Accept those owners of a layout that are newer than the known ones."""
        answers = {
            PartitionId(partition): Owner(address, Generation(generation))
            for partition, (address, generation) in layout.owners.items()
        }
        self._update_owners(answers, generations_ahead=1)

    @property
    def owners(self) -> Mapping[PartitionId, Owner]:
        """The owners that were passed to this directory, or read from ZooKeeper since."""
        return self._known_owners

    @property
    def cluster(self) -> ClusterInfo:
        """The constants of the cluster that were passed to this directory."""
        return self._cluster

    async def open(self, on_change: OwnersChanged) -> None:
        """Store `on_change`; no session with ZooKeeper is opened yet."""
        self._on_change = on_change

    async def run(self) -> None:
        """Wait until an owner is suspect, then follow changes until cancelled (rule 3)."""
        await self._is_suspect.wait()
        if not self._is_open:
            self._is_suspect.clear()  # During an outage, `mark_suspect` may set it again.
            await self._wait_for_session()
        await self._fallback.run()

    def mark_suspect(self) -> None:
        """Start to watch ZooKeeper (rule 3)."""
        self._is_suspect.set()

    async def owner(self, partition_id: PartitionId, *, after_failure: bool) -> Owner:
        """Return the known owner; after a failure, read ZooKeeper."""
        owner = self._known_owners.get(partition_id)
        if owner is not None and not after_failure:
            return owner
        await self._wait_for_session()
        return await self._fallback.owner(partition_id, after_failure=True)

    async def read_current_owner(self, partition_id: PartitionId) -> Owner:
        """Return the owner in ZooKeeper, read after this call began."""
        await self._wait_for_session()
        return await self._fallback.read_current_owner(partition_id)

    async def groups(self, storages: Collection[str]) -> Mapping[str, int]:
        """Return the groups of storages from ZooKeeper."""
        await self._wait_for_session()
        return await self._fallback.groups(storages)

    async def next_client_id(self) -> int:
        """Allocate a client ID that was never used before, from ZooKeeper."""
        await self._wait_for_session()
        return await self._fallback.next_client_id()

    async def close(self) -> None:
        """End the session with ZooKeeper if there is one."""
        self._is_closed = True
        if self._request_timeout is not None and not self._request_timeout.expired():
            self._request_timeout.reschedule(0.0)
        with contextlib.suppress(errors.WaltzError):
            await self._wait_for_session()  # rule 7: first wait for an attempt in progress
        if self._is_open:
            await self._fallback.close()

    async def _wait_for_session(self) -> None:
        """Wait for a session with ZooKeeper; raises the reason if there is none."""
        if not self._is_open:
            await self._open_request.wait_for_answer()

    async def _open_fallback(self) -> None:
        if self._is_open:
            return
        if self._is_closed:
            raise errors.UsageError(_CLOSED_TEXT)
        try:
            async with asyncio.timeout(None) as self._request_timeout:
                await self._fallback.open(self._accept_owners)
        except TimeoutError:
            raise errors.UsageError(_CLOSED_TEXT) from None
        finally:
            self._request_timeout = None
        key = self._fallback.cluster.key
        if key != self._cluster.key:
            connect_string = self._fallback.coordinator.connect_string
            # The session is closed again, so that no later query is answered from the wrong
            # cluster.
            await self._fallback.close()
            raise _other_cluster_error(self._cluster.key, key, connect_string)
        self._is_open = True
        self._is_suspect.set()
        self._accept_owners(self._fallback.owners)

    def _accept_owners(self, owners: Mapping[PartitionId, Owner]) -> None:
        """Accept owners from ZooKeeper once ZooKeeper is known to have the same cluster."""
        if self._is_open:
            self._update_owners(owners, generations_ahead=0)

    def _update_owners(
        self, owners: Mapping[PartitionId, Owner], *, generations_ahead: int
    ) -> None:
        """Accept owners whose generation is at least `generations_ahead` above the known one."""
        previous_owners = self._known_owners
        new_owners = {
            partition_id: owner
            for partition_id, owner in owners.items()
            if partition_id not in previous_owners
            or owner.generation >= previous_owners[partition_id].generation + generations_ahead
        }
        self._known_owners = {**previous_owners, **new_owners}
        if new_owners and self._on_change is not None:
            self._on_change(new_owners)


def _other_cluster_error(expected: bytes, actual: bytes, source: str) -> errors.ClusterKeyMismatch:
    return errors.ClusterKeyMismatch(
        f"{source} is another cluster than before: expected cluster key {expected.hex()}, "
        f"found {actual.hex()}"
    )


def _owners_in(view: ServersView) -> dict[PartitionId, Owner]:
    return {
        partition_id: Owner(view.servers[owner.server_id].address, owner.generation)
        for partition_id, owner in view.owners.items()
        if owner.server_id in view.servers
    }
