"""The file of a backup: round trips, and errors for damaged or contradictory files."""

from dataclasses import replace
from uuid import UUID

import pytest

from waltz_core.access.client_ids import FIRST_ISSUED_ID
from waltz_core.access.permissions import Permissions, StoredToken
from waltz_core.archive.manifest import Manifest, ObjectEntry, decode_with_crc, encode_with_crc
from waltz_core.archive.saved_manifest import SavedManifest
from waltz_core.cluster.change.backup import Backup, PartitionBackup, merge_writes
from waltz_core.cluster.write_registry import TaskState, WriteState, WriteWithTasks
from waltz_core.cluster.znodes.restore_sources import NO_RESTORE_SOURCES, RestoreSources
from waltz_core.errors import BadFormat, ChecksumMismatch
from waltz_core.records.checksum import crc32
from waltz_core.records.record import GENESIS_CHAIN

KEY = UUID(int=7)
CHAIN = b"c" * 16
OTHER_KEY = "ab" * 16


def manifest_of(partition=0, last=9, key=KEY):
    entry = ObjectEntry("k/0/objects/o", 0, last, CHAIN, 1, 2, 3, 4, 5)
    empty = Manifest(key.bytes, partition, 0, 0, -1, GENESIS_CHAIN)
    data = empty.with_object(entry).to_bytes()
    return SavedManifest("m", crc32(data), data, ())


TASK = TaskState(5, 2, ("run",))
WRITE = WriteWithTasks(WriteState({0: 3}, 1_000, {"rows": 1}), {4: TASK})
BACKUP = Backup(
    "shop",
    KEY,
    1_700_000_000_000,
    41,
    (PartitionBackup(7, 60, 3, manifest_of()), PartitionBackup(-1, -1, -1, None)),
    {"monday": WRITE, "open": WriteWithTasks(WriteState({0: 3}, 1_000), {})},
    RestoreSources({OTHER_KEY: {0: 5, 1: -1}}),
)


def test_a_backup_survives_a_round_trip():
    assert Backup.from_bytes(BACKUP.to_bytes(), "f") == BACKUP
    assert BACKUP.marks == {0: 7, 1: -1}


ACCESS = Permissions(17, "ann", 5, bytes(range(32)), tokens={"ab" * 32: StoredToken("t", "x", 9)})


def test_a_backup_contains_the_permissions_of_its_cluster():
    taken = replace(BACKUP, permissions=ACCESS)
    assert Backup.from_bytes(taken.to_bytes(), "f") == taken
    assert "access" not in decode_with_crc(BACKUP.to_bytes(), "f")


def test_a_backup_has_the_last_issued_id_and_older_backups_have_none():
    taken = replace(BACKUP, issued_client_id=FIRST_ISSUED_ID + 7)
    assert Backup.from_bytes(taken.to_bytes(), "f") == taken
    values = dict(decode_with_crc(taken.to_bytes(), "f"))
    del values["issued_client_id"]
    assert Backup.from_bytes(encode_with_crc(values), "f") == BACKUP


def test_every_changed_byte_is_found():
    data = BACKUP.to_bytes()
    for offset in range(0, len(data), 11):
        changed = data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :]
        with pytest.raises((BadFormat, ChecksumMismatch), match="backup f"):
            Backup.from_bytes(changed, "f")
    with pytest.raises((BadFormat, ChecksumMismatch), match="backup f"):
        Backup.from_bytes(data[:-1], "f")


OPEN_STATE = WriteState({}, 1).to_bytes().decode()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"format": 2}, "expected file format 1, found 2"),
        ({"cluster": 3}, "expected field cluster of type str, found 3"),
        ({"cluster_key": "x"}, "badly formed"),
        ({"taken_ms": None}, "expected field taken_ms of type int, found None"),
        ({"client_id": 2**31}, "expected field client_id in -1..2147483647"),
        ({"client_id": True}, "expected field client_id in"),
        ({"issued_client_id": 5}, "expected field issued_client_id in 1073741823..2147483647"),
        ({"partitions": []}, "expected a backup of at least 1 partition, found 0"),
        ({"partitions": [3]}, "expected the fields of a partition, found 3"),
        ({"partitions": {}}, "expected field partitions of type list"),
        ({"writes": {"w": 3}}, "expected the fields of an exactly-once write, found 3"),
        (
            {"writes": {"w": {"state": "{}", "tasks": {}}}},
            "state of an exactly-once write: expected an object of format 1 or 2",
        ),
        ({"writes": {"w": {"state": OPEN_STATE, "tasks": {"x": ""}}}}, "invalid literal"),
        (
            {"writes": {"w": {"state": OPEN_STATE, "tasks": {"1": 2}}}},
            "expected field 1 of type str, found 2",
        ),
        ({"restored_from": "{}"}, "znode R/x/restored"),
        ({"access": None}, "expected field access of type str, found None"),
        ({"access": "{}"}, "permissions: expected format 1, found None"),
    ],
)
def test_the_error_names_invalid_values(changes, problem):
    data = encode_with_crc({**decode_with_crc(BACKUP.to_bytes(), "f"), **changes})
    with pytest.raises(BadFormat, match=f"backup f: .*{problem}".replace("..", r"\.\.")):
        Backup.from_bytes(data, "f")


