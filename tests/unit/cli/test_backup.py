"""`backup` reads in order and waits for the archive; `restore` rejects wrong options."""

import asyncio
import functools
import json
from uuid import UUID

import pytest

from tests.archived_log import CLUSTER_KEY, FIRST_COMMIT_MS, PARTITION_ID, write_archive
from tests.commands import run_command
from tests.unit.cluster.test_backup import ACCESS, BACKUP
from waltz_core.access.client_ids import FIRST_ISSUED_ID
from waltz_core.archive.pins import is_pinned, pin_objects
from waltz_core.archive.saved_manifest import SavedManifest
from waltz_core.archive.store import ArchiveStore
from waltz_core.cli import change_commands
from waltz_core.cli.backup import backup_command, restore_command
from waltz_core.cli.backup.backup_command import take_backup
from waltz_core.cli.backup.backup_files import BackupLocation
from waltz_core.cli.backup.restore_command import RequestedEnds
from waltz_core.cli.progress import ProgressLine
from waltz_core.cluster.change.backup import Backup, PartitionBackup
from waltz_core.cluster.change.stored_permissions import Author
from waltz_core.cluster.coordinator import Coordinator, NewCluster
from waltz_core.cluster.znodes.model import (
    ArchivedMark,
    MarkerState,
    PartitionMarker,
    PartitionMetadata,
)
from waltz_core.cluster.znodes.restore_sources import NO_RESTORE_SOURCES
from waltz_core.cluster.zookeeper.zookeeper_in_memory import MemoryZooKeeper
from waltz_core.errors import BadConfig, ChecksumMismatch, ObjectMissing

STAMP_MS = 5


def on_real_loop(scenario):
    """Run a scenario on an asyncio loop in real time, because the code uses threads."""

    @functools.wraps(scenario)
    def run(**fixtures):
        asyncio.run(scenario(**fixtures))

    return run


@pytest.fixture
def store(tmp_path):
    return ArchiveStore(f"file://{tmp_path}/archive")


async def cluster_with(log, last=None):
    """Return a cluster of four partitions, of which the last one has an archived log."""
    coordinator = Coordinator(MemoryZooKeeper(asyncio.Event).session(), "/w")
    await coordinator.create_cluster(NewCluster("shop", PARTITION_ID + 1, UUID(bytes=CLUSTER_KEY)))
    await record(coordinator, log, last)
    return coordinator


async def record(coordinator, log, last=None, name=None):
    end = log.lineage[-1]
    mark = ArchivedMark(
        end.last if last is None else last, end.chain, STAMP_MS, 0, log.crc, name or log.name
    )
    view = await coordinator.read_partition(PARTITION_ID)
    marker = PartitionMarker(MarkerState.OPEN, 60, bytes(16), mark)
    metadata = PartitionMetadata(3, 60)
    await coordinator.write_partition(PARTITION_ID, metadata, marker, view.versions)


def marks_of(last):
    return {0: -1, 1: -1, 2: -1, PARTITION_ID: last}


async def run_backup(coordinator, store, request_marks):
    return await take_backup(coordinator, request_marks, store, ProgressLine(), now_ms=77)


@on_real_loop
async def test_a_backup_has_the_state_of_zookeeper_and_the_archive(store):
    log = write_archive(store, page_entries=2)
    coordinator = await cluster_with(log)
    await coordinator.writes.begin("before", {0: 1}, 10)
    version = await coordinator.permissions.create(ACCESS, Author("ann", 5))

    async def request_marks():
        # While the command reads the marks, a write ends, another write begins, and an ID is
        # allocated.
        await coordinator.writes.finish("before", {}, 10)
        await coordinator.writes.begin("meanwhile", {0: 1}, 10)
        await coordinator.next_client_id()
        await coordinator.issued_ids.allocate_id()
        return marks_of(20)

    backup = await run_backup(coordinator, store, request_marks)
    assert (backup.name, backup.taken_ms, backup.client_id, backup.marks) == (
        "shop",
        77,
        1,
        marks_of(20),
    )
    assert backup.issued_client_id == FIRST_ISSUED_ID
    partition = backup.partitions[PARTITION_ID]
    assert (partition.session_id, partition.generation) == (60, 3)
    assert partition.manifest.manifest.last == log.lineage[-1].last
    assert len(partition.manifest.pages) == 1
    assert {name: write.state.is_done for name, write in backup.writes.items()} == {
        "before": False,
        "meanwhile": False,
    }
    assert backup.permissions == version == ACCESS
    assert Backup.from_bytes(backup.to_bytes(), "f") == backup


