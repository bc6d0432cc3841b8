"""Decides which partitions a storage serves, by the assignments in ZooKeeper.

The storage must never open, drop and administer the same partition at the same time. A lock for
each partition ensures this.

Rules:
    1. A partition is served while ZooKeeper assigns it to this storage. When the assignment has
       ended, the partition is still served until its metadata no longer names this storage. The
       reason: the session that drops this storage must first receive the state of this replica
       (docs/design/correctness.md 2.1 C and D). While ZooKeeper is unavailable, the set of served
       partitions does not change. If a partition cannot be opened (full disk, failing disk, a
       missing file that an operator must restore), the storage retries with growing pauses. If only
       a restart can help, the process exits.
    2. A partition that was taken offline is not served, even if ZooKeeper assigns it.
    3. To change a partition's files, the storage first drops the partition, which ends the
       partition's session on this storage. Afterwards, the storage opens the partition again if it
       must still be served.
    4. A partition is dropped when its running work is done. If this work hangs on a disk, only this
       partition is delayed.
    5. If the files of a partition were deleted or replaced, the partition is dropped. It is not
       opened again before an administrator has emptied it (`storage_engine.py`, rule 8). If the
       control file was deleted or replaced, too, the process exits (rule 9 of that file).
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import wait
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Final, Protocol, TypeVar

from waltz_core import errors
from waltz_core.cluster.coordinator import Coordinator
from waltz_core.cluster.znodes.model import UNRESOLVED, ReplicaAssignments
from waltz_core.machine import Report
from waltz_core.records.record import NO_SESSION, PartitionId, ReplicaId
from waltz_core.storage.log.partition_log import PartitionLog
from waltz_core.storage.service import service
from waltz_core.storage.service.admin_tasks import ZooKeeperState
from waltz_core.storage.service.storage_engine import StorageEngine
from waltz_core.storage.service.writer_threads import CallThreads

_log = logging.getLogger(__name__)

REOPEN_S_MIN: Final = 1.0
REOPEN_S_MAX: Final = 60.0
# The maximum number of partitions that are opened at the same time. Each opening makes three syncs,
# or six for a new partition. The file system joins concurrent syncs, so more threads would not be
# faster.
OPENERS_MAX: Final = 8
ResultT = TypeVar("ResultT")


def run_concurrently(
    call: Callable[[PartitionId], None], partition_ids: Sequence[PartitionId]
) -> None:
    """Call a function for each partition, on at most `OPENERS_MAX` threads; block until all end.

    All calls are made. If any fails, the first exception is raised at the end.
    """
    if not partition_ids:
        return
    with CallThreads(min(OPENERS_MAX, len(partition_ids)), "storage-opener") as openers:
        futures = [openers.submit(call, partition_id) for partition_id in partition_ids]
        wait(futures)
        for future in futures:
            future.result()


class ThreadRunner(Protocol):
    """Runs a blocking call on a thread of the storage's pool."""

    def __call__(self, call: Callable[[], ResultT]) -> Awaitable[ResultT]:
        """Run the call, and return its result."""


