"""Crashes while a partition is archived in a directory: power is lost, or processes are killed.

An archiver, an expiry or a collection makes changes. At each change, the test writes each state
that a crash may leave to a real directory (`archive_recording.py`).

Rules, of decision 047:
    1. The archive has all files to which ZooKeeper refers: the manifest, its pages, and the objects
       that have not expired. Their chain is that of the log (AR 3). The test writes to ZooKeeper
       after each call.
    2. A file with its final name is complete.
    3. A later session archives the next range and collects; then all files are listed (AR 16).
"""

from collections import Counter
from random import Random
from typing import NamedTuple

import pytest

from tests.crash.archive_recording import ARCHIVE, ROOT, Recorder
from tests.unit.storage.logs import make_batches
from waltz_core.archive import manifest as manifest_module
from waltz_core.archive.archive_check import ArchiveCheck, RecordedArchive
from waltz_core.archive.file_names import TEMPORARY_SUFFIX
from waltz_core.archive.garbage_collection import GarbageCollectionJob, collect_garbage
from waltz_core.archive.manifest import Manifest, ManifestPage, RecordedManifest
from waltz_core.archive.manifest_jobs import BatchRun, ExpiryJob, UploadJob
from waltz_core.archive.upload import expire, upload
from waltz_core.records.record import GENESIS_CHAIN
from waltz_sim.world.crash import (
    DiskState,
    KeepAll,
    KeepNone,
    PositionMarker,
    Sync,
    SyncDirectory,
    keep_choices,
    sync_positions,
    with_delayed_sync,
    without_change,
)

KEY, PARTITION = bytes(range(16)), 3
COUNTS = (2, 3)
NOW_MS = 1_700_000_000_000
# The store uses the time of this machine, so all replaced files are old enough.
LATER_MS = 1 << 43
RANDOM_SURVIVALS = 8
STATES_MIN = 2_000
KILL_SHARES = 4
KILLS_MIN = 30
EVERY_VERIFIED = 8


class ArchiveRecord(NamedTuple):
    """The record in ZooKeeper: IDs first..last, and the manifest."""

    first: int = 0
    last: int = -1
    chain: bytes = GENESIS_CHAIN
    manifest: str = ""
    crc: int = 0

    @property
    def as_manifest(self):
        return RecordedManifest(PARTITION, self.last, self.chain, self.manifest, self.crc)


class Owner:
    """The archiver of a session: its requests to a storage, and its records in ZooKeeper."""

    def __init__(self, recorder, session, recorded):
        self.recorder, self.session, self.recorded = recorder, session, recorded
        self.store = recorder.store()
        self._attempt = 0

    def _origin(self):
        self._attempt += 1
        return self.session, bytes([self.session]) * 16, self._attempt

    def _record(self, **changes):
        self.recorded = self.recorded._replace(**changes)
        self.recorder.mark_position(self.recorded)

    def archive(self, *, is_recorded=True):
        first, chain = self.recorded.last + 1, self.recorded.chain
        batches = BatchRun(*make_batches(first, COUNTS, chain, session=self.session))
        present = (first, chain, self.recorded.manifest, self.recorded.crc)
        job = UploadJob(PARTITION, *self._origin(), *present, (batches,))
        uploaded = upload(self.store, KEY, job)
        if is_recorded:
            self._record(
                last=uploaded.last,
                chain=uploaded.chain,
                manifest=uploaded.name,
                crc=uploaded.file_crc,
            )

    def expire(self, before):
        job = ExpiryJob(*self._origin(), self.recorded.as_manifest, before, 0, 0)
        new_manifest = expire(self.store, KEY, job, now_ms=NOW_MS)
        self._record(
            first=new_manifest.first, manifest=new_manifest.name, crc=new_manifest.file_crc
        )

    def collect_garbage(self):
        job = GarbageCollectionJob(*self._origin(), self.recorded.as_manifest)
        return collect_garbage(self.store, KEY, job, now_ms=LATER_MS)


def record_archiving(recorder):
    """Record two sessions of archiving, with pages, an unrecorded attempt and an expiry."""
    with recorder.recording():
        first = Owner(recorder, 1, ArchiveRecord())
        first.archive()
        first.archive(is_recorded=False)
        for _ in range(4):
            first.archive()
        assert first.collect_garbage().file_count > 0
        second = Owner(recorder, 2, first.recorded)
        second.archive()
        second.expire(before=sum(COUNTS) * 3)
        assert second.collect_garbage().file_count > 0
        second.archive()
    return recorder


def archive_after_a_kill(directory, recorder, changes, recorded, session):
    """Archive and collect after all processes were killed; return the record in ZooKeeper."""
    again = Recorder(directory, changes, recorder.complete)
    with again.recording():
        owner = Owner(again, session, recorded)
        owner.archive()
        owner.collect_garbage()
    return again, owner.recorded


class StateLost(AssertionError):
    """A crash has led to a state that is not permitted."""