@on_real_loop
async def test_a_backup_waits_until_the_archive_has_reached_the_marks(store, monkeypatch):
    log = write_archive(store)
    end = log.lineage[-1].last
    coordinator = await cluster_with(log, last=10)
    waits = []

    async def sleep(_seconds):
        waits.append(1)
        if len(waits) == 3:
            await record(coordinator, log)

    monkeypatch.setattr(backup_command.asyncio, "sleep", sleep)

    async def request_marks():
        return marks_of(end)

    backup = await run_backup(coordinator, store, request_marks)
    assert len(waits) == 3
    assert backup.marks[PARTITION_ID] == end


@on_real_loop
async def test_a_backup_that_finds_its_manifest_replaced_reads_the_new_manifest(store):
    log = write_archive(store)
    coordinator = await cluster_with(log)
    renamed = "3/manifests/later"
    store.write(renamed, store.read(log.name))
    store.delete(log.name)
    reads = []

    class ReplacingCoordinator(Coordinator):
        async def read_partition(self, partition_id):
            if partition_id == PARTITION_ID:
                reads.append(1)
                if len(reads) == 3:
                    await record(coordinator, log, name=renamed)
            return await coordinator.read_partition(partition_id)

    replacing = ReplacingCoordinator(coordinator._znodes, "/w")

    async def request_marks():
        return marks_of(20)

    backup = await run_backup(replacing, store, request_marks)
    assert backup.partitions[PARTITION_ID].manifest.name == renamed


@on_real_loop
async def test_a_missing_manifest_is_an_error(store):
    log = write_archive(store)
    coordinator = await cluster_with(log)
    store.delete(log.name)

    async def request_marks():
        return marks_of(20)

    with pytest.raises(ObjectMissing, match=log.name):
        await run_backup(coordinator, store, request_marks)


# ---- the file


def test_a_backup_never_overwrites_an_existing_file(tmp_path):
    location = BackupLocation.parse(str(tmp_path / "new folder" / "b"))
    location.check_absent()
    assert location.write(BACKUP) == (tmp_path / "new folder" / "b").stat().st_size
    assert location.read() == BACKUP
    assert BackupLocation.parse(f"file://{tmp_path}/copy").name == "copy"
    assert (tmp_path / "new folder" / "b").stat().st_mode & 0o777 == 0o600
    with pytest.raises(BadConfig, match="the file for the"):
        location.check_absent()
    (tmp_path / "other").write_bytes(b"{}")
    with pytest.raises(ChecksumMismatch, match=f"backup {tmp_path}/other"):
        BackupLocation.parse(str(tmp_path / "other")).read()
    with pytest.raises(ObjectMissing):
        BackupLocation.parse(str(tmp_path / "none")).read()
    with pytest.raises(BadConfig, match="ends with a file name"):
        BackupLocation.parse("s3://bucket/folder/")


# ---- options of restore


