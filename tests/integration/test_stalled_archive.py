"""A storage whose object store hangs serves its replicas, and continues when the store returns."""

import asyncio
import threading

from tests.integration.test_storage_daemon import CLUSTER, config_for, on_loop, session
from tests.loops import poll_until
from waltz_core.archive.store import ArchiveStore
from waltz_core.records.record import GENESIS_CHAIN
from waltz_core.storage.process.storage_daemon import StorageDaemon
from waltz_core.storage.service import archive_jobs
from waltz_core.wire.messages import (
    Appended,
    ArchiveProgress,
    ArchiveRange,
    CollectGarbage,
    GarbageCollected,
    RangeArchived,
    SuccessResponse,
)


class HangingStore:
    """Blocks the next call that lists or writes until it is released."""

    def __init__(self, monkeypatch, name):
        self.is_called, self.may_return = threading.Event(), threading.Event()
        original = getattr(ArchiveStore, name)

        def hang(store, *args):
            self.is_called.set()
            self.may_return.wait()
            return original(store, *args)

        monkeypatch.setattr(ArchiveStore, name, hang)


async def next_notice(owner):
    """Return the next notification other than of progress."""
    while True:
        for effect in await owner.link.receive():
            if not isinstance(effect, ArchiveProgress):
                return effect


def archive_range(owner, attempt, last=9):
    return owner.owner.make(ArchiveRange, attempt, 0, last, GENESIS_CHAIN, "", 0)


def test_an_upload_that_hangs_is_reported_and_its_files_are_collected_later(tmp_path, monkeypatch):
    monkeypatch.setattr(archive_jobs, "STALLED_MS", 50)
    settings = {"archive_url": f"file://{tmp_path}/archive", "archive_age_ms": 0}
    store = HangingStore(monkeypatch, "write")  # the manifest; the object exists

    async def main():
        storage = StorageDaemon(config_for(tmp_path / "storage", **settings), CLUSTER, None)
        stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
        value = storage.metrics.value
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(storage.serve(stop, ready.set_result))
            async with session(await ready, 5, 0) as owner:
                await owner.prepare()
                await owner.ask(owner.owner.append(10))
                assert isinstance(await owner.ask(archive_range(owner, 1)), SuccessResponse)
                await poll_until(store.is_called.is_set)
                event = {"event": "storage.archive_stalled"}
                await poll_until(lambda: value("waltz_storage_events_total", **event) >= 1)
                age_s = value("waltz_storage_running_upload_seconds")
                assert age_s > 0
                assert isinstance(await owner.ask(owner.owner.append(1)), Appended)
                # The owner abandons the first attempt.
                assert isinstance(await owner.ask(archive_range(owner, 2)), SuccessResponse)
                assert value("waltz_storage_running_upload_seconds") >= age_s
                store.may_return.set()
                notice = await next_notice(owner)
                assert isinstance(notice, RangeArchived)
                assert (notice.attempt, notice.last, notice.error) == (2, 9, "")
                assert value("waltz_storage_running_upload_seconds") == 0
                recorded = (notice.last, notice.chain, notice.manifest, notice.manifest_crc)
                await owner.ask(owner.owner.make(CollectGarbage, 3, *recorded))
                collected = await next_notice(owner)
                assert collected == GarbageCollected(5, 0, 0, 3, has_more=False, error="")
            files = [path.name for path in (tmp_path / "archive").rglob("*") if path.is_file()]
            assert len(files) == 2
            assert all(file.endswith(("-2.parquet", "-2.json")) for file in files), files
            assert value("waltz_storage_garbage_collected_files_total", partition=0) == 2
            assert value("waltz_storage_garbage_collected_bytes_total", partition=0) > 0
            stop.set()

    on_loop(main())


def test_a_storage_ends_although_a_call_to_the_object_store_hangs(tmp_path, monkeypatch):
    settings = {"archive_url": f"file://{tmp_path}/archive", "archive_age_ms": 0}
    store = HangingStore(monkeypatch, "open_sink")

    async def main():
        storage = StorageDaemon(config_for(tmp_path / "storage", **settings), CLUSTER, None)
        stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(storage.serve(stop, ready.set_result))
            async with session(await ready, 5, 0) as owner:
                await owner.prepare()
                await owner.ask(owner.owner.append(10))
                await owner.ask(archive_range(owner, 1))
                await poll_until(store.is_called.is_set)
            stop.set()
            await serving
            assert not store.may_return.is_set()

    try:
        on_loop(main())
    finally:
        store.may_return.set()
