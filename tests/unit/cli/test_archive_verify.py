"""`archive verify` while the manifest is replaced, and when it is interrupted."""

import asyncio
import re
from threading import Event
from types import SimpleNamespace

import pytest

from tests.archived_log import CLUSTER_KEY, PARTITION_ID, write_archive, write_manifest
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.archive.archive_check import ArchiveCheck
from waltz_core.archive.store import ArchiveStore
from waltz_core.cli.archive import archive_status, store_calls
from waltz_core.cli.archive.archive_verify import _verify_partition
from waltz_core.cli.output import print_result
from waltz_core.cluster.znodes.model import ArchivedMark, MarkerState, PartitionMarker
from waltz_core.errors import ArchiveUnavailable


class ArchiveWithMarks:
    """An archive, and a coordinator that returns the next of some marks at each read."""

    def __init__(self, folder):
        self.folder = folder
        self.store = ArchiveStore(f"file://{folder}")
        self.log = write_archive(self.store)
        self.marks = [self.mark(self.log.manifest, self.log.name, self.log.crc)]
        self.check = ArchiveCheck(self.store, CLUSTER_KEY, PARTITION_ID, first=0)

    def mark(self, manifest, name, crc):
        return ArchivedMark(manifest.last, manifest.chain, 5, manifest.first, crc, name)

    async def read_partition(self, partition_id):
        assert partition_id == PARTITION_ID
        mark = self.marks[0] if len(self.marks) == 1 else self.marks.pop(0)
        return SimpleNamespace(marker=PartitionMarker(MarkerState.OPEN, 7, bytes(16), mark))

    def verify(self):
        return asyncio.run(_verify_partition(self, PARTITION_ID, self.check, print_result))


@pytest.fixture
def archive(tmp_path):
    return ArchiveWithMarks(tmp_path / "archive")


def expire_first_object(archive):
    """Return the mark of a manifest after the expiry of an object, whose file is deleted."""
    first, second = archive.log.manifest.newest_objects[:2]
    (archive.folder / first.name).unlink()
    later = archive.log.manifest.with_expiry(second.first, 0)
    return archive.mark(later, "later", write_manifest(archive.store, later, "later"))


def test_an_object_that_expires_during_the_check_is_not_reported(archive):
    archive.marks.append(expire_first_object(archive))
    found = archive.verify()
    assert (found["problems"], found["objects"]) == ([], 3)


def test_a_manifest_that_is_deleted_during_the_check_is_not_reported(archive):
    archive.marks.append(expire_first_object(archive))
    (archive.folder / archive.log.name).unlink()
    assert archive.verify()["problems"] == []


def test_a_missing_object_of_the_recorded_manifest_is_reported(archive, capsys):
    expire_first_object(archive)
    found = archive.verify()
    assert [problem["name"] for problem in found["problems"]] == [
        archive.log.manifest.newest_objects[0].name
    ]
    assert found["objects"] == 3
    captured = capsys.readouterr()
    assert "it does not exist. Hint: add --repair" in captured.out
    assert captured.out.endswith(": 1 wrong file\n")
    assert captured.err == ""


def test_a_partition_without_an_archive_has_no_problems(archive, capsys):
    archive.marks = [None]
    assert archive.verify()["problems"] == []
    assert capsys.readouterr().out == f"partition {PARTITION_ID}: no transaction is archived\n"


@pytest.mark.parametrize(
    ("wanted", "expected_ids", "objects"),
    [
        ((0, None), "0..{0}", 3),
        ((0, 0), "0..0", None),
        ((1, 10**6), "1..{0}", 3),
    ],
)
def test_verify_prints_which_ids_have_expired(archive, capsys, wanted, expected_ids, objects):
    archive.marks = [expire_first_object(archive)]
    first, last = wanted
    archive.check = ArchiveCheck(archive.store, CLUSTER_KEY, PARTITION_ID, first=first, last=last)
    found = archive.verify()
    expired = archive.log.manifest.newest_objects[0].last
    text = (
        f"transactions {expected_ids.format(expired)} have expired; the first available one is "
        f"{expired + 1}\n"
    )
    assert f"partition {PARTITION_ID}: {text}" in capsys.readouterr().out
    assert (found["last"] is None) == (objects is None)
    assert found["objects"] == (objects or 0)