@pytest.mark.parametrize(
    ("marks", "until", "problem"),
    [
        (["3"], None, "expected PARTITION=ID with a partition in 0..1, found '3'"),
        (["2=1"], None, "found '2=1'"),
        (["0=x"], None, "found '0=x'"),
        (["0=-2"], None, "found '0=-2'"),
        (["0=8"], None, "at most 7, the last one of partition 0 in the backup, found 8"),
        ([], "yesterday", "expected a time with a time zone such as .*, found 'yesterday'"),
        ([], "2026-11-28T10:00:00", "expected a time with a time zone"),
    ],
)
def test_invalid_limits_of_a_restore_are_rejected(marks, until, problem):
    with pytest.raises(BadConfig, match=problem.replace("..1", r"\.\.1")):
        RequestedEnds.parse(marks, until, BACKUP)


def test_limits_of_a_restore_are_parsed():
    limits = RequestedEnds.parse(["0=-1"], "1970-01-01T00:00:01.5+00:00", BACKUP)
    assert limits == RequestedEnds({0: -1}, 1_500)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (RequestedEnds({}, None), 54),  # the mark of the backup is in the batch 55..94
        (RequestedEnds({PARTITION_ID: 57}, None), 54),
        (RequestedEnds({PARTITION_ID: 54}, None), 54),
        (RequestedEnds({}, FIRST_COMMIT_MS), 50),  # 51..53 has no commit time
        (RequestedEnds({}, FIRST_COMMIT_MS - 1), None),
        (RequestedEnds({PARTITION_ID: 3}, FIRST_COMMIT_MS), 3),
        (RequestedEnds({PARTITION_ID: -1}, None), None),
        (RequestedEnds({PARTITION_ID: 1}, None), None),  # the first batch is 0..2
    ],
)
def test_a_restored_partition_ends_at_the_last_batch_end_within_the_limits(store, limits, expected):
    log = write_archive(store, folder=f"{UUID(bytes=CLUSTER_KEY)}/{PARTITION_ID}")
    saved = SavedManifest.read(store, log.name, log.crc)
    assert [entry.last for entry in log.lineage][:7] == [2, 3, 43, 50, 53, 54, 94]
    restoration = restore_command._Restoration(store, bytes(16), 9, limits, False, [])
    end = restoration.restore_partition(PARTITION_ID, PartitionBackup(60, 8, 1, saved))
    assert (None if end is None else end.last) == expected
    if end is not None:
        assert end.manifest.startswith(f"{UUID(int=0)}/{PARTITION_ID}/manifests/")
    assert restoration.restore_partition(0, PartitionBackup(-1, 8, 1, None)) is None


def test_a_failed_restoration_leaves_neither_a_cluster_nor_a_pin(tmp_path, monkeypatch, store):
    """The objects of the backup do not exist."""
    zookeeper = MemoryZooKeeper(asyncio.Event)
    monkeypatch.setattr(restore_command, "pin_objects", pinned := RecordingPins())
    error = failed_restore(BACKUP, zookeeper, tmp_path, monkeypatch, store)
    assert "found no objects of partition 0 of cluster" in error
    assert pinned.names
    assert not is_pinned(store, BACKUP.cluster_key.bytes)
    assert "/w" not in zookeeper.dump()


@pytest.mark.parametrize("access", [None, ACCESS])
def test_a_restoration_prints_the_revision_of_its_permissions(tmp_path, monkeypatch, store, access):
    empty = PartitionBackup(-1, -1, -1, None)
    backup = Backup(
        "shop", UUID(bytes=CLUSTER_KEY), 1, 41, (empty,), {}, NO_RESTORE_SOURCES, access
    )
    for options in ((), ("--json",)):
        zookeeper = MemoryZooKeeper(asyncio.Event)
        result = run_restore(backup, zookeeper, tmp_path, monkeypatch, store, *options)
        assert result.returncode == 0, result.stderr
        assert ("/w/x/access" in zookeeper.dump()) is (access is not None)
        if options:
            shown = json.loads(result.stdout)["access"]
            expected = {"revision": 17, "changed_by": "ann", "changed_ms": 5}
            assert shown == (None if access is None else expected)
        else:
            line = "permissions of revision 17, written at 1970-01-01T00:00:00Z by ann (grants: 0"
            assert (line in result.stdout) is (access is not None)
            assert ("revoked after the backup are valid again" in result.stdout) is (
                access is not None
            )