class ServedReplicas:
    """The partitions that one storage serves; rules refer to this module."""

    def __init__(  # noqa: PLR0913 - each is a part of the daemon
        self,
        engine: StorageEngine,
        coordinator: Coordinator | None,
        *,
        partitions: tuple[PartitionId, ...],
        post: Callable[[service.Event], None],
        report: Callable[[Report], None],
        in_thread: ThreadRunner,
        on_opened: Callable[[PartitionLog], None],
        on_dropped: Callable[[PartitionId], None],
    ) -> None:
        self.address = ReplicaId("")  # empty until the daemon has its port
        self.logs: dict[PartitionId, PartitionLog] = {}
        self._engine = engine
        self._coordinator = coordinator
        self._assigned = partitions  # the partitions assigned to this storage, offline or not
        self._post = post
        self._report = report
        self._in_thread = in_thread
        self._on_opened = on_opened
        self._on_dropped = on_dropped
        self._recheck_event = asyncio.Event()
        self._idle_events: dict[PartitionId, asyncio.Event] = {}
        self._locks = defaultdict[PartitionId, asyncio.Lock](asyncio.Lock)  # rule 3

    @property
    def offline(self) -> tuple[PartitionId, ...]:
        """The partitions that are assigned to this storage and were taken offline."""
        return tuple(
            partition_id
            for partition_id in self._assigned
            if not self._engine.is_available(partition_id)
        )

    @property
    def unserved_partitions(self) -> list[PartitionId]:
        """The partitions that should be served but are not, sorted."""
        return sorted(set(self._wanted_partitions()) - self.logs.keys())

    @property
    def unserved_reasons(self) -> dict[str, str]:
        """The error of each partition that should be served but is not, by partition."""
        open_errors = self._engine.open_errors
        return {
            str(partition_id): str(open_errors[partition_id])
            for partition_id in self.unserved_partitions
            if partition_id in open_errors
        }

    def _wanted_partitions(self) -> tuple[PartitionId, ...]:
        return tuple(
            partition_id
            for partition_id in self._assigned
            if self._engine.is_available(partition_id)
        )

    # ---- following (rule 1)

    def set_assignments(self, assignments: ReplicaAssignments) -> None:
        """Apply a new replica assignment from ZooKeeper."""
        own_partitions = assignments.partitions.get(self.address)
        if own_partitions is None:
            _log.warning("storage.not_in_cluster address=%s", self.address)
        count_max = self._engine.partition_count
        self._assigned = tuple(
            sorted(
                partition_id
                for partition_id in own_partitions or ()
                if 0 <= partition_id < count_max
            )
        )
        self.recheck()

    def recheck(self) -> None:
        """Trigger a new comparison of served and wanted partitions."""
        self._recheck_event.set()

    async def follow(self, on_checked: Callable[[], None]) -> None:
        """Open and drop partitions as the assignment requires.

        Call `on_checked` after each round.
        """
        retry_s = REOPEN_S_MIN
        await self._recheck_event.wait()  # before this, the assignment is unknown
        async with asyncio.TaskGroup() as drops:
            while True:
                try:
                    async with asyncio.timeout(self._wait_s(retry_s)):
                        await self._recheck_event.wait()
                    retry_s = REOPEN_S_MIN
                except TimeoutError:
                    retry_s = min(2 * retry_s, REOPEN_S_MAX)
                self._recheck_event.clear()
                if self._engine.has_lost_files:
                    await self._in_thread(self._engine.check_files)
                leaving = await self._leaving_partitions()
                wanted_partitions = {
                    candidate
                    for candidate in (*self._assigned, *leaving)
                    if self._is_wanted(candidate, leaving)
                }
                for partition_id in self._unlocked_partitions(self.logs.keys() - wanted_partitions):
                    drops.create_task(self._drop_exclusively(partition_id))
                await self._open_exclusively(
                    self._unlocked_partitions(wanted_partitions - self.logs.keys()), leaving
                )
                on_checked()

    def _is_wanted(self, partition_id: PartitionId, leaving: Collection[PartitionId]) -> bool:
        """Return whether a partition should be open; administration may have changed the answer."""
        engine = self._engine
        if engine.has_lost_files_of(partition_id) or not engine.is_available(partition_id):
            return False
        is_kept = partition_id in leaving and engine.is_held(partition_id)
        return is_kept or partition_id in self._assigned

    def _unlocked_partitions(self, partition_ids: Collection[PartitionId]) -> list[PartitionId]:
        """Return the partitions that are not locked; a lock holder calls `recheck` afterwards."""
        return sorted(
            partition_id for partition_id in partition_ids if not self._locks[partition_id].locked()
        )

    async def _drop_exclusively(self, partition_id: PartitionId) -> None:
        async with self._locks[partition_id]:
            if partition_id in self.logs:
                await self._drop_partition(partition_id)
        self.recheck()

    async def _open_exclusively(
        self, partition_ids: Sequence[PartitionId], leaving: Collection[PartitionId]
    ) -> None:
        async with AsyncExitStack() as stack:
            for partition_id in partition_ids:
                await stack.enter_async_context(self._locks[partition_id])
            await self._open_partitions(
                [
                    candidate
                    for candidate in partition_ids
                    if candidate not in self.logs and self._is_wanted(candidate, leaving)
                ]
            )

    def _wait_s(self, retry_s: float) -> float | None:
        stored_here = [
            partition_id
            for partition_id in self._engine.assigned_partitions()
            if self._engine.is_available(partition_id)
        ]
        return recheck_interval_s(
            retry_s, served=self.logs, wanted=self._wanted_partitions(), stored_here=stored_here
        )

    async def _leaving_partitions(self) -> list[PartitionId]:
        """Return the unassigned partitions whose metadata still names this storage (rule 1)."""
        leaving: list[PartitionId] = []
        if self._coordinator is None:
            return leaving
        for partition_id in self._engine.assigned_partitions():
            if partition_id in self._assigned or not self._engine.is_available(partition_id):
                continue
            try:
                metadata = (await self._coordinator.read_partition(partition_id)).metadata
                is_in_metadata = metadata is not None and self.address in metadata.states
            except errors.WaltzError as error:
                _log.warning(
                    "storage.metadata_read_failed partition=%s error=%s", partition_id, error
                )
                is_in_metadata = partition_id in self.logs
            if is_in_metadata:
                leaving.append(partition_id)
        return leaving

    async def _open_partitions(self, partition_ids: Sequence[PartitionId]) -> None:
        """Open logs in parallel; a log that cannot be opened does not affect other logs."""
        results: dict[PartitionId, PartitionLog | errors.WaltzError] = {}

        def open_one(partition_id: PartitionId) -> None:
            try:
                # The reserve has enough space for the files of a new log.
                assign = partial(self._engine.assign, partition_id)
                results[partition_id] = self._engine.space.call_with_reserve(assign)
            except errors.WaltzError as error:
                results[partition_id] = error

        def open_all() -> None:
            with suppress(errors.WaltzError):  # `open_one` reports the error again.
                self._engine.assign_new(partition_ids)
            run_concurrently(open_one, partition_ids)

        await self._in_thread(open_all)
        for partition_id in partition_ids:
            log = results[partition_id]
            if isinstance(log, errors.WaltzError):
                self._report(
                    Report(
                        "storage.partition_open_failed",
                        (("partition", partition_id), ("error", log)),
                    )
                )
                if self._engine.has_failed:
                    raise log
                continue
            self.logs[partition_id] = log
            self._on_opened(log)
            self._post(service.PartitionOpened(log))
            last = log.synced_max
            _log.debug("storage.partition_opened partition=%s last=%s", partition_id, last)
        if partition_ids:
            _log.info("storage.partitions_opened count=%d", len(partition_ids))

    async def _drop_partition(self, partition_id: PartitionId) -> None:
        """Stop serving a partition; its files stay open until administration changes them."""
        idle_event = self._idle_events[partition_id] = asyncio.Event()
        self._post(service.PartitionDropped(partition_id))
        await idle_event.wait()
        del self._idle_events[partition_id]
        del self.logs[partition_id]
        self._on_dropped(partition_id)
        _log.info("storage.partition_closed partition=%s", partition_id)

    def on_partition_idle(self, partition_id: PartitionId) -> None:
        """Note that a dropped partition has no running work any more."""
        self._idle_events[partition_id].set()

    def stop_serving(self, partition_id: PartitionId, error: errors.WaltzError) -> None:
        """Drop a partition whose files were deleted or replaced (rule 5)."""
        self._engine.stop_serving(partition_id, error)
        self.recheck()

    # ---- administration (rules 2 and 3)

    async def run_exclusively(
        self, partition_id: PartitionId, call: Callable[[], ResultT], *, ends_session: bool = True
    ) -> ResultT:
        """Run a call on a thread while a partition is not served; serve it again afterwards.

        Raises:
            UnknownPartition: the cluster has no such partition.
            Unavailable: the partition is served, and `ends_session` is False.
        """
        self._engine.check_exists(partition_id)
        async with self._locks[partition_id]:
            try:
                if partition_id in self.logs:
                    if not ends_session:
                        raise errors.Unavailable(f"partition {partition_id} is online")
                    await self._drop_partition(partition_id)
                return await self._in_thread(call)
            finally:
                if ends_session:
                    self.recheck()

    async def pause_changes(self) -> None:
        """Stop opening, dropping and changing partitions; wait for running operations."""
        for partition_id in range(self._engine.partition_count):
            await self._locks[PartitionId(partition_id)].acquire()

    async def zookeeper_state(self, partition_id: PartitionId) -> ZooKeeperState:
        """Return the state of this replica in ZooKeeper; without ZooKeeper, in the static cluster.

        Raises:
            CoordinatorUnavailable: ZooKeeper cannot be read.
        """
        if self._coordinator is None:
            log = self.logs.get(partition_id)
            is_engaged = log is not None and log.is_engaged(log.promised)
            engaged: tuple[str, ...] = (str(self.address),) if is_engaged else ()
            session_id = NO_SESSION if log is None else log.promised
            return ZooKeeperState(
                partition_id in self._assigned, is_engaged, session_id, engaged, 1
            )
        assignments = await self._coordinator.read_replica_assignment()
        is_assigned = partition_id in assignments.partitions.get(self.address, ())
        metadata = (await self._coordinator.read_partition(partition_id)).metadata
        if metadata is None:
            return ZooKeeperState(is_assigned, False, NO_SESSION, (), 0)  # noqa: FBT003 - by their order
        engaged = tuple(
            str(replica)
            for replica, state in metadata.states.items()
            if state.closing_high_water_mark == UNRESOLVED
        )
        return ZooKeeperState(
            is_assigned,
            self.address in engaged,
            metadata.session_id,
            engaged,
            len(metadata.states),
        )


def recheck_interval_s(
    retry_s: float,
    *,
    served: Collection[PartitionId],
    wanted: Collection[PartitionId],
    stored_here: Collection[PartitionId],
) -> float | None:
    """Return the seconds until the partitions are checked again if nothing changes.

    Return None if no check is needed until something changes. `retry_s` is the current, growing
    pause for partitions that could not be opened or dropped yet.
    """
    if set(served) != set(wanted):
        return retry_s
    # A session may still need the state of a replica that is stored here but not served.
    return None if set(served) >= set(stored_here) else REOPEN_S_MAX
