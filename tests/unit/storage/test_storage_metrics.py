"""The counters and gauges of a storage."""

from math import isnan
from types import SimpleNamespace

from waltz_core.archive.garbage_collection import CollectedGarbage
from waltz_core.archive.manifest_jobs import NewManifest
from waltz_core.errors import ArchiveUnavailable, DiskFailed
from waltz_core.machine import Report
from waltz_core.metrics import Metrics
from waltz_core.storage.files.format import IdRange
from waltz_core.storage.log.scrub import ScrubResult
from waltz_core.storage.process.storage_metrics import StorageMetrics
from waltz_core.storage.service.work import WorkResult


def new_metrics():
    metrics = Metrics("storage")
    return metrics, StorageMetrics(metrics, clock_ms=lambda: 5_500)


def test_work_is_counted_for_its_partition():
    metrics, storage_metrics = new_metrics()
    work = SimpleNamespace(partition_id=3)
    result = WorkResult(
        appended_count=5,
        appended_bytes=220,
        sync_s=0.25,
        new_damage=(IdRange(3, 3), IdRange(7, 9)),
        repaired_ids=IdRange(3, 4),
        failed_reads=["cannot read x.seg"],
        scrub_result=ScrubResult(20, 900),
    )
    storage_metrics.count(work, result)
    storage_metrics.count(work, WorkResult(read_count=2, read_bytes=88))
    shown = {
        "appended_transactions_total": 5,
        "appended_bytes_total": 220,
        "read_transactions_total": 2,
        "read_bytes_total": 88,
        "failed_reads_total": 1,
        "damage_found_transactions_total": 4,
        "repaired_transactions_total": 2,
        "scrubbed_bytes_total": 900,
    }
    for name, value in shown.items():
        assert metrics.value(f"waltz_storage_{name}", partition=3) == value, name
    assert metrics.value("waltz_storage_syncs_total") == 1
    assert metrics.value("waltz_storage_failed_writes_total") == 0


def test_uploads_are_counted_by_their_result():
    metrics, storage_metrics = new_metrics()
    job = SimpleNamespace(partition_id=3, record_count=5, record_bytes=220, replaced_object=None)
    storage_metrics.count_upload(job, NewManifest(4, bytes(16), 9, "m", 1))
    job = SimpleNamespace(**vars(job) | {"replaced_object": object()})  # counted already
    storage_metrics.count_upload(job, NewManifest(4, bytes(16), 9, "m", 2))
    storage_metrics.count_upload(job, ArchiveUnavailable("cannot write m"))
    assert metrics.value("waltz_storage_archived_transactions_total", partition=3) == 5
    assert metrics.value("waltz_storage_archived_bytes_total", partition=3) == 220
    assert metrics.value("waltz_storage_failed_uploads_total", partition=3) == 1


def test_files_that_were_collected_are_counted():
    metrics, storage_metrics = new_metrics()
    job = SimpleNamespace(partition_id=3)
    storage_metrics.count_collection(job, CollectedGarbage(4, 900, 1, has_more=True))
    storage_metrics.count_collection(job, ArchiveUnavailable("cannot list m"))
    assert metrics.value("waltz_storage_garbage_collected_files_total", partition=3) == 4
    assert metrics.value("waltz_storage_garbage_collected_bytes_total", partition=3) == 900


def test_gauges_return_the_current_values():
    metrics, storage_metrics = new_metrics()
    log = SimpleNamespace(
        partition_id=1, synced_max=9, low_water_mark=4, damaged=(IdRange(2, 4),), suspect=True
    )
    room = SimpleNamespace(
        free_bytes=lambda: 70, size_bytes=lambda: 200, is_full=True, reserved_bytes=30
    )
    machine = SimpleNamespace(
        queue_limits=SimpleNamespace(owner_bytes=11), archive_running_since_ms=5_000
    )
    storage_metrics.register(machine, room, links_count=lambda: 2, logs={1: log})
    storage_metrics.register_log(log)
    assert metrics.value("waltz_storage_damaged_transactions", partition=1) == 3
    assert metrics.value("waltz_storage_last_transaction", partition=1) == 9
    for name, value in {
        "full_disks": 1,
        "reserve_bytes": 30,
        "free_bytes": 70,
        "disk_bytes": 200,
        "connections": 2,
        "queued_bytes": 11,
        "suspect_replicas": 1,
        "running_upload_seconds": 0.5,
    }.items():
        assert metrics.value(f"waltz_storage_{name}") == value, name
    log.damaged, room.is_full = (), False
    assert metrics.value("waltz_storage_damaged_transactions", partition=1) == 0
    assert metrics.value("waltz_storage_full_disks") == 0


def test_unknown_free_space_does_not_affect_other_gauges():
    metrics, storage_metrics = new_metrics()

    def fail():
        raise DiskFailed("getting the free space of /waltz: input/output error")

    room = SimpleNamespace(free_bytes=fail, size_bytes=fail, is_full=False, reserved_bytes=30)
    machine = SimpleNamespace(
        queue_limits=SimpleNamespace(owner_bytes=11), archive_running_since_ms=None
    )
    storage_metrics.register(machine, room, links_count=lambda: 2, logs={})
    assert isnan(metrics.value("waltz_storage_free_bytes"))
    page = metrics.page().decode()
    assert "waltz_storage_free_bytes NaN" in page
    assert "waltz_storage_disk_bytes NaN" in page
    assert "waltz_storage_reserve_bytes 30.0" in page


def test_a_pass_of_the_scrub_is_counted_for_its_partition():
    metrics, storage_metrics = new_metrics()
    storage_metrics.report(Report("storage.scrub_finished", (("partition", 4),)))
    storage_metrics.report(
        Report("storage.request_rejected", (("request", "Prepare"), ("error", "SessionFenced")))
    )
    assert metrics.value("waltz_storage_scrub_passes_total", partition=4) == 1
    assert metrics.value("waltz_storage_events_total", event="storage.scrub_finished") == 1
    assert metrics.value("waltz_storage_events_total", event="storage.request_rejected") == 1