def failed_restore(backup, zookeeper, tmp_path, monkeypatch, store, *options):
    """Run `restore` for a new cluster at /w; return its error."""
    result = run_restore(backup, zookeeper, tmp_path, monkeypatch, store, *options, "--json")
    assert result.returncode == 1
    return result.stderr


def run_restore(backup, zookeeper, tmp_path, monkeypatch, store, *options):
    """Run `restore` for a new cluster at /w."""
    file = tmp_path / "b"
    file.write_bytes(backup.to_bytes())

    class Session:
        async def __aenter__(self):
            return Coordinator(zookeeper.session(), "/w")

        async def __aexit__(self, *_):
            pass

    monkeypatch.setattr(change_commands, "open_command_session", lambda _connect: Session())
    options = (*options, "--connect", "zk:1/w", "--archive", store.url, "--backup", str(file))
    return run_command("restore", *options, "--storage", "a:1:2")


@pytest.mark.parametrize("options", [(), ("--same-key",)])
def test_the_second_of_two_restorations_fails_and_leaves_no_files(
    tmp_path, monkeypatch, store, options
):
    log = write_archive(store, folder=f"{UUID(bytes=CLUSTER_KEY)}/{PARTITION_ID}")
    saved = SavedManifest.read(store, log.name, log.crc)
    empty = PartitionBackup(-1, -1, -1, None)
    partitions = (*[empty] * PARTITION_ID, PartitionBackup(60, 8, 1, saved))
    backup = Backup("shop", UUID(bytes=CLUSTER_KEY), 1, 41, partitions, {}, NO_RESTORE_SOURCES)
    create, before = Coordinator.create_restored_cluster, files_of(tmp_path / "archive")
    written = []

    async def create_later(self, new, restored):
        written.extend(files_of(tmp_path / "archive") - before)
        await create(self, new, restored)  # the other command
        await create(self, new, restored)

    monkeypatch.setattr(Coordinator, "create_restored_cluster", create_later)
    zookeeper = MemoryZooKeeper(asyncio.Event)
    error = failed_restore(backup, zookeeper, tmp_path, monkeypatch, store, *options)
    assert "a cluster exists already at" in error
    assert written
    assert files_of(tmp_path / "archive") == before
    assert "/w" in zookeeper.dump(), "the cluster of the first restoration"


@pytest.mark.parametrize(("options", "remains"), [((), False), (("--same-key",), True)])
def test_a_pin_that_another_restoration_may_need_is_not_deleted(
    tmp_path, monkeypatch, store, options, remains
):
    """Restorations with the same key share the pins of a third cluster."""

    def pin_third(store, _backup, key):
        return [pin_objects(store, bytes(16), key)]

    monkeypatch.setattr(restore_command, "_pin_objects", pin_third)
    zookeeper = MemoryZooKeeper(asyncio.Event)
    failed_restore(BACKUP, zookeeper, tmp_path, monkeypatch, store, *options)
    assert is_pinned(store, bytes(16)) is remains


def files_of(folder):
    return {path for path in folder.rglob("*") if path.is_file()}


class RecordingPins:
    """Writes pins, and records their names."""

    def __init__(self):
        self.names = []

    def __call__(self, store, source_key, cluster_key):
        self.names.append(pin_objects(store, source_key, cluster_key))
        assert is_pinned(store, source_key)
        return self.names[-1]


def test_the_store_of_a_backup_location_keeps_the_options_of_the_url():
    location = BackupLocation.parse("s3://bucket/backups/b1?endpoint_override=a:1&scheme=http")
    assert location.name == "b1"
    assert location.store.url == "s3://bucket/backups?endpoint_override=a:1&scheme=http"
    with pytest.raises(BadConfig, match="ends with a file name"):
        BackupLocation.parse("s3://bucket/backups/?scheme=http")
