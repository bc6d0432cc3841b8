"""The metrics of a storage: counters, and gauges of the current state.

No decision depends on them.

Rules:
    1. Every operation that removes or restores a replica's records has a counter.
"""

from collections.abc import Callable, Mapping
from math import nan
from typing import TYPE_CHECKING

from waltz_core.archive.garbage_collection import (
    CollectedGarbage,
    GarbageCollectionJob,
    GarbageCollectionOutcome,
)
from waltz_core.archive.manifest_jobs import UploadJob, UploadOutcome
from waltz_core.errors import DiskFailed, WaltzError
from waltz_core.machine import Report
from waltz_core.records.record import PartitionId
from waltz_core.storage.files.disk_space import DiskSpace
from waltz_core.storage.files.id_ranges import count_ids
from waltz_core.storage.log.partition_log import PartitionLog
from waltz_core.storage.service.service import StorageService
from waltz_core.storage.service.work import Work, WorkOutcome, WorkResult
from waltz_core.wire.messages import RangeBytes

if TYPE_CHECKING:
    from waltz_core.metrics import Metrics


class StorageMetrics:
    """The metrics of one storage. `clock_ms` is the clock of its state machine."""

    def __init__(self, metrics: "Metrics", *, clock_ms: Callable[[], int]) -> None:
        self._metrics = metrics
        self._clock_ms = clock_ms

    def register(
        self,
        machine: StorageService,
        space: DiskSpace,
        *,
        links_count: Callable[[], int],
        logs: Mapping[PartitionId, PartitionLog],
    ) -> None:
        """Register the gauges of the storage; they read the current state when they are queried."""
        set_source = self._metrics.set_source
        set_source("waltz_storage_connections", links_count)
        set_source("waltz_storage_queued_bytes", lambda: machine.queue_limits.owner_bytes)
        set_source("waltz_storage_free_bytes", lambda: _bytes_of(space.free_bytes))
        set_source("waltz_storage_disk_bytes", lambda: _bytes_of(space.size_bytes))
        set_source("waltz_storage_full_disks", lambda: space.is_full)
        set_source(
            "waltz_storage_running_upload_seconds",
            lambda: _running_upload_s(machine, self._clock_ms()),
        )
        set_source("waltz_storage_reserve_bytes", lambda: space.reserved_bytes)
        set_source(
            "waltz_storage_suspect_replicas",
            lambda: sum(log.suspect for log in list(logs.values())),
        )

    def register_log(self, log: PartitionLog) -> None:
        """Register the gauges of a partition's log; they read the current state when queried."""
        labels = {"partition": log.partition_id}
        set_source = self._metrics.set_source
        set_source("waltz_storage_last_transaction", lambda: log.synced_max, **labels)
        set_source("waltz_storage_low_water_mark", lambda: log.low_water_mark, **labels)
        set_source("waltz_storage_damaged_transactions", lambda: count_ids(log.damaged), **labels)

    def count(self, work: Work, result: WorkResult) -> None:
        """Count the results of a piece of work."""
        add, partition = self._metrics.add, work.partition_id
        if result.appended_count:
            add(
                "waltz_storage_appended_transactions_total",
                result.appended_count,
                partition=partition,
            )
            add("waltz_storage_appended_bytes_total", result.appended_bytes, partition=partition)
        if result.read_count:
            add("waltz_storage_read_transactions_total", result.read_count, partition=partition)
            add("waltz_storage_read_bytes_total", result.read_bytes, partition=partition)
        if result.sync_s is not None:
            add("waltz_storage_syncs_total")
            self._metrics.observe("waltz_storage_sync_seconds", result.sync_s)
        if result.failure is not None:
            add("waltz_storage_failed_writes_total")
        if result.scrub_result or result.new_damage or result.repaired_ids or result.failed_reads:
            self._count_damage(result, partition)

    def count_upload(self, job: UploadJob, outcome: UploadOutcome) -> None:
        """Count the result of an upload to the archive."""
        add, partition = self._metrics.add, job.partition_id
        if isinstance(outcome, WaltzError):
            add("waltz_storage_failed_uploads_total", partition=partition)
        elif job.replaced_object is None:  # The sum over all storages grows like the log.
            add("waltz_storage_archived_objects_total", partition=partition)
            add("waltz_storage_archived_transactions_total", job.record_count, partition=partition)
            add("waltz_storage_archived_bytes_total", job.record_bytes, partition=partition)

    def count_collection(
        self, job: GarbageCollectionJob, outcome: GarbageCollectionOutcome
    ) -> None:
        """Count the files that a collection of garbage has deleted from the archive."""
        if isinstance(outcome, CollectedGarbage):
            add, partition = self._metrics.add, job.partition_id
            add(
                "waltz_storage_garbage_collected_files_total",
                outcome.file_count,
                partition=partition,
            )
            add(
                "waltz_storage_garbage_collected_bytes_total",
                outcome.byte_count,
                partition=partition,
            )

    def count_archive_read(self, partition: int, outcome: WorkOutcome) -> None:
        """Count an answer from the archive."""
        if isinstance(outcome, WaltzError):
            self._metrics.add("waltz_storage_failed_archive_reads_total", partition=partition)
        elif isinstance(outcome, RangeBytes):
            read_bytes = len(outcome.records)
            self._metrics.add(
                "waltz_storage_archive_read_bytes_total", read_bytes, partition=partition
            )

    def _count_damage(self, result: WorkResult, partition: PartitionId) -> None:
        repaired = () if result.repaired_ids is None else (result.repaired_ids,)
        for name, amount in (
            ("failed_reads_total", len(result.failed_reads)),
            ("damage_found_transactions_total", count_ids(result.new_damage)),
            ("repaired_transactions_total", count_ids(repaired)),
            ("scrubbed_bytes_total", result.scrub_result.read_bytes if result.scrub_result else 0),
        ):
            if amount:
                self._metrics.add(f"waltz_storage_{name}", amount, partition=partition)

    def report(self, report: Report) -> None:
        """Count a report under its name; count finished scrub passes for each partition."""
        self._metrics.report(report)
        if report.name == "storage.scrub_finished":
            partition = str(dict(report.fields)["partition"])
            self._metrics.add("waltz_storage_scrub_passes_total", partition=partition)


def _running_upload_s(machine: StorageService, now_ms: int) -> float:
    since_ms = machine.archive_running_since_ms
    return 0.0 if since_ms is None else (now_ms - since_ms) / 1_000


def _bytes_of(query: Callable[[], int]) -> float:
    """Return the bytes.

    Return NaN if the query fails, so that other metrics are still shown.
    """
    try:
        return query()
    except DiskFailed:
        return nan