class CrashChecks:
    """Checks the files that crashes leave."""

    def __init__(self, complete):
        self.complete = complete
        self.counts = Counter()

    def files_of_manifest(self, recorded):
        """Return the files that a manifest needs (rule 1)."""
        if not recorded.manifest:
            return set()
        head = Manifest.from_bytes(self.complete[recorded.manifest], recorded.manifest)
        pages = [ManifestPage.from_bytes(self.complete[page.name], "") for page in head.pages]
        entries = [*head.newest_objects, *(entry for page in pages for entry in page.entries)]
        objects = {entry.name for entry in entries if entry.last >= recorded.first}
        return {recorded.manifest, *(page.name for page in head.pages), *objects}

    def check(self, contents, recorded, where):
        self.counts["states"] += 1
        names = names_in(contents)
        for name, data in names.items():
            if not name.endswith(TEMPORARY_SUFFIX) and data != self.complete[name]:
                raise StateLost(f"{where}: {name} is not complete")
        if missing := self.files_of_manifest(recorded) - names.keys():
            raise StateLost(f"{where}: {sorted(missing)} are not there")

    def lose_power(self, changes, begin=0, *, keeps=None):
        """Lose power after each change from a position on."""
        disk_state, recorded = DiskState(), ArchiveRecord()
        for position, change in enumerate(changes):
            disk_state.apply_change(change)
            if isinstance(change, PositionMarker):
                recorded = change.what
            if position < begin:
                continue
            rng = Random(position)
            for keep in keeps or keep_choices(disk_state, rng, random_count=RANDOM_SURVIVALS):
                where = f"power lost after change {position} ({change!r:.80})"
                self.check(disk_state.contents_after_crash(keep), recorded, where)


def names_in(contents):
    """Return the archive's files on a disk after a crash, by name."""
    base = ROOT / ARCHIVE
    return {str(path.relative_to(base)): data for path, data in contents.files.items()}


@pytest.fixture(scope="module")
def recorder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(manifest_module, "ENTRIES_PER_PAGE", 2)
        yield record_archiving(Recorder(tmp_path_factory.mktemp("archived")))


def test_the_archive_is_complete_after_a_power_loss_at_any_change(recorder, record_property):
    crashes = CrashChecks(recorder.complete)
    crashes.lose_power(recorder.changes)
    record_property("crash of an archive: states", crashes.counts["states"])
    assert crashes.counts["states"] > STATES_MIN
    last = [change.what for change in recorder.changes if isinstance(change, PositionMarker)][-1]
    verify(recorder.store(), last)


def verify(store, recorded):
    """Read every recorded object, and verify its records."""
    check = ArchiveCheck(store, KEY, PARTITION, first=recorded.first, last=None)
    check.begin(RecordedArchive(*recorded))
    while check.check_next_file():
        pass
    assert check.bad_files == []
    assert check.next_id == recorded.last + 1


@pytest.mark.parametrize("share", range(KILL_SHARES))
def test_the_archive_is_complete_after_a_kill_at_any_change_and_a_later_power_loss(
    recorder, tmp_path, share, record_property
):
    recorded, session = ArchiveRecord(), 10
    kills = 0
    for position, change in enumerate(recorder.changes):
        if isinstance(change, PositionMarker):
            recorded = change.what
        if position % KILL_SHARES != share:
            continue
        kills += 1
        before = recorder.changes[: position + 1]
        again, now = archive_after_a_kill(tmp_path / "again", recorder, before, recorded, session)
        crashes = CrashChecks(again.complete)
        crashes.lose_power(again.changes, position + 1, keeps=(KeepNone(), KeepAll()))
        assert set(again.store().list_names("")) == crashes.files_of_manifest(now), (
            f"killed after {change}"
        )
        if kills % EVERY_VERIFIED == 0:
            verify(again.store(), now)
    record_property("crash of an archive: kills", kills)
    assert kills > KILLS_MIN


def is_detected(recorder, changes):
    """Return whether a loss of power shows that a program with these changes has a fault."""
    try:
        CrashChecks(recorder.complete).lose_power(changes, keeps=(KeepNone(), KeepAll()))
    except StateLost:
        return True
    return False


def test_a_file_renamed_before_its_sync_is_detected(recorder):
    changes = recorder.changes
    files = [at for at in sync_positions(changes) if isinstance(changes[at], Sync)]
    assert len(files) > len(recorder.complete) / 2
    for position in files:
        for mutated in (without_change(changes, position), with_delayed_sync(changes, position)):
            assert is_detected(recorder, mutated), changes[position]


def test_an_unsynced_folder_is_detected(recorder):
    changes = recorder.changes
    folders = {change.path for change in changes if isinstance(change, SyncDirectory)}
    assert len(folders) == 6  # from the archive's parent down to the folder of the objects
    for folder in sorted(folders):
        remaining_changes = [
            change
            for change in changes
            if not isinstance(change, SyncDirectory) or change.path != folder
        ]
        assert is_detected(recorder, remaining_changes), folder