@pytest.mark.parametrize(
    ("partition", "problem"),
    [
        (
            PartitionBackup(7, 60, 3, None),
            "expected a manifest of partition 0 with transactions up to 7, found none",
        ),
        (PartitionBackup(10, 60, 3, manifest_of()), "up to 10 or more, found .* up to 9"),
        (PartitionBackup(7, 60, 3, manifest_of(partition=1)), "found one of partition 1"),
        (PartitionBackup(7, 60, 3, manifest_of(key=UUID(int=8))), f"found .*cluster {UUID(int=8)}"),
    ],
)
def test_a_manifest_that_does_not_belong_to_its_partition_is_rejected(partition, problem):
    wrong = replace(BACKUP, partitions=(partition,))
    with pytest.raises(BadFormat, match=problem):
        wrong.check()
    with pytest.raises(BadFormat, match=f"backup f: .*{problem}"):
        Backup.from_bytes(wrong.to_bytes(), "f")


def test_a_damaged_manifest_is_found():
    manifest = manifest_of()._replace(file_crc=1)
    wrong = replace(BACKUP, partitions=(PartitionBackup(7, 60, 3, manifest),))
    with pytest.raises(
        ChecksumMismatch, match="backup f cannot be decoded: manifest m is corrupt: expected CRC"
    ):
        Backup.from_bytes(wrong.to_bytes(), "f")


# ---- two readings of the registry

OPEN_WRITE, DONE_WRITE = WriteState({0: 3}, 10), WriteState({0: 3}, 20, {"rows": 1})
REMOVED_WRITE = WriteState({0: 3}, 0, {})
LATER_TASK = TaskState(6, 3, ())


def merge(first, second):
    before = {} if first is None else {"w": WriteWithTasks(first, {0: TASK})}
    after = {} if second is None else {"w": WriteWithTasks(second, {1: LATER_TASK})}
    found = merge_writes(before, after)["w"]
    return found.state, sorted(found.tasks)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (DONE_WRITE, DONE_WRITE, (DONE_WRITE, [0])),
        (OPEN_WRITE, OPEN_WRITE, (OPEN_WRITE, [0, 1])),
        # A write that ended between the two readings may have rows above the marks.
        (OPEN_WRITE, DONE_WRITE, (OPEN_WRITE, [0, 1])),
        (None, DONE_WRITE, (replace(DONE_WRITE, summary=None), [1])),
        (None, OPEN_WRITE, (OPEN_WRITE, [1])),
        # A write that was removed between the readings keeps its first state and its tasks.
        (DONE_WRITE, None, (DONE_WRITE, [0])),
        (OPEN_WRITE, None, (OPEN_WRITE, [0])),
        (DONE_WRITE, REMOVED_WRITE, (DONE_WRITE, [0])),
        (OPEN_WRITE, REMOVED_WRITE, (OPEN_WRITE, [0, 1])),
        # The write was removed and begun again.
        (DONE_WRITE, OPEN_WRITE, (OPEN_WRITE, [0, 1])),
    ],
)
def test_a_backup_lists_a_write_as_done_only_if_it_ended_before_the_marks_were_read(
    first, second, expected
):
    assert merge(first, second) == expected


# ---- the source clusters of a restored cluster


def test_a_restored_cluster_includes_its_sources_only_up_to_the_restored_marks():
    first = NO_RESTORE_SOURCES.with_source("aa" * 16, {0: 9, 1: 4})
    second = first.with_source("bb" * 16, {0: 7, 1: 6})
    assert RestoreSources.from_bytes(second.to_bytes()) == second
    assert second.includes("bb" * 16, {0: 7, 1: 6})
    assert not second.includes("bb" * 16, {0: 8, 1: 6})
    assert second.includes("aa" * 16, {0: 7, 1: 4})
    assert not second.includes("aa" * 16, {0: 8, 1: 4})
    assert not second.includes("aa" * 16, {2: 0})
    assert second.includes("aa" * 16, {2: -1})
    assert not second.includes("cc" * 16, {})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'{"format": 2, "marks": {}}',
        b'{"format": 1}',
        b'{"format": 1, "marks": {"xy": {}}}',
        b'{"format": 1, "marks": {"%s": {"a": 1}}}' % OTHER_KEY.encode(),
        b'{"format": 1, "marks": {"%s": {"1": -2}}}' % OTHER_KEY.encode(),
        b'{"format": 1, "marks": {"%s": {"1": "2"}}}' % OTHER_KEY.encode(),
    ],
)
def test_a_damaged_node_is_rejected(data):
    with pytest.raises(BadFormat, match="znode R/x/restored"):
        RestoreSources.from_bytes(data)
