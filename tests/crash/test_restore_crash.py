"""`waltz-core restore` is killed after each step or loses power, and is run again.

The steps of a restore are changes of the archive's directory and writes to ZooKeeper. The second
run finds the files and znodes of the steps before the kill or the loss of power.

Rules:
    1. The second run has one of three results:
       - it restores the cluster,
       - it reports that the cluster exists, because the first run was complete,
       - it reports that the operator must first delete remains of the first run.
    2. The manifest of a restored cluster, and the pin that keeps its objects, are durable before
       ZooKeeper refers to them.
"""

import asyncio
from uuid import UUID

import pytest

from tests.archived_log import CLUSTER_KEY, PARTITION_ID, write_archive
from tests.commands import run_command
from tests.crash.archive_recording import Recorder
from tests.unit.cluster.test_backup import TASK
from waltz_core.archive.archive_check import ArchiveCheck, RecordedArchive
from waltz_core.archive.pins import is_pinned
from waltz_core.archive.saved_manifest import SavedManifest
from waltz_core.cli import change_commands
from waltz_core.cluster.change import creation
from waltz_core.cluster.change.backup import Backup, PartitionBackup
from waltz_core.cluster.write_registry import WriteState, WriteWithTasks
from waltz_core.cluster.znodes.restore_sources import NO_RESTORE_SOURCES
from waltz_core.cluster.zookeeper.zookeeper_in_memory import MemoryZooKeeper
from waltz_sim.world.crash import DiskState, KeepNone, PositionMarker, changes_of

ROOT_NODE = "/waltz/shop"
END = 94  # the end of the log's second batch, which is longer than a row group
WRITE = WriteWithTasks(WriteState({PARTITION_ID: 3}, 1_000), dict.fromkeys(range(20), TASK))


class RecordedZooKeeper(MemoryZooKeeper):
    """Records each write among the changes of the archive."""

    def __init__(self, recorder):
        super().__init__(asyncio.Event)
        for change in recorder.changes:
            if isinstance(change, PositionMarker):
                super().apply_operations(*change.what)
        self._recorder = recorder

    def apply_operations(self, operations, owner):
        versions = super().apply_operations(operations, owner)
        self._recorder.mark_position((operations, owner))
        return versions


class RestoredWorld:
    """The archive and ZooKeeper after some steps, and the commands that run on them."""

    def __init__(self, directory, changes, monkeypatch):
        self.recorder = Recorder(directory / "recorded", changes)
        self.zookeeper = RecordedZooKeeper(self.recorder)
        self.backup = directory / "backup"
        monkeypatch.setattr(change_commands, "open_command_session", lambda _connect: self)

    async def __aenter__(self):
        return self.zookeeper.coordinator(ROOT_NODE)

    async def __aexit__(self, *_):
        pass

    def restore(self):
        """Run the command; return its exit code and its error."""
        words = ("--connect", f"zk:1{ROOT_NODE}", "--backup", str(self.backup))
        store = self.recorder.store()
        with self.recorder.recording():
            ran = run_command(
                "restore", *words, "--archive", store.url, "--storage", "a:1:2", "--json"
            )
        return ran.returncode, ran.stderr

    def delete_remains(self):
        asyncio.run(self.zookeeper.coordinator(ROOT_NODE).delete_cluster(lambda *_: None))

    def read(self):
        """Return the cluster's key and its archived transactions."""

        async def read():
            coordinator = self.zookeeper.coordinator(ROOT_NODE)
            marker = (await coordinator.read_partition(PARTITION_ID)).marker
            spark_write = (await coordinator.writes.read_all())["monday"]
            assert spark_write.tasks == WRITE.tasks
            return (await coordinator.read_cluster()).store.cluster_key, marker.archived

        return asyncio.run(read())

    def check(self):
        """Check that the cluster is restored (rules 1 and 2)."""
        key, mark = self.read()
        assert mark.last == END
        store = self.recorder.store()
        check = ArchiveCheck(store, key.bytes, PARTITION_ID, first=0, last=None)
        check.begin(
            RecordedArchive(mark.first, mark.last, mark.chain, mark.manifest, mark.manifest_crc)
        )
        while check.check_next_file():
            pass
        assert (check.bad_files, check.next_id) == ([], END + 1)
        assert is_pinned(store, CLUSTER_KEY)


@pytest.fixture
def backed_up(tmp_path, monkeypatch):
    """Return the changes that create an archive, and a backup of it."""
    monkeypatch.setattr(creation, "STEP_OPERATIONS_MAX", 20)
    recorder = Recorder(tmp_path / "recorded")
    with recorder.recording():
        log = write_archive(recorder.store(), folder=f"{UUID(bytes=CLUSTER_KEY)}/{PARTITION_ID}")
    saved = SavedManifest.read(recorder.store(), log.name, log.crc)
    empty = PartitionBackup(-1, -1, -1, None)
    partitions = (*[empty] * PARTITION_ID, PartitionBackup(END, 60, 3, saved))
    backup = Backup(
        "shop", UUID(bytes=CLUSTER_KEY), 1, 41, partitions, {"monday": WRITE}, NO_RESTORE_SOURCES
    )
    (tmp_path / "backup").write_bytes(backup.to_bytes())
    return recorder.changes


def test_a_restore_killed_after_any_step_can_be_repeated(backed_up, tmp_path, monkeypatch):
    first = RestoredWorld(tmp_path, backed_up, monkeypatch)
    assert first.restore() == (0, "")
    first.check()
    steps = first.recorder.changes[len(backed_up) :]
    outcomes = []
    for count in range(len(steps) + 1):
        again = RestoredWorld(tmp_path, [*backed_up, *steps[:count]], monkeypatch)
        code, error = again.restore()
        outcomes.append(outcome_of(code, error))
        if outcomes[-1] == "remains":
            again.delete_remains()
            assert again.restore() == (0, "")
        again.check()
    # The command first writes files, and then to ZooKeeper. Its last write creates the cluster.
    kinds = sorted(set(outcomes), key=outcomes.index)
    assert kinds == ["restored", "remains", "exists"]
    assert outcomes == sorted(outcomes, key=kinds.index)
    assert outcomes.count("restored") > 10


def outcome_of(code, error):
    if code == 0:
        return "restored"
    assert code == 1, error
    if "the remains of an unfinished one" in error:
        assert "delete the znodes with `waltz-core cluster delete`." in error
        return "remains"
    assert "a cluster exists already at" in error
    return "exists"


def test_a_restore_syncs_its_archive_files_before_it_writes_to_zookeeper(
    backed_up, tmp_path, monkeypatch
):
    first = RestoredWorld(tmp_path, backed_up, monkeypatch)
    assert first.restore() == (0, "")
    steps = first.recorder.changes
    written = next(
        index
        for index in range(len(backed_up), len(steps))
        if isinstance(steps[index], PositionMarker)
    )
    disk_state = DiskState()
    for change in steps[:written]:
        disk_state.apply_change(change)
    contents = disk_state.contents_after_crash(KeepNone())
    assert any("pins" in file.parts for file in contents.files)
    writes = [step for step in steps[written:] if isinstance(step, PositionMarker)]
    assert len(writes) > 2
    RestoredWorld(tmp_path, [*changes_of(contents), *writes], monkeypatch).check()
