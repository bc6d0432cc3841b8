"""The health of a storage: its disk, its replicas, and its connection to ZooKeeper.

Rules:
    1. Known damage that waits for its repair is reported, but does not make the storage unhealthy.
    2. A storage with a full disk is not healthy, but ready: it answers readers and owners.
    3. A disk that hangs blocks neither the event loop nor a page of the daemon. After
       `DISK_STATUS_S_MAX`, the disk is reported with an error. No further query of the disk begins
       before the present query ends.
"""

import asyncio
import time
from functools import partial
from typing import Final

from waltz_core.cluster.coordinator import Coordinator
from waltz_core.daemon_pages import Health
from waltz_core.storage.process.served_replicas import ServedReplicas
from waltz_core.storage.service import admin_execution
from waltz_core.storage.service.admin_tasks import DiskStatus
from waltz_core.storage.service.storage_engine import StorageEngine
from waltz_core.storage.service.writer_threads import CallThreads

DISK_STATUS_S_MAX: Final = 2.0


class StorageHealth:
    """Determines the health of one storage; rules refer to this module."""

    def __init__(
        self,
        engine: StorageEngine,
        serving: ServedReplicas,
        coordinator: Coordinator | None,
        pool: CallThreads,
        failure: asyncio.Future[None],
    ) -> None:
        self.has_started = False
        self._engine = engine
        self._serving = serving
        self._coordinator = coordinator
        self._pool = pool
        self._failure = failure
        self._status_query: asyncio.Future[DiskStatus] | None = None

    async def find(self) -> Health:
        """Return the health of the storage: reasons why it is not ready, and details."""
        disk_status = await self._disk_status()
        serving, coordinator = self._serving, self._coordinator
        suspect = sorted(number for number, log in serving.logs.items() if log.suspect)
        details = {
            "address": serving.address,
            "partitions": sorted(serving.logs),
            "not_served": serving.unserved_partitions,
            "not_served_reasons": serving.unserved_reasons,
            "offline": sorted(serving.offline),
            "suspect": suspect,
            "damaged": sorted(number for number, log in serving.logs.items() if log.damaged),
            "is_full": disk_status.is_full,
            "disk_error": disk_status.disk_error,
            "zookeeper": coordinator is None or coordinator.was_connected_recently,
            "zookeeper_session": coordinator and coordinator.session_state.name,
        }
        has_failed = self._failure.done() or disk_status.disk_error is not None
        is_healthy = not (
            has_failed or serving.unserved_partitions or suspect or disk_status.is_full
        )
        return Health(is_healthy, self._unready_reasons(disk_status), details)

    def _unready_reasons(self, disk_status: DiskStatus) -> list[str]:
        reasons = [] if self.has_started else ["the storage has not started yet"]
        if self._failure.done():
            reasons.append(f"the storage ends with an error: {self._failure.exception()}")
        if disk_status.disk_error is not None:
            reasons.append(f"the disk has an error: {disk_status.disk_error}")
        errors = self._serving.unserved_reasons
        for partition_id in self._serving.unserved_partitions:
            error = errors.get(str(partition_id), "the storage has not opened it yet")
            reasons.append(f"partition {partition_id} is not open: {error}")
        return reasons

    async def _disk_status(self) -> DiskStatus:
        """Query the free space of the disk (rule 3)."""
        clock_ms = time.time_ns() // 1_000_000
        if self._status_query is None or self._status_query.done():
            query = partial(admin_execution.disk_status_of, self._engine, clock_ms)
            self._status_query = asyncio.get_running_loop().run_in_executor(self._pool, query)
        done, _ = await asyncio.wait((self._status_query,), timeout=DISK_STATUS_S_MAX)
        if done:
            return self._status_query.result()
        space = self._engine.space
        error = f"the disk has not answered for {DISK_STATUS_S_MAX:.0f} s"
        return DiskStatus(None, space.reserved_bytes, space.is_full, clock_ms, error)