def test_a_range_without_an_archived_id_is_empty(archive, capsys):
    end = archive.log.manifest.last
    archive.check = ArchiveCheck(archive.store, CLUSTER_KEY, PARTITION_ID, first=end + 1, last=None)
    assert archive.verify()["last"] is None
    assert capsys.readouterr().out.endswith(f"archived; the last archived one is {end}\n")
    everything = archive.log.manifest.with_expiry(end + 1, 0)
    mark = archive.mark(everything, "later", write_manifest(archive.store, everything, "later"))
    archive.marks = [mark]
    for first, last in ((1, None), (0, end), (0, None)):
        archive.check = ArchiveCheck(
            archive.store, CLUSTER_KEY, PARTITION_ID, first=first, last=last
        )
        # Without a range the manifest is verified.
        assert (archive.verify()["last"] is None) == ((first, last) != (0, None))


def test_an_interrupted_check_prints_where_to_continue(archive, monkeypatch, capsys):
    third = archive.log.manifest.newest_objects[2]
    open_file = archive.store.open

    async def main():
        task = asyncio.current_task()
        loop = asyncio.get_running_loop()

        def interrupted(name):
            if name == third.name:
                loop.call_soon_threadsafe(task.cancel)
            return open_file(name)

        monkeypatch.setattr(archive.store, "open", interrupted)
        await _verify_partition(archive, PARTITION_ID, archive.check, print_result)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    next_id = capsys.readouterr().err.rpartition(" --first ")[2]
    assert int(next_id) in {third.first, third.last + 1}
    assert archive.check._is_stopped


def test_after_an_error_of_the_store_the_check_prints_where_to_continue(
    archive, monkeypatch, capsys
):
    second = archive.log.manifest.newest_objects[1]
    open_file = archive.store.open

    def unreachable(name):
        if name == second.name:
            raise ArchiveUnavailable("no route")
        return open_file(name)

    monkeypatch.setattr(archive.store, "open", unreachable)
    with pytest.raises(ArchiveUnavailable):
        archive.verify()
    assert capsys.readouterr().err == (
        f"partition {PARTITION_ID}: all transactions before {second.first} are verified; to "
        f"continue, use --partition {PARTITION_ID} --first {second.first}\n"
    )


def hang_until_reported(monkeypatch):
    """Return a function that waits until the command has printed that the store hangs."""
    is_printed, lines = Event(), []

    def print_error(text):
        lines.append(text)
        is_printed.set()

    monkeypatch.setattr(store_calls, "print_error", print_error)
    monkeypatch.setattr(store_calls, "REPORT_INTERVAL_S", 0.01)
    return lambda: lines if is_printed.wait(TEST_TIMEOUT_S) else pytest.fail("nothing was printed")


def test_a_check_states_which_call_of_the_store_hangs(archive, monkeypatch):
    second = archive.log.manifest.newest_objects[1]
    wait, open_file = hang_until_reported(monkeypatch), archive.store.open
    found = []

    def hanging(name):
        if name == second.name:
            found.extend(wait())
        return open_file(name)

    monkeypatch.setattr(archive.store, "open", hanging)
    assert archive.verify()["problems"] == []
    assert re.fullmatch(
        rf"the object store at {archive.store.url} has not answered for \d+ s: reading "
        rf"{second.name}",
        found[-1],
    )


def test_the_status_states_which_call_of_the_store_hangs(archive, monkeypatch):
    wait, read = hang_until_reported(monkeypatch), archive.store.read
    found = []
    monkeypatch.setattr(archive.store, "read", lambda name: found.extend(wait()) or read(name))
    entries = asyncio.run(archive_status._read_objects(archive.store, archive.marks[0]))
    assert len(entries) == len(archive.log.manifest.newest_objects)
    assert f": reading manifest {archive.log.name} and its pages" in found[0]


def test_an_interrupted_command_does_not_wait_for_the_store(monkeypatch):
    is_over = Event()

    async def main():
        printed = asyncio.Event()
        monkeypatch.setattr(store_calls, "REPORT_INTERVAL_S", 0.01)
        monkeypatch.setattr(store_calls, "print_error", lambda _: printed.set())
        call = store_calls.call_store("s3://b", is_over.wait, lambda: ("reading m", 0))
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(call)
            await printed.wait()
            task.cancel()
        return task.cancelled()

    assert asyncio.run(main())
    is_over.set()
